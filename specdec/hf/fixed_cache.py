"""The cache of device rounds: buffers that stay where they are, lengths that the host does not know.

A prompt is run with a `RowCache`; what it holds is then copied into buffers `[layers, batch, heads, slots, width]`, one
stack for all layers that store rows alike. From there on every shape is fixed: a round writes all nodes behind the
committed slots of each row, attends to buffers as they are, and moves the accepted rows of all layers in one launch a
stack. Lengths are contents of device tensors, so a round can be captured as a CUDA graph.

Sliding layers hold their window and some room; when the room is used up, `fits` moves the window to the front.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import kv, ops
from specdec.errors import UnsupportedError
from specdec.hf import compat
from specdec.hf.cache import GROWTH, RowCache, RowLayer
from specdec.hf.fixed_states import FixedStates, PassedState
from specdec.hf.recurrent import RecurrentCache
from specdec.hf.rows import Encoded
from specdec.protocols import KVCodec


class PassedLayer(compat.CacheLayerMixin):
    """A layer as the model sees it: keys and values go through, and the attention function stores them."""

    is_croppable = False
    is_sliding = False

    def __init__(self) -> None:
        """Holds nothing."""
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new rows."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask that nobody makes."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """No limit that a model should know."""
        return -1


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The keys, or the values, of a stack: codec, what it learned per layer, and stacked buffers per part."""

    codec: KVCodec
    states: tuple[tuple[Tensor, ...], ...]
    parts: tuple[Tensor, ...]

    def layer(self, index: int, dtype: torch.dtype) -> Encoded:
        """One layer's rows, all slots."""
        return Encoded(self.codec, tuple(part[index] for part in self.parts), self.states[index], dtype)


@dataclass(slots=True, eq=False)
class Stack:
    """Layers that store rows alike and see the same window.

    Attributes:
        window: positions that a query sees; None for all.
        halves: keys and values.
        slots: slots of a buffer.
        base: first slot that the buffers hold, the same for all rows; on the device too.
    """

    window: int | None
    halves: tuple[Half, Half]
    slots: int
    base: int
    base_on_device: Int[Tensor, " 1"]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All buffers."""
        return self.halves[0].parts + self.halves[1].parts


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """Where the rows of one forward go in a stack, and which slots are committed."""

    lengths: Int[Tensor, " batch"]
    starts: Int[Tensor, " batch"] | None
    slots: Int[Tensor, "batch rows"]


class FixedCache(RecurrentCache):
    """Buffers of one batch, for rounds that the host does not follow.

    Args:
        source: the cache of the prompt; its buffers are released layer by layer.
        width: rows of a round, the root included.
        capacity: slots of a layer that sees everything, drafted rows included.
        starts: first slot of each batch row that is no padding; None if all are 0.
        bounded: whether sliding layers hold their window only; then `fits` must be asked before every round.

    Raises:
        UnsupportedError: if the source has a layer without rows of its own.
    """

    def __init__(
        self,
        source: RowCache,
        *,
        width: int,
        capacity: int,
        starts: Int[Tensor, " batch"] | None,
        bounded: bool = True,
    ) -> None:
        """Allocates buffers like the source's and copies what it holds."""
        if not source.own:
            raise UnsupportedError("layers that share keys and values with another layer cannot run on the device yet.")
        recurrent = source.recurrent.by_index
        super().__init__(
            layers=[PassedState() if index in recurrent else PassedLayer() for index in range(len(source))]
        )
        self.recurrent: FixedStates | None = FixedStates(recurrent, width) if recurrent else None
        self.width, self.starts, self._bounded = width, starts, bounded
        self.stacks: list[Stack] = []
        self._forwards: list[Forward] = []
        kinds: dict[Any, list[int]] = {}
        rows = {index: layer for index, layer in enumerate(source.layers) if isinstance(layer, RowLayer)}
        for index, layer in rows.items():
            kinds.setdefault(_kind(layer), []).append(index)
        self._places: dict[int, tuple[int, int]] = {}
        for members in kinds.values():
            self._places.update({index: (len(self.stacks), inner) for inner, index in enumerate(members)})
            self.stacks.append(self._stack([rows[index] for index in members], capacity))
        self.load(source, starts)

    def _stack(self, layers: list[RowLayer], capacity: int) -> Stack:
        """Empty buffers for layers that store rows alike."""
        window, slots = layers[0].sliding_window, capacity
        if self._bounded:
            slots = fixed_slots(window, capacity, batch=layers[0].keys.shape[0], width=self.width)
        halves = []
        for side in ("keys", "values"):
            stored = [layer.stored[side] for layer in layers]
            parts = tuple(
                part.new_zeros(len(layers), *part.shape[:2], slots, part.shape[3]) for part in stored[0].parts
            )
            states = tuple(tuple(state.clone() for state in rows.state) for rows in stored)
            halves.append(Half(stored[0].codec, states, parts))
        base = torch.zeros(1, dtype=torch.int64, device=halves[0].parts[0].device)
        return Stack(window, (halves[0], halves[1]), slots, 0, base)

    def load(self, source: RowCache, starts: Int[Tensor, " batch"] | None) -> None:
        """Takes over what another cache of the same layers holds; its buffers are released layer by layer."""
        if starts is not None and self.starts is not None:
            self.starts.copy_(starts)
        if self.recurrent is not None:
            self.recurrent.load(source.recurrent.layers)
        for index, (place, inner) in self._places.items():
            layer = cast(RowLayer, source.layers[index])
            stack, length = self.stacks[place], layer.filled
            first = 0
            if layer.sliding_window is not None:
                # Room for two rounds: before a graph is captured its program runs twice.
                short = stack.slots < length + 2 * self.width
                first = max(layer.base, length - layer.sliding_window + 1 if short else 0)
            stack.base = first
            stack.base_on_device.fill_(first)
            for half, rows in zip(stack.halves, layer.stored.values(), strict=True):
                for mine, theirs in zip(half.parts, rows.parts, strict=True):
                    mine[inner, :, :, : length - first] = theirs[:, :, first - layer.base : length - layer.base]
                for kept, state in zip(half.states[inner], rows.state, strict=True):
                    kept.copy_(state)
                rows.parts = ()

    def begin(self, cached: Int[Tensor, " batch"], rows: int) -> None:
        """Says how many slots are committed before a forward over so many rows."""
        row = torch.arange(rows, device=cached.device)
        made: dict[int | None, Forward] = {}
        for stack in self.stacks:
            if stack.window not in made:
                lengths = cached if stack.window is None else cached - stack.base_on_device
                starts = self.starts
                if starts is not None and stack.window is not None:
                    starts = (starts - stack.base_on_device).clamp_min(0)
                made[stack.window] = Forward(lengths, starts, lengths[:, None] + row)
        self._forwards = [made[stack.window] for stack in self.stacks]

    def store(
        self,
        layer: int,
        keys: Float[Tensor, "batch heads rows dim"],
        values: Float[Tensor, "batch heads rows value_dim"],
    ) -> tuple[Encoded, Encoded, Forward, int | None]:
        """Writes the rows of a layer; returns what attention reads, where its slots are, and its window."""
        place, index = self._places[layer]
        stack, forward = self.stacks[place], self._forwards[place]
        stored = [half.layer(index, rows.dtype) for half, rows in zip(stack.halves, (keys, values), strict=True)]
        sides = [_uncentred(half, rows) for half, rows in zip(stored, (keys, values), strict=True)]
        if all(_written(codec) for codec, _ in sides):
            rotated = [isinstance(codec, kv.Hadamard) for codec, _ in sides]
            ops.write_rows(
                sides[0][1],
                sides[1][1],
                stored[0].parts,
                stored[1].parts,
                forward.slots,
                rotate_keys=rotated[0],
                rotate_values=rotated[1],
            )
        else:
            row = torch.arange(keys.shape[0], device=keys.device)[:, None]
            for half, rows in zip(stored, (keys, values), strict=True):
                for part, codes in zip(half.parts, half.codec.encode(rows, half.state), strict=True):
                    part[row, :, forward.slots] = codes.transpose(1, 2)
        return stored[0], stored[1], forward, stack.window

    def keep(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Moves the rows of the accepted path to the front of the tree, in all layers."""
        for stack, forward in zip(self.stacks, self._forwards, strict=True):
            ops.move_rows(stack.parts, nodes, counts, forward.lengths)
        if self.recurrent is not None:
            self.recurrent.keep(nodes, counts)

    @property
    def changed(self) -> tuple[Tensor, ...]:
        """Buffers that a round changes for good: what lies behind the committed rows is none of them."""
        return () if self.recurrent is None else self.recurrent.buffers

    def fits(self, shortest: int, longest: int) -> bool:
        """Whether a round has room, for rows with at least `shortest` and at most `longest` committed slots.

        Moves the windows of sliding layers to the front of their buffers where they stand in the way.
        """
        for stack in self.stacks:
            if longest + self.width - stack.base > stack.slots and stack.window is not None:
                first = max(stack.base, shortest - stack.window + 1)
                shift = first - stack.base
                for part in stack.parts:
                    part[:, :, :, : stack.slots - shift] = part[:, :, :, shift:].clone()
                stack.base = first
                stack.base_on_device += shift
        return all(longest + self.width - stack.base <= stack.slots for stack in self.stacks)


def fixed_slots(window: int | None, capacity: int, *, batch: int, width: int) -> int:
    """Slots of a layer's buffer: all of them, or those of its window and some room.

    Rows of a batch drift apart and share the slots of a buffer, so only a single row is held to its window.
    """
    return capacity if window is None or batch > 1 else min(capacity, window + 2 * width + GROWTH)


def _kind(layer: RowLayer) -> Any:
    """What layers must have in common to be stacked."""
    sides = tuple(
        (id(rows.codec), tuple((part.dtype, part.device, part.shape[1], part.shape[3]) for part in rows.parts))
        for rows in layer.stored.values()
    )
    return layer.sliding_window, layer.base, sides


def _uncentred(stored: Encoded, rows: Tensor) -> tuple[KVCodec, Tensor]:
    """The codec below one that subtracts a mean, and rows less that mean."""
    if isinstance(stored.codec, kv.Centered):
        return stored.codec.inner, rows.float() - stored.state[0]
    return stored.codec, rows


def _written(codec: KVCodec) -> bool:
    """Whether `ops.write_rows` can encode for a codec."""
    inner = codec.inner if isinstance(codec, kv.Hadamard) else codec
    return isinstance(inner, kv.Plain | kv.Int8 | kv.Int4 | kv.NVFP4) or (
        isinstance(inner, kv.FP8) and inner.scale == "token"
    )
