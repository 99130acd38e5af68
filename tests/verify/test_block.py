"""Block verification's own parts: the law of the last success, path weights, rows of different length."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.types import DraftTree
from specdec.verify import BlockVerification, Rejection, exact
from specdec.verify.block import longest, path_weights
from tests.verify.laws import CLOSE, deterministic, first_failure, seeded


def by_coins(passes: list[float], *, last: bool) -> list[float]:
    """Law of the last index whose coin falls right, or else of the index before the first wrong one; coin by coin."""
    law = [0.0] * len(passes)
    for coins in itertools.product([False, True], repeat=len(passes) - 1):
        chance = 1.0
        for coin, share in zip(coins, passes[1:], strict=True):
            chance *= share if coin else 1.0 - share
        right = [0, *(index for index, coin in enumerate(coins, 1) if coin)]
        law[right[-1] if last else len(list(itertools.takewhile(bool, coins)))] += chance
    return law


@given(passes=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), max_size=5).map(lambda row: [1.0, *row]))
def test_the_longest_prefix_that_passes(passes):
    tensor = torch.tensor([passes], dtype=torch.float64)
    assert longest(tensor)[0].tolist() == pytest.approx(by_coins(passes, last=True), abs=CLOSE)
    assert first_failure(longest, tensor)[0].tolist() == pytest.approx(by_coins(passes, last=False), abs=CLOSE)


def test_weights_are_cut_at_one_and_make_up_for_losses_before():
    target = torch.tensor([[0.5, 0.2, 0.4, 0.0]])
    draft = torch.tensor([[0.25, 0.8, 0.2, 0.5]])
    assert path_weights(target, draft).tolist() == [[1.0, 1.0, 0.25, 0.5, 0.0]]


def test_rows_of_different_length_keep_to_their_own():
    """Each row of a ragged batch commits what it commits alone."""
    tokens, parents = [[0, 1, 2], [0, 2], [0]], [[-1, 0, 1], [-1, 0], [-1]]
    together = deterministic(tokens, parents)
    for row in range(3):
        alone = deterministic(tokens[row : row + 1], parents[row : row + 1])
        here = exact.committed(BlockVerification(), alone, exact.laws_at(alone, seeded(0)))
        one = DraftTree(*(getattr(together, name)[[row]] for name in ("tokens", "parents", "num_nodes", "scores")))
        there = exact.committed(BlockVerification(), one, exact.laws_at(one, seeded(0)))
        assert here == pytest.approx(there, abs=CLOSE)


def test_more_tokens_than_token_by_token_on_the_papers_example():
    """Laws (1/3, 2/3) and (2/3, 1/3), two drafts: 11/9 accepted tokens instead of 10/9."""
    target = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    tree, weights = exact.draws(lambda _: target.flip(0), branches=(1, 1))
    probs = exact.laws_at(tree, lambda _: target)
    for rule, accepted in ((BlockVerification(), 11 / 9), (Rejection(), 10 / 9)):
        outcome = exact.committed(rule, tree, probs, weights)
        assert exact.mean_accepted(outcome) == pytest.approx(accepted, abs=CLOSE)
