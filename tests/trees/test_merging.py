"""Merging trees over one root."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ShapeError, UnsupportedError
from specdec.trees import merge, topology
from specdec.types import DraftTree
from tests.trees.lattice import CountedOps, accelerator_shapes, same_tree
from tests.trees.random_trees import caught, lineage, paths, random_tree

Merge = Callable[[Sequence[DraftTree]], DraftTree]


@st.composite
def forests(draw: st.DrawFn) -> list[DraftTree]:
    """One to three trees over the same roots, from so few tokens that paths are often equal."""
    rows = draw(st.integers(1, 3))
    size = st.one_of(st.integers(1, 7), st.integers(1, 7), st.integers(1, 40))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        tree = random_tree(
            draw(st.integers(0, 2**32)),
            draw(st.lists(size, min_size=rows, max_size=rows)),
            draw(st.sampled_from(["any", "deep", "chain"])),
        )
        root = torch.arange(rows)[:, None]
        # The root's token also occurs below it, and padding repeats the root.
        tokens = torch.where((tree.parents < 0), root, tree.tokens)
        found.append(dataclasses.replace(tree, tokens=tokens))
    return found


def law_merge(function: Merge, forest: list[DraftTree]) -> None:
    """Every path once, with its best score; siblings best first."""
    merged = function(forest)
    topology.check(merged)
    assert merged.width == int(merged.num_nodes.max())
    for row in range(merged.tokens.shape[0]):
        expected: dict[tuple[int, ...], float] = {}
        for tree in forest:
            for path, score in paths(tree, row).items():
                expected[path] = max(score, expected.get(path, score))
        assert paths(merged, row) == expected
        assert same_tree(topology.dfs_order(merged), merged)


@given(forest=forests())
def test_each_path_stands_once_with_its_best_score(forest: list[DraftTree]) -> None:
    law_merge(merge, forest)


def first_score(forest: Sequence[DraftTree]) -> DraftTree:
    """Keeps the score of the first tree that holds a path."""
    merged = merge(forest)
    scores = merged.scores.clone()
    for row in range(scores.shape[0]):
        known = [paths(tree, row) for tree in forest]
        for node in range(int(merged.num_nodes[row])):
            path = tuple(int(merged.tokens[row, step]) for step in lineage(merged, row, node)[1:])
            scores[row, node] = next(tree[path] for tree in known if path in tree)
    return dataclasses.replace(merged, scores=scores)


def side_by_side(forest: Sequence[DraftTree]) -> DraftTree:
    """Hangs the second tree beside the first without looking for equal paths."""
    one, two = forest[0], forest[-1]
    parents = torch.where(two.parents[:, 1:] > 0, two.parents[:, 1:] + one.width - 1, two.parents[:, 1:])
    return topology.dfs_order(
        DraftTree(
            torch.cat([one.tokens, two.tokens[:, 1:]], 1),
            torch.cat([one.parents, parents], 1),
            one.num_nodes + two.num_nodes - 1,
            torch.cat([one.scores, two.scores[:, 1:]], 1),
        )
    )


@pytest.mark.parametrize(
    "mutant",
    [
        lambda forest: merge(forest[:1]),
        lambda forest: merge([dataclasses.replace(tree, scores=tree.scores * 2) for tree in forest]),
        first_score,
    ],
    ids=["first tree", "scores changed", "first score"],
)
def test_another_merge_is_caught(mutant: Merge) -> None:
    caught(law_merge, mutant, forest=forests())


def test_equal_siblings_are_caught() -> None:
    tree = random_tree(0, [5], "any")
    with pytest.raises(ShapeError, match="distinct tokens"):
        law_merge(side_by_side, [tree, tree])


@given(forest=forests())
def test_fixed_shapes_hold_the_same_tree(forest: list[DraftTree]) -> None:
    expected = merge(forest)
    with accelerator_shapes():
        tree = merge(forest)
    topology.check(tree)
    assert same_tree(tree, expected)


def test_one_tree_loses_its_double_siblings() -> None:
    tree = DraftTree(
        tokens=torch.tensor([[7, 5, 5, 6, 6]]),
        parents=torch.tensor([[-1, 0, 0, 1, 2]]),
        num_nodes=torch.tensor([5]),
        scores=torch.tensor([[0.0, -2.0, -1.0, -4.0, -3.0]]),
    )
    merged = merge([tree])
    assert (merged.tokens.tolist(), merged.scores.tolist()) == ([[7, 5, 6]], [[0.0, -1.0, -3.0]])


def test_merged_trees_are_cut_by_the_common_scale() -> None:
    chain, other = random_tree(1, [6], "chain"), random_tree(2, [6], "any")
    other = dataclasses.replace(other, tokens=torch.cat([chain.tokens[:, :1], other.tokens[:, 1:]], 1))
    merged = merge([chain, other])
    cut = topology.best(merged, 4)
    worst_kept = min(paths(cut, 0).values())
    assert cut.num_nodes.tolist() == [5]
    assert all(score <= worst_kept for path, score in paths(merged, 0).items() if path not in paths(cut, 0))


def test_no_host_read() -> None:
    tree, count = random_tree(0, [7, 5], "any"), CountedOps()
    with accelerator_shapes(), count:
        merge([tree, tree])
    assert count.reads == 0


def test_what_cannot_be_merged_is_refused() -> None:
    tree = random_tree(0, [4, 3], "any")
    with pytest.raises(ShapeError, match="at least one tree"):
        merge([])
    with pytest.raises(ShapeError, match="batch sizes \\[2, 1\\]"):
        merge([tree, random_tree(0, [4], "any")])
    with pytest.raises(ShapeError, match="one root per row"):
        merge([tree, dataclasses.replace(tree, tokens=tree.tokens + 1)])
    with pytest.raises(UnsupportedError, match="sampled tree cannot be merged"):
        merge([tree, random_tree(0, [4, 3], "any", vocab=3)])
