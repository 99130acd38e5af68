"""Drafters in published formats, so that others can serve them: what was written is read back before it counts."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec.drafters.block import BlockDrafter, BlockSpec
from specdec.drafters.checkpoints import block, eagle
from specdec.drafters.feature import EagleSpec, FeatureDrafter
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError

Publisher = Literal["z-lab", "speculators"]


def save_pretrained(
    drafter: BlockDrafter | FeatureDrafter,
    folder: str | Path,
    *,
    publisher: Publisher = "z-lab",
    verifier: str | None = None,
) -> Path:
    """Writes a drafter as `config.json` and `model.safetensors`; `from_pretrained` loads the same again.

    What is borrowed from the target is not written.

    Args:
        drafter: a block drafter, or one of EAGLE-3 or P-EAGLE.
        folder: made if it is not there; must not hold a checkpoint yet.
        publisher: whose format. z-lab's has DFlash and DFlash 2, that of speculators (0.9) DSpark, EAGLE-3, P-EAGLE
            and reduced vocabularies as well.
        verifier: name of the target, for the reader (speculators).

    Raises:
        UnsupportedError: if the format cannot say what the drafter is; the message names the fields.

    Example:
        >>> from specdec import drafters
        >>> drafters.save_pretrained(drafter, "my-drafter", publisher="speculators")  # doctest: +SKIP
    """
    spec: Any = getattr(getattr(drafter, "model", None), "spec", None)
    if not isinstance(spec, BlockSpec | EagleSpec):
        family = getattr(spec, "family", None)
        found = type(drafter).__name__ if family is None else f"one of family {family!r}"
        raise UnsupportedError(
            f"save_pretrained: takes a BlockDrafter, or a FeatureDrafter of EAGLE-3 or P-EAGLE, got {found}."
        )
    folder = Path(folder)
    if publisher not in ("z-lab", "speculators"):
        raise UnsupportedError(f"save_pretrained: publisher must be 'z-lab' or 'speculators', got {publisher!r}.")
    if (folder / "config.json").exists():
        raise UnsupportedError(f"save_pretrained: {folder} holds a checkpoint already; choose another folder.")
    held, shortlist = cast(nn.Module, drafter.model).state_dict(), drafter.model.shortlist
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in held.items()}
    tensors |= {} if shortlist is None else _maps(shortlist)
    if publisher == "speculators":
        config = _speculators(spec, verifier)
    elif isinstance(spec, BlockSpec):
        config = _zlab(spec)
    else:
        raise UnsupportedError(
            f"save_pretrained: the format of z-lab cannot say family {spec.family!r}; that of speculators can "
            "(publisher='speculators')."
        )
    told = _lost(config, frozenset(tensors), spec)
    if isinstance(spec, BlockSpec):
        # Readers take these from the target: neither format has them, a head of a reduced vocabulary excepted.
        told += ["an embedding of its own"] if spec.own_embedding else []
        told += ["an output head of its own"] if spec.own_head and (publisher == "z-lab" or shortlist is None) else []
    told += ["a reduced vocabulary"] if shortlist is not None and publisher == "z-lab" else []
    if shortlist is not None and not torch.equal(shortlist.ids, shortlist.ids.sort().values):
        told.append("a shortlist whose ids do not rise (t2d marks tokens without an order)")
    if told:
        raise UnsupportedError(
            f"save_pretrained: the format of {publisher} cannot say {', '.join(told)}. What each format can say is in "
            "the documentation of the drafters."
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _lost(config: dict[str, Any], names: frozenset[str], spec: BlockSpec | EagleSpec) -> list[str]:
    """What a reader of the configuration would not understand as it is meant."""
    format = block.FORMAT if isinstance(spec, BlockSpec) else eagle.FORMAT
    try:
        understood, _ = format.read_spec(config, names, None)
    except UnsupportedError as error:
        return [f"what its readers refuse: {str(error).rstrip('.')}"]
    lost = [item.name for item in fields(spec) if getattr(understood, item.name) != getattr(spec, item.name)]
    return [f"{name} {getattr(spec, name)!r}" for name in lost]


def _maps(shortlist: Shortlist) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a reduced vocabulary."""
    ids = shortlist.ids.cpu()
    marked = torch.zeros(shortlist.vocab_size, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def _decoder(spec: BlockSpec | EagleSpec, model_type: str = "qwen3") -> dict[str, Any]:
    """The layers, in the words of a Qwen3 or Llama configuration."""
    windows = {window for window in spec.windows if window is not None}
    return {
        "model_type": model_type,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.windows),
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "attention_bias": spec.attention_bias,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in spec.windows],
        "sliding_window": max(windows, default=None),
        "use_sliding_window": bool(windows),  # without it, transformers' Qwen3 configuration forgets the window
        "rope_parameters": spec.rope.to_config(spec.head_dim),
    }


def _dflash2(spec: BlockSpec) -> dict[str, Any]:
    names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    return {name: getattr(spec, name) for name in names} if spec.family == "dflash2" else {}


def _zlab(spec: BlockSpec) -> dict[str, Any]:
    """A configuration of z-lab's, which names the layer whose output is read."""
    inner = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": [state - 1 for state in spec.feature_layers],
        "sample_from_anchor": spec.layout == "anchor_first",
        "attention_sink_bias": spec.sinks,
        "attention_value_scale": spec.value_scale,
        "input_embedding_scale": spec.embedding_scale,
        "output_multiplier": spec.output_multiplier,
        "final_logit_softcapping": spec.softcap,
        **_dflash2(spec),
    }
    return {
        "architectures": ["DFlash2DraftModel" if spec.family == "dflash2" else "DFlashDraftModel"],
        **_decoder(spec),
        "target_hidden_size": spec.feature_size,
        # Where all layers agree this says so; otherwise only the rule by layer type can be said.
        "is_causal": spec.causal[0] if len(set(spec.causal)) == 1 else None,
        "dflash_config": inner,
    }


def _speculators(spec: BlockSpec | EagleSpec, verifier: str | None) -> dict[str, Any]:
    """A configuration of speculators 0.9, whose ids index `hidden_states`."""
    drafted = spec.slots(spec.block_size) if isinstance(spec, BlockSpec) else spec.depth
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [f"{CLASSES[spec.family]}DraftModel"],
        "speculators_model_type": spec.family,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": spec.family,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.feature_size,
        "tie_word_embeddings": False,
        **(_block(spec) if isinstance(spec, BlockSpec) else _eagle(spec)),
    }


CLASSES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "eagle3": "Eagle3",
    "peagle": "PEagle",
}
"""Families, and how speculators' classes are called."""


def _block(spec: BlockSpec) -> dict[str, Any]:
    """What speculators says of a block drafter."""
    sliding = [causal for causal, window in zip(spec.causal, spec.windows, strict=True) if window is not None]
    heads = {
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov_kind,
        "enable_confidence_head": spec.confidence is not None,
        "confidence_head_with_markov": spec.confidence == "hidden_token",
    }
    return {
        "transformer_layer_config": _decoder(spec),
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": list(spec.feature_layers),
        "mask_token_id": spec.mask_token_id,
        "sliding_window_non_causal": not any(sliding),
        "sample_from_anchor": spec.layout == "anchor_first",
        **_dflash2(spec),
        **(heads if spec.family == "dspark" else {}),
    }


def _eagle(spec: EagleSpec) -> dict[str, Any]:
    """What it says of EAGLE-3 and P-EAGLE; the kind of layer tells whether queries and keys are normed."""
    masked = {"mask_token_id": spec.mask_token_id} if spec.family == "peagle" else {}
    return {
        "transformer_layer_config": _decoder(spec, "qwen3" if spec.head_norms else "llama"),
        eagle.IDS: list(spec.feature_layers),
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
        "fc_norm": spec.fc_norm,
        "norm_before_fc": spec.norm_before_fc,
        **masked,
    }
