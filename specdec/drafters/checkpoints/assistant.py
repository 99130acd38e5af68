"""Gemma 4 assistants, in the format of transformers' `Gemma4AssistantForCausalLM`."""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.checkpoints.formats import Format, Target, feature_drafter
from specdec.drafters.checkpoints.keys import COUNT, FLAG, NUMBER, OBJECT, SIZE, TEXT, TEXTS, Keys, Note, section
from specdec.drafters.checkpoints.layers import rope_of
from specdec.drafters.feature import AssistantModel, AssistantSpec
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
    "moe_intermediate_size",
    "num_experts",
    "top_k_experts",
)
"""Keys about the target's keys and values, about experts, or that transformers' assistant does not read."""


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
    keys = Keys({"": dict(config), "text_config.": section(config, "text_config")})
    keys.take("text_config", "hidden_activation", *TARGETS_OWN)
    for name, served in (("enable_moe_block", False), ("attention_bias", False)):
        if keys.get(name, FLAG, served, why="that of Gemma 4") != served:
            raise UnsupportedError(f"{name} {not served} is not served.")
    if keys.get("hidden_size_per_layer_input", COUNT, 0, why="none") != 0:
        raise UnsupportedError("hidden_size_per_layer_input above 0 is not served.")
    activation = keys.get("hidden_activation", TEXT, "gelu_pytorch_tanh", why="that of Gemma 4")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedError(f"hidden_activation {activation!r} is not served; Gemma 4 has 'gelu_pytorch_tanh'.")
    kinds = keys.get("layer_types", TEXTS)
    if len(kinds) != keys.get("num_hidden_layers", SIZE):
        raise UnsupportedError(f"config.json: 'layer_types' must name a type for each layer, got {list(kinds)}.")
    dims = _head_dims(keys, kinds)
    blocks = keys.get("rope_parameters", OBJECT)
    if not set(kinds) <= set(blocks):
        raise UnsupportedError(f"config.json: 'rope_parameters' must have a section for each of {sorted(set(kinds))}.")
    part = "text_config.rope_parameters."
    parts = {kind: Keys({f"{part}{kind}.": section(blocks, kind, part)}) for kind in kinds}
    ordered = keys.get("use_ordered_embeddings", FLAG, False, why="no centroid head")
    centroids = keys.get("num_centroids", COUNT, 2048, why="that of transformers")
    chosen = keys.get("centroid_intermediate_top_k", COUNT, 32, why="that of transformers")
    keys.notes["feature_layers"] = Note("feature_layers", (target.layers,), "the target's last state", assumed=True)
    return AssistantSpec(
        feature_layers=(target.layers,),
        feature_size=keys.get("backbone_hidden_size", SIZE, 1536, why="that of transformers"),
        hidden_size=keys.get("hidden_size", SIZE),
        intermediate_size=keys.get("intermediate_size", SIZE),
        num_heads=keys.get("num_attention_heads", SIZE),
        kinds=kinds,
        head_dims=dims,
        ropes=tuple(rope_of(parts[kind], dim) for kind, dim in zip(kinds, dims, strict=True)),
        window=keys.get("sliding_window", SIZE),
        vocab_size=keys.get("vocab_size", SIZE),
        draft_vocab_size=keys.get("vocab_size", SIZE),
        rms_norm_eps=keys.get("rms_norm_eps", NUMBER, 1e-6, why="that of Gemma 4"),
        num_centroids=centroids if ordered else 0,
        chosen_centroids=chosen if ordered else 0,
        separate_head="lm_head.weight" in names,
    ), keys


def _head_dims(keys: Keys, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Dimension of a head in each layer: newer files of transformers name the layers in which it differs."""
    usual = keys.get("head_dim", SIZE)
    layers = keys.get("per_layer_config", OBJECT, None, why="global_head_dim for layers of full attention")
    if layers is None:
        full = keys.get("global_head_dim", SIZE, 512, why="that of transformers")
        return tuple(full if kind == "full_attention" else usual for kind in kinds)
    part, dims = "text_config.per_layer_config.", []
    for layer in range(len(kinds)):
        own = Keys({f"{part}{layer}.": section(layers, str(layer), part)})
        own.take(*TARGETS_OWN)
        dims.append(own.get("head_dim", SIZE, usual))
        if own.unknown():
            raise UnsupportedError(
                f"{own.unknown()[0]} is not served: layers of an assistant differ in head_dim alone."
            )
    keys.take("global_head_dim")
    return tuple(dims)


FORMAT = Format(
    known="Gemma4AssistantForCausalLM",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, _: AssistantModel(spec, shortlist),
    drafter=feature_drafter,
    integers=frozenset({"masked_embedding.token_ordering"}),
    heads=lambda _: (),
)
