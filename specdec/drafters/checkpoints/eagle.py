"""Published formats of EAGLE-3 drafters, each translated into one `EagleSpec`.

*SafeAILab* (the authors of EAGLE): a flat Llama configuration, a layer named `midlayer`, the target's embedding.
*SpecForge*: the same with a name of its own. *DeepSpec*: flat Qwen3, ids that name the layer whose output is read, an
embedding and a head of its own. *speculators* (EAGLE-3 and P-EAGLE): the layers' configuration inside.
"""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.checkpoints.formats import Format, Target, Tensors, feature_drafter
from specdec.drafters.checkpoints.keys import COUNT, FLAG, INTEGERS, SIZE, TEXT, Keys, section
from specdec.drafters.checkpoints.layers import decoder_keys, speculative_tokens, windows_of
from specdec.drafters.feature import EagleSpec
from specdec.drafters.feature.eagle import eagle_model
from specdec.errors import UnsupportedError

SPECULATORS = ("eagle3", "peagle")
MIDLAYER = "midlayer."
IDS = "eagle_aux_hidden_state_layer_ids"


def dialect_of(config: Mapping[str, Any], names: frozenset[str]) -> str:
    """Name of the published format, or an empty string; the authors' own is known by its tensors alone."""
    architectures = config.get("architectures") or []
    if config.get("speculators_model_type") in SPECULATORS:
        return "speculators"
    if "LlamaForCausalLMEagle3" in architectures:
        return "SpecForge"
    if "Qwen3Eagle3Model" in architectures:
        return "DeepSpec"
    return "SafeAILab" if any(name.startswith(MIDLAYER) for name in names) else ""


def pack(tensors: Tensors) -> Tensors:
    """The tensors under our names."""
    layer = "layers.0."
    return {
        layer + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name: tensor
        for name, tensor in tensors.items()
    }


def published(name: str, names: frozenset[str]) -> str:
    """The publisher's name for one of ours."""
    layer = "layers.0."
    inside = name.startswith(layer) and any(other.startswith(MIDLAYER) for other in names)
    return MIDLAYER + name.removeprefix(layer) if inside else name


def read_spec(config: Mapping[str, Any], names: frozenset[str], target: Target | None) -> tuple[EagleSpec, Keys]:
    """The specification of an EAGLE-3 drafter, and the keys it came from.

    Args:
        config: `config.json`.
        names: names of its tensors.
        target: where it is known, its states have its width; else the drafter's own. Some files leave it to the
            number of its layers which states are read.
    """
    dialect = dialect_of(config, names)
    if dialect == "speculators":
        keys = Keys({"": dict(config), "transformer_layer_config.": section(config, "transformer_layer_config")})
        keys.take("transformer_layer_config", "speculators_config", "speculators_version", "embed_requires_grad")
        fields = _speculators(keys, target)
    else:
        keys = Keys({"": dict(config), "eagle_config.": section(config, "eagle_config")})
        keys.take("eagle_config", "num_hidden_layers", "layer_types", "sliding_window", "use_aux_hidden_state")
        fields = _deepspec(keys) if dialect == "DeepSpec" else _flat(keys, int(dialect == "SpecForge"), target)
    if keys.get("mlp_bias", FLAG, False, why="that of Llama"):
        raise UnsupportedError("mlp_bias true is not served; EAGLE-3 drafters have none.")
    common = decoder_keys(keys, theta=10_000.0)
    if common["rope"].dim != common["head_dim"]:
        raise UnsupportedError(
            "partial_rotary_factor below 1 is read in two ways by EAGLE-3 engines; it is not served."
        )
    vocab, width = keys.get("vocab_size", SIZE), common["hidden_size"] if target is None else target.hidden_size
    made: dict[str, Any] = {
        "feature_size": keys.get("target_hidden_size", SIZE, width, why="the target's width"),
        "vocab_size": vocab,
        "draft_vocab_size": keys.get("draft_vocab_size", SIZE, vocab, why="all tokens"),
        "norm_output": keys.get("norm_output", FLAG, False, why="that of EAGLE-3"),
        "fc_norm": keys.get("fc_norm", FLAG, False, why="that of EAGLE-3"),
        "norm_before_fc": keys.get("norm_before_fc", FLAG, False, why="that of EAGLE-3"),
        "own_embedding": "embed_tokens.weight" in names,
        "own_head": "lm_head.weight" in names,
        **common,
        **fields,
    }
    return EagleSpec(**made), keys


def _flat(keys: Keys, nested_shift: int, target: Target | None) -> dict[str, Any]:
    """A drafter of SafeAILab or SpecForge; a list inside `eagle_config` names, with SpecForge, layers' outputs."""
    shift = nested_shift if IDS not in keys.parts[""] else 0
    return {
        "family": "eagle3",
        "feature_layers": _layers(keys, target, shift),
        "windows": (None,),
        "norm_before_residual": keys.get("norm_before_residual", FLAG, False, why="that of SafeAILab's code"),
        "depth": keys.get("ttt_length", SIZE, 7, why="that of SafeAILab's training"),
    }


def _layers(keys: Keys, target: Target | None, shift: int = 0) -> tuple[int, ...]:
    """States that are read; where none are named, all readers take the same three."""
    ids = keys.get(IDS, INTEGERS, None, also=("target_layer_ids",), why="an early, a middle and a late state")
    if ids is not None:
        return tuple(layer + shift for layer in ids)
    if target is None:
        raise UnsupportedError(
            f"config.json has no {IDS!r}; which states are read depends on the number of the target's layers. "
            "Pass target=."
        )
    return tuple(dict.fromkeys((2, target.layers // 2, target.layers - 3)))


def _deepspec(keys: Keys) -> dict[str, Any]:
    """A `Qwen3Eagle3Model` of DeepSpec."""
    if keys.get("draft_num_hidden_layers", SIZE, 1, why="that of DeepSpec") != 1:
        raise UnsupportedError("draft_num_hidden_layers must be 1: no reader of DeepSpec's drafters has more.")
    keys.take("step_loss_decay", "target_model_name_or_path")
    return {
        "family": "eagle3",
        "feature_layers": tuple(layer + 1 for layer in keys.get("target_layer_ids", INTEGERS)),
        "windows": (None,),
        "head_norms": True,
        "norm_before_residual": keys.get("norm_before_residual", FLAG, False, why="that of DeepSpec"),
        "depth": keys.get("ttt_length", SIZE, 7, why="that of DeepSpec"),
    }


def _speculators(keys: Keys, target: Target | None) -> dict[str, Any]:
    """A drafter of speculators, whose ids index `hidden_states` as they are."""
    family = keys.get("speculators_model_type", TEXT)
    inner = Keys({"transformer_layer_config.": keys.parts["transformer_layer_config."]})
    model_type = inner.get("model_type", TEXT, "llama")
    if model_type not in ("llama", "qwen3"):
        raise UnsupportedError(f"transformer_layer_config.model_type {model_type!r} is not served; llama or qwen3.")
    windows = windows_of(keys)
    if not inner.get("use_sliding_window", FLAG, True) and any(windows) and model_type == "qwen3":
        raise UnsupportedError(
            "layer_types names sliding layers and use_sliding_window is false, which readers take in two ways; "
            "make them agree."
        )
    drafted = speculative_tokens(keys)
    why = "speculative_tokens" if drafted else "that of EAGLE-3"
    parallel = {"mask_token_id": keys.get("mask_token_id", COUNT)} if family == "peagle" else {}
    return {
        "family": family,
        "feature_layers": _layers(keys, target),
        "windows": windows,
        "head_norms": model_type == "qwen3",
        # Readers disagree on what a missing key means.
        "norm_before_residual": keys.get("norm_before_residual", FLAG),
        "depth": keys.get("ttt_length", SIZE, drafted or 7, why=why),
        **parallel,
    }


FORMAT = Format(
    known=f"LlamaForCausalLMEagle3, Qwen3Eagle3Model, tensors {MIDLAYER}* and speculators' {', '.join(SPECULATORS)}",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, _: eagle_model(spec, shortlist),
    drafter=feature_drafter,
    pack=pack,
    published=published,
)
