"""A block drafter's weights: the backbone, its heads, and what it owns of an embedding and an output head."""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters.block.backbone import BlockBackbone
from specdec.drafters.block.context import BlockContext
from specdec.drafters.block.heads import CandidateSelector, ConfidenceHead, MarkovHead
from specdec.drafters.block.spec import BlockSpec
from specdec.errors import UnsupportedError

Rows = Callable[[Tensor], Tensor]
"""An embedding (ids to rows) or an output head (rows to logits)."""


class BlockModel(BlockBackbone):
    """A DFlash, DFlash 2 or DSpark model. Parameters have the names of published checkpoints.

    Args:
        spec: what the drafter is.

    Example:
        >>> import torch
        >>> from specdec.drafters.block import BlockContext, BlockModel, BlockSpec
        >>> from specdec.drafters.rope import Rope
        >>> spec = BlockSpec(
        ...     family="dflash", layout="fill_in", block_size=4, mask_token_id=0, feature_layers=(1, 2),
        ...     feature_size=16, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8,
        ...     vocab_size=50, draft_vocab_size=50, windows=(None,), causal=(False,), rope=Rope(1e4, 8),
        ...     own_embedding=True, own_head=True)
        >>> model, context = BlockModel(spec), BlockContext([None], batch=1, device="cpu")
        >>> model.extend(context, features=torch.randn(1, 5, 32), counts=torch.tensor([5]))
        >>> hidden = model.slots(torch.tensor([7]), context, rows=4)
        >>> hidden.shape, model.logits(hidden).shape
        (torch.Size([1, 3, 16]), torch.Size([1, 3, 50]))
    """

    def __init__(self, spec: BlockSpec) -> None:
        """Random weights; what is borrowed is missing until `borrow`."""
        super().__init__(spec)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if spec.own_embedding else None
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False) if spec.own_head else None
        self.candidate_selector = CandidateSelector(spec) if spec.selector_rank else None
        self.markov_head = MarkovHead(spec) if spec.markov_rank else None
        extra = spec.markov_rank if spec.confidence == "hidden_token" else 0
        self.confidence_head = ConfidenceHead(spec.hidden_size + extra) if spec.confidence else None
        self._borrowed: dict[str, Rows] = {}

    def borrow(self, *, embedding: Rows | None = None, head: Rows | None = None) -> None:
        """Takes an embedding, or an output head, of somebody else. They are called, not copied, and not registered."""
        found = {"embedding": embedding, "head": head}
        self._borrowed |= {name: given for name, given in found.items() if given is not None}

    def _part(self, name: str, own: nn.Module | None) -> Rows:
        if own is None and name not in self._borrowed:
            raise UnsupportedError(f"the drafter has no {name} of its own; pass the target's: borrow({name}=...).")
        return cast(Rows, own) if own is not None else self._borrowed[name]

    def slots(
        self, anchors: Int[Tensor, " batch"], context: BlockContext, rows: int
    ) -> Float[Tensor, "batch slots hidden"]:
        """Outputs of the slots that predict tokens, of one forward of `rows` rows.

        Args:
            anchors: last committed token of each row, whose features the context does not hold.
            context: the committed text before it.
            rows: the anchor and mask tokens.
        """
        tokens = torch.full((anchors.shape[0], rows), self.spec.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        embedded = self._part("embedding", self.embed_tokens)(tokens) * self.spec.embedding_scale
        hidden: Tensor = self(embedded.to(self.norm.weight.dtype), context)
        return hidden[:, 1:] if self.spec.layout == "fill_in" else hidden

    def logits(self, hidden: Float[Tensor, "batch slots hidden"]) -> Float[Tensor, "batch slots vocab"]:
        """Logits of the slots before any of them knows the token before it."""
        logits = self._part("head", self.lm_head)(hidden) * self.spec.output_multiplier
        return logits if self.spec.softcap is None else (logits / self.spec.softcap).tanh() * self.spec.softcap

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
