"""Costs learnt from noisy times: robust against what only ever adds, and never falling with the size."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control import VerifyCosts
from specdec.control.meter import CostMeter, RoundCosts
from specdec.types import StageTimes


def line(size: int) -> float:
    return 1.0 + 0.07 * (size - 1)


def filled(samples: list[tuple[int, float]], kind: type[CostMeter] = CostMeter) -> CostMeter:
    meter = kind(line, steepest=0.7)
    for size, seconds in samples:
        meter.add(size, seconds)
    return meter


SAMPLES = st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 1.0)), min_size=1, max_size=20)


@given(SAMPLES, st.integers(1, 100), st.integers(0, 30))
def test_never_falls(samples, size, more):
    meter = filled(samples)
    assert 0 < meter(size) <= meter(size + more) * (1 + 1e-9)


class TakesTheMean(CostMeter):
    def __call__(self, size: int) -> float:
        return statistics.fmean(self._samples[size])


SPIKE = [(1, 0.04), (1, 0.04), (1, 0.4), (1, 0.04)]


def test_a_spike_changes_nothing():
    assert filled(SPIKE)(1) == 0.04
    assert filled(SPIKE, TakesTheMean)(1) > 0.1


def test_the_second_sample_corrects_a_first_that_was_warm_up():
    assert filled([(1, 0.4), (1, 0.04)])(1) == 0.04


def test_a_wider_pass_shows_that_a_narrow_one_was_disturbed():
    assert filled([(1, 0.4), (4, 0.05)])(1) == 0.05


def test_a_lone_sample_is_not_believed_beyond_any_reason():
    steepest, expected = 0.04 * 4**0.7, 0.04 * line(4)
    assert expected < filled([(1, 0.04), (1, 0.04), (4, 9.0)])(4) < steepest


def test_a_lone_sample_is_believed_at_once_if_it_is_good_news():
    assert filled([(1, 0.04), (1, 0.04), (4, 0.041)])(4) == 0.041


def test_a_second_sample_is_believed():
    assert filled([(1, 0.04), (1, 0.04), (4, 9.0), (4, 9.0)])(4) == 9.0


def test_old_samples_are_forgotten():
    assert filled([(1, 0.04)] * 9 + [(1, 0.08)] * 9)(1) == 0.08


def test_between_measured_sizes_it_is_a_line():
    assert filled([(1, 1.0), (5, 1.4)] * 2)(3) == pytest.approx(1.2)


@pytest.mark.parametrize(("last", "low", "high"), [(1.0, 1.0, 1.7), (1.5, 2.0, 2.6), (2.2, 3.0, 5.0)])
def test_beyond_them_it_goes_half_way_from_the_shape_to_the_trend(last, low, high):
    """From 1 and 8 to 16: flat, like the shape (1.49 at 8, 2.05 at 16), and steeper than it."""
    assert low <= filled([(1, 1.0), (1, 1.0), (8, last), (8, last)])(16) <= high


def costs_of(*rounds: tuple[int, int, float, float], profile: VerifyCosts | None = None) -> RoundCosts:
    costs = RoundCosts(profile)
    for width, budget, draft, verify in rounds:
        costs.add(width=width, budget=budget, times=StageTimes(draft=draft, verify=verify))
    return costs


def test_the_first_draft_may_start_the_drafter():
    """It counts for little until a second one was seen, which then counts alone; a cheap one is believed."""
    costs = costs_of((1, 0, 0.0, 1.0), (2, 1, 50.0, 1.0))
    assert costs.draft(1) <= 0.3
    costs.add(width=3, budget=2, times=StageTimes(draft=0.4, verify=1.0))
    assert costs.budgets == {2: 0.4}
    assert list(costs_of((1, 0, 0.0, 1.0), (2, 1, 0.1, 1.0), (3, 2, 0.2, 1.0)).budgets) == [1, 2]


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 20), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=1
    ).filter(lambda rounds: any(budget for _, budget, _, _ in rounds)),
    st.integers(1, 40),
)
def test_views_are_ordered(rounds, size):
    costs = costs_of(*rounds)
    assert costs.verify_hope(size) <= costs.verify(size) * (1 + 1e-9)
    assert costs.verify(size) <= costs.verify_bound(size)
    assert costs.draft(size) <= costs.draft_bound(size)


def test_a_profile_leaves_nothing_to_fear_or_hope_for():
    profile = VerifyCosts.from_measurements({1: 1.0, 16: 3.0})
    plain = [(1, 0, 0.0, 0.04)] * 2
    costs = costs_of(*plain, profile=profile)
    assert costs.verify(16) == costs.verify_bound(16) == costs.verify_hope(16) == pytest.approx(0.12)
    doubtful = costs_of(*plain)
    assert doubtful.verify_hope(4) < doubtful.verify(4) < doubtful.verify_bound(4)
    assert doubtful.verify_hope(16) == doubtful.verify(16)  # too wide to be hoped for


def test_a_plain_round_is_inferred_until_one_was_measured():
    costs = costs_of((2, 1, 0.01, 0.05))
    assert 0.04 < costs.plain < 0.05
    assert costs.plain_floor == pytest.approx(0.05 / 2**0.5)
    assert costs.count(1) == 0
