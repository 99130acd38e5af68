"""Every private or version-bound name of transformers that specdec leans on, probed once at import.

transformers 5.24 renamed `past_key_values` to `cache` in forwards and outputs, and made `Cache.crop` take negative
counts only. A version that moves one of the names below fails here, with the name, and nowhere else.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.generation.configuration_utils import GenerationConfig

CACHE_NAME = "cache"

if not hasattr(GenerationMixin, "_prefill"):
    raise ImportError(
        "specdec needs `GenerationMixin._prefill`, which this version of transformers does not have; "
        "install transformers >= 5.24, < 6."
    )


def prefill(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """Runs the prompt exactly as plain `generate` does, chunks and continued caches included."""
    mixin: Any = model
    return mixin._prefill(input_ids, generation_config, dict(model_kwargs))


def pad_token(generation_config: GenerationConfig) -> int | None:
    """Padding id that `generate` resolved for this call (the first EOS if none was set)."""
    tensor = getattr(generation_config, "_pad_token_tensor", None)
    return None if tensor is None else int(tensor)


def prompt_length(generation_config: GenerationConfig, attention_mask: Tensor | None, fallback: int) -> int:
    """Columns of the attention mask, which `generate` drops when it is all ones."""
    if attention_mask is not None:
        return attention_mask.shape[1]
    return int(getattr(generation_config, "_mask_length", fallback))


def attention_implementation(config: Any) -> str:
    """Name of the attention function the model runs with."""
    return str(config._attn_implementation)


def has_layer_types(config: Any) -> bool:
    """Whether the model takes one attention mask per layer type (a dict) instead of a single tensor."""
    return hasattr(config.get_text_config(decoder=True), "layer_types")


def kv_shapes(config: Any) -> list[tuple[int, int, int]]:
    """Heads of each layer's cached rows, and numbers of a key and of a value; for latents, of the two parts of a row.

    A model whose layers differ has a configuration for each.
    """
    if caches_latents(config):
        return [(1, int(config.kv_lora_rank), int(config.qk_rope_head_dim))] * int(config.num_hidden_layers)
    layers = getattr(config, "per_layer_config", None)
    layers = [layers[index] if layers else config for index in range(config.num_hidden_layers)]
    found = []
    for layer in layers:
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        found.append((getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads, dim, dim))
    return found


def caches_latents(config: Any) -> bool:
    """Whether the cache holds compressed rows, of which the model makes keys and values after it has read them."""
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def recurrent_shape(config: Any) -> tuple[int, int, int, int, int]:
    """Key heads, value heads, numbers of a key and of a value, and taps of the convolution of gated delta layers."""
    if hasattr(config, "linear_num_heads"):
        count, size = int(config.linear_num_heads), int(config.linear_head_dim)
        return count, count, size, size, int(config.linear_conv_kernel_dim)
    heads = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    return (
        *heads,
        int(config.linear_key_head_dim),
        int(config.linear_value_head_dim),
        int(config.linear_conv_kernel_dim),
    )


__all__ = [
    "CACHE_NAME",
    "Cache",
    "CacheLayerMixin",
    "DummyLayer",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "attention_implementation",
    "caches_latents",
    "get_layer_types_and_kwargs",
    "has_layer_types",
    "kv_shapes",
    "pad_token",
    "prefill",
    "prompt_length",
    "recurrent_shape",
]
