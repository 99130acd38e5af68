"""A block drafter's weights: the backbone, its heads, and what it owns of an embedding and an output head."""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters.block.backbone import BlockBackbone
from specdec.drafters.block.context import BlockContext
from specdec.drafters.block.heads import CandidateSelector, ConfidenceHead, MarkovHead
from specdec.drafters.block.spec import BlockSpec
from specdec.drafters.shortlist import Shortlist
from specdec.errors import ShapeError, UnsupportedError

Rows = Callable[[Tensor], Tensor]
"""An embedding (ids to rows) or an output head (rows to logits)."""


class BlockModel(BlockBackbone):
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
        found = (spec.vocab_size, spec.vocab_size) if shortlist is None else (len(shortlist.ids), shortlist.vocab_size)
        if found != (spec.draft_vocab_size, spec.vocab_size):
            raise UnsupportedError(
                f"BlockModel: the head has {spec.draft_vocab_size} of {spec.vocab_size} tokens; pass a shortlist of as "
                f"many, got {found[0]} of {found[1]}."
            )
        self.shortlist = shortlist
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if spec.own_embedding else None
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False) if spec.own_head else None
        self.candidate_selector = CandidateSelector(spec) if spec.selector_rank else None
        self.markov_head = MarkovHead(spec) if spec.markov_rank else None
        extra = spec.markov_rank if spec.confidence == "hidden_token" else 0
        self.confidence_head = ConfidenceHead(spec.hidden_size + extra) if spec.confidence else None
        self._borrowed: dict[str, Rows] = {}

    def borrow(self, target: Any) -> "BlockModel":
        """Takes from a target what the drafter has not of its own, its embedding and output head; returns the model.

        They are used where they are: not copied (the rows of a shortlist excepted), not registered, in their own dtype.

        Args:
            target: a model with `get_input_embeddings` and `get_output_embeddings`.

        Raises:
            UnsupportedError: if their sizes are not those that the drafter needs.
        """
        spec, head = self.spec, target.get_output_embeddings()
        embedding = target.get_input_embeddings().weight
        for name, own, found, rows in (
            ("an embedding", self.embed_tokens, embedding, spec.vocab_size),
            ("an output head", self.lm_head, head.weight, spec.vocab_size),
        ):
            if own is None and tuple(found.shape) != (rows, spec.hidden_size):
                raise UnsupportedError(
                    f"the drafter borrows {name} of {rows} x {spec.hidden_size}, the target's is "
                    f"{' x '.join(map(str, found.shape))}."
                )

        def embed(tokens: Tensor) -> Tensor:
            return nn.functional.embedding(tokens.to(embedding.device), embedding)  # some models' own modules scale

        kept = None if self.shortlist is None else self.shortlist.ids.to(head.weight.device)
        rows_of_list = None if kept is None or self.lm_head is not None else head.weight.detach()[kept]

        def project(hidden: Tensor) -> Tensor:
            hidden, place = hidden.to(head.weight), hidden.device
            logits = head(hidden) if rows_of_list is None else nn.functional.linear(hidden, rows_of_list)
            return cast(Tensor, logits.to(place))

        self._borrowed = {"embedding": embed, "output head": project}
        return self

    def check_complete(self) -> None:
        """Raises `UnsupportedError` if something is neither the drafter's own nor borrowed."""
        for name, own in (("embedding", self.embed_tokens), ("output head", self.lm_head)):
            if own is None and name not in self._borrowed:
                raise UnsupportedError(
                    f"the drafter has no {name} of its own; take the target's: model.borrow(target)."
                )

    def context(self, batch: int = 1) -> BlockContext:
        """An empty context for texts of so many rows."""
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
            ShapeError: if there is no slot, or the batch is not that of the context.
        """
        self.check_complete()
        if self.spec.slots(rows) < 1 or anchors.shape != context.lengths.shape:
            raise ShapeError(
                f"slots: anchors {list(anchors.shape)} and {rows} rows for a context of batch "
                f"{context.lengths.shape[0]}; expected as many anchors, and {self.spec.rows(1)} rows or more."
            )
        tokens = torch.full((anchors.shape[0], rows), self.spec.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        embed: Rows = self.embed_tokens or self._borrowed["embedding"]
        hidden: Tensor = self((embed(tokens) * self.spec.embedding_scale).to(self.norm.weight), context)
        return hidden[:, 1:] if self.spec.layout == "fill_in" else hidden

    def logits(self, hidden: Float[Tensor, "batch slots hidden"]) -> Float[Tensor, "batch slots vocab"]:
        """Logits of the slots before any of them knows the token before it."""
        self.check_complete()
        logits = (self.lm_head or self._borrowed["output head"])(hidden) * self.spec.output_multiplier
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
