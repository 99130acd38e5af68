"""What a Gemma 4 assistant must compute, the slow way: one text, float64, a loop over every head.

The assistant drafts one token after another from one position. Its layers have queries only: they read keys and values
that layers of the target have already computed, and write none, so a draft leaves nothing behind. Nothing here is
shared with the library, so that a test can compare the two. The reference knows tensors by their published names and a
plain dictionary of settings:

    kinds                per layer, "sliding_attention" or "full_attention": whose keys and values it reads
    heads, eps           of all layers; the number of key/value heads is the target's
    rope                 per kind, (theta, turning): `turning` pairs of channels turn, the others do not
    window               the width of the sliding window
    position             "anchor": every query stands at the anchor's position n; "last": at n - 1
    window_from          "rows": the last window + 1 keys are seen; "position": |query - key| < window
    chosen_centroids     how many groups of tokens have logits; None without a centroid head

Published code differs in the last three. transformers: "anchor" and "rows". vLLM and SGLang: "last" and "position".
mlx-vlm and llama.cpp: "anchor" and "position".
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Drafted:
    """What an assistant says after one committed text.

    Args:
        logits: about the token after the anchor, [V]; -inf where a centroid head does not look.
    """

    logits: Tensor
    _weights: dict[str, Tensor] = field(repr=False)
    _config: dict[str, Any] = field(repr=False)
    _shared: dict[str, tuple[Tensor, Tensor]] = field(repr=False)
    _hidden: Tensor = field(repr=False)
    _anchor: int = field(repr=False)
    _embed: Tensor = field(repr=False)

    def logits_after(self, path: list[int]) -> Tensor:
        """The logits of the token after the anchor and a path of drafted tokens, [V]."""
        tokens = [self._anchor, *path]
        return _logits(self._weights, self._config, self._shared, self._hidden, tokens, self._embed)


def draft(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    shared: dict[str, tuple[Tensor, Tensor]],
    hidden: Tensor,
    anchor: int,
    *,
    embed: Tensor,
) -> Drafted:
    """Everything that an assistant can say after one committed text.

    Args:
        weights: the tensors of the checkpoint by their published names.
        config: the settings described above.
        shared: per kind, the keys and values of positions 0 to n - 1 of the last layer of that kind that computes its
            own, as its attention uses them (normed, keys turned), [n, kv_heads, head_dim] each; n >= 1.
        hidden: the target's last hidden state, after its final norm, at position n - 1, [d_t].
        anchor: the token at position n, the last one that the target has chosen.
        embed: the target's embedding of tokens as its first layer gets it, scaled, [V, d_t].
    """
    weights = {n: tensor.double() if tensor.is_floating_point() else tensor for n, tensor in weights.items()}
    shared = {kind: (keys.double(), values.double()) for kind, (keys, values) in shared.items()}
    hidden, embed = hidden.double(), embed.double()
    logits = _logits(weights, config, shared, hidden, [anchor], embed)
    return Drafted(logits, weights, config, shared, hidden, anchor, embed)


def _logits(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    shared: dict[str, tuple[Tensor, Tensor]],
    hidden: Tensor,
    tokens: list[int],
    embed: Tensor,
) -> Tensor:
    """The logits that follow the last of `tokens`: one forward for each of them, always at the same position."""
    state = hidden
    for token in tokens:
        x = weights["pre_projection.weight"] @ torch.cat([embed[token], state])
        for layer in range(len(config["kinds"])):
            x = _layer(weights, config, layer, shared, x)
        x = _norm(weights, config, "model.norm", x)
        state = weights["post_projection.weight"] @ x
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = head @ x
    if config["chosen_centroids"] is None:
        return logits
    scores = weights["masked_embedding.centroids.weight"] @ x
    groups = weights["masked_embedding.token_ordering"].view(len(scores), -1)
    chosen = groups[torch.topk(scores, config["chosen_centroids"]).indices].flatten()
    return torch.full_like(logits, -torch.inf).index_copy(0, chosen, logits[chosen])


def _layer(
    weights: dict[str, Tensor], config: dict[str, Any], layer: int, shared: dict[str, tuple[Tensor, Tensor]], x: Tensor
) -> Tensor:
    part = f"model.layers.{layer}."
    y = _attend(weights, config, layer, shared, _norm(weights, config, part + "input_layernorm", x))
    x = x + _norm(weights, config, part + "post_attention_layernorm", y)
    y = _norm(weights, config, part + "pre_feedforward_layernorm", x)
    gate = torch.nn.functional.gelu(weights[part + "mlp.gate_proj.weight"] @ y, approximate="tanh")
    y = weights[part + "mlp.down_proj.weight"] @ (gate * (weights[part + "mlp.up_proj.weight"] @ y))
    return (x + _norm(weights, config, part + "post_feedforward_layernorm", y)) * weights[part + "layer_scalar"]


def _attend(
    weights: dict[str, Tensor], config: dict[str, Any], layer: int, shared: dict[str, tuple[Tensor, Tensor]], x: Tensor
) -> Tensor:
    """Attention of the one query over the target's keys; scores are not scaled."""
    part, kind, heads = f"model.layers.{layer}.self_attn.", config["kinds"][layer], config["heads"]
    keys, values = shared[kind]
    n, kv_heads, _ = keys.shape
    position = {"anchor": n, "last": n - 1}[config["position"]]
    seen = [key for key in range(n) if kind == "full_attention" or _in_window(config, position, key, n)]
    q = _norm(weights, config, part + "q_norm", (weights[part + "q_proj.weight"] @ x).view(heads, -1))
    outputs = []
    for h in range(heads):
        kv_head = h // (heads // kv_heads)
        scores = keys[seen, kv_head] @ _rotate(q[h], position, *config["rope"][kind])
        outputs.append(torch.softmax(scores, 0) @ values[seen, kv_head])
    return weights[part + "o_proj.weight"] @ torch.cat(outputs)


def _in_window(config: dict[str, Any], position: int, key: int, n: int) -> bool:
    if config["window_from"] == "rows":
        return key >= n - 1 - config["window"]
    assert config["window_from"] == "position", f"unknown window_from {config['window_from']!r}"
    return abs(position - key) < config["window"]


def _norm(weights: dict[str, Tensor], config: dict[str, Any], name: str, x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["eps"]) * weights[name + ".weight"]


def _rotate(x: Tensor, position: int, theta: float, turning: int) -> Tensor:
    """RoPE of one head: channel i turns with channel i + half, the first `turning` of them."""
    half = x.shape[0] // 2
    y = x.clone()
    for i in range(turning):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        cos, sin = torch.cos(angle), torch.sin(angle)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y
