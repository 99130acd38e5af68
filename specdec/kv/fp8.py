"""Eight-bit floats (E4M3): a constant relative error, whatever the range of a row."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.kv._checks import require_fitted, require_floating, require_parts, require_prompt, require_rows
from specdec.ops._checks import require_whole
from specdec.ops.quantize import LARGEST_E4M3, to_e4m3, to_fp8

_HEADROOM = 2.0  # rows of a text may exceed those of its prompt; the range of a float costs no precision


@dataclass(frozen=True, slots=True)
class FP8:
    """FP8 E4M3 with one scale per token and head, or one per head.

    A rotation does not help it: the error of a float is relative to each number, not to the largest of its row.

    Args:
        scale: `token`: one float32 scale per token and head. `head`: one per batch row and head, from the largest
            number of the prompt with room above it; what exceeds it later is clamped.

    >>> from specdec import kv
    >>> kv.FP8().bits_per_element(128), kv.FP8(scale="head").bits_per_element(128)
    (8.25, 8.0)
    """

    scale: Literal["token", "head"] = "token"

    def __post_init__(self) -> None:
        if self.scale not in ("token", "head"):
            raise UnsupportedError(f"FP8: scale must be 'token' or 'head', got {self.scale!r}.")

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a stored number, scales of tokens included, for rows of `dim` numbers."""
        require_whole("FP8", dim=dim)
        return 8 + 32 / dim if self.scale == "token" else 8.0

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """With one scale per head: that scale `[batch, heads, 1, 1]`."""
        if self.scale == "token":
            return ()
        require_prompt("FP8(scale='head')", rows, real)
        exact = rows.float().abs()
        if real is not None:
            exact = exact.masked_fill(~real[:, None, :, None], 0)
        largest = exact.amax((-1, -2), keepdim=True) * (_HEADROOM / LARGEST_E4M3)
        return (largest.masked_fill(largest == 0, 1),)

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """Codes `[..., dim]`, and scales `[..., 1]` unless one per head was fitted."""
        require_rows("FP8", rows)
        if self.scale == "head":
            require_fitted("FP8(scale='head')", state, rows)
            return (to_e4m3(rows.float() / state[0]),)
        return to_fp8(rows)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """Codes times scales."""
        require_floating("FP8", dtype)
        require_parts("FP8", parts, (torch.uint8, torch.float8_e4m3fn), 0 if self.scale == "head" else 1)
        if self.scale == "head":
            require_fitted("FP8(scale='head')", state, parts[0])
        scales = state[0] if self.scale == "head" else parts[1]
        return (parts[0].view(torch.float8_e4m3fn).float() * scales).to(dtype)
