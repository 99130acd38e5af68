"""Goodput control against every fixed length, in simulated time (field-log J1, J2, J4); no real clock is read."""

import copy
import dataclasses
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.control import Always, Goodput, VerifyCosts
from specdec.control.calibration import Calibration
from specdec.control.plan import Outlook
from specdec.control.purse import Purse
from specdec.protocols import Controller
from specdec.types import DraftTree, Round
from tests.control.simulation import CPU, GPU, LENGTHS, Simulation, World, copied, curve, fixed, steady
from tests.trees.random_trees import lineage, trees

TOKENS = 600
SEEDS = {1: 3, 8: 1, 32: 1}  # requests per batch size: with a single row more is left to luck


def step_by_step(cost):
    return lambda nodes: cost * nodes


def at_once(cost):
    return lambda _: cost


def widening(slope):
    return lambda width: 1.0 + slope * (width - 1)


def compare(worlds, *, make=Goodput, tokens=TOKENS, sampled=False):
    """Speed of a controller relative to the best fixed length and to plain decoding, over all worlds together."""
    spent = sum(Simulation(make(), world, sampled=sampled, seed=seed).run(tokens) for seed, world in enumerate(worlds))
    lengths = {nodes: sum(fixed(world, nodes, tokens) for world in worlds) for nodes in LENGTHS}
    return min(lengths.values()) / spent, lengths[0] / spent


def worlds(acceptance, *, batch, draft, verify, said=None, tokens=TOKENS, seeds=None, **changes):
    return [
        World(
            **steady(acceptance, rows=batch, tokens=tokens, seed=seed, said=said), draft=draft, verify=verify, **changes
        )
        for seed in range(seeds or SEEDS[batch])
    ]


def j1_worlds(acceptance, batch, cost, **changes):
    """A wider pass costs more the more rows there are; drafting costs this share of a plain round per token."""
    return worlds(acceptance, batch=batch, draft=step_by_step(cost), verify=widening(0.01 * batch), **changes)


J1 = [(acceptance, batch, cost) for batch in (1, 8, 32) for acceptance in (0.1, 0.5, 0.9) for cost in (0.05, 0.2, 0.5)]


@pytest.mark.parametrize(("acceptance", "batch", "cost"), J1)
def test_as_fast_as_the_best_fixed_length(acceptance, batch, cost):
    best, plain = compare(j1_worlds(acceptance, batch, cost))
    assert best >= 0.97
    assert plain >= 0.97


@pytest.mark.parametrize(
    ("acceptance", "batch", "cost"), [(0.1, 8, 0.2), (0.5, 8, 0.05), (0.9, 32, 0.05), (0.9, 8, 0.2)]
)
def test_sampled_trees_have_their_budget_chosen_as_well(acceptance, batch, cost):
    best, plain = compare(j1_worlds(acceptance, batch, cost), sampled=True)
    assert best >= 0.97
    assert plain >= 0.97


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_a_drafter_that_drafts_at_once(acceptance):
    best, plain = compare(worlds(acceptance, batch=8, draft=at_once(0.2), verify=widening(0.08)))
    assert best >= 0.97
    assert plain >= 0.97


@pytest.mark.parametrize(("acceptance", "said"), [(0.1, 0.9), (0.5, 0.95), (0.5, 0.1), (0.9, 0.3)])
def test_what_the_drafter_claims_is_checked(acceptance, said):
    best, plain = compare(j1_worlds(acceptance, 8, 0.2, said=said))
    assert best >= 0.97
    assert plain >= 0.97


@pytest.mark.parametrize(("acceptance", "batch", "cost"), [(0.1, 8, 0.05), (0.5, 1, 0.05), (0.9, 8, 0.2)])
def test_noisy_times_and_slow_starts(acceptance, batch, cost):
    best, plain = compare(j1_worlds(acceptance, batch, cost, noise=0.05, startup=3.0))
    assert best >= 0.94  # the first times say little, and a drafter that is given up is not soon tried again
    assert plain >= 0.97


@pytest.mark.parametrize(("acceptance", "batch"), [(0.1, 1), (0.3, 1), (0.3, 8)])
def test_turns_off_where_width_is_dear(acceptance, batch):
    """A mixture of experts: each further row loads more of them."""
    world = worlds(acceptance, batch=batch, draft=at_once(0.02), verify=widening(0.35), seeds=1)
    simulation = Simulation(Goodput(), world[0])
    assert fixed(world[0], 0, TOKENS) / simulation.run(TOKENS) >= 0.97
    assert sum(width > 1 for width in simulation.widths[300:]) <= 20


class TestLookup:
    """Drafts are free, mostly useless, and now and then a whole chain is right; passes cost what they do on a CPU."""

    @staticmethod
    def speed(share, length, *, said=(0.3, 0.9), tokens=400, costs=CPU, seeds=2):
        return compare(
            [
                World(
                    **copied(share, length, tokens=tokens, seed=seed, said=said),
                    draft=at_once(0.002),
                    verify=curve(costs),
                )
                for seed in range(seeds)
            ],
            tokens=tokens,
        )

    @pytest.mark.parametrize(
        ("share", "length", "least"), [(0.02, 25, 0.98), (0.1, 6, 1.03), (0.3, 6, 1.2), (0.3, 25, 1.15)]
    )
    def test_verifies_what_looks_right(self, share, length, least):
        best, plain = self.speed(share, length)
        assert best >= least  # no fixed length gains anything here
        assert plain >= least

    @pytest.mark.parametrize("share", [0.02, 0.3])
    def test_loses_nothing_when_good_and_bad_look_alike(self, share):
        best, plain = self.speed(share, 6, said=(0.8, 0.8))
        assert best >= 0.97
        assert plain >= 0.97

    def test_verifies_more_where_width_is_cheap(self):
        best, _ = self.speed(0.3, 6, costs=GPU)
        assert best >= 0.98


class TestShortCalls:
    """A call of 64 tokens: little may be lost to finding out, and good drafts must be found at once."""

    @pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
    @pytest.mark.parametrize(
        "draft", [at_once(0.001), at_once(0.2), step_by_step(0.05)], ids=["free", "block", "steps"]
    )
    @pytest.mark.parametrize(("acceptance", "said"), [(0.02, 0.9), (0.1, 0.5)])
    def test_useless_drafts(self, costs, draft, acceptance, said):
        _, plain = compare(self.calls(acceptance, said, draft, costs), tokens=64)
        assert plain >= 0.965

    @pytest.mark.parametrize(("costs", "least"), [(CPU, 1.6), (GPU, 4.0)], ids=["cpu", "gpu"])
    def test_good_drafts(self, costs, least):
        _, plain = compare(self.calls(0.9, 0.9, at_once(0.1), costs), tokens=64)
        assert plain >= least

    @staticmethod
    def calls(acceptance, said, draft, costs):
        return worlds(acceptance, batch=1, said=said, draft=draft, verify=curve(costs), tokens=64, seeds=4)

    def test_a_profile_saves_the_search(self):
        """Where width is dear and the drafter claims too much, a wide pass need not be tried first."""
        dear = widening(0.35)
        profile = VerifyCosts.from_measurements({width: dear(width) for width in (1, 4, 16)})
        calls = worlds(0.3, batch=1, said=0.9, draft=at_once(0.01), verify=dear, tokens=64, seeds=8)
        assert compare(calls, make=lambda: Goodput(costs=profile), tokens=64) > compare(calls, tokens=64)


def test_a_text_that_changes():
    """Right, wrong, right again: drafting stops soon and comes back."""
    right = [[True] * 200 + [False] * 400 + [True] * 900]
    world = World(right=right, said=[[0.8] * 1500], draft=at_once(0.1), verify=curve(CPU))
    simulation = Simulation(Goodput(), world)
    simulation.run(1200)
    position, phases = 0, ([], [], [])
    for width in simulation.widths:
        phases[(position >= 200) + (position >= 600)].append(width)
        position += width if right[0][position] else 1
    good, bad, again = phases
    assert sum(good[5:]) / len(good[5:]) > 8
    assert sum(width > 1 for width in bad) < 30
    assert sum(again[-20:]) / 20 > 8


# ---------------------------------------------------------------------------------------------------- mutants


class ByAcceptance(Always):
    """The usual heuristic: longer after a chain that was right, shorter after one that was not."""

    def start(self, nodes: int, sampled: bool) -> None:
        super().start(nodes, sampled)
        self._most, self._budget = nodes, 5

    def observe(self, round: Round) -> None:
        right = round.num_accepted.float().mean() >= round.budget
        self._budget = min(self._most, self._budget + 2) if right else max(1, self._budget - 1)


@pytest.mark.parametrize(("acceptance", "batch", "cost"), [(0.1, 1, 0.5), (0.5, 32, 0.5), (0.1, 32, 0.2)])
def test_a_controller_that_looks_at_acceptance_only_is_caught(acceptance, batch, cost):
    best, plain = compare(j1_worlds(acceptance, batch, cost), make=ByAcceptance)
    assert best < 0.97
    assert plain < 0.97


def test_planning_by_acceptance_alone_is_caught(monkeypatch):
    honest = Outlook.best
    monkeypatch.setattr(
        Outlook,
        "best",
        lambda self, rate, *_, largest: honest(self, rate, lambda _: 0.0, lambda _: 1.0, largest=largest),
    )
    best, _ = compare(j1_worlds(0.9, 32, 0.2))
    assert best < 0.97


def test_spending_without_limit_is_caught(monkeypatch):
    monkeypatch.setattr(Purse, "affords", lambda *_, **__: True)
    _, plain = compare(TestShortCalls.calls(0.02, 0.9, step_by_step(0.5), CPU), tokens=64)
    assert plain < 0.94


def test_believing_the_drafter_is_caught(monkeypatch):
    monkeypatch.setattr(Calibration, "add", lambda *_: None)
    best, _ = compare(j1_worlds(0.5, 8, 0.2, said=0.95))
    assert best < 0.97


# ------------------------------------------------------------------------------------------------------- laws


def seasoned(acceptance=0.5, *, sampled=False):
    """A controller after forty tokens."""
    return copy.deepcopy(after_forty_tokens(acceptance, sampled))


@functools.cache
def after_forty_tokens(acceptance, sampled):
    controller = Goodput()
    world = World(**steady(acceptance, rows=2, tokens=40, seed=0, said=0.5), draft=at_once(0.001), verify=curve(CPU))
    Simulation(controller, world, sampled=sampled).run(40)
    controller.budget()
    return controller


def kept_paths(tree, row):
    tokens = tree.tokens[row].tolist()
    return {tuple(tokens[n] for n in lineage(tree, row, node)): node for node in range(int(tree.num_nodes[row]))}


@given(trees(), st.sampled_from([0.05, 0.5, 0.95]))
def test_a_pruned_tree_is_the_best_part_of_the_tree(tree, acceptance):
    controller = seasoned(acceptance)
    values = controller._calibration.assess(tree).values
    pruned = controller.prune(tree)
    most = max(0, pruned.width - 1)
    for row in range(tree.tokens.shape[0]):
        whole, part = kept_paths(tree, row), kept_paths(pruned, row)
        assert part.keys() <= whole.keys()  # the same paths, so nothing hangs in the air
        assert len(part) == min(len(whole), most + 1)
        kept = {whole[path] for path in part}
        dropped = set(whole.values()) - kept
        assert min(values[row, list(kept)]) >= max(values[row, list(dropped)], default=0.0) * (1 - 1e-12)


@given(trees())
def test_worthless_trees_are_not_verified(tree):
    depth = torch.tensor(
        [[len(lineage(tree, row, n)) - 1 for n in range(tree.width)] for row in range(tree.tokens.shape[0])]
    )
    tree = dataclasses.replace(tree, scores=torch.where(tree.valid, -40.0 * depth, -torch.inf))
    assert seasoned(0.0).prune(tree).width == 1


@given(trees(vocab=5))
def test_sampled_trees_are_never_pruned(tree):
    assert seasoned(sampled=True).prune(tree) is tree


def test_the_budget_of_a_sampled_tree_knows_earlier_rounds_only():
    one, other = seasoned(sampled=True), seasoned(sampled=True)
    for fill in (5, 6):
        controller = one if fill == 5 else other
        controller.prune(DraftTree.from_root(torch.full((2,), fill)))
    assert [one.budget() for _ in range(3)] == [other.budget() for _ in range(3)]


@given(st.integers(1, 40), st.booleans())
def test_a_budget_fits_the_builder(nodes, sampled):
    world = World(**steady(0.9, rows=1, tokens=60, seed=0), draft=at_once(0.01), verify=widening(0.01))
    simulation = Simulation(Goodput(), world, sampled=sampled, nodes=nodes)
    simulation.run(30)
    assert all(0 <= budget <= nodes for budget in simulation.budgets)
    assert max(simulation.budgets) == min(nodes, max(simulation.budgets))


def test_nothing_is_drafted_without_nodes():
    simulation = Simulation(Goodput(), worlds(0.9, batch=1, draft=at_once(0.1), verify=curve(CPU))[0], nodes=0)
    simulation.run(20)
    assert set(simulation.budgets) == {0}


@pytest.mark.parametrize("sampled", [False, True])
def test_a_request_starts_from_nothing(sampled):
    """What one request learnt does not reach the next."""
    world = worlds(0.8, batch=1, draft=at_once(0.1), verify=curve(CPU))[0]
    dear = dataclasses.replace(world, draft=at_once(3.0), right=[[False] * len(world.right[0])])
    used = Goodput()
    Simulation(used, dear).run(100)
    again, fresh = Simulation(used, world, sampled=sampled), Simulation(Goodput(), world, sampled=sampled)
    assert again.run(100) == fresh.run(100)
    assert (again.widths, again.budgets) == (fresh.widths, fresh.budgets)


def test_max_loss_bounds_what_is_tried():
    """A useless drafter that takes as long as the target is tried less often the less may be lost."""
    useless = worlds(0.0, batch=1, said=0.9, draft=step_by_step(0.5), verify=curve(CPU))[0]
    tried = []
    for max_loss in (0.0, 0.015, 0.1):
        simulation = Simulation(Goodput(max_loss=max_loss), useless)
        simulation.run(TOKENS)
        tried.append(sum(budget > 0 for budget in simulation.budgets))
    assert tried == sorted(set(tried))


def test_a_profile_decides_before_anything_was_measured():
    """Two profiles, one drafter: a tree is verified at once where width is cheap, and not where it is dear."""
    tree = DraftTree(
        torch.arange(9)[None], torch.arange(-1, 8)[None], torch.tensor([9]), -0.5 * torch.arange(9.0)[None]
    )
    widths = []
    for costs in ({1: 1.0, 16: 1.05}, {1: 1.0, 16: 30.0}):
        controller = Goodput(costs=VerifyCosts.from_measurements(costs))
        world = World(**steady(0.6, rows=1, tokens=40, seed=1), draft=at_once(0.001), verify=widening(0.0))
        Simulation(controller, world, nodes=1).run(20)
        controller.budget()
        widths.append(controller.prune(tree).width)
    assert widths[0] > widths[1]


def test_measured_costs_are_those_of_the_request():
    controller = Goodput()
    Simulation(controller, worlds(0.8, batch=1, draft=at_once(0.05), verify=curve(CPU))[0]).run(200)
    measured = controller.measured_costs()
    assert [measured.relative(width) for width in measured.widths] == pytest.approx(
        [curve(CPU)(width) for width in measured.widths], rel=1e-6
    )


def test_a_pruned_tree_need_not_be_shown():
    """A loop may leave out `prune`: what was drafted is then what was verified."""

    class Unpruned(Goodput):
        def prune(self, tree: DraftTree) -> DraftTree:
            return tree

    _, plain = compare(worlds(0.9, batch=8, draft=at_once(0.1), verify=curve(GPU)), make=Unpruned)
    assert plain > 4


def test_it_is_a_controller():
    assert isinstance(Goodput(), Controller)


def test_a_negative_loss_is_refused():
    with pytest.raises(ValueError, match=r"got -0\.1"):
        Goodput(max_loss=-0.1)
