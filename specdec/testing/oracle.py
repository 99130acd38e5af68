"""A drafter that knows the answer and errs on schedule, so that a test decides what every round accepts."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.protocols import DraftContext
from specdec.types import Candidates, Frontier

Schedule = Sequence[int | None]


class OracleDrafter:
    """Proposes the reference's tokens, as many right ones per round as its schedule says, then wrong ones.

    Args:
        reference: the sequences plain decoding gives, prompt included, `[batch, seq]`; what lies beyond a row's end
            is proposed as token 0.
        schedule: right tokens in round r (cycled); None proposes nothing in that round. A list of schedules gives
            each row its own.
        vocab_size: a wrong token is the right one plus 1, 2, ... modulo this.
        rank: place of the right token among its siblings; 0 is first.
        siblings: proposals per node.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, trees
        >>> from specdec.testing import OracleDrafter, greedy, tiny_model
        >>> model, prompt = tiny_model("llama"), torch.tensor([[5, 6, 7]])
        >>> reference = greedy(model, input_ids=prompt, max_new_tokens=8)
        >>> generator = SpeculativeGenerator(model, OracleDrafter(reference, [3, 0]), trees.Chain(4))
        >>> [int(round.num_accepted) for round in generator.rounds(prompt, max_new_tokens=8, do_sample=False)]
        [0, 3, 0, 1]
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        reference: Int[Tensor, "batch seq"],
        schedule: Schedule | Sequence[Schedule],
        *,
        vocab_size: int = 97,
        rank: int = 0,
        siblings: int = 3,
    ) -> None:
        """Remembers the reference; knows nothing about a request until `start`."""
        rows = reference.tolist()
        self._reference = rows
        nested = len(schedule) > 0 and isinstance(schedule[0], (list, tuple))
        given: Any = schedule  # one for all rows, or one for each
        self._schedules: list[Schedule] = list(given) if nested else [given] * len(rows)
        self._vocab, self._rank, self._siblings = vocab_size, rank, siblings
        self.calls = 0
        self.rounds = 0
        self._lengths = [0] * len(rows)
        self._right: list[list[int]] = []

    def start(self, context: DraftContext) -> None:
        """Begins a request; rows are as wide as the context, padding included."""
        self.calls = self.rounds = 0
        mask = context.mask.tolist()
        self._lengths = [len(row) - row[::-1].index(True) for row in mask]

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """Right tokens while the schedule lasts and the path is right, then wrong ones."""
        self.calls += 1
        self.rounds += frontier.depth == 0
        batch, width = frontier.tokens.shape
        count = min(count, self._siblings)
        tokens = torch.zeros(batch, width, count, dtype=torch.int64)
        log_probs = torch.full((batch, width, count), -torch.inf)
        scores = torch.log_softmax(-torch.arange(count, dtype=torch.float32), -1)
        right = []
        for row, (ids, parents) in enumerate(zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)):
            schedule = self._schedules[row]
            planned = schedule[(self.rounds - 1) % len(schedule)]
            place = self._lengths[row] + frontier.depth
            on_path = [
                frontier.depth == 0 or (self._right[row][parent] == 1 and token == self._token(row, place - 1))
                for token, parent in zip(ids, parents, strict=True)
            ]
            right.append([int(flag) for flag in on_path])
            if planned is None:
                continue
            answer = self._token(row, place)
            for node, flag in enumerate(on_path):
                wrong = [(answer + 1 + offset) % self._vocab for offset in range(count)]
                if flag and frontier.depth < planned:
                    wrong.insert(min(self._rank, count - 1), answer)
                tokens[row, node] = torch.tensor(wrong[:count])
                log_probs[row, node] = scores
        self._right = right
        return Candidates(tokens=tokens.to(frontier.tokens.device), log_probs=log_probs.to(frontier.tokens.device))

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Moves on by the committed tokens."""
        self._lengths = [length + count for length, count in zip(self._lengths, counts.tolist(), strict=True)]

    def finish(self) -> None:
        """Nothing is remembered across requests."""

    def _token(self, row: int, place: int) -> int:
        reference = self._reference[row]
        return reference[place] if place < len(reference) else 0
