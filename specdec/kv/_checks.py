"""What is a codec and what is not."""

from typing import Any

import torch
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops._checks import booleans, described
from specdec.protocols import KVCodec


def require_fitted(where: str, state: Any, rows: Any) -> None:
    """Raises `ShapeError` where a codec that learns from the rows of a prompt was not told what it learned from these.

    Args:
        where: the codec.
        state: what `fit` gave; its first tensor belongs to this codec.
        rows: the rows, or their codes.
    """
    first = state[0] if isinstance(state, (tuple, list)) and state else None
    if not isinstance(first, Tensor):
        raise ShapeError(
            f"{where} keeps a state for each text: state = codec.fit(rows) of the prompt, then encode(rows, state) and "
            "decode(parts, state)."
        )
    if first.shape[:-2] != rows.shape[:-2]:
        raise ShapeError(
            f"{where}: the state was fitted to {list(first.shape[:-2])} batch rows and heads, got {list(rows.shape)}."
        )


def require_prompt(where: str, rows: Any, real: Any) -> None:
    """Raises `ShapeError` for what nothing can be learned from."""
    require_rows(where, rows)
    if rows.dim() != 4 or 0 in rows.shape:
        raise ShapeError(f"{where}: fit takes rows [batch, heads, slots, dim] of a prompt, got {list(rows.shape)}.")
    if real is not None:
        booleans(where, "real", real, [rows.shape[0], rows.shape[2]], "True where a slot is no padding")


def require_floating(where: str, dtype: Any) -> None:
    """Raises `UnsupportedError` for what rows cannot be decoded to."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UnsupportedError(f"{where}: dtype must be one of floating-point numbers, got {dtype!r}.")


def require_codec(where: str, codec: Any) -> None:
    """Raises `UnsupportedError` for a class, a name or another object in place of a codec."""
    if isinstance(codec, type) or not isinstance(codec, KVCodec):
        raise UnsupportedError(f"{where} takes a codec such as kv.Int8(), got {codec!r}.")


def require_rows(where: str, rows: Any) -> None:
    """Raises `ShapeError` for what cannot be encoded."""
    if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.dim() == 0:
        wanted = "a tensor [..., dim] of floating-point numbers"
        raise ShapeError(f"{where}: rows must be {wanted}, got {described(rows)}.")


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
