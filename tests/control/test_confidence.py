"""Confidence scheduling: what is admitted, by definition; temperatures that undo a known miscalibration."""

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import SpeculativeGenerator, control, drafters, evaluate, trees
from specdec.control import ConfidenceSchedule, SequentialTemperatures, VerifyCosts
from specdec.control.confidence import admitted, told
from specdec.control.temperatures import calibration_error, claims_of, survivals
from specdec.errors import ShapeError, UnsupportedError
from specdec.testing import table_model
from specdec.trees import topology
from specdec.types import DraftTree, Frontier
from tests import helpers
from tests.drafters.block import checkpoints as block

COSTS = VerifyCosts.from_measurements({1: 1.0, 2: 1.1, 4: 1.6, 9: 2.0})


def definition(survival: list[list[float]], costs: VerifyCosts, *, stop: bool = True) -> set[tuple[int, int]]:
    """Algorithm 1, word by word; without `stop` the best prefix of all, which looks ahead."""
    nodes = sorted(
        ((value, row, node) for row, values in enumerate(survival) for node, value in enumerate(values) if node),
        key=lambda item: (-item[0], item[1], item[2]),
    )
    taken: set[tuple[int, int]] = set()
    best, rate = set(taken), len(survival) / costs.relative(1)
    for value, row, node in nodes:
        taken = taken | {(row, node)}
        width = 1 + max(sum(each == other for each, _ in taken) for other in range(len(survival)))
        expected = len(survival) + sum(survival[r][n] for r, n in taken)
        if value > 0 and expected / costs.relative(width) > rate:
            best, rate = set(taken), expected / costs.relative(width)
        elif stop:
            break
    return best


@settings(max_examples=80)
@given(seed=st.integers(0, 2**31), batch=st.integers(1, 3), nodes=st.integers(1, 8))
def test_what_is_admitted(seed: int, batch: int, nodes: int) -> None:
    source = torch.Generator().manual_seed(seed)
    survival = torch.rand(batch, nodes, generator=source, dtype=torch.float64)
    survival[torch.rand(survival.shape, generator=source) < 0.2] = 0.0
    survival[:, 0] = 1.0
    found = admitted(survival, COSTS)
    assert bool(found[:, 0].all())
    kept = {(row, node) for row, node in found.nonzero().tolist() if node}
    assert kept == definition(survival.tolist(), COSTS)


def test_the_first_that_does_not_pay_ends_it() -> None:
    """A cost that hardly rises beyond a step would pay for many nodes at once; looking ahead would take them."""
    costs = VerifyCosts.from_measurements({1: 1.0, 2: 2.0, 9: 2.05})
    survival = [[1.0, 0.6, 0.55, 0.5, 0.45, 0.4]]
    assert definition(survival, costs) == set()
    assert len(definition(survival, costs, stop=False)) == 5
    assert int(admitted(torch.tensor(survival), costs).sum()) == 1


def scores_of(claims: Tensor) -> Tensor:
    """Path scores of chains with these claims."""
    return torch.nn.functional.pad(claims.log().cumsum(-1), (1, 0))


def test_survival_along_paths() -> None:
    tree = DraftTree(
        tokens=torch.tensor([[1, 2, 3, 4, 5, 1]]),
        parents=torch.tensor([[-1, 0, 0, 1, 3, -1]]),
        num_nodes=torch.tensor([5]),
        scores=torch.tensor([[0.0, math.log(0.8), math.log(0.2), math.log(0.4), math.log(0.3), -math.inf]]),
    )
    plain = survivals(claims_of(tree), tree, (1.0,))
    torch.testing.assert_close(plain, torch.tensor([[1.0, 0.8, 0.2, 0.4, 0.3, 0.0]]))
    scaled = SequentialTemperatures((1.0, 2.0))
    expected = 0.8 * scaled.apply(torch.tensor([0.5]), torch.tensor([2]))
    torch.testing.assert_close(survivals(claims_of(tree), tree, scaled.values)[0, 3], expected[0])


@pytest.mark.parametrize("true", [(2.0, 1.0, 3.0), (0.5, 1.5, 1.0)])
def test_a_known_miscalibration_is_found(true: tuple[float, ...]) -> None:
    """Claims are made from the true probabilities by these temperatures; the fit goes from the root on."""
    source = torch.Generator().manual_seed(0)
    real = torch.rand(40_000, 3, generator=source).clamp(0.02, 0.98)
    claims = (real.logit() * torch.tensor(true)).sigmoid()
    alive = (torch.rand(real.shape, generator=source) < real).long().cumprod(-1)
    drafted = torch.full((len(real),), 3)
    fitted = SequentialTemperatures.fit(claims, alive.sum(-1), drafted=drafted)
    for found, wanted in zip(fitted.values, true, strict=True):
        assert abs(math.log(found / wanted)) < 0.2
    depths = torch.arange(1, 4).expand_as(claims)
    before, after = (
        calibration_error(each.double().prod(-1), alive[:, 2].double())
        for each in (claims, fitted.apply(claims, depths))
    )
    assert after < 0.3 * before


def test_claims_behind_the_first_rejection_do_not_count() -> None:
    """A depth is judged by those whose path was drafted so far; a chain that ended before says nothing."""
    claims = torch.tensor([[0.6, 0.99], [0.6, 0.99], [0.6, 0.01], [0.6, 0.01]])
    fitted = SequentialTemperatures.fit(claims, torch.tensor([2, 0, 1, 0]), drafted=torch.tensor([2, 1, 1, 1]))
    assert len(fitted.values) == 2
    with pytest.raises(ShapeError, match="none with more accepted than drafted"):
        SequentialTemperatures.fit(claims, torch.tensor([2, 0, 2, 0]), drafted=torch.tensor([2, 1, 1, 1]))


def test_from_recorded_rounds_to_a_schedule() -> None:
    """A recording is replayed as chains, temperatures are fitted to them, and the schedule serves a request."""
    laws = torch.softmax(2 * torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)), -1)
    target, model = table_model(laws[0]), table_model(0.6 * laws[0] + 0.4 * laws[1])
    chains = trees.Chain(5)
    recorder = evaluate.Recorder(drafters.ModelDrafter(model), chains)
    request = {"inputs": torch.tensor([[1, 2, 3], [4, 5, 6]]), "max_new_tokens": 60}
    generator = SpeculativeGenerator(target, drafter=recorder, tree=recorder)
    generator.generate(**request, do_sample=True, generator=torch.Generator().manual_seed(0))
    fitted = SequentialTemperatures.from_rounds(evaluate.replay(recorder.recording, chains).rounds)
    assert 1 < len(fitted.values) <= 5
    schedule = ConfidenceSchedule(VerifyCosts.from_measurements({1: 1.0, 8: 2.2}), fitted)
    plain = type(target).generate(target, **request, do_sample=False)
    for tree in (chains, trees.BestFirst(nodes=10)):
        served, full = (
            SpeculativeGenerator(target, drafters.ModelDrafter(model), tree, controller=controller)
            for controller in (schedule, None)
        )
        for each in (served, full):
            assert torch.equal(each.generate(**request, do_sample=False), plain)
        assert 0 < served.stats.drafted < full.stats.drafted
        assert served.stats.accepted > 0
    wide = evaluate.replay(recorder.recording, chains).rounds[:1]
    branching = DraftTree(
        torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3]), torch.tensor([[0.0, -1.0, -2.0]])
    )
    with pytest.raises(UnsupportedError, match=r"replay the recording with trees\.Chain"):
        SequentialTemperatures.from_rounds([_with(wide[0], branching)])
    with pytest.raises(UnsupportedError, match="nothing was drafted"):
        SequentialTemperatures.from_rounds([])


def _with(round: Any, tree: DraftTree) -> Any:
    return type(round)(**{name: getattr(round, name) for name in round.__slots__} | {"tree": tree})


def test_pruned_trees_are_trees_and_sampled_ones_are_left_alone() -> None:
    tree = DraftTree(
        tokens=torch.tensor([[1, 2, 3, 4, 5]]),
        parents=torch.tensor([[-1, 0, 0, 1, 3]]),
        num_nodes=torch.tensor([5]),
        scores=torch.tensor([[0.0, -0.1, -3.0, -0.3, -5.0]]),
    )
    schedule = ConfidenceSchedule(COSTS)
    schedule.start(nodes=4, sampled=False)
    pruned = schedule.prune(tree)
    topology.check(pruned)
    assert pruned.tokens.tolist() == [[1, 2, 4]]
    schedule.start(nodes=4, sampled=True)
    assert schedule.prune(tree) is tree
    assert schedule.budget() == 4


def test_a_head_is_asked_about_each_node_by_its_parent() -> None:
    """It is told the parent's token and depth, and says the same of all children."""
    tree = DraftTree(
        tokens=torch.tensor([[1, 2, 3, 4, 5], [6, 7, 6, 6, 6]]),
        parents=torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, -1, -1, -1]]),
        num_nodes=torch.tensor([5, 2]),
        scores=torch.zeros(2, 5),
    )

    def head(frontier: Frontier) -> Tensor:
        assert bool((topology.depths(tree.parents)[frontier.valid] == frontier.depth).all())
        return (0.9 - 0.1 * frontier.tokens) / (1 + frontier.depth)

    claims = told(tree, head)
    torch.testing.assert_close(claims[0], torch.tensor([1.0, 0.8, 0.8, 0.7 / 2, 0.5 / 3]))
    torch.testing.assert_close(claims[1, :2], torch.tensor([1.0, 0.3]))
    flat = ConfidenceSchedule(VerifyCosts.from_measurements({1: 1.0}), confidence=head)
    flat.start(nodes=4, sampled=False)
    kept = flat.prune(tree)
    assert torch.equal(kept.tokens, tree.tokens)
    assert torch.equal(kept.num_nodes, tree.num_nodes)
    assert flat.claims is not None
    assert torch.equal(flat.claims, claims)
    assert survivals(claims, tree, (1.0,))[1].tolist() == pytest.approx([1.0, 0.3, 0.0, 0.0, 0.0])


def test_of_drawn_trees_only_chains_with_a_head_are_cut() -> None:
    chain = DraftTree(
        tokens=torch.tensor([[1, 2, 3]]),
        parents=torch.tensor([[-1, 0, 1]]),
        num_nodes=torch.tensor([3]),
        scores=torch.tensor([[0.0, -3.0, -6.0]]),
        draft_probs=torch.full((1, 3, 4), 0.25),
    )
    wide = dataclasses.replace(chain, parents=torch.tensor([[-1, 0, 0]]))
    for head, tree, width in ((None, chain, 3), (unsure, wide, 3), (unsure, chain, 2)):
        schedule = ConfidenceSchedule(COSTS, confidence=head)
        schedule.start(nodes=2, sampled=True)
        pruned = schedule.prune(tree)
        assert pruned.width == width
        assert (pruned is tree) == (width == 3)
        assert (schedule.claims is None) == (width == 3)


def unsure(frontier: Frontier) -> Tensor:
    """Likely at first, unlikely then."""
    return torch.full(frontier.tokens.shape, (0.9, 0.1)[frontier.depth])


def test_the_head_of_a_block_drafter_serves_a_batch(tmp_path: Path) -> None:
    """The text is the target's; nodes that the head finds unlikely are drafted and not verified."""
    block.write(tmp_path, "dspark_gated")
    target = helpers.model()
    drafter = drafters.from_pretrained(tmp_path, target)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for tree in (trees.BestFirst(nodes=10), trees.Chain(5)):
        schedule = ConfidenceSchedule(VerifyCosts.from_measurements({1: 1.0, 9: 1.9}), confidence=drafter.confidence)
        served, full = (
            SpeculativeGenerator(target, drafter, tree, controller=controller) for controller in (schedule, None)
        )
        for each in (served, full):
            assert each.generate(**request).tolist() == helpers.text("ragged", 12).tolist()
        assert 0 < served.stats.drafted < full.stats.drafted


@pytest.mark.parametrize("values", [(), (0.0,), (1.0, -1.0), (math.inf,)])
def test_temperatures_are_above_zero(values: tuple[float, ...]) -> None:
    with pytest.raises(UnsupportedError, match="temperatures must be above 0"):
        SequentialTemperatures(values)


def test_wrong_parts_are_told() -> None:
    made = inspect.unwrap(ConfidenceSchedule.__init__)
    for arguments, message in (((0.4,), "costs= takes VerifyCosts, got float"), ((COSTS, 1.5), "temperatures= takes")):
        with pytest.raises(ValueError, match=message):
            made(ConfidenceSchedule(COSTS), *arguments)
    with pytest.raises(ValueError, match=r"confidence= takes a function such as .*, got float"):
        made(ConfidenceSchedule(COSTS), COSTS, confidence=0.5)
    assert "ConfidenceSchedule(VerifyCosts" in repr(control.ConfidenceSchedule(COSTS))
