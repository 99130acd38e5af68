"""Tiny random checkpoints of Gemma 4 assistants, in the layout of `Gemma4AssistantForCausalLM`.

The shapes fit the library's tiny models of Gemma 4 (vocabulary 97, hidden size 48, heads of 16 and 32 channels, one
query head of the assistant for each key/value head or more). A centroid head splits the vocabulary into groups of one
size, which 97 does not allow: the target of "centroids" needs `vocab_size=96`. Every other size differs, so that a
transposed or misread tensor cannot load. Weights are large enough for each of them to matter.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TARGET_HIDDEN, VOCAB, CENTROID_VOCAB = 48, 97, 96
ABSENT = object()  # as an override: the key is left out of config.json


@dataclass
class Written:
    """A checkpoint on disk and what is needed to compute with it by other means.

    Args:
        folder: where config.json, generation_config.json and model.safetensors are.
        config: the content of config.json.
        weights: the content of model.safetensors.
        reference: the settings for `assistant_reference.draft`.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    reference: dict[str, Any]

    def matrices(self, embed: Tensor) -> dict[str, Tensor]:
        """The argument `embed` of `assistant_reference.draft`, always the target's; the output matrix is its own."""
        return {"embed": embed}


def write(folder: Path, dialect: str = "plain", *, seed: int = 0, **overrides: Any) -> Written:
    """Write a random checkpoint.

    Args:
        folder: created if need be.
        dialect: one of `DIALECTS`: "plain", "centroids", or "key_as_value" for a target whose full layers have one
            key/value head and no projection of values.
        seed: seed of the weights and of the groups of tokens.
        **overrides: keys of config.json. A key replaces the one of that name wherever it stands, else it is added to
            the section `text_config`; `ABSENT` leaves it out. Tensors and settings follow.
    """
    config = _config(dialect)
    for name, value in overrides.items():
        place = config if name in config or name == "tie_word_embeddings" else config["text_config"]
        place.pop(name, None)
        if value is not ABSENT:
            place[name] = value
    weights = _weights(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Written(folder, config, weights, _reference(config))


# ---------------------------------------------------------------------------------------------------------- config.json


def _config(dialect: str) -> dict[str, Any]:
    assert dialect in DIALECTS, f"unknown dialect {dialect!r}"
    ordered = dialect == "centroids"
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": TARGET_HIDDEN,
        "centroid_intermediate_top_k": 3,
        "dtype": "float32",
        "model_type": "gemma4_assistant",
        "num_centroids": 12,
        "text_config": _text(CENTROID_VOCAB if ordered else VOCAB, dialect == "key_as_value"),
        "tie_word_embeddings": True,
        "use_ordered_embeddings": ordered,
    }


def _text(vocab: int, key_as_value: bool) -> dict[str, Any]:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": key_as_value,
        "bos_token_id": 2,
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 40,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 72,
        "layer_types": kinds,
        "max_position_embeddings": 512,
        "model_type": "gemma4_text",
        "num_attention_heads": 6,
        "num_global_key_value_heads": 1,  # read where attention_k_eq_v is true
        "num_hidden_layers": len(kinds),
        "num_key_value_heads": 2,
        "num_kv_shared_layers": len(kinds),
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": vocab,
        "vocab_size_per_layer_input": 0,
    }


DIALECTS = ("plain", "centroids", "key_as_value")


# ------------------------------------------------------------------------------------------- settings of the reference


def _head_dim(text: dict[str, Any], kind: str) -> int:
    return text["global_head_dim"] if kind == "full_attention" else text["head_dim"]


def _turn(text: dict[str, Any], kind: str) -> tuple[float, int]:
    """The base of the rotation, and how many pairs of channels turn."""
    rope = text["rope_parameters"][kind]
    return rope["rope_theta"], int(rope.get("partial_rotary_factor", 1.0) * _head_dim(text, kind) // 2)


def _reference(config: dict[str, Any]) -> dict[str, Any]:
    text = config["text_config"]
    return {
        "kinds": text["layer_types"],
        "heads": text["num_attention_heads"],
        "eps": text["rms_norm_eps"],
        "rope": {kind: _turn(text, kind) for kind in set(text["layer_types"])},
        "window": text["sliding_window"],
        "position": "anchor",
        "window_from": "rows",
        "chosen_centroids": config["centroid_intermediate_top_k"] if config["use_ordered_embeddings"] else None,
    }


# -------------------------------------------------------------------------------------------------------------- tensors


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    text, target = config["text_config"], config["backbone_hidden_size"]
    d, vocab, ffn = text["hidden_size"], text["vocab_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (d, 2 * target),
        "post_projection.weight": (target, d),
        "model.embed_tokens.weight": (vocab, d),
        "model.norm.weight": (d,),
    }
    for layer, kind in enumerate(text["layer_types"]):
        part, head = f"model.layers.{layer}.", _head_dim(text, kind)
        q = text["num_attention_heads"] * head
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{part}{norm}_layernorm.weight"] = (d,)
        shapes[part + "layer_scalar"] = (1,)
        shapes[part + "self_attn.q_proj.weight"] = (q, d)
        shapes[part + "self_attn.q_norm.weight"] = (head,)
        shapes[part + "self_attn.o_proj.weight"] = (d, q)
        for name, shape in {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)}.items():
            shapes[f"{part}mlp.{name}_proj.weight"] = shape
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    if config["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], d)
    return shapes


def _weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    weights = {}
    for name, shape in _shapes(config).items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        around_one = len(shape) == 1  # norms and the scale of a layer
        weights[name] = (1 + 0.2 * tensor if around_one else 0.4 * tensor).to(dtype)
    if config["use_ordered_embeddings"]:
        order = torch.randperm(config["text_config"]["vocab_size"], generator=generator)
        weights["masked_embedding.token_ordering"] = order  # the tokens, group after group
    return weights
