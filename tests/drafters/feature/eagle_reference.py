"""What an EAGLE-3 drafter must compute, the slow way: one text, float64, no cache, a loop over every row and head.

Covers EAGLE-3 in all published dialects, EAGLE-3.1 and P-EAGLE. Nothing here is shared with the library, so that a
test can compare the two. The reference knows tensors by their published names and a plain dictionary of settings:

    layers               per layer, the prefix of its tensors; only the first one sees embeddings
    heads, kv_heads, head_dim, eps, rope_theta
    rope_scaling         None, or the section of that name (types "linear" and "llama3")
    windows              per layer, the width of its sliding window or None
    window_from          "query": the window of a row ends at the row; "anchor": that of a drafted row ends at the last
                         row of the context
    window_drafted       whether the window also limits the keys of drafted rows and of the last row of the context
    features             how many hidden states of the target a feature joins
    fc_norm              a norm of its own for each of them (False)
    norm_before_fc       one norm over all of them (False)
    norm_before_residual the residual of the first layer is the normed hidden, not the hidden itself
    norm_output          a drafted row receives the output after the last norm, not before it (False)
    mask_token_id        P-EAGLE: the token of the rows whose token is not known
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Drafted:
    """What the drafter says after a text; its logits are over the draft vocabulary.

    Args:
        logits: of the first drafted token, the one after the anchor, [V_draft].
        target_ids: the id in the target's vocabulary of each id in the draft vocabulary, [V_draft].
    """

    logits: Tensor = field(init=False)
    target_ids: Tensor = field(init=False)
    _weights: dict[str, Tensor] = field(repr=False)
    _config: dict[str, Any] = field(repr=False)
    _hidden: Tensor = field(repr=False)
    _tokens: list[int] = field(repr=False)
    _embed: Tensor = field(repr=False)
    _head: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        self.target_ids = torch.arange(self._head.shape[0])
        if "d2t" in self._weights:
            self.target_ids = self.target_ids + self._weights["d2t"].long()
        self.logits = self.logits_after([])

    def logits_after(self, path: Sequence[int]) -> Tensor:
        """The logits of the token after `path`, drafted tokens that follow the anchor, as ids of the target.

        A drafted row pairs its token with the output of the row before it, where a row of the context has a feature.
        """
        hidden, tokens = self._hidden, list(self._tokens)
        for token in path:
            output = self._run(tokens, hidden)[-1]
            hidden = torch.cat([hidden, (self._norm(output) if self._config.get("norm_output") else output)[None]])
            tokens.append(token)
        return self._norm(self._run(tokens, hidden)[-1]) @ self._head.T

    def slots(self, count: int) -> Tensor:
        """P-EAGLE: the logits of `count` tokens after the anchor from a single pass, [count, V_draft]."""
        unknown = _project(self._weights, self._config, self._weights["mask_hidden"].view(1, -1))
        hidden = torch.cat([self._hidden] + [unknown] * (count - 1))
        tokens = self._tokens + [self._config["mask_token_id"]] * (count - 1)
        return self._norm(self._run(tokens, hidden)[-count:]) @ self._head.T

    def _norm(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self._weights["norm.weight"], self._config["eps"])

    def _run(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """The output of every row before the last norm, [rows, d]; row r stands at position r."""
        weights, config, x = self._weights, self._config, hidden
        embedding = self._embed[tokens]
        for layer, part in enumerate(config["layers"]):
            seen = _rms_norm(embedding if layer == 0 else x, weights[part + "input_layernorm.weight"], config["eps"])
            if layer == 0:
                normed = _rms_norm(x, weights[part + "hidden_norm.weight"], config["eps"])
                seen = torch.cat([seen, normed], 1)
                x = normed if config["norm_before_residual"] else x
            x = x + _attend(weights, config, layer, seen, len(self._hidden))
            normed = _rms_norm(x, weights[part + "post_attention_layernorm.weight"], config["eps"])
            x = x + _mlp(weights, part + "mlp.", normed)
        return x


def draft(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    features: Tensor,
    tokens: Sequence[int],
    *,
    embed: Tensor,
    head: Tensor,
) -> Drafted:
    """Read a text of n + 1 tokens; row r pairs the feature of position r with the token after it.

    Args:
        weights: the tensors of the checkpoint by their published names; those of an unused part are ignored.
        config: the settings described above.
        features: the target's chosen hidden states of positions 0 to n - 1, concatenated, [n, features * d_t].
        tokens: all of them; the last is the anchor, whose feature is not known yet.
        embed: the embedding of tokens, [V, d].
        head: the output matrix, [V_draft, d].
    """
    assert len(tokens) == len(features) + 1, "every token but the anchor has a feature"
    weights = {name: tensor.double() for name, tensor in weights.items()}
    hidden = _project(weights, config, features.double())
    return Drafted(weights, config, hidden, list(tokens[1:]), embed.double(), head.double())


def _project(weights: dict[str, Tensor], config: dict[str, Any], features: Tensor) -> Tensor:
    """The hidden that stands for a feature in the drafter."""
    if config.get("norm_before_fc"):
        features = _rms_norm(features, weights["input_norm.weight"], config["eps"])
    if config.get("fc_norm"):
        parts = enumerate(features.chunk(config["features"], 1))
        features = torch.cat([_rms_norm(x, weights[f"fc_norm.{i}.weight"], config["eps"]) for i, x in parts], 1)
    return _linear(weights, "fc", features)


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _mlp(weights: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    gate = _linear(weights, part + "gate_proj", x)
    return _linear(weights, part + "down_proj", gate * torch.sigmoid(gate) * _linear(weights, part + "up_proj", x))


def _visible(config: dict[str, Any], layer: int, query: int, key: int, context: int) -> bool:
    """Whether the row at position `query` sees the key at position `key`, drafted rows beginning at `context`."""
    if key > query:
        return False
    window = config["windows"][layer]
    if window is None or (key >= context - 1 and not config["window_drafted"]):
        return True
    end = {"query": query, "anchor": min(query, context - 1)}[config["window_from"]]
    return key > end - window


def _frequency(config: dict[str, Any], i: int) -> float:
    """How fast channel i turns, in radians per position."""
    frequency = config["rope_theta"] ** (-2 * i / config["head_dim"])
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return frequency
    slow = frequency / scaling["factor"]
    if kind == "linear":
        return slow
    assert kind == "llama3", f"unknown scaling {kind!r}"
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return share * frequency + (1 - share) * slow


def _rotate(x: Tensor, position: int, config: dict[str, Any]) -> Tensor:
    """RoPE of one head at one position: channel i turns with channel i + half."""
    half = config["head_dim"] // 2
    y = torch.empty_like(x)
    for i in range(half):
        angle = position * _frequency(config, i)
        cos, sin = math.cos(angle), math.sin(angle)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y


def _attend(weights: dict[str, Tensor], config: dict[str, Any], layer: int, x: Tensor, context: int) -> Tensor:
    part = config["layers"][layer] + "self_attn."
    heads, kv_heads, head_dim = config["heads"], config["kv_heads"], config["head_dim"]
    q = _linear(weights, part + "q_proj", x).view(-1, heads, head_dim)
    k = _linear(weights, part + "k_proj", x).view(-1, kv_heads, head_dim)
    v = _linear(weights, part + "v_proj", x).view(-1, kv_heads, head_dim)
    if part + "q_norm.weight" in weights:
        q = _rms_norm(q, weights[part + "q_norm.weight"], config["eps"])
        k = _rms_norm(k, weights[part + "k_norm.weight"], config["eps"])
    keys = [torch.stack([_rotate(k[i, h], i, config) for i in range(len(x))]) for h in range(kv_heads)]
    outputs = []
    for row in range(len(x)):
        seen = [key for key in range(len(x)) if _visible(config, layer, row, key, context)]
        output = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            scores = keys[shared][seen] @ _rotate(q[row, h], row, config) * head_dim**-0.5
            output.append(torch.softmax(scores, 0) @ v[seen, shared])
        outputs.append(torch.cat(output))
    return _linear(weights, part + "o_proj", torch.stack(outputs))
