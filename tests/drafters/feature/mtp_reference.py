"""What heads for multi-token prediction must compute, the slow way: one text, float64, no cache, a loop over every row.

Covers the heads of Qwen3-Next and Qwen3.5 (`mtp.*`, attention with an output gate) and of DeepSeek-V3 (a layer after
the last one of the target, latent attention), dense or with experts. Nothing here is shared with the library, so that
a test can compare the two. The reference knows tensors by their published names and a plain dictionary of settings:

    names                "qwen": one projection and one norm for all modules; "deepseek": each module has its own
    modules              layers that the head has; step i of a draft uses module i % modules
    first_layer          the number of the first module's layer in the names of tensors
    recurrence           "append": a drafted token adds a row whose state is the output of the row before it; earlier
                         rows stay. "shift": every row takes the output of its own row one step earlier, and tokens
                         move on by one
    hidden_first         whether the projection reads [state, embedding] instead of [embedding, state] (False)
    chain_normed         whether the output that is fed back has gone through the final norm (True)
    zero_first_embedding whether the row at position 0 sees no token (False)
    eps, norm_offset     norms multiply by norm_offset + weight (0.0)
    heads, kv_heads, head_dim, rotary, rope_theta        attention of Qwen; `rotary` channels of a head turn
    heads, nope, rope, value, latent_eps, rope_theta     attention of DeepSeek: the parts of a head
    rope_interleaved     DeepSeek: whether channel 2i turns with 2i + 1 instead of with i + half
    experts_per_token, normalise_experts                 experts, where a layer has them
    groups, groups_kept, expert_scale                    experts of DeepSeek
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Drafted:
    """What a head says after one committed text.

    Args:
        logits: about the token after the anchor, [V].
    """

    logits: Tensor
    _weights: dict[str, Tensor] = field(repr=False)
    _config: dict[str, Any] = field(repr=False)
    _hidden: Tensor = field(repr=False)
    _tokens: list[int] = field(repr=False)
    _embed: Tensor = field(repr=False)
    _head: Tensor = field(repr=False)

    def logits_after(self, path: list[int]) -> Tensor:
        """The logits of the token after the anchor and a path of drafted tokens, [V]."""
        return _logits(self._weights, self._config, self._hidden, [*self._tokens, *path], self._embed, self._head)


def draft(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    hidden: Tensor,
    tokens: list[int],
    *,
    embed: Tensor,
    head: Tensor,
) -> Drafted:
    """Everything that a head can say after one committed text.

    Args:
        weights: the tensors of the checkpoint by their published names; others than the head's are ignored.
        config: the settings described above.
        hidden: the target's last hidden state, after its final norm, at positions 0 to n - 1, [n, d]; n >= 1.
        tokens: at positions 0 to n; the last is the anchor, whose state is not known yet. Row t of the head pairs
            the state at t with the token at t + 1, and its position is t.
        embed: the embedding of tokens, [V, d].
        head: the output matrix, [V, d].
    """
    assert len(tokens) == len(hidden) + 1, "one token more than states"
    weights = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
    hidden, embed, head = hidden.double(), embed.double(), head.double()
    logits = _logits(weights, config, hidden, tokens, embed, head)
    return Drafted(logits, weights, config, hidden, tokens, embed, head)


def _logits(
    weights: dict[str, Tensor], config: dict[str, Any], hidden: Tensor, tokens: list[int], embed: Tensor, head: Tensor
) -> Tensor:
    """The logits that follow the last token; `tokens` holds the committed ones and then the drafted ones."""
    rows, steps = len(hidden), len(tokens) - len(hidden)
    assert config["recurrence"] in ("append", "shift"), f"unknown recurrence {config['recurrence']!r}"
    appends = config["recurrence"] == "append"
    assert not appends or config["modules"] == 1, "the second module has no state of the rows of the prompt"
    states = hidden
    for step in range(steps):
        first = 0 if appends else step
        embeddings = embed[tokens[1 + first : 1 + rows + step]]
        raw, normed = _module(weights, config, step % config["modules"], embeddings, states)
        output = normed if config.get("chain_normed", True) else raw
        states = torch.cat([states, output[-1:]]) if appends else output
    return head @ normed[-1]


def _module(
    weights: dict[str, Tensor], config: dict[str, Any], module: int, embeddings: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer of the head over all rows: its output before and after the final norm."""
    layer = config["first_layer"] + module
    if config["names"] == "qwen":
        block = f"mtp.layers.{layer}."
        names = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
    else:
        assert config["names"] == "deepseek", f"unknown names {config['names']!r}"
        block = f"model.layers.{layer}."
        names = block + "enorm", block + "hnorm", block + "eh_proj", block + "shared_head.norm"
    if config.get("zero_first_embedding", False):
        embeddings = torch.cat([torch.zeros_like(embeddings[:1]), embeddings[1:]])
    parts = [_norm(weights, config, names[0], embeddings), _norm(weights, config, names[1], states)]
    x = _linear(weights, names[2], torch.cat(parts[::-1] if config.get("hidden_first", False) else parts, -1))
    attend = {"qwen": _gated_attention, "deepseek": _latent_attention}[config["names"]]
    x = x + attend(weights, config, block + "self_attn.", _norm(weights, config, block + "input_layernorm", x))
    normed = _norm(weights, config, block + "post_attention_layernorm", x)
    x = x + torch.stack([_feed_forward(weights, config, block + "mlp.", row) for row in normed])
    return x, _norm(weights, config, names[3], x)


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _norm(weights: dict[str, Tensor], config: dict[str, Any], name: str, x: Tensor) -> Tensor:
    return _rms_norm(x, config.get("norm_offset", 0.0) + weights[name + ".weight"], config["eps"])


def _rotate(x: Tensor, position: int, theta: float, interleaved: bool) -> Tensor:
    """RoPE of some channels of one head at one position."""
    half = x.shape[0] // 2
    y = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        cos, sin = torch.cos(angle), torch.sin(angle)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        y[a] = x[a] * cos - x[b] * sin
        y[b] = x[b] * cos + x[a] * sin
    return y


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One head of one row over the rows that it sees."""
    scores = torch.stack(keys) @ query * query.shape[0] ** -0.5
    return torch.softmax(scores, 0) @ torch.stack(values)


# ---------------------------------------------------------------------------------------------------- attention of Qwen


def _gated_attention(weights: dict[str, Tensor], config: dict[str, Any], part: str, x: Tensor) -> Tensor:
    """Causal attention; q_proj gives each head a query and, after it, a gate on its output."""
    heads, kv_heads, head_dim, rotary = config["heads"], config["kv_heads"], config["head_dim"], config["rotary"]

    def turned(head: Tensor, position: int) -> Tensor:
        return torch.cat([_rotate(head[:rotary], position, config["rope_theta"], False), head[rotary:]])

    both = _linear(weights, part + "q_proj", x).view(-1, heads, 2 * head_dim)
    q = _norm(weights, config, part + "q_norm", both[:, :, :head_dim])
    gates = torch.sigmoid(both[:, :, head_dim:])
    k = _norm(weights, config, part + "k_norm", _linear(weights, part + "k_proj", x).view(-1, kv_heads, head_dim))
    v = _linear(weights, part + "v_proj", x).view(-1, kv_heads, head_dim)
    keys = [[turned(k[row, h], row) for row in range(len(x))] for h in range(kv_heads)]
    outputs = []
    for row in range(len(x)):
        output = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            found = _attend(turned(q[row, h], row), keys[shared][: row + 1], list(v[: row + 1, shared]))
            output.append(found * gates[row, h])
        outputs.append(torch.cat(output))
    return _linear(weights, part + "o_proj", torch.stack(outputs))


# ------------------------------------------------------------------------------------------------ attention of DeepSeek


def _latent_attention(weights: dict[str, Tensor], config: dict[str, Any], part: str, x: Tensor) -> Tensor:
    """Causal attention whose keys and values are made of one latent vector; the turned part of a key has one head."""
    heads, nope, rope, value = config["heads"], config["nope"], config["rope"], config["value"]

    def turned(channels: Tensor, position: int) -> Tensor:
        return _rotate(channels, position, config["rope_theta"], config["rope_interleaved"])

    def latent_norm(name: str, latent: Tensor) -> Tensor:
        return _rms_norm(latent, weights[part + name + ".weight"], config["latent_eps"])

    if part + "q_a_proj.weight" in weights:
        q = _linear(weights, part + "q_b_proj", latent_norm("q_a_layernorm", _linear(weights, part + "q_a_proj", x)))
    else:
        q = _linear(weights, part + "q_proj", x)
    q = q.view(-1, heads, nope + rope)
    both = _linear(weights, part + "kv_a_proj_with_mqa", x)
    latent = latent_norm("kv_a_layernorm", both[:, : both.shape[1] - rope])
    kv = _linear(weights, part + "kv_b_proj", latent).view(-1, heads, nope + value)
    turning = [turned(both[row, -rope:], row) for row in range(len(x))]
    outputs = []
    for row in range(len(x)):
        output = []
        for h in range(heads):
            query = torch.cat([q[row, h, :nope], turned(q[row, h, nope:], row)])
            keys = [torch.cat([kv[seen, h, :nope], turning[seen]]) for seen in range(row + 1)]
            output.append(_attend(query, keys, list(kv[: row + 1, h, nope:])))
        outputs.append(torch.cat(output))
    return _linear(weights, part + "o_proj", torch.stack(outputs))


# --------------------------------------------------------------------------------------------------------- feed-forward


def _feed_forward(weights: dict[str, Tensor], config: dict[str, Any], part: str, x: Tensor) -> Tensor:
    """The layer's network for one row: dense, or the chosen experts and the shared one."""
    if part + "gate.weight" not in weights:
        return _mlp(weights, part, x)
    scores = _linear(weights, part + "gate", x)
    if config["names"] == "qwen":
        scores = torch.softmax(scores, 0)
        chosen = torch.topk(scores, config["experts_per_token"]).indices.tolist()
        shared = torch.sigmoid(_linear(weights, part + "shared_expert_gate", x))
        y = shared * _mlp(weights, part + "shared_expert.", x)
    else:
        scores = torch.sigmoid(scores)
        chosen = _grouped_choice(config, scores + weights[part + "gate.e_score_correction_bias"])
        y = _mlp(weights, part + "shared_experts.", x)
    total = scores[chosen].sum() if config["normalise_experts"] else 1.0
    for expert in chosen:
        share = scores[expert] / total * config.get("expert_scale", 1.0)
        y = y + share * _expert(weights, part, expert, x)
    return y


def _grouped_choice(config: dict[str, Any], scores: Tensor) -> list[int]:
    """DeepSeek: the best experts of the groups whose two best experts score highest together."""
    size = len(scores) // config["groups"]
    grouped = [sum(sorted(group, reverse=True)[:2]) for group in scores.view(-1, size).tolist()]
    kept = sorted(range(config["groups"]), key=lambda group: -grouped[group])[: config["groups_kept"]]
    experts = [expert for expert in range(len(scores)) if expert // size in kept]
    return sorted(experts, key=lambda expert: -scores[expert].item())[: config["experts_per_token"]]


def _expert(weights: dict[str, Tensor], part: str, expert: int, x: Tensor) -> Tensor:
    """One expert, stored by itself or as a slice of the tensors of all."""
    if part + "experts.gate_up_proj" not in weights:
        return _mlp(weights, f"{part}experts.{expert}.", x)
    gate, up = (weights[part + "experts.gate_up_proj"][expert] @ x).chunk(2)
    return weights[part + "experts.down_proj"][expert] @ (gate * torch.sigmoid(gate) * up)


def _mlp(weights: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    gate = _linear(weights, part + "gate_proj", x)
    return _linear(weights, part + "down_proj", gate * torch.sigmoid(gate) * _linear(weights, part + "up_proj", x))
