"""Sampled trees: the law of the ordered draws, and that nothing about them is decided too late."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from specdec.errors import ShapeError
from specdec.protocols import TreeBuilder
from specdec.trees import Sampled, draw, sampled_chain, topology
from specdec.types import Candidates, DraftTree, Frontier
from tests.trees.lattice import Lattice, Path, grown_as_on_an_accelerator, same_tree
from tests.trees.random_trees import caught, lineage, paths

LAW = torch.tensor([0.45, 0.3, 0.15, 0.1, 0.0])
Draw = Callable[[Tensor, int, torch.Generator], Tensor]


def ordered_law(law: Tensor, count: int) -> dict[Path, float]:
    """The probability of each ordered run of draws without replacement (Plackett-Luce), by enumeration."""
    law, count = law.double() / law.double().sum(), min(count, int((law > 0).sum()))
    found = {}
    for outcome in itertools.permutations(law.nonzero().flatten().tolist(), count):
        chance, left = 1.0, 1.0
        for token in outcome:
            chance *= float(law[token]) / left
            left -= float(law[token])
        found[outcome] = chance
    return found


def assert_follows(outcomes: list[Path], law: dict[Path, float]) -> None:
    """A chi-square test with a fixed seed; what cannot happen must not happen."""
    counts = Counter(outcomes)
    assert counts.keys() <= law.keys(), f"impossible draws: {counts.keys() - law.keys()}"
    expected = [chance * len(outcomes) / sum(law.values()) for chance in law.values()]
    assert min(expected) > 5
    assert chisquare([counts[outcome] for outcome in law], expected).pvalue > 1e-3


def law_draw(function: Draw, count: int, law: Tensor = LAW) -> None:
    generator = torch.Generator().manual_seed(0)
    picks = function(law.expand(1, 20_000, -1), count, generator)[0]
    outcomes = [tuple(token for token in row if law[token] > 0) for row in picks.tolist()]
    assert_follows(outcomes, ordered_law(law, count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_draws_without_replacement_in_order(count: int, scale: float) -> None:
    law_draw(draw, count, LAW * scale)


def with_replacement(law: Tensor, count: int, generator: torch.Generator) -> Tensor:
    drawn = law[0].multinomial(count, replacement=True, generator=generator)[None]
    return drawn


def sorted_draws(law: Tensor, count: int, generator: torch.Generator) -> Tensor:
    picks = draw(law, count, generator)
    return picks.gather(-1, law.gather(-1, picks).argsort(-1, descending=True))


@pytest.mark.parametrize(
    "mutant",
    [
        lambda law, count, _: law.topk(count).indices,
        lambda law, count, generator: draw((law > 0).float(), count, generator),
        lambda law, count, generator: draw(law**2, count, generator),
        lambda law, count, generator: draw(law + 0.01, count, generator),
        lambda law, count, generator: draw(law, count, generator).flip(-1),
        sorted_draws,
        with_replacement,
    ],
    ids=["best", "uniform", "sharpened", "smoothed", "reversed", "sorted", "with replacement"],
)
def test_another_law_of_draws_is_caught(mutant: Draw) -> None:
    with pytest.raises(AssertionError):
        law_draw(mutant, 3)


class Repeated(Lattice):
    """All rows draw from the lattice of row 0, so that one call gives many draws."""

    def proposals(self, _: int, path: Path) -> tuple[list[int], Tensor]:
        return super().proposals(0, path)


def law_tree(cut: Callable[[DraftTree], DraftTree], whole: bool) -> None:
    """Children of the root, and of its first child given that child, follow the drafter's law in order."""
    lattice = Repeated(vocab=4, ranks=4, seed=5, whole=whole)
    rows = 4000
    root, limits = torch.full((rows,), 2), torch.full((rows,), 9)
    generator = torch.Generator().manual_seed(1)
    tree = cut(Sampled((2, 2)).grow(lattice, root, limits, 6, vocab_size=4, generator=generator))
    first: list[Path] = []
    second: dict[int, list[Path]] = {token: [] for token in range(4)}
    for tokens, parents, count in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True
    ):
        children = [node for node in range(1, count) if parents[node] == 0]
        first.append(tuple(tokens[node] for node in children))
        grandchildren = [node for node in range(1, count) if parents[node] == children[0]]
        second[tokens[children[0]]].append(tuple(tokens[node] for node in grandchildren))
    assert_follows(first, ordered_law(lattice.law(0, (2,)), 2))
    for token, outcomes in second.items():
        law = ordered_law(lattice.law(0, (2, token)), 2)
        if len(outcomes) * min(law.values()) > 5:
            assert_follows(outcomes, law)


@pytest.mark.parametrize("whole", [True, False])
def test_children_follow_the_law_of_their_own_node(whole: bool) -> None:
    law_tree(lambda tree: tree, whole)


def drop_unlikely(tree: DraftTree) -> DraftTree:
    """Drops drawn nodes for their probability: the law of what is left is no longer the draft law."""
    parents = tree.parents.clamp_min(0)
    edge = tree.scores - tree.scores.gather(1, parents)
    return topology.prune(tree, edge > -2.0)


def swap_siblings(tree: DraftTree) -> DraftTree:
    """Lists siblings by score, as a deterministic tree would."""
    return topology.dfs_order(dataclasses.replace(tree, draft_probs=None))


@pytest.mark.parametrize("mutant", [drop_unlikely, swap_siblings])
def test_a_drawn_tree_that_was_touched_is_caught(mutant: Callable[[DraftTree], DraftTree]) -> None:
    with pytest.raises(AssertionError):
        law_tree(mutant, whole=True)


CASES = {
    "shape": st.one_of(
        st.lists(st.integers(1, 3), min_size=1, max_size=3),
        st.just([(0,), (1,), (0, 0), (0, 1), (0, 2), (0, 1, 0)]),
        st.just([(1,), (0,), (1, 0)]),
    ),
    "style": st.sampled_from(["smooth", "ties", "holes"]),
    "ranks": st.integers(0, 5),
    "whole": st.booleans(),
    "seed": st.integers(0, 2**32),
    "limits": st.lists(st.sampled_from([0, 1, 2, 99]), min_size=1, max_size=3),
    "budget": st.integers(0, 20),
}


def builder_of(shape: list[int] | list[Path]) -> Sampled:
    return Sampled(shape) if isinstance(shape[0], int) else Sampled(choices=shape)


def choices_of(shape: list[int] | list[Path]) -> list[Path]:
    """Every node of the shape, breadth first."""
    if not isinstance(shape[0], int):
        return sorted(shape, key=lambda choice: (len(choice), choice))
    return [c for d in range(len(shape)) for c in itertools.product(*(range(b) for b in shape[: d + 1]))]


def law_shape(
    change: Callable[[list], list],
    shape: list,
    style: str,
    ranks: int,
    whole: bool,
    seed: int,
    limits: list[int],
    budget: int,
) -> None:
    """Each node has as many children as the cut shape says and its law can give, and carries that law."""
    lattice = Lattice(vocab=5, ranks=ranks, style=style, seed=seed, whole=whole)
    root = torch.arange(len(limits)) % 5
    generator = torch.Generator().manual_seed(seed)
    tree = builder_of(change(shape)).grow(
        lattice, root, torch.tensor(limits), budget, vocab_size=5, generator=generator
    )
    topology.check(tree)
    assert tree.width == int(tree.num_nodes.max())
    kept = choices_of(shape)[:budget]
    for row, limit in enumerate(limits):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        count = int(tree.num_nodes[row])
        place: dict[int, Path] = {0: ()}
        for node in range(count):
            path = tuple(tokens[step] for step in lineage(tree, row, node))
            law = lattice.law(row, path)
            support = int((law > 0).sum())
            planned = sum(choice[:-1] == place[node] for choice in kept)
            children = [child for child in range(count) if parents[child] == node]
            assert len(children) == (min(planned, support) if len(path) <= limit else 0)
            for index, child in enumerate(children):
                place[child] = (*place[node], index)
                edge = float(tree.scores[row, child] - tree.scores[row, node])
                assert edge == pytest.approx(float(law[tokens[child]].log()))
            if tree.draft_probs is not None:
                stored = tree.draft_probs[row, node]
                torch.testing.assert_close(stored, law if children else torch.zeros(5, dtype=law.dtype))
        order = [place[node] for node in range(count)]
        assert order == sorted(order), "depth first, in the order of the draws"


@given(**CASES)
def test_how_many_children_is_decided_by_shape_and_law_alone(
    shape: list, style: str, ranks: int, whole: bool, seed: int, limits: list[int], budget: int
) -> None:
    law_shape(lambda same: same, shape, style, ranks, whole, seed, limits, budget)


def test_another_shape_is_caught() -> None:
    caught(law_shape, lambda shape: [3, *shape[1:]] if isinstance(shape[0], int) else [2], **CASES)


@given(**CASES)
def test_fixed_shapes_hold_the_same_tree(
    shape: list, style: str, ranks: int, whole: bool, seed: int, limits: list[int], budget: int
) -> None:
    def grow(how: Callable[..., DraftTree], **options: int) -> DraftTree:
        lattice = Lattice(vocab=5, ranks=ranks, style=style, seed=seed, whole=whole)
        generator = torch.Generator().manual_seed(seed)
        call = (lattice, torch.arange(len(limits)) % 5, torch.tensor(limits), budget)
        return how(*call, generator=generator, **options)

    builder = builder_of(shape)
    expected = grow(builder.grow, vocab_size=5)
    tree = grow(lambda *call, **options: grown_as_on_an_accelerator(builder, *call, **options))
    topology.check(tree)
    assert same_tree(tree, expected)
    if expected.draft_probs is not None:
        assert torch.equal(tree.draft_probs[:, : expected.width][expected.valid], expected.draft_probs[expected.valid])


def test_the_generator_decides_the_draws() -> None:
    def grow(seed: int) -> dict[Path, float]:
        generator = torch.Generator().manual_seed(seed)
        lattice = Lattice(vocab=50, ranks=50)
        call = (lattice, torch.tensor([1]), torch.tensor([9]), 15)
        return paths(Sampled().grow(*call, vocab_size=50, generator=generator), 0)

    state = torch.get_rng_state()
    assert grow(1) == grow(1)
    assert grow(1) != grow(2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("candidates", "asked"), [(1, [3, 2, 1]), (2, [3, 2, 2]), (16, [16, 16, 16])])
def test_asks_for_enough_candidates(candidates: int, asked: list[int]) -> None:
    lattice = Lattice(vocab=20, ranks=20)
    Sampled((3, 2, 1), candidates=candidates).grow(lattice, torch.tensor([1]), torch.tensor([9]), 15, vocab_size=20)
    assert [count for _, _, count in lattice.asked] == asked


def test_equal_ids_where_there_is_no_proposal_are_not_drawn() -> None:
    class One(Lattice):
        def children(self, frontier: Frontier, count: int) -> Candidates:
            tokens = torch.full((1, frontier.tokens.shape[1], 3), 4)
            scores = torch.tensor([0.0, -torch.inf, -torch.inf]).expand(tokens.shape)
            return Candidates(tokens, scores)

    tree = Sampled((2, 2)).grow(One(5, 5), torch.tensor([1]), torch.tensor([9]), 6, vocab_size=5)
    topology.check(tree)
    assert tree.tokens.tolist() == [[1, 4, 4]]


def test_probs_must_be_over_the_vocabulary() -> None:
    with pytest.raises(ShapeError, match="over 5 tokens, the target has 7"):
        Sampled().grow(Lattice(5, 5, whole=True), torch.tensor([1]), torch.tensor([9]), 3, vocab_size=7)


def test_nothing_to_draft_asks_nobody() -> None:
    lattice = Lattice(vocab=5, ranks=3)
    for budget, limits in ((0, [5, 5]), (4, [0, 0])):
        tree = Sampled().grow(lattice, torch.tensor([1, 2]), torch.tensor(limits), budget, vocab_size=5)
        assert tree.tokens.tolist() == [[1], [2]]
    assert lattice.asked == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": ()}, "at least one choice"),
        ({"branches": (2, 0)}, r"branches=0"),
        ({"candidates": 0}, r"candidates=0"),
        ({"branches": (2,), "choices": [(0,)]}, "give one of them"),
        ({"choices": [(0,), (2,)]}, r"\(2,\) needs \(1,\) before it"),
        ({"choices": [(0,), (1, 0)]}, "has no parent"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampled(**options)


def test_is_a_tree_builder() -> None:
    assert isinstance(Sampled(), TreeBuilder)
    assert (Sampled().nodes, Sampled().sampled, Sampled().chain) == (15, True, False)
    assert (sampled_chain(4).nodes, sampled_chain(4).chain) == (4, True)
    assert repr(Sampled((2, 1))) == "<Sampled: 4 nodes, 2 levels, 16 candidates>"
    with pytest.raises(ValueError, match="nodes=0"):
        sampled_chain(0)


def test_a_law_with_negative_numbers_is_refused() -> None:
    with pytest.raises(ShapeError, match="must be probabilities"):
        draw(torch.tensor([[[0.5, -0.1]]]), 1)
