"""Every drafted node is judged once, by the text alone."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.calibration import Outcome
from specdec.control.outcomes import DraftedRows, Trail, Trails, verified_outcomes
from specdec.types import DraftTree, Round
from tests.trees.random_trees import caught, lineage, trees


def text_for(tree: DraftTree, row: int, chance: random.Random) -> list[int]:
    """Tokens that follow some path of the tree and then leave it or end."""
    node = chance.randrange(int(tree.num_nodes[row]))
    path = [int(tree.tokens[row, step]) for step in lineage(tree, row, node)[1:]]
    return path + [9999] * chance.randint(0, 2)


def judged(tree: DraftTree, row: int, text: list[int]) -> list[tuple[int, bool]]:
    """Depth and fate of every node whose parent lies on the text's path and whose own place the text reaches."""
    found = []
    for node in range(1, int(tree.num_nodes[row])):
        path = [int(tree.tokens[row, step]) for step in lineage(tree, row, node)[1:]]
        if path[:-1] == text[: len(path) - 1] and len(path) <= len(text):
            found.append((len(path), path == text[: len(path)]))
    return sorted(found)


def trail_law(follow, tree, seed):
    """However the text is cut into rounds, the outcomes are the same."""
    chance = random.Random(seed)
    for row, nodes in enumerate(tree.num_nodes.tolist()):
        text = text_for(tree, row, chance)
        trail = Trail(tree.tokens[row].tolist(), tree.parents[row].tolist(), [0.5] * tree.width, nodes=nodes)
        outcomes, rest = [], text
        while rest:
            step = chance.randint(1, len(rest))
            outcomes += follow(trail, rest[:step])
            rest = rest[step:]
        assert sorted((depth, accepted) for depth, _, accepted in outcomes) == judged(tree, row, text)


SEEDS = st.integers(0, 2**32)


@given(trees(), SEEDS)
def test_every_node_is_judged_once(tree, seed):
    trail_law(Trail.follow, tree, seed)


def only_the_first_token(trail: Trail, tokens: list[int]) -> list[Outcome]:
    return trail.follow(tokens[:1])


def winners_only(trail: Trail, tokens: list[int]) -> list[Outcome]:
    return [outcome for outcome in trail.follow(tokens) if outcome.accepted]


def test_wrong_judges_are_caught():
    caught(trail_law, only_the_first_token, tree=trees(), seed=SEEDS)
    caught(trail_law, winners_only, tree=trees(), seed=SEEDS)


def drafted(*tokens: int) -> DraftedRows:
    return DraftedRows([[0, *tokens]], [list(range(-1, len(tokens)))], [[0.5] * (len(tokens) + 1)], [len(tokens) + 1])


def test_a_tree_is_followed_over_rounds_before_the_next_is_taken_up():
    trails = Trails()
    assert trails.follow([[1]], drafted(1, 2, 3)) == [Outcome(1, 0.5, True)]
    assert trails.follow([[2]], drafted(9, 9, 9)) == [Outcome(2, 0.5, True)]
    assert trails.follow([[9]], None) == [Outcome(3, 0.5, False)]
    assert trails.follow([[9]], drafted(9)) == [Outcome(1, 0.5, True)]
    assert trails.follow([[9]], None) == []


def test_a_row_that_stopped_judges_nothing():
    assert Trails().follow([[]], drafted(1)) == []


def sampled_round(accepted: int, committed: int, parents: tuple[int, ...] = (-1, 0, 0, 1, 3)) -> Round:
    """The tree 0 -> (1, 2), 1 -> 3 -> 4, whose path 1, 3, 4 is accepted as far as asked."""
    path = [1, 3, 4][:accepted]
    nodes = len(parents)
    return Round(
        index=1,
        tree=DraftTree(
            torch.zeros(1, nodes).long(), torch.tensor([parents]), torch.tensor([nodes]), torch.zeros(1, nodes)
        ),
        path=torch.tensor([[*path, -1]]),
        num_accepted=torch.tensor([accepted]),
        committed=torch.zeros(1, 4).long(),
        num_committed=torch.tensor([committed]),
        budget=nodes - 1,
    )


@pytest.mark.parametrize(
    ("accepted", "committed", "fates"),
    [
        (0, 1, [False]),
        (1, 2, [True, False]),
        (3, 4, [True, True, True]),  # nothing was drafted below the leaf, so nothing was refused there
        (2, 2, [True, True]),  # a stop: what came next was never decided
        (0, 0, []),
    ],
)
def test_sampled_trees_are_judged_by_depth(accepted, committed, fates):
    outcomes = verified_outcomes(sampled_round(accepted, committed), 0.6)
    assert outcomes == [Outcome(depth, 0.6, fate) for depth, fate in enumerate(fates, start=1)]


def test_an_empty_sampled_tree_teaches_nothing():
    assert verified_outcomes(sampled_round(0, 1, parents=(-1,)), 0.6) == []
