"""The walk, the coins, and what is refused."""

import dataclasses

import pytest
import torch

from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import StepVerifier, Verifier
from specdec.trees import BestFirst, Chain, Fixed, Sampled, sampled_chain
from specdec.types import DraftTree, TargetLaw
from specdec.verify import (
    BlockVerification,
    Rejection,
    TargetOnly,
    Traversal,
    TreeRejection,
    Typical,
    exact,
)
from specdec.verify.base import flip, pick
from tests.verify.laws import deterministic, seeded

CHAINS_ONLY = [Rejection(), BlockVerification()]
STEPWISE = [TargetOnly(), CHAINS_ONLY[0], TreeRejection(), Typical()]
WHOLE = [CHAINS_ONLY[1], Traversal()]
HALF = torch.tensor([0.5, 0.5])


def kind(rule: object) -> str:
    return type(rule).__name__


@pytest.mark.parametrize("rule", STEPWISE + WHOLE, ids=kind)
def test_what_they_say_they_are(rule):
    assert isinstance(rule, Verifier)
    assert rule.stepwise == isinstance(rule, StepVerifier) == (rule in STEPWISE)
    assert rule.lossless == (kind(rule) != "Typical")


@pytest.mark.parametrize("rule", STEPWISE, ids=kind)
def test_a_call_is_a_walk_by_steps(rule):
    """Batch of ragged chains: `step` for every row until none goes on, then the verdict of a call."""
    tree = deterministic([[0, 1, 2], [0, 2], [1]], [[-1, 0, 1], [-1, 0], [-1]])
    laws = exact.laws_at(tree, seeded(0))
    verdict = rule(tree, laws, generator=torch.Generator().manual_seed(0))
    for row in range(3):
        node, path = 0, []
        while len(path) < verdict.num_accepted[row]:
            child = int(verdict.path[row, len(path)])
            assert tree.parents[row, child] == node
            node = child
            path.append(child)
        assert verdict.path[row, len(path) :].tolist() == [-1] * (verdict.path.shape[1] - len(path))
        assert laws[row, node, verdict.bonus[row]] > 0


@pytest.mark.parametrize("rule", STEPWISE + WHOLE, ids=kind)
def test_padding_is_never_read(rule):
    """NaN in every law and draft law of padding, and draft laws of leaves."""
    tree, _ = exact.draws(seeded(1), branches=(1, 1))
    cut = dataclasses.replace(tree, num_nodes=torch.arange(len(tree.num_nodes)) % 3 + 1)
    padding = ~cut.valid
    leaf = torch.arange(3) >= cut.num_nodes[:, None] - 1
    assert tree.draft_probs is not None
    clean = dataclasses.replace(cut, parents=tree.parents.masked_fill(padding, -1))
    dirty = dataclasses.replace(clean, draft_probs=tree.draft_probs.masked_fill(leaf[:, :, None], torch.nan))
    laws = exact.laws_at(tree, seeded(0))
    here = rule(clean, laws, generator=torch.Generator().manual_seed(2))
    there = rule(dirty, laws.masked_fill(padding[:, :, None], torch.nan), generator=torch.Generator().manual_seed(2))
    assert torch.equal(here.path, there.path)
    assert torch.equal(here.bonus, there.bonus)
    assert here.num_accepted.max() > 0


@pytest.mark.parametrize("rule", STEPWISE + WHOLE, ids=kind)
def test_what_is_given_stays_as_it_was(rule):
    tree, _ = exact.draws(seeded(1), branches=(1, 1))
    laws = exact.laws_at(tree, seeded(0))
    given = [tree.tokens, tree.parents, tree.num_nodes, tree.draft_probs, laws]
    before = [value.clone() for value in given if value is not None]
    rule(tree, laws, generator=torch.Generator().manual_seed(2))
    assert all(torch.equal(one, two) for one, two in zip(before, given, strict=True) if two is not None)


@pytest.mark.parametrize("rule", STEPWISE + WHOLE, ids=kind)
def test_laws_that_do_not_fit_the_tree_are_refused(rule):
    tree = deterministic([[0, 1]], [[-1, 0]])
    with pytest.raises(ShapeError, match=r"\[1, 2, vocab\], got \[1, 3, 2\]"):
        rule(tree, HALF.expand(1, 3, 2))
    with pytest.raises(ShapeError, match=r"got \[2, 2, 2\]"):
        rule(tree, HALF.expand(2, 2, 2))
    narrow = dataclasses.replace(tree, draft_probs=torch.full((1, 2, 3), 1 / 3))
    with pytest.raises(ShapeError, match=r"vocabulary, \[1, 2, 2\].*got \[1, 2, 3\]"):
        rule(narrow, HALF.expand(1, 2, 2))


@pytest.mark.parametrize("rule", [Rejection(), TreeRejection()], ids=kind)
def test_a_step_refuses_draft_laws_over_another_vocabulary(rule):
    tree = dataclasses.replace(deterministic([[0, 1]], [[-1, 0]]), draft_probs=torch.full((1, 2, 3), 1 / 3))
    law = TargetLaw(scores=torch.zeros(1, 2), greedy=False)
    with pytest.raises(ShapeError, match="vocabulary"):
        rule.step(tree, torch.tensor([0]), law)


@pytest.mark.parametrize("rule", CHAINS_ONLY, ids=kind)
@pytest.mark.parametrize("parents", [[-1, 0, 0], [-1, 0, 1]])
def test_chain_rules_refuse_trees(rule, parents):
    other = [-1, 0, 1]  # one bad row is enough
    tree = deterministic([[0, 1, 1]] * 2, [other, parents])
    if parents == other:
        assert rule(tree, HALF.expand(2, 3, 2)).num_accepted.shape == (2,)
    else:
        with pytest.raises(ShapeError, match=f"{kind(rule)} verifies chains.*TreeRejection or Traversal"):
            rule(tree, HALF.expand(2, 3, 2))


BUILDERS = [Chain(nodes=3), Sampled((2, 1)), sampled_chain(3), BestFirst(nodes=4), Fixed(choices=[(0,), (1,)])]


@pytest.mark.parametrize("builder", BUILDERS, ids=repr)
def test_builders_are_checked_before_a_request(builder):
    for rule in STEPWISE + WHOLE:
        if rule in CHAINS_ONLY and not builder.chain:
            advice = "TreeRejection or Traversal" if builder.sampled else "TargetOnly"
            with pytest.raises(UnsupportedError, match=f"{kind(rule)} verifies chains, but .*use {advice} "):
                rule.check(builder)
        else:
            rule.check(builder)


def test_coins_and_draws_keep_to_what_is_certain():
    generator = torch.Generator().manual_seed(0)
    chance = torch.tensor([0.0, 1.0] * 5000)
    assert torch.equal(flip(chance, generator), chance.bool())
    weights = torch.tensor([0.0, 1e-30, 0.0, 3e-30]).expand(2000, -1)
    assert set(pick(weights, generator).tolist()) == {1, 3}


def test_a_width_of_one_has_an_empty_path():
    for rule in STEPWISE + WHOLE:
        verdict = rule(DraftTree.from_root(torch.tensor([0, 1])), HALF.expand(2, 1, 2))
        assert verdict.path.tolist() == [[-1], [-1]]
        assert verdict.num_accepted.tolist() == [0, 0]
