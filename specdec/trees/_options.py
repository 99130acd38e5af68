"""Checks of builder options."""

from typing import Any

from specdec.errors import UnsupportedError
from specdec.ops._checks import whole


def require_positive(builder: str, **options: Any) -> None:
    """Raises `UnsupportedError`, a `ValueError`, for the first option that is given and no whole number above zero.

    A temperature may be any number above zero.
    """
    for name, value in options.items():
        if name == "temperature":
            fits, kind = isinstance(value, (int, float)) and value is not True and value > 0, "number"
        else:
            fits, kind = value is None or whole(value, least=1), "whole number"
        if not fits:
            raise UnsupportedError(f"{builder}({name}={value!r}): expected a {kind} above 0.")
