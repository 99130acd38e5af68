"""Gemma 4 assistants, in the format of transformers' `Gemma4AssistantForCausalLM`."""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.checkpoints.formats import Format, Target, feature_drafter
from specdec.drafters.checkpoints.keys import Keys, Note
from specdec.drafters.feature import AssistantModel, AssistantSpec
from specdec.drafters.rope import Rope
from specdec.errors import UnsupportedError

TARGETS_OWN = (
    "attention_k_eq_v",
    "global_partial_rotary_factor",
    "num_global_key_value_heads",
    "num_key_value_heads",
    "num_kv_shared_layers",
    "use_bidirectional_attention",
    "use_double_wide_mlp",
    "vocab_size_per_layer_input",
    "final_logit_softcapping",
)
"""Keys about the target's keys and values, or that transformers' assistant does not read."""


def dialect_of(config: Mapping[str, Any], names: frozenset[str]) -> str:  # noqa: ARG001 - the configuration tells it
    """Name of the published format, or an empty string."""
    return "transformers" if config.get("model_type") == "gemma4_assistant" else ""


def read_spec(config: Mapping[str, Any], names: frozenset[str], target: Target | None) -> tuple[AssistantSpec, Keys]:
    """The specification of an assistant, and the keys it came from.

    Args:
        config: `config.json`.
        names: names of the tensors.
        target: whose last state it reads.
    """
    if target is None:
        raise UnsupportedError("an assistant's file does not tell how many layers its target has. Pass target=.")
    keys = Keys({"": dict(config), "text_config.": dict(config.get("text_config") or {})})
    keys.take("text_config", "hidden_activation", *TARGETS_OWN)
    for name, served in (("enable_moe_block", False), ("attention_bias", False)):
        if keys.flag(name, served, why="that of Gemma 4") != served:
            raise UnsupportedError(f"{name} {not served} is not served.")
    if keys.integer("hidden_size_per_layer_input", 0, why="none") != 0:
        raise UnsupportedError("hidden_size_per_layer_input above 0 is not served.")
    activation = keys.get("hidden_activation", "gelu_pytorch_tanh", why="that of Gemma 4")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedError(f"hidden_activation {activation!r} is not served; Gemma 4 has 'gelu_pytorch_tanh'.")
    kinds = keys.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != keys.integer("num_hidden_layers"):
        raise UnsupportedError(f"config.json: 'layer_types' must name a type for each layer, got {kinds!r}.")
    head_dim = keys.integer("head_dim")
    dims = {"sliding_attention": head_dim, "full_attention": keys.integer("global_head_dim", head_dim, why="head_dim")}
    blocks = keys.get("rope_parameters")
    if not isinstance(blocks, dict) or not set(kinds) <= set(blocks):
        raise UnsupportedError(f"config.json: 'rope_parameters' must have a section for each of {sorted(set(kinds))}.")
    ropes = {kind: Rope.from_config({"rope_parameters": blocks[kind]}, dims.get(kind, head_dim)) for kind in set(kinds)}
    ordered = keys.flag("use_ordered_embeddings", False, why="no centroid head")
    centroids = keys.integer("num_centroids", 2048, why="that of transformers")
    chosen = keys.integer("centroid_intermediate_top_k", 32, why="that of transformers")
    keys.notes["feature_layers"] = Note("feature_layers", (target.layers,), "the target's last state", assumed=True)
    return AssistantSpec(
        feature_layers=(target.layers,),
        feature_size=keys.integer("backbone_hidden_size", 1536, why="that of transformers"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        kinds=tuple(kinds),
        head_dims=tuple(dims.get(kind, head_dim) for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        window=keys.integer("sliding_window"),
        vocab_size=keys.integer("vocab_size"),
        draft_vocab_size=keys.integer("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6, why="that of Gemma 4"),
        num_centroids=centroids if ordered else 0,
        chosen_centroids=chosen if ordered else 0,
        separate_head="lm_head.weight" in names,
    ), keys


FORMAT = Format(
    known="Gemma4AssistantForCausalLM",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, _: AssistantModel(spec, shortlist),
    drafter=feature_drafter,
    integers=frozenset({"masked_embedding.token_ordering"}),
    heads=lambda _: (),
)
