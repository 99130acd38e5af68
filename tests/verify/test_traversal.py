"""Traversal's own parts: it ends whatever rounding does, and visits leaves in the order of the draws."""

import pytest
import torch

from specdec.testing import TableDrafter
from specdec.trees import Sampled, topology
from specdec.verify import Traversal, exact
from tests.verify.laws import CLOSE, deterministic

VOCAB = 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 3.0])
def test_it_ends_on_deep_and_wide_trees(dtype, noise):
    """Target and draft law almost equal: residuals are made of rounding errors."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(VOCAB, VOCAB, generator=generator, dtype=dtype) * 3
    builder = Sampled((3, 2, 2, 1, 1))
    rows = 300
    root = torch.zeros(rows, dtype=torch.int64)
    tree = builder.grow(
        TableDrafter(scores.softmax(-1)),
        root,
        torch.full((rows,), 9),
        builder.nodes,
        vocab_size=VOCAB,
        generator=generator,
    )
    target = (scores + noise * torch.randn(VOCAB, VOCAB, generator=generator, dtype=dtype)).softmax(-1)
    verdict = Traversal()(tree, target[tree.tokens], generator=generator)
    depths = topology.depths(tree.parents)
    ends = verdict.path.gather(1, (verdict.num_accepted - 1).clamp_min(0)[:, None]).clamp_min(0)
    assert torch.equal(depths.gather(1, ends)[:, 0], verdict.num_accepted)
    if noise < 1e-3:
        assert (verdict.num_accepted == 5).all()


def test_leaves_are_visited_in_the_order_of_the_draws():
    """All leaves have weight one: the first is kept, though it has neither the smallest nor the largest index."""
    tree = deterministic([[0, 1, 2, 0, 1]], [[-1, 0, 0, 2, 1]])
    sure = torch.eye(3, dtype=torch.float64)
    probs = torch.stack([sure[1], sure[1], sure[0], sure[0], sure[2]])[None]
    outcome = exact.committed(Traversal(), tree, probs)
    assert outcome[(1, 1, 2)] == pytest.approx(1.0, abs=CLOSE)
    assert Traversal()(tree, probs).path.tolist() == [[1, 4]]
