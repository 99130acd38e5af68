"""What the values that pass between the parts compute themselves."""

import pytest
import torch

from specdec.types import Candidates, DraftTree, Frontier, StageTimes, TargetLaw


def test_padding_lies_behind_the_nodes_of_each_row():
    tree = DraftTree(
        tokens=torch.tensor([[4, 5, 6], [7, 7, 7]]),
        parents=torch.tensor([[-1, 0, 1], [-1, -1, -1]]),
        num_nodes=torch.tensor([3, 1]),
        scores=torch.zeros(2, 3),
    )
    assert tree.width == 3
    assert tree.valid.tolist() == [[True, True, True], [True, False, False]]


def test_an_empty_round_holds_each_root():
    tree = DraftTree.from_root(torch.tensor([4, 7]))
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist()) == ([[4], [7]], [[-1], [-1]], [1, 1])
    frontier = Frontier.from_root(torch.tensor([4, 7]), valid=torch.tensor([True, False]))
    assert (frontier.tokens.tolist(), frontier.parents.tolist(), frontier.depth) == ([[4], [7]], [[-1], [-1]], 0)
    assert frontier.valid.tolist() == [[True], [False]]


def candidates(**changes: torch.Tensor) -> Candidates:
    tokens = torch.tensor([[[3, 1], [0, 0]]])
    log_probs = torch.tensor([[[0.6, 0.2], [0.0, 0.0]]], dtype=torch.float64).log()
    return Candidates(**{"tokens": tokens, "log_probs": log_probs, **changes})


def test_proposals_are_normalised_over_themselves_and_silence_is_no_law():
    law = candidates().law(4)
    torch.testing.assert_close(law, torch.tensor([[[0.0, 0.25, 0.0, 0.75], [0.0] * 4]], dtype=torch.float64))


def test_a_whole_law_is_taken_as_it_is():
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]]])
    assert candidates(probs=probs).law(4) is probs


def test_greedy_takes_the_first_of_equal_scores():
    law = TargetLaw(scores=torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), greedy=True)
    assert law.draw().tolist() == [1, 0]
    assert law.probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_a_draw_is_the_multinomial_draw_of_generate():
    scores = torch.tensor([[0.3, 0.1, -0.7], [1.5, -torch.inf, 0.2]])
    law = TargetLaw(scores=scores, greedy=False)
    for seed in range(20):
        expected = torch.multinomial(scores.softmax(-1), 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)
        assert torch.equal(law.draw(torch.Generator().manual_seed(seed)), expected)


def test_a_round_takes_as_long_as_its_stages():
    assert StageTimes(draft=1.0, grow=2.0, verify=4.0, accept=8.0, commit=16.0).total == 31.0


def test_values_cannot_be_changed():
    with pytest.raises(AttributeError):
        DraftTree.from_root(torch.tensor([4])).tokens = torch.tensor([[5]])
