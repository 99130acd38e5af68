"""The row cache against an obvious one: lists of numbers, one per committed token and row.

Keys are numbers that occur once, values their negatives, so that a slot in the wrong place shows. After every commit
each slot that is not committed, or that no window reaches any more, is overwritten: what is dead must not matter.
"""

import copy
import dataclasses
import gc
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Gemma3TextConfig
from transformers import cache_utils as theirs
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specdec import drafters, trees
from specdec.errors import UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf.cache import RowCache, RowLayer
from specdec.hf.target import ModelTarget
from tests import helpers
from tests.trees.random_trees import caught, random_tree

WINDOW = 6
POISON = 1e9


def config(window: int = WINDOW) -> Gemma3TextConfig:
    """A sliding layer first, so that nothing may be read off layer 0, and a full one."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=window, hidden_size=8, head_dim=4)


class Dense:
    """The obvious cache: for each row, the numbers of its committed tokens and of the pending ones."""

    def __init__(self, batch: int) -> None:
        self.committed: list[list[float]] = [[] for _ in range(batch)]
        self.pending: list[list[float]] = [[] for _ in range(batch)]
        self._numbers = iter(range(1, 1_000_000))

    def draw(self, rows: int) -> Tensor:
        """Keys `[batch, 1, rows, 1]` of new rows, which are pending from now on."""
        new = [[float(next(self._numbers)) for _ in range(rows)] for _ in self.pending]
        for row, numbers in zip(self.pending, new, strict=True):
            row += numbers
        return torch.tensor(new)[:, None, :, None]

    def keep(self, paths: list[list[int]]) -> None:
        for row, (committed, pending) in enumerate(zip(self.committed, self.pending, strict=True)):
            committed += [pending[node] for node in paths[row]]
        self.pending = [[] for _ in self.pending]


def poison(cache: RowCache, value: float) -> None:
    """Overwrites every slot that no later query may see."""
    for layer in cache.row_layers:
        if not layer.is_initialized:
            continue
        for row, length in enumerate(cache.lengths.tolist()):
            for buffer in (layer.keys, layer.values):
                buffer[row, :, max(0, length - layer.base) :] = value
                if layer.sliding_window is not None:
                    buffer[row, :, : max(0, length - layer.sliding_window + 1 - layer.base)] = value


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


def law(mutate: Any, batch: int, chunks: list[int], plan: list[list[int]], growth: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "GROWTH", growth)
        mutate(patch)
        cache, dense = RowCache(config()), Dense(batch)
        prefill(cache, dense, chunks)
        rounds(cache, dense, plan, random.Random(seed))


def right(patch: pytest.MonkeyPatch) -> None:
    """No mutation."""


@given(**RUNS)
def test_the_row_cache_equals_an_obvious_cache(batch, chunks, plan, growth, seed):
    law(right, batch, chunks, plan, growth, seed)


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

    def forgetful(self: RowLayer, keys: Tensor, values: Tensor, visible: int, end: int) -> None:
        grows = end - self.base > self.keys.shape[-2] > 0
        reserve(self, keys, values, visible, end)
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
    vars(layer).update(cumulative_length=3, record_past=False, sliding_window=WINDOW)
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


class Work(TorchDispatchMode):
    """Counts the elements that operations produce."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view computes nothing.
        if isinstance(result, Tensor) and not result._is_view():
            in_place = isinstance(args[0], Tensor) and result.data_ptr() == args[0].data_ptr()
            self.elements += args[-1].numel() if in_place and isinstance(args[-1], Tensor) else result.numel()
        return result


def kept_work(context: int, paths: list[list[int]]) -> tuple[int, list[int]]:
    """Elements that `keep` computes after `context` tokens, and slots it moves per layer."""
    cache, dense = RowCache(config()), Dense(2)
    new = torch.ones(2, 1, context, 1)
    for layer in cache.row_layers:
        layer.update(new, -new)
    cache.end_prefill(2, torch.device("cpu"))
    cache.begin(8)
    for layer in cache.row_layers:
        layer.update(new[:, :, :8], new[:, :, :8])
    pointers = [layer.keys.data_ptr() for layer in cache.row_layers]
    moved: list[int] = []
    width = max(1, *map(len, paths))
    nodes = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
    counts = torch.tensor([len(path) for path in paths])
    with pytest.MonkeyPatch.context() as patch, Work() as work:
        move = RowLayer.move

        def counted(self: RowLayer, rows: Tensor, source: Tensor, target: Tensor) -> None:
            moved.append(source.numel())
            move(self, rows, source, target)

        patch.setattr(RowLayer, "move", counted)
        cache.keep(nodes, counts)
    assert pointers == [layer.keys.data_ptr() for layer in cache.row_layers], "keep() made a new buffer"
    assert dense.committed == [[], []]
    return work.elements, moved


@pytest.mark.parametrize("paths", [[[0, 2, 5], [0, 1, 7]], [[0, 3], []], [[0], [0, 1, 2]], [[], []]])
def test_e13_keeping_a_path_costs_the_same_at_every_context_length(paths):
    """A rollback that copies or re-slices the whole cache."""
    short, long = kept_work(32, paths), kept_work(8192, paths)
    assert short == long
    assert all(slots <= 2 * 8 for slots in long[1])


def test_e13_the_work_counter_notices_a_copy_of_the_cache(monkeypatch):
    move = RowLayer.move

    def copying(self: RowLayer, rows: Tensor, source: Tensor, target: Tensor) -> None:
        self.values.clone()
        move(self, rows, source, target)

    monkeypatch.setattr(RowLayer, "move", copying)
    assert kept_work(32, [[0, 2], [0, 1]])[0] != kept_work(8192, [[0, 2], [0, 1]])[0]


@pytest.mark.parametrize("paths", [[[], []], [[0, 1, 2], [0]]])
def test_g10_a_path_that_lies_in_place_moves_nothing(paths):
    """A kernel launched with nothing to move."""
    assert kept_work(32, paths)[1] == []


def elements() -> int:
    """Elements of all tensors that are alive."""
    gc.collect()
    return sum(item.numel() for item in gc.get_objects() if issubclass(type(item), Tensor))


def held(cache: RowCache) -> int:
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.row_layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_e11_memory_after_300_rounds_depends_on_the_length_only(family):
    """Memory that grows while speculation is off, or with every rejected node."""
    target = ModelTarget(helpers.model(family), torch.tensor([[5, 6, 7], [8, 9, 10]]))
    target.prefill()
    sizes = []
    for index in range(300):
        tree = random_tree(index, [1, 1] if index < 100 else [6, 4], "any")
        tree = dataclasses.replace(tree, tokens=tree.tokens % 97)
        target.verify(tree)
        target.commit(torch.tensor([[0], [0]]), torch.tensor([1, 1]))
        if index in (150, 299):
            sizes.append(elements() - held(target.cache))
    assert abs(sizes[1] - sizes[0]) < 100
    for layer in target.cache.row_layers:
        reach = 303 if layer.sliding_window is None else layer.sliding_window
        assert layer.keys.shape[2] <= (reach + tree.width) * 5 // 4 + cache_module.GROWTH
        assert not layer.keys.requires_grad, "a history of gradients would keep every round alive"


def test_e11_a_call_keeps_nothing_per_round():
    target = helpers.model()
    drafter = drafters.ModelDrafter(helpers.model(seed=1))
    generator = helpers.SpeculativeGenerator(target, drafter, trees.Chain(3))
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    # The streams of tokens themselves are preallocated, and statistics are numbers.
    sizes = [elements() for round in generator.rounds(**request) if round.index in (10, 30)]
    assert abs(sizes[1] - sizes[0]) < 1_000


def test_e11_a_finished_call_leaves_nothing_behind():
    target = helpers.model()
    drafter = drafters.ModelDrafter(helpers.model(seed=1))
    generator = helpers.SpeculativeGenerator(target, drafter, trees.Chain(3))

    def run() -> int:
        generator.generate(**helpers.batch(helpers.FOUR), max_new_tokens=12, do_sample=False, pad_token_id=0)
        return elements()

    run()
    assert run() == run()
