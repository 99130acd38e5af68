"""Published formats of block drafters, each translated into one `BlockSpec`.

Three publishers, three conventions. *z-lab* (DFlash, DFlash 2): a flat Qwen3 configuration with a `dflash_config`
inside; layer ids name the layer whose output is read. *DeepSpec* (DSpark, and its own DFlash): flat, anchor-first, with
an embedding and a head of its own. *speculators*: the layers' configuration inside, ids that index `hidden_states`.
"""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.block.spec import BlockSpec
from specdec.drafters.checkpoints.keys import Keys, Note
from specdec.drafters.rope import Rope
from specdec.errors import UnsupportedError

ZLAB = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
DEEPSPEC = ("Qwen3DSparkModel",)
SPECULATORS = ("dflash", "dflash2", "dspark")
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def dialect_of(config: Mapping[str, Any]) -> str:
    """Name of the published format, or an empty string.

    Example:
        >>> from specdec.drafters.checkpoints.block import dialect_of
        >>> dialect_of({"architectures": ["DFlashDraftModel"]}), dialect_of({"architectures": ["BertModel"]})
        ('z-lab', '')
    """
    architectures = config.get("architectures") or []
    if config.get("speculators_model_type") in SPECULATORS:
        return "speculators"
    if any(name in ZLAB for name in architectures):
        return "z-lab"
    if any(name in DEEPSPEC for name in architectures):
        return "DeepSpec"
    return ""


def read_spec(config: Mapping[str, Any], names: frozenset[str], feature_size: int | None) -> tuple[BlockSpec, Keys]:
    """The specification of a block drafter, and the keys it came from.

    Args:
        config: `config.json`.
        names: names of its tensors.
        feature_size: width of the target's states, where it is known; else the drafter's own width.
    """
    dialect = dialect_of(config)
    if dialect == "z-lab":
        family = next(ZLAB[name] for name in config["architectures"] if name in ZLAB)
        keys = Keys({"dflash_config.": dict(config.get("dflash_config") or {}), "": dict(config)})
        keys.take("dflash_config")
        fields = _zlab(keys, family, "lm_head.weight" in names)
    elif dialect == "DeepSpec":
        keys = Keys({"": dict(config)})
        fields = _deepspec(keys)
    elif dialect == "speculators":
        inner = dict(config.get("transformer_layer_config") or {})
        keys = Keys({"": dict(config), "transformer_layer_config.": inner})
        keys.take("transformer_layer_config", "speculators_config", "speculators_version")
        fields = _speculators(keys, str(keys.get("speculators_model_type")))
    else:
        raise UnsupportedError(
            f"architectures {config.get('architectures')!r} and speculators_model_type "
            f"{config.get('speculators_model_type')!r} are no drafter known here. Known are "
            f"{', '.join((*ZLAB, *DEEPSPEC))} and speculators' {', '.join(SPECULATORS)}."
        )
    _qwen3(keys)
    common = _layers(keys)
    width = feature_size if feature_size is not None else common["hidden_size"]
    vocab = keys.integer("vocab_size")
    made: dict[str, Any] = {
        "feature_size": keys.integer("target_hidden_size", width, why="the target's width"),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "own_embedding": "embed_tokens.weight" in names,
        "own_head": "lm_head.weight" in names,
        **common,
        **fields,
    }
    return BlockSpec(**made), keys


def _layers(keys: Keys) -> dict[str, Any]:
    """What all dialects say in the words of a Qwen3 configuration."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden // heads, why="hidden_size / num_attention_heads")
    keys.take(*ROPE_KEYS)
    merged = {key: value for part in reversed(keys.parts.values()) for key, value in part.items()}
    rope = Rope.from_config(merged, head_dim)
    keys.notes["rope"] = Note("rope", rope, " ".join(key for key in ROPE_KEYS if merged.get(key) is not None))
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": keys.integer("num_key_value_heads", heads, why="as many as query heads"),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6, why="that of Qwen3"),
        "attention_bias": keys.flag("attention_bias", False, why="that of Qwen3"),
        "rope": rope,
    }


def _qwen3(keys: Keys) -> None:
    """Refuses layers of another kind than those of the backbone."""
    activation = keys.get("hidden_act", "silu", why="that of Qwen3")
    if activation != "silu":
        raise UnsupportedError(f"hidden_act {activation!r} is not served; block drafters have 'silu'.")


def _windows(keys: Keys) -> tuple[int | None, ...]:
    """Sliding window of each layer."""
    layers = keys.integer("num_hidden_layers")
    full = ["full_attention"] * layers
    types = keys.get("layer_types", full, why="no sliding layers named")
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"layer_types {types!r} must name {layers} layers of full or sliding attention.")
    if "sliding_attention" not in types:
        keys.optional("sliding_window", float, why="no sliding layers")
        return (None,) * layers
    window = keys.integer("sliding_window", also=("swa_window_size",))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _zlab(keys: Keys, family: str, own_head: bool) -> dict[str, Any]:
    """A `DFlashDraftModel` or `DFlash2DraftModel` of z-lab."""
    windows = _windows(keys)
    by_type = tuple(window is not None for window in windows)
    if keys.flag("use_swa", False, why="layer_types say it") and not any(by_type):
        windows = (keys.integer("swa_window_size", also=("sliding_window",)),) * len(windows)
    causal = keys.optional("is_causal", bool, also=("causal",), why="sliding layers are causal, full ones are not")
    targets = keys.parts[""].get("num_target_layers")
    ids = keys.get("target_layer_ids", None, why="spread evenly over num_target_layers")
    ids = _spread(targets, len(windows)) if ids is None else keys.integers("target_layer_ids")
    projector = keys.get("projector_type", "dflash", why="not named")
    if projector not in ("dflash", "dflash2"):
        raise UnsupportedError(f"projector_type {projector!r} is not served by this version.")
    if not keys.flag("is_neox_style", True, why="halves of a head are turned"):
        raise UnsupportedError("is_neox_style false (rotary embeddings of neighbours, not of halves) is not served.")
    keys.take("mask_token")
    fields: dict[str, Any] = {
        "family": family,
        "layout": "anchor_first" if keys.flag("sample_from_anchor", False, why="z-lab fills in") else "fill_in",
        "block_size": keys.integer("block_size", 16, why="that of z-lab's code"),
        "mask_token_id": keys.integer("mask_token_id"),
        "feature_layers": tuple(layer + 1 for layer in ids),
        "windows": windows,
        "causal": by_type if causal is None else (causal,) * len(windows),
        "sinks": keys.flag("attention_sink_bias", False, why="none named"),
        "value_scale": keys.number("attention_value_scale", 1.0, why="none named"),
        "embedding_scale": keys.number("input_embedding_scale", 1.0, why="none named"),
        "output_multiplier": keys.number("output_multiplier", 1.0, why="none named"),
        "softcap": keys.optional("final_logit_softcapping", float, why="none named") or None,
        "own_head": keys.flag("has_own_lm_head", own_head, why="whether there is a tensor lm_head.weight"),
    }
    if family == "dflash2":
        fields |= _dflash2(keys)
    return fields


def _dflash2(keys: Keys) -> dict[str, Any]:
    return {
        name: keys.integer(name) for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    }


def _markov(keys: Keys) -> dict[str, Any]:
    """The heads of DSpark, in the words of DeepSpec and speculators alike."""
    rank = keys.integer("markov_rank", 256, why="that of DSpark")
    kind = keys.get("markov_head_type", "vanilla", why="that of DSpark")
    if kind not in ("vanilla", "gated", "rnn"):
        raise UnsupportedError(f"markov_head_type {kind!r} is not known; it must be vanilla, gated or rnn.")
    confident = keys.flag("enable_confidence_head", True, why="that of DSpark")
    with_token = keys.flag("confidence_head_with_markov", True, why="that of DSpark")
    confidence = ("hidden_token" if with_token and rank else "hidden") if confident else None
    return {"markov_rank": rank, "markov_kind": kind, "confidence": confidence}


def _deepspec(keys: Keys) -> dict[str, Any]:
    """A `Qwen3DSparkModel` of DeepSpec; without a Markov head it is what DeepSpec calls DFlash."""
    windows = _windows(keys)
    return {
        "family": "dspark",
        "layout": "anchor_first",
        "block_size": keys.integer("block_size"),
        "mask_token_id": keys.integer("mask_token_id"),
        "feature_layers": tuple(layer + 1 for layer in keys.integers("target_layer_ids")),
        "windows": windows,
        "causal": tuple(window is not None for window in windows),
        **_markov(keys),
    }


def _speculators(keys: Keys, family: str) -> dict[str, Any]:
    """A drafter of speculators, whose ids index `hidden_states` as they are."""
    windows = _windows(keys)
    bidirectional = keys.flag("sliding_window_non_causal", family == "dflash2", why=f"that of speculators' {family}")
    block_size = keys.integer("block_size", 8, why="that of speculators")
    drafted = _speculative_tokens(keys.parts[""])
    default, why = family == "dspark", f"that of speculators' {family}"
    if drafted in (block_size - 1, block_size):
        default, why = drafted == block_size, f"speculative_tokens {drafted} of block_size {block_size}"
    anchor_first = keys.flag("sample_from_anchor", default, why=why)
    fields: dict[str, Any] = {
        "family": family,
        "layout": "anchor_first" if anchor_first else "fill_in",
        "block_size": block_size,
        "mask_token_id": keys.integer("mask_token_id"),
        "feature_layers": keys.integers("aux_hidden_state_layer_ids"),
        "windows": windows,
        "window_from": "anchor" if any(windows) else "query",
        "causal": tuple(window is not None and not bidirectional for window in windows),
        "draft_vocab_size": keys.integer("draft_vocab_size", 32_000, why="that of speculators"),
    }
    if family == "dflash2":
        fields |= _dflash2(keys)
    if family == "dspark":
        fields |= _markov(keys)
    return fields


def _speculative_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens that the publisher drafts; older files say in no other way which slot predicts which token."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found = methods[0].get("speculative_tokens")
    return found if isinstance(found, int) else None


def _spread(target_layers: int | None, count: int) -> tuple[int, ...]:
    """Layer ids that z-lab's code assumes where none are given."""
    if target_layers is None:
        raise UnsupportedError("config.json has neither 'target_layer_ids' nor 'num_target_layers'.")
    if count == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    return tuple(round(first + index * (last - first) / (count - 1)) for index in range(count))
