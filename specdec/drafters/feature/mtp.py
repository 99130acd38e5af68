"""Heads for multi-token prediction: decoder layers of the target's own kind over its last state and the next token.

Such a layer is built from the target's classes, so attention, experts and rotary embedding are what the target has.
Row t of the first module pairs the target's last state at t (after its final norm) with token t + 1 and predicts token
t + 2. With one module, a drafted row takes its parent's output as state. With several (DeepSeek-V3), module i pairs the
output of module i - 1 with the next token: row t of it belongs to token t + 1 + i. Here a row is named by its token, so
that a token's rows stand at one place in all modules, and module i has nothing to read before place i.
"""

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters._borrowing import Borrower
from specdec.drafters.feature.cache import Rows
from specdec.drafters.feature.model import States
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPSpec:
    """Heads for multi-token prediction.

    Attributes:
        feature_layers: the target's last state.
        feature_size: its width.
        hidden_size: the same.
        vocab_size: ids of the target.
        draft_vocab_size: tokens that are drafted.
        style: `qwen`: one projection and norms for all modules; `deepseek`: each module has its own.
        modules: modules; above 1 they take turns and draft as many tokens, no more.
        first_layer: number of the first module's layer.
        hidden_first: whether the projection reads the state before the embedding.
        depth: tokens that are drafted where the caller does not say.

    Raises:
        UnsupportedError: for numbers that contradict each other, named.
    """

    feature_layers: tuple[int, ...]
    feature_size: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    style: Literal["qwen", "deepseek"]
    modules: int = 1
    first_layer: int = 0
    hidden_first: bool = False
    depth: int = 3
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self) -> None:
        if self.modules < 1 or self.depth < 1:
            raise UnsupportedError(f"MTP head: modules {self.modules} and depth {self.depth} must be 1 or more.")
        if self.modules > 1 and self.depth > self.modules:
            raise UnsupportedError(f"MTP head: {self.modules} modules draft no {self.depth} tokens (depth).")

    @property
    def family(self) -> str:
        """For messages."""
        return "mtp"

    @property
    def longest(self) -> int | None:
        """Most tokens that can be drafted."""
        return self.modules if self.modules > 1 else None


class MTPModule(nn.Module):
    """One layer of the target's kind, with norms and a projection before it and a norm behind it."""

    def __init__(self, spec: MTPSpec, number: int, decoder: Any) -> None:
        """Random weights.

        Args:
            spec: the head.
            number: of the module.
            decoder: the target's decoder.
        """
        super().__init__()
        self.number, self.hidden_first = number, spec.hidden_first
        config = copy.deepcopy(decoder.config)
        config._attn_implementation = "sdpa"  # takes any mask
        index = spec.first_layer + number
        if spec.style == "qwen":
            config.layer_types, config.num_hidden_layers = ["full_attention"] * (index + 1), index + 1

        def norm() -> nn.Module:
            made: nn.Module = type(decoder.norm)(spec.hidden_size, eps=config.rms_norm_eps)
            return made

        self.layer = type(decoder.layers[-1])(config, index)
        self.layer.self_attn.layer_idx = number
        self.embedding_norm, self.state_norm, self.norm = norm(), norm(), norm()
        self.projection = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        names = inspect.signature(self.layer.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def forward(
        self,
        embedded: Float[Tensor, "batch rows hidden"],
        states: Float[Tensor, "batch rows hidden"],
        tables: tuple[Tensor, Tensor],
        rows: Rows,
    ) -> Float[Tensor, "batch rows hidden"]:
        """Normed outputs of rows.

        Args:
            embedded: the tokens.
            states: what they are paired with.
            tables: cosines and sines of their places.
            rows: their places.
        """
        pair = self.embedding_norm(embedded), self.state_norm(states)
        given = self.projection(torch.cat(pair[::-1] if self.hidden_first else pair, -1))
        output = self.layer(
            given,
            position_embeddings=tables,
            position_ids=rows.positions,
            attention_mask=rows.mask(first=self.number)[:, None],
            **{self.cache_name: _Writer(rows)},
        )
        normed: Tensor = self.norm(output[0] if isinstance(output, tuple) else output)
        return normed


class _Writer:
    """The rows' cache as a layer of transformers sees it."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes new rows, returns all of them."""
        return self._rows.cache.write(layer, self._rows, keys, values)


class MTPModel(nn.Module, Borrower):
    """A target's heads for multi-token prediction.

    Args:
        spec: what they are.
        decoder: the target's decoder, whose classes are used; nothing of it is changed.
        shortlist: the target's tokens to draft from, if these are not all.
    """

    def __init__(self, spec: MTPSpec, decoder: Any, shortlist: Shortlist | None = None) -> None:
        """Random weights; embedding and output head are missing until `borrow`."""
        super().__init__()
        self.spec = spec
        self._own(spec, shortlist)
        self.modules_ = nn.ModuleList(MTPModule(spec, number, decoder) for number in range(spec.modules))
        self._rotary = [decoder.rotary_emb]  # the target's, not a part of this module

    @property
    def remembers(self) -> bool:
        """Rows read earlier ones."""
        return True

    def _run(self, module: int, tokens: Tensor, states: Tensor, rows: Rows) -> Tensor:
        embedded, tables = self._embed(tokens, states), self._rotary[0](states, rows.positions)
        output: Tensor = self.modules_[module](embedded, states, tables, rows)
        return output

    def committed(
        self,
        tokens: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows features"],
        rows: Rows,
        last: States | None,
    ) -> States:
        """Runs committed tokens through all modules; each reads what the one before it said of the token before."""
        states, outputs = features, list[Tensor]()
        for number in range(len(self.modules_)):
            if number > 0:
                first = torch.zeros_like(states[:, :1])  # of a text: reads nothing, and is not read
                before = first if last is None else last.fed.chunk(len(self.modules_), -1)[number - 1]
                states = torch.cat([before, states[:, :-1]], 1)
            states = self._run(number, tokens, states, rows)
            outputs.append(states)
        return States(normed=outputs[0], fed=torch.cat(outputs, -1))

    def drafted(self, tokens: Int[Tensor, "batch rows"], parents: States, rows: Rows, depth: int) -> States:
        """Runs drafted tokens; the module whose turn it is predicts the next one."""
        if len(self.modules_) == 1:
            output = self._run(0, tokens, parents.fed, rows)
            return States(normed=output, fed=output)
        fed = list(parents.fed.chunk(len(self.modules_), -1))
        # A token this deep has no rows in earlier modules: those would need states of the target that are not there.
        outputs = fed[:depth] + [
            self._run(number, tokens, fed[number - 1], rows) for number in range(depth, len(self.modules_))
        ]
        return States(normed=outputs[depth], fed=torch.cat(outputs, -1))

    def logits(self, normed: Float[Tensor, "batch rows hidden"]) -> Float[Tensor, "batch rows vocab"]:
        """Logits over the draft vocabulary."""
        return self._project(normed)


def decoder_of(target: Any) -> Any:
    """The part of a model that holds its layers, its rotary embedding and its last norm."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.model
    decoder = getattr(decoder, "language_model", decoder)
    if not all(hasattr(decoder, name) for name in ("layers", "rotary_emb", "norm")):
        raise UnsupportedError(f"{type(target).__name__} has no layers, rotary_emb and norm to make an MTP head of.")
    return decoder
