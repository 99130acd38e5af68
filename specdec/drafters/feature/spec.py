"""What an EAGLE-3 drafter is, in one explicit description that every published format is translated into."""

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.drafters.rope import Rope
from specdec.errors import UnsupportedError

EagleFamily = Literal["eagle3", "peagle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """An EAGLE-3 drafter (arXiv 2503.01840), with the options of EAGLE-3.1, or a P-EAGLE drafter.

    Attributes:
        family: `eagle3` drafts a token per forward; `peagle` all of them in one, from mask tokens.
        feature_layers: target states that it reads, as indices into `hidden_states` (0 is the embedding).
        feature_size: width of one of them.
        hidden_size: width of the drafter.
        intermediate_size: width of its MLPs.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: dimension of a head.
        vocab_size: rows of the embedding; ids of the target.
        draft_vocab_size: rows of the output head.
        windows: sliding window of each layer, None for full attention: a row sees positions closer than the window.
        rms_norm_eps: of all norms.
        rope: rotary embedding.
        attention_bias: whether the projections of attention have biases.
        head_norms: whether queries and keys are normed.
        norm_before_residual: whether the first layer's residual is the normed state, not the state itself.
        norm_output: whether a drafted row receives its parent's output after the last norm (EAGLE-3.1).
        fc_norm: a norm for each state that is read (EAGLE-3.1).
        norm_before_fc: one norm over all of them.
        depth: tokens that a path was trained to draft; deeper ones may be asked for.
        mask_token_id: token of rows whose token is not known; P-EAGLE alone.
        own_embedding: whether the embedding is the drafter's; else it is the target's.
        own_head: the same for the output head.

    Raises:
        UnsupportedError: for numbers that contradict each other, named.
    """

    family: EagleFamily
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
    rms_norm_eps: float = 1e-6
    rope: Rope
    attention_bias: bool = False
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    depth: int = 7
    mask_token_id: int | None = None
    own_embedding: bool = False
    own_head: bool = True

    def __post_init__(self) -> None:
        wrong = next((text for text, holds in self._demands() if not holds), None)
        if wrong is not None:
            raise UnsupportedError(f"EAGLE drafter: {wrong}.")

    def _demands(self) -> list[tuple[str, bool]]:
        masked = self.mask_token_id is not None
        return [
            (
                f"family {self.family!r} must be {' or '.join(get_args(EagleFamily))}",
                self.family in get_args(EagleFamily),
            ),
            (f"it reads no features (feature_layers {self.feature_layers})", len(self.feature_layers) > 0),
            (f"feature_layers {self.feature_layers} must not be negative", min(self.feature_layers, default=0) >= 0),
            ("it has no layers (windows is empty)", len(self.windows) > 0),
            (
                f"windows {self.windows} must be None or above 0",
                all(window is None or window > 0 for window in self.windows),
            ),
            (
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads",
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            ),
            (f"rope turns {self.rope.dim} numbers of heads of {self.head_dim}", self.rope.dim <= self.head_dim),
            (
                f"draft_vocab_size {self.draft_vocab_size} must be 1 to {self.vocab_size}",
                0 < self.draft_vocab_size <= self.vocab_size,
            ),
            ("fc_norm and norm_before_fc exclude each other", not (self.fc_norm and self.norm_before_fc)),
            (f"depth {self.depth} must be 1 or more", self.depth >= 1),
            (
                f"mask_token_id {self.mask_token_id} does not belong to {self.family}",
                masked == (self.family == "peagle"),
            ),
            (
                f"mask_token_id {self.mask_token_id} is no row of an embedding of {self.vocab_size}",
                self.mask_token_id is None or 0 <= self.mask_token_id < self.vocab_size,
            ),
        ]

    @property
    def longest(self) -> int | None:
        """Most tokens that can be drafted: any number."""
        return None
