"""The plan is the best policy there is, found without trying them all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.plan import Offer, Outlook, gains, ladder
from tests.trees.random_trees import caught

SIZES = [0, 1, 2, 4]


@given(st.integers(0, 300))
def test_ladder(nodes):
    sizes = ladder(nodes)
    assert sizes[0] == 0
    assert sizes[-1] == nodes
    assert sizes == sorted(set(sizes))
    assert all(high - low <= max(1, low // 2) for low, high in itertools.pairwise(sizes))
    assert len(sizes) <= 5 + 2 * nodes.bit_length()


MARGINALS = st.lists(st.floats(0.0, 1.0), max_size=9).map(lambda values: sorted(values, reverse=True))


@given(MARGINALS, st.booleans())
def test_gains_add_up(marginals, extend):
    sizes = ladder(15)
    curve = gains(marginals, sizes, extend=extend)
    assert curve[0] == 0.0
    assert curve == sorted(curve)
    known = [(size, gain) for size, gain in zip(sizes, curve, strict=True) if size <= len(marginals)]
    assert [gain for _, gain in known] == pytest.approx([sum(marginals[:size]) for size, _ in known])
    if not extend:
        assert curve[-1] == pytest.approx(sum(marginals))


def test_a_chain_is_extended_at_its_pace():
    assert gains([0.9, 0.81], [0, 4], extend=True)[1] == pytest.approx(0.9 + 0.81 + 0.729 + 0.6561)


TREES = st.lists(MARGINALS, min_size=1, max_size=3)
COSTS = st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4).map(
    lambda steps: [*itertools.accumulate(steps, initial=1.0)]
)


def weights(count: int) -> list[float]:
    """The latest tree counts most."""
    return [0.9**age for age in reversed(range(count))]


def best_rate(curves, drafts, passes, *, prunable: bool) -> float:
    """Tokens per second of the best policy: a budget, and for each remembered tree how much of it to verify."""
    rates = []
    for budget in range(len(SIZES)):
        picks = range(budget + 1) if prunable else [budget]
        for policy in itertools.product(picks, repeat=len(curves)):
            tokens = sum(w * (1 + c[n]) for w, c, n in zip(weights(len(curves)), curves, policy, strict=True))
            seconds = sum(w * (passes[n] + drafts[budget]) for w, n in zip(weights(len(curves)), policy, strict=True))
            rates.append(tokens / seconds)
    return max(rates)


def plan_law(best, trees, drafts, passes, prunable, guess):
    curves = [gains(values, SIZES, extend=False) for values in trees]
    drafts = [0.0, *drafts[1:4]]
    outlook = Outlook(SIZES, prunable=prunable, trees=8)
    for curve in curves:
        outlook.add(curve, [0.5 * gain for gain in curve])
    offer = best(
        outlook, guess, lambda size: drafts[SIZES.index(size)], lambda width: passes[SIZES.index(width - 1)], largest=4
    )
    assert offer.rate == pytest.approx(best_rate(curves, drafts, passes, prunable=prunable), rel=0.03)
    assert offer.floor == pytest.approx(1 + 0.5 * (offer.tokens - 1))


INPUTS = {
    "trees": TREES,
    "drafts": COSTS,
    "passes": COSTS,
    "prunable": st.booleans(),
    "guess": st.floats(0.0, 5.0),
}


@given(**INPUTS)
def test_no_policy_earns_more(trees, drafts, passes, prunable, guess):
    plan_law(Outlook.best, trees, drafts, passes, prunable, guess)


def most_accepted(outlook: Outlook, rate: float, *_: object, largest: int) -> Offer:
    """The mutant that ranks by acceptance alone."""
    return outlook.best(rate, lambda _: 0.0, lambda _: 1.0, largest=largest)


def each_round_by_itself(outlook: Outlook, rate: float, draft, verify, *, largest: int) -> Offer:
    """The mutant that maximises the ratio of each round instead of the ratio over rounds."""
    curve, floor = outlook._curves[-1]
    lone = Outlook(outlook.sizes, prunable=False, trees=1)
    lone.add(curve, floor)
    return lone.best(rate, draft, verify, largest=largest)


@pytest.mark.parametrize("mutant", [most_accepted, each_round_by_itself])
def test_wrong_plans_are_caught(mutant):
    caught(plan_law, mutant, **INPUTS)


def test_larger_budgets_than_allowed_are_not_offered():
    outlook = Outlook(SIZES, prunable=True, trees=1)
    outlook.add([0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0, 4.0])
    assert outlook.best(0.0, lambda _: 0.0, lambda _: 1.0, largest=2).size == 2


def test_nothing_is_offered_before_a_tree_was_seen():
    assert Outlook(SIZES, prunable=True, trees=1).best(0.0, lambda _: 0.1, lambda _: 1.0, largest=4).size == 0
