"""Tiny random checkpoints of block drafters, in the layouts in which DFlash, DFlash 2 and DSpark are published.

The shapes fit the library's tiny models (vocabulary 97, hidden size 48); every size differs from the others, so that
a transposed or misread tensor cannot load. Weights are large enough for each of them to matter.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, MASK = 48, 97, 96
ABSENT = object()  # as an override: the key is left out of config.json


@dataclass
class Written:
    """A checkpoint on disk and what is needed to compute with it by other means.

    Args:
        folder: where config.json and model.safetensors are.
        config: the content of config.json.
        weights: the content of model.safetensors.
        reference: the settings for `reference.draft`.
        feature_layers: the indices into a Hugging Face model's `hidden_states` that the features come from.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    reference: dict[str, Any]
    feature_layers: tuple[int, ...]

    def matrices(self, embed: Tensor, head: Tensor) -> dict[str, Tensor]:
        """The arguments `embed` and `head` of `reference.draft`: the checkpoint's own, else those of the target."""
        own = self.weights
        return {"embed": own.get("embed_tokens.weight", embed), "head": own.get("lm_head.weight", head)}


def write(
    folder: Path,
    dialect: str,
    *,
    seed: int = 0,
    num_target_layers: int = 2,
    num_hidden_layers: int | None = None,
    **overrides: Any,
) -> Written:
    """Write a random checkpoint.

    Args:
        folder: created if need be.
        dialect: one of `DIALECTS`.
        seed: seed of the weights and of the reduced vocabulary.
        num_target_layers: of the target; the features follow from it.
        num_hidden_layers: of the drafter; layer types are repeated or cut.
        **overrides: keys of config.json. A key replaces the one of that name wherever it stands, else it is added
            where its format has it; a dictionary is merged into the section of that name; `ABSENT` leaves the key
            out. Tensors and settings follow.
    """
    config = _CONFIGS[dialect](num_target_layers)
    if num_hidden_layers is not None:
        section = config.get("transformer_layer_config", config)
        section["num_hidden_layers"] = num_hidden_layers
        section["layer_types"] = (section["layer_types"] * num_hidden_layers)[:num_hidden_layers]
    for name, value in overrides.items():
        _override(config, name, value)
    flat = _flat(config)
    if "speculators_config" in config:
        tokens = flat["block_size"] - (0 if _from_anchor(flat, dialect) else 1)
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    weights = _weights(flat, dialect, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layers = flat["aux_hidden_state_layer_ids"] if "aux_hidden_state_layer_ids" in flat else _after(flat)
    return Written(folder, config, weights, _reference(flat, dialect), tuple(layers))


# ---------------------------------------------------------------------------------------------------------- config.json


def _qwen3(layer_types: list[str], sliding_window: int | None, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 56,
        "layer_types": layer_types,
        "max_position_embeddings": 512,
        "max_window_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_hidden_layers": len(layer_types),
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "sliding_window": sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding_window is not None,
        "vocab_size": VOCAB,
        **rest,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _features(target_layers: int) -> list[int]:
    """Two layers of the target, counted from 0; the last one, whose state Hugging Face norms, only if need be."""
    return [0, target_layers - 2] if target_layers > 2 else list(range(target_layers))


def _dflash_flat(target_layers: int) -> dict[str, Any]:
    return {
        **_qwen3(["full_attention"] * 2, None, rope_theta=5000.0, rope_scaling=None, dtype="float32"),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 6,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": _features(target_layers)},
    }


def _dflash_nested(target_layers: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        **_qwen3(kinds, 5, rope_parameters=_rope(20000.0), dtype="float32"),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_target_layers": target_layers,
        "dflash_config": {"block_size": 5, "mask_token_id": MASK, "target_layer_ids": _features(target_layers)},
    }


def _dflash2(target_layers: int) -> dict[str, Any]:
    kinds = ["sliding_attention"] * 5
    return {
        **_qwen3(kinds, 5, rope_parameters=_rope(50000.0), rms_norm_eps=1e-5, dtype="float32"),
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "num_target_layers": target_layers,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": MASK,
            "target_layer_ids": _features(target_layers),
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 6,
            "selector_top_k": 7,
            "output_multiplier": 0.2,
            "final_logit_softcapping": 20.0,
        },
    }


def _dspark(target_layers: int, markov: str | None) -> dict[str, Any]:
    config = {
        **_qwen3(["full_attention"] * 2, None, rope_parameters=_rope(8000.0), dtype="float32"),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "enable_confidence_head": markov is not None,
        "markov_rank": 0 if markov is None else 6,
        "mask_token_id": MASK,
        "num_anchors": 512,
        "num_target_layers": target_layers,
        "target_layer_ids": _features(target_layers),
    }
    if markov is not None:  # DeepSpec writes these two for the heads that exist
        config |= {"markov_head_type": markov, "confidence_head_with_markov": True}
    return config


def _speculators(target_layers: int, algorithm: str, architecture: str, theta: float, **rest: Any) -> dict[str, Any]:
    decoder = _qwen3(["sliding_attention", "full_attention"], 5, rope_parameters=_rope(theta), pad_token_id=None)
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1, "speculative_tokens": None}
    return {
        "architectures": [architecture],
        "auto_map": {"": f"config.{architecture.replace('DraftModel', 'SpeculatorConfig')}"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in _features(target_layers)],
        "block_size": 6,
        "draft_vocab_size": 40,
        "dtype": "float32",
        "mask_token_id": MASK,
        "sample_from_anchor": algorithm == "dspark",
        "sliding_window_non_causal": False,
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
        "transformer_layer_config": decoder,
        **rest,
    }


def _speculators_dspark(target_layers: int) -> dict[str, Any]:
    heads = {"markov_rank": 6, "markov_head_type": "vanilla"}
    heads |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    window = {"sliding_window_non_causal": True}
    return _speculators(target_layers, "dspark", "DSparkDraftModel", 4000.0, **heads, **window)


def _speculators_dflash2(target_layers: int) -> dict[str, Any]:
    parts = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 7}
    whole = {"draft_vocab_size": VOCAB, "sliding_window_non_causal": True}
    return _speculators(target_layers, "dflash2", "DFlash2DraftModel", 6000.0, **parts, **whole)


_CONFIGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dflash_flat": _dflash_flat,
    "dflash_nested": _dflash_nested,
    "dflash2": _dflash2,
    "dspark_vanilla": lambda layers: _dspark(layers, "vanilla"),
    "dspark_gated": lambda layers: _dspark(layers, "gated"),
    "dspark_rnn": lambda layers: _dspark(layers, "rnn"),
    "dspark_dflash": lambda layers: _dspark(layers, None),
    "speculators_dflash": lambda layers: _speculators(layers, "dflash", "DFlashDraftModel", 3000.0),
    "speculators_dspark": _speculators_dspark,
    "speculators_dflash2": _speculators_dflash2,
}
DIALECTS = tuple(_CONFIGS)

_SECTIONS = ("dflash_config", "transformer_layer_config")
_TOP_LEVEL = ("is_causal", "rope_theta", "rope_parameters", "draft_vocab_size", "dtype")


def _override(config: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict) and isinstance(config.get(name), dict):
        for key, inner in value.items():
            _put(config[name], key, inner)
        return
    places = [place for place in (config, *(config.get(s, {}) for s in _SECTIONS)) if name in place]
    if not places:
        places = [config if name in _TOP_LEVEL else config.get("dflash_config", config)]
    for place in places:
        _put(place, name, value)


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    place.pop(name, None)
    if value is not ABSENT:
        place[name] = value


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """All keys of a configuration in one place; a key of `dflash_config` goes before one of the same name above."""
    return {**config.get("transformer_layer_config", {}), **config, **config.get("dflash_config", {})}


# ------------------------------------------------------------------------------------------- settings of the reference


def _after(flat: dict[str, Any]) -> list[int]:
    """DFlash counts layers from 0 and means their outputs; Hugging Face lists the embedding's output before them."""
    return [layer + 1 for layer in flat["target_layer_ids"]]


def _from_anchor(flat: dict[str, Any], dialect: str) -> bool:
    return flat.get("sample_from_anchor", "dspark" in dialect)


def _reference(flat: dict[str, Any], dialect: str) -> dict[str, Any]:
    kinds = flat.get("layer_types") or ["full_attention"] * flat["num_hidden_layers"]
    if flat.get("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * len(kinds)
    window = flat.get("swa_window_size", flat["sliding_window"])
    sliding = [kind == "sliding_attention" for kind in kinds]
    trained = dialect.startswith("speculators")
    both_ways = trained and flat.get("sliding_window_non_causal", dialect == "speculators_dflash2")
    causal = [slides and not both_ways for slides in sliding]
    forced = flat.get("is_causal", flat.get("causal"))
    theta = flat["rope_theta"] if "rope_theta" in flat else flat["rope_parameters"]["rope_theta"]
    confidence = "hidden_token" if flat.get("confidence_head_with_markov") else "hidden"
    return {
        "mask_token_id": flat["mask_token_id"],
        "heads": flat["num_attention_heads"],
        "kv_heads": flat["num_key_value_heads"],
        "head_dim": flat["head_dim"],
        "eps": flat["rms_norm_eps"],
        "rope_theta": theta,
        "windows": [window if slides else None for slides in sliding],
        "causal": causal if forced is None else [forced] * len(kinds),
        "window_from": "anchor" if trained else "query",
        "value_scale": flat.get("attention_value_scale", 1.0),
        "embedding_scale": flat.get("input_embedding_scale", 1.0),
        "output_multiplier": flat.get("output_multiplier", 1.0),
        "softcap": flat.get("final_logit_softcapping"),
        "layout": "anchor_first" if _from_anchor(flat, dialect) else "fill_in",
        "conv_kernel_size": flat.get("conv_kernel_size"),
        "conv_group_size": flat.get("conv_group_size"),
        "selector_top_k": flat.get("selector_top_k"),
        "markov_kind": flat["markov_head_type"] if flat.get("markov_rank") else None,
        "confidence": confidence if flat.get("enable_confidence_head") else None,
    }


# -------------------------------------------------------------------------------------------------------------- tensors


def _shapes(flat: dict[str, Any], dialect: str) -> dict[str, tuple[int, ...]]:
    d, vocab, ffn, head = flat["hidden_size"], flat["vocab_size"], flat["intermediate_size"], flat["head_dim"]
    q, kv = flat["num_attention_heads"] * head, flat["num_key_value_heads"] * head
    draft_vocab, rank = flat.get("draft_vocab_size", vocab), flat.get("markov_rank", 0)
    ids = flat["aux_hidden_state_layer_ids"] if "aux_hidden_state_layer_ids" in flat else flat["target_layer_ids"]
    target = flat.get("target_hidden_size") or d
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, len(ids) * target), "hidden_norm.weight": (d,)}
    for layer in range(flat["num_hidden_layers"]):
        part = f"layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{part}{name}.weight"] = (d,)
        for name, shape in {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}.items():
            shapes[f"{part}self_attn.{name}_proj.weight"] = shape
            if flat["attention_bias"]:
                shapes[f"{part}self_attn.{name}_proj.bias"] = shape[:1]
        for name in ("q_norm", "k_norm"):
            shapes[f"{part}self_attn.{name}.weight"] = (head,)
        if flat.get("attention_sink_bias"):
            shapes[f"{part}self_attn.attention_sink_bias"] = (flat["num_attention_heads"],)
        for name, shape in {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)}.items():
            shapes[f"{part}mlp.{name}_proj.weight"] = shape
        for name in ("attention_conv", "mlp_conv") if "conv_kernel_size" in flat else ():
            taps = flat["conv_kernel_size"]
            shapes[f"{part}{name}.base_kernel"] = (2, taps, d)
            shapes[f"{part}{name}.kernel_projection.weight"] = (2 * taps * d // flat["conv_group_size"], d)
    shapes["norm.weight"] = (d,)
    if "selector_rank" in flat:
        for name in ("predecessor_codebook", "successor_codebook"):  # parameters, not modules: no ".weight"
            shapes[f"candidate_selector.{name}"] = (vocab, flat["selector_rank"])
        shapes["candidate_selector.hidden_projection.weight"] = (flat["selector_rank"], d)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, rank)
        gates = {"gated": ("gate_proj", rank, d + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + d)}
        if flat["markov_head_type"] in gates:
            name, rows, columns = gates[flat["markov_head_type"]]
            shapes[f"markov_head.{name}.weight"] = (rows, columns)
            shapes[f"markov_head.{name}.bias"] = (rows,)
    if flat.get("enable_confidence_head"):
        shapes["confidence_head.proj.weight"] = (1, d + (rank if flat.get("confidence_head_with_markov") else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if dialect.startswith("dspark"):
        shapes["embed_tokens.weight"] = (vocab, d)
    if dialect.startswith("dspark") or draft_vocab != vocab:
        shapes["lm_head.weight"] = (draft_vocab, d)
    return shapes


def _weights(flat: dict[str, Any], dialect: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, flat.get("dtype", "float32"))
    weights = {}
    for name, shape in _shapes(flat, dialect).items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            tensor = 1 + 0.2 * tensor
        elif name.endswith("base_kernel"):  # its first tap begins as the identity
            tensor = 0.3 * tensor
            tensor[:, 0] += 1
        elif name.endswith(("kernel_projection.weight", "confidence_head.proj.weight")):
            tensor = 0.15 * tensor  # more would saturate the sigmoid, or grow with every layer
        else:
            tensor = 0.4 * tensor
        weights[name] = tensor.to(dtype)
    vocab, draft_vocab = flat["vocab_size"], flat.get("draft_vocab_size", flat["vocab_size"])
    if draft_vocab != vocab:
        chosen = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(draft_vocab)  # offsets: target id = draft id + d2t[draft id]
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return weights
