"""What a request did: passes, drafts, acceptance and time, per row and for the call.

One definition for every figure. A row takes part in a round if it committed something in it; the prefill is round 0,
a round without drafts. *Accepted* never counts the bonus token, *tokens per round* always does, and both are counted
after every stop. So for each row: new tokens = rounds + accepted - cut short.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.types import Round, StageTimes

_STAGES = ("draft", "grow", "verify", "accept", "commit")


@dataclass(slots=True)
class RowStats:
    """Counts of one row of the batch, or summed over rows.

    Attributes:
        rounds: rounds in which the row committed something, prefill included.
        drafted: drafted nodes that were verified.
        accepted: drafted tokens that were committed; the bonus token is not one.
        new_tokens: committed tokens.
        cut_short: rounds that ended without their bonus token, because a stop came first (or because all rows had to
            advance by the same number of tokens).
        shortlist_misses: committed tokens that the drafter's shortlist does not have, so that no draft could hold them:
            each was a bonus token, the prefill's included. 0 without a shortlist.
        histogram: `histogram[i]` rounds accepted i drafted tokens.
        offered_by_depth: `offered_by_depth[d]` rounds had a drafted node at depth d + 1.
        accepted_by_depth: `accepted_by_depth[d]` rounds accepted one at depth d + 1.

    >>> row = RowStats()
    >>> row.add(drafted=4, deepest=4, accepted=2, committed=3)
    >>> row.tokens_per_round, row.acceptance_rate, row.acceptance_by_depth
    (3.0, 0.5, [1.0, 1.0, 0.0, 0.0])
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    new_tokens: int = 0
    cut_short: int = 0
    shortlist_misses: int = 0
    histogram: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def add(self, *, drafted: int, deepest: int, accepted: int, committed: int) -> None:
        """Adds a round in which the row committed at least one token.

        Args:
            drafted: nodes verified, root excluded.
            deepest: depth of the deepest of them.
            accepted: drafted tokens committed.
            committed: tokens committed.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.new_tokens += committed
        self.cut_short += committed == accepted
        _extend(self.histogram, accepted + 1)
        self.histogram[accepted] += 1
        _extend(self.offered_by_depth, deepest)
        _extend(self.accepted_by_depth, deepest)
        for depth in range(deepest):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per round, bonus included; 0 before the first round."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted nodes that were accepted; 0 without drafts. A tree offers more than it can win."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For depth 1, 2, ...: share of the rounds with a node at this depth that accepted one."""
        return [
            accepted / offered if offered else 0.0
            for accepted, offered in zip(self.accepted_by_depth, self.offered_by_depth, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates, as plain numbers and lists."""
        return {
            "rounds": self.rounds,
            "new_tokens": self.new_tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "cut_short": self.cut_short,
            "shortlist_misses": self.shortlist_misses,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_rate": self.acceptance_rate,
            "accepted_histogram": list(self.histogram),
            "offered_by_depth": list(self.offered_by_depth),
            "accepted_by_depth": list(self.accepted_by_depth),
        }


class GenerationStats:
    """Statistics of one request, filled round by round. Keeps numbers only, and only as many as the tree is deep.

    `record` reads the small integer tensors of a round. On an accelerator that is one transfer, and none for fields
    that are on the host already.

    Args:
        shortlist: True for tokens that the drafter can propose; None if it can propose them all.

    >>> import torch
    >>> from specdec.types import DraftTree, Round, StageTimes
    >>> stats = GenerationStats()
    >>> stats.record(Round(index=0, tree=DraftTree.from_root(torch.tensor([7])), path=torch.tensor([[-1]]),
    ...     num_accepted=torch.tensor([0]), committed=torch.tensor([[8]]), num_committed=torch.tensor([1]), budget=0,
    ...     times=StageTimes(verify=0.5)))
    >>> chain = DraftTree(torch.tensor([[8, 9, 5, 5]]), torch.tensor([[-1, 0, 1, 2]]), torch.tensor([4]),
    ...     torch.tensor([[0.0, -0.5, -1.0, -1.5]]))
    >>> stats.record(Round(index=1, tree=chain, path=torch.tensor([[1, -1]]), num_accepted=torch.tensor([1]),
    ...     committed=torch.tensor([[9, 6]]), num_committed=torch.tensor([2]), budget=3,
    ...     times=StageTimes(draft=0.05, verify=0.15)))
    >>> stats.new_tokens, stats.target_passes, stats.tokens_per_round, stats.passes_saved
    (3, 2, 1.5, 1)
    >>> print(stats)
    new tokens      3 in 0.70 s (4.3 per second)
    target passes   2 (plain decoding: 3, saved 1)
    tokens / round  1.50 (3 tokens, 2 rounds)
    accepted        1 of 3 drafted (33.3 %)
      per round     0: 1   1: 1
      by depth      1: 100 %   2: 0 %   3: 0 %
    verify width    4: 1
    first token     0.500 s (prefill 0.500 s)
    rounds          0.200 s: draft 25 %, verify 75 %
    """

    def __init__(self, shortlist: Bool[Tensor, " vocab"] | None = None) -> None:
        # The last entry stands for ids that a list for another vocabulary cannot have.
        self._unlisted = None if shortlist is None else torch.nn.functional.pad(~shortlist, (0, 1), value=True)
        self._rows: list[RowStats] = []
        self._widths: Counter[int] = Counter()
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self.target_passes = 0
        self.prefill_seconds = 0.0
        self.first_token_seconds = 0.0

    def record(self, round: Round) -> None:
        """Adds a finished round.

        Raises:
            ShapeError: if the round has another number of rows than the earlier ones, or commits a number of tokens
                that is neither its accepted tokens nor one more.
        """
        misses = self._misses(round.committed)
        parents, *counted = to_host(
            round.tree.parents, round.tree.num_nodes, round.num_accepted, round.num_committed, misses
        )
        nodes = counted[0]
        if not self._rows:
            self._rows = [RowStats() for _ in nodes]
        if len(self._rows) != len(nodes):
            raise ShapeError(
                f"statistics of {len(self._rows)} rows got a round of {len(nodes)} rows; use one per call."
            )
        for row, tree, counts in zip(self._rows, parents, zip(*counted, strict=True), strict=True):
            if counts[2]:
                self._record_row(row, tree, *counts)
        self.target_passes += 1
        if round.index == 0:
            self.prefill_seconds += round.times.verify
            self.first_token_seconds += round.times.total
            return
        self._widths[round.tree.width] += 1
        for stage in _STAGES:
            self._seconds[stage] += getattr(round.times, stage)

    def _misses(self, committed: Int[Tensor, "batch new"]) -> Int[Tensor, " batch"]:
        """Committed tokens of each row that the shortlist does not have."""
        if self._unlisted is None:
            return torch.zeros(committed.shape[0], dtype=torch.int64)
        if self._unlisted.device != committed.device:
            self._unlisted = self._unlisted.to(committed.device)
        return (self._unlisted[committed.clamp(0, len(self._unlisted) - 1)] & (committed >= 0)).sum(-1)

    def _record_row(
        self, row: RowStats, parents: list[int], nodes: int, accepted: int, committed: int, misses: int
    ) -> None:
        if committed - accepted not in (0, 1):
            raise ShapeError(
                f"a row commits its accepted tokens and at most the bonus token, got {committed} committed, "
                f"{accepted} accepted."
            )
        depths = [0] * nodes
        for node in range(1, nodes):
            depths[node] = depths[parents[node]] + 1
        row.add(drafted=nodes - 1, deepest=max(depths), accepted=accepted, committed=committed)
        row.shortlist_misses += misses

    def row(self, index: int) -> RowStats:
        """Counts of one row of the batch; they go on counting as rounds are recorded."""
        return self._rows[index]

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first round."""
        return len(self._rows)

    @property
    def total(self) -> RowStats:
        """Counts summed over the rows."""
        rows = self._rows
        return RowStats(
            rounds=sum(row.rounds for row in rows),
            drafted=sum(row.drafted for row in rows),
            accepted=sum(row.accepted for row in rows),
            new_tokens=sum(row.new_tokens for row in rows),
            cut_short=sum(row.cut_short for row in rows),
            shortlist_misses=sum(row.shortlist_misses for row in rows),
            histogram=_sum(row.histogram for row in rows),
            offered_by_depth=_sum(row.offered_by_depth for row in rows),
            accepted_by_depth=_sum(row.accepted_by_depth for row in rows),
        )

    @property
    def row_rounds(self) -> int:
        """Rounds summed over the rows that took part in them; for one row this is `target_passes`."""
        return sum(row.rounds for row in self._rows)

    @property
    def drafted(self) -> int:
        """Drafted nodes verified, over all rows."""
        return sum(row.drafted for row in self._rows)

    @property
    def accepted(self) -> int:
        """Drafted tokens committed, over all rows."""
        return sum(row.accepted for row in self._rows)

    @property
    def shortlist_misses(self) -> int:
        """Committed tokens that the drafter's shortlist does not have, over all rows; 0 without a shortlist."""
        return sum(row.shortlist_misses for row in self._rows)

    @property
    def new_tokens(self) -> int:
        """Committed tokens, over all rows."""
        return sum(row.new_tokens for row in self._rows)

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per round and row, bonus included, after every stop; the prefill is a round."""
        return self.total.tokens_per_round

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted nodes that were accepted."""
        return self.total.acceptance_rate

    @property
    def plain_passes(self) -> int:
        """Target passes that plain decoding would have taken: the new tokens of the longest row."""
        return max((row.new_tokens for row in self._rows), default=0)

    @property
    def passes_saved(self) -> int:
        """Target passes saved against plain decoding."""
        return self.plain_passes - self.target_passes

    @property
    def times(self) -> StageTimes:
        """Seconds by stage, summed over the rounds after the prefill."""
        return StageTimes(**self._seconds)

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, prefill included; what the caller did between rounds is not in it."""
        return self.first_token_seconds + self.times.total

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second, prefill included; 0 if nothing was timed."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def widths(self) -> dict[int, int]:
        """Rounds by verify width, prefill excluded."""
        return dict(sorted(self._widths.items()))

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`; lists by depth start at depth 1."""
        total = self.total.to_dict()
        return {
            "row_rounds": total.pop("rounds"),
            **total,
            "target_passes": self.target_passes,
            "plain_passes": self.plain_passes,
            "passes_saved": self.passes_saved,
            "widths": {str(width): rounds for width, rounds in self.widths.items()},
            "prefill_seconds": self.prefill_seconds,
            "first_token_seconds": self.first_token_seconds,
            "stage_seconds": dict(self._seconds),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "rows": [row.to_dict() for row in self._rows],
        }

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows for the last line of a cell

    def __str__(self) -> str:
        total, rounds = self.total, self.times.total
        rounds_of = "rounds" if self.batch < 2 else f"rounds of {self.batch} rows"
        shares = [
            f"{stage} {self._seconds[stage] / rounds:.0%}" for stage in _STAGES if rounds and self._seconds[stage]
        ]
        lines = [
            ("new tokens", f"{total.new_tokens} in {self.seconds:.2f} s ({self.tokens_per_second:.1f} per second)"),
            ("target passes", f"{self.target_passes} (plain decoding: {self.plain_passes}, saved {self.passes_saved})"),
            ("tokens / round", f"{total.tokens_per_round:.2f} ({total.new_tokens} tokens, {total.rounds} {rounds_of})"),
            ("accepted", f"{total.accepted} of {total.drafted} drafted ({total.acceptance_rate:.1%})"),
            ("  per round", _pairs(enumerate(total.histogram))),
            ("  by depth", _pairs((d, f"{share:.0%}") for d, share in enumerate(total.acceptance_by_depth, 1))),
            (
                "not in the list",
                "" if self._unlisted is None else f"{total.shortlist_misses} of {total.new_tokens} tokens",
            ),
            ("verify width", _pairs(self.widths.items())),
            ("first token", f"{self.first_token_seconds:.3f} s (prefill {self.prefill_seconds:.3f} s)"),
            ("rounds", f"{rounds:.3f} s: {', '.join(shares)}" if shares else "not timed"),
        ]
        if self.batch > 1:
            lines += [(f"row {index}", _row_line(row)) for index, row in enumerate(self._rows)]
        return "\n".join(f"{name:<16}{text.replace('%', ' %')}" for name, text in lines if text)


def _row_line(row: RowStats) -> str:
    return (
        f"{row.new_tokens:>5} tokens in {row.rounds:>5} rounds ({row.tokens_per_round:.2f}), "
        f"{row.accepted} of {row.drafted} accepted"
    )


def _pairs(items: Iterable[tuple[int, Any]]) -> str:
    return "   ".join(f"{key}: {value}" for key, value in items)


def _extend(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def _sum(lists: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for counts in lists:
        _extend(total, len(counts))
        for index, count in enumerate(counts):
            total[index] += count
    return total


def to_host(*tensors: Tensor) -> list[Any]:
    """Integer tensors with the same rows as nested lists; those on an accelerator travel together, in one transfer.

    >>> to_host(torch.tensor([1, 2]), torch.tensor([[3], [4]]))
    [[1, 2], [[3], [4]]]
    """
    away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if len(away) > 1:
        packed = torch.cat([tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for tensor in away], 1).cpu()
        parts = iter(packed.split([tensor[0].numel() for tensor in away], 1))
        tensors = tuple(tensor if tensor.device.type == "cpu" else next(parts).view(tensor.shape) for tensor in tensors)
    return [tensor.tolist() for tensor in tensors]


__all__ = ["GenerationStats", "RowStats"]
