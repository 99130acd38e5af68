"""A key/value cache whose rows have lengths of their own, with the drafted rows behind the committed ones.

Every layer holds preallocated buffers `[batch, kv_heads, slots, ...]` (`specdec.hf.rows`). Row b has `lengths[b]`
committed slots; the nodes of a tree are written at the slots that follow, row by row, and are visible to nobody else.
Keeping an accepted path moves at most as many slots as the tree has nodes; dropping the rest moves nothing. Nothing
past `lengths[b]` plus the current tree is ever read, and buffers start as zeros, so what lies there is finite.

Sliding layers show only the slots that some row's window can still reach, and give up the others when the buffer
would have to grow.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.hf import compat
from specdec.hf.recurrent import RecurrentCache, RecurrentLayer, RecurrentStates
from specdec.hf.rows import Place, Rows
from specdec.kv import KVCacheConfig
from specdec.types import CommittedRows

GROWTH = 256
"""Slots added at least when a buffer grows; growth copies, so it must be rare."""

SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "dummy"}


def grown(visible: int, end: int) -> int:
    """Slots of a new buffer for slots `visible .. end` and those that follow: a step of one fixed ladder.

    Which step a text needs does not depend on how it got there, so memory can be told beforehand.
    """
    slots = GROWTH
    while slots < end - visible + GROWTH:
        slots += max(GROWTH, slots // 4)
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """Where the rows of one forward go: `start` slots per batch row, as one number if all rows agree.

    `encoded` says that the attention of this forward reads rows as they are stored.
    """

    starts: Int[Tensor, " batch"]
    start: int | None
    shortest: int
    rows: int
    end: int
    encoded: bool

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Batch index and slot index of every written row, for layers on `device`."""
        slots = self.starts.to(device)[:, None] + torch.arange(self.rows, device=device)
        return torch.arange(slots.shape[0], device=device)[:, None], slots


class RowLayer(compat.CacheLayerMixin):
    """One attention layer's keys and values. Lengths and write plans belong to the `RowCache` that owns it."""

    is_croppable = True

    def __init__(
        self,
        sliding_window: int | None = None,
        config: KVCacheConfig | None = None,
        prompt: Bool[Tensor, "batch prompt"] | None = None,
    ) -> None:
        """Creates an empty layer.

        Args:
            sliding_window: positions that a query sees, its own included; None for all.
            config: codecs of keys and values; None stores them as they are.
            prompt: False on padding of the prompt, which takes the first slots; None if there is none.
        """
        config = config if config is not None else KVCacheConfig()
        self.stored = {"keys": Rows(config.keys), "values": Rows(config.values)}
        self.is_initialized = False
        self.prompt = prompt
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.plan: WritePlan | None = None
        self.filled = 0
        self.base = 0

    @property
    def keys(self) -> Tensor:  # type: ignore[override]  # an attribute of transformers' layers
        """The first part of the stored keys: the keys themselves, or their codes."""
        return self.stored["keys"].parts[0]

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # as above
        """The first part of the stored values."""
        return self.stored["values"].parts[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates on the device and in the dtype of the first keys and values."""
        self.device = key_states.device
        real = None
        if self.prompt is not None:
            real = self.prompt[:, self.base : self.base + key_states.shape[-2]].to(self.device)
        self.stored["keys"].start(key_states, real)
        self.stored["values"].start(value_states, real)
        self.is_initialized = True

    def first_visible(self, length: int) -> int:
        """First slot that a query right after `length` committed slots can see."""
        return self.base if self.sliding_window is None else max(self.base, length - self.sliding_window + 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Writes the new rows and returns the slots that the attention of this forward may see, as it reads them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        start: int | None
        if plan is None:
            # Prompt: all rows are equally long, and each chunk follows the one before.
            start, shortest, end = self.filled, self.filled, self.filled + key_states.shape[-2]
            self.filled = end
        else:
            start, shortest, end = plan.start, plan.shortest, plan.end
        visible = self.first_visible(shortest)
        self._reserve(visible, end)
        place: Place
        if start is not None:
            place = slice(start - self.base, end - self.base)
        else:
            rows, slots = cast(WritePlan, plan).index(self.device)
            place = rows, slots - self.base
        self.stored["keys"].write(key_states, place)
        self.stored["values"].write(value_states, place)
        if plan is not None and plan.encoded:
            keys, values = (rows.encoded(visible - self.base, end - self.base) for rows in self.stored.values())
            return keys, values
        return self._read(visible, end)

    def _read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `first .. end`."""
        keys, values = (rows.read(first - self.base, end - self.base) for rows in self.stored.values())
        return keys, values

    def _reserve(self, visible: int, end: int) -> None:
        """Makes room up to slot `end`, dropping slots before `visible` on a sliding layer."""
        slots = self.stored["keys"].slots
        if end - self.base <= slots:
            return
        capacity = grown(visible, end)
        for rows in self.stored.values():
            rows.resize(capacity, min(visible - self.base, slots), slots)
        self.base = visible

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copies slots `source` to slots `target`, per batch row; reads everything before it writes."""
        rows, source, target = (index.to(self.device) for index in (rows, source - self.base, target - self.base))
        for stored in self.stored.values():
            stored.move(rows, source, target)

    def load(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Copies the last slots of another cache, which has seen `length` tokens."""
        self.base = length - keys.shape[-2]
        self.lazy_initialization(keys, values)
        self._reserve(self.base, length)
        for stored, rows in zip(self.stored.values(), (keys, values), strict=True):
            stored.write(rows, slice(0, rows.shape[-2]))
        self.filled = length

    def dense(self, length: int) -> tuple[Tensor, Tensor]:
        """A copy of the first `length` slots, or of those the window keeps."""
        keys, values = self._read(self.first_visible(length), length)
        return keys.clone(), values.clone()

    def visible(self, shortest: int, longest: int) -> tuple[int, Tensor, Tensor]:
        """The first slot that a query after so many committed ones can see, with keys and values from there on."""
        first = self.first_visible(shortest)
        return first, *self._read(first, longest)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns and first slot of what `update` is about to return."""
        shortest = self.plan.shortest if self.plan is not None else self.filled
        end = self.plan.end if self.plan is not None else self.filled + query_length
        visible = self.first_visible(shortest)
        return end - visible, visible

    def get_seq_length(self) -> int:
        """Slots before the rows of the current forward."""
        return self.plan.end - self.plan.rows if self.plan is not None else self.filled

    def get_max_length(self) -> int:
        """-1: buffers grow."""
        return -1


class RowCache(RecurrentCache):
    """The cache of a whole model.

    **Laws.** `lengths` is exact; everything past it is dead; `keep` costs the same at every context length.
    """

    def __init__(
        self, config: Any, kv: KVCacheConfig | None = None, prompt: Bool[Tensor, "batch prompt"] | None = None
    ) -> None:
        """Builds one layer per decoder layer of `config`.

        Args:
            config: the model's configuration.
            kv: codecs of keys and values; None stores them as they are.
            prompt: False on padding of the prompt, from which no codec learns; None if there is none.

        Raises:
            UnsupportedError: if a layer type keeps a state that this cache cannot rewind; the message names it.
            ShapeError: if a codec cannot store rows of the model's head dimension.
        """
        decoder = config.get_text_config(decoder=True)
        types, arguments = compat.get_layer_types_and_kwargs(decoder)
        check_layer_types(types)
        kv = kv if kv is not None else KVCacheConfig()
        for key_dim, value_dim in {(key_dim, value_dim) for _, key_dim, value_dim in compat.kv_shapes(decoder)}:
            for kind in set(types) - {"dummy", "linear_attention"}:
                # Raises where a codec cannot store rows of this length.
                kv.for_layer(kind).bits_per_element(key_dim, value_dim)
        self.recurrent = RecurrentStates(
            {index: kv.states for index, kind in enumerate(types) if kind == "linear_attention"}
        )
        layers: list[Any] = []
        for index, (kind, kwargs) in enumerate(zip(types, arguments, strict=True)):
            if kind == "linear_attention":
                layers.append(self.recurrent.by_index[index])
            elif kind == "dummy":
                layers.append(compat.DummyLayer())
            else:
                layers.append(RowLayer(**kwargs, config=kv.for_layer(kind), prompt=prompt))
        super().__init__(layers=layers)
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self.pending = 0
        self._host_lengths: list[int] = []

    @property
    def row_layers(self) -> list[RowLayer]:
        """Layers that hold keys and values (layers that share another layer's do not)."""
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    @property
    def own(self) -> bool:
        """Whether every layer holds something of its own."""
        return len(self.row_layers) + len(self.recurrent.layers) == len(self.layers)

    @property
    def windows(self) -> dict[int | None, RowLayer]:
        """One representative layer per sliding window (None for full attention)."""
        return {layer.sliding_window: layer for layer in reversed(self.row_layers)}

    def load(self, cache: compat.Cache) -> None:
        """Copies the committed slots of a cache of transformers; the source stays as it is.

        Raises:
            UnsupportedError: see `check_loadable`.
        """
        check_loadable(cache)
        filled = max(index for index, layer in enumerate(self.layers) if not isinstance(layer, compat.DummyLayer)) + 1
        if 0 < len(cache.layers) < filled:  # none before the first token
            raise UnsupportedError(
                f"the given cache has {len(cache.layers)} layers, the model {filled}; pass the cache that it filled."
            )
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if isinstance(mine, RecurrentLayer) != isinstance(theirs, compat.LinearAttentionLayer):
                raise UnsupportedError(
                    f"the given cache has a {type(theirs).__name__} where the model has a {type(mine).__name__}; pass "
                    "the cache that this model filled."
                )
            if isinstance(mine, RowLayer) and isinstance(theirs, compat.DynamicLayer) and theirs.is_initialized:
                # Offloaded layers wait on the CPU.
                keys, values = (cast(Tensor, state).to(theirs.device) for state in (theirs.keys, theirs.values))
                mine.load(keys, values, theirs.get_seq_length())
            elif isinstance(mine, RecurrentLayer) and isinstance(theirs, compat.LinearAttentionLayer):
                mine.load(theirs)

    def end_prefill(self, batch: int, device: torch.device) -> None:
        """Marks the prompt as committed; from here on every forward needs a plan."""
        self.recurrent.end_prefill()
        length = self.row_layers[0].filled
        self._host_lengths = [length] * batch
        self.lengths = torch.full((batch,), length, dtype=torch.int64, device=device)

    def begin(
        self, rows: int, *, encoded: bool = False, visible: Bool[Tensor, "batch rows pending"] | None = None
    ) -> WritePlan:
        """Announces a forward of `rows` rows per batch row, written after the pending ones.

        With `encoded`, layers hand out their rows as `specdec.hf.rows.Encoded`. Recurrent layers must know which of the
        pending rows, the new ones last, are on the path of each new one.
        """
        if visible is not None and self.recurrent.layers:
            self.recurrent.begin(visible)
        shortest, longest = min(self._host_lengths), max(self._host_lengths)
        plan = WritePlan(
            starts=self.lengths + self.pending,
            start=shortest + self.pending if shortest == longest else None,
            shortest=shortest,
            rows=rows,
            end=longest + self.pending + rows,
            encoded=encoded,
        )
        for layer in self.row_layers:
            layer.plan = plan
        self.pending += rows
        return plan

    def keep(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Commits the first `counts[b]` of the pending rows `nodes[b]`, in order, and drops the other pending rows."""
        kept = counts.tolist()
        order = [row[:count] for row, count in zip(nodes.tolist(), kept, strict=True)]
        first = min((_first_out_of_place(row) for row in order), default=0)
        last = max(kept, default=0)
        if first < last:
            place = torch.arange(first, last, device=nodes.device)
            target = self.lengths[:, None] + place
            moved = place < counts[:, None]
            source = torch.where(moved, self.lengths[:, None] + nodes[:, first:last], target)
            rows = torch.arange(len(kept), device=nodes.device)[:, None]
            for layer in self.row_layers:
                layer.move(rows, source, target)
        self.recurrent.keep(nodes, counts)
        self.lengths = self.lengths + counts
        self._host_lengths = [length + count for length, count in zip(self._host_lengths, kept, strict=True)]
        self.pending = 0

    def committed(self, layer: RowLayer, following: Int[Tensor, " batch"]) -> CommittedRows:
        """The committed slots of a layer that a query at the next position can see.

        Args:
            layer: one of `row_layers`.
            following: that position, per row.
        """
        first, keys, values = layer.visible(min(self._host_lengths), max(self._host_lengths))
        slots = torch.arange(first, first + keys.shape[2], device=self.lengths.device)
        real, prompt = slots < self.lengths[:, None], layer.prompt
        if prompt is not None and first < prompt.shape[1]:
            real[:, : prompt.shape[1] - first] &= prompt[:, first : first + keys.shape[2]].to(real.device)
        positions = slots + (following - self.lengths)[:, None]
        return CommittedRows(keys, values, *(each.to(keys.device) for each in (positions, real, following)))

    def to_dynamic(self, config: Any) -> compat.DynamicCache | None:
        """A `DynamicCache` with the committed slots, or None if rows differ in length (it could not hold them)."""
        if len(set(self._host_lengths)) != 1:
            return None
        length = self._host_lengths[0]
        cache = compat.DynamicCache(config=config.get_text_config(decoder=True))
        self.recurrent.fold()
        for mine, theirs in zip(self.layers, cache.layers, strict=True):
            if isinstance(mine, RowLayer) and mine.is_initialized and isinstance(theirs, compat.DynamicLayer):
                keys, values = mine.dense(length)
                theirs.lazy_initialization(keys, values)
                theirs.keys, theirs.values = keys, values
                if isinstance(theirs, compat.DynamicSlidingWindowLayer):
                    theirs.cumulative_length = length
            elif isinstance(mine, RecurrentLayer) and isinstance(theirs, compat.LinearAttentionLayer):
                mine.store(theirs)
        return cache


def check_loadable(cache: Any) -> None:
    """Raises `UnsupportedError`, naming the type, unless the cache has dynamic full and sliding layers only.

    Quantized and hybrid layers inherit from these but keep other state beside the keys, so the exact type counts.
    """
    plain = (compat.DynamicLayer, compat.DynamicSlidingWindowLayer, compat.LinearAttentionLayer, compat.DummyLayer)
    other = next((item for item in getattr(cache, "layers", [cache]) if type(item) not in plain), None)
    if other is not None:
        raise UnsupportedError(
            f"cannot continue from a cache with a {type(other).__name__}; pass a DynamicCache "
            "(full and sliding attention layers, and recurrent ones), or no cache."
        )


def _first_out_of_place(row: list[int]) -> int:
    """First position whose node is not already in its place; past the end if all are."""
    return next((place for place, node in enumerate(row) if node != place), 1 << 60)


def check_layer_types(types: list[str]) -> None:
    """Raises `UnsupportedError` naming the layer types whose state cannot be rewound."""
    unknown = sorted(set(types) - SUPPORTED_LAYERS)
    if unknown:
        raise UnsupportedError(
            f"the model has layers of type {', '.join(unknown)}, whose state this version cannot rewind after a "
            f"rejected draft; supported layer types are {', '.join(sorted(SUPPORTED_LAYERS - {'dummy'}))}. "
            "Use model.generate for this model."
        )
