"""Target-only is plain sampling: the same draws from the same generator, in the same order."""

import pytest
import torch
from torch import Tensor

from specdec.types import DraftTree, TargetLaw
from specdec.verify import TargetOnly, TreeRejection
from tests.verify.laws import deterministic

VOCAB = 6
SCORES = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
FULL = [[0, *range(VOCAB), *list(range(VOCAB)) * VOCAB]]
PARENTS = [[-1, *[0] * VOCAB, *[parent for parent in range(1, VOCAB + 1) for _ in range(VOCAB)]]]


def walked(tree: DraftTree, rows: int, *, greedy: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three steps for all rows; the second value says which tokens a child carried."""
    node, tokens, children = torch.zeros(rows, dtype=torch.int64), [], []
    for _ in range(3):
        last = tree.tokens.gather(1, node[:, None]).squeeze(1)
        token, child = TargetOnly().step(tree, node, TargetLaw(SCORES[last], greedy), generator=generator)
        tokens.append(token)
        children.append(child)
        node = child.clamp_min(0)
    return torch.stack(tokens, 1), torch.stack(children, 1)


@pytest.mark.parametrize("greedy", [False, True])
def test_seed_for_seed_plain_sampling(greedy):
    """A tree that holds every path: drafts are always right, and the text is that of plain sampling."""
    rows = 50
    tree = deterministic(FULL * rows, PARENTS * rows)
    ours, children = walked(tree, rows, greedy=greedy, generator=torch.Generator().manual_seed(3))
    assert (children[:, :2] > 0).all()
    generator, last, plain = torch.Generator().manual_seed(3), torch.zeros(rows, dtype=torch.int64), []
    for _ in range(3):
        probs = SCORES[last].softmax(-1)
        last = probs.argmax(-1) if greedy else torch.multinomial(probs, 1, generator=generator).squeeze(1)
        plain.append(last)
    assert torch.equal(ours, torch.stack(plain, 1))


@pytest.mark.parametrize("parents", [[-1, 0, 0, 0], [-1, 0, 1, 2], [-1, -1, -1, -1]])
def test_a_step_takes_one_draw_whatever_the_tree(parents):
    count = 4 if parents[1] == 0 else 1
    tree = deterministic([[0, 1, 2, 3][:count]] * 3, [parents[:count]] * 3)
    law = TargetLaw(SCORES[:3], greedy=False)
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    token, child = TargetOnly().step(tree, torch.zeros(3, dtype=torch.int64), law, generator=one)
    assert torch.equal(token, law.draw(two))
    assert torch.equal(one.get_state(), two.get_state())
    carried = tree.tokens.gather(1, child.clamp_min(0)[:, None]).squeeze(1)
    assert torch.equal(torch.where(child > 0, carried, token), token)


def test_recursive_rejection_is_not_seed_for_seed():
    """The wrong variant of the test above: another lossless rule takes other draws."""
    tree = deterministic([[0, 1, 2, 3]], [[-1, 0, 0, 0]])
    law = TargetLaw(SCORES[:1], greedy=False)
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    TreeRejection().step(tree, torch.zeros(1, dtype=torch.int64), law, generator=one)
    law.draw(two)
    assert not torch.equal(one.get_state(), two.get_state())


def test_a_greedy_step_needs_no_generator_state():
    tree = deterministic([[0, 1]], [[-1, 0]])
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    TargetOnly().step(tree, torch.zeros(1, dtype=torch.int64), TargetLaw(SCORES[:1], greedy=True), generator=generator)
    assert torch.equal(generator.get_state(), before)
