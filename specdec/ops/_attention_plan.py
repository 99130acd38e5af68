"""How the work of verify attention is cut into work items: a calculation, made without a GPU."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from specdec.errors import ShapeError
from specdec.ops._checks import device_named, flags, number, whole

FIXED_SPLIT = 512
"""Slots of a split in deterministic mode, at absolute positions."""

SIZES = (8, 4, 2, 1, 0.5)
"""Bytes of a cached number."""

_MOST_SPLITS = 128

_SPECIALISED = {(128, False): (4, 4), (256, True): (2, 4), (512, True): (1, 2)}
"""Tiles in flight, and tiles of a run from which on the kernel of compute capability 9 is taken.

By dimension, and whether there are more than 64 packed rows: where that kernel was faster on an H200. It takes others,
too. Where its work items have all rows, there are twice as many runs to be added up, which a short one does not make up
for.
"""

_SPECIALISED_CODES = {(128, False): (3, 4)}
"""The same for INT8 keys and values, of which two work items share a multiprocessor."""

_SPECIALISED_TILE = 64
"""Slots of a tile there."""

_FEWEST = 33
"""Packed rows from which on tiles of 64 rows are not mostly padding."""


@dataclass(frozen=True, slots=True)
class Device:
    """What of a device decides a plan; by default an H100 or H200.

    Attributes:
        multiprocessors: streaming multiprocessors (compute units).
        shared_memory: bytes that a thread block may have.
    """

    multiprocessors: int = 132
    shared_memory: int = 227 * 1024


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A verify attention problem.

    Attributes:
        batch: batch rows.
        heads: query heads.
        kv_heads: key/value heads; query heads of a group share one.
        rows: nodes per batch row.
        slots: cache slots that may be read per batch row (with a window: the window and the tree).
        dim: dimension of a key.
        value_dim: dimension of a value; None is `dim`.
        bytes_per_element: size of a cached number: 8, 4, 2, 1, or .5 for codes of four bits. Scales do not count.
        value_bytes_per_element: the same for values; None is as for keys.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    slots: int
    dim: int
    value_dim: int | None = None
    bytes_per_element: int | float = 2
    value_bytes_per_element: int | float | None = None

    def __post_init__(self) -> None:
        sizes = (self.batch, self.heads, self.kv_heads, self.rows, self.slots, *self.dims)
        if not all(map(whole, sizes)):
            raise ShapeError(f"AttentionShape: sizes must be whole numbers from 0 on, got {self}.")
        if not all(number(size) and size in SIZES for size in self.sizes):
            raise ShapeError(f"AttentionShape: a number takes one of {SIZES} bytes, got {self.sizes}.")
        if min(self.heads, self.kv_heads, self.dim) < 1 or self.heads % self.kv_heads:
            raise ShapeError(
                f"AttentionShape: {self.heads} query heads cannot share {self.kv_heads} key/value heads of dimension "
                f"{self.dim}; all are 1 or more, and the first a multiple of the second."
            )

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that one pass over the cache reads."""
        slot = sum(width * size for width, size in zip(self.dims, self.sizes, strict=True))
        return int(self.batch * self.kv_heads * self.slots * slot)

    @property
    def dims(self) -> tuple[int, int]:
        """Dimension of a key and of a value."""
        return self.dim, self.dim if self.value_dim is None else self.value_dim

    @property
    def sizes(self) -> tuple[int | float, int | float]:
        """Bytes of a number of a key and of a value."""
        values = self.value_bytes_per_element
        return self.bytes_per_element, self.bytes_per_element if values is None else values


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the kernel is launched.

    Attributes:
        block: rows of a tile: nodes times the heads of a group, packed.
        tile: slots of a tile.
        splits: runs of slots per key/value head.
        split_tiles: tiles of a run at absolute positions (deterministic mode); 0 divides what there is evenly.
        portions: parts of the value dimension, each a work item of its own.
        specialised: for the kernel of devices of compute capability 9.
        warps: warps of a work item.
        stages: tiles in flight.
    """

    block: int
    tile: int
    splits: int
    split_tiles: int
    warps: int
    stages: int
    portions: int = 1
    specialised: bool = False


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How well a problem fills a device.

    Attributes:
        query_blocks: tiles of rows per key/value head.
        splits: runs of slots per key/value head.
        work_items: thread blocks of the launch.
        multiprocessors: streaming multiprocessors (compute units) of the device.
        portions: parts that values are cut into.

    >>> from specdec import ops
    >>> gemma = ops.AttentionShape(batch=1, heads=16, kv_heads=2, rows=7, slots=32_768, dim=512)
    >>> print(ops.occupancy(gemma, multiprocessors=132))
    66 splits x 1 query block x 2 key/value heads = 132 work items, 1.00 per multiprocessor; 2 without splits
    >>> ops.Occupancy(query_blocks=1, splits=1, kv_heads=2, work_items=2, multiprocessors=132).per_multiprocessor < 0.02
    True
    """

    query_blocks: int
    splits: int
    kv_heads: int
    work_items: int
    multiprocessors: int
    portions: int = 1

    @property
    def per_multiprocessor(self) -> float:
        """Work items per multiprocessor; below 1, some have nothing to do."""
        return self.work_items / self.multiprocessors

    @property
    def unsplit(self) -> int:
        """Work items that a kernel without splits would have."""
        return self.work_items // self.splits

    def __str__(self) -> str:
        def counted(number: int, word: str) -> str:
            return f"{number} {word}{'' if number == 1 else 's'}"

        portions = f"{self.portions} portions of values x " if self.portions > 1 else ""
        return (
            f"{counted(self.splits, 'split')} x {counted(self.query_blocks, 'query block')} x {portions}"
            f"{counted(self.kv_heads, 'key/value head')} = {counted(self.work_items, 'work item')}, "
            f"{self.per_multiprocessor:.2f} per multiprocessor; {self.unsplit} without splits"
        )


def occupancy(
    shape: AttentionShape,
    device: torch.device | str | None = None,
    *,
    multiprocessors: int | None = None,
    deterministic: bool = False,
    specialised: bool = False,
) -> Occupancy:
    """Work items and splits, before anything is launched.

    Args:
        shape: the problem.
        device: a CUDA device to ask for its multiprocessors.
        multiprocessors: their number, instead of a device; 132 (an H100 or H200) if neither is given.
        deterministic: as in `tree_attention`.
        specialised: whether the kernel of devices of compute capability 9 can run: for 16-bit numbers, or INT8 codes,
            in a contiguous cache, without window, padding and soft cap. Where it is not taken, it makes no difference.

    Raises:
        ShapeError: for a shape without work.
        UnsupportedError: for a device that is no CUDA device or is not there, and flags that are neither True nor
            False.
    """
    given: Any = shape
    if not isinstance(given, AttentionShape):
        raise ShapeError(f"occupancy: shape must be an ops.AttentionShape, got {type(given).__name__}.")
    if multiprocessors is not None and not whole(multiprocessors, least=1):
        raise ShapeError(f"occupancy: multiprocessors must be a whole number from 1 on, got {multiprocessors!r}.")
    if shape.batch * shape.rows * shape.slots == 0:
        raise ShapeError(f"occupancy: nothing to cut in {shape}.")
    flags("occupancy", deterministic=deterministic, specialised=specialised)
    asked = device_of(None if device is None else device_named("occupancy", device))
    if multiprocessors is not None:
        asked = dataclasses.replace(asked, multiprocessors=multiprocessors)
    plan = make_plan(shape, asked, deterministic=deterministic, specialised=specialised)
    groups = shape.heads // shape.kv_heads
    blocks = -(-shape.rows * (_room(groups) if plan.specialised else groups) // plan.block)
    heads = shape.batch * shape.kv_heads
    items = blocks * plan.portions * plan.splits * heads
    return Occupancy(blocks, plan.splits, heads, items, asked.multiprocessors, plan.portions)


def make_plan(
    shape: AttentionShape, device: Device, *, deterministic: bool, specialised: bool = False
) -> AttentionPlan:
    """The launch for a problem on a device; `specialised` says that the kernel of compute capability 9 can run."""
    if specialised and not deterministic:
        plan = _specialised(shape, device)
        if plan is not None:
            return plan
    value_dim = shape.dims[1]
    widest, packed = max(shape.dims), shape.rows * (shape.heads // shape.kv_heads)
    cut = functools.partial(_cut, shape, device, deterministic=deterministic)
    if 128 < widest <= 256 and not deterministic:
        # Two work items for the same slots, beside each other: half as many partial sums are written and read.
        plan = cut(most=64)
        if plan.splits > 1:
            return plan
    if widest > 256 and packed > 64 and value_dim & (value_dim - 1) == 0 and not deterministic:
        # Sums of 128 rows leave no registers. Two work items with half of each value read less than two with half the
        # rows. Only where runs are added up: a broken value must reach the other half.
        plan = cut(most=128, portions=2)
        if plan.splits > 1 and plan.block == 128:
            return plan
    return cut(most=128 if widest <= 256 else 64)


def _cut(shape: AttentionShape, device: Device, *, most: int, portions: int = 1, deterministic: bool) -> AttentionPlan:
    """The launch with tiles of at most so many rows, and values in so many portions."""
    widest = max(shape.dims)
    packed = shape.rows * (shape.heads // shape.kv_heads)
    block = min(most, max(16, 1 << (packed - 1).bit_length()))
    tile, stages = (64, 4 if shape.bytes_per_element > 1 else 3) if widest <= 128 else (32, 4)
    if max(shape.sizes) > 2:
        # Products of float32 are made number by number, each an instruction: larger tiles spill, and compile long.
        block, tile = 16, min(tile, 32) if widest <= 128 else 16
    while stages > 1 and _shared_bytes(shape, block, tile, stages, portions) > device.shared_memory:
        stages -= 1
    while block > 16 and _shared_bytes(shape, block, tile, stages, portions) > device.shared_memory:
        block //= 2
    while tile > 16 and _shared_bytes(shape, block, tile, stages, portions) > device.shared_memory:
        tile //= 2
    tiles = -(-shape.slots // tile)
    work = shape.batch * shape.kv_heads * portions * -(-packed // block)
    # Bytes of a tile arrive faster than one block of eight-bit numbers is multiplied; two share a multiprocessor.
    resident = 2 if widest <= 128 and shape.bytes_per_element <= 1 else 1
    if deterministic:
        # Aligned runs may begin before the first visible slot and end after the last one.
        splits, split_tiles = -(-shape.slots // FIXED_SPLIT) + 1, FIXED_SPLIT // tile
    else:
        splits, split_tiles = max(1, min(device.multiprocessors * resident // work, tiles, _MOST_SPLITS)), 0
    return AttentionPlan(
        block=block,
        tile=tile,
        splits=splits,
        split_tiles=split_tiles,
        warps=8 if block * widest >= 128 * 128 and (block == 128 or widest > 256) else 4,
        stages=stages,
        portions=portions,
    )


def _specialised(shape: AttentionShape, device: Device) -> AttentionPlan | None:
    """The launch of the kernel of compute capability 9, or None where another was faster."""
    dim, groups = shape.dim, shape.heads // shape.kv_heads
    packed = shape.rows * _room(groups)
    block, portions = 128 if packed > 64 else 64, 2 if dim > 256 else 1
    made_for, resident = (_SPECIALISED, 1) if shape.bytes_per_element > 1 else (_SPECIALISED_CODES, 2)
    if (
        shape.sizes not in ((2, 2), (1, 1))
        or shape.dims[1] != dim
        or (dim, packed > 64) not in made_for
        or shape.rows * groups < _FEWEST
        or groups > 64
    ):
        return None
    stages, shortest = made_for[dim, packed > 64]
    work, tiles = shape.batch * shape.kv_heads * portions * -(-packed // block), -(-shape.slots // _SPECIALISED_TILE)
    splits = max(1, min(device.multiprocessors * resident // work, tiles, _MOST_SPLITS))
    if splits == 1 or tiles <= (shortest - 1) * splits:
        return None
    return AttentionPlan(block, _SPECIALISED_TILE, splits, 0, block // 16, stages, portions, specialised=True)


def _room(groups: int) -> int:
    """Heads of a group that the copy engine fetches the queries of."""
    return 1 << (groups - 1).bit_length()


def _shared_bytes(shape: AttentionShape, block: int, tile: int, stages: int, portions: int) -> int:
    """Shared memory of a thread block: queries, tiles in flight, and codes widened as the tensor cores take them."""
    dim, value_dim = (1 << (width - 1).bit_length() for width in shape.dims)
    key_size, value_size = shape.sizes
    size = max(2, int(key_size), int(value_size))  # of a query
    rows = int(stages * tile * (dim * key_size + value_dim // portions * value_size))
    spare = 16 * 1024
    widened = size * tile * value_dim // portions + spare if value_size <= 1 else 0
    if key_size < 1:
        widened += size * tile * dim - (spare if value_size <= 1 else 0)
    return size * block * dim + rows + widened + (size - 2) * 16 * 1024


@functools.lru_cache
def device_of(device: torch.device | str | None) -> Device:
    """What of a device decides a plan; that of an H100 where there is none to ask."""
    if device is None or torch.device(device).type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Device(int(properties.multi_processor_count), int(shared))
