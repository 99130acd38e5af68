"""What is a codec and what is not."""

from typing import Any

from specdec.errors import UnsupportedError
from specdec.protocols import KVCodec


def require_codec(where: str, codec: Any) -> None:
    """Raises `UnsupportedError` for a class, a name or another object in place of a codec."""
    if isinstance(codec, type) or not isinstance(codec, KVCodec):
        raise UnsupportedError(f"{where} takes a codec such as kv.Int8(), got {codec!r}.")
