"""The enumeration itself: it must be complete, must agree with chance, and must refuse what it cannot follow."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.types import DraftTree, TargetLaw, Verdict
from specdec.verify import StepRule, TargetOnly, Traversal, TreeRejection, exact
from tests.verify.laws import CLOSE, always, deterministic, seeded, tables


@given(draft=tables())
def test_draws_are_all_trees(draft):
    tree, weights = exact.draws(draft, branches=(2, 1))
    assert float(weights.sum()) == pytest.approx(1.0, abs=CLOSE)
    rows = {tuple(zip(*row, strict=True)) for row in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)}
    assert len(rows) == len(weights)
    assert (weights > 0).all()


def test_draws_follow_the_law_without_replacement():
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    tree, weights = exact.draws(always(law), branches=(2,))
    chance = {tuple(row[1:]): float(weight) for row, weight in zip(tree.tokens.tolist(), weights, strict=True)}
    assert chance[(0, 2)] == pytest.approx(0.5 * 0.2 / 0.5)
    assert chance[(2, 1)] == pytest.approx(0.2 * 0.3 / 0.8)
    torch.testing.assert_close(tree.scores[:, 1].exp(), law[tree.tokens[:, 1]])


def test_a_law_that_is_used_up_gives_fewer_children():
    law = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    tree, weights = exact.draws(always(law), branches=(3, 1), root=2)
    assert tree.tokens.tolist() == [[2, 1, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert weights.tolist() == [1.0]


def test_laws_at_nodes_of_their_own_path():
    tree = deterministic([[0, 1, 2], [0, 2]], [[-1, 0, 1], [-1, 0]])
    law = seeded(0)
    laws = exact.laws_at(tree, law)
    assert torch.equal(laws[0, 2], law((1, 2)))
    assert torch.equal(laws[1, 1], law((2,)))
    assert laws[1, 2].isnan().all()


@pytest.mark.parametrize("rule", [TargetOnly(), TreeRejection(), Traversal()], ids=lambda rule: type(rule).__name__)
def test_enumeration_agrees_with_chance(rule):
    tree = deterministic([[0, 1, 2, 0]], [[-1, 0, 0, 2]])
    probs = exact.laws_at(tree, seeded(0))
    outcome = exact.committed(rule, tree, probs)
    assert sum(outcome.values()) == pytest.approx(1.0, abs=CLOSE)
    count = 20_000
    many = DraftTree(
        *(value.expand(count, *value.shape[1:]) for value in (tree.tokens, tree.parents)),
        tree.num_nodes.expand(count),
        tree.scores.expand(count, -1),
    )
    verdict = rule(many, probs.expand(count, -1, -1), generator=torch.Generator().manual_seed(0))
    for accepted in range(3):
        expected = sum(chance for path, chance in outcome.items() if len(path) == accepted + 1)
        share = float((verdict.num_accepted == accepted).double().mean())
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count) + 1e-9


def test_rows_count_by_their_weight_alone():
    tree, weights = exact.draws(seeded(1), branches=(2,))
    probs = exact.laws_at(tree, seeded(0))
    parts = [
        exact.committed(TreeRejection(), exact._take(tree, [row]), probs[[row]], weights[[row]])
        for row in range(len(weights))
    ]
    whole = exact.committed(TreeRejection(), tree, probs, weights)
    for path, chance in whole.items():
        assert sum(part.get(path, 0.0) for part in parts) == pytest.approx(chance, abs=CLOSE)


def test_plain_is_the_product_of_the_laws():
    law = seeded(0)
    joint = exact.plain(law, 2)
    assert float(joint.sum()) == pytest.approx(1.0, abs=CLOSE)
    assert float(joint[1, 2]) == pytest.approx(float(law(())[1] * law((1,))[2]), abs=CLOSE)


def test_rounds_longer_than_asked_are_cut():
    law = seeded(0)
    torch.testing.assert_close(exact.joint({(1, 2, 0): 1.0}, law, 1), torch.tensor([0.0, 1.0, 0.0]).double())


class Chancy(StepRule):
    """Takes chance from where it is told to."""

    def __init__(self, draw) -> None:
        self.draw = draw

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        self.draw(law.probs)
        return law.draw(generator), torch.full_like(node, -1)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda _: torch.rand(3), "rand cannot be enumerated"),
        (lambda _: torch.empty(3).exponential_(), "exponential_ cannot be enumerated"),
        (lambda probs: probs.multinomial(1), "multinomial cannot be enumerated"),
        (lambda probs: torch.bernoulli(probs), "one coin per row"),
        (lambda probs: torch.multinomial(probs, 2), r"one draw per row can be enumerated, got 2"),
        (lambda probs: torch.multinomial(probs[0], num_samples=1), r"one draw per row .* weights \[3\]"),
        (lambda probs: torch.multinomial(probs.expand(2, -1), 1), "one row per batch row, 1, got 2"),
    ],
)
def test_other_chance_is_refused(draw, message):
    tree = deterministic([[0, 1]], [[-1, 0]])
    with pytest.raises(UnsupportedError, match=message):
        exact.committed(Chancy(draw), tree, exact.laws_at(tree, seeded(0)))


def test_weights_are_asked_for():
    tree = deterministic([[0, 1]] * 2, [[-1, 0]] * 2)
    with pytest.raises(ShapeError, match="how likely each of the 2 rows"):
        exact.committed(TargetOnly(), tree, exact.laws_at(tree, seeded(0)))


class Favourite:
    """No chance at all: always commits token 0."""

    lossless = True
    stepwise = False

    def check(self, builder) -> None:
        pass

    def __call__(self, tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None) -> Verdict:
        rows = len(tree.tokens)
        return Verdict(
            torch.full((rows, 1), -1), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        )


def test_the_error_is_the_error():
    law = seeded(0)
    tree = deterministic([[0, 1]], [[-1, 0]])
    expected = max(1.0 - float(law(())[0]), float(law(())[1:].max()))
    assert exact.lossless_error(Favourite(), tree, law, length=1) == pytest.approx(expected)
