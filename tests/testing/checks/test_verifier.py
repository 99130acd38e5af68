"""The checker finds each way to break a law, and none in the verifiers of the library."""

import dataclasses
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from specdec import DraftTree, Verdict, verify
from specdec.errors import LawError, UnsupportedError
from specdec.testing import check_verifier
from specdec.trees.topology import child_with_token
from specdec.verify import StepRule, rules
from specdec.verify.base import token_at
from specdec.verify.rules import reject

LAWFUL = [
    verify.TargetOnly(),
    verify.Rejection(),
    verify.BlockVerification(),
    verify.TreeRejection(),
    verify.Traversal(),
    verify.Typical(),
]


@pytest.mark.parametrize("verifier", LAWFUL, ids=lambda verifier: type(verifier).__name__)
def test_lawful_verifiers_pass(verifier):
    check_verifier(verifier)


class Stepwise:
    """A rule of its own with nothing but `step`, without the base class."""

    lossless = True
    stepwise = True
    step = verify.TargetOnly.step

    def check(self, builder):
        pass

    def __call__(self, tree, target_probs, *, generator=None):
        return verify.walk(self, tree, target_probs, generator=generator)


def test_nothing_has_to_be_inherited():
    check_verifier(Stepwise())


class ClaimsTypical(verify.Typical):
    """A lossy rule that says it is not."""

    lossless = True


class DrawsAgain(StepRule):
    """Emits a second draw where the first one is no child."""

    def step(self, tree, node, law, *, generator=None):
        child = child_with_token(tree, node, law.draw(generator))
        return torch.where(child >= 0, token_at(tree, child.clamp_min(0)), law.draw(generator)), child


class AcceptsAll(StepRule):
    """Takes the first child, whatever the target says."""

    def step(self, tree, node, law, *, generator=None):
        exists, child = (tree.parents == node[:, None]).max(-1)
        return torch.where(exists, token_at(tree, child), law.draw(generator)), torch.where(exists, child, -1)


@pytest.mark.parametrize("mutant", [ClaimsTypical, DrawsAgain, AcceptsAll])
def test_a_wrong_law_is_found(mutant):
    with pytest.raises(LawError, match="the law of the next three tokens is off by"):
        check_verifier(mutant())


def from_the_target(target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """After a rejection the target is what it was."""
    return target, reject(target, draft, token, weight)[1], weight


def raw_draft(target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """The next sibling counts as drawn from a law that holds the rejected token still."""
    rest, _, share = reject(target, draft, token, weight)
    return rest, draft, share


def same_weight(target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """A path loses no weight by a rejection."""
    return (*reject(target, draft, token, weight)[:2], weight)


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        (verify.Rejection(), from_the_target),
        (verify.TreeRejection(), from_the_target),
        (verify.TreeRejection(), raw_draft),
        (verify.Traversal(), from_the_target),
        (verify.Traversal(), raw_draft),
        (verify.Traversal(), same_weight),
    ],
    ids=lambda part: getattr(part, "__name__", type(part).__name__),
)
def test_wrong_arithmetic_after_a_rejection_is_found(rule, mutant, monkeypatch):
    monkeypatch.setattr(rules, "reject", mutant)
    with pytest.raises(LawError, match="the law of the next three tokens is off by"):
        check_verifier(rule)


def test_a_lossy_rule_passes_if_it_says_so():
    class Honest(AcceptsAll):
        lossless = False

    check_verifier(Honest())


class Wraps:
    """A verifier that hands on to another."""

    lossless = True
    stepwise = False
    inner: Any = verify.TargetOnly()

    def check(self, builder):
        pass

    def __call__(self, tree, target_probs, *, generator=None):
        return self.change(self.inner(tree, target_probs, generator=generator), tree, target_probs)

    def change(self, verdict: Verdict, tree: DraftTree, target_probs: Tensor) -> Any:
        return verdict


class CountsTheBonus(Wraps):
    def change(self, verdict, tree, target_probs):
        return dataclasses.replace(verdict, num_accepted=verdict.num_accepted + 1)


class StartsAtTheRoot(Wraps):
    def change(self, verdict, tree, target_probs):
        path = torch.cat([torch.zeros_like(verdict.path[:, :1]), verdict.path], 1)
        return dataclasses.replace(verdict, path=path, num_accepted=verdict.num_accepted + 1)


class LeavesAnEnd(Wraps):
    def change(self, verdict, tree, target_probs):
        return dataclasses.replace(verdict, path=verdict.path.clamp_min(0))


class NoToken(Wraps):
    def change(self, verdict, tree, target_probs):
        return dataclasses.replace(verdict, bonus=torch.full_like(verdict.bonus, -1))


class Writes(Wraps):
    def change(self, verdict, tree, target_probs):
        target_probs[:, 0] = 0.0
        return verdict


class WritesTheTree(Wraps):
    def change(self, verdict, tree, target_probs):
        tree.tokens[:, 0] += 1
        return verdict


class GlobalChance(Wraps):
    def __call__(self, tree, target_probs, *, generator=None):
        return self.inner(tree, target_probs)


class TwoRules(verify.TargetOnly):
    """Steps by one rule and verifies whole trees by another."""

    def __call__(self, tree, target_probs, *, generator=None):
        return verify.TreeRejection()(tree, target_probs, generator=generator)


class DrawsWhenGreedy(verify.TargetOnly):
    """Draws, also where the request is greedy."""

    def step(self, tree, node, law, *, generator=None):
        return super().step(tree, node, dataclasses.replace(law, greedy=False), generator=generator)


class NoStep(Wraps):
    stepwise = True


class RefusesAll(Wraps):
    def check(self, builder):
        raise UnsupportedError("no")


CONDUCT = {
    CountsTheBonus: "must hold num_accepted",
    StartsAtTheRoot: "child of the one before",
    LeavesAnEnd: "then -1",
    NoToken: "bonus token -1 is impossible",
    Writes: "changed the tree or the probabilities",
    WritesTheTree: "changed the tree or the probabilities",
    GlobalChance: "two verdicts from one seed",
    TwoRules: r"step\(\) and __call__\(\) differ",
    DrawsWhenGreedy: "a greedy law asks for",
    NoStep: r"has no step\(\)",
    RefusesAll: "refuses every tree builder",
}


@pytest.mark.parametrize(("mutant", "message"), CONDUCT.items(), ids=[kind.__name__ for kind in CONDUCT])
def test_misconduct_is_found(mutant, message):
    with pytest.raises(LawError, match=message):
        check_verifier(mutant())


def test_a_faithful_wrapper_passes():
    check_verifier(Wraps())


def test_other_chance_cannot_be_summed_up():
    class Uniform(verify.TargetOnly):
        def step(self, tree, node, law, *, generator=None):
            token = (law.probs.cumsum(-1) < torch.rand(len(node), 1, generator=generator)).sum(-1).clamp_max(2)
            return token, child_with_token(tree, node, token)

    with pytest.raises(UnsupportedError, match="cannot be enumerated"):
        check_verifier(Uniform())


def test_a_missing_member_is_named():
    class Half:
        lossless = True

        def __call__(self, tree, target_probs, *, generator=None):
            pass

    with pytest.raises((LawError, TypeCheckError), match=r"lacks stepwise, check|verifier"):
        check_verifier(Half())
