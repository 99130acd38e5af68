"""Calibrated acceptance: starts at the drafter's word, ends at the outcomes, and multiplies along paths."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.calibration import Calibration, Outcome
from specdec.types import DraftTree
from tests.trees.random_trees import caught, lineage, trees

OUTCOMES = st.lists(st.builds(Outcome, st.integers(1, 12), st.floats(0.0, 1.0), st.booleans()), max_size=60)
DEPTHS, SAID = st.integers(1, 12), st.floats(0.0, 1.0)


def taught(outcomes: list[Outcome]) -> Calibration:
    calibration = Calibration()
    calibration.add(outcomes)
    return calibration


@given(DEPTHS, SAID)
def test_without_outcomes_the_prior_stands(depth, said):
    assert Calibration().edge(depth, said, prior=said) == pytest.approx(said)


@given(OUTCOMES, DEPTHS, SAID)
def test_views_are_ordered_probabilities(outcomes, depth, said):
    floor, value, hope = (taught(outcomes).edge(depth, said, prior=prior) for prior in (0.0, said, 1.0))
    assert 0.0 <= floor <= value + 1e-12 <= hope + 2e-12 <= 1.0 + 3e-12


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("said", [0.03, 0.5, 0.99])
def test_outcomes_win(share, said):
    chance, calibration = random.Random(0), Calibration()
    for _ in range(300):
        calibration.add([Outcome(1, said, chance.random() < share)])
    assert calibration.edge(1, said, prior=said) == pytest.approx(share, abs=0.12)


@given(OUTCOMES)
def test_each_outcome_moves_its_cell_its_way(outcomes):
    before = taught(outcomes).edge(3, 0.7, prior=0.7)
    for accepted in (False, True):
        after = taught([*outcomes, *[Outcome(3, 0.7, accepted)] * 3]).edge(3, 0.7, prior=0.7)
        assert (after >= before - 1e-12) if accepted else (after <= before + 1e-12)


def test_depths_are_told_apart():
    """A lookup that is rarely right, and then stays right."""
    calibration = Calibration()
    for _ in range(20):
        calibration.add([Outcome(1, 0.8, False)] * 9 + [Outcome(depth, 0.8, True) for depth in range(1, 9)])
    assert calibration.edge(1, 0.8, prior=0.8) < 0.15
    assert calibration.edge(6, 0.8, prior=0.8) > 0.9


def test_an_unseen_depth_takes_after_the_others():
    assert taught([Outcome(1, 0.8, False)] * 50).edge(6, 0.8, prior=0.8) < 0.1


def test_predictions_are_told_apart():
    calibration = taught([Outcome(1, 0.9, True)] * 20 + [Outcome(1, 0.3, False)] * 20)
    assert calibration.edge(1, 0.3, prior=0.3) < 0.1 < 0.9 < calibration.edge(1, 0.9, prior=0.9)


def test_old_outcomes_fade():
    calibration = Calibration()
    for _ in range(300):
        calibration.add([Outcome(1, 0.5, True)])
    for _ in range(300):
        calibration.add([Outcome(1, 0.5, False)])
    assert calibration.edge(1, 0.5, prior=0.5) < 0.1


def test_nothing_new_fades_nothing():
    calibration = taught([Outcome(1, 0.5, True)] * 5)
    before = calibration.table()
    calibration.add([])
    assert calibration.table() == before


def test_the_table_shows_shares():
    assert taught([Outcome(1, 0.85, True)] * 3 + [Outcome(4, 0.85, False)]).table() == [("0.80-0.90", 4.0, 0.75)]


def path_law(assess, tree, outcomes):
    """Values are the products of the edges on the path, each edge looked up by itself."""
    calibration = taught(outcomes)
    found = assess(calibration, tree)
    for row, count in enumerate(tree.num_nodes.tolist()):
        assert torch.equal(found.values[row, count:], torch.zeros(tree.width - count, dtype=torch.float64))
        scores = tree.scores[row].double().tolist()
        for node in range(count):
            path = lineage(tree, row, node)
            views = [1.0, 1.0, 1.0]
            for depth, (parent, child) in enumerate(itertools.pairwise(path), start=1):
                said = math.exp(max(-30.0, scores[child] - scores[parent]))
                assert found.predicted[row, child].item() == pytest.approx(said, rel=1e-9)
                for view, prior in enumerate((said, 0.0, 1.0)):
                    views[view] *= max(1e-12, calibration.edge(depth, said, prior=prior))
            assert [x[row, node].item() for x in found[:3]] == pytest.approx(views, rel=1e-6, abs=1e-200)


@given(trees(), OUTCOMES)
def test_values_multiply_along_paths(tree, outcomes):
    path_law(Calibration.assess, tree, outcomes)


def by_edge_alone(calibration: Calibration, tree: DraftTree):
    found = calibration.assess(tree)
    parents = tree.parents.clamp_min(0)
    return found._replace(values=found.values / found.values.gather(1, parents).clamp_min(1e-300))


def by_the_drafters_word(_: Calibration, tree: DraftTree):
    return Calibration().assess(tree)


def test_wrong_values_are_caught():
    caught(path_law, by_edge_alone, tree=trees(), outcomes=OUTCOMES)
    caught(path_law, by_the_drafters_word, tree=trees(), outcomes=OUTCOMES)


@given(trees(), OUTCOMES)
def test_values_never_rise_along_paths(tree, outcomes):
    values = taught(outcomes).assess(tree).values
    above = values.gather(1, tree.parents.clamp_min(0))
    assert bool((values <= above * (1 + 1e-12)).all())
