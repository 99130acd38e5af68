"""Numbers in registers, pointers and inline assembly of the Gluon interpreter (`gluon_interpreter`)."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

Array = NDArray[Any]


class Fault(AssertionError):
    """What on a device would be a race, a wait without end, or an access out of bounds."""


def demand(condition: object, message: str) -> None:
    if not condition:
        raise Fault(message)


@dataclass(frozen=True)
class DType:
    """A type of numbers; the attributes are named as in Gluon."""

    name: str
    primitive_bitwidth: int
    fp_mantissa_width: int = 0

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.name)


_INTEGERS = [DType(f"{sign}int{bits}", bits) for sign in ("", "u") for bits in (8, 16, 32, 64)]
_FLOATS = [DType("float16", 16, 10), DType("bfloat16", 16, 7), DType("float32", 32, 23)]
DTYPES = {each.name: each for each in (*_INTEGERS, *_FLOATS)}


class Value(NDArrayOperatorsMixin):
    """Numbers in registers; an operation in place makes new ones."""

    def __init__(self, data: Any) -> None:
        self.data: Array = np.asarray(data)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> "Value":
        arrays = [number_of(each) for each in inputs]
        if ufunc in (np.floor_divide, np.remainder):  # towards zero on a device
            demand(all(np.min(each) >= 0 for each in arrays), "a quotient of negative integers, which is rounded up")
        return Value(getattr(ufunc, method)(*arrays))

    def __getitem__(self, where: Any) -> "Value":
        return Value(self.data[where])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to(self, dtype: DType, bitcast: bool = False) -> "Value":
        return Value(self.data.view(dtype.numpy) if bitcast else self.data.astype(dtype.numpy))


def number_of(number: Any) -> Any:
    """As numpy takes it: constants of the language (`tl.constexpr`) have a value, too."""
    return number.data if isinstance(number, Value) else getattr(number, "value", number)


@dataclass(frozen=True)
class Pointer:
    """Places in a tensor in global memory."""

    memory: Array
    offset: Any = 0

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + other)

    def places(self, mask: Any) -> tuple[Array, Array]:
        offset, kept = np.broadcast_arrays(number_of(self.offset), True if mask is None else number_of(mask))
        inside = (offset >= 0) & (offset < self.memory.size)
        demand(np.all(inside | ~kept), f"an access outside a tensor of {self.memory.size} numbers")
        return np.where(kept, offset, 0), kept


def load_numbers(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    offset, kept = pointer.places(mask)
    return Value(np.where(kept, pointer.memory[offset], np.asarray(number_of(other), pointer.memory.dtype)))


def store_numbers(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, kept = pointer.places(mask)
    pointer.memory[offset[kept]] = np.broadcast_to(number_of(value), kept.shape)[kept]


def _halves(words: Any) -> Array:
    return np.atleast_1d(words)[:, None].view(np.float16)


def _picked(low: Any, high: Any, places: Any) -> Any:
    """Four of the eight bytes of two words."""
    both = np.asarray(low, np.uint64) | np.asarray(high, np.uint64) << np.uint64(32)
    chosen = [int(places) >> 4 * byte & 15 for byte in range(4)]
    demand(max(chosen) < 8, "prmt that spreads a sign")
    picked = [(both >> np.uint64(8 * place) & 255) << np.uint64(8 * byte) for byte, place in enumerate(chosen)]
    return functools.reduce(np.bitwise_or, picked).astype(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "prmt.b32": _picked,
    "sub.f16x2": lambda a, b: (_halves(a) - _halves(b)).view(np.uint32)[:, 0],
}


def assembly(
    asm: str,
    constraints: str,
    args: list[Any],
    dtype: Any,
    is_pure: bool,  # noqa: ARG001 - Gluon's signature
    pack: int,
) -> Any:
    """Runs `asm` for so many neighbouring numbers at a time, in words of 32 bits."""
    given = [np.asarray(each.data if isinstance(each, Value) else np.int32(each), order="C") for each in args]
    words = [word for each in given for word in each.reshape(-1, pack).view(np.uint32).T]
    outputs = constraints.count("=")
    registers = {f"${outputs + place}": word for place, word in enumerate(words)}
    for statement in filter(None, map(str.strip, re.split("[{};]", asm))):
        name, _, operands = statement.partition(" ")
        if name != ".reg":
            target, *sources = operands.replace(" ", "").split(",")
            read = [registers[each] if each in registers else np.uint32(int(each, 0)) for each in sources]
            registers[target] = _INSTRUCTIONS[name](*read)
    results, place = [], 0
    for each in dtype if isinstance(dtype, tuple) else (dtype,):
        size = pack * each.primitive_bitwidth // 32
        found = np.stack([registers[f"${place + word}"] for word in range(size)], 1)
        results.append(Value(found.view(each.numpy).reshape(given[0].shape)))
        place += size
    return tuple(results) if isinstance(dtype, tuple) else results[0]
