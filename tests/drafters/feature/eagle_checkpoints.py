"""Tiny random checkpoints of EAGLE-3 drafters, in the layouts in which they are published.

The shapes fit the library's tiny models (vocabulary 97, hidden size 48); every size differs from the others, so that
a transposed or misread tensor cannot load. Weights are large enough for each of them to matter.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, DRAFT_VOCAB, MASK = 48, 97, 61, 96
ABSENT = object()  # as an override: the key is left out of config.json


@dataclass
class Written:
    """A checkpoint on disk and what is needed to compute with it by other means.

    Args:
        folder: where config.json and the weights are.
        config: the content of config.json.
        weights: the content of the file of weights.
        reference: the settings for `eagle_reference.draft`.
        feature_layers: the indices into a Hugging Face model's `hidden_states` that the features come from.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    reference: dict[str, Any]
    feature_layers: tuple[int, ...]

    def matrices(self, embed: Tensor, head: Tensor) -> dict[str, Tensor]:
        """The arguments `embed` and `head` of `eagle_reference.draft`: the checkpoint's own, else the target's.

        Of a target's head only the rows of the draft vocabulary are used.
        """
        own = self.weights
        rows = head[own["t2d"]] if "t2d" in own else head
        return {"embed": own.get("embed_tokens.weight", embed), "head": own.get("lm_head.weight", rows)}


def write(
    folder: Path,
    dialect: str,
    *,
    seed: int = 0,
    num_target_layers: int = 8,
    num_hidden_layers: int = 1,
    without: Collection[str] = (),
    pickled: bool = False,
    **overrides: Any,
) -> Written:
    """Write a random checkpoint.

    Args:
        folder: created if need be.
        dialect: one of `DIALECTS`.
        seed: seed of the weights and of the reduced vocabulary.
        num_target_layers: of the target; the features follow from it.
        num_hidden_layers: of the drafter; only speculators has more than one.
        without: tensors that are left out.
        pickled: write pytorch_model.bin, as SafeAILab does, in place of model.safetensors.
        **overrides: keys of config.json. A key replaces the one of that name wherever it stands, else it is added
            where its format has it; a dictionary is merged into the section of that name; `ABSENT` leaves the key
            out. Tensors and settings follow.
    """
    assert num_hidden_layers == 1 or dialect in _SPECULATORS, f"{dialect} has one layer"
    config = _CONFIGS[dialect](num_target_layers)
    if num_hidden_layers > 1:
        overrides = {"layer_types": ["full_attention"] * num_hidden_layers, **overrides}
        overrides["num_hidden_layers"] = num_hidden_layers
    for name, value in overrides.items():
        _override(config, name, value)
    if dialect in _SPECULATORS:
        section = config["transformer_layer_config"]
        section["use_sliding_window"] = "sliding_attention" in section["layer_types"]  # else a window does not count
    flat = {**config.get("transformer_layer_config", {}), **config}
    layers = _feature_layers(flat, dialect, num_target_layers)
    weights = {name: x for name, x in _weights(flat, dialect, len(layers), seed).items() if name not in without}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Written(folder, config, weights, _reference(flat, dialect, len(layers)), layers)


# ---------------------------------------------------------------------------------------------------------- config.json


def _decoder(model_type: str, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 56,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
        **rest,
    }


def _ids(target_layers: int) -> list[int]:
    """EAGLE's choice, as indices into Hugging Face's hidden states; a small target has no such three."""
    return [2, target_layers // 2, target_layers - 3] if target_layers > 6 else [0, 1, 2]


def _unless_default(target_layers: int) -> dict[str, Any]:
    """The flat formats list no layers as long as the choice is EAGLE's."""
    return {} if target_layers > 6 else {"eagle_aux_hidden_state_layer_ids": _ids(target_layers)}


def _eagle(target_layers: int) -> dict[str, Any]:
    return {
        **_decoder("llama", pad_token_id=0, rms_norm_eps=1e-5, torch_dtype="float32"),  # neither theta nor head_dim
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": DRAFT_VOCAB,
        **_unless_default(target_layers),
    }


def _specforge(target_layers: int) -> dict[str, Any]:
    rope = {"rope_theta": 7000.0, "rope_scaling": None}
    window = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}  # not used
    attention = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 16}
    return {
        **_decoder("llama", torch_dtype="float32", **rope, **window, **attention),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        **_unless_default(target_layers),
    }


def _deepspec(target_layers: int) -> dict[str, Any]:
    five = [round(i * (target_layers - 2) / 4) for i in range(5)]  # counted from 0, never the last layer
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 11000.0}}
    attention = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "layer_types": ["full_attention"]}
    return {
        **_decoder("qwen3", dtype="float32", **rope, **attention),
        "architectures": ["Qwen3Eagle3Model"],
        "draft_num_hidden_layers": 1,
        "num_target_layers": target_layers,
        "step_loss_decay": 0.8,
        "target_layer_ids": five if target_layers > 5 else list(range(target_layers)),
        "target_model_name_or_path": "tiny",
        "ttt_length": 7,
    }


def _speculators(target_layers: int, algorithm: str, name: str, decoder: dict[str, Any], **rest: Any) -> dict[str, Any]:
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1, "speculative_tokens": 5}
    attention = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "layer_types": ["full_attention"]}
    return {
        "architectures": [f"{name}DraftModel"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": _ids(target_layers),
        "embed_requires_grad": algorithm == "peagle",
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": algorithm == "eagle3",
        "norm_output": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**decoder, **attention, "pad_token_id": None, "sliding_window": None},
        **rest,
    }


def _speculators_eagle3(target_layers: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 9000.0}
    return _speculators(target_layers, "eagle3", "Eagle3", _decoder("llama", mlp_bias=False, rope_parameters=rope))


def _speculators_peagle(target_layers: int) -> dict[str, Any]:
    decoder = _decoder("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 13000.0})
    return _speculators(target_layers, "peagle", "PEagle", decoder, mask_token_id=MASK)


_CONFIGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "eagle": _eagle,
    "specforge": _specforge,
    "speculators": _speculators_eagle3,
    "deepspec": _deepspec,
    "peagle": _speculators_peagle,
}
DIALECTS = tuple(_CONFIGS)
_SPECULATORS = ("speculators", "peagle")


def _override(config: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict) and isinstance(config.get(name), dict):
        for key, inner in value.items():
            _put(config[name], key, inner)
        return
    section = config.get("transformer_layer_config", config)
    for place in [place for place in (config, section) if name in place] or [section]:
        _put(place, name, value)


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    place.pop(name, None)
    if value is not ABSENT:
        place[name] = value


# ------------------------------------------------------------------------------------------- settings of the reference


def _feature_layers(flat: dict[str, Any], dialect: str, target_layers: int) -> tuple[int, ...]:
    """DeepSpec and SpecForge's section mean the outputs of layers, counted from 0; all others mean their inputs."""
    if dialect == "deepspec":
        return tuple(layer + 1 for layer in flat["target_layer_ids"])
    section = flat.get("eagle_config", {})
    if "eagle_aux_hidden_state_layer_ids" in section:
        return tuple(layer + (dialect == "specforge") for layer in section["eagle_aux_hidden_state_layer_ids"])
    return tuple(flat.get("eagle_aux_hidden_state_layer_ids") or _ids(target_layers))


def _head_dim(flat: dict[str, Any]) -> int:
    return flat.get("head_dim") or flat["hidden_size"] // flat["num_attention_heads"]


def _parts(flat: dict[str, Any], dialect: str) -> list[str]:
    if dialect in ("eagle", "specforge"):
        return ["midlayer."]
    return [f"layers.{layer}." for layer in range(flat["num_hidden_layers"])]


def _reference(flat: dict[str, Any], dialect: str, features: int) -> dict[str, Any]:
    rope = flat.get("rope_parameters") or {}
    scaled = rope.get("rope_type", "default") != "default"
    parts = _parts(flat, dialect)
    kinds = flat["layer_types"] if dialect in _SPECULATORS else ["full_attention"]  # others know no windows
    return {
        "layers": parts,
        "heads": flat["num_attention_heads"],
        "kv_heads": flat["num_key_value_heads"],
        "head_dim": _head_dim(flat),
        "eps": flat["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", flat.get("rope_theta", 10000.0)),
        "rope_scaling": rope if scaled else flat.get("rope_scaling"),
        "windows": [flat["sliding_window"] if kind == "sliding_attention" else None for kind in kinds],
        "window_from": "query" if dialect == "peagle" else "anchor",  # as in training
        "window_drafted": False,
        "features": features,
        "fc_norm": flat.get("fc_norm", False),
        "norm_before_fc": flat.get("norm_before_fc", False),
        "norm_before_residual": flat.get("norm_before_residual", False),
        "norm_output": flat.get("norm_output", False),
        "mask_token_id": flat.get("mask_token_id"),
    }


# -------------------------------------------------------------------------------------------------------------- tensors


def _shapes(flat: dict[str, Any], dialect: str, features: int) -> dict[str, tuple[int, ...]]:
    d, ffn, head = flat["hidden_size"], flat["intermediate_size"], _head_dim(flat)
    q, kv = flat["num_attention_heads"] * head, flat["num_key_value_heads"] * head
    target = flat.get("target_hidden_size") or d
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, features * target), "norm.weight": (d,)}
    if flat.get("norm_before_fc"):
        shapes["input_norm.weight"] = (features * target,)
    if flat.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(features)}
    for layer, part in enumerate(_parts(flat, dialect)):
        for name in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == 0 else [])):
            shapes[f"{part}{name}.weight"] = (d,)
        wide = 2 * d if layer == 0 else d
        for name, shape in {"q": (q, wide), "k": (kv, wide), "v": (kv, wide), "o": (d, q)}.items():
            shapes[f"{part}self_attn.{name}_proj.weight"] = shape
            if flat.get("attention_bias"):
                shapes[f"{part}self_attn.{name}_proj.bias"] = shape[:1]
        if flat["model_type"] == "qwen3":
            shapes |= {f"{part}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        for name, shape in {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)}.items():
            shapes[f"{part}mlp.{name}_proj.weight"] = shape
    if dialect == "peagle":
        shapes["mask_hidden"] = (1, 1, features * target)
    if dialect in ("deepspec", *_SPECULATORS) or target != d:
        shapes["embed_tokens.weight"] = (flat["vocab_size"], d)
    shapes["lm_head.weight"] = (flat.get("draft_vocab_size", flat["vocab_size"]), d)
    return shapes


def _weights(flat: dict[str, Any], dialect: str, features: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, flat.get("dtype", flat.get("torch_dtype", "float32")))
    weights = {}
    for name, shape in _shapes(flat, dialect, features).items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            tensor = 1 + 0.2 * tensor
        elif name.endswith("_proj.weight") or name == "fc.weight":
            tensor = 0.2 * tensor  # more would saturate attention
        elif name != "mask_hidden":
            tensor = 0.4 * tensor
        weights[name] = tensor.to(dtype)
    vocab, draft_vocab = flat["vocab_size"], flat.get("draft_vocab_size", flat["vocab_size"])
    if dialect == "specforge" or draft_vocab != vocab:  # SpecForge writes the maps of a whole vocabulary as well
        chosen = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(draft_vocab)  # offsets: target id = draft id + d2t[draft id]
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return weights
