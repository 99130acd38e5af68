"""Whatever is tried, no more is lost than the purse holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.purse import Purse
from tests.trees.random_trees import caught

ROUNDS = st.lists(st.tuples(st.floats(0.5, 9.0), st.floats(0.0, 8.0), st.floats(0.0, 1.0)), max_size=80)
"""Plain rounds that a drafted round would take, accepted tokens promised, and the share that comes true."""


def spend(purse, rounds, *, share=None):
    """Takes every affordable round, and plain rounds else. Returns time and tokens, in plain rounds."""
    purse.plain = 0.04
    spent = tokens = 0.0
    for cost, promised, truth in rounds:
        drafts = purse.affords(0.04 * cost, foreseen=0.0)
        gain = promised * (truth if share is None else share)
        spent += cost if drafts else 1.0
        tokens += 1.0 + gain * drafts
        purse.earn(1.0 + gain * drafts)
        if drafts:
            purse.book(0.04 * cost, tokens=1.0 + gain, foreseen=promised)
    return spent, tokens


def guarantee(affords, rounds):
    class Under(Purse):
        pass

    Under.affords = affords
    spent, tokens = spend(Under(max_loss=0.02), rounds)
    small = 0.05 * len(rounds)
    assert spent - tokens <= 1.0 + 0.02 * tokens + small + 1e-9


@given(ROUNDS)
def test_the_loss_is_bounded(rounds):
    guarantee(Purse.affords, rounds)


def test_a_purse_without_a_bottom_is_caught():
    caught(guarantee, lambda _, seconds, **__: seconds < 9.0, rounds=ROUNDS)


def test_promises_that_never_come_true_stop_counting():
    purse = Purse(max_loss=0.0)
    purse.plain = 1.0
    tried = 0
    while purse.affords(1.5, foreseen=4.0):
        purse.book(1.5, tokens=1.0, foreseen=4.0)
        tried += 1
    assert 2 <= tried <= 10


def test_the_credit_grows_with_the_tokens():
    purse = Purse(max_loss=0.1)
    assert not purse.affords(3.0, foreseen=0.0)
    purse.earn(30.0)
    assert purse.balance == pytest.approx(4.0)
    assert purse.affords(3.0, foreseen=0.0)


def test_a_dear_round_may_cost_half_the_purse():
    purse = Purse(max_loss=0.1)
    purse.earn(20.0)
    assert purse.affords(2.5, foreseen=0.0)
    assert not purse.affords(3.0, foreseen=0.0)


def test_earlier_rounds_are_seen_in_terms_of_the_latest_plain_round():
    purse = Purse(max_loss=0.0)
    purse.plain = 2.0
    purse.book(2.0, tokens=1.0, foreseen=0.0)
    assert purse.won == 0.0
    purse.plain = 1.0
    assert purse.won == -1.0


def test_winnings_of_long_ago_do_not_count():
    purse = Purse(max_loss=0.0)
    for _ in range(100):
        purse.book(1.0, tokens=4.0, foreseen=3.0)
    assert purse.won == pytest.approx(12.0)
