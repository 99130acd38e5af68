"""What a block drafter is, in one explicit description that every published format is translated into."""

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.drafters.rope import Rope
from specdec.errors import UnsupportedError

Family = Literal["dflash", "dflash2", "dspark"]
Layout = Literal["fill_in", "anchor_first"]
WindowRule = Literal["query", "anchor"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A block drafter: shapes, slots, visibility, heads.

    Attributes:
        family: DFlash (arXiv 2602.06036), DFlash 2, or DSpark (arXiv 2607.05147).
        layout: which slot predicts which token. `fill_in`: the slot at a position predicts the token at that position,
            so the anchor's slot predicts nothing. `anchor_first`: each slot predicts the token after it.
        block_size: rows of a draft forward that the drafter was trained with, the anchor included.
        mask_token_id: token that fills the slots after the anchor.
        feature_layers: target states that it reads, as indices into `hidden_states` (0 is the embedding).
        feature_size: width of one of them.
        hidden_size: width of the drafter.
        intermediate_size: width of its MLPs.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: dimension of a head.
        vocab_size: rows of the embedding; ids of the target.
        draft_vocab_size: rows of the output head.
        windows: sliding window of each layer, None for full attention.
        causal: per layer, whether a slot is kept from seeing later slots of the block.
        window_from: `query`: a slot sees positions closer than the window; `anchor`: committed positions from the
            anchor's minus the window on, for all slots.
        rms_norm_eps: of all norms.
        rope: rotary embedding.
        attention_bias: whether the projections of attention have biases.
        sinks: whether each head has a logit that takes part in its softmax without a value.
        value_scale: factor on values.
        embedding_scale: factor on embeddings.
        output_multiplier: factor on logits, before the soft cap.
        softcap: bound of the logits, None for none.
        own_embedding: whether the embedding is the drafter's; else it is the target's.
        own_head: the same for the output head.
        conv_kernel_size: taps of the dynamic convolution; 0 for none.
        conv_group_size: channels that share a tap's dynamic part.
        selector_rank: rank of the candidate selector; 0 for none.
        selector_top_k: candidates that it scores.
        markov_rank: rank of the Markov head; 0 for none.
        markov_kind: its form.
        confidence: what the confidence head reads; None for none.

    Raises:
        UnsupportedError: for numbers that contradict each other, named.
    """

    family: Family
    layout: Layout
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    feature_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    window_from: WindowRule = "query"
    rms_norm_eps: float = 1e-6
    rope: Rope
    attention_bias: bool = False
    sinks: bool = False
    value_scale: float = 1.0
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    own_embedding: bool = False
    own_head: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence: Literal["hidden", "hidden_token"] | None = None

    def __post_init__(self) -> None:
        wrong = next((text for text, holds in self._demands() if not holds), None)
        if wrong is not None:
            raise UnsupportedError(f"block drafter: {wrong}.")

    def _demands(self) -> list[tuple[str, bool]]:
        layers = len(self.windows)
        return [
            (f"family {self.family!r} must be {', '.join(get_args(Family))}", self.family in get_args(Family)),
            (f"layout {self.layout!r} must be {' or '.join(get_args(Layout))}", self.layout in get_args(Layout)),
            (f"window_from {self.window_from!r} must be query or anchor", self.window_from in get_args(WindowRule)),
            (
                f"markov_kind {self.markov_kind!r} must be {', '.join(get_args(MarkovKind))}",
                self.markov_kind in get_args(MarkovKind),
            ),
            (
                f"confidence {self.confidence!r} must be hidden, hidden_token or None",
                self.confidence in ("hidden", "hidden_token", None),
            ),
            (
                f"selector_rank {self.selector_rank} and markov_rank {self.markov_rank} do not belong to {self.family}",
                (self.selector_rank > 0) == (self.family == "dflash2")
                and (self.markov_rank == 0 or self.family == "dspark"),
            ),
            (
                f"rope turns {self.rope.dim} numbers of heads of {self.head_dim}",
                self.rope.dim <= self.head_dim,
            ),
            (f"block_size {self.block_size} leaves no slot to draft", self.slots(self.block_size) >= 1),
            (
                f"windows has an entry for {layers} layers, causal for {len(self.causal)}",
                len(self.causal) == layers > 0,
            ),
            (
                f"windows {self.windows} must be None or above 0",
                all(window is None or window > 0 for window in self.windows),
            ),
            (f"it reads no features (feature_layers {self.feature_layers})", len(self.feature_layers) > 0),
            (f"feature_layers {self.feature_layers} must not be negative", min(self.feature_layers, default=0) >= 0),
            (
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads",
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            ),
            (
                f"mask_token_id {self.mask_token_id} is no row of an embedding of {self.vocab_size}",
                0 <= self.mask_token_id < self.vocab_size,
            ),
            (
                f"draft_vocab_size {self.draft_vocab_size} must be 1 to {self.vocab_size}",
                0 < self.draft_vocab_size <= self.vocab_size,
            ),
            (
                f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}",
                self.conv_kernel_size == 0 or self.hidden_size % self.conv_group_size == 0,
            ),
            (
                f"selector_top_k {self.selector_top_k} must be 1 to {self.draft_vocab_size}",
                self.selector_rank == 0 or 0 < self.selector_top_k <= self.draft_vocab_size,
            ),
            (
                "an rnn Markov head needs slots that predict the token after them (anchor_first)",
                self.markov_rank == 0 or self.markov_kind != "rnn" or self.layout == "anchor_first",
            ),
            (
                "confidence 'hidden_token' needs a Markov head (markov_rank above 0)",
                self.confidence != "hidden_token" or self.markov_rank > 0,
            ),
        ]

    def slots(self, rows: int) -> int:
        """Tokens that a draft forward of so many rows predicts."""
        return rows - 1 if self.layout == "fill_in" else rows

    def rows(self, slots: int) -> int:
        """Rows of the draft forward that predicts so many tokens."""
        return slots + 1 if self.layout == "fill_in" else slots
