"""What the configurations of several families of drafters say in the same words."""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.checkpoints.keys import Keys, Note
from specdec.drafters.rope import Rope
from specdec.errors import UnsupportedError

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def decoder_keys(keys: Keys, *, theta: float | None = None) -> dict[str, Any]:
    """What all dialects say in the words of a Llama or Qwen3 configuration.

    Args:
        keys: the configuration.
        theta: base of the rotary frequencies where it is not given; None demands it.
    """
    activation = keys.get("hidden_act", "silu", why="that of Llama and Qwen3")
    if activation != "silu":
        raise UnsupportedError(f"hidden_act {activation!r} is not served; these drafters have 'silu'.")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden // heads, why="hidden_size / num_attention_heads")
    keys.take(*ROPE_KEYS)
    merged = {key: value for part in reversed(keys.parts.values()) for key, value in part.items()}
    rope = Rope.from_config(merged if theta is None else {"rope_theta": theta, **merged}, head_dim)
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


def windows_of(keys: Keys) -> tuple[int | None, ...]:
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


def speculative_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens that the publisher drafts; older files say in no other way which slot predicts which token."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found = methods[0].get("speculative_tokens")
    return found if isinstance(found, int) else None
