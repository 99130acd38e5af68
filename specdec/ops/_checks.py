"""What ops ask of their arguments before anything runs, and in which words they refuse.

An op first asks whether its arguments are tensors at all, which is one `isinstance` for each, and then whether they
belong together.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError


def demands(op: str) -> Callable[[bool, str], None]:
    """A function that raises `ShapeError` in the name of an op unless a condition holds."""

    def demand(condition: bool, message: str) -> None:
        if not condition:
            raise ShapeError(f"{op}: {message}.")

    return demand


def tensors(op: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> None:
    """Raises unless arguments are tensors; optional ones may be None."""
    for name, given in required.items():
        if not isinstance(given, Tensor):
            raise _no_tensor(op, name, given)
    if optional:
        for name, given in optional.items():
            if given is not None and not isinstance(given, Tensor):
                raise _no_tensor(op, name, given, " or None")


def several(op: str, name: str, given: Any) -> None:
    """Raises unless an argument is several tensors."""
    if not isinstance(given, (tuple, list)):
        raise ShapeError(
            f"{op}: {name} must be a tuple of tensors, got {_kind(given)}; a single one goes as (tensor,)."
        )
    for place, each in enumerate(given):
        if not isinstance(each, Tensor):
            raise _no_tensor(op, f"{name}[{place}]", each)


def record_of(op: str, name: str, given: Any, kind: type[Any]) -> None:
    """Raises unless an argument is of a dataclass of tensors, and holds nothing else."""
    if not isinstance(given, kind):
        raise ShapeError(
            f"{op}: {name} must be of ops.{kind.__name__}, got {_kind(given)}; "
            f"it is made of {', '.join(kind.__slots__)}."
        )
    for field in kind.__slots__:
        if not isinstance(getattr(given, field), Tensor):
            raise _no_tensor(op, f"{name}.{field}", getattr(given, field))


def flags(op: str, **given: Any) -> None:
    """Raises unless arguments are True or False."""
    for name, flag in given.items():
        if type(flag) is not bool:
            raise UnsupportedError(f"{op}: {name} must be True or False, got {flag!r}.")


def there(device: torch.device) -> bool:
    """Whether torch sees a CUDA device of this number."""
    return 0 <= (device.index or 0) < torch.cuda.device_count()


def device_named(op: str, given: Any) -> torch.device:
    """A device by what an argument says; raises unless it is a CUDA device that is there."""
    try:
        device = torch.device(given)
        usable = device.type == "cuda" and there(device)
    except (RuntimeError, TypeError):
        usable = False
    if not usable:
        raise UnsupportedError(
            f"{op}: device must be a CUDA device that is there, or None, got {given!r}; torch sees "
            f"{torch.cuda.device_count()} of them."
        )
    return device


def booleans(op: str, name: str, given: Any, shape: list[int], meaning: str) -> None:
    """Raises `ShapeError` unless an argument is a boolean tensor of a shape; `meaning` is what True stands for."""
    if not isinstance(given, Tensor) or given.dtype != torch.bool or list(given.shape) != shape:
        raise ShapeError(f"{op}: {name} must be boolean {shape}, {meaning}, got {described(given)}.")


def described(given: Any) -> str:
    """What came, in an error: dtype and shape of a tensor, the type of anything else."""
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else _kind(given)


def legible(*given: Tensor) -> bool:
    """Whether numbers can be looked at: neither must the host wait for a device nor a graph be broken."""
    return all(each.device.type == "cpu" for each in given) and not torch.compiler.is_compiling()


def within(op: str, name: str, given: Tensor, least: int, most: int, why: str) -> None:
    """Raises `ShapeError` unless all of some integers are from `least` to `most`; looked at where that is free."""
    if given.numel() and legible(given):
        low, high = int(given.min()), int(given.max())
        if low < least or high > most:
            raise ShapeError(f"{op}: {name} must be {least} to {most} ({why}), got {low} to {high}.")


def sizes(op: str, most: dict[str, int], **given: Any) -> None:
    """Raises `UnsupportedError` unless arguments are whole numbers from 1 to what there may be at most."""
    for name, size in given.items():
        if not whole(size, least=1) or size > most[name]:
            raise UnsupportedError(f"{op}: {name} must be 1 to {most[name]}, got {size!r}.")


def number(given: Any) -> bool:
    """Whether an argument is a single finite number, of numpy's too; True and False are none."""
    real = type(given) in (int, float) or (type(given) is not bool and isinstance(given, Real))  # the first is quick
    return real and math.isfinite(given)


def whole(given: Any, least: int = 0) -> bool:
    """Whether an argument is a single whole number from `least` on, of numpy's too; True and False are none."""
    integral = type(given) is int or (type(given) is not bool and isinstance(given, Integral))  # the first is quick
    return integral and int(given) >= least


def require_whole(place: str, **options: Any) -> None:
    """Raises `UnsupportedError`, a `ValueError`, for the first option that is no whole number above zero."""
    for name, value in options.items():
        if not whole(value, least=1):
            raise _refused(place, name, value, "a whole number above 0")


def require_positive(place: str, **options: Any) -> None:
    """Raises `UnsupportedError`, a `ValueError`, for the first option that is no number above zero."""
    for name, value in options.items():
        if not number(value) or not value > 0:
            raise _refused(place, name, value, "a finite number above 0")


def _refused(place: str, name: str, value: Any, expected: str) -> UnsupportedError:
    return UnsupportedError(f"{place}({name}={value!r}): expected {expected}.")


def _no_tensor(op: str, name: str, given: Any, besides: str = "") -> ShapeError:
    """The error for an argument that is no tensor."""
    way = "it cannot be left out" if given is None else "torch.as_tensor makes one of numbers, lists and arrays"
    return ShapeError(f"{op}: {name} must be a tensor{besides}, got {_kind(given)}; {way}.")


def _kind(given: Any) -> str:
    return "None" if given is None else type(given).__name__
