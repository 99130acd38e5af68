"""A rotation before encoding: outlier channels are spread over the row, where a common scale can hold them.

Rotating keys and queries by the same orthonormal matrix changes no score, so a kernel rotates the few queries instead
of the many keys (QuaRot, arXiv 2404.00456). Here `decode` rotates back, which gives the same.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.kv._checks import require_codec, require_floating, require_rows
from specdec.ops.hadamard import hadamard
from specdec.protocols import KVCodec


@dataclass(frozen=True, slots=True)
class Hadamard:
    """Rotates rows by a normalised Hadamard matrix and encodes them with `inner`.

    Args:
        inner: the codec of the rotated rows.

    >>> from specdec import kv
    >>> rows = torch.randn(64, 64) + 20 * torch.nn.functional.one_hot(torch.tensor(3), 64)  # one outlier channel
    >>> def error(codec):
    ...     return (codec.decode(codec.encode(rows)) - rows).norm()
    >>> bool(error(kv.Hadamard(kv.Int8())) < error(kv.Int8()) / 2)
    True
    """

    inner: KVCodec

    def __post_init__(self) -> None:
        require_codec("Hadamard", self.inner)

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """As `inner`: a rotation stores nothing."""
        return self.inner.bits_per_element(dim, dtype)

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """What `inner` learns from rotated rows."""
        require_rows("Hadamard", rows)
        return self.inner.fit(hadamard(rows), real)

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """The rotated rows, encoded."""
        require_rows("Hadamard", rows)
        return self.inner.encode(hadamard(rows), state)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """The decoded rows, rotated back."""
        require_floating("Hadamard", dtype)
        return hadamard(self.inner.decode(parts, state, torch.promote_types(dtype, torch.float32))).to(dtype)
