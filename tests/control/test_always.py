"""The constant controller is constant."""

import pytest
import torch

from specdec.control import Always
from specdec.protocols import Controller
from specdec.types import DraftTree


@pytest.mark.parametrize(("nodes", "builder", "budget"), [(None, 15, 15), (4, 15, 4), (20, 15, 15), (0, 15, 0)])
def test_budget(nodes, builder, budget):
    controller = Always(nodes)
    controller.start(builder, sampled=True)
    assert [controller.budget() for _ in range(3)] == [budget] * 3


def test_the_tree_is_kept():
    tree = DraftTree.from_root(torch.tensor([1]))
    assert Always().prune(tree) is tree


def test_it_is_a_controller():
    assert isinstance(Always(), Controller)


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        Always(-1)
