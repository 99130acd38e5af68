"""Eight-bit integers with a scale for each row."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.kv._checks import require_floating, require_parts, require_rows
from specdec.ops._checks import require_whole
from specdec.ops.quantize import to_int8


@dataclass(frozen=True, slots=True)
class Int8:
    """INT8, symmetric, one float32 scale per token and head.

    Alone it suits values. Keys have outlier channels that would take the whole range: `Hadamard(Int8())` spreads them.

    >>> from specdec import kv
    >>> codec, rows = kv.Int8(), torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    >>> codec.decode(codec.encode(rows)).sub(rows).abs().max().item() <= 2.0 / 127 / 2
    True
    """

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a stored number, scales included, for rows of `dim` numbers."""
        require_whole("Int8", dim=dim)
        return 8 + 32 / dim

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """Nothing to learn."""
        return ()

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """Codes `[..., dim]` and scales `[..., 1]`."""
        require_rows("Int8", rows)
        return to_int8(rows)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """Codes times scales."""
        require_floating("Int8", dtype)
        require_parts("Int8", parts, (torch.int8,), 1)
        codes, scales = parts
        return (codes * scales).to(dtype)
