"""Runs kernels written in Gluon, which triton's own interpreter does not, in numpy: one thread for a thread block.

`load` imports kernel modules on top of stand-ins for Gluon, so that what runs is the file itself. Stood for is their
logic: indices, masks, bounds, runs, the bits of inline assembly, and the order of what runs beside the threads:

- A copy arrives when its barrier is waited for. Until then nothing may touch its tile. A wait that would never end
  fails: for the wrong phase, or for other than the expected number of bytes.
- An asynchronous product reads shared memory when it is waited for, so what overwrites its operands before then shows.
- What threads write to shared memory must be fenced before products and copies touch it.
- At the end of a thread block nothing may be on its way.

Not stood for: layouts of registers, swizzles, threads and warps among each other, bfloat16, rounding of tensor cores.
"""

import functools
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from tests.ops import gluon_memory as memory
from tests.ops.gluon_registers import DTYPES, Pointer, Value, assembly, demand, load_numbers, number_of, store_numbers


class Kernel:
    """A function of the language; with a grid, all its thread blocks are run one after the other."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._run, grid)

    def _run(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        known = inspect.signature(self.function).parameters
        constants = {name: value for name, value in options.items() if name in known}
        given = [_argument(each) for each in args]
        with np.errstate(all="ignore"):
            for place in itertools.product(*map(range, grid)):
                memory.Block.running = memory.Block(place, grid)
                self.function(*given, **constants)
                memory.Block.running.end()


def _argument(given: Any) -> Any:
    """An argument of a launch as the kernel gets it."""
    if isinstance(given, Tensor):
        steps = zip(given.shape, given.stride(), strict=True)
        return Pointer(given.as_strided((1 + sum((size - 1) * step for size, step in steps),), (1,)).numpy())
    if isinstance(given, int | float):
        return Value(np.int32(given) if isinstance(given, int) else np.float32(given))
    return given


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _extreme(ignoring: np.ufunc, propagating: np.ufunc) -> Callable[..., Value]:
    def extreme(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        return Value((propagating if propagate_nan else ignoring)(number_of(a), number_of(b)))

    return extreme


def _reduce(values: Value, axis: int, combine: Callable[..., Value]) -> Value:
    return functools.reduce(combine, [Value(each) for each in np.moveaxis(values.data, axis, 0)])


language = SimpleNamespace(
    **DTYPES,
    constexpr=lambda value: value,
    static_range=range,
    shared_memory_descriptor=memory.Memory,
    **dict.fromkeys(("BlockedLayout", "SliceLayout", "DotOperandLayout"), memory.Layout),
    **dict.fromkeys(("NVMMADistributedLayout", "NVMMASharedLayout"), memory.Layout),
    program_id=lambda axis: Value(np.int32(memory.Block.running.place[axis])),
    num_programs=lambda axis: Value(np.int32(memory.Block.running.grid[axis])),
    allocate_shared_memory=memory.allocate,
    load=load_numbers,
    store=store_numbers,
    inline_asm_elementwise=assembly,
    convert_layout=lambda values, _layout: values,
    arange=lambda begin, end, _layout=None: Value(np.arange(begin, end, dtype=np.int32)),
    full=lambda shape, value, dtype, _layout=None: Value(np.full(shape, number_of(value), dtype.numpy)),
    zeros=lambda shape, dtype, _layout=None: Value(np.zeros(shape, dtype.numpy)),
    where=lambda condition, a, b: Value(np.where(number_of(condition), number_of(a), number_of(b))),
    cdiv=lambda a, b: (a + b - 1) // b,
    minimum=_extreme(np.fmin, np.minimum),
    maximum=_extreme(np.fmax, np.maximum),
    abs=np.abs,
    exp2=np.exp2,
    log2=np.log2,
    max=lambda values, axis: Value(np.fmax.reduce(values.data, axis)),
    sum=lambda values, axis: Value(values.data.sum(axis, dtype=values.data.dtype)),
    reduce=_reduce,
)
_hopper = SimpleNamespace(
    fence_async_shared=lambda: memory.Block.running.unfenced.clear(),
    mbarrier=SimpleNamespace(
        MBarrierLayout=memory.BarrierLayout,
        init=lambda _barrier, count: demand(count == 1, f"barriers for {count} arrivals"),
        expect=memory.Barrier.expect,
        wait=memory.Barrier.wait,
    ),
    tma=SimpleNamespace(async_load=memory.async_load, async_store=memory.async_store, store_wait=memory.store_wait),
    warpgroup_mma=memory.warpgroup_mma,
    warpgroup_mma_wait=memory.warpgroup_mma_wait,
)
_gluon = SimpleNamespace(jit=jit, constexpr_function=lambda function: function, language=language)
_STAND_INS: dict[str, Any] = {
    "triton.experimental": SimpleNamespace(gluon=_gluon),
    "triton.experimental.gluon": _gluon,
    "triton.experimental.gluon.language": language,
    "triton.experimental.gluon.language.nvidia.hopper": _hopper,
    "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=memory.TensorDescriptor),
}


def load(names: Sequence[str], changes: Mapping[str, str] | None = None) -> ModuleType:
    """Imports modules that import each other, those without imports first; the last one is handed back.

    Args:
        names: full names; modules that are imported already under these names stay as they are.
        changes: pieces of their sources, each of which occurs once in all of them, and what stands there instead.

    Raises:
        ValueError: for a piece that does not occur, or more than once.
    """
    specs: list[Any] = [importlib.util.find_spec(name) for name in names]  # imports what they are part of, and triton
    before = {name: sys.modules.get(name) for name in (*_STAND_INS, *names)}
    left = dict(changes or {})
    try:
        sys.modules.update(_STAND_INS)
        for name, spec in zip(names, specs, strict=True):
            source = spec.loader.get_source(name)
            for old in [each for each in left if each in source]:
                if source.count(old) > 1:
                    raise ValueError(f"{source.count(old)} times in {name}: {old}")
                source = source.replace(old, left.pop(old))
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            exec(compile(source, spec.origin, "exec"), module.__dict__)
    finally:
        for name, kept in before.items():
            sys.modules.pop(name, None)
            if kept is not None:
                sys.modules[name] = kept
    if left:
        raise ValueError(f"not in {names}: {list(left)}")
    return module
