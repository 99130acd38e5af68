"""The arithmetic of acceptance: laws stay laws, and nothing becomes NaN or leaves [0, 1]."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.verify import rules

ONE = torch.ones(1)


def rows(vocab: int = 4) -> st.SearchStrategy[Tensor]:
    """Weights of any scale, denormals included, not all zero."""
    value = st.sampled_from([0.0, 0.0, 1e-45, 1e-38, 1e-20, 1e-7, 0.1, 0.5, 1.0, 1.0, 60000.0])
    return st.lists(value, min_size=vocab, max_size=vocab).filter(any).map(lambda row: torch.tensor([row]))


@given(weights=rows())
def test_a_law_sums_to_one(weights):
    law = rules.law(weights)
    assert torch.isfinite(law).all()
    torch.testing.assert_close(law.sum(-1), ONE)
    assert torch.equal(law > 0, weights > 0) or weights.max() / weights[weights > 0].min() > 1e30


def test_half_precision_laws_are_widened():
    for dtype in (torch.float16, torch.bfloat16):
        law = rules.law(torch.full((1, 50000), 1e-5).to(dtype))
        assert law.dtype == torch.float32
        torch.testing.assert_close(law.sum(-1), ONE)
    assert rules.law(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64


def test_rows_without_mass():
    zero = torch.zeros(1, 3)
    assert torch.equal(rules.normalise(zero), zero)
    assert rules.normalise(zero, torch.tensor([[0.2, 0.3, 0.5]])).tolist()[0][2] == 0.5


@given(target=rows(), draft=rows(), token=st.integers(0, 3), weight=st.sampled_from([0.0, 1e-20, 0.3, 1.0]))
def test_whatever_comes_stays_a_law(target, draft, token, weight):
    target, draft, token = rules.law(target), rules.law(draft), torch.tensor([token])
    share = torch.tensor([weight])
    for law in (draft, None, torch.zeros_like(draft)):
        chance = rules.acceptance(rules.at(target, token), None if law is None else rules.at(law, token), share)
        assert 0 <= chance <= 1
        rest, left, after = rules.reject(target, law, token, share)
        torch.testing.assert_close(rest.sum(-1), ONE)
        assert (rest >= 0).all()
        assert 0 <= after <= 1
        assert after == 1 or weight < 1  # a node that must be served stays one that must be served, exactly
        if left is not None:
            assert rules.at(left, token) == 0
            assert torch.isfinite(left).all()


def test_the_share_is_one_exactly_where_rounding_would_eat_the_mass():
    """(mass + 1) - 1 is not mass; a root whose share is not 1 could be rejected, and a round would have no end."""
    for mass in (0.0, 1e-12, 1e-8, 8e-8, 1e-7, 0.3):
        assert rules.weight_after(torch.tensor([mass]), ONE) == 1
    mass = torch.tensor([8e-8])
    assert mass / (mass + 1.0 - ONE) < 0.7


def test_a_deterministic_child_takes_its_own_mass():
    target, token = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([0])
    rest, left, share = rules.reject(target, None, token, ONE)
    assert rest.tolist() == [[0.0, 0.5, 0.5]]
    assert left is None
    assert share == 1


def test_a_used_up_law_stays_used_up():
    target, token = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([0])
    _, left, _ = rules.reject(target, torch.tensor([[1.0, 0.0, 0.0]]), token, ONE)
    assert left is not None
    assert left.tolist() == [[0.0, 0.0, 0.0]]
    # The next child counts as certain: what it does not take is all the rest.
    assert rules.uncovered(target, left, torch.tensor([2]), ONE).tolist() == [[0.5, 0.25, 0.0]]
