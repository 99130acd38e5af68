"""Drafts whole blocks from the target's features: one forward a round, whatever the shape of the tree.

The slots of a block are computed once, at the root. A tree then asks for the children of its nodes level by level:
level d of the tree is slot d of the block. Which tokens a slot proposes depends on the node with a selector or a Markov
head, and is the same for all nodes of a level without. After a round the features of what was committed become context;
nothing of the block itself is kept.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafters._committed import Doubt, check_options, committed_text
from specdec.drafters._proposals import candidates, log_law, nothing, spread
from specdec.drafters.block.context import BlockContext
from specdec.drafters.block.model import BlockModel
from specdec.drafters.shortlist import Shortlist
from specdec.errors import SpecdecError, UnsupportedError
from specdec.protocols import DraftContext
from specdec.types import Candidates, Frontier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Block:
    """The slots of one round, and the Markov states of the nodes that were asked about last."""

    hidden: Float[Tensor, "batch slots hidden"]
    logits: Float[Tensor, "batch slots vocab"]
    states: Float[Tensor, "batch frontier rank"] | None = None


class BlockDrafter:
    """Drafts with a DFlash, DFlash 2 or DSpark model.

    Args:
        model: the model, with an embedding and an output head of its own or borrowed.
        length: most tokens that a block drafts; None drafts as many as the model was trained for. Other lengths are
            served too; in a drafter whose slots see later ones they change every proposal.
        temperature: of the draft law; None follows the request (1 when it is greedy).
        least_confidence: probability of acceptance below which a confidence head ends a path; None never asks it.
            The head reads a slot and the token before it, not what is drafted there, so all verifiers stay lossless.

    Raises:
        UnsupportedError: for bad arguments, or a confidence of a model without such a head.

    Example:
        >>> from specdec import drafters
        >>> drafter = drafters.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", target)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        length: int | None = None,
        temperature: float | None = None,
        least_confidence: float | None = None,
    ) -> None:
        """Remembers the model; runs nothing."""
        given: Any = model
        if not isinstance(given, BlockModel):
            raise UnsupportedError(f"BlockDrafter: model must be a BlockModel, got {type(given).__name__}.")
        check_options("BlockDrafter", length, temperature)
        spec = model.spec
        if least_confidence is not None and (model.confidence_head is None or not 0 <= least_confidence <= 1):
            raise UnsupportedError(
                f"BlockDrafter: least_confidence={least_confidence} must be from 0 to 1, of a model with a confidence "
                f"head; this one {'has one' if model.confidence_head is not None else 'has none'}."
            )
        self.least_confidence = least_confidence
        self.model, self.length = model.eval(), length or spec.slots(spec.block_size)
        self.temperature = temperature
        self._context: BlockContext | None = None
        self._block: _Block | None = None
        self._doubt = Doubt(logger)

    def __repr__(self) -> str:
        spec = self.model.spec
        return f"<BlockDrafter: {spec.family}, {len(spec.windows)} layers, drafts {self.length} tokens>"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target states that the drafter reads."""
        return self.model.spec.feature_layers

    @property
    def shortlist(self) -> Shortlist | None:
        """The target's tokens that can be drafted; None for all."""
        return self.model.shortlist

    def start(self, context: DraftContext) -> None:
        """Turns the features of the committed text into context.

        Raises:
            UnsupportedError: if there are no features, or the target's tokens are not the drafter's.
        """
        text = committed_text(context, self.model.spec, self)
        self.model.check_complete()
        self._device = context.tokens.device
        self._temperature = self.temperature or context.temperature or 1.0
        self._context = self.model.context(context.tokens.shape[0])
        self._extend(text.features, text.counts)
        self._block = None

    @torch.no_grad()
    def _extend(self, features: Float[Tensor, "batch rows features"], counts: Int[Tensor, " batch"]) -> None:
        weight = self.model.norm.weight
        self.model.extend(self._started(), features.to(weight), counts)

    @torch.no_grad()
    def children(self, frontier: Frontier, count: int) -> Candidates:
        """Proposals of one slot for each node of a level; the block is computed at the root."""
        device = self.model.norm.weight.device
        if frontier.depth == 0:
            hidden = self.model.slots(
                frontier.tokens[:, 0].to(device), self._started(), self.model.spec.rows(self.length)
            )
            self._block = _Block(hidden, self.model.logits(hidden))
        block = self._block
        if block is None:
            raise SpecdecError("BlockDrafter was asked for a later level first; a round begins at the root.")
        if frontier.depth >= self.length:
            return nothing(frontier.tokens)
        slot, states = frontier.depth, block.states
        if states is not None:
            parents = frontier.parents.to(device).clamp_min(0)
            states = states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[-1]))
        previous = frontier.tokens.to(device)
        if self.model.marginal and self.least_confidence is None:
            previous = previous[:, :1]  # one law for all nodes
        ids, scores, block.states = self.model.scores(block.hidden[:, slot], block.logits[:, slot], previous, states)
        log_probs = log_law(scores, self._temperature)
        if self.least_confidence is not None:
            unsure = self.model.confidence(block.hidden[:, slot], previous) < self.least_confidence
            log_probs = log_probs.masked_fill(unsure[..., None], -torch.inf)
        found = candidates(log_probs, ids, count, self.model.spec.vocab_size, self._device)
        return spread(found, frontier.tokens.shape[1])

    def confidence(self, frontier: Frontier) -> Float[Tensor, "batch frontier"]:
        """Probability that the target accepts the child of each node, as a DSpark confidence head tells it.

        Raises:
            UnsupportedError: if the model has none.
        """
        if self._block is None or not frontier.depth < self.length:
            raise SpecdecError(
                "BlockDrafter.confidence tells about slots of a block; ask for the root's children first."
            )
        device = self.model.norm.weight.device
        hidden = self._block.hidden[:, frontier.depth]
        return self.model.confidence(hidden, frontier.tokens.to(device)).to(self._device)

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Appends the features of what was committed; the block is forgotten."""
        if features is None:
            raise UnsupportedError(f"{self!r} reads the target's features; commit() was given none.")
        kept = counts.cpu()  # the one thing that is read back
        self._extend(features, kept)
        if self._block is not None:
            self._doubt.judge(self, kept)
        self._block = None

    def finish(self) -> None:
        """Drops the request's context."""
        self._context = self._block = None

    def _started(self) -> BlockContext:
        if self._context is None:
            raise SpecdecError("BlockDrafter was called outside a request; call start(context) first.")
        return self._context
