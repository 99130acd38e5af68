"""The order of a round, what a request that drafts nothing leaves alone, and how a round ends."""

from collections.abc import Iterator

import torch

from specdec import control, rounds, trees, verify
from specdec.protocols import DraftContext
from specdec.rounds import Stopwatch, TimedDrafter, depth_limits
from specdec.testing import PlainLedger, TableDrafter, TableTarget
from specdec.types import Candidates, DraftTree, Frontier, Round, TargetOutput

CYCLE = torch.eye(5).roll(1, dims=1)  # 0 1 2 3 4 0 1 ...


class Log:
    """Notes the calls that the loop makes to its parts, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []


class LoggedTarget(TableTarget):
    def __init__(self, log: Log, prompt: torch.Tensor) -> None:
        super().__init__(CYCLE, prompt)
        self._log = log

    def prefill(self) -> TargetOutput:
        self._log.calls.append("prefill")
        return super().prefill()

    def verify(self, tree: DraftTree) -> TargetOutput:
        self._log.calls.append("verify")
        return super().verify(tree)

    def commit(self, nodes: torch.Tensor, counts: torch.Tensor) -> None:
        self._log.calls.append("target.commit")
        super().commit(nodes, counts)


class LoggedDrafter(TableDrafter):
    def __init__(self, log: Log) -> None:
        super().__init__(CYCLE)
        self._log = log

    def start(self, context: DraftContext) -> None:
        self._log.calls.append("start")
        super().start(context)

    def children(self, frontier: Frontier, count: int) -> Candidates:
        self._log.calls.append("children")
        return super().children(frontier, count)

    def commit(self, tokens: torch.Tensor, counts: torch.Tensor, features: torch.Tensor | None = None) -> None:
        self._log.calls.append("drafter.commit")
        super().commit(tokens, counts, features)

    def finish(self) -> None:
        self._log.calls.append("finish")
        super().finish()


def run(log: Log, tokens: int, **options: object) -> Iterator[Round]:
    prompt = torch.tensor([[1]])
    ledger = PlainLedger(prompt, max_new_tokens=tokens)
    parts = LoggedTarget(log, prompt), LoggedDrafter(log), trees.Chain(2), verify.TargetOnly(), ledger
    return rounds.rounds(*parts, control.Always(), **options)


def test_the_order_of_a_round():
    log = Log()
    committed = [round.num_committed.tolist() for round in run(log, 7)]
    assert committed == [[1], [3], [3]]
    a_round = ["children", "children", "verify", "target.commit", "drafter.commit"]
    assert log.calls == ["prefill", "start", *a_round, *a_round, "finish"]


def test_a_request_that_drafts_nothing_never_calls_the_drafter():
    log = Log()
    assert [round.num_committed.tolist() for round in run(log, 3, nodes=0)] == [[1]] * 3
    assert log.calls == ["prefill", "verify", "target.commit", "verify", "target.commit"]


def test_one_token_needs_no_draft():
    log = Log()
    assert len(list(run(log, 1))) == 1
    assert log.calls == ["prefill"]


def test_a_caller_that_stops_early_still_ends_the_drafters_request():
    log = Log()
    steps = run(log, 100)
    next(steps), next(steps)
    assert "finish" not in log.calls
    steps.close()
    assert log.calls[-1] == "finish"


def test_nothing_is_drafted_past_the_length_limit():
    """The last round of a request has room for its bonus token only."""
    log = Log()
    last = list(run(log, 5))[-1]
    assert last.num_committed.tolist() == [1]
    assert last.tree.width == 1


def test_lockstep_ends_a_round_for_all_rows_where_it_ends_for_one():
    prompt = torch.tensor([[1], [4]])
    wrong = CYCLE.clone()
    wrong[0] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])  # the drafter errs after token 0 only
    for lockstep, expected in ((False, [[1, 1], [4, 1]]), (True, [[1, 1], [1, 1]])):
        ledger = PlainLedger(prompt, max_new_tokens=9)
        ledger.lockstep = lockstep
        parts = TableTarget(CYCLE, prompt), TableDrafter(wrong), trees.Chain(3), verify.TargetOnly(), ledger
        steps = rounds.rounds(*parts, control.Always())
        assert [next(steps).num_committed.tolist() for _ in range(2)] == expected


def test_depth_limits_are_the_smaller_of_length_and_positions():
    prompt = torch.tensor([[1], [4]])
    ledger = PlainLedger(prompt, max_new_tokens=5)

    class Short(TableTarget):
        depth_limit = torch.tensor([2, -3])

    assert depth_limits(TableTarget(CYCLE, prompt), ledger).tolist() == [4, 4]
    assert depth_limits(Short(CYCLE, prompt), ledger).tolist() == [2, 0]


def test_times_belong_to_stages_and_the_callers_time_to_none():
    watch = Stopwatch()
    watch.lap("grow")
    watch.restart()
    watch.lap("verify")
    times = watch.times(draft=0.0)
    assert times.total == times.grow + times.verify
    assert watch.times(draft=0.0).total == 0.0


def test_time_spent_proposing_is_taken_once():
    drafter = TimedDrafter(TableDrafter(CYCLE))
    drafter.start(DraftContext(tokens=torch.tensor([[1]]), mask=torch.ones(1, 1, dtype=torch.bool), vocab_size=5))
    drafter.children(Frontier.from_root(torch.tensor([1]), torch.tensor([True])), 1)
    assert drafter.take_seconds() > 0.0
    assert drafter.take_seconds() == 0.0
