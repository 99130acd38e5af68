"""EAGLE-3 and P-EAGLE: one or more decoder layers over pairs of a target state and the token after it.

Row r of a text pairs the target's states at position r with token r + 1 and predicts token r + 2. A drafted row has no
state of the target and takes its parent's output instead. Names of modules are those of speculators' checkpoints.
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters._borrowing import Borrower
from specdec.drafters._layers import MLP, RMSNorm
from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.feature.model import States
from specdec.drafters.feature.spec import EagleFamily, EagleSpec
from specdec.drafters.rope import rotate
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError


class EagleAttention(nn.Module):
    """Attention of rows to the rows before them; in the first layer they are as wide as an embedding and a state."""

    def __init__(self, spec: EagleSpec, layer: int) -> None:
        """The attention of one layer."""
        super().__init__()
        self.spec, self.layer, self.window = spec, layer, spec.windows[layer]
        wide, inner = spec.hidden_size * (2 if layer == 0 else 1), spec.num_heads * spec.head_dim
        narrow = spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(wide, inner, bias=spec.attention_bias)
        self.k_proj = nn.Linear(wide, narrow, bias=spec.attention_bias)
        self.v_proj = nn.Linear(wide, narrow, bias=spec.attention_bias)
        self.o_proj = nn.Linear(inner, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.head_norms else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.head_norms else nn.Identity()

    def forward(
        self, given: Float[Tensor, "batch rows wide"], rows: Rows, tables: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch rows hidden"]:
        """What the rows read.

        Args:
            given: the rows.
            rows: their places.
            tables: cosines and sines of their positions.
        """
        query, keys, values = (
            projection(given).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, keys = rotate(self.q_norm(query), tables), rotate(self.k_norm(keys), tables)
        keys, values = rows.cache.write(self.layer, rows, keys, values)
        mask = rows.mask(self.window)[:, None]
        read = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        output: Tensor = self.o_proj(read.transpose(1, 2).flatten(2))
        return output


class EagleLayer(nn.Module):
    """Attention and MLP; the first layer also sees the embeddings of the tokens."""

    def __init__(self, spec: EagleSpec, layer: int) -> None:
        """One layer."""
        super().__init__()
        self.spec = spec
        self.self_attn = EagleAttention(spec, layer)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if layer == 0 else None

    def forward(
        self,
        states: Float[Tensor, "batch rows hidden"],
        embedded: Float[Tensor, "batch rows hidden"],
        rows: Rows,
        tables: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "batch rows hidden"]:
        """The states after this layer."""
        if self.hidden_norm is None:
            given = self.input_layernorm(states)
        else:
            normed = self.hidden_norm(states)
            given = torch.cat([self.input_layernorm(embedded), normed], -1)
            states = normed if self.spec.norm_before_residual else states
        states = states + self.self_attn(given, rows, tables)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class EagleModel(nn.Module, Borrower):
    """What EAGLE-3 and P-EAGLE models have in common: all but how they draft.

    Args:
        spec: what the drafter is.
        shortlist: the target's tokens that the output head has, if these are not all.

    Raises:
        UnsupportedError: if the shortlist is not that of the specification.

    Example:
        >>> import torch
        >>> from specdec.drafters import Eagle3Model, EagleSpec, FeatureCache, Rope
        >>> spec = EagleSpec(
        ...     family="eagle3", feature_layers=(1, 2), feature_size=16, hidden_size=16, intermediate_size=32,
        ...     num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=50, draft_vocab_size=50, windows=(None,),
        ...     rope=Rope(1e4, 8), own_embedding=True)
        >>> model, cache = Eagle3Model(spec), FeatureCache(batch=1, device="cpu")
        >>> tokens, features = torch.tensor([[5, 6, 7]]), torch.randn(1, 3, 32)
        >>> states = model.committed(tokens, features, cache.chain(3), last=None)
        >>> model.logits(states.normed).shape
        torch.Size([1, 3, 50])
    """

    family: EagleFamily

    def __init__(self, spec: EagleSpec, shortlist: Shortlist | None = None) -> None:
        """Random weights; what is borrowed is missing until `borrow`."""
        super().__init__()
        if spec.family != self.family:
            raise UnsupportedError(
                f"{type(self).__name__} is made of a specification of {self.family}, not {spec.family}."
            )
        self.spec, count = spec, len(spec.feature_layers)
        self._own(spec, shortlist)
        self.fc = nn.Linear(count * spec.feature_size, spec.hidden_size, bias=False)
        norms = [RMSNorm(spec.feature_size, spec.rms_norm_eps) for _ in spec.feature_layers]
        self.fc_norm = nn.ModuleList(norms) if spec.fc_norm else None
        self.input_norm = RMSNorm(count * spec.feature_size, spec.rms_norm_eps) if spec.norm_before_fc else None
        self.layers = nn.ModuleList(EagleLayer(spec, layer) for layer in range(len(spec.windows)))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        masked = spec.mask_token_id is not None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features)) if masked else None

    @property
    def remembers(self) -> bool:
        """Rows read earlier ones."""
        return True

    def combine(self, features: Float[Tensor, "batch rows features"]) -> Float[Tensor, "batch rows hidden"]:
        """The target's states, side by side, as one state of the drafter."""
        features = features.to(self.fc.weight)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        combined: Tensor = self.fc(features)
        return combined

    def forward(
        self, tokens: Int[Tensor, "batch rows"], states: Float[Tensor, "batch rows hidden"], rows: Rows
    ) -> States:
        """Runs rows; their keys and values are written to the cache.

        Args:
            tokens: the token after each row's state.
            states: combined features, or what `States.fed` says of the row before.
            rows: their places.
        """
        embedded, tables = self._embed(tokens, states), self.spec.rope.tables(rows.positions, states.dtype)
        for layer in self.layers:
            states = layer(states, embedded, rows, tables)
        normed = self.norm(states)
        return States(normed=normed, fed=normed if self.spec.norm_output else states)

    def committed(
        self,
        tokens: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows features"],
        rows: Rows,
        last: States | None,
    ) -> States:
        """Runs committed tokens with the target's states."""
        return cast(States, self(tokens, self.combine(features), rows))

    def logits(self, normed: Float[Tensor, "batch rows hidden"]) -> Float[Tensor, "batch rows vocab"]:
        """Logits over the draft vocabulary."""
        return self._project(normed)


class Eagle3Model(EagleModel):
    """An EAGLE-3 model: each drafted row takes its parent's output."""

    family = "eagle3"

    def drafted(
        self,
        tokens: Int[Tensor, "batch rows"],
        parents: States,
        rows: Rows,
        depth: int,
    ) -> States:
        """Runs drafted tokens with their parents' outputs."""
        return cast(States, self(tokens, parents.fed, rows))


class PEagleModel(EagleModel):
    """A P-EAGLE model: rows of mask tokens behind the last committed one predict the later tokens."""

    family = "peagle"

    def slots(self, last: States, cache: FeatureCache, count: int) -> Float[Tensor, "batch slots vocab"]:
        """Logits of `count` tokens, of one forward over mask tokens."""
        batch, masks, normed = last.normed.shape[0], count - 1, [last.normed]
        if masks > 0:
            state = self.combine(cast(Tensor, self.mask_hidden)).expand(batch, masks, -1)
            tokens = torch.full((batch, masks), cast(int, self.spec.mask_token_id), device=state.device)
            normed.append(self(tokens, state, cache.chain(masks)).normed)
        return self.logits(torch.cat(normed, 1))


def eagle_model(spec: EagleSpec, shortlist: Shortlist | None = None) -> Eagle3Model | PEagleModel:
    """The model of a specification."""
    return (PEagleModel if spec.family == "peagle" else Eagle3Model)(spec, shortlist)
