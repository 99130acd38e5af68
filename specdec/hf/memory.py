"""What the key/value cache of a request will take, before anything is run."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specdec.errors import UnsupportedError
from specdec.hf import cache as caches
from specdec.hf import compat
from specdec.hf.fixed_cache import fixed_slots
from specdec.hf.round_program import capacity
from specdec.kv import KVCacheConfig


def estimate_memory(
    model: Any,
    *,
    prompt: int,
    new_tokens: int,
    nodes: int = 15,
    batch: int = 1,
    cache: KVCacheConfig | None = None,
    execution: Literal["host", "device"] = "host",
) -> int:
    """Bytes that the target's cache takes at its largest, growth of its buffers included.

    While a buffer grows, the old one of that layer is still there; that comes on top for a moment. Rows of a batch that
    advance unevenly may take one step of the buffers' ladder more (up to a quarter), and more on sliding layers. Device
    rounds have buffers of one size; while the prompt's cache is copied, one of its layers is there as well.

    Args:
        model: the model, for its configuration and dtype.
        prompt: tokens of the longest prompt of the batch.
        new_tokens: tokens that every row generates.
        nodes: tree budget; a verify pass writes one row more.
        batch: batch rows.
        cache: codecs of keys and values; None stores them as they are.
        execution: where rounds run.

    Raises:
        UnsupportedError: for arguments of another kind.

    Example:
        >>> from specdec import kv
        >>> from specdec.hf import estimate_memory
        >>> from specdec.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> plain = estimate_memory(model, prompt=1000, new_tokens=200)
        >>> estimate_memory(model, prompt=1000, new_tokens=200, cache=kv.INT8) < plain / 3  # the model is in float64
        True
    """
    numbers: dict[str, Any] = {"prompt": prompt, "new_tokens": new_tokens, "nodes": nodes, "batch": batch}
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 0:
            raise UnsupportedError(f"estimate_memory: {name} is a number of tokens or rows, 0 or more, got {number!r}.")
    if cache is not None and not isinstance(cache, KVCacheConfig):
        raise UnsupportedError(f"estimate_memory: cache= takes a kv.KVCacheConfig, got {type(cache).__name__}.")
    if not hasattr(model, "config"):
        raise UnsupportedError(f"estimate_memory: model= takes a transformers model, got {type(model).__name__}.")
    if execution not in ("host", "device"):
        raise UnsupportedError(f"estimate_memory: execution= is 'host' or 'device', got {execution!r}.")
    decoder = model.config.get_text_config(decoder=True)
    types, arguments = compat.get_layer_types_and_kwargs(decoder)
    kv = cache if cache is not None else KVCacheConfig()
    # Bytes of a slot, over all layers with the same window.
    slot: dict[int | None, float] = defaultdict(float)
    fixed = 0
    for kind, kwargs, (heads, *dims) in zip(types, arguments, compat.kv_shapes(decoder), strict=True):
        if kind == "linear_attention":
            sizes = RecurrentBytes.of(decoder, model.dtype, kv.states)
            held = 2 * sizes.node if execution == "device" else sizes.pending
            fixed += batch * (sizes.state + (nodes + 1) * held)
        elif kind != "dummy":
            config = kv.for_layer(kind)
            codecs = zip((config.keys, config.values), dims, strict=True)
            bits = sum(codec.bits_per_element(dim, model.dtype) * dim for codec, dim in codecs)
            slot[kwargs.get("sliding_window")] += batch * heads * bits / 8
    if execution == "device":
        slots = capacity(prompt + new_tokens, nodes + 1)
        return fixed + round(
            sum(size * fixed_slots(window, slots, batch=batch, width=nodes + 1) for window, size in slot.items())
        )
    ladders = {window: _slots(window, prompt, new_tokens, nodes + 1) for window in slot}
    # Sliding layers are largest right after the prompt, others at the end.
    moments = zip(*([slot[window] * slots for slots in ladders[window]] for window in slot), strict=True)
    return fixed + round(max(map(sum, moments), default=0.0))


@dataclass(frozen=True, slots=True)
class RecurrentBytes:
    """What a recurrent layer takes for one batch row.

    Attributes:
        state: state and last inputs of the convolution. A snapshot for each node would take as much for each.
        node: record of a node, from which any path is folded.
        pending: what the host holds of a node while its tree is pending: the record, and what the rule was given.

    Example:
        >>> import torch
        >>> from specdec.hf import RecurrentBytes
        >>> from specdec.testing import tiny_model
        >>> sizes = RecurrentBytes.of(tiny_model("qwen3_5").config, torch.bfloat16)
        >>> sizes.state, sizes.node
        (2176, 400)
    """

    state: int
    node: int
    pending: int

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, states: torch.dtype | None = None) -> "RecurrentBytes":
        """Sizes for a model.

        Args:
            config: the model's configuration.
            dtype: of its weights.
            states: of the states at rest; None for float32.
        """
        key_heads, heads, key_dim, value_dim, taps = compat.recurrent_shape(config)
        channels = 2 * key_heads * key_dim + heads * value_dim
        wide = 8 if states == torch.float64 else 4
        size = (torch.float32 if states is None else states).itemsize
        decays = key_dim if hasattr(config, "linear_num_heads") else 1  # one for each channel, or one for all
        updates = wide * heads * (value_dim + decays)
        return cls(
            state=size * heads * key_dim * value_dim + dtype.itemsize * channels * taps,
            node=updates + dtype.itemsize * (channels + key_heads * key_dim),
            pending=updates + dtype.itemsize * (2 * channels + heads) + 4 * heads * decays,
        )


def _slots(window: int | None, prompt: int, new_tokens: int, width: int) -> list[int]:
    """Slots of a layer's buffers after the prompt and after each token; follows `RowLayer`."""
    layer = caches.RowLayer(window)
    held: list[int] = [0]
    # The last token is never run, and right before it nothing is drafted any more.
    for length in (0, *range(prompt, prompt + new_tokens - 2)):
        end = length + width if length else prompt
        visible = layer.first_visible(length)
        grows = end - layer.base > held[-1]
        held.append(caches.grown(visible, end) if grows else held[-1])
        layer.base = visible if grows else layer.base
    return held[1:]
