"""The greedy chain."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.protocols import TreeBuilder
from specdec.trees import BestFirst, Chain, topology
from specdec.types import DraftTree
from tests.trees.lattice import Lattice, grown_as_on_an_accelerator, same_tree
from tests.trees.random_trees import caught, paths

CASES = {
    "nodes": st.integers(1, 6),
    "style": st.sampled_from(["smooth", "ties", "holes"]),
    "seed": st.integers(0, 2**32),
    "limits": st.lists(st.sampled_from([0, 1, 2, 99]), min_size=1, max_size=3),
    "budget": st.integers(0, 6),
}


def greedy_path(lattice: Lattice, row: int, root: int, length: int) -> dict[tuple[int, ...], float]:
    path, score, found = (), 0.0, {(): 0.0}
    for _ in range(length):
        tokens, edges = lattice.proposals(row, (root, *path))
        if not tokens:
            break
        path, score = (*path, tokens[0]), score + float(edges[0])
        found[path] = score
    return found


def law_chain(
    builder_of: type, nodes: int, style: str, seed: int, limits: list[int], budget: int, ranks: int = 3
) -> None:
    lattice = Lattice(vocab=6, ranks=ranks, style=style, seed=seed)
    root = torch.arange(len(limits)) % 6
    tree = builder_of(nodes).grow(lattice, root, torch.tensor(limits), budget, vocab_size=6)
    topology.check(tree)
    for row, limit in enumerate(limits):
        assert paths(tree, row) == greedy_path(lattice, row, row % 6, min(nodes, budget, limit))
    assert tree.width == int(tree.num_nodes.max())


@given(**CASES)
def test_follows_the_best_token(nodes: int, style: str, seed: int, limits: list[int], budget: int) -> None:
    law_chain(Chain, nodes, style, seed, limits, budget)


def test_a_tree_is_caught() -> None:
    caught(law_chain, BestFirst, **CASES)


def test_a_drafter_without_ranks_ends_the_chain() -> None:
    law_chain(Chain, 4, "smooth", 0, [5, 5], 4, ranks=0)


@given(**CASES)
def test_fixed_shapes_hold_the_same_tree(nodes: int, style: str, seed: int, limits: list[int], budget: int) -> None:
    def grow(how: object) -> DraftTree:
        lattice = Lattice(vocab=6, ranks=3, style=style, seed=seed)
        root = torch.arange(len(limits)) % 6
        if how == "accelerator":
            return grown_as_on_an_accelerator(Chain(nodes), lattice, root, torch.tensor(limits), budget)
        return Chain(nodes).grow(lattice, root, torch.tensor(limits), budget, vocab_size=6)

    tree = grow("accelerator")
    topology.check(tree)
    assert same_tree(tree, grow("cpu"))


def test_asks_for_one_token_and_stops_when_no_row_has_any() -> None:
    lattice = Lattice(vocab=6, ranks=3, style="holes", seed=3)
    tree = Chain(50).grow(lattice, torch.tensor([1, 2]), torch.tensor([99, 0]), 50, vocab_size=6)
    assert [count for _, _, count in lattice.asked] == [1] * int(tree.num_nodes.max())
    assert tree.num_nodes[1] == 1


@pytest.mark.parametrize(("budget", "limits"), [(0, [5, 5]), (4, [0, 0])])
def test_nothing_to_draft_asks_nobody(budget: int, limits: list[int]) -> None:
    lattice = Lattice(vocab=5, ranks=3)
    tree = Chain(4).grow(lattice, torch.tensor([1, 2]), torch.tensor(limits), budget, vocab_size=5)
    assert lattice.asked == []
    assert tree.tokens.tolist() == [[1], [2]]


def test_is_a_tree_builder() -> None:
    assert isinstance(Chain(4), TreeBuilder)
    assert (Chain(4).nodes, Chain(4).sampled, Chain(4).chain) == (4, False, True)
    with pytest.raises(ValueError, match=r"Chain\(nodes=0\)"):
        Chain(0)
