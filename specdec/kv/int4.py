"""Four-bit integers with a scale and a zero point for each group of neighbouring channels."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.kv._checks import require_floating, require_parts, require_rows
from specdec.ops._checks import require_whole
from specdec.ops.quantize import from_int4, to_int4


@dataclass(frozen=True, slots=True)
class Int4:
    """INT4, asymmetric, a float16 scale and zero point per group of channels of a token and head.

    Two codes share a byte: the low half holds the first half of the row, the high half the second. Numbers beyond the
    range of float16 (65,504) are clamped.

    A channel that sits far from zero, as keys of models with a bias have, would take the range of its group:
    `Centered(Hadamard(Int4()))` is the form for keys.

    Args:
        group: channels that share a scale.

    >>> from specdec import kv
    >>> kv.Int4().bits_per_element(128)
    5.0
    """

    group: int = 32

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group < 1:
            raise UnsupportedError(f"Int4: group must be 1 or more channels, got {self.group!r}.")

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a stored number, scales and zero points included, for rows of `dim` numbers."""
        self._check(dim)
        return 4 + 32 / self.group

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """Nothing to learn."""
        return ()

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """Packed codes `[..., dim / 2]`, scales and zero points `[..., groups]`."""
        require_rows("Int4", rows)
        self._check(rows.shape[-1])
        return to_int4(rows, self.group)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """Codes times scales plus zero points."""
        require_floating("Int4", dtype)
        require_parts("Int4", parts, (torch.uint8,), 2)
        return from_int4(*parts).to(dtype)

    def _check(self, dim: int) -> None:
        require_whole("Int4", dim=dim)
        if dim % 2:
            raise ShapeError(f"Int4: two numbers share a byte, so rows cannot have {dim} of them; use Int8 for these.")
        if dim % self.group:
            raise ShapeError(
                f"Int4: rows of {dim} numbers have no whole groups of {self.group}; give it a group that divides "
                f"{dim}, such as Int4(group={math.gcd(dim, self.group)})."
            )
