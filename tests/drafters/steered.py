"""A drafter that is made right and wrong by a schedule, whatever its random weights say."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.protocols import DraftContext, Drafter
from specdec.types import Candidates, Frontier
from tests import helpers


class Steered:
    """Puts the token of a known text first, at as many levels as each row's schedule says; None drafts nothing.

    Args:
        drafter: whose answers are changed.
        reference: the text of the ragged batch of `helpers`.
        schedules: per row, the right levels of each round, over and over.
    """

    def __init__(self, drafter: Any, reference: Tensor, schedules: Sequence[Sequence[int | None]]) -> None:
        self.drafter: Drafter = drafter
        self.reference, self.schedules, self.round = reference, schedules, -1
        self.kept: dict[str, Any] = {}

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers

    def start(self, context: DraftContext) -> None:
        self.round, self.lengths = -1, context.mask.sum(-1)
        self.drafter.start(context)

    def children(self, frontier: Frontier, count: int) -> Candidates:
        found = self.drafter.children(frontier, count)
        self.round += frontier.depth == 0
        if bool((found.log_probs == -torch.inf).all()):
            return found
        tokens, log_probs = found.tokens.clone(), found.log_probs.clone()
        for row, length in enumerate(self.lengths.tolist()):
            schedule = self.schedules[row % len(self.schedules)]
            right = schedule[self.round % len(schedule)]
            place = helpers.START["ragged"] - len(helpers.FOUR[row]) + length + frontier.depth
            if right is None:
                log_probs[row] = -torch.inf
            elif frontier.depth < right and place < self.reference.shape[1]:
                wanted = self.reference[row, place]
                for ranks in tokens[row]:
                    ranks[ranks == wanted] = ranks[0].clone()
                    ranks[0] = wanted
        return Candidates(tokens, log_probs)

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        self.lengths = self.lengths + counts
        self.drafter.commit(tokens, counts, features)

    def finish(self) -> None:
        self.kept = dict(vars(self.drafter))  # what the drafter is about to drop
        self.drafter.finish()
