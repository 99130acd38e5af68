"""Which models speculation can serve exactly, decided from their configuration before any forward pass.

A tree can be verified if one forward over many rows gives what one row at a time would give. That needs an attention
mask of our own, positions of our own, and keys whose value does not depend on what else is in the forward.
"""

import inspect
from collections.abc import Callable
from typing import Any

from specdec.errors import UnsupportedError
from specdec.hf import cache, compat, gated_delta, masks

_FORWARD_NEEDS = ("input_ids", "attention_mask", "position_ids", compat.CACHE_NAME)

_OWN_GEOMETRY: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("adds ALiBi biases that follow the order of cache slots", lambda config: bool(getattr(config, "alibi", False))),
    (
        "has local attention that counts cache slots instead of positions",
        lambda config: config.model_type == "gpt_neo" and "local" in config.attention_layers,
    ),
    ("builds its attention mask from lengths", lambda config: config.model_type == "xlm"),
    ("builds its attention mask from the types of tokens", lambda config: config.model_type == "paligemma"),
)
"""Models that take a mask and positions but do not go by them alone."""


def check_model(model: Any) -> None:
    """Raises `UnsupportedError` if the model cannot verify trees; the message says what is in the way and what to do.

    Encoder-decoders, recurrent layers of another kind than Gated DeltaNet, attention functions without 4D masks and
    forwards that choose positions themselves are refused here.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise UnsupportedError(
            f"expected a transformers model with a language-modelling head and generate(), got {type(model).__name__}."
        )
    name = type(plain(model)).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder; only decoder-only causal language models are supported.")
    decoder = config.get_text_config(decoder=True)
    kinds = compat.get_layer_types_and_kwargs(decoder)[0]
    cache.check_layer_types(kinds)
    gated_delta.check_kinds(plain(model), kinds)
    parameters = inspect.signature(plain(model).forward).parameters
    missing = [need for need in _FORWARD_NEEDS if need not in parameters]
    if missing:
        raise UnsupportedError(
            f"the forward of {name} does not take {', '.join(missing)}, which a tree needs "
            "(siblings share a position and must not see each other). Use model.generate for this model."
        )
    for reason, applies in _OWN_GEOMETRY:
        if applies(decoder) or applies(config):
            raise UnsupportedError(
                f"{name} {reason}, so siblings of a tree cannot share a position. Use model.generate for this model."
            )
    masks.check_attention(decoder)


def plain(model: Any) -> Any:
    """The module that `torch.compile` wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def capture_obstacle(config: Any) -> str:
    """What in a model's forward waits for the device, so that no CUDA graph can hold it; empty if nothing is known."""
    decoder = config.get_text_config(decoder=True)
    kinds = {entry.get("rope_type", "default") for entry in _rope_layers(decoder)} & {"dynamic", "longrope"}
    if kinds:
        return f"rotary embeddings of type {kinds.pop()!r} look at the positions on the host in every forward"
    experts = any(getattr(decoder, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts and getattr(decoder, "_experts_implementation", None) == "eager":
        return (
            "eager experts ask the host which of them are used; call "
            "model.set_experts_implementation('grouped_mm') first"
        )
    return ""


def _rope_layers(decoder: Any) -> list[dict[str, Any]]:
    """Parameters of the rotary embeddings, of each layer type where they differ."""
    parameters = getattr(decoder, "rope_parameters", None) or {}
    return [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]


def check_rope(config: Any, start: int, longest: int | None) -> None:
    """Raises `UnsupportedError` if rotary frequencies would change while a text grows from `start` positions.

    Types `longrope` and `dynamic` choose the frequencies of a whole forward by its largest position, so a deep node
    would change its ancestors and one row of a batch the others.

    Args:
        config: the model's configuration.
        start: positions of the longest prompt.
        longest: positions of the longest text that may be run; None if that is not known.
    """
    decoder = config.get_text_config(decoder=True)
    for entry in _rope_layers(decoder):
        kind = entry.get("rope_type", "default")
        if kind == "longrope":
            limit = entry.get("original_max_position_embeddings") or decoder.original_max_position_embeddings
        elif kind == "dynamic":
            limit = decoder.max_position_embeddings
        else:
            continue
        if longest is not None and longest > limit and (kind == "dynamic" or start <= limit):
            raise UnsupportedError(
                f"this text may grow to {longest} positions, and rotary embeddings of type {kind!r} change all their "
                f"frequencies beyond {limit}. Ask for at most {max(limit + 1 - start, 0)} new tokens, or use "
                "model.generate."
            )


def position_limit(config: Any) -> int | None:
    """Positions the model was built for; drafts never go beyond them."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None
