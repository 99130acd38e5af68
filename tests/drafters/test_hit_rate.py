"""The estimate that both lookup drafters score with."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import HitRate

lengths = st.integers(1, 100)


def test_the_prior_is_one_hit_to_three_misses_and_grows_with_the_match():
    rates = [HitRate().rate(length) for length in range(1, 60)]
    assert rates[0] == 0.25
    assert rates == sorted(rates)
    assert rates[2] == 5 / 8
    assert 0.9 < rates[-1] <= 0.97


@given(length=lengths, outcomes=st.lists(st.booleans(), max_size=300), decay=st.sampled_from([0.5, 0.98, 1.0]))
def test_the_rate_is_the_decayed_share_with_its_prior(length, outcomes, decay):
    rate = HitRate(hits=2.0, misses=1.0, gain=0.0, decay=decay)
    weights = [decay ** (len(outcomes) - 1 - index) for index in range(len(outcomes))]
    hits = sum(weight for weight, hit in zip(weights, outcomes, strict=True) if hit)
    for hit in outcomes:
        rate.learn(length, hit)
    assert rate.rate(length) == pytest.approx(min(0.97, max(0.01, (hits + 2) / (sum(weights) + 3))))


@given(length=lengths, hit=st.booleans())
def test_the_rate_stays_between_its_limits(length, hit):
    rate = HitRate(decay=1.0)
    for _ in range(2000):
        rate.learn(length, hit)
    assert rate.rate(length) == (0.97 if hit else pytest.approx(0.0258, abs=0.03))
    assert 0.01 <= rate.rate(length) <= 0.97


def test_match_lengths_learn_apart():
    rate = HitRate()
    before = [rate.rate(length) for length in (1, 2, 3, 4, 5, 7, 9, 13, 17)]
    for _ in range(50):
        rate.learn(3, False)
    after = [rate.rate(length) for length in (1, 2, 3, 4, 5, 7, 9, 13, 17)]
    assert after[2] < 0.15
    assert after[:2] + after[3:] == before[:2] + before[3:]


def test_it_follows_a_change_of_the_text():
    rng = random.Random(0)
    rate = HitRate()
    for chance in (0.2, 0.8, 0.4):
        for _ in range(400):
            rate.learn(5, rng.random() < chance)
        assert rate.rate(5) == pytest.approx(chance, abs=0.15)


@pytest.mark.parametrize("options", [{"hits": 0.0}, {"misses": -1.0}, {"gain": -1.0}, {"decay": 0.0}, {"decay": 1.1}])
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        HitRate(**options)
