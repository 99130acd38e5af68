"""Records rounds while they run: stands in a request for its drafter and for its tree builder.

The drafter's place shows the answers and the committed tokens, the builder's place how deep a tree was allowed to be.
Tensors are kept where they are until the request ends; nothing is read from a device before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafters import BlockDrafter, FeatureDrafter, Parallel
from specdec.errors import SpecdecError, UnsupportedError
from specdec.evaluate.recording import Answer, RecordedRequest, RecordedRound, Recording
from specdec.protocols import DraftContext, Drafter, TreeBuilder
from specdec.types import Candidates, DraftTree, Frontier


@dataclass(slots=True)
class _Draft:
    """A round before it is committed."""

    limits: Int[Tensor, " batch"]
    budget: int
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    """A request that is running: its text at the start, and what each round drafted and committed."""

    tokens: Int[Tensor, "batch seq"]
    mask: Tensor
    vocab_size: int
    rounds: list[tuple[_Draft | None, Tensor, Tensor]] = field(default_factory=list)


class Recorder:
    """A drafter and a tree builder in one object that remembers what passes through: give it as both.

    The rounds are those of the drafter and the tree that it was given. Only the drafter's work changes: it is asked for
    at least `top` proposals per node, of which the builder sees as many as it asked for, and for the trees of `also`.
    (A drafter whose best proposals depend on how many it is asked for, as `CombinedDrafter` scales its scores by their
    sum, then drafts a little differently than without; the replay is of what it did.)

    A replay can expand a node only if a recorded tree expanded it. `BestFirst(nodes)` covers its own smaller budgets;
    what reaches elsewhere (another temperature, a limit on branches, a long chain) is named in `also`.

    Args:
        drafter: answers.
        tree: grows the trees that are verified. They must be deterministic, and the request's verifier must be
            `verify.TargetOnly` (the default for such trees): the text then does not depend on the drafts.
        top: proposals per node to record, at least.
        also: builders whose trees are grown in every round too, at their full budget, and not verified. The time that
            this takes is counted as drafting.
        marginal: whether the drafter's answers depend on the depth of a node alone, so that one node of a level can be
            answered for by another. None tells it of a `BlockDrafter` by itself, and is False for others.

    Raises:
        UnsupportedError: for a builder that draws its trees at random, or a `top` below 1.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, drafters, evaluate, trees
        >>> from specdec.testing import tiny_model
        >>> recorder = evaluate.Recorder(drafters.PromptLookupDrafter(), trees.Chain(4))
        >>> generator = SpeculativeGenerator(tiny_model("llama"), drafter=recorder, tree=recorder)
        >>> ids = generator.generate(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=12, do_sample=False)
        >>> recorder.recording.tokens_per_round
        1.1
    """

    def __init__(
        self,
        drafter: Drafter,
        tree: TreeBuilder,
        *,
        top: int = 16,
        also: Sequence[TreeBuilder] = (),
        marginal: bool | None = None,
    ) -> None:
        """Remembers the parts; has recorded nothing."""
        for builder in (tree, *also):
            if builder.sampled:
                raise UnsupportedError(
                    f"{builder!r} draws its trees, and what is accepted of a draw cannot be told from the text: record "
                    "with a deterministic builder (Chain, BestFirst, Fixed)."
                )
        if top < 1:
            raise UnsupportedError(f"Recorder: top is a number of proposals per node, 1 or more, got {top}.")
        if marginal and isinstance(drafter, FeatureDrafter) and not _is_marginal(drafter):
            raise UnsupportedError(f"Recorder: marginal=True, but the answers of {drafter!r} depend on the path.")
        self.drafter, self.tree, self.top, self.also = drafter, tree, top, tuple(also)
        self.marginal = _is_marginal(drafter) if marginal is None else marginal
        self._finished: list[RecordedRequest] = []
        self._request: _Request | None = None
        self._draft: _Draft | None = None

    def __repr__(self) -> str:
        return f"<Recorder: {type(self.drafter).__name__}, {self.tree!r}, {self.recording!r}>"

    @property
    def recording(self) -> Recording:
        """What was recorded: all requests that have ended."""
        return Recording(tuple(self._finished))

    # ------------------------------------------------------------------------------------------ in the drafter's place

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """As the drafter's."""
        return self.drafter.feature_layers

    def start(self, context: DraftContext) -> None:
        """Begins a request."""
        self._request = self._draft = None
        self.drafter.start(context)
        self._request = _Request(context.tokens, context.mask, context.vocab_size)

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The drafter's proposals, of which `count` are handed on and all are remembered."""
        if self._draft is None or self._request is None:
            raise SpecdecError("a Recorder is a drafter and a tree in one: pass it as drafter= and as tree=.")
        asked = max(count, min(self.top, self._request.vocab_size))
        found = self.drafter.children(frontier, asked)
        self._draft.answers.append(Answer(frontier, replace(found, probs=None), asked))
        return replace(found, tokens=found.tokens[..., :count], log_probs=found.log_probs[..., :count])

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Remembers what was committed, and tells the drafter."""
        if self._request is not None:
            self._request.rounds.append((self._draft, tokens, counts))
        self._draft = None
        self.drafter.commit(tokens, counts, features)

    def finish(self) -> None:
        """Ends the request, whose rounds now count as recorded; a round that was not committed is dropped."""
        request, self._request, self._draft = self._request, None, None
        self.drafter.finish()
        if request is not None and request.rounds:
            self._finished.append(_close(request, self.tree.nodes, self.marginal))

    # ---------------------------------------------------------------------------------------------- in the tree's place

    @property
    def nodes(self) -> int:
        """As the tree's."""
        return self.tree.nodes

    @property
    def sampled(self) -> bool:
        """False."""
        return False

    @property
    def chain(self) -> bool:
        """As the tree's."""
        return self.tree.chain

    def grow(
        self,
        drafter: Drafter,
        root: Int[Tensor, " batch"],
        limits: Int[Tensor, " batch"],
        budget: int,
        *,
        vocab_size: int,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """Grows the trees that are only recorded, then the tree of the round.

        Args:
            drafter: this recorder, as the loop hands it on.
            root: last committed token per row.
            limits: deepest node per row.
            budget: tree budget of the round.
            vocab_size: number of the target's logits.
            generator: handed on.
        """
        if self._request is None:
            raise SpecdecError("a Recorder is a drafter and a tree in one: pass it as drafter= and as tree=.")
        self._draft = _Draft(limits, budget)
        for builder in self.also:
            builder.grow(drafter, root, limits, builder.nodes, vocab_size=vocab_size, generator=generator)
        return self.tree.grow(drafter, root, limits, budget, vocab_size=vocab_size, generator=generator)


def _is_marginal(drafter: Drafter) -> bool:
    # A confidence head may end a path for the token before it.
    if isinstance(drafter, FeatureDrafter):
        return isinstance(drafter.model, Parallel)
    return isinstance(drafter, BlockDrafter) and drafter.model.marginal and drafter.model.confidence_head is None


def _close(request: _Request, nodes: int, marginal: bool) -> RecordedRequest:
    """A request that ended, on the host."""
    texts = [row[real].tolist() for row, real in zip(request.tokens.cpu(), request.mask.cpu(), strict=True)]
    rounds = []
    for draft, tokens, counts in request.rounds:
        positions = torch.tensor([len(text) - 1 for text in texts])
        committed = counts.cpu()
        rounds.append(
            RecordedRound(
                positions=positions,
                limits=torch.zeros_like(positions) if draft is None else draft.limits.cpu(),
                committed=committed,
                budget=0 if draft is None else draft.budget,
                answers=() if draft is None else tuple(map(_to_host, draft.answers)),
            )
        )
        for text, new, count in zip(texts, tokens.tolist(), committed.tolist(), strict=True):
            text += new[:count]
    longest = max(map(len, texts))
    padded = torch.tensor([text + [-1] * (longest - len(text)) for text in texts])
    return RecordedRequest(padded, tuple(rounds), nodes, request.vocab_size, marginal)


def _to_host(answer: Answer) -> Answer:
    frontier, candidates = answer.frontier, answer.candidates
    return Answer(
        frontier=Frontier(frontier.tokens.cpu(), frontier.parents.cpu(), frontier.valid.cpu(), frontier.depth),
        candidates=Candidates(candidates.tokens.cpu(), candidates.log_probs.cpu()),
        asked=answer.asked,
    )
