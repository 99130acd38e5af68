"""A target that is called by hand: in the right order, with paths and trees that are some, or not at all."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import ShapeError, SpecdecError
from specdec.hf.target import ModelTarget, open_model
from specdec.trees import topology
from specdec.types import DraftTree
from tests import helpers
from tests.unchecked import unchecked


def ints(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def tree(*parents: int) -> DraftTree:
    """A tree of one row, its tokens 5, 6, ..."""
    count = len(parents)
    tokens = torch.arange(5, 5 + count)[None]
    return DraftTree(tokens, ints(parents), ints(count), torch.zeros(1, count))


def opened() -> ModelTarget:
    target = ModelTarget(helpers.model(), ints([5, 6, 7]))
    target.prefill()
    return target


PATHS: dict[str, tuple[list[int], int]] = {
    "a node that is not there": ([0, 3], 2),
    "a node below 0": ([0, -1], 2),
    "siblings": ([1, 2], 2),
    "the wrong way": ([1, 0], 2),
    "no root": ([1], 1),
    "more than there are": ([0, 1], 3),
    "fewer than none": ([0, 1], -1),
}


@pytest.mark.parametrize("name", PATHS)
def test_what_is_no_root_path_is_not_kept(name: str) -> None:
    path, count = PATHS[name]
    target = opened()
    target.verify(tree(-1, 0, 0))
    with pytest.raises(ShapeError, match=r"commit: row 0: the first .* are not a root path of a tree with parents"):
        target.commit(ints(path), ints(count))
    assert target.lengths.tolist() == [3]
    target.commit(ints([0, 2]), ints(2))
    assert target.lengths.tolist() == [5]


def test_paths_are_int64(monkeypatch: pytest.MonkeyPatch) -> None:
    target = opened()
    target.verify(tree(-1, 0, 0))
    commit = inspect.unwrap(ModelTarget.commit)
    unchecked(monkeypatch, topology)
    for nodes, counts in ((ints([0]).int(), ints(1)), (ints([0]), ints(1).int()), (ints([0], [0]), ints(1))):
        with pytest.raises(ShapeError, match=r"commit: (nodes|counts) must be int64"):
            commit(target, nodes, counts)


def test_calls_come_in_order() -> None:
    target = ModelTarget(helpers.model(), ints([5, 6, 7]))
    with pytest.raises(SpecdecError, match=r"needs a prompt in the cache; call prefill\(\) first"):
        target.verify(tree(-1, 0))
    with pytest.raises(SpecdecError, match=r"without a tree; call verify\(\) first"):
        target.commit(ints([0]), ints(1))
    target.prefill()
    with pytest.raises(SpecdecError, match=r"prefill\(\) ran already"):
        target.prefill()
    target.verify(tree(-1, 0))
    target.commit(ints([0]), ints(1))
    with pytest.raises(SpecdecError, match=r"call verify\(\) first, and commit once"):
        target.commit(ints([0]), ints(1))


def test_parents_come_before_their_children() -> None:
    target = opened()
    with pytest.raises(ShapeError, match="verify: every node needs a parent before it"):
        target.verify(tree(-1, 2, 0))
    both = DraftTree(ints([5, 6], [5, 6]), ints([-1, 0], [-1, 0]), ints(2, 2), torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="verify: expected a tree for each of 1 texts"):
        target.verify(both)


@pytest.mark.parametrize("mask", [[1, 1, 1], None, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 3)])
def test_a_mask_says_of_each_token_whether_it_is_one(mask: Any) -> None:
    with pytest.raises(ShapeError, match=r"open_model: mask must be boolean \[1, 3\], True for tokens that count, got"):
        inspect.unwrap(open_model)(helpers.model(), ints([5, 6, 7]), mask)
