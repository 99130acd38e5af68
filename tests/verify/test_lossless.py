"""Every lossless rule, summed exactly: the joint law of the next three tokens is the target's to 1e-12.

The sums run over all trees, all coins and all draws, with laws from hypothesis: zeros, ties, near-certain tokens.
What each rule does wrong when it is changed is in `test_mutants`.
"""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.trees import topology
from specdec.types import DraftTree
from specdec.verify import BlockVerification, Rejection, TargetOnly, Traversal, TreeRejection, exact
from tests.verify.laws import CLOSE, deterministic, deterministic_trees, relisted, seeded, tables

CHAIN_RULES = [TargetOnly(), Rejection(), BlockVerification(), TreeRejection(), Traversal()]
TREE_RULES = [TargetOnly(), TreeRejection(), Traversal()]

names = pytest.mark.parametrize
rule_of: Any = {"ids": lambda rule: type(rule).__name__}
few = settings(max_examples=settings().max_examples // 6)  # an example is a sum over hundreds of cases


@names("rule", CHAIN_RULES, **rule_of)
@few
@given(target=tables(), draft=tables())
def test_drawn_chains(rule, target, draft):
    tree, weights = exact.draws(draft, branches=(1, 1))
    assert exact.lossless_error(rule, tree, target, weights, length=3) < CLOSE


@names("rule", TREE_RULES, **rule_of)
@few
@given(target=tables(), draft=tables(), branches=st.sampled_from([(2,), (3,), (2, 1), (1, 2)]))
def test_drawn_trees(rule, target, draft, branches):
    tree, weights = exact.draws(draft, branches=branches)
    assert exact.lossless_error(rule, tree, target, weights, length=3) < CLOSE


@names("rule", TREE_RULES, **rule_of)
@names(("vocab", "branches"), [(3, (2, 2)), (4, (2, 1)), (4, (3,))])
def test_drawn_trees_that_are_wide(rule, vocab, branches):
    tree, weights = exact.draws(seeded(0, vocab), branches=branches)
    assert exact.lossless_error(rule, tree, seeded(1, vocab), weights, length=3) < CLOSE


@names("rule", CHAIN_RULES, **rule_of)
@few
@given(target=tables(4), tree=deterministic_trees(vocab=4, chain=True))
def test_chosen_chains(rule, target, tree):
    assert exact.lossless_error(rule, tree, target, length=3) < CLOSE


@names("rule", TREE_RULES, **rule_of)
@few
@given(target=tables(), tree=deterministic_trees())
def test_chosen_trees(rule, target, tree):
    assert exact.lossless_error(rule, tree, target, length=3) < CLOSE


@names("rule", TREE_RULES, **rule_of)
@names("drawn", [False, True])
def test_three_levels(rule, drawn):
    tree = deterministic([[0, 2, 1, 0, 0, 1, 2]], [[-1, 0, 0, 1, 2, 3, 3]])
    weights = None
    if drawn:
        tree, weights = exact.draws(seeded(0), branches=(1, 2, 1))
    assert exact.lossless_error(rule, tree, seeded(1), weights, length=4) < CLOSE


@names("rule", TREE_RULES, **rule_of)
def test_a_repeated_sibling_changes_nothing(rule):
    tree = deterministic([[0, 1, 1, 2]], [[-1, 0, 0, 2]])
    assert exact.lossless_error(rule, tree, seeded(0), length=3) < CLOSE


@names("rule", [TreeRejection(), Traversal()], **rule_of)
def test_chosen_trees_give_what_target_only_gives(rule):
    tree = deterministic([[0, 1, 2, 0, 1]], [[-1, 0, 0, 2, 2]])
    probs = exact.laws_at(tree, seeded(0))
    ours, plain = exact.committed(rule, tree, probs), exact.committed(TargetOnly(), tree, probs)
    assert ours.keys() == plain.keys()
    assert all(abs(ours[path] - plain[path]) < CLOSE for path in plain)


@names("rule", TREE_RULES, **rule_of)
@few
@given(target=tables(), seed=st.integers(0, 99))
def test_nodes_in_any_topological_order(rule, target, seed):
    tree, weights = exact.draws(seeded(0), branches=(2, 1))
    assert exact.lossless_error(rule, relisted(tree, seed), target, weights, length=3) < CLOSE


def test_relisting_is_not_vacuous():
    tree, _ = exact.draws(seeded(0), branches=(2, 1))
    assert not torch.equal(relisted(tree, 1).parents, tree.parents)


@names("rule", [TreeRejection(), Traversal()], **rule_of)
@few
@given(target=tables(), draft=tables(), grown=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2))))
def test_growth_below_drawn_siblings_may_depend_on_all_of_them(rule, target, draft, grown):
    """Which first-level nodes get children is decided from both first-level tokens, after they were drawn."""
    tree, weights = exact.draws(draft, branches=(2, 1))
    first = [tuple(row[1:3]) for row in tree.tokens.tolist()]
    expand = torch.tensor([pair in grown for pair in first])
    keep = (topology.depths(tree.parents) < 2) | expand[:, None]
    assert exact.lossless_error(rule, topology.prune(tree, keep), target, weights, length=3) < CLOSE


@names("rule", [TreeRejection(), Traversal()], **rule_of)
@few
@given(target=tables(), drawn=st.integers(0, 2), turn=st.booleans())
def test_children_beyond_the_draft_law_count_as_certain(rule, target, drawn, turn):
    """The law of the root knows one token, and two more children were added by hand, in either order."""
    others = sorted({0, 1, 2} - {drawn}, reverse=turn)
    tree = deterministic([[0, drawn, *others, 1]], [[-1, 0, 0, 0, 2]])
    probs = torch.zeros(1, 5, 3, dtype=torch.float64)
    probs[0, 0, drawn] = 1.0
    tree = dataclasses.replace(tree, draft_probs=probs)
    assert exact.lossless_error(rule, tree, target, length=3) < CLOSE


@names("rule", CHAIN_RULES, **rule_of)
@few
@given(target=tables(), draft=tables())
def test_greedy_requests_get_the_first_maximum(rule, target, draft):
    """A one-hot target: whatever was drawn, the committed tokens are the argmax path."""

    def greedy(path: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(target(path).argmax(), 3).double()

    tree, weights = exact.draws(draft, branches=(1, 1))
    outcome = exact.committed(rule, tree, exact.laws_at(tree, greedy), weights)
    best: tuple[int, ...] = ()
    for _ in range(3):
        best = (*best, int(target(best).argmax()))
    assert all(path == best[: len(path)] for path, chance in outcome.items() if chance > 0)
    assert sum(outcome.values()) == pytest.approx(1.0)


@few
@given(target=tables(), draft=tables())
def test_traversal_of_a_chain_is_block_verification(target, draft):
    tree, weights = exact.draws(draft, branches=(1, 1))
    probs = exact.laws_at(tree, target)
    one = exact.committed(Traversal(), tree, probs, weights)
    two = exact.committed(BlockVerification(), tree, probs, weights)
    assert all(abs(one.get(path, 0.0) - two.get(path, 0.0)) < CLOSE for path in one.keys() | two.keys())


@few
@given(target=tables(), draft=tables(), branches=st.sampled_from([(1, 1), (2,), (2, 1)]))
def test_ranking_by_accepted_tokens(target, draft, branches):
    """Target-only, then recursive rejection, then traversal (on chains: then block verification)."""
    tree, weights = exact.draws(draft, branches=branches)
    probs = exact.laws_at(tree, target)
    means = [exact.mean_accepted(exact.committed(rule, tree, probs, weights)) for rule in TREE_RULES]
    assert means[0] <= means[1] + CLOSE
    assert means[1] <= means[2] + CLOSE


def test_the_ranking_is_strict_somewhere():
    tree, weights = exact.draws(seeded(0), branches=(2, 1))
    probs = exact.laws_at(tree, seeded(1))
    means = [exact.mean_accepted(exact.committed(rule, tree, probs, weights)) for rule in TREE_RULES]
    assert means[0] + 0.01 < means[1] < means[2] - 1e-3


@names("rule", CHAIN_RULES, **rule_of)
def test_a_root_alone(rule):
    target = seeded(0)
    tree = DraftTree.from_root(torch.tensor([2]))
    assert exact.lossless_error(rule, tree, target, length=2) < CLOSE
    verdict = rule(tree, exact.laws_at(tree, target))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.path.tolist() == [[-1]]
