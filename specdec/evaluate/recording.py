"""What a recording holds: the texts, where rounds began in them, and what the drafter answered there.

A drafter's answer about a node depends on the committed tokens and the path to the node, not on the tree that is
grown from it. So answers outlive the tree: any deterministic builder can be run on them again. And under the
target-only rule the text does not depend on the tree either, so what a tree would have won is where it agrees with the
text that is there.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.evaluate import _file
from specdec.types import Candidates, Frontier


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a drafter said about the nodes of one frontier.

    Attributes:
        frontier: the nodes it was asked about; parents count within the answer before, as in the round.
        candidates: its proposals, all of them; never its whole law.
        asked: proposals per node that it was asked for. It may have had fewer.
    """

    frontier: Frontier
    candidates: Candidates
    asked: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRound:
    """One round of a request, from the roots to what was committed.

    Attributes:
        positions: place of each row's root in its text.
        limits: deepest node that was allowed, per row; zeros in a round that drafted nothing.
        committed: tokens that were committed, per row; 0 for rows that had stopped.
        budget: tree budget that was asked for; 0 in a round that drafted nothing.
        answers: level by level, and tree by tree where more than one was grown: a frontier of depth 0 begins a tree.
            The last tree is the one that was verified.
    """

    positions: Int[Tensor, " batch"]
    limits: Int[Tensor, " batch"]
    committed: Int[Tensor, " batch"]
    budget: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequest:
    """One request: its final texts and its rounds, from the first one that drafted on.

    Attributes:
        texts: prompt and output of each row, padding of the prompt left out; -1 after the end.
        rounds: the rounds, in order.
        nodes: tree budget of the builder that the request ran with.
        vocab_size: number of the target's logits.
        marginal: whether the drafter's answers depend on the depth of a node alone.
    """

    texts: Int[Tensor, "batch seq"]
    rounds: tuple[RecordedRound, ...]
    nodes: int
    vocab_size: int
    marginal: bool

    def roots(self, round: RecordedRound) -> Int[Tensor, " batch"]:
        """Token at which a round began, per row."""
        return self.texts.gather(1, round.positions[:, None]).squeeze(1)

    def ahead(self, round: RecordedRound, count: int) -> Int[Tensor, "batch count"]:
        """The `count` tokens that came after the roots of a round; -1 beyond the end of the text."""
        padded = torch.nn.functional.pad(self.texts, (0, count), value=-1)
        return padded.gather(1, round.positions[:, None] + torch.arange(1, count + 1))


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Recorded requests. `first + second` joins two recordings, `save` and `load` keep one in a file.

    Attributes:
        requests: in the order in which they were recorded.

    Example:
        >>> import tempfile
        >>> from specdec.evaluate import Recording
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Recording().save(f"{folder}/nothing.safetensors")
        ...     Recording.load(f"{folder}/nothing.safetensors") + Recording()
        <Recording: 0 requests, 0 rounds>
    """

    requests: tuple[RecordedRequest, ...] = ()

    def __add__(self, other: "Recording") -> "Recording":
        return Recording(self.requests + other.requests)

    def __repr__(self) -> str:
        return f"<Recording: {len(self.requests)} requests, {len(self.rounds)} rounds>"

    @property
    def rounds(self) -> tuple[RecordedRound, ...]:
        """The rounds of all requests."""
        return tuple(round for request in self.requests for round in request.rounds)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that were committed per recorded round and row, as it happened; 0 without rounds."""
        counts = [count for round in self.rounds for count in round.committed.tolist() if count]
        return sum(counts) / len(counts) if counts else 0.0

    def save(self, path: str | Path) -> None:
        """Writes the recording as one safetensors file; numbers keep their precision."""
        writer = _file.Writer()
        for request in self.requests:
            batch, seq = request.texts.shape
            writer.row("requests", batch, seq, len(request.rounds), request.nodes, request.vocab_size, request.marginal)
            writer.put("texts", request.texts)
            for round in request.rounds:
                writer.row("rounds", round.budget, len(round.answers))
                for name in ("positions", "limits", "committed"):
                    writer.put(name, getattr(round, name))
                for answer in round.answers:
                    frontier, candidates = answer.frontier, answer.candidates
                    dtype = _file.DTYPES.index(candidates.log_probs.dtype)
                    writer.row("answers", frontier.depth, answer.asked, *candidates.tokens.shape[1:], dtype)
                    writer.put("nodes", torch.stack([frontier.tokens, frontier.parents, frontier.valid], 1))
                    writer.put("proposals", candidates.tokens)
                    writer.put("log_probs", candidates.log_probs)
        writer.write(path)

    @staticmethod
    def load(path: str | Path) -> "Recording":
        """Reads what `save` wrote.

        Raises:
            UnsupportedError: if the file is no recording, or one of another version.
        """
        reader = _file.Reader(path)

        def answer(batch: int) -> Answer:
            depth, asked, nodes, ranks, dtype = reader.row("answers")
            tokens, parents, valid = reader.take("nodes", batch, 3, nodes).unbind(1)
            return Answer(
                frontier=Frontier(tokens, parents, valid.bool(), depth),
                candidates=Candidates(
                    tokens=reader.take("proposals", batch, nodes, ranks),
                    log_probs=reader.take("log_probs", batch, nodes, ranks).to(_file.DTYPES[dtype]),
                ),
                asked=asked,
            )

        def round(batch: int) -> RecordedRound:
            budget, answers = reader.row("rounds")
            positions, limits, committed = (reader.take(name, batch) for name in ("positions", "limits", "committed"))
            return RecordedRound(
                positions, limits, committed, budget, answers=tuple(answer(batch) for _ in range(answers))
            )

        def request() -> RecordedRequest:
            batch, seq, rounds, nodes, vocab_size, marginal = reader.row("requests")
            texts = reader.take("texts", batch, seq)
            return RecordedRequest(
                texts, tuple(round(batch) for _ in range(rounds)), nodes, vocab_size, marginal=bool(marginal)
            )

        return Recording(tuple(request() for _ in range(reader.rows("requests"))))
