"""A drafter that answers from a recorded round: tree builders grow on it as they would have grown in the round.

A new tree meets the recorded ones along paths. `same[b, i, j]` says that node i of the frontier that is asked about
and node j of the recorded level carry the same tokens from the root of row b down; it follows from the level above by
two gathers and one comparison.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.evaluate.recording import Answer, RecordedRound
from specdec.protocols import DraftContext
from specdec.types import Candidates, Frontier


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """All that was answered about nodes of one depth; parents count within the level above.

    `asked[j]` proposals were asked for at node j; it has fewer where the drafter had no more.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    valid: Bool[Tensor, "batch nodes"]
    proposals: Int[Tensor, "batch nodes rank"]
    log_probs: Float[Tensor, "batch nodes rank"]
    asked: Int[Tensor, " nodes"]

    def complete(self, count: int) -> Bool[Tensor, "batch nodes"]:
        """Whether the best `count` proposals of a node are known."""
        offered = (self.log_probs > -torch.inf).sum(-1)
        return (self.asked >= count) | (offered < self.asked)


class RecalledDrafter:
    """Answers about the nodes of a recorded round, and knows nothing about others.

    Args:
        round: the recorded round.
        vocab_size: number of the target's logits.
        marginal: whether any node of a level may be answered for by any other.
        name: what to call the round in errors.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, round: RecordedRound, *, vocab_size: int, marginal: bool, name: str) -> None:
        """Puts the answers side by side, level by level."""
        self._levels = _levels(round.answers)
        self._vocab_size, self._marginal, self._name = vocab_size, marginal, name
        self._asked: list[Frontier] = []
        self._same: Tensor | None = None

    def start(self, context: DraftContext) -> None:
        """Needs no context."""

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The best `count` recorded proposals of each node.

        Raises:
            UnsupportedError: if a node was not recorded, or with fewer proposals.
        """
        self._asked = [*self._asked[: frontier.depth], frontier]
        if frontier.depth >= len(self._levels):
            self._require(torch.zeros_like(frontier.valid), frontier, count)
            nothing = torch.zeros_like(frontier.tokens)[:, :, None]
            return Candidates(nothing, torch.full(nothing.shape, -torch.inf))
        level = self._levels[frontier.depth]
        same = frontier.valid[:, :, None] & level.valid[:, None, :]
        if not self._marginal:
            same = same & self._meets(frontier, level)
        self._same = same
        answers = same & level.complete(min(count, self._vocab_size))[:, None, :]
        self._require(answers.any(-1), frontier, count)
        place = answers.to(torch.uint8).argmax(-1)[:, :, None].expand(-1, -1, level.proposals.shape[2])
        return Candidates(
            tokens=level.proposals.gather(1, place)[..., :count],
            log_probs=level.log_probs.gather(1, place)[..., :count],
        )

    def _meets(self, frontier: Frontier, level: _Level) -> Bool[Tensor, "batch frontier nodes"]:
        """Whether tokens are equal, and parents met."""
        equal = frontier.tokens[:, :, None] == level.tokens[:, None, :]
        if frontier.depth == 0 or self._same is None:
            return equal
        mine = frontier.parents.clamp_min(0)[:, :, None].expand(-1, -1, self._same.shape[2])
        theirs = level.parents.clamp_min(0)[:, None, :].expand(-1, frontier.tokens.shape[1], -1)
        return equal & self._same.gather(1, mine).gather(2, theirs)

    def _require(self, known: Bool[Tensor, "batch frontier"], frontier: Frontier, count: int) -> None:
        """Raises for the first node that is asked about and not known."""
        missing = (frontier.valid & ~known).nonzero().tolist()
        if not missing:
            return
        row, node = missing[0]
        path, place = [], node
        for level in reversed(self._asked):
            path.append(int(level.tokens[row, place]))
            place = int(level.parents[row, place])
        raise UnsupportedError(
            f"{self._name}: the recording does not hold the best {count} proposals after tokens {path[::-1]} of row "
            f"{row} (the root comes first). Record with also=[this tree] and top={count} or more, or replay a smaller "
            "tree. If the drafter's answers depend on the depth alone, Recorder(..., marginal=True) says so."
        )

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Ignores it: what comes next is another round."""

    def finish(self) -> None:
        """Has nothing to end."""


def _levels(answers: tuple[Answer, ...]) -> list[_Level]:
    """Answers about nodes of the same depth side by side; those of the verified tree come first."""
    trees: list[list[Answer]] = []
    for answer in answers:
        if answer.frontier.depth == 0:
            trees.insert(0, [])
        trees[0].append(answer)
    levels, above = [], [0] * len(trees)  # where each tree's nodes begin in the level above
    for depth in range(max(map(len, trees), default=0)):
        here = [(index, tree[depth]) for index, tree in enumerate(trees) if depth < len(tree)]
        parents = [answer.frontier.parents + above[index] for index, answer in here]
        start = 0
        for index, answer in here:
            above[index], start = start, start + answer.frontier.tokens.shape[1]
        found = [answer for _, answer in here]
        ranks = max(answer.candidates.tokens.shape[2] for answer in found)
        levels.append(
            _Level(
                tokens=torch.cat([answer.frontier.tokens for answer in found], 1),
                parents=torch.cat(parents, 1),
                valid=torch.cat([answer.frontier.valid for answer in found], 1),
                proposals=torch.cat([_wide(answer.candidates.tokens, ranks, 0) for answer in found], 1),
                log_probs=torch.cat([_wide(answer.candidates.log_probs, ranks, -torch.inf) for answer in found], 1),
                asked=torch.cat([torch.full(answer.frontier.tokens.shape[1:], answer.asked) for answer in found]),
            )
        )
    return levels


def _wide(columns: Tensor, ranks: int, fill: int | float) -> Tensor:
    return torch.nn.functional.pad(columns, (0, ranks - columns.shape[2]), value=fill)
