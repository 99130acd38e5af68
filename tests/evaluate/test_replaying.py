"""A replay at the recorded setting is the run that was recorded; at another one it is a live round at the same root."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, control, drafters, trees
from specdec.errors import UnsupportedError
from specdec.evaluate import RecordedRequest, RecordedRound, Recorder, Recording, Replay, replay
from specdec.protocols import Drafter, TreeBuilder
from specdec.types import DraftTree, StageTimes
from tests import helpers
from tests.drafters.block.test_rounds import drafter_of
from tests.drafters.draft_models import like
from tests.drafters.steered import Steered
from tests.evaluate import runs
from tests.evaluate.runs import EOS, Live, Scripted, record

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: drafters.ModelDrafter(like("llama", noise=0.3)),
    "block": lambda: Steered(drafter_of("llama", "dspark_rnn"), helpers.text("ragged", 60), helpers.RAGGED),
    "marginal block": lambda: Steered(drafter_of("llama", "dflash_flat"), helpers.text("ragged", 60), helpers.RAGGED),
    "oracle": lambda: helpers.oracle(helpers.text("ragged", 60)),
    "lookup": drafters.PromptLookupDrafter,
    "suffix": drafters.SuffixDrafter,
    "small model": lambda: drafters.ModelDrafter(runs.talker(noise=1.0)),
    "combined": lambda: drafters.CombinedDrafter(
        drafters.PromptLookupDrafter(), drafters.ModelDrafter(runs.talker(noise=1.0))
    ),
}
TREES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "best first": trees.BestFirst(nodes=9, branch=3, depth=4, temperature=1.3),
    "wide": trees.BestFirst(nodes=14, width=4),
    "fixed": trees.Fixed([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (2,)]),
}
TALK: list[list[int]] = [[1, 2, 4, 5, 6, 1, 2], [4, 4, 2], [6, 1, 6, 1, 6, 1, 6, 1, 6, 1], [5]]
SAMPLED = {"do_sample": True, "temperature": 0.8, "eos_token_id": EOS}
MARGINAL = {"options": {"marginal": True}}
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "model, chain": ("model", "chain", {}),
    "model, best first, sampled": ("model", "best first", {"do_sample": True, "temperature": 0.7}),
    "block, best first": ("block", "best first", {}),
    "block, chain, budgets": ("block", "chain", {"controller": (0, 2, 4)}),
    "marginal block, wide": ("marginal block", "wide", MARGINAL),
    "marginal block, fixed, late": ("marginal block", "fixed", {**MARGINAL, "controller": (0, 0, 0, 8, 5, 8, 0)}),
    "oracle, chain": ("oracle", "chain", {}),
    "oracle, wide, ended early": ("oracle", "wide", {"eos_token_id": [30, 77]}),
    "lookup, wide, sampled": ("lookup", "wide", SAMPLED),
    "lookup, chain, budgets": ("lookup", "chain", {**SAMPLED, "controller": (4, 0, 1)}),
    "suffix, best first, sampled": ("suffix", "best first", SAMPLED),
    "suffix, fixed, sampled": ("suffix", "fixed", SAMPLED),
    "small model, wide, sampled": ("small model", "wide", SAMPLED),
    "small model, fixed, late": ("small model", "fixed", {**SAMPLED, "controller": (0, 0, 8, 3)}),
    "combined, best first": ("combined", "best first", SAMPLED),
    "combined, trees beside it": (
        "combined",
        "fixed",
        {**SAMPLED, "options": {"top": 1, "also": [trees.BestFirst(9)]}},
    ),
    "combined, wide, tight": ("combined", "wide", {**SAMPLED, "max_new_tokens": 12}),
}


@cache
def run(name: str) -> Live:
    """The live run of a setting, recorded."""
    drafter, tree, options = SETTINGS[name]
    large = drafter in ("model", "block", "marginal block", "oracle")
    target = helpers.model("llama") if large else runs.talker()
    controller = options.get("controller")
    request = {"max_new_tokens": 60 if large else 100, **options, "controller": controller and Scripted(controller)}
    return record(target, DRAFTERS[drafter](), TREES[tree], helpers.FOUR if large else TALK, **request)


def again(name: str, live: Live, change: Callable[[RecordedRequest], RecordedRequest] | None = None) -> Replay:
    """The replay of a setting at itself, or of a recording that was changed."""
    requests = live.recording.requests
    return replay(Recording(requests if change is None else tuple(map(change, requests))), TREES[SETTINGS[name][1]])


# ------------------------------------------------------------------------------------------------ the recorded setting


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replay_at_the_recorded_setting_is_the_run(name: str) -> None:
    live = run(name)
    replayed = again(name, live)
    runs.assert_same(replayed, live)
    assert replayed.tokens_per_round == live.recording.tokens_per_round > 1


def test_the_runs_left_nothing_out() -> None:
    """At least 500 rounds, of every kind: all, some or none accepted, no proposals, no drafts wanted, ended early."""
    lives = [run(name) for name in SETTINGS]
    assert sum(len(live.rounds) for live in lives) >= 500
    assert frozenset[str]().union(*(live.kinds for live in lives)) == {*helpers.ALL_KINDS, "skipped"}
    for kind in helpers.ALL_KINDS - {"empty"}:
        assert sum(kind in live.kinds for live in lives) >= 12, kind
    stopped = [0 in round.committed.tolist() for live in lives for round in live.recording.rounds]
    assert sum(stopped) > 20
    cut = [round.num_accepted[row] == count for live in lives for round in live.rounds
           for row, count in enumerate(round.num_committed.tolist()) if count]  # fmt: skip
    assert any(cut), "no stop token was ever accepted"


@pytest.mark.parametrize("name", ["marginal block, fixed, late", "small model, fixed, late", "lookup, chain, budgets"])
def test_a_controller_chooses_as_it_did(name: str) -> None:
    """One that began late chose for rounds before the first recorded one, too."""
    live, budgets = run(name), SETTINGS[name][2]["controller"]
    late = next(index for index, budget in enumerate(budgets) if budget)
    controller = Scripted([*budgets[late:], *budgets[:late]])
    runs.assert_same(replay(live.recording, TREES[SETTINGS[name][1]], controller=controller), live)


def test_a_controller_sees_what_it_saw_live() -> None:
    """Prunes included: it is told of the same rounds in the same order, the prefill first."""
    live = record(runs.talker(), DRAFTERS["small model"](), TREES["wide"], TALK,
                  controller=Scripted([9, 14, 0, 5], keep=4), **SAMPLED)  # fmt: skip
    controller = Scripted([9, 14, 0, 5], keep=4)
    runs.assert_same(replay(live.recording, TREES["wide"], controller=controller), live)
    assert runs.outcome(controller.rounds) == runs.outcome(live.controller.rounds)
    assert [nodes.tree.width for nodes in controller.rounds] == [nodes.tree.width for nodes in live.controller.rounds]
    assert [round.index for round in controller.rounds] == [round.index for round in live.controller.rounds]
    assert runs.nodes(controller.rounds[0].tree) == runs.nodes(live.controller.rounds[0].tree)


def test_a_smaller_budget_of_a_request_is_that_of_a_controller() -> None:
    live = record(runs.talker(), DRAFTERS["suffix"](), TREES["fixed"], TALK, num_draft_tokens=3, **SAMPLED)
    runs.assert_same(replay(live.recording, TREES["fixed"], controller=control.Always(3)), live)
    assert runs.outcome(replay(live.recording, trees.Fixed([(0,), (1,), (0, 0)])).rounds) == runs.outcome(live.rounds)


# -------------------------------------------------------------------------------------------------- wrong variants fail


class Shifted(RecordedRequest):
    """The text that a tree is walked by is one token off."""

    def ahead(self, round: RecordedRound, count: int) -> Tensor:
        return super().ahead(round, count + 1)[:, 1:]


def shifted(request: RecordedRequest) -> RecordedRequest:
    return Shifted(**{item.name: getattr(request, item.name) for item in dataclasses.fields(request)})


def unlimited(request: RecordedRequest) -> RecordedRequest:
    """Trees know nothing of the end of the text."""
    rounds = [dataclasses.replace(round, limits=round.limits.clamp_max(1) * 99) for round in request.rounds]
    return dataclasses.replace(request, rounds=tuple(rounds))


def swapped(request: RecordedRequest) -> RecordedRequest:
    """Answers are those of the round before."""
    answers = [round.answers for round in request.rounds]
    rounds = zip(request.rounds, [answers[0], *answers[:-1]], strict=True)
    return dataclasses.replace(
        request, rounds=tuple(dataclasses.replace(round, answers=before) for round, before in rounds)
    )


def mirrored(request: RecordedRequest) -> RecordedRequest:
    """Rows are mixed up."""
    return dataclasses.replace(request, texts=request.texts.flip(0))


def pathless(request: RecordedRequest) -> RecordedRequest:
    """Any node of a level answers for any other, though the drafter's answers depend on the path."""
    return dataclasses.replace(request, marginal=True)


@pytest.mark.parametrize("wrong", [shifted, unlimited, swapped, mirrored, pathless])
@pytest.mark.parametrize("name", ["model, best first, sampled", "suffix, fixed, sampled", "combined, wide, tight"])
def test_a_wrong_replay_disagrees(wrong: Callable[[RecordedRequest], RecordedRequest], name: str) -> None:
    live = run(name)
    try:
        found = runs.outcome(again(name, live, wrong).rounds)
    except UnsupportedError:  # it asks about nodes that the run did not have
        assert wrong is not shifted
    else:
        assert found != runs.outcome(live.rounds)


def test_text_that_ends_with_each_round_would_disagree() -> None:
    """A larger tree than the live one accepts beyond what the live round committed."""
    drafter = DRAFTERS["small model"]()
    live = record(runs.talker(), drafter, trees.Chain(1), TALK, options={"also": [trees.Chain(6)]}, **SAMPLED)
    short, long = replay(live.recording, trees.Chain(1)), replay(live.recording, trees.Chain(6))
    runs.assert_same(short, live)
    assert long.tokens_per_round > short.tokens_per_round
    for one, other in zip(short.rounds, long.rounds, strict=True):
        assert bool((one.num_accepted <= other.num_accepted).all())


# ------------------------------------------------------------------------------------------------------- other settings

COVERED: list[TreeBuilder] = [
    trees.Chain(1),
    trees.Chain(3),
    trees.BestFirst(nodes=5),
    trees.BestFirst(nodes=20),
    trees.BestFirst(nodes=12, depth=2),
    trees.BestFirst(nodes=12, width=2, branch=2, depth=3),
    trees.Fixed([(0,), (1,), (2,), (0, 0), (1, 0)]),
]
NAMED: list[TreeBuilder] = [
    trees.BestFirst(nodes=24, branch=2),
    trees.BestFirst(nodes=12, temperature=0.5, branch=4),
    trees.BestFirst(nodes=7, temperature=2.5, branch=3),
    trees.Chain(5),
]


class Probing(Recorder):
    """Grows, beside the recorded trees, those of other builders with the bare drafter: a live round of theirs."""

    def __init__(self, drafter: Drafter, tree: TreeBuilder, probes: Sequence[TreeBuilder], **options: Any) -> None:
        super().__init__(drafter, tree, **options)
        self.probes, self.grown = probes, list[list[DraftTree]]()

    def grow(self, drafter: Drafter, root: Tensor, limits: Tensor, budget: int, **rest: Any) -> DraftTree:
        self.grown.append([probe.grow(self.drafter, root, limits, probe.nodes, **rest) for probe in self.probes])
        return super().grow(drafter, root, limits, budget, **rest)


def plain_block(dialect: str) -> Drafter:
    return drafters.BlockDrafter(drafter_of("llama", dialect).model)


@pytest.mark.parametrize(
    ("drafter", "large", "also"),
    [
        ("model", trees.BestFirst(nodes=40), NAMED),
        ("dflash2", trees.BestFirst(nodes=40), NAMED),
        ("dflash_flat", trees.Chain(7), ()),  # one law a level: a chain knows every node
        ("lookup", trees.BestFirst(nodes=40), NAMED),
        ("suffix", trees.BestFirst(nodes=40), NAMED),
        ("small model", trees.BestFirst(nodes=120), NAMED),
    ],
)
def test_another_setting_is_a_live_round_at_the_same_root(
    drafter: str, large: TreeBuilder, also: Sequence[TreeBuilder]
) -> None:
    block = drafter.startswith("dflash")
    target = helpers.model("llama") if block or drafter == "model" else runs.talker()
    source = plain_block(drafter) if block else DRAFTERS[drafter]()
    probes = [*COVERED, *NAMED]
    recorder = Probing(source, large, probes, top=24, also=also)
    request: dict[str, Any] = {**(SAMPLED if target is runs.talker() else {}), "max_new_tokens": 14}
    live = record(target, source, large, TALK, recorder=recorder, **request)
    runs.assert_same(replay(live.recording, large), live)
    texts = [live.recording.requests[0].ahead(round, 45) for round in live.recording.rounds if round.answers]
    ahead = [[[token for token in row if token >= 0] for row in text.tolist()] for text in texts]
    gained = 0
    for index, probe in enumerate(probes):
        rounds = [round for round in replay(live.recording, probe).rounds if round.budget]
        expected = [grown[index] for grown in recorder.grown]
        assert [runs.nodes(round.tree) for round in rounds] == [runs.nodes(tree) for tree in expected]
        for round, tree in zip(rounds, expected, strict=True):
            # The same forward passes over fewer nodes may round otherwise in the last place.
            torch.testing.assert_close(round.tree.scores, tree.scores, rtol=1e-5, atol=1e-6)
        accepted = runs.walked(ahead, expected)
        assert [round.num_accepted.tolist() for round in rounds] == accepted
        gained += sum(map(sum, accepted))
    assert gained > 0


def test_options_make_a_difference() -> None:
    live = record(runs.talker(), DRAFTERS["small model"](), trees.BestFirst(nodes=120), TALK,
                  options={"also": NAMED}, **SAMPLED)  # fmt: skip
    found = [replay(live.recording, tree).tokens_per_round for tree in (*COVERED, *NAMED)]
    assert len(set(found)) > 5
    budgets = [replay(live.recording, trees.BestFirst(nodes=nodes)).tokens_per_round for nodes in (1, 2, 4, 8, 16, 32)]
    assert budgets == sorted(set(budgets))


def test_there_are_no_more_proposals_than_tokens() -> None:
    live = record(runs.talker(), DRAFTERS["small model"](), trees.Chain(1), TALK, **SAMPLED)
    replayed = replay(live.recording, trees.Fixed([(0,), (6,), (7,)]))
    assert {width - 1 for round in replayed.rounds for width in round.tree.num_nodes.tolist()} == {0, 2}


def test_a_controller_that_decides_by_time_is_told_it() -> None:
    live = record(runs.talker(), DRAFTERS["small model"](), TREES["wide"], TALK, **SAMPLED)

    def times(tree: DraftTree, budget: int) -> StageTimes:
        return StageTimes(draft=0.001 * budget, verify=0.010 + price * tree.width)

    found = []
    for price in (0.0001, 1.0):
        replayed = replay(live.recording, TREES["wide"], controller=control.Goodput(), times=times)
        expected = sum(0.001 * round.budget + 0.010 + price * round.tree.width for round in replayed.rounds)
        assert replayed.seconds == pytest.approx(expected)
        found.append(replayed.total.drafted)
    assert found[0] > found[1] > 0


# --------------------------------------------------------------------------------------------------------------- errors


def test_trees_that_are_drawn_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"<Sampled: 15 nodes.* draws its trees"):
        replay(Recording(), trees.Sampled())


def test_a_node_that_was_not_recorded_is_named() -> None:
    live = record(runs.talker(), DRAFTERS["small model"](), trees.Chain(2), TALK, options={"top": 2}, **SAMPLED)
    root = int(live.rounds[0].tree.tokens[0, 0])
    with pytest.raises(UnsupportedError, match=rf"request 0, round 1: .* after tokens \[{root}, \d, \d\] of row 0"):
        replay(live.recording, trees.Chain(3))
    with pytest.raises(UnsupportedError, match=rf"best 3 proposals after tokens \[{root}\] .*top=3"):
        replay(live.recording, trees.Fixed([(2,)]))
    with pytest.raises(UnsupportedError, match=r"not hold the best 1 proposals after tokens \[\d, \d\]"):
        replay(live.recording, trees.Fixed([(1,), (1, 0)]))


def test_drafts_in_a_round_that_was_recorded_without_are_refused() -> None:
    live = run("lookup, chain, budgets")
    with pytest.raises(UnsupportedError, match=r"request 0, round 2 was recorded without drafts, .* wants 4 nodes"):
        replay(live.recording, TREES["chain"], controller=control.Always())


# ------------------------------------------------------------------------------------------------------------ the value


def test_a_replay_counts_as_the_statistics_of_the_run() -> None:
    recorder = Recorder(DRAFTERS["small model"](), TREES["wide"])
    generator = SpeculativeGenerator(runs.talker(), recorder, recorder)
    torch.manual_seed(0)
    generator.generate(**helpers.batch(TALK), pad_token_id=0, max_new_tokens=30, **SAMPLED)
    replayed, live = replay(recorder.recording, TREES["wide"]).total, generator.stats.total
    assert (replayed.drafted, replayed.accepted, replayed.cut_short) == (live.drafted, live.accepted, live.cut_short)
    assert replayed.accepted_by_depth == live.accepted_by_depth
    assert replayed.rounds == live.rounds - len(TALK)  # the prefill is no recorded round
    assert replayed.new_tokens == live.new_tokens - len(TALK)


def test_a_replay_is_readable() -> None:
    text = str(replay(run("oracle, chain").recording, TREES["chain"]))
    assert text.splitlines()[0].startswith("tokens / round  ")
    assert "%" in text
    assert "seconds" not in text
    assert str(replay(Recording(), TREES["chain"])).startswith("tokens / round  0.00")


def test_what_is_no_recording_is_told() -> None:
    live = run("lookup, chain, budgets")
    recorder = Recorder(drafters.PromptLookupDrafter(), TREES["chain"])
    with pytest.raises(UnsupportedError, match=r"takes a Recording \(recorder\.recording, .*got Recorder"):
        inspect.unwrap(replay)(recorder, TREES["chain"])
    with pytest.raises(UnsupportedError, match=r"not a class; make one: Chain\(\.\.\.\)"):
        inspect.unwrap(replay)(live.recording, trees.Chain)
    assert re.fullmatch(
        r"<Replay: \d+ rounds, \d\.\d\d tokens per round>", repr(replay(live.recording, TREES["chain"]))
    )
