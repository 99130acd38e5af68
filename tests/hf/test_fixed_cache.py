"""The cache of device rounds against a `RowCache` that is given the same rows and keeps the same paths."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import kv, ops
from specdec.errors import UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf import fixed_cache
from specdec.hf.cache import RowCache
from specdec.hf.fixed_cache import FixedCache, PassedLayer
from specdec.kv import KVCacheConfig
from specdec.protocols import KVCodec
from tests import helpers
from tests.kv.codecs import CODECS, Digits
from tests.trees.random_trees import caught

CONFIG = helpers.model("gemma3").config
"""Four layers, every other one with a window of 8; two heads of 16 numbers."""
LAYERS, HEADS, DIM, WINDOW = 4, 2, 16, 8
ALL: dict[str, KVCodec] = {**CODECS, "digits": Digits()}


class Pair:
    """The same text in both caches.

    Args:
        batch: rows.
        chunks: rows of each forward of the prompt.
        padding: slots of padding at the head of each row.
        width: rows of a round.
        capacity: slots of the layers that see everything.
        codecs: of keys and values.
        seed: of all rows.
    """

    def __init__(
        self,
        batch: int,
        chunks: list[int],
        padding: list[int],
        width: int,
        capacity: int,
        codecs: tuple[KVCodec, KVCodec],
        seed: int,
    ) -> None:
        self.batch, self.width = batch, width
        self.codecs = KVCacheConfig(keys=codecs[0], values=codecs[1])
        self.generator = torch.Generator().manual_seed(seed)
        source = self.prompt(chunks, padding)
        self.fixed = FixedCache(source, width=width, capacity=capacity, starts=self.starts)
        assert all(rows.parts == () for layer in source.row_layers for rows in layer.stored.values())

    def again(self, chunks: list[int], padding: list[int]) -> None:
        """Another prompt in the same buffers."""
        source = self.prompt(chunks, padding)
        self.fixed.load(source, self.starts)
        assert all(rows.parts == () for layer in source.row_layers for rows in layer.stored.values())

    def prompt(self, chunks: list[int], padding: list[int]) -> RowCache:
        """Runs a prompt with the cache to compare with, and with the one that is returned."""
        length = sum(chunks)
        starts = torch.tensor([min(padding[row % len(padding)], length - 1) for row in range(self.batch)])
        self.starts = starts if bool(starts.any()) else None
        mask = None if self.starts is None else torch.arange(length) >= starts[:, None]
        mine, source = (RowCache(CONFIG, self.codecs, mask) for _ in range(2))
        for rows in chunks:
            for layer, new in enumerate(self.draw(rows)):
                for cache in (mine, source):
                    cache.row_layers[layer].update(*new)
        for cache in (mine, source):
            cache.end_prefill(self.batch, torch.device("cpu"))
        self.row = mine
        return source

    def draw(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """New keys and values for each layer; whole numbers, which `Digits` stores exactly."""
        shape = (2, self.batch, HEADS, rows, DIM)
        new = [torch.randn(shape, generator=self.generator) * 9 for _ in range(LAYERS)]
        return [(one.round()[0], one.round()[1]) for one in new]

    def round(self, nodes: Tensor, counts: Tensor, ahead: int = 0) -> bool:
        """Writes the rows of a tree and keeps a path, if there is room."""
        lengths = self.row.lengths
        if not self.fixed.fits(int(lengths.min()), int(lengths.max()) + ahead):
            return False
        self.row.begin(self.width)
        self.fixed.begin(lengths.clone(), self.width)
        for stack, forward in zip(self.fixed.stacks, self.fixed._forwards, strict=True):
            assert 0 <= int(forward.slots.min()) <= int(forward.slots.max()) < stack.slots
        for layer, (keys, values) in enumerate(self.draw(self.width)):
            self.row.row_layers[layer].update(keys, values)
            stored = self.fixed.store(layer, keys, values)
            self.check(layer, stored, lengths, self.width)
        self.row.keep(nodes, counts)
        self.fixed.keep(nodes, counts)
        self.fixed.begin(self.row.lengths.clone(), 1)
        for layer in range(LAYERS):
            self.check(layer, self.stored(layer), self.row.lengths, 0)
        return True

    def stored(self, layer: int) -> Any:
        """What `store` would return for a layer, if there was nothing to write."""
        place, index = self.fixed._places[layer]
        stack = self.fixed.stacks[place]
        return (
            *(half.layer(index, torch.float32) for half in stack.halves),
            self.fixed._forwards[place],
            stack.window,
        )

    def check(self, layer: int, stored: Any, lengths: Tensor, new: int) -> None:
        """All that a query may see of a layer lies where attention looks, part by part."""
        keys, values, forward, window = stored
        mine = self.row.row_layers[layer]
        assert window == mine.sliding_window
        base = lengths - forward.lengths
        assert len(set(base.tolist())) == 1
        assert int(base[0]) == self.fixed.stacks[self.fixed._places[layer][0]].base
        if self.starts is None:
            assert forward.starts is None
        else:
            assert torch.equal(forward.starts, (self.starts - base).clamp_min(0))
        for row, length in enumerate(lengths.tolist()):
            first = 0 if window is None else max(0, length - window + 1)
            here, there = (slice(first - start, length + new - start) for start in (int(base[row]), mine.base))
            assert here.start >= 0, "a slot that the window still sees is gone"
            for encoded, rows in zip((keys, values), mine.stored.values(), strict=True):
                assert encoded.codec == rows.codec
                for found, wanted in zip(encoded.parts, rows.parts, strict=True):
                    assert torch.equal(found[row, :, here], wanted[row, :, there])
                assert torch.equal(encoded.decode()[row, :, here], rows.read(0, rows.slots)[row, :, there])


INPUTS: dict[str, st.SearchStrategy[Any]] = {
    "batch": st.integers(1, 3),
    "prompts": st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=2), min_size=1, max_size=2),
    "padding": st.lists(st.sampled_from([0, 0, 1, 5, 20]), min_size=1, max_size=3),
    "width": st.integers(1, 8),
    "rounds": st.integers(1, 6),
    "keys": st.sampled_from(sorted(ALL)),
    "values": st.sampled_from(sorted(ALL)),
    "growth": st.sampled_from([0, 1, 5, 40]),
    "ahead": st.booleans(),
    "seed": st.integers(0, 2**32),
}


def law(
    mutate: Callable[[pytest.MonkeyPatch], None],
    batch: int,
    prompts: list[list[int]],
    padding: list[int],
    width: int,
    rounds: int,
    keys: str,
    values: str,
    growth: int,
    ahead: bool,
    seed: int,
) -> list[int]:
    """Runs rounds on one prompt after the other; returns how far the windows have moved."""
    rng, moved = random.Random(seed), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_cache, "GROWTH", growth)
        patch.setattr(cache_module, "GROWTH", max(1, growth))
        mutate(patch)
        capacity = max(map(sum, prompts)) + (rounds + 2) * width
        pair = Pair(batch, prompts[0], padding, width, capacity, (ALL[keys], ALL[values]), seed)
        for index, chunks in enumerate(prompts):
            if index:
                padding = [rng.randint(1, 9) for _ in range(batch)] if pair.fixed.starts is not None else [0]
                pair.again(chunks, padding)
                if (pair.starts is None) != (pair.fixed.starts is None):
                    continue  # a prompt of one slot has no padding; a program is not shared between the two
            begun = [stack.base for stack in pair.fixed.stacks]
            for _ in range(rounds):
                # A row that stopped keeps nothing; the others keep their root at least.
                paths = [
                    [0, *sorted(rng.sample(range(1, width), rng.randint(0, width - 1)))] if rng.random() < 0.9 else []
                    for _ in range(batch)
                ]
                longest = max(1, *map(len, paths))
                nodes = torch.tensor([path + [-1] * (longest - len(path)) for path in paths])
                assert pair.round(nodes, torch.tensor([len(path) for path in paths]), ahead * width)
            moved += [stack.base - first for stack, first in zip(pair.fixed.stacks, begun, strict=True)]
    return moved


def right(patch: pytest.MonkeyPatch) -> None:
    """No mutation."""


@given(**INPUTS)
def test_rows_are_those_of_a_row_cache(**inputs: Any) -> None:
    law(right, **inputs)


@pytest.mark.parametrize(("name", "batch"), [*((name, 1) for name in ALL), ("int8, rotated", 3)])
def test_every_codec_in_a_window_that_moves(name: str, batch: int) -> None:
    options = {"padding": [3], "width": 4, "rounds": 7, "growth": 1, "ahead": True, "seed": 1}
    moved = law(right, batch=batch, prompts=[[5, 9], [16]], keys=name, values=name, **options)
    assert any(moved) == (batch == 1), "the rows of a batch drift apart, and only a single row is held to its window"


def _in_place(patch: pytest.MonkeyPatch) -> None:
    keep = FixedCache.keep

    def in_place(self: FixedCache, nodes: Tensor, counts: Tensor) -> None:
        keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts)

    patch.setattr(FixedCache, "keep", in_place)


def _first_layer_alone(patch: pytest.MonkeyPatch) -> None:
    move = ops.move_rows
    patch.setattr(ops, "move_rows", lambda parts, *rest: move(tuple(part[:1] for part in parts), *rest))


def _one_half_alone(patch: pytest.MonkeyPatch) -> None:
    move = ops.move_rows
    patch.setattr(ops, "move_rows", lambda parts, *rest: move(parts[: len(parts) // 2], *rest))


def _base_stays(patch: pytest.MonkeyPatch) -> None:
    """The host moves a window and the device does not hear of it."""
    fits = FixedCache.fits

    def deaf(self: FixedCache, shortest: int, longest: int) -> bool:
        before = [stack.base_on_device.clone() for stack in self.stacks]
        answer = fits(self, shortest, longest)
        for stack, base in zip(self.stacks, before, strict=True):
            stack.base_on_device.copy_(base)
        return answer

    patch.setattr(FixedCache, "fits", deaf)


def _window_by_the_next_round(patch: pytest.MonkeyPatch) -> None:
    fits = FixedCache.fits
    patch.setattr(FixedCache, "fits", lambda self, shortest, longest: fits(self, shortest + 1, longest))


def _padding_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    load = FixedCache.load
    patch.setattr(FixedCache, "load", lambda self, source, starts: load(self, source, None))  # noqa: ARG005 - the mistake


def _codecs_are_not_taught_again(patch: pytest.MonkeyPatch) -> None:
    load = FixedCache.load

    def ignorant(self: FixedCache, source: RowCache, starts: Tensor | None) -> None:
        first = not hasattr(self, "taught")
        self.taught = True
        if not first:
            for layer in source.row_layers:
                for rows in layer.stored.values():
                    rows.state = tuple(torch.ones_like(state) for state in rows.state)
        load(self, source, starts)

    patch.setattr(FixedCache, "load", ignorant)


def _slots_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    begin = FixedCache.begin

    def shared(self: FixedCache, cached: Tensor, rows: int) -> None:
        begin(self, cached, rows)
        self._forwards = [replace(one, slots=one.slots[:1].expand_as(one.slots)) for one in self._forwards]

    patch.setattr(FixedCache, "begin", shared)


@pytest.mark.parametrize(
    "mutate",
    [
        _in_place,
        _first_layer_alone,
        _one_half_alone,
        _base_stays,
        _window_by_the_next_round,
        _padding_is_forgotten,
        _codecs_are_not_taught_again,
        _slots_of_the_first_row,
    ],
)
def test_a_wrong_fixed_cache_is_noticed(mutate: Any) -> None:
    caught(law, mutate, **INPUTS)


def test_layers_that_store_alike_are_moved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    move = ops.move_rows

    def counted(parts: tuple[Tensor, ...], *rest: Tensor) -> None:
        launches.append(len(parts))
        move(parts, *rest)

    monkeypatch.setattr(ops, "move_rows", counted)
    pair = Pair(1, [9], [0], 4, 64, (kv.Int8(), kv.Plain()), 0)
    assert pair.round(torch.tensor([[0, 2]]), torch.tensor([2]))
    assert launches == [3, 3]  # two stacks: codes, scales and values of two layers each


def test_room_ends_where_a_layer_sees_everything() -> None:
    """The window moves on; what all queries see must fit."""
    pair = Pair(1, [30], [0], 4, 40, (kv.Plain(), kv.Plain()), 0)
    path, count = torch.tensor([[0, 1, 2]]), torch.tensor([3])
    assert [pair.round(path, count) for _ in range(3)] == [True, True, True]
    assert not pair.round(path, count)  # 39 and 4 more
    assert int(pair.row.lengths) == 39


def test_two_rounds_have_room_behind_a_prompt() -> None:
    """Before a graph is captured its program runs twice, and nobody moves a window in between."""
    for length in range(8, 300):
        source = RowCache(CONFIG)
        for layer in source.row_layers:
            layer.update(torch.ones(1, HEADS, length, DIM), torch.ones(1, HEADS, length, DIM))
        source.end_prefill(1, torch.device("cpu"))
        cache = FixedCache(source, width=8, capacity=1000, starts=None)
        assert all(length + 2 * cache.width - stack.base <= stack.slots for stack in cache.stacks), length


def test_an_unhashable_codec_is_served() -> None:
    """What a codec is compared by is its own affair."""

    class Own(Digits):
        __hash__ = None  # type: ignore[assignment]  # Python's way to say so

    pair = Pair(2, [9], [0], 4, 64, (Own(), Own()), 0)
    assert pair.round(torch.tensor([[0, 2], [0, 3]]), torch.tensor([2, 2]))


def test_layers_without_rows_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layers that share keys and values with another layer"):
        FixedCache(RowCache(helpers.model("gemma4_shared").config), width=4, capacity=64, starts=None)


def test_the_model_sees_layers_without_a_past() -> None:
    """Masks and lengths are said by the round, not by the layers."""
    layer = PassedLayer()
    keys, values = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    layer.lazy_initialization(keys, values)
    found = layer.update(keys, values)
    assert found[0] is keys
    assert found[1] is values
    assert (layer.get_mask_sizes(3), layer.get_seq_length(), layer.get_max_length()) == ((3, 0), 0, -1)
