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
from specdec.verify.base import flip, pick, token_at

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


class TriesChildren(StepRule):
    """Recursive rejection, in which the target and the draft law of the next trial can be spoilt."""

    def rest(self, target: Tensor, draft: Tensor, token: Tensor, original: Tensor) -> Tensor:
        weight = torch.ones_like(target[:, 0])
        return rules.reject(target, draft, token, weight)[0]

    def left(self, draft: Tensor, token: Tensor) -> Tensor:
        return rules.normalise(draft.scatter(1, token[:, None], 0.0))

    def step(self, tree, node, law, *, generator=None):
        rows = torch.arange(len(node))
        original = target = rules.law(law.probs)
        draft = torch.zeros_like(target) if tree.draft_probs is None else rules.law(tree.draft_probs[rows, node])
        taken = torch.full_like(node, -1)
        below = tree.parents == node[:, None]
        for rank in range(1, int(below.sum(-1).max()) + 1):
            exists, child = (below & (below.cumsum(-1) == rank)).max(-1)
            token = token_at(tree, child)
            one = torch.ones_like(target[:, 0])
            chance = rules.acceptance(rules.at(target, token), rules.at(draft, token), one)
            judged = exists & (taken < 0)
            kept = flip(torch.where(judged, chance, 0.0), generator)
            taken = torch.where(kept, child, taken)
            failed = (judged & ~kept)[:, None]
            spoilt = self.rest(target, draft, token, original), self.left(draft, token)
            target, draft = torch.where(failed, spoilt[0], target), torch.where(failed, spoilt[1], draft)
        return torch.where(taken >= 0, token_at(tree, taken.clamp_min(0)), pick(target, generator)), taken


def test_the_rule_that_is_spoilt_below_is_right():
    check_verifier(TriesChildren())


class FromTheTarget(TriesChildren):
    """After a rejection it draws from the target and not from what is left of it."""

    def rest(self, target, draft, token, original):
        return original


class RawDraft(TriesChildren):
    """The second ratio uses the draft law as if the first token could come again."""

    def left(self, draft, token):
        return draft


class Favourite(TriesChildren):
    """Takes a drawn child for certain."""

    def step(self, tree, node, law, *, generator=None):
        return super().step(dataclasses.replace(tree, draft_probs=None), node, law, generator=generator)


class AcceptsAll(StepRule):
    """Takes the first child, whatever the target says."""

    def step(self, tree, node, law, *, generator=None):
        exists, child = (tree.parents == node[:, None]).max(-1)
        return torch.where(exists, token_at(tree, child), law.draw(generator)), torch.where(exists, child, -1)


WRONG = [ClaimsTypical(), DrawsAgain(), FromTheTarget(), RawDraft(), AcceptsAll()]


@pytest.mark.parametrize("mutant", WRONG, ids=lambda mutant: type(mutant).__name__)
def test_a_wrong_law_is_found(mutant):
    with pytest.raises(LawError, match="the law of the next three tokens is off by"):
        check_verifier(mutant)


def test_a_right_law_is_no_false_alarm():
    # A drawn child may be taken for certain: that wastes the draft law, and stays exact.
    check_verifier(Favourite())


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

    with pytest.raises((LawError, TypeCheckError), match="lacks stepwise, check|verifier"):
        check_verifier(Half())
