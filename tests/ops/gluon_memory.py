"""Shared memory of the Gluon interpreter (`gluon_interpreter`), and what is on its way beside the threads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from tests.ops.gluon_registers import DTYPES, Array, DType, Fault, Value, demand


@dataclass
class Block:
    """A thread block, and what of it is on its way."""

    place: tuple[int, ...]
    grid: tuple[int, ...]
    copies: list["Copy"] = field(default_factory=list)
    stores: list["Copy"] = field(default_factory=list)
    products: list["Product"] = field(default_factory=list)
    unfenced: list[Array] = field(default_factory=list)

    running: ClassVar["Block"]

    def touch(self, memory: "Memory", by_threads: bool) -> None:
        """Fails unless memory may be read or written now, by threads or by products and copies."""
        coming = any(np.may_share_memory(memory.data, copy.memory.data) for copy in self.copies)
        demand(not coming, "shared memory in use while a copy to it is on its way")
        unfenced = not by_threads and any(np.may_share_memory(memory.data, other) for other in self.unfenced)
        demand(not unfenced, "shared memory that threads wrote, in use by products or copies without a fence")

    def end(self) -> None:
        demand(not self.copies, "a thread block ends while copies to its shared memory are on their way")
        demand(not self.stores, "a thread block ends while copies from its shared memory are on their way")
        demand(not self.products, "a thread block ends before its products do")


@dataclass(frozen=True)
class Memory:
    """Shared memory in the order of `NVMMASharedLayout` but for its swizzle: 128 bytes of all rows lie together."""

    data: Array  # of bytes
    dtype: DType
    shape: Sequence[int]
    turned: bool = False

    def _columns(self) -> Array:
        width = min(self.shape[-1], 128 * 8 // self.dtype.primitive_bitwidth)
        return self.data.view(self.dtype.numpy).reshape(self.shape[-1] // width, -1, width)

    def numbers(self) -> Array:
        found = self._columns().swapaxes(0, 1).reshape(self.shape).copy()
        return found.T if self.turned else found

    def write(self, numbers: Array) -> None:
        columns = self._columns()
        columns[...] = numbers.reshape(columns.shape[1], columns.shape[0], -1).swapaxes(0, 1)

    def load(self, layout: Any = None) -> Value:
        Block.running.touch(self, by_threads=True)
        return Value(self.numbers())

    def store(self, value: Value) -> None:
        same = value.data.dtype == self.dtype.numpy and list(value.shape) == list(self.shape)
        demand(same, f"{value.data.dtype} {value.shape} stored as {self.dtype.name} {self.shape}")
        Block.running.touch(self, by_threads=True)
        self.write(value.data)
        Block.running.unfenced.append(self.data)

    def index(self, place: Any) -> "Memory":
        demand(0 <= int(place) < self.shape[0], f"tile {int(place)} of {self.shape[0]}")
        return Memory(self.data.reshape(self.shape[0], -1)[int(place)], self.dtype, self.shape[1:])

    def reshape(self, shape: list[int]) -> "Memory":
        same = math.prod(shape) == math.prod(self.shape) and shape[-1] == self.shape[-1]
        demand(same, f"{self.shape} cannot be seen as {shape}")
        return replace(self, shape=shape)

    def permute(self, order: list[int]) -> "Memory":
        demand(order == [1, 0], f"dimensions can be exchanged, not put into the order {order}")
        return replace(self, turned=not self.turned)

    def reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> "Memory":
        size = math.prod(shape) * dtype.primitive_bitwidth // 8
        demand(size <= self.data.size, f"{size} bytes seen in {self.data.size}")
        return Memory(self.data[:size], dtype, shape)


class Layout:
    """Where numbers lie, which is not looked at."""

    def __init__(self, *args: Any) -> None:
        pass

    @staticmethod
    def get_default_for(shape: list[int], dtype: DType) -> None:
        """None in particular."""


class BarrierLayout(Layout):
    """Marks memory for barriers."""


@dataclass
class Barrier:
    """Opens when the expected bytes have arrived, and is closed again by the next ones that are expected."""

    opened: int = 0
    expected: int = 0

    def expect(self, size: int) -> None:
        demand(not self.expected, "bytes expected before the last ones were waited for")
        self.expected = int(size)

    def wait(self, phase: Any) -> None:
        if self.opened % 2 != int(phase):
            return
        block = Block.running
        own = [copy for copy in block.copies if copy.barrier is self]
        sent = sum(copy.memory.data.size for copy in own)
        demand(self.expected, f"a wait for phase {int(phase)} without end: nothing is expected")
        demand(sent == self.expected, f"a wait without end: {self.expected} bytes expected, {sent} sent")
        block.copies = [copy for copy in block.copies if copy.barrier is not self]
        for copy in own:
            copy.memory.write(copy.tiles.read(copy.place))
        self.opened, self.expected = self.opened + 1, 0


class Barriers(list[Barrier]):
    """Several of them."""

    def index(self, place: Any) -> Barrier:  # type: ignore[override]  # of barriers
        return self[int(place)]


def allocate(dtype: DType, shape: list[int], layout: Any) -> Any:
    """Room whose content may be anything: here, what no result may be made of."""
    if isinstance(layout, BarrierLayout):
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) > 1 else Barrier()
    filled = np.full(math.prod(shape), np.nan if dtype.fp_mantissa_width else 77, dtype.numpy)
    return Memory(filled.view(np.uint8), dtype, shape)


class TensorDescriptor:
    """Tiles of a tensor in global memory; beyond its end they are zeros, and what is written there is lost."""

    def __init__(self, tensor: Tensor, block_shape: list[int]) -> None:
        self.array: Array = tensor.numpy()
        self.dtype, self.block_shape, self.layout = DTYPES[str(self.array.dtype)], block_shape, None
        self.block_type = SimpleNamespace(nbytes=math.prod(block_shape) * tensor.element_size())
        strides = [step * tensor.element_size() for step in tensor.stride()[:-1]]
        demand(tensor.stride(-1) == 1 and not any(step % 16 for step in strides), f"strides {tensor.stride()}")

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: list[int], _layout: Any) -> "TensorDescriptor":
        return cls(tensor, block_shape)

    def _inside(self, place: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor a tile covers, and what of the tile that is."""
        begins = [int(each) for each in place]
        demand(min(begins) >= 0, f"a tile at {begins}")
        sizes = zip(begins, self.block_shape, self.array.shape, strict=True)
        covered = [max(0, min(size, end - begin)) for begin, size, end in sizes]
        source = tuple(slice(begin, begin + size) for begin, size in zip(begins, covered, strict=True))
        return source, tuple(slice(size) for size in covered)

    def read(self, place: Sequence[Any]) -> Array:
        tile = np.zeros(self.block_shape, self.array.dtype)
        source, covered = self._inside(place)
        tile[covered] = self.array[source]
        return tile

    def write(self, place: Sequence[Any], tile: Array) -> None:
        source, covered = self._inside(place)
        self.array[source] = tile[covered]


@dataclass(frozen=True, eq=False)
class Copy:
    """A tile on its way between global and shared memory."""

    tiles: TensorDescriptor
    place: Sequence[Any]
    memory: Memory
    barrier: Barrier | None = None

    def __post_init__(self) -> None:
        same = list(self.memory.shape) == list(self.tiles.block_shape) and self.memory.dtype == self.tiles.dtype
        demand(same, f"tiles {self.tiles.block_shape} copied to or from {self.memory.shape}")
        Block.running.touch(self.memory, by_threads=False)


def async_load(tiles: TensorDescriptor, place: Sequence[Any], barrier: Barrier, memory: Memory) -> None:
    Block.running.copies.append(Copy(tiles, place, memory, barrier))


def async_store(tiles: TensorDescriptor, place: Sequence[Any], memory: Memory) -> None:
    Block.running.stores.append(Copy(tiles, place, memory))


def store_wait(pendings: int) -> None:
    while len(Block.running.stores) > pendings:
        copy = Block.running.stores.pop(0)
        copy.tiles.write(copy.place, copy.memory.numbers())


@dataclass(eq=False)
class Product:
    """A product on its way, of a matrix in registers or shared memory with one in shared memory."""

    left: Value | Memory
    right: Memory
    acc: "Value | Product"
    use_acc: bool
    result: Value | None = None

    def operands(self) -> list[Array]:
        for each in (self.left, self.right):
            if isinstance(each, Memory):
                Block.running.touch(each, by_threads=False)
        return [each.numbers() if isinstance(each, Memory) else each.data for each in (self.left, self.right)]

    def finish(self) -> None:
        left, right = self.operands()
        acc = _finished(self.acc).data
        demand(left.dtype == right.dtype, f"products of {left.dtype} and {right.dtype}")
        found = left.astype(np.float64) @ right.astype(np.float64) + (acc if self.use_acc else 0)
        demand(acc.shape == found.shape, f"products {found.shape} added to {acc.shape}")
        demand(acc.dtype.kind == "f" or np.abs(found).max() < 2**31, "integers too large for 32 bits")
        self.result = Value(found.astype(acc.dtype))


def _finished(value: Value | Product) -> Value:
    found = value if isinstance(value, Value) else value.result
    if found is None:
        raise Fault("a product in use before it was waited for")
    return found


def warpgroup_mma(left: Any, right: Memory, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    product = Product(left, right, acc, bool(use_acc))
    product.operands()  # they must be there now, and still when they are read
    Block.running.products.append(product)
    return product if is_async else warpgroup_mma_wait(deps=(product,))


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    while len(Block.running.products) > num_outstanding:
        Block.running.products.pop(0).finish()
    found = tuple(map(_finished, deps))
    return found[0] if len(found) == 1 else found
