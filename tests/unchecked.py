"""Takes the checks of annotations off what a test compiles: the compiler's tensors have no shapes to check."""

import inspect
from types import FunctionType, ModuleType
from typing import Any

import pytest


def unchecked(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """The functions and methods that modules define, as they are written.

    Args:
        monkeypatch: puts the checks back.
        *modules: where to look.
    """
    for module in modules:
        classes = [
            each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__
        ]
        for owner in (module, *classes):
            for name, value in list(vars(owner).items()):
                written = _written(value)
                if written is not value:
                    monkeypatch.setattr(owner, name, written)


def _written(value: Any) -> Any:
    """A function without the wrappers of the checks, and with all others."""
    if isinstance(value, classmethod | staticmethod):
        inner = _written(value.__func__)
        return value if inner is value.__func__ else type(value)(inner)
    if isinstance(value, property):
        return value if value.fget is None else property(_written(value.fget), value.fset, value.fdel)
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__") and _checks(value):
        value = value.__wrapped__
    return value


def _checks(function: FunctionType) -> bool:
    return "jaxtyping" in function.__code__.co_filename or "beartype" in function.__code__.co_filename
