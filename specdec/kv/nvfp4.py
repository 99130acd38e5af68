"""Four-bit floats (E2M1) in blocks of 16 with an E4M3 scale each: NVIDIA's NVFP4, with a scale per row above it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.errors import ShapeError
from specdec.kv._checks import require_floating, require_parts, require_rows
from specdec.ops._checks import require_whole
from specdec.ops.quantize import NVFP4_GROUP, from_nvfp4, to_nvfp4


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
        return 4 + 8 / NVFP4_GROUP + 32 / dim

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """Nothing to learn."""
        return ()

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """Packed codes `[..., dim / 2]`, block scales `[..., dim / 16]`, row scales `[..., 1]`."""
        require_rows("NVFP4", rows)
        _check(rows.shape[-1])
        return to_nvfp4(rows)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """Codes times both scales."""
        require_floating("NVFP4", dtype)
        require_parts("NVFP4", parts, (torch.uint8,), 2)
        return from_nvfp4(*parts).to(dtype)


def _check(dim: int) -> None:
    require_whole("NVFP4", dim=dim)
    if dim % NVFP4_GROUP:
        raise ShapeError(
            f"NVFP4: rows of {dim} numbers have no whole blocks of {NVFP4_GROUP}; use Int8 for this model."
        )
