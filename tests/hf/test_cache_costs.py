"""What the cache costs: memory by length alone, and paths kept in time that does not depend on the context."""

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import drafters, trees
from specdec.hf import cache as cache_module
from specdec.hf.cache import RowCache, RowLayer
from specdec.hf.target import ModelTarget
from tests import helpers
from tests.hf.dense import config
from tests.trees.random_trees import random_tree


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
    cache = RowCache(config())
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
        assert layer.keys.shape[2] <= (reach + tree.width + cache_module.GROWTH) * 5 // 4 + cache_module.GROWTH
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
