"""What is a codec and what is not."""

from typing import Any

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
