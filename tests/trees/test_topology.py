"""Laws of the index algebra. Each is written for any implementation, so that wrong ones can be shown to fail it."""

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.trees import topology
from specdec.types import DraftTree
from tests.trees.random_trees import caught, lineage, paths, random_tree, trees

Seed = st.integers(0, 2**32)


def law_ancestor_matrix(function: Callable[[Tensor], Tensor], tree: DraftTree) -> None:
    matrix = function(tree.parents)
    for row in range(matrix.shape[0]):
        for node in range(tree.width):
            assert matrix[row, node].nonzero().flatten().tolist() == lineage(tree, row, node)


def law_pack(function: Callable[[Tensor], Tensor], tree: DraftTree) -> None:
    matrix = topology.ancestor_matrix(tree.parents)
    words = function(matrix)
    assert words.dtype == torch.int64
    assert words.shape[-1] == -(-tree.width // 64)
    for node in range(tree.width):
        number = sum((int(word) % 2**64) << (64 * index) for index, word in enumerate(words[0, node]))
        assert number == sum(1 << ancestor for ancestor in lineage(tree, 0, node))


def law_unpack(function: Callable[[Tensor, int], Tensor], tree: DraftTree) -> None:
    matrix = topology.ancestor_matrix(tree.parents)
    assert torch.equal(function(topology.pack(matrix), tree.width), matrix)


def law_depths(function: Callable[[Tensor], Tensor], tree: DraftTree) -> None:
    found = function(tree.parents)
    popcount = topology.unpack(topology.ancestors(tree), tree.width).sum(-1)
    assert torch.equal(found, popcount - 1)
    for row in range(found.shape[0]):
        assert found[row].tolist() == [len(lineage(tree, row, node)) - 1 for node in range(tree.width)]


def law_num_children(function: Callable[[Tensor], Tensor], tree: DraftTree) -> None:
    found = function(tree.parents)
    for row, parents in enumerate(tree.parents.tolist()):
        assert found[row].tolist() == [parents.count(node) for node in range(tree.width)]


def law_child_with_token(function: Callable[[DraftTree, Tensor, Tensor], Tensor], tree: DraftTree, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        node = [rng.randrange(-1, size) for size in tree.num_nodes.tolist()]
        token = [rng.choice(row) for row in tree.tokens.tolist()]
        expected = [
            next((c for c in range(1, size) if above[c] == n and tokens[c] == t), -1)
            for n, t, size, above, tokens in zip(
                node, token, tree.num_nodes.tolist(), tree.parents.tolist(), tree.tokens.tolist(), strict=True
            )
        ]
        assert function(tree, torch.tensor(node), torch.tensor(token)).tolist() == expected


def law_path_to(function: Callable[[DraftTree, Tensor], Tensor], tree: DraftTree, seed: int) -> None:
    rng = random.Random(seed)
    node = [rng.randrange(size) for size in tree.num_nodes.tolist()]
    found = function(tree, torch.tensor(node))
    expected = [lineage(tree, row, n)[1:] for row, n in enumerate(node)]
    assert found.shape[1] == max(1, *map(len, expected))
    for row, path in enumerate(expected):
        assert found[row].tolist() == path + [-1] * (found.shape[1] - len(path))


def law_take(function: Callable[[DraftTree, Tensor, Tensor], DraftTree], tree: DraftTree, seed: int) -> None:
    """Any selection that is closed under parents, in any topological order, keeps its paths, scores and laws."""
    rng = random.Random(seed)
    orders: list[list[int]] = []
    for size, parents in zip(tree.num_nodes.tolist(), tree.parents.tolist(), strict=True):
        order = [0]
        for _ in range(rng.randrange(size)):
            order.append(rng.choice([n for n in range(1, size) if n not in order and parents[n] in order]))
        orders.append(order)
    width = max(map(len, orders))
    # Behind the counts stands noise, which must not matter.
    nodes = torch.tensor([o + [rng.randrange(tree.width) for _ in range(width - len(o))] for o in orders])
    found = function(tree, nodes, torch.tensor([len(order) for order in orders]))
    topology.check(found)
    for row, order in enumerate(orders):
        assert found.num_nodes[row] == len(order)
        for new, old in enumerate(order):
            old_path, new_path = lineage(tree, row, old), lineage(found, row, new)
            assert [order[node] for node in new_path] == old_path
            assert found.tokens[row, new] == tree.tokens[row, old]
            assert found.scores[row, new] == tree.scores[row, old]
            if tree.draft_probs is not None:
                assert torch.equal(found.draft_probs[row, new], tree.draft_probs[row, old])
        assert (found.tokens[row, len(order) :] == tree.tokens[row, 0]).all()
        assert (found.scores[row, len(order) :] == -torch.inf).all()


def law_prune(function: Callable[[DraftTree, Tensor], DraftTree], tree: DraftTree, seed: int) -> None:
    keep = torch.rand(tree.tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
    before = keep.clone()
    found = function(tree, keep)
    assert torch.equal(keep, before)
    topology.check(found)
    for row in range(keep.shape[0]):
        kept = [
            node
            for node in range(int(tree.num_nodes[row]))
            if all(step == 0 or keep[row, step] for step in lineage(tree, row, node))
        ]
        assert list(paths(found, row).items()) == [
            item for node, item in enumerate(paths(tree, row).items()) if node in kept
        ]
    assert found.width == int(found.num_nodes.max())


def law_best(function: Callable[[DraftTree, int], DraftTree], tree: DraftTree, seed: int) -> None:
    budget = seed % (tree.width + 2)
    found = function(tree, budget)
    topology.check(found)
    for row in range(tree.tokens.shape[0]):
        ranked = sorted(paths(tree, row).items(), key=lambda item: -item[1])[: budget + 1]
        assert set(paths(found, row).items()) == set(ranked)


def law_dfs_order(function: Callable[[DraftTree], DraftTree], tree: DraftTree) -> None:
    found = function(tree)
    topology.check(found)
    for row in range(tree.tokens.shape[0]):
        old = list(paths(tree, row).items())
        assert list(paths(found, row).items()) == [old[node] for node in preorder(tree, row, 0)]


def preorder(tree: DraftTree, row: int, node: int) -> list[int]:
    children = [c for c, above in enumerate(tree.parents[row].tolist()) if above == node]
    if tree.draft_probs is None:
        children.sort(key=lambda child: -float(tree.scores[row, child]))
    return [node, *(below for child in children for below in preorder(tree, row, child))]


def breadth_first(tree: DraftTree) -> DraftTree:
    order = (topology.depths(tree.parents) + 1000 * ~tree.valid).argsort(dim=-1, stable=True)
    return topology.take(tree, order, tree.num_nodes)


def worst_first(tree: DraftTree) -> DraftTree:
    flipped = topology.dfs_order(dataclasses.replace(tree, scores=-tree.scores.masked_fill(~tree.valid, torch.inf)))
    return dataclasses.replace(flipped, scores=-flipped.scores)


def reattached(tree: DraftTree, keep: Tensor) -> DraftTree:
    """Keeps marked nodes whose parent is gone, on the root."""
    marked = (keep & tree.valid).index_fill(1, torch.tensor([0]), True)
    parents = torch.where(marked.gather(1, tree.parents.clamp_min(0)), tree.parents, 0)
    parents = torch.where(tree.parents < 0, -1, parents)
    return topology.prune(dataclasses.replace(tree, parents=parents), marked)


def late_winners(tree: DraftTree, budget: int) -> DraftTree:
    order = tree.scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, : budget + 1]
    return topology.prune(tree, torch.zeros_like(tree.valid).scatter_(1, tree.width - 1 - order, True))


Tree = {"tree": trees()}
TreeSeed = {"tree": trees(), "seed": Seed}

LAWS = [
    (law_ancestor_matrix, topology.ancestor_matrix, Tree),
    (law_pack, topology.pack, Tree),
    (law_unpack, topology.unpack, Tree),
    (law_depths, topology.depths, Tree),
    (law_num_children, topology.num_children, Tree),
    (law_child_with_token, topology.child_with_token, TreeSeed),
    (law_path_to, topology.path_to, TreeSeed),
    (law_take, topology.take, TreeSeed),
    (law_take, topology.take, {"tree": trees(vocab=3), "seed": Seed}),
    (law_prune, topology.prune, TreeSeed),
    (law_best, topology.best, TreeSeed),
    (law_dfs_order, topology.dfs_order, Tree),
    (law_dfs_order, topology.dfs_order, {"tree": trees(vocab=3)}),
]

MUTANTS = {
    "self left out": (law_ancestor_matrix, lambda p: topology.ancestor_matrix(p).tril(-1), Tree),
    "descendants instead": (law_ancestor_matrix, lambda p: topology.ancestor_matrix(p).mT, Tree),
    "parents only": (
        law_ancestor_matrix,
        lambda p: torch.eye(p.shape[1]).bool() | (p[:, :, None] == torch.arange(p.shape[1])),
        Tree,
    ),
    "padding sees the root": (
        law_ancestor_matrix,
        lambda p: topology.ancestor_matrix(p) | (torch.arange(p.shape[1]) == 0),
        Tree,
    ),
    "bit 63 lost": (law_pack, lambda m: topology.pack(m & (torch.arange(m.shape[-1]) % 64 != 63)), Tree),
    "words swapped": (law_pack, lambda m: topology.pack(m).flip(-1), Tree),
    "second word lost": (law_unpack, lambda w, c: topology.unpack(w[..., :1].expand_as(w), c), Tree),
    "popcount": (law_depths, lambda p: topology.ancestor_matrix(p).sum(-1), Tree),
    "descendants counted": (law_num_children, lambda p: topology.ancestor_matrix(p).sum(1) - 1, Tree),
    "padding counted": (
        law_num_children,
        lambda p: torch.zeros_like(p).scatter_add_(1, p.clamp_min(0), torch.ones_like(p)),
        Tree,
    ),
    "token anywhere": (
        law_child_with_token,
        lambda t, n, k: topology.child_with_token(
            dataclasses.replace(t, parents=torch.where(t.parents < 0, -1, n[:, None])), n, k
        ),
        TreeSeed,
    ),
    "root is a child of -1": (
        law_child_with_token,
        lambda t, n, k: torch.where((n < 0) & (t.tokens[:, 0] == k), 0, topology.child_with_token(t, n, k)),
        TreeSeed,
    ),
    "path upwards": (law_path_to, lambda t, n: topology.path_to(t, n).flip(-1), TreeSeed),
    "path with the root": (
        law_path_to,
        lambda t, n: torch.nn.functional.pad(topology.path_to(t, n), (1, 0))[:, :-1],
        TreeSeed,
    ),
    "old parents kept": (
        law_take,
        lambda t, n, c: dataclasses.replace(topology.take(t, n, c), parents=t.parents[:, : n.shape[1]]),
        TreeSeed,
    ),
    "laws stay behind": (
        law_take,
        lambda t, n, c: dataclasses.replace(topology.take(t, n, c), draft_probs=t.draft_probs[:, : n.shape[1]]),
        {"tree": trees(vocab=3), "seed": Seed},
    ),
    "orphans reattached": (law_prune, reattached, TreeSeed),
    "later nodes win": (law_best, late_winners, TreeSeed),
    "one too many": (law_best, lambda t, b: topology.best(t, b + 1), TreeSeed),
    "breadth first": (law_dfs_order, breadth_first, Tree),
    "worst child first": (law_dfs_order, worst_first, Tree),
    "draws sorted by score": (
        law_dfs_order,
        lambda t: dataclasses.replace(
            topology.dfs_order(dataclasses.replace(t, draft_probs=None)), draft_probs=t.draft_probs
        ),
        {"tree": trees(vocab=3)},
    ),
}


@pytest.mark.parametrize(("law", "function", "inputs"), LAWS, ids=lambda value: getattr(value, "__name__", ""))
def test_law(law: Callable[..., None], function: object, inputs: dict[str, st.SearchStrategy[object]]) -> None:
    @given(**inputs)
    def run(**drawn: object) -> None:
        law(function, **drawn)

    run()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    law, mutant, inputs = MUTANTS[name]
    caught(law, mutant, **inputs)


@given(tree=trees())
def test_random_trees_pass_the_check(tree: DraftTree) -> None:
    topology.check(tree)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("num_nodes must lie in 1..4", {"num_nodes": torch.tensor([0])}),
        ("num_nodes must lie in 1..4", {"num_nodes": torch.tensor([5])}),
        ("needs a parent before it", {"parents": torch.tensor([[-1, 0, 2, 0]])}),
        ("needs a parent before it", {"parents": torch.tensor([[-1, 0, -1, 0]])}),
        ("must have parent -1", {"parents": torch.tensor([[0, 0, 1, 0]])}),
        ("must have parent -1", {"num_nodes": torch.tensor([3])}),
        ("distinct tokens", {"tokens": torch.tensor([[7, 5, 5, 5]])}),
    ],
)
def test_check_names_the_fault(message: str, change: dict[str, Tensor]) -> None:
    tree = DraftTree(
        tokens=torch.tensor([[7, 5, 5, 6]]),
        parents=torch.tensor([[-1, 0, 1, 0]]),
        num_nodes=torch.tensor([4]),
        scores=torch.zeros(1, 4),
    )
    topology.check(tree)
    with pytest.raises(ShapeError, match=message):
        topology.check(dataclasses.replace(tree, **change))


def test_a_sampled_tree_is_not_cut_by_score() -> None:
    tree = random_tree(0, [6], "any", vocab=3)
    with pytest.raises(UnsupportedError, match="cannot be cut by score"):
        topology.best(tree, 2)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 0]], "parents must be a tensor, got list"),
        (torch.tensor([[-1.0, 0.0]]), "must be int64, got torch.float32"),
        (torch.tensor([[-1, 2, 1]]), r"before its children.* got \[\[-1, 2, 1\]\]"),
        (torch.tensor([[0, 0]]), "before its children"),
        (torch.tensor([[-1, 0, -2]]), "-1 stands for none"),
        (torch.tensor([[-1, 7]]), "before its children"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        inspect.unwrap(topology.ancestor_matrix)(parents)


def test_what_is_no_tree_or_no_matrix_is_refused() -> None:
    """Outside the tests nobody checks the annotations."""
    parents = torch.tensor([-1, 0, 0])
    with pytest.raises(ShapeError, match=r"parents must be \[batch, nodes\], got \[3\]"):
        inspect.unwrap(topology.ancestor_matrix)(parents)
    for matrix in (parents[None], topology.ancestor_matrix(parents[None]).long()):
        with pytest.raises(ShapeError, match=r"must be boolean, .* got torch.int64 \[1, 3.*ancestor_matrix makes one"):
            inspect.unwrap(topology.pack)(matrix)
