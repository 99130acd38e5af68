"""The checker finds each way to break a law, and none in the tree builders of the library."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from specdec import DraftTree, trees
from specdec.errors import LawError
from specdec.testing import TableDrafter, check_builder
from specdec.trees import topology

EXAMPLES = Path(__file__).parents[3] / "examples"
SafetyNet: Any = runpy.run_path(str(EXAMPLES / "own_tree.py"))["SafetyNet"]

LAWFUL = [
    trees.Chain(4),
    trees.BestFirst(6),
    trees.BestFirst(6, temperature=2.0),
    trees.BestFirst(8, branch=2, width=2, depth=3),
    trees.Fixed(choices=[(0,), (1,), (0, 0), (5,)]),
    trees.Sampled((2, 1)),
    trees.Sampled(choices=[(0,), (1,), (1, 0), (1, 1)], candidates=3),
    trees.sampled_chain(3),
    SafetyNet(nodes=5),
]


@pytest.mark.parametrize("builder", LAWFUL, ids=repr)
def test_lawful_builders_pass(builder):
    check_builder(builder)


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_false_alarm_by_another_seed(seed):
    check_builder(trees.Sampled((2, 1)), seed=seed)


class Wraps:
    """A builder that hands on to another."""

    inner: Any = trees.BestFirst(4)

    @property
    def nodes(self):
        return self.inner.nodes

    @property
    def sampled(self):
        return self.inner.sampled

    @property
    def chain(self):
        return self.inner.chain

    def grow(self, drafter, root, limits, budget, *, vocab_size, generator=None):
        tree = self.inner.grow(drafter, root, limits, budget, vocab_size=vocab_size, generator=generator)
        return self.change(tree, generator)

    def change(self, tree, generator):
        return tree


def test_a_faithful_wrapper_passes():
    check_builder(Wraps())


def changing(change: Any, inner: Any = Wraps.inner) -> Any:
    """A builder whose trees are changed, past the annotations, which are not checked in use."""

    def forge(_self: Any, tree: DraftTree, generator: Any) -> Any:
        changed = change(tree, generator)
        if not isinstance(changed, dict):
            return changed
        copy = dataclasses.replace(tree)
        for name, value in changed.items():
            object.__setattr__(copy, name, value)
        return copy

    return type("Mutant", (Wraps,), {"change": forge, "inner": inner})()


def twice_the_first_child(tree: DraftTree, _: Any) -> dict[str, Any]:
    """Every tree gets one more node, equal to node 1 (or to the root where there is none)."""
    if tree.width < 2:
        return {}
    inner = tree.num_nodes > 1
    return {
        "tokens": torch.cat([tree.tokens[:, :2], tree.tokens[:, 1:2]], 1),
        "parents": torch.where(inner[:, None], torch.tensor([-1, 0, 0]), -1),
        "num_nodes": torch.where(inner, 3, 1),
        "scores": torch.tensor([[0.0, -1.0, -1.0]]).expand(len(inner), -1),
    }


def shuffled_padding(tree: DraftTree, _: Any) -> dict[str, Any]:
    return {"tokens": torch.where(tree.valid, tree.tokens, -1)}


FORM = {
    "no tree": (changing(lambda tree, _: (tree.tokens, tree.parents)), "must return a DraftTree"),
    "fewer scores": (changing(lambda tree, _: {"scores": tree.scores[:, :1]}), "must be .6, nodes."),
    "a lost root": (changing(lambda tree, _: {"tokens": tree.tokens + (tree.parents < 0)}), "node 0 is the root"),
    "orphans": (changing(lambda tree, _: {"parents": torch.full_like(tree.parents, -1)}), "grew no tree"),
    "twins": (changing(twice_the_first_child), "distinct tokens"),
    "-1 for padding": (changing(shuffled_padding), "every id must be valid"),
    "rising scores": (changing(lambda tree, _: {"scores": -tree.scores}), "never rise"),
    "probabilities for scores": (changing(lambda tree, _: {"scores": tree.scores.exp()}), "are 0 at the root"),
    "NaN scores": (changing(lambda tree, _: {"scores": tree.scores * torch.nan}), "never rise"),
    "laws of a tree that was not drawn": (
        changing(lambda tree, _: {"draft_probs": torch.full((*tree.tokens.shape, 11), 1 / 11)}),
        "leave them out",
    ),
    "drawn without laws": (changing(lambda *_: {"draft_probs": None}, trees.Sampled((2,))), "needs draft_probs"),
}


@pytest.mark.parametrize(("mutant", "message"), FORM.values(), ids=FORM)
def test_a_malformed_tree_is_found(mutant, message):
    with pytest.raises(LawError, match=message):
        check_builder(mutant)


def growing(inner: Any = Wraps.inner, **changes: Any) -> Any:
    """A builder that hands on other arguments than it was given."""

    class Mutant(Wraps):
        def grow(self, drafter, root, limits, budget, *, vocab_size, generator=None):
            given = {"drafter": drafter, "root": root, "limits": limits, "budget": budget}
            given |= {name: change(given) for name, change in changes.items()}
            return inner.grow(**given, vocab_size=vocab_size, generator=generator)

    return Mutant()


class Misleads(TableDrafter):
    """Stands between builder and drafter and spoils what is asked."""

    def __init__(self, drafter, spoil):
        self.drafter, self.spoil = drafter, spoil

    def children(self, frontier, count):
        return self.drafter.children(dataclasses.replace(frontier, **self.spoil(frontier)), count)


def misleading(spoil: Any) -> Any:
    return growing(drafter=lambda given: Misleads(given["drafter"], spoil))


class CallsTheLoop(Wraps):
    def grow(self, drafter, *arguments, **options):
        drafter.finish()


class Spoils(Wraps):
    def grow(self, drafter, root, limits, budget, **options):
        limits.clamp_(max=1)
        return super().grow(drafter, root, limits, budget, **options)


class Claims(Wraps):
    chain = True


class Coin(Wraps):
    """Says that nothing is drawn, and flips a coin."""

    def change(self, tree, generator):
        return tree if torch.rand((), generator=generator) < 0.5 else topology.best(tree, 1)


class GlobalCoin(Wraps):
    """Takes its chance from the global generator."""

    inner = trees.Sampled((2, 2))

    def grow(self, drafter, root, limits, budget, *, vocab_size, generator=None):
        return super().grow(drafter, root, limits, budget, vocab_size=vocab_size)


class Nothing(Wraps):
    nodes = 0


def shallowest(given: dict[str, Any]) -> torch.Tensor:
    going = given["limits"] > 0
    return torch.where(going, given["limits"][going].amin() if going.any() else 0, 0)


CONDUCT = {
    "over the budget": (growing(trees.BestFirst(9), budget=lambda given: given["budget"] + 1), "a budget of"),
    "too deep": (growing(limits=lambda given: given["limits"] + 1), "may not be drafted deeper"),
    "deeper than asked": (
        growing(
            drafter=lambda given: Misleads(
                given["drafter"], lambda frontier: {"valid": torch.zeros_like(frontier.valid)}
            ),
            limits=lambda given: given["limits"] + 1,
        ),
        "are the deepest nodes",
    ),
    "depth counted from 1": (misleading(lambda frontier: {"depth": frontier.depth + 1}), "expected depth 0"),
    "other roots": (misleading(lambda frontier: {"tokens": (frontier.tokens + 1) % 11}), "the first frontier is"),
    "parents counted from the root": (
        misleading(lambda frontier: {"parents": frontier.parents + 1}),
        "previous frontier",
    ),
    "stopped rows": (misleading(lambda frontier: {"valid": torch.ones_like(frontier.valid)}), "not be drafted deeper"),
    "as shallow as the shallowest row": (growing(limits=shallowest), "rows may not depend on each other"),
    "calls what the loop calls": (CallsTheLoop(), r"called drafter.finish\(\)"),
    "changes its arguments": (Spoils(), "changed the roots or the limits"),
    "a tree for a chain": (Claims(), "says chain=True"),
    "a hidden coin": (Coin(), "depends on `generator`"),
    "a global coin": (GlobalCoin(), "two trees from one seed"),
    "no nodes": (Nothing(), "at least 1"),
}


@pytest.mark.parametrize(("mutant", "message"), CONDUCT.values(), ids=CONDUCT)
def test_misconduct_is_found(mutant, message):
    with pytest.raises(LawError, match=message):
        check_builder(mutant)


def test_a_missing_member_is_named():
    class Half:
        nodes = 3
        sampled = False

    with pytest.raises((LawError, TypeCheckError), match=r"lacks chain, grow|builder"):
        check_builder(Half())


def without_unlikely_children(tree: DraftTree, _: Any) -> DraftTree:
    """Drops drawn nodes for their own probability."""
    above = tree.scores.gather(1, tree.parents.clamp_min(0))
    return topology.prune(tree, (tree.parents < 0) | (tree.scores - above > -2.0))


def best_sibling_first(tree: DraftTree, _: Any) -> DraftTree:
    """Loses the order of the draws."""
    plain = topology.dfs_order(dataclasses.replace(tree, draft_probs=None))
    # With one law at the root, and children of the root alone, the laws need no new order.
    return dataclasses.replace(plain, draft_probs=tree.draft_probs)


def stops_after_a_likely_child(tree: DraftTree, _: Any) -> DraftTree:
    """Whether the second child is drawn depends on the first."""
    first = tree.scores[:, 1] if tree.width > 1 else tree.scores[:, 0]
    keep = torch.ones_like(tree.valid)
    if tree.width > 2:
        keep[:, 2] = first < -1.0
    return topology.prune(tree, keep)


def claims_a_flatter_law(tree: DraftTree, _: Any) -> DraftTree:
    if tree.draft_probs is None:
        return tree
    flat = tree.draft_probs**0.5
    return dataclasses.replace(tree, draft_probs=flat / flat.sum(-1, keepdim=True).clamp_min(1e-9))


class Favourites(Wraps):
    """The drafter's favourites, said to be drawn."""

    inner = trees.Fixed(choices=[(0,), (1,)])
    sampled = True

    def grow(self, drafter, root, limits, budget, *, vocab_size, generator=None):
        tree = super().grow(drafter, root, limits, budget, vocab_size=vocab_size)
        probs = torch.full((*tree.tokens.shape, vocab_size), 1 / vocab_size, dtype=torch.float64)
        return dataclasses.replace(tree, draft_probs=probs)


PAIR = trees.Sampled((2,))
DRAWS = {
    "unlikely children are dropped": changing(without_unlikely_children, PAIR),
    "the best sibling first": changing(best_sibling_first, PAIR),
    "the number depends on a draw": changing(stops_after_a_likely_child, PAIR),
    "another law than it drew from": changing(claims_a_flatter_law, PAIR),
    "favourites said to be drawn": Favourites(),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mutant", DRAWS.values(), ids=DRAWS)
def test_a_biased_draw_is_found(mutant, seed):
    with pytest.raises(LawError, match="draft_probs must be the law"):
        check_builder(mutant, seed=seed)
