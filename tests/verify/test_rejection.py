"""Steps of the rejection rules on requests at the edge: tiny temperatures, ties, half precision, greedy laws."""

import pytest
import torch

from specdec.types import TargetLaw
from specdec.verify import Rejection, TargetOnly, TreeRejection, Typical, exact
from tests.verify.laws import deterministic, seeded

RULES = [TargetOnly(), Rejection(), TreeRejection(), Typical()]
ROOT = torch.tensor([0, 0, 0])
TREE = deterministic([[0, 0], [0, 1], [0]], [[-1, 0], [-1, 0], [-1]])


def kind(rule: object) -> str:
    return type(rule).__name__


def sampled(draft: torch.Tensor):
    """The trees above, as if drawn from `draft`."""
    return type(TREE)(TREE.tokens, TREE.parents, TREE.num_nodes, TREE.scores, draft.expand(3, 2, -1))


@pytest.mark.parametrize("rule", RULES, ids=kind)
@pytest.mark.parametrize("temperature", [1e-3, 1e-6])
@pytest.mark.parametrize("tree", [TREE, sampled(torch.tensor([0.5, 0.5])), sampled(torch.tensor([0.0, 1.0]))])
def test_tiny_temperatures_on_half_precision_scores(rule, temperature, tree):
    """The first row's child is right, the second's is wrong, the third has none. No NaN, no draw of token 1."""
    scores = torch.tensor([80.0, 79.0], dtype=torch.float16).float() / temperature
    token, child = rule.step(tree, ROOT, TargetLaw(scores.expand(3, -1), greedy=False))
    assert token.tolist() == [0, 0, 0]
    assert child.tolist() == [1, -1, -1]


@pytest.mark.parametrize("rule", RULES, ids=kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_fall_to_the_first_maximum(rule, dtype):
    scores = torch.tensor([0.0, 7.0, 7.0, 1.0], dtype=dtype).expand(3, -1)
    tree = deterministic([[0, 1], [0, 2], [0]], [[-1, 0], [-1, 0], [-1]])
    token, child = rule.step(tree, ROOT, TargetLaw(scores, greedy=True))
    assert token.tolist() == [1, 1, 1]
    assert child.tolist() == [1, -1, -1]


@pytest.mark.parametrize("rule", RULES, ids=kind)
def test_half_precision_laws_at_full_scale(rule):
    """A vocabulary so large that a half-precision softmax does not sum to one."""
    scores = torch.zeros(1, 60000, dtype=torch.float16)
    scores[0, 5] = 11.0
    tree = deterministic([[0, 5]], [[-1, 0]])
    generator = torch.Generator().manual_seed(0)
    token, child = rule.step(tree, torch.tensor([0]), TargetLaw(scores, greedy=False), generator=generator)
    assert 0 <= token < 60000
    assert child in (-1, 1)


@pytest.mark.parametrize("rule", RULES, ids=kind)
def test_processors_that_forbid_tokens_are_kept_to(rule):
    """min-p leaves two tokens; drafts of the others are refused and never replaced by a forbidden one."""
    scores = torch.tensor([0.4, 0.35, 0.0, 0.0]).log().expand(4000, -1)
    tree = deterministic([[0, index % 4] for index in range(4000)], [[-1, 0]] * 4000)
    drawn = type(tree)(tree.tokens, tree.parents, tree.num_nodes, tree.scores, torch.full((4000, 2, 4), 0.25))
    generator = torch.Generator().manual_seed(0)
    node = torch.zeros(4000, dtype=torch.int64)
    token, child = rule.step(drawn, node, TargetLaw(scores, greedy=False), generator=generator)
    assert token.max() == 1
    assert (child[tree.tokens[:, 1] > 1] == -1).all()
    if rule.lossless:
        share = float((token == 0).float().mean())
        assert abs(share - 0.533) < 0.02


def test_the_acceptance_is_the_overlap_of_the_laws():
    target, draft = seeded(0), seeded(1)
    tree, weights = exact.draws(draft, branches=(1,))
    outcome = exact.committed(Rejection(), tree, exact.laws_at(tree, target), weights)
    assert exact.mean_accepted(outcome) == pytest.approx(float(torch.minimum(target(()), draft(())).sum()), abs=1e-12)


@pytest.mark.parametrize("rule", [Rejection(), TreeRejection()], ids=kind)
def test_a_law_equal_to_the_drafts_is_always_accepted(rule):
    """Rounding must not leave an empty residual to draw from."""
    law = torch.rand(500, 1000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.multinomial(law, 1, generator=torch.Generator().manual_seed(1))
    tree = deterministic([[0, int(token)] for token in tokens], [[-1, 0]] * 500)
    tree = type(tree)(tree.tokens, tree.parents, tree.num_nodes, tree.scores, law[:, None].expand(-1, 2, -1))
    node = torch.zeros(500, dtype=torch.int64)
    token, child = rule.step(tree, node, TargetLaw(law.log(), greedy=False))
    assert (child == 1).all()
    assert torch.equal(token[:, None], tokens)
