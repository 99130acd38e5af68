"""What a block drafter must compute, the slow way: one text, float64, no cache, a loop over every row and head.

Covers DFlash, DFlash 2 and DSpark. Nothing here is shared with the library, so that a test can compare the two.
The reference knows tensors by their published names and a plain dictionary of settings:

    mask_token_id, heads, kv_heads, head_dim, eps, rope_theta
    windows              per layer, the width of its sliding window or None
    causal               per layer, whether a row of the block sees only earlier rows of it
    window_from          "query": |query - key| < window for every key; "anchor": a key of the context is seen from
                         position context - window on, and keys of the block are not limited
    layout               "fill_in": row i >= 1 predicts the token at its own position; "anchor_first": row k predicts
                         the token after its own position
    value_scale, embedding_scale, output_multiplier      factors of values, block inputs and logits (1.0)
    softcap                                              logits become softcap * tanh(logits / softcap) (None)
    conv_kernel_size, conv_group_size, selector_top_k    DFlash 2
    markov_kind          None, "vanilla", "gated" or "rnn"
    confidence           None, "hidden" or "hidden_token"
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Drafted:
    """The outputs of one draft forward; slot s is the s-th token that it predicts.

    Args:
        hidden: the normed output of each slot, [slots, d].
        logits: what each slot says about its token before it knows the token before it, [slots, V_draft].
    """

    hidden: Tensor
    logits: Tensor
    _weights: dict[str, Tensor] = field(repr=False)
    _config: dict[str, Any] = field(repr=False)

    def selector_scores(self, slot: int, previous_token: int) -> tuple[Tensor, Tensor]:
        """DFlash 2: the candidates of a slot, best unary logit first, and their scores after `previous_token`."""
        unary, candidates = torch.topk(self.logits[slot], self._config["selector_top_k"])
        g = self._weights["candidate_selector.hidden_projection.weight"] @ self.hidden[slot]
        before = self._weights["candidate_selector.predecessor_codebook"][previous_token]
        scores = []
        for logit, candidate in zip(unary, candidates.tolist(), strict=True):
            after = self._weights["candidate_selector.successor_codebook"][candidate]
            scores.append(logit + (before * g * after).sum())
        return candidates, torch.stack(scores)

    def markov_logits(self, slot: int, path: list[int]) -> Tensor:
        """DSpark: the logits of a slot after `path`, the anchor and the tokens chosen for the slots before it."""
        assert len(path) == slot + 1, "the path holds the anchor and one token for every earlier slot"
        kind = self._config.get("markov_kind")
        if kind is None:
            return self.logits[slot]
        w1 = self._weights["markov_head.markov_w1.weight"]
        w2 = self._weights["markov_head.markov_w2.weight"]
        token = w1[path[slot]]
        if kind == "vanilla":
            return self.logits[slot] + w2 @ token
        if kind == "gated":
            gate = torch.sigmoid(_linear(self._weights, "markov_head.gate_proj", torch.cat([self.hidden[slot], token])))
            return self.logits[slot] + w2 @ (gate * token)
        assert kind == "rnn", f"unknown markov head {kind!r}"
        rank = w1.shape[1]
        state, output = torch.zeros(rank, dtype=torch.float64), torch.zeros(rank, dtype=torch.float64)
        for step in range(slot + 1):
            seen = torch.cat([state, w1[path[step]], self.hidden[step]])
            joint = _linear(self._weights, "markov_head.joint_proj", seen)
            gate, candidate = torch.sigmoid(joint[:rank]), torch.tanh(joint[rank : 2 * rank])
            state, output = gate * state + (1 - gate) * candidate, torch.tanh(joint[2 * rank :])
        return self.logits[slot] + w2 @ output

    def confidence(self, slot: int, previous_token: int) -> float:
        """DSpark: how sure the drafter is that the target accepts the token of a slot, given the ones before it."""
        kind = self._config.get("confidence")
        assert kind in ("hidden", "hidden_token"), "this drafter has no confidence head"
        seen = self.hidden[slot]
        if kind == "hidden_token":
            seen = torch.cat([seen, self._weights["markov_head.markov_w1.weight"][previous_token]])
        return torch.sigmoid(_linear(self._weights, "confidence_head.proj", seen)).item()


def draft(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    features: Tensor,
    anchor: int,
    *,
    rows: int,
    embed: Tensor,
    head: Tensor,
) -> Drafted:
    """One draft forward for one text.

    Args:
        weights: the tensors of the checkpoint by their published names; those of an unused part are ignored.
        config: the settings described above.
        features: the target's chosen hidden states of positions 0 to context - 1, concatenated, [context, m * d_t].
        anchor: the token at position `context`, the last one that the target has chosen.
        rows: inputs of the block, [anchor, mask, mask, ...], at positions context, context + 1, ...
        embed: the embedding of the block's inputs, [V, d].
        head: the output matrix, [V_draft, d].
    """
    weights = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
    positions = list(range(features.shape[0] + rows))
    context = _rms_norm(_linear(weights, "fc", features.double()), weights["hidden_norm.weight"], config["eps"])
    tokens = [anchor] + [config["mask_token_id"]] * (rows - 1)
    x = embed.double()[tokens] * config.get("embedding_scale", 1.0)
    for layer in range(len(config["windows"])):
        part = f"layers.{layer}."
        normed = _rms_norm(x, weights[part + "input_layernorm.weight"], config["eps"])
        taps = _kernels(weights, config, part + "attention_conv", normed)
        y = _attend(weights, config, layer, context, _convolve(normed, taps, 0), positions)
        x = x + _convolve(y, taps, 1)
        normed = _rms_norm(x, weights[part + "post_attention_layernorm.weight"], config["eps"])
        taps = _kernels(weights, config, part + "mlp_conv", normed)
        y = _mlp(weights, part + "mlp.", _convolve(normed, taps, 0))
        x = x + _convolve(y, taps, 1)
    x = _rms_norm(x, weights["norm.weight"], config["eps"])
    hidden = {"fill_in": x[1:], "anchor_first": x}[config["layout"]]
    logits = hidden @ head.double().T * config.get("output_multiplier", 1.0)
    softcap = config.get("softcap")
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return Drafted(hidden, logits, weights, config)


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _mlp(weights: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    gate = _linear(weights, part + "gate_proj", x)
    return _linear(weights, part + "down_proj", gate * torch.sigmoid(gate) * _linear(weights, part + "up_proj", x))


def _kernels(weights: dict[str, Tensor], config: dict[str, Any], name: str, normed: Tensor) -> Tensor | None:
    """The factor of every channel of every row for each side and tap, [rows, sides, taps, d]; None without conv."""
    if name + ".base_kernel" not in weights:
        return None
    base = weights[name + ".base_kernel"]
    rows, d = normed.shape
    taps, group = config["conv_kernel_size"], config["conv_group_size"]
    groups = d // group
    dynamic = _linear(weights, name + ".kernel_projection", normed)
    kernels = torch.empty(rows, 2, taps, d, dtype=torch.float64)
    for row in range(rows):
        for side in range(2):
            for tap in range(taps):
                first = (side * taps + tap) * groups
                shared = dynamic[row, first : first + groups]  # one number for the channels of a group
                kernels[row, side, tap] = base[side, tap] + shared.repeat_interleave(group)
    return kernels


def _convolve(x: Tensor, kernels: Tensor | None, side: int) -> Tensor:
    """Mix each row with those before it in the block; nothing stands left of the block."""
    if kernels is None:
        return x
    y = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for tap in range(kernels.shape[2]):
            if row - tap >= 0:
                y[row] += kernels[row, side, tap] * x[row - tap]
    return y


def _visible(config: dict[str, Any], layer: int, query: int, key: int, context: int) -> bool:
    """Whether the row at position `query` sees the key at position `key`, the block beginning at `context`."""
    window = config["windows"][layer]
    if config["causal"][layer] and key > query:
        return False
    if window is None:
        return True
    if config.get("window_from", "query") == "query":
        return abs(query - key) < window
    assert config["window_from"] == "anchor", f"unknown window_from {config['window_from']!r}"
    return key >= context or key >= context - window


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one head at one position: channel i turns with channel i + half."""
    half = x.shape[0] // 2
    y = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        cos, sin = torch.cos(angle), torch.sin(angle)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y


def _attend(
    weights: dict[str, Tensor], config: dict[str, Any], layer: int, context: Tensor, block: Tensor, positions: list[int]
) -> Tensor:
    """Attention of the block's rows over the context and the block; the context asks nothing."""
    part = f"layers.{layer}.self_attn."
    heads, kv_heads, head_dim = config["heads"], config["kv_heads"], config["head_dim"]
    start = context.shape[0]
    source = torch.cat([context, block])
    q = _linear(weights, part + "q_proj", block).view(-1, heads, head_dim)
    k = _linear(weights, part + "k_proj", source).view(-1, kv_heads, head_dim)
    v = _linear(weights, part + "v_proj", source).view(-1, kv_heads, head_dim) * config.get("value_scale", 1.0)
    q = _rms_norm(q, weights[part + "q_norm.weight"], config["eps"])
    k = _rms_norm(k, weights[part + "k_norm.weight"], config["eps"])
    theta = config["rope_theta"]
    keys = [torch.stack([_rotate(k[i, h], p, theta) for i, p in enumerate(positions)]) for h in range(kv_heads)]
    sink = weights.get(part + "attention_sink_bias")
    outputs = []
    for row, position in enumerate(positions[start:]):
        seen = [key for key in positions if _visible(config, layer, position, key, start)]
        output = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            scores = keys[shared] @ _rotate(q[row, h], position, theta) * head_dim**-0.5
            terms = scores[seen] if sink is None else torch.cat([scores[seen], sink[h : h + 1]])
            law = torch.softmax(terms, 0)[: len(seen)]  # a sink takes its share of attention and returns nothing
            output.append(law @ v[seen, shared])
        outputs.append(torch.cat(output))
    return _linear(weights, part + "o_proj", torch.stack(outputs))
