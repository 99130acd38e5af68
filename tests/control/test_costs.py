"""A cost profile never falls, is relative to a plain round, and cannot be changed."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control import VerifyCosts

MEASUREMENTS = st.dictionaries(st.integers(2, 64), st.floats(1e-4, 10.0), max_size=6).flatmap(
    lambda rest: st.floats(1e-4, 10.0).map(lambda plain: {1: plain, **rest})
)


@given(MEASUREMENTS, st.integers(1, 100), st.integers(0, 30))
def test_never_falls_and_never_exceeds_what_was_measured(measurements, width, more):
    costs = VerifyCosts.from_measurements(measurements)
    assert costs.relative(1) == 1.0
    assert 1.0 <= costs.relative(width) <= costs.relative(width + more) * (1 + 1e-12)
    assert all(costs.relative(w) <= seconds / costs.costs[0] * (1 + 1e-12) for w, seconds in measurements.items())


def test_interpolation():
    costs = VerifyCosts.from_measurements({1: 2.0, 4: 4.0, 16: 6.4})
    assert [costs.relative(width) for width in (1, 2, 4, 10, 16)] == pytest.approx([1, 4 / 3, 2, 2.6, 3.2])
    assert costs.relative(22) == pytest.approx(3.8)


def test_a_dear_outlier_is_lowered():
    assert VerifyCosts.from_measurements({1: 1.0, 2: 9.0, 4: 2.0}).costs == (1.0, 2.0, 2.0)


def test_one_width_is_a_flat_curve():
    assert VerifyCosts.from_measurements({1: 0.3}).relative(40) == 1.0


@pytest.mark.parametrize(
    ("measurements", "message"),
    [
        ({2: 1.0}, "cost of width 1"),
        ({}, "cost of width 1"),
        ({1: 0.0}, "positive"),
        ({1: math.nan}, "positive"),
        ({0: 1.0, 1: 1.0}, "rise from 1"),
    ],
)
def test_what_cannot_be_a_profile_is_refused(measurements, message):
    with pytest.raises(ValueError, match=message):
        VerifyCosts.from_measurements(measurements)


@pytest.mark.parametrize(
    ("widths", "costs"), [((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1, 2), (2.0, 1.0)), ((), ()), ((1,), (math.inf,))]
)
def test_a_curve_that_is_not_one_is_refused(widths, costs):
    with pytest.raises(ValueError, match="got"):
        VerifyCosts(widths, costs)


def test_it_is_frozen():
    costs = VerifyCosts.from_measurements({1: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        costs.widths = (1, 2)
