"""Four-bit floats (E2M1) in blocks of 16 with an E4M3 scale each: NVIDIA's NVFP4, with a scale per row above it."""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.errors import ShapeError
from specdec.kv.int4 import pack_nibbles, unpack_nibbles

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_SCALE = 448.0


@dataclass(frozen=True, slots=True)
class NVFP4:
    """NVFP4: E2M1 codes, an E4M3 scale per 16 channels, a float32 scale per token and head.

    >>> from specdec import kv
    >>> kv.NVFP4().bits_per_element(128)
    4.75
    """

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a stored number, scales included, for rows of `dim` numbers."""
        _check(dim)
        return 4 + 8 / BLOCK + 32 / dim

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """Nothing to learn."""
        return ()

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """Packed codes `[..., dim / 2]`, block scales `[..., dim / 16]`, row scales `[..., 1]`."""
        _check(rows.shape[-1])
        blocks = rows.float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        row_scales = largest.amax(-1, keepdim=True) / (VALUES[-1] * _LARGEST_SCALE)
        row_steps = row_scales.masked_fill(row_scales == 0, 1)
        scales = (largest / (VALUES[-1] * row_steps)).clamp_max(_LARGEST_SCALE).to(torch.float8_e4m3fn)
        steps = (scales.float() * row_steps).unsqueeze(-1)
        packed = pack_nibbles(_to_e2m1(blocks / steps.masked_fill(steps == 0, 1)).flatten(-2))
        return packed, scales.view(torch.uint8), row_scales

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """Codes times both scales."""
        packed, scales, row_scales = parts
        codes = unpack_nibbles(packed)
        sizes = torch.tensor(VALUES, device=packed.device)[(codes & 7).int()]
        numbers = torch.where(codes > 7, -sizes, sizes).unflatten(-1, (-1, BLOCK))
        rows: Tensor = (numbers * (scales.view(torch.float8_e4m3fn).float() * row_scales).unsqueeze(-1)).flatten(-2)
        return rows.to(dtype)


def _to_e2m1(numbers: Float[Tensor, "..."]) -> Tensor:
    """Nearest E2M1 code, ties to the even one; bit 3 is the sign."""
    sizes = numbers.abs()
    codes = torch.zeros_like(sizes, dtype=torch.uint8)
    for code, (lower, upper) in enumerate(itertools.pairwise(VALUES)):
        middle = (lower + upper) / 2
        codes += (sizes >= middle if code % 2 else sizes > middle).to(torch.uint8)
    return codes | ((numbers < 0).to(torch.uint8) << 3)


def _check(dim: int) -> None:
    if dim % BLOCK:
        raise ShapeError(f"NVFP4: rows of {dim} numbers have no whole blocks of {BLOCK}; use Int8 for this model.")
