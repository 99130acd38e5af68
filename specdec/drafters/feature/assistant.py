"""The Gemma 4 assistant: layers without keys of their own, which read what the target's layers have computed.

A token's row is made of its embedding and the state before it, the target's for the root and the assistant's own after
it. It attends to the target's keys and values of the committed text, in the last layer of each type that computes them,
and to nothing that was drafted; all rows stand at the root's position. A draft therefore leaves nothing behind.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters._borrowing import Borrower
from specdec.drafters._layers import RMSNorm
from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.feature.model import States
from specdec.drafters.rope import Rope, rotate
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSpec:
    """A Gemma 4 assistant.

    Attributes:
        feature_layers: the target's last state.
        feature_size: its width.
        hidden_size: width of the assistant.
        intermediate_size: width of its MLPs.
        num_heads: query heads.
        kinds: per layer, the type of the target's layer whose keys it reads.
        head_dims: per layer, dimension of a head.
        ropes: per layer, rotary embedding.
        window: a sliding layer reads keys closer than this to the root's position.
        vocab_size: ids of the target.
        draft_vocab_size: tokens that are drafted; all of them.
        rms_norm_eps: of all norms.
        num_centroids: groups of tokens of a centroid head, all of one size; 0 for none.
        chosen_centroids: groups whose tokens get logits.
        own_head: the output head is the assistant's.
        separate_head: whether it is another matrix than the assistant's own embedding.
        depth: tokens that are drafted where the caller does not say.

    Raises:
        UnsupportedError: for numbers that contradict each other, named.
    """

    feature_layers: tuple[int, ...]
    feature_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    kinds: tuple[str, ...]
    head_dims: tuple[int, ...]
    ropes: tuple[Rope, ...]
    window: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    num_centroids: int = 0
    chosen_centroids: int = 0
    own_embedding: bool = False
    own_head: bool = True
    separate_head: bool = False
    depth: int = 4

    def __post_init__(self) -> None:
        groups, chosen = self.num_centroids, self.chosen_centroids
        demands = [
            (f"it has no layers (kinds {self.kinds})", len(self.kinds) == len(self.head_dims) == len(self.ropes) > 0),
            (
                f"kinds {self.kinds} must be full_attention or sliding_attention",
                not set(self.kinds) - {"full_attention", "sliding_attention"},
            ),
            (f"sliding_window {self.window} must be above 0", self.window > 0),
            (
                f"{groups} centroids must divide {self.vocab_size} tokens, and {chosen} of them be chosen",
                groups == 0 or (self.vocab_size % groups == 0 and 0 < chosen <= groups),
            ),
        ]
        wrong = next((text for text, holds in demands if not holds), None)
        if wrong is not None:
            raise UnsupportedError(f"Gemma 4 assistant: {wrong}.")

    @property
    def family(self) -> str:
        """For messages."""
        return "gemma4_assistant"

    @property
    def longest(self) -> int | None:
        """Most tokens that can be drafted: any number."""
        return None


class AssistantLayer(nn.Module):
    """Attention to the target's keys, and a gated MLP; a norm before and after each."""

    def __init__(self, spec: AssistantSpec, layer: int) -> None:
        """Random weights."""
        super().__init__()
        self.kind, self.head_dim, self.rope = spec.kinds[layer], spec.head_dims[layer], spec.ropes[layer]
        self.window = spec.window if self.kind == "sliding_attention" else None
        size, inner = spec.hidden_size, spec.num_heads * self.head_dim

        def norm(width: int = size) -> RMSNorm:
            return RMSNorm(width, spec.rms_norm_eps)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(size, inner, bias=False),
                "q_norm": norm(self.head_dim),
                "o_proj": nn.Linear(inner, size, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, spec.intermediate_size, bias=False),
                "up_proj": nn.Linear(size, spec.intermediate_size, bias=False),
                "down_proj": nn.Linear(spec.intermediate_size, size, bias=False),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, states: Float[Tensor, "batch rows hidden"], cache: FeatureCache
    ) -> Float[Tensor, "batch rows hidden"]:
        """The states after this layer."""
        states = states + self.post_attention_layernorm(self._attend(self.input_layernorm(states), cache))
        normed, mlp = self.pre_feedforward_layernorm(states), self.mlp
        gate = nn.functional.gelu(mlp["gate_proj"](normed), approximate="tanh")
        output: Tensor = self.post_feedforward_layernorm(mlp["down_proj"](gate * mlp["up_proj"](normed)))
        return (states + output) * self.layer_scalar

    def _attend(self, normed: Tensor, cache: FeatureCache) -> Tensor:
        """What the rows read of the committed text; scores are not scaled."""
        text = cache.target_rows(self.kind, normed)
        query = self.self_attn["q_proj"](normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        position = text.next[:, None]
        query = rotate(self.self_attn["q_norm"](query), self.rope.tables(position, normed.dtype))
        seen = text.real
        if self.window is not None:
            seen = seen & (text.next[:, None] - text.positions < self.window)
        read = nn.functional.scaled_dot_product_attention(
            query, text.keys, text.values, attn_mask=seen[:, None, None], scale=1.0, enable_gqa=True
        )
        output: Tensor = self.self_attn["o_proj"](read.transpose(1, 2).flatten(2))
        return output


class CentroidHead(nn.Module):
    """Which groups of tokens get logits: those whose centroids are nearest."""

    def __init__(self, spec: AssistantSpec) -> None:
        """Random weights."""
        super().__init__()
        self.chosen = spec.chosen_centroids
        self.centroids = nn.Linear(spec.hidden_size, spec.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(spec.vocab_size))

    def forward(self, normed: Float[Tensor, "batch rows hidden"]) -> Int[Tensor, "batch rows chosen"]:
        """The tokens of the chosen groups."""
        best = self.centroids(normed).topk(self.chosen, dim=-1).indices
        groups = cast(Tensor, self.token_ordering).view(self.centroids.out_features, -1)
        return groups[best].flatten(-2)


class AssistantModel(nn.Module, Borrower):
    """A Gemma 4 assistant. Parameters have the names of transformers' `Gemma4AssistantForCausalLM`.

    Args:
        spec: what it is.
        shortlist: must be None: a centroid head is a shortlist of its own.
    """

    def __init__(self, spec: AssistantSpec, shortlist: Shortlist | None = None) -> None:
        """Random weights; the target's embedding is missing until `borrow`."""
        super().__init__()
        if shortlist is not None:
            raise UnsupportedError("a Gemma 4 assistant takes no shortlist.")
        self.spec, self.shortlist = spec, None
        self._sizes, self._borrowed = (spec.vocab_size, spec.feature_size), {}
        self.pre_projection = nn.Linear(2 * spec.feature_size, spec.hidden_size, bias=False)
        self.post_projection = nn.Linear(spec.hidden_size, spec.feature_size, bias=False)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(spec.vocab_size, spec.hidden_size),
                "layers": nn.ModuleList(AssistantLayer(spec, layer) for layer in range(len(spec.kinds))),
                "norm": RMSNorm(spec.hidden_size, spec.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False) if spec.separate_head else None
        self.masked_embedding = CentroidHead(spec) if spec.num_centroids else None

    @property
    def remembers(self) -> bool:
        """Rows read the target's cache, not each other."""
        return False

    def borrow(self, target: Any) -> "AssistantModel":
        """Takes the target's embedding, with the scale that the target gives it; returns the model.

        Raises:
            UnsupportedError: if its size is not the one that the assistant was made for, or its groups of tokens are
                none.
        """
        module = target.get_input_embeddings()
        if tuple(module.weight.shape) != self._sizes:
            raise UnsupportedError(
                f"the assistant borrows an embedding of {self._sizes[0]} x {self._sizes[1]}, the target's is "
                f"{' x '.join(map(str, module.weight.shape))}."
            )
        order = None if self.masked_embedding is None else cast(Tensor, self.masked_embedding.token_ordering)
        if order is not None and not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise UnsupportedError("masked_embedding.token_ordering does not hold each token once.")
        self._borrowed = {"embedding": lambda tokens: module(tokens.to(module.weight.device))}
        return self

    def check_complete(self) -> None:
        """Raises `UnsupportedError` if the target's embedding was not borrowed."""
        if not self._borrowed:
            raise UnsupportedError("the assistant has no embedding of the target; take it: model.borrow(target).")

    def _run(self, tokens: Tensor, states: Tensor, rows: Rows) -> States:
        embedded = self._borrowed["embedding"](tokens).to(states)
        hidden = self.pre_projection(torch.cat([embedded, states], -1))
        for layer in cast(nn.ModuleList, self.model["layers"]):
            hidden = layer(hidden, rows.cache)
        normed = self.model["norm"](hidden)
        return States(normed=normed, fed=self.post_projection(normed))

    def committed(
        self,
        tokens: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows features"],
        rows: Rows,
        last: States | None,
    ) -> States:
        """Runs the root with the target's last state."""
        return self._run(tokens, features, rows)

    def drafted(
        self,
        tokens: Int[Tensor, "batch rows"],
        parents: States,
        rows: Rows,
        depth: int,
    ) -> States:
        """Runs drafted tokens with their parents' states."""
        return self._run(tokens, parents.fed, rows)

    def logits(self, normed: Float[Tensor, "batch rows hidden"]) -> Float[Tensor, "batch rows vocab"]:
        """Logits; of tokens that a centroid head does not look at, -inf."""
        head = cast(nn.Linear, self.lm_head or self.model["embed_tokens"])
        logits = nn.functional.linear(normed, head.weight)
        if self.masked_embedding is None:
            return logits
        kept = self.masked_embedding(normed)
        return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
