"""Statistics count every round once, by one definition, in constant memory (field-log J8, J10, K4)."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import Shortlist
from specdec.errors import ShapeError
from specdec.stats import GenerationStats, RowStats, to_host
from specdec.types import DraftTree, Round, StageTimes


@dataclass(frozen=True)
class RowRound:
    """One row in one round: the parents of its tree, accepted tokens, whether a stop cut the bonus off."""

    parents: tuple[int, ...]
    accepted: int
    cut: bool = False
    active: bool = True

    @property
    def committed(self) -> int:
        return self.accepted + (not self.cut) if self.active else 0


IDLE = RowRound((-1,), 0, active=False)
PREFILL = RowRound((-1,), 0)
BUSH = RowRound((-1, 0, 0, 1, 1, 2), 2)


def chain(drafted: int, accepted: int, *, cut: bool = False) -> RowRound:
    return RowRound(tuple(range(-1, drafted)), accepted, cut)


def make_round(index: int, rows: list[RowRound], times: StageTimes | None = None, **changes: Any) -> Round:
    width = max(len(row.parents) for row in rows)
    new = max(1, *(row.committed for row in rows))
    tokens = torch.arange(width).repeat(len(rows), 1)
    tree = DraftTree(
        tokens=tokens,
        parents=torch.tensor([[*row.parents, *[-1] * (width - len(row.parents))] for row in rows]),
        num_nodes=torch.tensor([len(row.parents) for row in rows]),
        scores=torch.zeros(tokens.shape),
    )
    return Round(
        index=index,
        tree=tree,
        path=torch.full((len(rows), max(1, *(row.accepted for row in rows))), -1),
        num_accepted=torch.tensor([row.accepted for row in rows]),
        committed=torch.zeros(len(rows), new, dtype=torch.int64),
        num_committed=torch.tensor([row.committed for row in rows]),
        budget=width - 1,
        times=times or StageTimes(),
        **changes,
    )


def recorded(rounds: list[list[RowRound]]) -> GenerationStats:
    stats = GenerationStats()
    for index, rows in enumerate(rounds):
        stats.record(make_round(index, rows))
    return stats


@st.composite
def row_rounds(draw: st.DrawFn) -> RowRound:
    if draw(st.integers(0, 4)) == 0:
        return IDLE
    nodes = draw(st.integers(1, 9))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes)))
    deepest = max(depths(parents))
    accepted = draw(st.integers(0, deepest))
    return RowRound(parents, accepted, cut=accepted > 0 and draw(st.booleans()))


def depths(parents: tuple[int, ...]) -> list[int]:
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


@st.composite
def requests(draw: st.DrawFn) -> list[list[RowRound]]:
    batch = draw(st.integers(1, 4))
    later = st.lists(st.lists(row_rounds(), min_size=batch, max_size=batch), max_size=8)
    return [[PREFILL] * batch, *draw(later)]


Law = Callable[[RowStats, list[RowRound]], bool]
LAWS: dict[str, Law] = {
    "sum(hist) = rounds": lambda row, _: sum(row.histogram) == row.rounds,
    "sum(i * hist[i]) = accepted": lambda row, _: sum(i * n for i, n in enumerate(row.histogram)) == row.accepted,
    "new = rounds + accepted - cut": lambda row, _: row.new_tokens == row.rounds + row.accepted - row.cut_short,
    "sum(accepted by depth) = accepted": lambda row, _: sum(row.accepted_by_depth) == row.accepted,
    "rounds": lambda row, mine: row.rounds == len(mine),
    "drafted": lambda row, mine: row.drafted == sum(len(r.parents) - 1 for r in mine),
    "accepted": lambda row, mine: row.accepted == sum(r.accepted for r in mine),
    "new tokens": lambda row, mine: row.new_tokens == sum(r.committed for r in mine),
    "cut short": lambda row, mine: row.cut_short == sum(r.cut for r in mine),
    "offered by depth": lambda row, mine: (
        row.offered_by_depth
        == [sum(depth in depths(r.parents) for r in mine) for depth in range(1, len(row.offered_by_depth) + 1)]
    ),
    "accepted by depth": lambda row, mine: (
        row.accepted_by_depth
        == [sum(r.accepted >= depth for r in mine) for depth in range(1, len(row.offered_by_depth) + 1)]
    ),
}


def broken(stats: GenerationStats, rounds: list[list[RowRound]]) -> set[str]:
    seen = [[rows[index] for rows in rounds if rows[index].active] for index in range(stats.batch)]
    views = [(stats.row(index), mine) for index, mine in enumerate(seen)]
    views.append((stats.total, [r for mine in seen for r in mine]))
    return {name for name, law in LAWS.items() for row, mine in views if not law(row, mine)}


@given(requests())
def test_identities(rounds):
    stats = recorded(rounds)
    assert broken(stats, rounds) == set()
    assert stats.new_tokens == sum(r.committed for rows in rounds for r in rows)
    assert stats.target_passes == len(rounds)
    assert stats.plain_passes == max(stats.row(index).new_tokens for index in range(stats.batch))
    assert stats.passes_saved == stats.plain_passes - stats.target_passes
    assert sum(stats.widths.values()) == len(rounds) - 1


class CountsTheBonus(RowStats):
    def add(self, *, drafted: int, deepest: int, accepted: int, committed: int) -> None:
        super().add(drafted=drafted, deepest=max(deepest, committed), accepted=committed, committed=committed)


class CountsBeforeTheCut(RowStats):
    def add(self, *, drafted: int, deepest: int, accepted: int, committed: int) -> None:
        super().add(drafted=drafted, deepest=deepest, accepted=accepted, committed=committed)
        self.new_tokens += accepted + 1 - committed


class CountsNodesAsDepths(RowStats):
    def add(self, *, drafted: int, deepest: int, accepted: int, committed: int) -> None:
        super().add(drafted=drafted, deepest=drafted, accepted=accepted, committed=committed)


@pytest.mark.parametrize("mutant", [CountsTheBonus, CountsBeforeTheCut, CountsNodesAsDepths])
def test_the_identities_catch_wrong_counting(mutant):
    rounds = [[PREFILL], [chain(4, 2)], [chain(4, 4)], [chain(3, 2, cut=True)], [BUSH]]
    stats = GenerationStats()
    stats._rows = [mutant()]
    for index, rows in enumerate(rounds):
        stats.record(make_round(index, rows))
    assert broken(stats, rounds)


def test_a_worked_batch():
    """Row 0 accepts 2 of 4, then stops in the middle of a chain; row 1 goes on alone with one round without drafts."""
    stats = recorded(
        [[PREFILL, PREFILL], [chain(4, 2), chain(4, 0)], [chain(3, 2, cut=True), chain(3, 3)], [IDLE, PREFILL]]
    )
    first, second = stats.row(0), stats.row(1)
    assert (first.rounds, first.accepted, first.new_tokens, first.histogram) == (3, 4, 6, [1, 0, 2])
    assert (second.rounds, second.accepted, second.new_tokens, second.histogram) == (4, 3, 7, [3, 0, 0, 1])
    assert first.offered_by_depth == [2, 2, 2, 1]
    assert first.accepted_by_depth == [2, 2, 0, 0]
    assert first.acceptance_by_depth == [1.0, 1.0, 0.0, 0.0]
    assert stats.tokens_per_round == 13 / 7
    assert (stats.target_passes, stats.plain_passes, stats.passes_saved) == (4, 7, 3)
    assert stats.widths == {1: 1, 4: 1, 5: 1}
    assert stats.total.histogram == [4, 0, 2, 1]


def test_depth_is_not_the_number_of_nodes():
    row = recorded([[PREFILL], [BUSH]]).row(0)
    assert (row.drafted, row.offered_by_depth, row.accepted_by_depth) == (5, [1, 1], [1, 1])


def test_times_of_the_prefill_stand_apart():
    stats = GenerationStats()
    stats.record(make_round(0, [PREFILL], StageTimes(draft=0.5, verify=2.0, commit=0.5)))
    stats.record(make_round(1, [chain(3, 3)], StageTimes(draft=1.0, grow=0.5, verify=2.0, accept=0.25, commit=0.25)))
    stats.record(make_round(2, [chain(3, 0)], StageTimes(draft=1.0, verify=2.0)))
    assert (stats.prefill_seconds, stats.first_token_seconds) == (2.0, 3.0)
    assert stats.times == StageTimes(draft=2.0, grow=0.5, verify=4.0, accept=0.25, commit=0.25)
    assert stats.seconds == 10.0
    assert stats.tokens_per_second == 0.6


def test_nothing_recorded():
    stats = GenerationStats()
    assert (stats.tokens_per_round, stats.acceptance_rate, stats.tokens_per_second, stats.plain_passes) == (0, 0, 0, 0)
    assert json.loads(json.dumps(stats.to_dict()))["rows"] == []
    assert "not timed" in str(stats)


@given(requests())
def test_to_dict_is_json(rounds):
    stats = recorded(rounds)
    loaded = json.loads(json.dumps(stats.to_dict()))
    assert loaded == stats.to_dict()
    assert [row["new_tokens"] for row in loaded["rows"]] == [
        stats.row(index).new_tokens for index in range(stats.batch)
    ]


@given(requests())
def test_printed_text_is_aligned(rounds):
    lines = str(recorded(rounds)).splitlines()
    assert all((len(line) > 16 and line[15] == " " and line[16] != " ") or line.startswith("row ") for line in lines)
    assert len(lines) == len({line[:16] for line in lines})


@given(
    st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    st.sets(st.integers(0, 7), min_size=1),
)
def test_misses_of_a_shortlist(rows, listed):
    """Padding behind the committed tokens is no token; ids beyond the list's vocabulary are in no list."""
    width = max(map(len, rows))
    committed = torch.tensor([[*sorted(row, reverse=True), *[-1] * (width - len(row))] for row in rows])
    counts = (committed >= 0).sum(-1)
    tree = DraftTree.from_root(torch.zeros(len(rows), dtype=torch.int64))
    shortlist = Shortlist(torch.tensor(sorted(listed)), 8)
    for given_list, missed in ((shortlist.mask, set(range(10)) - listed), (None, set())):
        stats = GenerationStats(given_list)
        accepted = (counts - 1).clamp_min(0)
        path = torch.full((len(rows), 1), -1)
        stats.record(Round(0, tree, path, accepted, committed, counts, 0))
        found = [stats.row(row).shortlist_misses for row in range(len(rows))]
        assert found == [sum(token in missed for token in row) for row in committed.tolist()]
        assert stats.shortlist_misses == stats.total.shortlist_misses == sum(found)
        assert ("not in the list" in str(stats)) == (given_list is not None)


def test_another_batch_is_refused():
    stats = recorded([[PREFILL, PREFILL]])
    with pytest.raises(ShapeError, match="2 rows got a round of 1 rows"):
        stats.record(make_round(1, [PREFILL]))


@pytest.mark.parametrize("committed", [1, 4])
def test_a_round_that_contradicts_itself_is_refused(committed):
    wrong = replace(make_round(1, [chain(4, 2)]), num_committed=torch.tensor([committed]))
    with pytest.raises(ShapeError, match=f"got {committed} committed, 2 accepted"):
        GenerationStats().record(wrong)


def test_no_tensor_is_kept_alive():
    stats, kept = GenerationStats(), []
    for index in range(50):
        round = make_round(index, [chain(4, index % 5), chain(4, 4)])
        kept += [weakref.ref(round.tree.tokens), weakref.ref(round.num_committed), weakref.ref(round.committed)]
        stats.record(round)
    del round
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)


def test_memory_does_not_grow_with_the_rounds():
    def size(rounds: int) -> int:
        stats = recorded([[PREFILL], *([chain(4, index % 5)] for index in range(rounds))])
        row = stats.row(0)
        return len(row.histogram) + len(row.offered_by_depth) + len(row.accepted_by_depth) + len(stats.widths)

    assert size(10) == size(200)


def test_fields_on_an_accelerator_travel_together():
    """The meta device stands for an accelerator whose transfer is counted."""
    transfers = []

    class Away(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("meta")

        def cpu(self) -> torch.Tensor:
            transfers.append(self)
            return self.as_subclass(torch.Tensor)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    counts, tokens = torch.tensor([1, 2]).as_subclass(Away), torch.tensor([[3, 4], [5, 6]]).as_subclass(Away)
    assert to_host(counts, torch.tensor([7]), tokens) == [[1, 2], [7], [[3, 4], [5, 6]]]
    assert len(transfers) == 1
