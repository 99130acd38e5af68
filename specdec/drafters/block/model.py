"""A block drafter's weights: the backbone, its heads, and what it owns of an embedding and an output head."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafters._borrowing import Borrower
from specdec.drafters.block.backbone import BlockBackbone
from specdec.drafters.block.context import BlockContext, require_context
from specdec.drafters.block.heads import CandidateSelector, ConfidenceHead, MarkovHead
from specdec.drafters.block.spec import BlockSpec
from specdec.drafters.shortlist import Shortlist
from specdec.errors import ShapeError, UnsupportedError
from specdec.ops._checks import require_whole, tensors, whole


class BlockModel(BlockBackbone, Borrower):
    """A DFlash, DFlash 2 or DSpark model. Parameters have the names of published checkpoints.

    Args:
        spec: what the drafter is.
        shortlist: the target's tokens that the output head has, if these are not all.

    Raises:
        UnsupportedError: if the shortlist is not that of the specification.

    Example:
        >>> import torch
        >>> from specdec.drafters.block import BlockModel, BlockSpec
        >>> from specdec.drafters.rope import Rope
        >>> spec = BlockSpec(
        ...     family="dflash", layout="fill_in", block_size=4, mask_token_id=0, feature_layers=(1, 2),
        ...     feature_size=16, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8,
        ...     vocab_size=50, draft_vocab_size=50, windows=(None,), causal=(False,), rope=Rope(1e4, 8),
        ...     own_embedding=True, own_head=True)
        >>> model = BlockModel(spec)
        >>> context = model.context(batch=1)
        >>> model.extend(context, features=torch.randn(1, 5, 32), counts=torch.tensor([5]))
        >>> hidden = model.slots(torch.tensor([7]), context, rows=4)
        >>> hidden.shape, model.logits(hidden).shape
        (torch.Size([1, 3, 16]), torch.Size([1, 3, 50]))
    """

    def __init__(self, spec: BlockSpec, shortlist: Shortlist | None = None) -> None:
        """Random weights; what is borrowed is missing until `borrow`."""
        super().__init__(spec)
        self._own(spec, shortlist)
        self.candidate_selector = CandidateSelector(spec) if spec.selector_rank else None
        self.markov_head = MarkovHead(spec) if spec.markov_rank else None
        extra = spec.markov_rank if spec.confidence == "hidden_token" else 0
        self.confidence_head = ConfidenceHead(spec.hidden_size + extra) if spec.confidence else None

    def context(self, batch: int = 1) -> BlockContext:
        """An empty context for a batch of so many texts; raises `UnsupportedError` for what is no such number."""
        require_whole("context", batch=batch)
        return BlockContext(self.spec.windows, batch, self.norm.weight.device)

    def slots(
        self, anchors: Int[Tensor, " batch"], context: BlockContext, rows: int
    ) -> Float[Tensor, "batch slots hidden"]:
        """Outputs of the slots that predict tokens, of one forward of `rows` rows.

        Args:
            anchors: last committed token of each row, whose features the context does not hold.
            context: the committed text before it.
            rows: the anchor and mask tokens.

        Raises:
            ShapeError: if there is no slot, or the batch is not that of the context; and for what is no context.
        """
        self.check_complete()
        tensors("slots", {"anchors": anchors})
        require_context("slots", context)
        if anchors.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"slots: anchors must be token ids, int64 or int32, got {anchors.dtype}.")
        if not whole(rows) or self.spec.slots(rows) < 1 or anchors.shape != context.lengths.shape:
            raise ShapeError(
                f"slots: anchors {list(anchors.shape)} and {rows!r} rows for a context of batch "
                f"{context.lengths.shape[0]}; expected as many anchors, and {self.spec.rows(1)} rows or more."
            )
        tokens = torch.full((anchors.shape[0], rows), self.spec.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        hidden: Tensor = self(self._embed(tokens, self.norm.weight) * self.spec.embedding_scale, context)
        return hidden[:, 1:] if self.spec.layout == "fill_in" else hidden

    def logits(self, hidden: Float[Tensor, "batch slots hidden"]) -> Float[Tensor, "batch slots vocab"]:
        """Logits of the slots before any of them knows the token before it."""
        self.check_complete()
        logits = self._project(hidden) * self.spec.output_multiplier
        return logits if self.spec.softcap is None else (logits / self.spec.softcap).tanh() * self.spec.softcap

    @property
    def marginal(self) -> bool:
        """Whether a slot proposes the same after every token."""
        return self.candidate_selector is None and self.markov_head is None

    def scores(
        self,
        hidden: Float[Tensor, "batch hidden"],
        logits: Float[Tensor, "batch vocab"],
        previous: Int[Tensor, "batch paths"],
        state: Float[Tensor, "batch paths markov"] | None = None,
    ) -> tuple[Int[Tensor, "batch paths rank"] | None, Float[Tensor, "batch paths rank"], Tensor | None]:
        """What one slot proposes after each of several tokens.

        Args:
            hidden: the slot's output.
            logits: its logits.
            previous: tokens that may stand before it.
            state: what this returned for the paths before those tokens; None at the anchor.

        Returns:
            Ids of the target (None for all, in order), their scores (a softmax gives the law), and the state of each
            path, which an `rnn` Markov head needs for the next slot.
        """
        kept = None if self.shortlist is None else self.shortlist.ids.to(logits.device)
        if self.candidate_selector is not None:
            tokens, scores = self.candidate_selector(hidden, logits, previous, kept)
            return tokens, scores, None
        scores, ids = logits[:, None].expand(-1, previous.shape[1], -1), None
        if self.markov_head is not None:
            bias, state = self.markov_head(hidden, previous, state)
            scores = scores + bias
        if kept is not None:
            ids = kept.expand(*scores.shape[:2], -1)
        return ids, scores, state

    def confidence(
        self, hidden: Float[Tensor, "batch hidden"], previous: Int[Tensor, "batch paths"]
    ) -> Float[Tensor, "batch paths"]:
        """Probability that the target accepts a slot's token, after each of several tokens before it.

        Raises:
            UnsupportedError: if the drafter has no confidence head.
        """
        if self.confidence_head is None:
            raise UnsupportedError("the drafter has no confidence head.")
        spread = hidden[:, None].expand(-1, previous.shape[1], -1)
        token = self.markov_head.markov_w1(previous) if self.spec.confidence == "hidden_token" else None  # type: ignore[union-attr]  # the spec demands it
        probability: Tensor = self.confidence_head(spread, token)
        return probability
