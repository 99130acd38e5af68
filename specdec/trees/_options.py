"""Checks of builder options."""

from typing import Any

from specdec.errors import UnsupportedError
from specdec.ops._checks import number, whole


def require_whole(builder: str, **options: Any) -> None:
    """Raises `UnsupportedError`, a `ValueError`, for the first option that is no whole number above zero."""
    for name, value in options.items():
        if not whole(value, least=1):
            raise _refused(builder, name, value, "a whole number above 0")


def require_positive(builder: str, **options: Any) -> None:
    """Raises `UnsupportedError`, a `ValueError`, for the first option that is no number above zero."""
    for name, value in options.items():
        if not number(value) or not value > 0:
            raise _refused(builder, name, value, "a finite number above 0")


def _refused(builder: str, name: str, value: Any, expected: str) -> UnsupportedError:
    return UnsupportedError(f"{builder}({name}={value!r}): expected {expected}.")
