"""Trees of a fixed shape."""

import inspect
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import UnsupportedError
from specdec.protocols import TreeBuilder
from specdec.trees import Fixed, Sampled, _shape, topology
from specdec.types import DraftTree
from tests.trees.lattice import Lattice, Path, grown_as_on_an_accelerator, same_tree
from tests.trees.random_trees import caught, paths

MEDUSA = [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 0, 0, 0)]


def random_choices(seed: int) -> list[Path]:
    """A shape in any order, children before parents too."""
    rng = random.Random(seed)
    known: list[Path] = [()]
    for _ in range(rng.randrange(1, 14)):
        above = rng.choice(known)
        if len(above) < 4 and (child := (*above, rng.randrange(4))) not in known:
            known.append(child)
    rng.shuffle(known)
    return [choice for choice in known if choice]


def kept_choices(choices: list[Path], budget: int) -> list[Path]:
    """The first `budget` nodes of the list, each behind its ancestors."""
    order = []
    for choice in choices:
        order += [choice[:end] for end in range(1, len(choice) + 1) if choice[:end] not in order]
    return order[:budget]


def expected_paths(
    lattice: Lattice, row: int, root: int, choices: list[Path], budget: int, limit: int
) -> dict[Path, float]:
    found: dict[Path, tuple[Path, float]] = {(): ((), 0.0)}
    for choice in sorted(kept_choices(choices, budget), key=len):
        if len(choice) <= limit and choice[:-1] in found:
            path, score = found[choice[:-1]]
            tokens, edges = lattice.proposals(row, (root, *path))
            if choice[-1] < len(tokens):
                found[choice] = ((*path, tokens[choice[-1]]), score + float(edges[choice[-1]]))
    # Depth-first, lower rank first.
    return dict(found[choice] for choice in sorted(found))


CASES = {
    "choices": st.one_of(st.just(MEDUSA), st.builds(random_choices, st.integers(0, 2**32))),
    "style": st.sampled_from(["smooth", "ties", "holes"]),
    "ranks": st.integers(0, 4),
    "seed": st.integers(0, 2**32),
    "limits": st.lists(st.sampled_from([0, 1, 2, 99]), min_size=1, max_size=3),
    "budget": st.integers(0, 14),
}


def law_fixed(
    change: Callable[[list[Path]], list[Path]],
    choices: list[Path],
    style: str,
    ranks: int,
    seed: int,
    limits: list[int],
    budget: int,
) -> None:
    lattice = Lattice(vocab=6, ranks=ranks, style=style, seed=seed)
    root = torch.arange(len(limits)) % 6
    tree = Fixed(change(choices)).grow(lattice, root, torch.tensor(limits), budget, vocab_size=6)
    topology.check(tree)
    assert tree.width == int(tree.num_nodes.max())
    for row, limit in enumerate(limits):
        expected = expected_paths(lattice, row, row % 6, choices, budget, limit)
        assert list(paths(tree, row).items()) == list(expected.items())


@given(**CASES)
def test_fills_the_shape(
    choices: list[Path], style: str, ranks: int, seed: int, limits: list[int], budget: int
) -> None:
    law_fixed(lambda same: same, choices, style, ranks, seed, limits, budget)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda choices: sorted(choices, key=lambda choice: (len(choice), choice)),
        lambda choices: [tuple(3 - rank for rank in choice) for choice in choices],
        lambda choices: [*choices, (3, 3, 3)] if (3, 3) in choices and (3, 3, 3) not in choices else choices[::-1],
    ],
    ids=["budget cuts breadth first", "ranks reversed", "order of the list ignored"],
)
def test_another_shape_is_caught(mutant: Callable[[list[Path]], list[Path]]) -> None:
    caught(law_fixed, mutant, **CASES)


@given(**CASES)
def test_fixed_shapes_hold_the_same_tree(
    choices: list[Path], style: str, ranks: int, seed: int, limits: list[int], budget: int
) -> None:
    def grow(how: Callable[..., DraftTree]) -> DraftTree:
        lattice = Lattice(vocab=6, ranks=ranks, style=style, seed=seed)
        return how(lattice, torch.arange(len(limits)) % 6, torch.tensor(limits), budget)

    builder = Fixed(choices)
    tree = grow(lambda *call: grown_as_on_an_accelerator(builder, *call))
    topology.check(tree)
    assert same_tree(tree, grow(lambda *call: builder.grow(*call, vocab_size=6)))


def test_asks_for_the_ranks_of_the_level() -> None:
    lattice = Lattice(vocab=6, ranks=6)
    Fixed(MEDUSA).grow(lattice, torch.tensor([1]), torch.tensor([99]), 10, vocab_size=6)
    assert lattice.asked == [(0, 1, 4), (1, 2, 3), (2, 1, 1), (3, 1, 1)]


def test_nothing_to_draft_asks_nobody() -> None:
    lattice = Lattice(vocab=5, ranks=3)
    for budget, limits in ((0, [5, 5]), (4, [0, 0])):
        tree = Fixed(MEDUSA).grow(lattice, torch.tensor([1, 2]), torch.tensor(limits), budget, vocab_size=5)
        assert tree.tokens.tolist() == [[1], [2]]
    assert lattice.asked == []


def test_grows_outside_inference_mode_after_growing_inside() -> None:
    """The index tensors of a shape are kept between rounds."""
    builder, root, limits = Fixed([(0,), (0, 3)]), torch.tensor([1]), torch.tensor([9])
    with torch.inference_mode():
        builder.grow(Lattice(vocab=5, ranks=4), root, limits, 2, vocab_size=5)

    class Trained(Lattice):
        def children(self, frontier: object, count: int) -> object:
            found = super().children(frontier, count)
            found.log_probs.requires_grad_()
            return found

    tree = builder.grow(Trained(vocab=5, ranks=4), root, limits, 2, vocab_size=5)
    tree.scores.sum().backward()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "at least one choice"),
        ([()], "non-empty tuple"),
        ([(0,), (1, 0)], r"\(1, 0\) has no parent in the tree; add \(1,\)"),
        ([(0,), (0, 0), (0,)], r"\(0,\) stands there twice"),
        ([(-1,)], "ranks are whole numbers from 0"),
        ([(0.0,)], r"ranks are whole numbers from 0 .*got \[\(0\.0,\)\]"),
        ([("a",)], "ranks are whole numbers"),
        ([(True,)], "ranks are whole numbers"),
        ([0, 1], r"choices are tuples of ranks, .*got \[0, 1\]"),
        ("ab", "choices are tuples of ranks"),
        (None, "choices are tuples of ranks, .*got None"),
    ],
)
def test_choices_are_checked(choices: list[Path], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        inspect.unwrap(_shape.checked)("Fixed", choices)  # the type hook of the tests would come first


def test_choices_are_checked_where_a_tree_is_made() -> None:
    with pytest.raises(UnsupportedError, match="Fixed: ranks are whole numbers"):
        Fixed([(-1,)])
    with pytest.raises(UnsupportedError, match="Sampled: ranks are whole numbers"):
        Sampled(choices=[(-1,)])
    assert Fixed([(0,), (0, 1)]).choices == ((0,), (0, 1))


def test_is_a_tree_builder() -> None:
    builder = Fixed([[0], [1], [0, 0]])
    assert isinstance(builder, TreeBuilder)
    assert (builder.nodes, builder.sampled, builder.chain) == (3, False, False)
    assert Fixed([(0,), (0, 1)]).chain
    assert builder == Fixed([(0,), (1,), (0, 0)])
