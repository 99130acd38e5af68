"""The field log's table of rules on `pq4`, right and wrong, number for number; and wrong rules for paths."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.protocols import TreeBuilder
from specdec.trees import topology
from specdec.types import DraftTree, TargetLaw, Verdict
from specdec.verify import (
    BlockVerification,
    Rejection,
    StepRule,
    TargetOnly,
    Traversal,
    TreeRejection,
    block,
    exact,
    rules,
)
from tests.verify.laws import (
    CLOSE,
    DRAFT,
    TARGET,
    always,
    deterministic,
    divides_mass,
    first_failure,
    first_token,
    keeps_draft,
    keeps_target,
    keeps_weight,
    seeded,
    wrong,
)

RIGHT = pytest.approx(TARGET.tolist(), abs=CLOSE)


def shown(law: list[float]) -> Any:
    """Equal in the three places that the field log prints."""
    return pytest.approx(law, abs=0.000501)


FAVOURITE = int(DRAFT.argmax())


def one_draft(token: int, draft_probs: Tensor | None = None) -> DraftTree:
    tree = deterministic([[0, token]], [[-1, 0]])
    return dataclasses.replace(tree, draft_probs=None if draft_probs is None else draft_probs.expand(1, 2, -1))


def accepted(verifier: Any, tree: DraftTree, weights: Tensor) -> float:
    return exact.mean_accepted(exact.committed(verifier, tree, exact.laws_at(tree, always(TARGET)), weights))


# ------------------------------------------------------------------------------------------------- one drafted token


def test_drawn_from_the_draft_law():
    tree, weights = exact.draws(always(DRAFT), branches=(1,))
    assert first_token(Rejection(), tree, always(TARGET), weights) == RIGHT
    assert accepted(Rejection(), tree, weights) == pytest.approx(0.55, abs=CLOSE)


def test_mutant_favourite_drafted_but_judged_as_drawn():
    assert first_token(Rejection(), one_draft(FAVOURITE, DRAFT), always(TARGET)) == shown([0.5, 0.25, 0.0, 0.25])


def test_favourite_drafted_and_judged_as_certain():
    certain = torch.nn.functional.one_hot(torch.tensor(FAVOURITE), 4).double()
    assert first_token(Rejection(), one_draft(FAVOURITE, certain), always(TARGET)) == RIGHT
    assert first_token(Rejection(), one_draft(FAVOURITE), always(TARGET)) == RIGHT


def test_target_only_on_a_drawn_token():
    tree, weights = exact.draws(always(DRAFT), branches=(1,))
    assert first_token(TargetOnly(), tree, always(TARGET), weights) == RIGHT
    assert accepted(TargetOnly(), tree, weights) == pytest.approx(0.195, abs=CLOSE)


class DrawsAgain(StepRule):
    """Target-only, but a draw that no child carries is thrown away for a new one."""

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        token = law.draw(generator)
        child = topology.child_with_token(tree, node, token)
        return torch.where(child >= 0, token, law.draw(generator)), child


def test_mutant_draws_again_on_a_mismatch():
    tree, weights = exact.draws(always(DRAFT), branches=(1,))
    assert first_token(DrawsAgain(), tree, always(TARGET), weights) == shown([0.362, 0.352, 0.166, 0.121])


def test_mutant_samples_the_target_after_a_rejection():
    tree, weights = exact.draws(always(DRAFT), branches=(1,))
    with wrong(rules, "reject", keeps_target):
        assert first_token(Rejection(), tree, always(TARGET), weights) == shown([0.28, 0.358, 0.218, 0.145])


def sharpened(law: Tensor) -> Tensor:
    """The law at temperature 0.5."""
    return law**2 / (law**2).sum()


def test_mutant_ratio_at_another_temperature():
    tree, weights = exact.draws(always(sharpened(DRAFT)), branches=(1,))
    assert first_token(Rejection(), tree, always(sharpened(TARGET)), weights) == shown([0.508, 0.389, 0.071, 0.032])
    unsharpened = dataclasses.replace(tree, draft_probs=DRAFT.expand(len(weights), 2, -1))
    assert first_token(Rejection(), unsharpened, always(TARGET), weights) == shown([0.4, 0.317, 0.15, 0.133])


def test_mutant_ratio_on_the_law_before_top_k():
    tree, weights = exact.draws(always(DRAFT), branches=(1,))
    top = torch.where(TARGET >= 0.35, TARGET, 0.0) / 0.75
    assert first_token(Rejection(), tree, always(top), weights) == shown([0.533, 0.467, 0.0, 0.0])
    leaked = first_token(Rejection(), tree, always(TARGET), weights)[2:]
    assert sum(leaked) == pytest.approx(0.25)


# --------------------------------------------------------------------------------------------------------- siblings


def test_siblings_by_rank_are_tried_in_order():
    tree = deterministic([[0, 3, 2]], [[-1, 0, 0]])
    assert first_token(TreeRejection(), tree, always(TARGET)) == RIGHT


def test_mutant_siblings_by_rank_without_zeroing():
    tree = deterministic([[0, 3, 2]], [[-1, 0, 0]])
    with wrong(rules, "reject", keeps_target):
        assert first_token(TreeRejection(), tree, always(TARGET)) == shown([0.306, 0.268, 0.25, 0.177])


def test_siblings_drawn_without_replacement():
    tree, weights = exact.draws(always(DRAFT), branches=(2,))
    assert first_token(TreeRejection(), tree, always(TARGET), weights) == RIGHT
    assert first_token(Traversal(), tree, always(TARGET), weights) == RIGHT


@pytest.mark.parametrize("rule", [TreeRejection(), Traversal()])
def test_mutant_second_sibling_judged_by_the_first_ones_law(rule):
    tree, weights = exact.draws(always(DRAFT), branches=(2,))
    with wrong(rules, "reject", keeps_draft):
        assert first_token(rule, tree, always(TARGET), weights) == shown([0.362, 0.388, 0.15, 0.1])


class OneTruthPerPath:
    """Draws the target along each path by itself and keeps the longest match, the first among equals."""

    lossless = True
    stepwise = False

    def check(self, builder: TreeBuilder) -> None:
        pass

    def __call__(self, tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None) -> Verdict:
        best: list[int] = []
        bonus = None
        for leaf in (topology.num_children(tree.parents)[0] == 0).nonzero().flatten():
            matched, node = [], 0
            for child in [*topology.path_to(tree, leaf[None])[0].tolist(), -1]:
                token = torch.multinomial(target_probs[:, node], 1, generator=generator)[0]
                if child < 0 or token[0] != tree.tokens[0, child]:
                    break
                matched.append(child)
                node = child
            if bonus is None or len(matched) > len(best):
                best, bonus = matched, token
        assert bonus is not None
        return Verdict(path=torch.tensor([best or [-1]]), num_accepted=torch.tensor([len(best)]), bonus=bonus)


def test_mutant_one_truth_per_path():
    a, b, c, d, e, f, end = range(7)
    tree = deterministic([[end, a, b, c, d, e, f]], [[-1, 0, 1, 1, 1, 0, 5]])
    laws = torch.zeros(2, 7, dtype=torch.float64)
    laws[0, [a, e]] = 0.5
    laws[1, end] = 1.0

    def target(path: tuple[int, ...]) -> Tensor:
        return laws[min(len(path), 1)]

    assert first_token(OneTruthPerPath(), tree, target)[a] == 0.875
    assert first_token(TargetOnly(), tree, target)[a] == 0.5


# ------------------------------------------------------------------------------------------------------- path rules


def errors(rule: Any, branches: tuple[int, ...], seeds: range = range(3)) -> list[float]:
    """Error in the law of the next tokens, on some fixed laws."""
    found = []
    for seed in seeds:
        tree, weights = exact.draws(seeded(seed), branches=branches)
        found.append(exact.lossless_error(rule, tree, seeded(seed + 100), weights, length=len(branches) + 1))
    return found


def test_mutant_block_stops_at_the_first_failure():
    assert max(errors(BlockVerification(), (1, 1))) < CLOSE
    with wrong(block, "longest", first_failure):
        assert max(errors(BlockVerification(), (1, 1))) > 1e-3


@pytest.mark.parametrize("mutant", [divides_mass, keeps_weight, keeps_target, keeps_draft])
def test_mutants_of_traversal(mutant):
    assert max(errors(Traversal(), (2, 1))) < CLOSE
    with wrong(rules, "reject", mutant):
        assert max(errors(Traversal(), (2, 1))) > 1e-3


def pruned(tree: DraftTree, floor: float) -> DraftTree:
    """Drops drawn children whose own draft probability is low, as a reranked tree would."""
    assert tree.draft_probs is not None
    parents = tree.parents.clamp_min(0)
    laws = tree.draft_probs.gather(1, parents[:, :, None].expand(-1, -1, tree.draft_probs.shape[-1]))
    return topology.prune(tree, laws.gather(-1, tree.tokens[:, :, None]).squeeze(-1) >= floor)


@pytest.mark.parametrize(
    ("rule", "branches"), [(TreeRejection(), (2, 1)), (Traversal(), (2, 1)), (Rejection(), (1, 1))]
)
def test_mutant_drawn_children_pruned_by_their_probability(rule, branches):
    draft, target = seeded(3), seeded(103)
    tree, weights = exact.draws(draft, branches=branches)
    fewer = pruned(tree, floor=0.3)
    assert exact.lossless_error(rule, fewer, target, weights, length=3) > 1e-3
    assert exact.lossless_error(TargetOnly(), fewer, target, weights, length=3) < CLOSE
