"""Whatever is tried, no more is lost than the purse holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.meter import RoundCosts
from specdec.control.purse import Purse
from tests.trees.random_trees import caught

TENTH = 0.004  # seconds; a plain round takes ten


class KnownCosts(RoundCosts):
    """A pass of width n takes n tenths of a plain round, drafting nothing."""

    plain = plain_floor = 10 * TENTH

    def __init__(self) -> None:
        super().__init__(None)

    def verify(self, width: int) -> float:
        return width * TENTH

    def draft(self, size: int) -> float:
        return 0.0 * size


def purse(max_loss: float = 0.0, kind: type[Purse] = Purse) -> Purse:
    return kind(KnownCosts(), max_loss=max_loss)


ROUNDS = st.lists(st.tuples(st.integers(5, 90), st.floats(0.0, 8.0), st.floats(0.0, 1.0)), max_size=80)
"""Tenths that a drafted round would take, accepted tokens promised, and the share of them that comes true."""


def guarantee(affords, rounds):
    class Under(Purse):
        pass

    Under.affords = affords
    held = purse(0.02, Under)
    spent = tokens = small = 0.0
    for tenths, promised, truth in rounds:
        drafts = held.affords(tenths * TENTH, foreseen=0.0)
        gain = promised * truth if drafts else 0.0
        held.book(budget=int(drafts), width=tenths if drafts else 10, tokens=1.0 + gain, foreseen=promised)
        spent += tenths / 10 if drafts else 1.0
        tokens += 1.0 + gain
        small += 0.02
    assert spent - tokens <= 1.0 + 0.02 * tokens + small + 1e-9


@given(ROUNDS)
def test_the_loss_is_bounded(rounds):
    guarantee(Purse.affords, rounds)


def test_a_purse_without_a_bottom_is_caught():
    caught(guarantee, lambda _, seconds, **__: seconds < 1.0, rounds=ROUNDS)


def test_promises_that_never_come_true_stop_counting():
    held, tried = purse(), 0
    while held.affords(15 * TENTH, foreseen=4.0):
        held.book(budget=1, width=15, tokens=1.0, foreseen=4.0)
        tried += 1
    assert 2 <= tried <= 10


def test_the_credit_grows_with_the_tokens():
    held = purse(0.1)
    assert not held.affords(30 * TENTH, foreseen=0.0)
    held.book(budget=0, width=10, tokens=30.0, foreseen=0.0)
    assert held.balance == pytest.approx(4.0)
    assert held.affords(30 * TENTH, foreseen=0.0)


def test_a_dear_round_may_cost_half_the_purse():
    held = purse(0.1)
    held.book(budget=0, width=10, tokens=20.0, foreseen=0.0)
    assert held.affords(25 * TENTH, foreseen=0.0)
    assert not held.affords(30 * TENTH, foreseen=0.0)


def test_earlier_rounds_are_paid_at_the_latest_costs():
    held = purse()
    held.book(budget=1, width=20, tokens=1.0, foreseen=0.0)
    assert held.won == pytest.approx(-1.0)
    held._costs.plain_floor = 20 * TENTH
    held.book(budget=0, width=10, tokens=1.0, foreseen=0.0)
    assert held.won == pytest.approx(0.0)


def test_winnings_of_long_ago_do_not_count():
    held = purse()
    for _ in range(100):
        held.book(budget=1, width=10, tokens=4.0, foreseen=3.0)
    assert held.won == pytest.approx(12.0)
    for _ in range(12):
        held.book(budget=1, width=20, tokens=1.0, foreseen=0.0)
    assert held.won == pytest.approx(0.0)
