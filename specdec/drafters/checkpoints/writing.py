"""Drafters in published formats, so that others can serve them: what was written is read back before it counts."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafters.block import BlockDrafter, BlockSpec
from specdec.drafters.checkpoints.block import read_spec
from specdec.errors import UnsupportedError

Publisher = Literal["z-lab", "speculators"]


def save_pretrained(
    drafter: BlockDrafter, folder: str | Path, *, publisher: Publisher = "z-lab", verifier: str | None = None
) -> Path:
    """Writes a block drafter as `config.json` and `model.safetensors`; `from_pretrained` loads the same again.

    What is borrowed from the target is not written.

    Args:
        drafter: the drafter.
        folder: made if it is not there; must not hold a checkpoint yet.
        publisher: whose format. z-lab's has DFlash and DFlash 2, that of speculators (0.9) DSpark and reduced
            vocabularies as well.
        verifier: name of the target, for the reader (speculators).

    Raises:
        UnsupportedError: if the format cannot say what the drafter is; the message names the fields.

    Example:
        >>> from specdec import drafters
        >>> drafters.save_pretrained(drafter, "my-drafter", publisher="speculators")  # doctest: +SKIP
    """
    if not isinstance(drafter, BlockDrafter):
        raise UnsupportedError(f"save_pretrained: takes a BlockDrafter, got {type(drafter).__name__}.")
    folder, spec = Path(folder), drafter.model.spec
    if publisher not in ("z-lab", "speculators"):
        raise UnsupportedError(f"save_pretrained: publisher must be 'z-lab' or 'speculators', got {publisher!r}.")
    if (folder / "config.json").exists():
        raise UnsupportedError(f"save_pretrained: {folder} holds a checkpoint already; choose another folder.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.model.state_dict().items()}
    tensors |= _maps(drafter)
    config = _zlab(spec) if publisher == "z-lab" else _speculators(spec, verifier)
    names = frozenset(tensors)
    understood, _ = read_spec(config, names, None)
    lost = [item.name for item in fields(spec) if getattr(understood, item.name) != getattr(spec, item.name)]
    told = [f"{name} {getattr(spec, name)!r}" for name in lost]
    reduced = drafter.model.shortlist is not None
    # Readers take these from the target: neither format has them, a head of a reduced vocabulary excepted.
    told += ["an embedding of its own"] if spec.own_embedding else []
    told += ["an output head of its own"] if spec.own_head and (publisher == "z-lab" or not reduced) else []
    told += ["a reduced vocabulary"] if reduced and publisher == "z-lab" else []
    if told:
        raise UnsupportedError(
            f"save_pretrained: the format of {publisher} cannot say {', '.join(told)}. What each format can say is in "
            "the documentation of block drafters."
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _maps(drafter: BlockDrafter) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a reduced vocabulary."""
    shortlist = drafter.model.shortlist
    if shortlist is None:
        return {}
    ids = shortlist.ids
    marked = torch.zeros(drafter.model.spec.vocab_size, dtype=torch.bool)
    marked[ids.cpu()] = True
    return {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": marked}


def _qwen3(spec: BlockSpec) -> dict[str, Any]:
    """The layers, in the words of a Qwen3 configuration."""
    windows = {window for window in spec.windows if window is not None}
    return {
        "model_type": "qwen3",
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
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in spec.windows],
        "sliding_window": max(windows, default=None),
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
        **_qwen3(spec),
        "target_hidden_size": spec.feature_size,
        # Where all layers agree this says so; otherwise only the rule by layer type can be said.
        "is_causal": spec.causal[0] if len(set(spec.causal)) == 1 else None,
        "dflash_config": inner,
    }


def _speculators(spec: BlockSpec, verifier: str | None) -> dict[str, Any]:
    """A configuration of speculators 0.9, whose ids index `hidden_states`."""
    sliding = [causal for causal, window in zip(spec.causal, spec.windows, strict=True) if window is not None]
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.slots(spec.block_size),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    heads = {
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov_kind,
        "enable_confidence_head": spec.confidence is not None,
        "confidence_head_with_markov": spec.confidence == "hidden_token",
    }
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
    return {
        "architectures": [names[spec.family]],
        "speculators_model_type": spec.family,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": spec.family,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": _qwen3(spec),
        "draft_vocab_size": spec.draft_vocab_size,
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": list(spec.feature_layers),
        "mask_token_id": spec.mask_token_id,
        "target_hidden_size": spec.feature_size,
        "sliding_window_non_causal": not any(sliding),
        "sample_from_anchor": spec.layout == "anchor_first",
        **_dflash2(spec),
        **(heads if spec.family == "dspark" else {}),
    }
