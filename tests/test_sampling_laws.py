"""Sampling end to end: the law of the generated text, by chi-square, for every verifier.

Target and drafter are table models, so the joint law of the first tokens is known exactly. Seeds are fixed: a test
either holds or does not. Wrong rules are kept beside the right ones and must be told apart from them.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import logits_process

from specdec import drafters, trees, verify
from specdec.protocols import TreeBuilder, Verifier
from specdec.testing import table_model
from specdec.types import DraftTree, TargetLaw, Verdict
from specdec.verify import StepRule
from tests import helpers

VOCAB, TOKENS, RUNS = 4, 3, 2000
PQ4 = ([0.40, 0.35, 0.15, 0.10], [0.10, 0.20, 0.30, 0.40])
"""The target and the draft law of the field log; two positive residual entries make wrong rules show."""

TARGET = torch.tensor([PQ4[0], [0.1, 0.2, 0.3, 0.4], [0.55, 0.15, 0.05, 0.25], [0.25, 0.3, 0.35, 0.1]])
DRAFT = torch.tensor([PQ4[1], [0.3, 0.3, 0.2, 0.2], [0.2, 0.4, 0.3, 0.1], [0.1, 0.1, 0.4, 0.4]])
HINT = torch.tensor([[0.3, 0.4, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3], [0.5, 0.2, 0.05, 0.25], [0.2, 0.4, 0.3, 0.1]])
"""For trees that are not drawn: its best tokens are among the target's best two, but not in their order."""

WARPERS: dict[str, tuple[dict[str, Any], list[logits_process.LogitsProcessor]]] = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.5}, [logits_process.TemperatureLogitsWarper(0.5)]),
    "top-k": ({"top_k": 2}, [logits_process.TopKLogitsWarper(2)]),
    "top-p": (
        {"temperature": 1.5, "top_p": 0.8},
        [logits_process.TemperatureLogitsWarper(1.5), logits_process.TopPLogitsWarper(0.8)],
    ),
}
RULES: dict[str, tuple[TreeBuilder, Verifier | None]] = {
    "target only, chain": (trees.Chain(3), verify.TargetOnly()),
    "target only, best first": (trees.BestFirst(nodes=7, branch=2), verify.TargetOnly()),
    "target only, sampled": (trees.Sampled(branches=(2, 2)), verify.TargetOnly()),
    "rejection, sampled": (trees.Sampled(branches=(1, 1, 1)), verify.Rejection()),
    "rejection, chain": (trees.Chain(3), verify.Rejection()),
    "block, sampled": (trees.Sampled(branches=(1, 1, 1)), verify.BlockVerification()),
    "block, chain": (trees.Chain(3), verify.BlockVerification()),
    "tree rejection, sampled": (trees.Sampled(branches=(3, 2)), verify.TreeRejection()),
    "tree rejection, best first": (trees.BestFirst(nodes=7, branch=2), verify.TreeRejection()),
    "traversal, sampled": (trees.Sampled(branches=(3, 2)), verify.Traversal()),
    "traversal, best first": (trees.BestFirst(nodes=7, branch=2), verify.Traversal()),
    "default, sampled": (trees.Sampled(branches=(2, 2)), None),
}


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    return table_model(TARGET), table_model(DRAFT), table_model(HINT)


def joint(warpers: Sequence[logits_process.LogitsProcessor], first: int = 0) -> Tensor:
    """Exact probability of every text of `TOKENS` tokens after token `first`."""
    ids, scores = torch.arange(VOCAB)[:, None], TARGET.log()
    for warper in warpers:
        scores = warper(ids, scores)
    law = scores.double().softmax(-1)
    probs = law[first]
    for _ in range(TOKENS - 1):
        probs = (probs.view(-1, VOCAB)[:, :, None] * law).flatten()
    return probs


def draw(tree: TreeBuilder, verifier: Verifier | None, seed: int = 0, **request: Any) -> Tensor:
    """Counts of the texts drawn in `RUNS` runs, one row of a batch each."""
    target, draft, hint = models()
    run = helpers.speculate(
        target,
        drafters.ModelDrafter(draft if tree.sampled else hint),
        tree,
        verifier=verifier,
        input_ids=torch.tensor([[0]]),
        num_return_sequences=RUNS,
        max_new_tokens=TOKENS,
        do_sample=True,
        generator=torch.Generator().manual_seed(seed),
        **{"top_k": 0, **request},
    )
    new = run.output[:, 1:]
    code = (new * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(-1)
    assert run.generator.stats.accepted > RUNS // 20, "drafts are never accepted"
    return torch.bincount(code, minlength=VOCAB**TOKENS)


def pvalue(counts: Tensor, probs: Tensor) -> float:
    """Chi-square of the counts, rare texts pooled; 0 if an impossible text was drawn."""
    if int(counts[probs == 0].sum()):
        return 0.0
    expected = probs * int(counts.sum())
    rare = (expected < 5) & (probs > 0)
    seen = [*counts[expected >= 5].tolist(), int(counts[rare].sum())]
    wanted = [*expected[expected >= 5].tolist(), float(expected[rare].sum())]
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    return float(stats.chisquare(seen, wanted).pvalue)


def test_the_table_model_has_the_exact_law():
    target, *_ = models()
    logits = target(torch.arange(VOCAB)[:, None]).logits[:, 0]
    torch.testing.assert_close(logits.softmax(-1), TARGET.double(), rtol=0, atol=1e-6)
    assert float(joint([]).sum()) == pytest.approx(1)
    text = [1, 3, 0]
    steps = itertools.pairwise([0, *text])
    chance = torch.tensor([TARGET[a, b] for a, b in steps]).prod()
    assert float(joint([])[1 * 16 + 3 * 4 + 0]) == pytest.approx(float(chance))


BESIDE = {"target only, sampled", "rejection, chain", "block, chain", "default, sampled"}
"""Combinations that nobody needs but that must be right: tried with one set of warpers."""
CASES = [(rule, warper) for rule in RULES for warper in WARPERS if rule not in BESIDE or warper == "top-p"]


@pytest.mark.parametrize(("rule", "warper"), CASES)
def test_a12_a13_the_text_has_the_target_s_law(rule, warper):
    """Acceptance at another temperature than the draw, or with a law that the draft was not drawn from."""
    request, processors = WARPERS[warper]
    assert pvalue(draw(*RULES[rule], **request), joint(processors)) > 1e-3


class WrongDraftLaw(StepRule):
    """A wrong rule: the ratio uses another law than the one the draft was drawn from."""

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        uniform = None if tree.draft_probs is None else torch.full_like(tree.draft_probs, 1 / VOCAB)
        other = DraftTree(tree.tokens, tree.parents, tree.num_nodes, tree.scores, uniform)
        return verify.TreeRejection().step(other, node, law, generator=generator)


class WrongTemperature(StepRule):
    """A wrong rule: acceptance looks at the target at another temperature than the text is drawn with."""

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        _, child = verify.TreeRejection().step(tree, node, TargetLaw(law.scores / 2, law.greedy), generator=generator)
        drafted = tree.tokens.gather(1, child.clamp_min(0)[:, None]).squeeze(1)
        return torch.where(child >= 0, drafted, law.draw(generator)), child


class NoResidual(StepRule):
    """A wrong rule: after a rejection it draws from the target instead of from what is left of it."""

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        token, child = verify.TreeRejection().step(tree, node, law, generator=generator)
        return torch.where(child >= 0, token, law.draw(generator)), child


class OneTruthPerPath:
    """A wrong rule: draws the target at every node of every path and keeps the longest match."""

    lossless = True
    stepwise = False

    def check(self, builder: TreeBuilder) -> None:
        """Fits everything."""

    def __call__(self, tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None) -> Verdict:
        batch, nodes = tree.tokens.shape
        path = torch.full((batch, 1), -1)
        for child in range(1, nodes):
            first = (tree.parents[:, child] == 0) & (path[:, 0] < 0)
            truth = torch.multinomial(target_probs[:, 0], 1, generator=generator).squeeze(1)
            path[:, 0] = torch.where(first & (truth == tree.tokens[:, child]), child, path[:, 0])
        taken = path[:, 0]
        at = target_probs[torch.arange(batch), taken.clamp_min(0)]
        return Verdict(path, (taken >= 0).to(torch.int64), torch.multinomial(at, 1, generator=generator).squeeze(1))


MUTANTS: dict[str, tuple[TreeBuilder, Any, str]] = {
    "wrong draft law": (trees.Sampled(branches=(2, 2)), WrongDraftLaw(), "plain"),
    "wrong temperature": (trees.Sampled(branches=(1, 1)), WrongTemperature(), "temperature"),
    "no residual": (trees.Sampled(branches=(1, 1)), NoResidual(), "plain"),
    "one truth per path": (trees.BestFirst(nodes=4, branch=3), OneTruthPerPath(), "plain"),
    "lossy": (trees.Chain(3), verify.Typical(epsilon=0.1), "plain"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a13_a16_a17_wrong_rules_are_noticed(mutant):
    """Biased rules whose output looks like text; each is a row of the field log's table."""
    tree, rule, warper = MUTANTS[mutant]
    request, processors = WARPERS[warper]
    assert pvalue(draw(tree, rule, **request), joint(processors)) < 1e-9


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in BESIDE])
def test_a11_min_p_holds_for_drafts_and_for_the_bonus_token(rule):
    """Warpers that "do not change the best token" reached the bonus token only."""
    request, processors = {"min_p": 0.5}, [logits_process.MinPLogitsWarper(0.5)]
    counts = draw(*RULES[rule], seed=1, **request)
    first = counts.view(VOCAB, -1).sum(-1).double() / RUNS
    assert first[2:].tolist() == [0, 0]
    assert first[:2].tolist() == pytest.approx([0.533, 0.467], abs=0.04)
    assert pvalue(counts, joint(processors)) > 1e-3


def test_sequence_bias_and_repetition_enter_the_law_of_later_tokens():
    """Processors with a prefix, sampled: the law of the second token depends on the drafted first one."""
    bias = {"sequence_bias": [[[1, 3], 2.0], [[0, 0], -3.0]]}
    law = TARGET.double().log()[None].repeat(VOCAB, 1, 1)  # by the token before the last, then the last
    law[:, 1, 3] += 2.0
    law[:, 0, 0] -= 3.0
    exact = law[0, 0].softmax(-1)
    for _ in range(TOKENS - 1):
        exact = (exact.view(-1, VOCAB)[:, :, None] * law[0].softmax(-1)).flatten()
    for rule in ("rejection, sampled", "block, sampled", "traversal, sampled", "tree rejection, best first"):
        assert pvalue(draw(*RULES[rule], seed=2, **bias), exact) > 1e-3
