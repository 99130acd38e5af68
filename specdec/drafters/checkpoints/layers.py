"""What the configurations of several families of drafters say in the same words."""

from typing import Any

from specdec.drafters.checkpoints.keys import (
    FLAG,
    NUMBER,
    OBJECTS,
    POSITIVE,
    SIZE,
    TEXT,
    TEXTS,
    Keys,
    Kind,
    Note,
    section,
)
from specdec.drafters.rope import KINDS, Rope
from specdec.errors import UnsupportedError

ROPE_BLOCKS = ("rope_parameters", "rope_scaling")
ROPE_KEYS = (*ROPE_BLOCKS, "rope_theta", "partial_rotary_factor")

OPTIONS: dict[str, Kind[Any]] = {"truncate": FLAG, "original_max_position_embeddings": SIZE, "factor": POSITIVE}
"""What options of a rotary embedding must be, where it is not any number."""


def decoder_keys(keys: Keys, *, theta: float | None = None) -> dict[str, Any]:
    """What all dialects say in the words of a Llama or Qwen3 configuration.

    Args:
        keys: the configuration.
        theta: base of the rotary frequencies where it is not given; None demands it.
    """
    activation = keys.get("hidden_act", TEXT, "silu", why="that of Llama and Qwen3")
    if activation != "silu":
        raise UnsupportedError(f"hidden_act {activation!r} is not served; these drafters have 'silu'.")
    hidden, heads = keys.get("hidden_size", SIZE), keys.get("num_attention_heads", SIZE)
    head_dim = keys.get("head_dim", SIZE, hidden // heads, why="hidden_size / num_attention_heads")
    keys.take(*ROPE_KEYS)
    rope = read_rope(keys, head_dim, theta=theta)
    given = [key for key in ROPE_KEYS if any(values.get(key) is not None for values in keys.parts.values())]
    keys.notes["rope"] = Note("rope", rope, " ".join(given))
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.get("intermediate_size", SIZE),
        "num_heads": heads,
        "num_kv_heads": keys.get("num_key_value_heads", SIZE, heads, why="as many as query heads"),
        "head_dim": head_dim,
        "rms_norm_eps": keys.get("rms_norm_eps", NUMBER, 1e-6, why="that of Qwen3"),
        "attention_bias": keys.get("attention_bias", FLAG, False, why="that of Qwen3"),
        "rope": rope,
    }


def read_rope(keys: Keys, head_dim: int, *, theta: float | None = None) -> Rope:
    """The rotary embedding of a configuration: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Args:
        keys: the configuration.
        head_dim: dimension of a head.
        theta: base of the frequencies where it is not given; None demands it.
    """
    outside = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
    blocks = {
        f"{part}{name}.": section(values, name, part) for name in ROPE_BLOCKS for part, values in keys.parts.items()
    }
    plain = {part: {key: values[key] for key in outside if key in values} for part, values in keys.parts.items()}
    return rope_of(Keys(blocks | plain), head_dim, theta=theta)


def rope_of(keys: Keys, head_dim: int, *, theta: float | None = None) -> Rope:
    """The rotary embedding that these keys alone describe; the arguments are those of `read_rope`."""
    kind = keys.get("rope_type", TEXT, "default", also=("type",))
    base = keys.get("rope_theta", POSITIVE, *(() if theta is None else (theta,)))
    share = keys.get("partial_rotary_factor", POSITIVE, 1.0)
    also = {"original_max_position_embeddings": ("max_position_embeddings",)}
    read = {key: keys.get(key, OPTIONS.get(key, NUMBER), None, also=also.get(key, ())) for key in KINDS.get(kind, ())}
    options = tuple(sorted((key, float(value)) for key, value in read.items() if value is not None))
    # A proportional form turns some of the pairs of whole heads, the others by no angle.
    return Rope(base, head_dim if kind == "proportional" else int(head_dim * share), kind, options)


def windows_of(keys: Keys) -> tuple[int | None, ...]:
    """Sliding window of each layer."""
    layers = keys.get("num_hidden_layers", SIZE)
    full = ("full_attention",) * layers
    types = keys.get("layer_types", TEXTS, full, why="no sliding layers named")
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"layer_types {list(types)} must name {layers} layers of full or sliding attention.")
    if "sliding_attention" not in types:
        keys.get("sliding_window", NUMBER, None, why="no sliding layers")
        return (None,) * layers
    window = keys.get("sliding_window", SIZE, also=("swa_window_size",))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def speculative_tokens(keys: Keys) -> int | None:
    """Tokens that the publisher drafts; older files say in no other way which slot predicts which token."""
    part = "speculators_config."
    methods = Keys({part: section(keys.parts[""], "speculators_config")}).get("proposal_methods", OBJECTS, ())
    first = Keys({f"{part}proposal_methods[0].": methods[0] if methods else {}})
    return first.get("speculative_tokens", SIZE, None)
