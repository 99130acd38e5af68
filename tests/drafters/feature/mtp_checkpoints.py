"""Tiny random checkpoints with heads for multi-token prediction, in the layouts of Qwen3-Next, Qwen3.5 and DeepSeek-V3.

Such a head is part of its target's checkpoint, so each folder holds a target, if one is given, in its first shard and
the head in its second. Every size differs from the others, so that a transposed or misread tensor cannot load. Weights
are large enough for each of them to matter. `config` is enough for transformers to make the target itself:

    content = config("qwen3_next")
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    written = write(folder, "qwen3_next", target=target.state_dict())
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB = 48, 97
ABSENT = object()  # as an override: the key is left out of config.json


@dataclass
class Written:
    """A checkpoint on disk and what is needed to compute with its head by other means.

    Args:
        folder: where config.json, the index and the shards are.
        config: the content of config.json.
        weights: the tensors of the head, the content of the second shard.
        reference: the settings for `mtp_reference.draft`.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    reference: dict[str, Any]

    def matrices(self, embed: Tensor, head: Tensor) -> dict[str, Tensor]:
        """The arguments `embed` and `head` of `mtp_reference.draft`: the head's own, else those of the target."""
        part = f"model.layers.{self.reference['first_layer']}."
        own = self.weights
        return {
            "embed": own.get(part + "embed_tokens.weight", embed),
            "head": own.get(part + "shared_head.head.weight", head),
        }


def config(dialect: str, **overrides: Any) -> dict[str, Any]:
    """The content of config.json.

    Args:
        dialect: one of `DIALECTS`.
        **overrides: keys; a key of the text model goes to its section where the format has one; `ABSENT` leaves it
            out.
    """
    content = _CONFIGS[dialect]()
    for name, value in overrides.items():
        place = content.get("text_config", content)
        place.pop(name, None)
        if value is not ABSENT:
            place[name] = value
    return content


def write(
    folder: Path,
    dialect: str,
    *,
    target: dict[str, Tensor] | None = None,
    seed: int = 0,
    fused: bool | None = None,
    copies: bool = True,
    **overrides: Any,
) -> Written:
    """Write a random checkpoint.

    Args:
        folder: created if need be.
        dialect: one of `DIALECTS`.
        target: the tensors of the target, written as they are; without them the folder holds the head alone.
        seed: seed of the weights.
        fused: whether the experts of Qwen share their tensors; None is as the dialect has it.
        copies: whether the modules of DeepSeek repeat the target's embedding and output matrix, as published.
        **overrides: keys for `config`. Tensors and settings follow.
    """
    content = config(dialect, **overrides)
    text = content.get("text_config", content)
    together = dialect == "qwen3_5_moe" if fused is None else fused
    target = target or {}
    weights = _weights(_shapes(text, dialect, together), getattr(torch, text["dtype"]), _offset(dialect), seed)
    for layer in _layers(text, dialect) if dialect == "deepseek_v3" and copies and target else ():
        weights[f"model.layers.{layer}.embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = target["lm_head.weight"].clone()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=2))
    shards = {"model-00001-of-00002.safetensors": target, "model-00002-of-00002.safetensors": weights}
    places = {}
    for file, tensors in shards.items():
        separate = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # a target may tie some
        save_file(separate, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    size = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return Written(folder, content, weights, _reference(text, dialect))


# ---------------------------------------------------------------------------------------------------------- config.json


def _common(**rest: Any) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
        **rest,
    }


def _hybrid(**rest: Any) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 have in common: layers of linear attention and of gated attention."""
    return _common(
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_value_head_dim=12,
        num_key_value_heads=2,
        **rest,
    )


_EXPERTS = {
    "moe_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 36,
}


def _qwen3_next() -> dict[str, Any]:
    return _hybrid(
        architectures=["Qwen3NextForCausalLM"],
        decoder_sparse_step=1,
        intermediate_size=56,
        mlp_only_layers=[],
        model_type="qwen3_next",
        norm_topk_prob=True,
        partial_rotary_factor=0.5,
        rope_scaling=None,
        rope_theta=5000.0,
        **_EXPERTS,
    )


def _qwen3_5(kind: str, architecture: str, **network: Any) -> dict[str, Any]:
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "rope_theta": 20000.0,
        "rope_type": "default",
    }
    head = {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": _hybrid(model_type=kind + "_text", rope_parameters=rope, **head, **network),
        "tie_word_embeddings": False,
    }


def _deepseek_v3() -> dict[str, Any]:
    return _common(
        architectures=["DeepseekV3ForCausalLM"],
        first_k_dense_replace=1,
        intermediate_size=60,
        kv_lora_rank=14,
        model_type="deepseek_v3",
        moe_intermediate_size=28,
        moe_layer_freq=1,
        n_group=3,
        n_routed_experts=6,
        n_shared_experts=2,
        norm_topk_prob=True,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        num_nextn_predict_layers=1,
        q_lora_rank=20,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        rope_interleave=True,
        rope_scaling=None,
        rope_theta=8000.0,
        routed_scaling_factor=1.7,
        scoring_func="sigmoid",
        topk_group=2,
        topk_method="noaux_tc",
        v_head_dim=12,
    )


_CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": lambda: _qwen3_5("qwen3_5", "Qwen3_5ForConditionalGeneration", intermediate_size=56),
    "qwen3_5_moe": lambda: _qwen3_5("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", **_EXPERTS),
    "deepseek_v3": _deepseek_v3,
}
DIALECTS = tuple(_CONFIGS)


# ------------------------------------------------------------------------------------------- settings of the reference


def _offset(dialect: str) -> float:
    """Qwen stores what its norms add to one."""
    return 0.0 if dialect == "deepseek_v3" else 1.0


def _layers(text: dict[str, Any], dialect: str) -> range:
    """The numbers of the head's layers in the names of tensors."""
    key = "mtp_num_hidden_layers" if dialect.startswith("qwen3_5") else "num_nextn_predict_layers"
    first = text["num_hidden_layers"] if dialect == "deepseek_v3" else 0
    return range(first, first + text.get(key, 1))


def _rotary(text: dict[str, Any]) -> tuple[float, int]:
    """The base of the rotation, and how many channels of a head turn."""
    rope = text.get("rope_parameters", text)
    return rope["rope_theta"], int(text["head_dim"] * rope["partial_rotary_factor"])


def _has_experts(text: dict[str, Any], dialect: str) -> bool:
    if dialect == "deepseek_v3":
        return text["first_k_dense_replace"] <= text["num_hidden_layers"]  # transformers: always
    dense_first = 0 in text.get("mlp_only_layers", []) or text.get("decoder_sparse_step", 1) > 1
    return bool(text.get("num_experts")) and not dense_first  # a layer of the head counts from 0, not from the target


def _reference(text: dict[str, Any], dialect: str) -> dict[str, Any]:
    layers = _layers(text, dialect)
    settings = {
        "modules": len(layers),
        "first_layer": layers.start,
        "recurrence": "append" if len(layers) == 1 else "shift",
        "hidden_first": text.get("mtp_hidden_states_first", False),
        "eps": text["rms_norm_eps"],
        "norm_offset": _offset(dialect),
        "heads": text["num_attention_heads"],
        "experts_per_token": text.get("num_experts_per_tok"),
        "normalise_experts": text.get("norm_topk_prob", True),
    }
    if dialect != "deepseek_v3":
        theta, rotary = _rotary(text)
        attention = {"kv_heads": text["num_key_value_heads"], "head_dim": text["head_dim"], "rotary": rotary}
        return settings | attention | {"names": "qwen", "rope_theta": theta}
    return settings | {
        "names": "deepseek",
        "rope_theta": text["rope_theta"],
        "rope_interleaved": text["rope_interleave"],
        "nope": text["qk_nope_head_dim"],
        "rope": text["qk_rope_head_dim"],
        "value": text["v_head_dim"],
        "latent_eps": 1e-6,  # transformers gives these two norms no eps; they have the default
        "groups": text["n_group"],
        "groups_kept": text["topk_group"],
        "expert_scale": text["routed_scaling_factor"],
    }


# -------------------------------------------------------------------------------------------------------------- tensors


def _shapes(text: dict[str, Any], dialect: str, fused: bool) -> dict[str, tuple[int, ...]]:
    d = text["hidden_size"]
    deepseek = dialect == "deepseek_v3"
    shapes: dict[str, tuple[int, ...]] = {}
    if not deepseek:
        shapes["mtp.fc.weight"] = (d, 2 * d)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (d,)
    for layer in _layers(text, dialect):
        part = f"model.layers.{layer}." if deepseek else f"mtp.layers.{layer}."
        if deepseek:
            shapes[part + "eh_proj.weight"] = (d, 2 * d)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                shapes[f"{part}{name}.weight"] = (d,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{part}{name}.weight"] = (d,)
        attention = _latent_attention(text) if deepseek else _gated_attention(text)
        shapes |= {f"{part}self_attn.{name}": shape for name, shape in attention.items()}
        if not _has_experts(text, dialect):
            network = _mlp("", d, text["intermediate_size"])
        elif deepseek:
            network = _deepseek_experts(text)
        else:
            network = _qwen_experts(text, fused)
        shapes |= {f"{part}mlp.{name}": shape for name, shape in network.items()}
    return shapes


def _gated_attention(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, head = text["hidden_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    sizes = {"q": (2 * q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": shape for name, shape in sizes.items()}
    if text["attention_bias"]:
        shapes |= {f"{name}_proj.bias": shape[:1] for name, shape in sizes.items()}
    return shapes | {"q_norm.weight": (head,), "k_norm.weight": (head,)}


def _latent_attention(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads, rank, q_rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"], text["q_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    q = heads * (nope + rope)
    shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (q, d)}
    if q_rank is not None:
        shapes = {"q_a_proj.weight": (q_rank, d), "q_a_layernorm.weight": (q_rank,), "q_b_proj.weight": (q, q_rank)}
    return shapes | {
        "kv_a_proj_with_mqa.weight": (rank + rope, d),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (d, heads * value),
    }


def _mlp(part: str, d: int, ffn: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)}
    return {f"{part}{name}_proj.weight": shape for name, shape in sizes.items()}


def _qwen_experts(text: dict[str, Any], fused: bool) -> dict[str, tuple[int, ...]]:
    d, ffn, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (experts, d), "shared_expert_gate.weight": (1, d)}
    shapes |= _mlp("shared_expert.", d, text["shared_expert_intermediate_size"])
    if fused:
        return shapes | {"experts.gate_up_proj": (experts, 2 * ffn, d), "experts.down_proj": (experts, d, ffn)}
    for expert in range(experts):
        shapes |= _mlp(f"experts.{expert}.", d, ffn)
    return shapes


def _deepseek_experts(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, ffn, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (experts, d), "gate.e_score_correction_bias": (experts,)}
    shapes |= _mlp("shared_experts.", d, ffn * text["n_shared_experts"])
    for expert in range(experts):
        shapes |= _mlp(f"experts.{expert}.", d, ffn)
    return shapes


def _weights(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, norm_offset: float, seed: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        of_norm = len(shape) == 1 and "norm" in name
        weights[name] = (1 - norm_offset + 0.2 * tensor if of_norm else 0.4 * tensor).to(dtype)
    return weights
