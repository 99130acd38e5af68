"""What is a codec and what is not."""

from typing import Any

import torch
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import KVCodec


def require_fitted(where: str, state: tuple[Tensor, ...]) -> None:
    """Raises `ShapeError` where a codec that learns from the rows of a prompt was not told what it has learnt."""
    if not state:
        raise ShapeError(
            f"{where} keeps a state for each text: state = codec.fit(rows) of the prompt, then encode(rows, state) and "
            "decode(parts, state)."
        )


def require_codec(where: str, codec: Any) -> None:
    """Raises `UnsupportedError` for a class, a name or another object in place of a codec."""
    if isinstance(codec, type) or not isinstance(codec, KVCodec):
        raise UnsupportedError(f"{where} takes a codec such as kv.Int8(), got {codec!r}.")


def require_rows(where: str, rows: Any) -> None:
    """Raises `ShapeError` for what cannot be encoded."""
    if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.dim() == 0:
        came = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ShapeError(f"{where}: rows must be a tensor [..., dim] of floating-point numbers, got {came}.")


def require_parts(where: str, parts: Any, codes: tuple[torch.dtype, ...], others: int) -> None:
    """Raises `ShapeError` for what `encode` does not give: codes, and so many tensors that belong to them."""
    several = isinstance(parts, (tuple, list)) and all(isinstance(part, Tensor) for part in parts)
    fits = several and len(parts) == 1 + others and parts[0].dtype in codes
    if not (fits and all(part.shape[:-1] == parts[0].shape[:-1] for part in parts)):
        came = [(part.dtype, list(part.shape)) for part in parts] if several else type(parts).__name__
        raise ShapeError(
            f"{where}: decode takes what encode gives, a tuple of codes ({' or '.join(map(str, codes))}) and {others} "
            f"tensors that belong to them, of the same shape up to the last dimension, got {came}."
        )
