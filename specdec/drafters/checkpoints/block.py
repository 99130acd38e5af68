"""Published formats of block drafters, each translated into one `BlockSpec`.

Three publishers, three conventions. *z-lab* (DFlash, DFlash 2): a flat Qwen3 configuration with a `dflash_config`
inside; layer ids name the layer whose output is read. *DeepSpec* (DSpark, and its own DFlash): flat, anchor-first, with
an embedding and a head of its own. *speculators*: the layers' configuration inside, ids that index `hidden_states`.
"""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.block import BlockDrafter, BlockModel, BlockSpec
from specdec.drafters.checkpoints.formats import Format, Target, Tensors
from specdec.drafters.checkpoints.keys import COUNT, FLAG, INTEGERS, NUMBER, SIZE, TEXT, Keys, section
from specdec.drafters.checkpoints.layers import decoder_keys, speculative_tokens, windows_of
from specdec.errors import UnsupportedError

ZLAB = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
DEEPSPEC = ("Qwen3DSparkModel",)
SPECULATORS = ("dflash", "dflash2", "dspark")


def dialect_of(config: Mapping[str, Any], names: frozenset[str] = frozenset()) -> str:  # noqa: ARG001 - other formats need the names
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


def read_spec(config: Mapping[str, Any], names: frozenset[str], target: Target | None) -> tuple[BlockSpec, Keys]:
    """The specification of a block drafter, and the keys it came from.

    Args:
        config: `config.json`.
        names: names of its tensors.
        target: where it is known, its states have its width; else the drafter's own.
    """
    dialect = dialect_of(config)
    if dialect == "z-lab":
        family = next(ZLAB[name] for name in config["architectures"] if name in ZLAB)
        keys = Keys({"dflash_config.": section(config, "dflash_config"), "": dict(config)})
        keys.take("dflash_config")
        fields = _zlab(keys, family, "lm_head.weight" in names)
    elif dialect == "DeepSpec":
        keys = Keys({"": dict(config)})
        fields = _deepspec(keys)
    else:
        inner = section(config, "transformer_layer_config")
        keys = Keys({"": dict(config), "transformer_layer_config.": inner})
        keys.take("transformer_layer_config", "speculators_config", "speculators_version")
        fields = _speculators(keys, keys.get("speculators_model_type", TEXT))
    common = decoder_keys(keys)
    width = common["hidden_size"] if target is None else target.hidden_size
    vocab = keys.get("vocab_size", SIZE)
    made: dict[str, Any] = {
        "feature_size": keys.get("target_hidden_size", SIZE, width, why="the target's width"),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "own_embedding": "embed_tokens.weight" in names,
        "own_head": "lm_head.weight" in names,
        **common,
        **fields,
    }
    return BlockSpec(**made), keys


def _zlab(keys: Keys, family: str, own_head: bool) -> dict[str, Any]:
    """A `DFlashDraftModel` or `DFlash2DraftModel` of z-lab."""
    windows = windows_of(keys)
    by_type = tuple(window is not None for window in windows)
    if keys.get("use_swa", FLAG, False, why="layer_types say it") and not any(by_type):
        windows = (keys.get("swa_window_size", SIZE, also=("sliding_window",)),) * len(windows)
    causal = keys.get("is_causal", FLAG, None, also=("causal",), why="sliding layers are causal, full ones are not")
    ids = keys.get("target_layer_ids", INTEGERS, None, why="spread evenly over num_target_layers")
    if ids is None:
        ids = _spread(keys.get("num_target_layers", SIZE), len(windows))
    projector = keys.get("projector_type", TEXT, "dflash", why="not named")
    if projector not in ("dflash", "dflash2"):
        raise UnsupportedError(f"projector_type {projector!r} is not served by this version.")
    if not keys.get("is_neox_style", FLAG, True, why="halves of a head are turned"):
        raise UnsupportedError("is_neox_style false (rotary embeddings of neighbours, not of halves) is not served.")
    keys.take("mask_token")
    fields: dict[str, Any] = {
        "family": family,
        "layout": "anchor_first" if keys.get("sample_from_anchor", FLAG, False, why="z-lab fills in") else "fill_in",
        "block_size": keys.get("block_size", SIZE, 16, why="that of z-lab's code"),
        "mask_token_id": keys.get("mask_token_id", COUNT),
        "feature_layers": tuple(layer + 1 for layer in ids),
        "windows": windows,
        "causal": by_type if causal is None else (causal,) * len(windows),
        "sinks": keys.get("attention_sink_bias", FLAG, False, why="none named"),
        "value_scale": keys.get("attention_value_scale", NUMBER, 1.0, why="none named"),
        "embedding_scale": keys.get("input_embedding_scale", NUMBER, 1.0, why="none named"),
        "output_multiplier": keys.get("output_multiplier", NUMBER, 1.0, why="none named"),
        "softcap": keys.get("final_logit_softcapping", NUMBER, None, why="none named") or None,
        "own_head": keys.get("has_own_lm_head", FLAG, own_head, why="whether there is a tensor lm_head.weight"),
    }
    if family == "dflash2":
        fields |= _dflash2(keys)
    return fields


def _dflash2(keys: Keys) -> dict[str, Any]:
    return {
        name: keys.get(name, SIZE)
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    }


def _markov(keys: Keys) -> dict[str, Any]:
    """The heads of DSpark, in the words of DeepSpec and speculators alike."""
    rank = keys.get("markov_rank", COUNT, 256, why="that of DSpark")
    kind = keys.get("markov_head_type", TEXT, "vanilla", why="that of DSpark")
    if kind not in ("vanilla", "gated", "rnn"):
        raise UnsupportedError(f"markov_head_type {kind!r} is not known; it must be vanilla, gated or rnn.")
    confident = keys.get("enable_confidence_head", FLAG, True, why="that of DSpark")
    with_token = keys.get("confidence_head_with_markov", FLAG, True, why="that of DSpark")
    confidence = ("hidden_token" if with_token and rank else "hidden") if confident else None
    return {"markov_rank": rank, "markov_kind": kind, "confidence": confidence}


def _deepspec(keys: Keys) -> dict[str, Any]:
    """A `Qwen3DSparkModel` of DeepSpec; without a Markov head it is what DeepSpec calls DFlash."""
    windows = windows_of(keys)
    return {
        "family": "dspark",
        "layout": "anchor_first",
        "block_size": keys.get("block_size", SIZE),
        "mask_token_id": keys.get("mask_token_id", COUNT),
        "feature_layers": tuple(layer + 1 for layer in keys.get("target_layer_ids", INTEGERS)),
        "windows": windows,
        "causal": tuple(window is not None for window in windows),
        **_markov(keys),
    }


def _speculators(keys: Keys, family: str) -> dict[str, Any]:
    """A drafter of speculators, whose ids index `hidden_states` as they are."""
    windows = windows_of(keys)
    bidirectional = keys.get(
        "sliding_window_non_causal", FLAG, family == "dflash2", why=f"that of speculators' {family}"
    )
    block_size = keys.get("block_size", SIZE, 8, why="that of speculators")
    drafted = speculative_tokens(keys)
    default, why = family == "dspark", f"that of speculators' {family}"
    if drafted in (block_size - 1, block_size):
        default, why = drafted == block_size, f"speculative_tokens {drafted} of block_size {block_size}"
    anchor_first = keys.get("sample_from_anchor", FLAG, default, why=why)
    fields: dict[str, Any] = {
        "family": family,
        "layout": "anchor_first" if anchor_first else "fill_in",
        "block_size": block_size,
        "mask_token_id": keys.get("mask_token_id", COUNT),
        "feature_layers": keys.get("aux_hidden_state_layer_ids", INTEGERS),
        "windows": windows,
        "window_from": "anchor" if any(windows) else "query",
        "causal": tuple(window is not None and not bidirectional for window in windows),
        "draft_vocab_size": keys.get("draft_vocab_size", SIZE, 32_000, why="that of speculators"),
    }
    if family == "dflash2":
        fields |= _dflash2(keys)
    if family == "dspark":
        fields |= _markov(keys)
    return fields


def _spread(target_layers: int, count: int) -> tuple[int, ...]:
    """Layer ids that z-lab's code assumes where none are given."""
    if count == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    return tuple(round(first + index * (last - first) / (count - 1)) for index in range(count))


CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def pack(tensors: Tensors) -> Tensors:
    """The tensors under our names: some publishers keep codebooks as embeddings."""
    codebooks = {f"{name}.weight": name for name in CODEBOOKS}
    return {codebooks.get(name, name): tensor for name, tensor in tensors.items()}


def published(name: str, names: frozenset[str]) -> str:
    """The publisher's name for one of ours."""
    return f"{name}.weight" if name in CODEBOOKS and f"{name}.weight" in names else name


def drafter(
    model: BlockModel, *, length: int | None, temperature: float | None, least_confidence: float | None
) -> BlockDrafter:
    """The drafter of a block model."""
    return BlockDrafter(model, length=length, temperature=temperature, least_confidence=least_confidence)


FORMAT = Format(
    known=f"{', '.join((*ZLAB, *DEEPSPEC))} and speculators' {', '.join(SPECULATORS)}",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, _: BlockModel(spec, shortlist),
    drafter=drafter,
    pack=pack,
    published=published,
    heads=lambda _: ("lm_head.weight", "markov_head.markov_w2.weight"),
)
