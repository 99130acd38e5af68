"""The row cache against an obvious one: lists of numbers, one per committed token and row.

Keys are numbers that occur once, values their negatives, so that a slot in the wrong place shows. After every commit
each slot that is not committed, or that no window reaches any more, is overwritten: what is dead must not matter.
"""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers import cache_utils as theirs
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specdec.errors import UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf.cache import RowCache, RowLayer
from specdec.kv import KVCacheConfig
from tests import helpers
from tests.hf.dense import POISON, WINDOW, Dense, config, poison
from tests.kv.codecs import Digits
from tests.trees.random_trees import caught


def check(cache: RowCache, dense: Dense, found: list[tuple[Tensor, Tensor]], before: list[tuple[int, int]]) -> None:
    """What each layer showed to a forward: all that a query may see, at the slots that the mask assumes."""
    lengths = [len(row) for row in dense.committed]
    assert cache.lengths.tolist() == lengths
    for layer, (keys, values), (columns, first) in zip(cache.row_layers, found, before, strict=True):
        assert keys.shape[2] == values.shape[2] == columns
        for row, (committed, pending) in enumerate(zip(dense.committed, dense.pending, strict=True)):
            text = committed + pending
            reach = 0 if layer.sliding_window is None else max(0, len(committed) - layer.sliding_window + 1)
            assert first <= reach, "a slot that the window still sees is not shown"
            seen = slice(reach - first, len(text) - first)
            assert keys[row, 0, seen, 0].tolist() == text[reach:]
            assert (-values[row, 0, seen, 0]).tolist() == text[reach:]


def forward(cache: RowCache, dense: Dense, rows: int) -> None:
    """One forward of `rows` rows through both caches."""
    before = [layer.get_mask_sizes(rows) for layer in cache.row_layers]
    new = dense.draw(rows)
    found = [layer.update(new, -new) for layer in cache.row_layers]
    check(cache, dense, found, before)


def prefill(cache: RowCache, dense: Dense, chunks: list[int]) -> None:
    batch = len(dense.committed)
    for rows in chunks:
        before = [layer.get_mask_sizes(rows) for layer in cache.row_layers]
        new = dense.draw(rows)
        for layer, (columns, first) in zip(cache.row_layers, before, strict=True):
            shown, _ = layer.update(new, -new)
            text = [old + more for old, more in zip(dense.committed, dense.pending, strict=True)]
            reach = 0 if layer.sliding_window is None else max(0, len(dense.committed[0]) - layer.sliding_window + 1)
            assert shown.shape[2] == columns
            assert shown[:, 0, reach - first :, 0].tolist() == [row[reach:] for row in text]
        dense.keep([list(range(rows))] * batch)
    cache.end_prefill(batch, torch.device("cpu"))


def rounds(cache: RowCache, dense: Dense, plan: list[list[int]], rng: random.Random) -> None:
    """Rounds of several levels each, every row keeping a path of its own (or nothing)."""
    for levels in plan:
        for rows in levels:
            cache.begin(rows)
            forward(cache, dense, rows)
        paths = [sorted(rng.sample(range(sum(levels)), rng.randint(0, sum(levels)))) for _ in dense.committed]
        width = max(1, *map(len, paths))
        nodes = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
        cache.keep(nodes, torch.tensor([len(path) for path in paths]))
        dense.keep(paths)
        poison(cache, POISON)
    cache.begin(1)
    forward(cache, dense, 1)


RUNS = {
    "batch": st.integers(1, 4),
    "chunks": st.lists(st.integers(1, 9), min_size=1, max_size=3),
    "plan": st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), max_size=6),
    "growth": st.sampled_from([1, 3, 256]),
    "seed": st.integers(0, 2**32),
}


def law(
    mutate: Any,
    batch: int,
    chunks: list[int],
    plan: list[list[int]],
    growth: int,
    seed: int,
    codecs: KVCacheConfig | None = None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "GROWTH", growth)
        mutate(patch)
        cache, dense = RowCache(config(), codecs), Dense(batch)
        prefill(cache, dense, chunks)
        rounds(cache, dense, plan, random.Random(seed))


def right(patch: pytest.MonkeyPatch) -> None:
    """No mutation."""


@given(**RUNS)
def test_the_row_cache_equals_an_obvious_cache(batch, chunks, plan, growth, seed):
    law(right, batch, chunks, plan, growth, seed)


@given(**RUNS)
def test_a_code_of_several_parts_is_moved_as_one(batch, chunks, plan, growth, seed):
    law(right, batch, chunks, plan, growth, seed, KVCacheConfig(keys=Digits(), values=Digits()))


def _nothing_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLayer, "move", lambda *_: None)


def _one_slot_at_a_time(patch: pytest.MonkeyPatch) -> None:
    def move(self: RowLayer, rows: Tensor, source: Tensor, target: Tensor) -> None:
        # Right for sorted paths, wrong as soon as targets are written from the back.
        for column in reversed(range(source.shape[1])):
            self.keys[rows[:, 0], :, target[:, column] - self.base] = self.keys[
                rows[:, 0], :, source[:, column] - self.base
            ]

    patch.setattr(RowLayer, "move", move)


def _rows_share_a_length(patch: pytest.MonkeyPatch) -> None:
    begin = RowCache.begin

    def shared(self: RowCache, rows: int) -> Any:
        lengths = self.lengths
        self.lengths = lengths.max().expand_as(lengths)
        plan = begin(self, rows)
        self.lengths = lengths
        return plan

    patch.setattr(RowCache, "begin", shared)


def _window_by_the_longest_row(patch: pytest.MonkeyPatch) -> None:
    first = RowLayer.first_visible
    patch.setattr(RowLayer, "first_visible", lambda self, length: first(self, length + 1))


def _growth_forgets(patch: pytest.MonkeyPatch) -> None:
    reserve = RowLayer._reserve

    def forgetful(self: RowLayer, visible: int, end: int) -> None:
        grows = end - self.base > self.keys.shape[-2] > 0
        reserve(self, visible, end)
        if grows:
            self.keys.zero_()

    patch.setattr(RowLayer, "_reserve", forgetful)


@pytest.mark.parametrize(
    "mutate", [_nothing_moves, _one_slot_at_a_time, _rows_share_a_length, _window_by_the_longest_row, _growth_forgets]
)
def test_a_wrong_row_cache_is_noticed(mutate):
    caught(law, mutate, **RUNS)


def filled(made: DynamicCache, tokens: int, dense: Dense) -> DynamicCache:
    """A cache of transformers that has seen `tokens` tokens, one at a time."""
    for _ in range(tokens):
        new = dense.draw(1)
        for layer in range(2):
            made.update(new, -new, layer)
        dense.keep([[0]] * len(dense.committed))
    return made


@pytest.mark.parametrize("sliding", [True, False], ids=["sliding layers", "full layers only"])
@given(tokens=st.integers(0, 3 * WINDOW), more=st.integers(1, 9), plan=RUNS["plan"], seed=RUNS["seed"])
def test_a_loaded_cache_goes_on_as_if_it_had_run_the_text_itself(sliding, tokens, more, plan, seed):
    dense = Dense(2)
    given_cache = filled(DynamicCache(config=config()) if sliding else DynamicCache(), tokens, dense)
    before = copy.deepcopy([(layer.keys, layer.values, layer.get_seq_length()) for layer in given_cache.layers])
    cache = RowCache(config())
    cache.load(given_cache)
    assert [layer.filled for layer in cache.row_layers] == [tokens, tokens]
    prefill(cache, dense, [more])
    rounds(cache, dense, plan, random.Random(seed))
    for layer, (keys, values, length) in zip(given_cache.layers, before, strict=True):
        assert layer.get_seq_length() == length
        if keys is not None:
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)


@given(chunks=RUNS["chunks"], paths=st.lists(st.integers(1, 5), max_size=8), seed=RUNS["seed"])
def test_c8_the_returned_cache_is_what_transformers_would_have_kept(chunks, paths, seed):
    """Length read from a sliding layer; a window kept one slot too short or too long."""
    cache, dense, rng = RowCache(config()), Dense(2), random.Random(seed)
    prefill(cache, dense, chunks)
    for count in paths:
        cache.begin(6)
        forward(cache, dense, 6)
        kept = [sorted(rng.sample(range(6), count)) for _ in range(2)]
        cache.keep(torch.tensor(kept), torch.tensor([count, count]))
        dense.keep(kept)
        poison(cache, POISON)
    text = torch.tensor(dense.committed)[:, None, :, None]
    expected = DynamicCache(config=config())
    for column in range(text.shape[2]):
        for layer in range(2):
            expected.update(text[:, :, column : column + 1], -text[:, :, column : column + 1], layer)
    returned = cache.to_dynamic(config())
    assert returned.get_seq_length() == expected.get_seq_length() == text.shape[2]
    for mine, wanted in zip(returned.layers, expected.layers, strict=True):
        assert torch.equal(mine.keys, wanted.keys)
        assert torch.equal(mine.values, wanted.values)
        assert mine.get_mask_sizes(3) == wanted.get_mask_sizes(3)
    again = RowCache(config())
    again.load(returned)
    prefill(again, dense, [2])
    assert returned.layers[1].keys.data_ptr() != cache.layers[1].keys.data_ptr(), "the result shares live memory"


def test_rows_of_different_length_have_no_dynamic_cache():
    cache, dense = RowCache(config()), Dense(2)
    prefill(cache, dense, [4])
    cache.begin(2)
    forward(cache, dense, 2)
    cache.keep(torch.tensor([[0, 1], [0, -1]]), torch.tensor([2, 1]))
    assert cache.to_dynamic(config()) is None


LAYER_CLASSES = sorted(
    {
        value
        for value in vars(theirs).values()
        if isinstance(value, type)
        and issubclass(value, (theirs.CacheLayerMixin, theirs.LinearAttentionCacheLayerMixin))
        and not getattr(value, "__abstractmethods__", None)
    },
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", LAYER_CLASSES, ids=lambda cls: cls.__name__)
def test_c10_e19_every_layer_class_of_transformers_is_loaded_exactly_or_refused_by_name(cls):
    """A type decided by a side property: quantized layers inherit from plain ones and would pass for them."""
    layer = cls.__new__(cls)
    vars(layer).update(is_initialized=True, keys=torch.ones(1, 1, 3, 1), values=torch.ones(1, 1, 3, 1))
    vars(layer).update(device=torch.device("cpu"), cumulative_length=3, record_past=False, sliding_window=WINDOW)
    given_cache = theirs.Cache(layers=[layer, layer])
    cache = RowCache(config())
    if cls in (DynamicLayer, DynamicSlidingWindowLayer):
        cache.load(given_cache)
        assert [mine.filled for mine in cache.row_layers] == [3, 3]
    else:
        with pytest.raises(UnsupportedError, match=cls.__name__):
            cache.load(given_cache)


def test_c10_an_encoder_decoder_cache_is_refused_by_name():
    pair = theirs.EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(UnsupportedError, match="EncoderDecoderCache"):
        RowCache(config()).load(pair)


@pytest.mark.parametrize("name", ["static", "offloaded_static", "quantized", "offloaded"])
def test_e7_e19_other_caches_are_refused_by_name_before_the_model_runs(name):
    """A preallocated, quantized or offloaded cache of transformers has no place for drafted rows: say so."""
    model = helpers.model()
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, "do_sample": False}
    with helpers.forwards(model) as calls:
        for option in ({"cache_implementation": name}, {"cache": theirs.StaticCache(model.config, max_cache_len=64)}):
            with pytest.raises(UnsupportedError, match=f"cache_implementation='{name}'|StaticLayer"):
                helpers.SpeculativeGenerator(model).generate(**request, **option)
    assert not calls
