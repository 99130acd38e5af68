"""Typical acceptance does what it says: the bar, the favourite above it, and a law that is not the target's."""

import math

import pytest
import torch

from specdec.errors import UnsupportedError
from specdec.types import TargetLaw
from specdec.verify import Typical, exact
from tests.verify.laws import CLOSE, TARGET, always, deterministic, first_token, seeded

ROOT = torch.tensor([0])


def kept(tokens: list[int], probs: list[float], rule: Typical) -> int:
    """The child that is kept on a law of which only draws of token 0 are possible otherwise."""
    tree = deterministic([[0, *tokens]], [[-1, *[0] * len(tokens)]])
    _, child = rule.step(tree, ROOT, TargetLaw(torch.tensor([probs]).log(), greedy=False), generator=None)
    return int(child)


def test_the_fixed_bar():
    sure = [0.96, 0.04, 0.0, 0.0]  # exp(-entropy) = 0.845
    assert kept([0], sure, Typical()) == 1
    # With epsilon above and below the child's probability, and delta out of the way.
    outcome = exact.committed(Typical(epsilon=0.039), *one_child(1, sure))
    assert outcome.get((1, 0), 0.0) + outcome.get((1, 1), 0.0) == pytest.approx(1.0)
    outcome = exact.committed(Typical(epsilon=0.041), *one_child(1, sure))
    assert outcome[(0,)] == pytest.approx(0.96)


def one_child(token: int, probs: list[float]):
    tree = deterministic([[0, token]], [[-1, 0]])
    return tree, torch.tensor([[probs, probs]], dtype=torch.float64)


def test_the_bar_falls_with_the_entropy():
    flat = [0.25, 0.25, 0.25, 0.25]
    bar = 0.5 * math.exp(-math.log(4))
    assert bar < 0.25 < 0.9
    kept_always = exact.committed(Typical(epsilon=0.9, delta=0.5), *one_child(2, flat))
    assert all(path[0] == 2 for path in kept_always)
    drawn = exact.committed(Typical(epsilon=0.9, delta=1.01), *one_child(2, flat))
    assert sum(chance for path, chance in drawn.items() if path[0] == 2) == pytest.approx(0.25)


def test_the_favourite_above_the_bar_the_first_among_equals():
    assert kept([2, 1, 3], [0.1, 0.35, 0.35, 0.2], Typical()) == 1
    assert kept([3, 1, 2], [0.1, 0.35, 0.35, 0.2], Typical()) == 2


def test_it_is_lossy_and_says_so():
    tree = deterministic([[0, 3]], [[-1, 0]])  # token 3 has probability 0.1, above the bar of 0.09
    assert not Typical().lossless
    assert first_token(Typical(), tree, always(TARGET)) == pytest.approx([0.0, 0.0, 0.0, 1.0])
    assert exact.lossless_error(Typical(), tree, seeded(0, 4), length=2) > 0.1


def test_impossible_tokens_are_never_kept():
    tree = deterministic([[0, 1]], [[-1, 0]])
    laws = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    assert exact.committed(Typical(), tree, laws) == {(0,): 1.0}


def test_greedy_requests_are_exact():
    tree = deterministic([[0, 1, 2, 0]], [[-1, 0, 0, 2]])
    greedy = torch.eye(3, dtype=torch.float64)
    laws = torch.stack([greedy[2], greedy[0], greedy[0], greedy[1]])[None]
    assert exact.committed(Typical(), tree, laws) == {(2, 0, 1): pytest.approx(1.0, abs=CLOSE)}


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}, {"delta": -1.0}])
def test_bad_options(options):
    with pytest.raises(UnsupportedError, match="epsilon must lie in"):
        Typical(**options)
