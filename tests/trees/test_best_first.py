"""Best-first growth against a plain heap, against EAGLE-2 written down plainly, and the laws of its options."""

import dataclasses
import heapq
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.protocols import TreeBuilder
from specdec.trees import BestFirst, tempered, topology
from specdec.types import DraftTree
from tests.trees.lattice import CountedOps, Lattice, Path, Uncounted, grown_as_on_an_accelerator, same_tree
from tests.trees.random_trees import caught, paths

Key = Callable[[float, int, int, int], tuple[float, ...]]


def edges_of(lattice: Lattice, row: int, path: Path, builder: BestFirst) -> list[tuple[int, float]]:
    """Tokens and edge scores below a node, as the builder should see them."""
    most = builder.branch or builder.nodes
    tokens, scores = lattice.proposals(row, path)
    edges = tempered(scores[None, None, :most], builder.temperature)[0, 0]
    return list(zip(tokens[:most], edges.tolist(), strict=True))


def heap_paths(
    lattice: Lattice,
    row: int,
    root: int,
    builder: BestFirst,
    budget: int,
    limit: int,
    key: Key = lambda score, depth, parent, rank: (-score, depth, parent, rank),
) -> dict[Path, float]:
    """Pops the best node, pushes its children, until the budget is spent. `parent` is the parent's pop number."""
    depth_cap = min(limit, builder.depth or budget)
    found: dict[Path, float] = {}
    heap: list[tuple[tuple[float, ...], Path, float]] = [((), (), 0.0)]
    while heap and len(found) <= budget:
        _, path, score = heapq.heappop(heap)
        if len(path) < depth_cap:
            for rank, (token, edge) in enumerate(edges_of(lattice, row, (root, *path), builder)):
                order = key(score + edge, len(path) + 1, len(found), rank)
                heapq.heappush(heap, (order, (*path, token), score + edge))
        found[path] = score
    return found


@st.composite
def cases(draw: st.DrawFn, styles: tuple[str, ...] = ("smooth", "ties", "holes", "product")) -> dict[str, object]:
    nodes = draw(st.integers(1, 20))
    vocab = draw(st.integers(1, 9))
    rows = draw(st.integers(1, 3))
    option = st.one_of(st.none(), st.integers(1, 6))
    return {
        "builder": BestFirst(
            nodes,
            temperature=draw(st.sampled_from([1.0, 1.0, 0.5, 1.25, 3.0])),
            branch=draw(option),
            depth=draw(option),
        ),
        "lattice": Lattice(
            vocab=vocab,
            ranks=draw(st.integers(0, vocab)),
            style=draw(st.sampled_from(styles)),
            seed=draw(st.integers(0, 2**32)),
        ),
        "root": torch.tensor(draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))),
        "limits": torch.tensor(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 99]), min_size=rows, max_size=rows))),
        "budget": draw(st.integers(0, nodes)),
    }


def grown(case: dict[str, object]) -> DraftTree:
    lattice, builder = case["lattice"], case["builder"]
    return builder.grow(lattice, case["root"], case["limits"], case["budget"], vocab_size=lattice.vocab)


def law_heap(case: dict[str, object], **mutation: Key) -> None:
    tree = grown(case)
    topology.check(tree)
    assert tree.draft_probs is None
    for row, (root, limit) in enumerate(zip(case["root"].tolist(), case["limits"].tolist(), strict=True)):
        expected = heap_paths(case["lattice"], row, root, case["builder"], case["budget"], limit, **mutation)
        assert paths(tree, row) == expected


@given(case=cases())
def test_equals_a_heap(case: dict[str, object]) -> None:
    law_heap(case)


@pytest.mark.parametrize(
    "key",
    {
        "worst first": lambda score, depth, parent, rank: (score, depth, parent, rank),
        "breadth first": lambda score, depth, parent, rank: (depth, -score, parent, rank),
        "deeper wins ties": lambda score, depth, parent, rank: (-score, -depth, parent, rank),
        "later parent wins ties": lambda score, depth, parent, rank: (-score, depth, -parent, rank),
        "later rank wins ties": lambda score, depth, parent, rank: (-score, depth, parent, -rank),
        "rank before parent": lambda score, depth, parent, rank: (-score, depth, rank, parent),
    }.values(),
)
def test_another_order_is_caught(key: Key) -> None:
    caught(lambda case: law_heap(case, key=key), case=cases(styles=("ties",)))


@pytest.mark.parametrize("ignored", ["branch", "depth", "limits", "budget", "temperature"])
def test_an_ignored_option_is_caught(ignored: str) -> None:
    def law(case: dict[str, object]) -> None:
        builder = case["builder"]
        options = {"temperature": builder.temperature, "branch": builder.branch, "depth": builder.depth}
        if ignored in options:
            options[ignored] = 1.0 if ignored == "temperature" else None
        reference = dict(case, builder=BestFirst(builder.nodes, **options))
        if ignored == "limits":
            reference["limits"] = torch.full_like(case["limits"], 99)
        if ignored == "budget":
            reference["budget"] = builder.nodes
        tree = grown(case)
        for row, root in enumerate(case["root"].tolist()):
            limit = int(reference["limits"][row])
            heap = heap_paths(case["lattice"], row, root, reference["builder"], reference["budget"], limit)
            assert set(paths(tree, row)) == set(heap)

    caught(law, case=cases(styles=("smooth",)))


def eagle2_paths(lattice: Lattice, root: int, k: int, depth: int, total: int) -> dict[Path, float]:
    """EAGLE-2: expand the k best nodes of each level by k children, then keep the `total` best of all proposals."""
    proposed: list[tuple[Path, float]] = []
    frontier: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in frontier:
            tokens, edges = lattice.proposals(0, (root, *path))
            level += [((*path, t), score + e) for t, e in list(zip(tokens, edges.tolist(), strict=True))[:k]]
        level.sort(key=lambda item: -item[1])
        proposed += level
        frontier = level[:k]
    return {(): 0.0, **dict(sorted(proposed, key=lambda item: -item[1])[:total])}


def law_eagle2(expand: int, seed: int, k: int, depth: int, total: int, style: str) -> None:
    lattice = Lattice(vocab=9, ranks=6, style=style, seed=seed)
    builder = BestFirst(total, branch=k, width=k + expand, depth=depth)
    tree = builder.grow(lattice, torch.tensor([3]), torch.tensor([99]), total, vocab_size=9)
    assert paths(tree, 0) == eagle2_paths(lattice, 3, k, depth, total)


EAGLE2 = {
    "seed": st.integers(0, 2**32),
    "k": st.integers(1, 4),
    "depth": st.integers(1, 5),
    "total": st.integers(1, 24),
    "style": st.sampled_from(["smooth", "ties", "holes"]),
}


@given(**EAGLE2)
def test_width_and_branch_give_eagle2(seed: int, k: int, depth: int, total: int, style: str) -> None:
    law_eagle2(0, seed, k, depth, total, style)


def test_another_width_is_caught() -> None:
    caught(law_eagle2, 1, **EAGLE2)


@given(case=cases())
def test_fixed_shapes_hold_the_same_tree(case: dict[str, object]) -> None:
    expected = grown(case)
    tree = grown_as_on_an_accelerator(**case)
    topology.check(tree)
    assert same_tree(tree, expected)


@given(case=cases(), width=st.integers(1, 4))
def test_rows_of_a_batch_do_not_know_each_other(case: dict[str, object], width: int) -> None:
    case["builder"] = dataclasses.replace(case["builder"], width=width)
    together = grown(case)
    lattice = case["lattice"]
    for row in range(together.tokens.shape[0]):

        class Alone(Lattice):
            def proposals(self, _: int, path: Path, row: int = row) -> tuple[list[int], torch.Tensor]:
                return super().proposals(row, path)

        alone = Alone(lattice.vocab, lattice.ranks, lattice.style, lattice.seed)
        one = dict(case, lattice=alone, root=case["root"][row : row + 1], limits=case["limits"][row : row + 1])
        assert paths(grown(one), 0) == paths(together, row)


@given(case=cases())
def test_a_larger_budget_only_adds(case: dict[str, object]) -> None:
    small, large = grown(dict(case, budget=max(0, case["budget"] - 1))), grown(case)
    for row in range(small.tokens.shape[0]):
        assert paths(small, row).items() <= paths(large, row).items()


@given(case=cases())
def test_the_favourite_path_comes_first(case: dict[str, object]) -> None:
    tree = grown(case)
    for row in range(tree.tokens.shape[0]):
        node, parents, scores = 0, tree.parents[row].tolist(), tree.scores[row].tolist()
        while children := [child for child in range(tree.width) if parents[child] == node]:
            assert children[0] == node + 1
            assert scores[children[0]] == max(scores[child] for child in children)
            node = children[0]


@given(case=cases(styles=("smooth", "holes")))
def test_the_drafter_is_asked_once_a_level_and_no_more_than_needed(case: dict[str, object]) -> None:
    builder, lattice, budget = case["builder"], case["lattice"], case["budget"]
    tree = grown(case)
    deepest = int(topology.depths(tree.parents).max())
    levels = [depth for depth, _, _ in lattice.asked]
    assert levels == list(range(len(levels)))
    assert len(levels) <= min(budget, int(case["limits"].max()), builder.depth or budget)
    assert len(levels) >= deepest
    for depth, wide, count in lattice.asked:
        assert wide <= max(1, budget - depth + 1)
        assert count <= min(builder.branch or builder.nodes, lattice.vocab)


@pytest.mark.parametrize(("budget", "limits"), [(0, [5, 5]), (4, [0, 0])])
def test_nothing_to_draft_asks_nobody(budget: int, limits: list[int]) -> None:
    lattice = Lattice(vocab=5, ranks=3)
    tree = BestFirst(4).grow(lattice, torch.tensor([1, 2]), torch.tensor(limits), budget, vocab_size=5)
    assert lattice.asked == []
    assert tree.tokens.tolist() == [[1], [2]]


def test_growth_ends_with_the_proposals() -> None:
    class Two(Lattice):
        def proposals(self, row: int, path: Path) -> tuple[list[int], torch.Tensor]:
            tokens, scores = super().proposals(row, path)
            return (tokens, scores) if len(path) <= 2 else ([], scores[:0])

    lattice = Two(vocab=5, ranks=1)
    tree = BestFirst(8).grow(lattice, torch.tensor([1]), torch.tensor([9]), 8, vocab_size=5)
    assert tree.num_nodes.tolist() == [3]
    assert len(lattice.asked) == 3


def test_few_operations_a_level() -> None:
    lattice, count = Lattice(vocab=20, ranks=16, style="product"), CountedOps()
    with count:
        BestFirst(15, depth=8).grow(Uncounted(lattice, count), torch.tensor([1]), torch.tensor([99]), 15, vocab_size=20)
    assert len(lattice.asked) >= 4
    assert count.total <= 110 + 45 * len(lattice.asked)


def law_tempered(
    function: Callable[[torch.Tensor, float], torch.Tensor], seed: int, temperature: float, empty: int
) -> None:
    """Contrast between siblings is divided; their order and their total mass stay."""
    _, scores = Lattice(vocab=12, ranks=7, seed=seed).proposals(0, (1,))
    scores = torch.cat([scores[: 4 - empty], torch.full((empty,), -torch.inf, dtype=scores.dtype)])
    edges = function(scores[None, None], temperature)[0, 0]
    assert torch.equal(edges == -torch.inf, scores == -torch.inf)
    torch.testing.assert_close(edges.exp().sum(), scores.exp().sum())
    torch.testing.assert_close(edges[: 4 - empty].diff(), scores[: 4 - empty].diff() / temperature)


TEMPERED = {"seed": st.integers(0, 2**32), "temperature": st.floats(0.05, 20.0), "empty": st.integers(0, 4)}


@given(**TEMPERED)
def test_temperature_shares_the_same_mass_anew(seed: int, temperature: float, empty: int) -> None:
    law_tempered(tempered, seed, temperature, empty)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda scores, temperature: scores / temperature,
        lambda scores, temperature: (scores / temperature).log_softmax(-1),
        lambda scores, temperature: scores,  # noqa: ARG005 - the mistake
    ],
)
def test_another_temperature_is_caught(mutant: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    caught(law_tempered, mutant, **TEMPERED)


def test_temperature_one_changes_nothing_and_half_precision_is_left() -> None:
    scores = torch.tensor([[[0.3, 0.2]]], dtype=torch.bfloat16).log()
    assert torch.equal(tempered(scores, 1.0), scores)
    assert tempered(scores, 1.25).dtype == torch.float32


def test_temperature_widens_the_tree() -> None:
    class Same(Lattice):
        def proposals(self, _row: int, _path: Path) -> tuple[list[int], torch.Tensor]:
            return [0, 1, 2, 3], torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64).log()

    shapes = []
    for temperature in (0.3, 0.6, 1.0, 1.5, 3.0, 10.0):
        builder = BestFirst(15, temperature=temperature)
        tree = builder.grow(Same(vocab=4, ranks=4), torch.tensor([1]), torch.tensor([99]), 15, vocab_size=4)
        depths = topology.depths(tree.parents)
        shapes.append((int(depths.max()), int((depths == 1).sum())))
    assert shapes == sorted(shapes, key=lambda shape: (-shape[0], shape[1]))
    assert shapes[0][0] > 2 * shapes[-1][0]
    # Dividing whole path scores, the usual slip, would leave the order of a product law and so the tree as it is.
    assert shapes[0] != shapes[2] != shapes[-1]


@given(case=cases())
def test_no_draw_decides_about_the_tree(case: dict[str, object]) -> None:
    """So that the target-only rule gives the target's law at any tree temperature."""
    lattice, builder = case["lattice"], case["builder"]
    expected = grown(case)
    state = torch.get_rng_state()
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        tree = builder.grow(
            lattice, case["root"], case["limits"], case["budget"], vocab_size=lattice.vocab, generator=generator
        )
        assert same_tree(tree, expected)
        assert tree.draft_probs is None
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(seed).get_state())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [{"nodes": 0}, {"temperature": 0.0}, {"temperature": float("nan")}, {"branch": 0}, {"depth": -1}, {"width": 0}],
)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"BestFirst\\({next(iter(options))}="):
        BestFirst(**{"nodes": 4, **options})


def test_is_a_tree_builder() -> None:
    assert isinstance(BestFirst(4), TreeBuilder)
    assert not BestFirst(4).sampled
    assert [BestFirst(4).chain, BestFirst(4, branch=1).chain, BestFirst(1).chain] == [False, True, True]
