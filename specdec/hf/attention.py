"""Verify attention inside an unmodified model: transformers calls our function, which calls `ops.tree_attention`.

The function is registered with transformers under a name of its own, and a model runs with it for the length of one
forward only; the caller's model and its own `generate` keep the implementation they had. What the function has to
know about the tree travels as a keyword argument of the forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface

from specdec import kv, ops
from specdec.errors import UnsupportedError
from specdec.hf import compat
from specdec.hf.rows import Encoded

NAME = "specdec_tree"
CONTEXT = "specdec_tree_context"

Attention: TypeAlias = Literal["auto", "model", "reference", "triton"]
"""Who computes the attention of a verify forward: the model's own function with a mask, or `ops.tree_attention`."""

Scales: TypeAlias = Tensor | tuple[Tensor, Tensor] | None
"""What `ops.tree_attention` takes as scales of keys or values."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Where the slots of a layer lie in the keys that its cache hands out."""

    lengths: Int[Tensor, " batch"]
    starts: Int[Tensor, " batch"] | None


@dataclass(frozen=True, slots=True, eq=False)
class TreeContext:
    """What a forward's layers have in common: the tree, and per window where its slots are.

    Attributes:
        visible: pending rows that each new row sees, as bit masks.
        depths: depth of every pending row, the new ones last.
        columns: by sliding window; None for full attention.
        windows: of each decoder layer.
        impl: implementation of the op.
    """

    visible: Int[Tensor, "batch rows words"]
    depths: Int[Tensor, "batch pending"]
    columns: dict[int | None, Columns]
    windows: tuple[int | None, ...]
    impl: ops.Impl

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Encoded,
        value: Encoded,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """The attention of a layer, `[batch, rows, heads, dim]`."""
        window, device = self.windows[layer], query.device
        columns = self.columns[window]
        return read(
            query,
            key,
            value,
            self.visible.to(device),
            columns.lengths.to(device),
            depths=self.depths.to(device),
            starts=None if columns.starts is None else columns.starts.to(device),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            impl=self.impl,
        )


def choose(
    attention: Attention,
    device: torch.device,
    *,
    weights: bool,
    prompt: Bool[Tensor, "batch prompt"] | None,
    latent: bool = False,
) -> ops.Impl | None:
    """The implementation of the op for a request, or None for the model's own attention.

    Args:
        attention: what the caller asked for.
        device: where the model wants its inputs.
        weights: whether attention weights are to be returned, which only the model's own attention has.
        prompt: False on padding of the prompt.
        latent: whether the cache holds what keys and values are made of (multi-head latent attention).

    Raises:
        UnsupportedError: if the op was asked for and cannot serve the request, with the reason.
    """
    if attention not in ("auto", "model", "reference", "triton"):
        raise UnsupportedError(f"attention must be 'auto', 'model', 'reference' or 'triton', got {attention!r}.")
    can, reason = ops.available("tree_attention", device)
    if attention == "model" or (attention == "auto" and not (can and device.type == "cuda")):
        return None
    reason = obstacle(weights=weights, prompt=prompt, latent=latent) or (
        reason if attention == "triton" and not can else ""
    )
    if not reason:
        return attention
    if attention == "auto":
        return None
    raise UnsupportedError(f"attention={attention!r} cannot serve this request: {reason}. Use attention='model'.")


def obstacle(*, weights: bool, prompt: Bool[Tensor, "batch prompt"] | None, latent: bool = False) -> str:
    """Why no implementation of the op can serve a request; an empty string if one can. Arguments as for `choose`."""
    if latent:
        return "the model makes keys and values of what its cache holds, and does so after the cache was read"
    if weights:
        return "output_attentions=True asks for weights, which it does not compute"
    if prompt is not None and not bool((prompt == (prompt.cumsum(-1) > 0)).all()):
        return "the attention mask has gaps, where only padding on the left is served"
    return ""


@contextmanager
def attending(config: Any) -> Iterator[None]:
    """Lets a decoder run with our attention function, and gives it its own back."""
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attend)
    own = compat.attention_implementation(config)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,  # noqa: ARG001 - what it would say stands in the context
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: `[batch, heads, rows, dim]` in, `[batch, rows, heads, dim]` out.

    Keys and values come as the cache of this forward hands them out, and the context of the forward reads them.
    """
    context = kwargs[CONTEXT]
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(f"{type(module).__name__} adds a bias by position; use attention='model'.")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # torch types attributes as modules
    return context.attend(layer, query, key, value, scaling, softcap, s_aux), None


def read(
    query: Float[Tensor, "batch heads rows dim"],
    key: Encoded,
    value: Encoded,
    visible: Int[Tensor, "batch rows words"],
    lengths: Int[Tensor, " batch"],
    **options: Any,
) -> Float[Tensor, "batch rows heads value_dim"]:
    """`ops.tree_attention` over rows as they are stored.

    What the op can read is handed on: a rotation of the keys is made up for by rotating the few queries, one of the
    values by rotating the output. What all keys of a head have in common adds the same number to all scores of a
    query: a softmax does not see it, unless scores are capped or compared with a sink.
    """
    keys, key_scales, rotated = stored(uncentred(key) if _scores_shift(options) else key)
    values, value_scales, turned = stored(value)
    attended = ops.tree_attention(
        ops.hadamard(query).to(query.dtype) if rotated else query,
        keys,
        values,
        visible,
        lengths,
        key_scales=key_scales,
        value_scales=value_scales,
        **options,
    )
    output = cast(Tensor, attended)
    if turned:
        output = ops.hadamard(output).to(query.dtype)
    return output.transpose(1, 2)


def _scores_shift(options: dict[str, Any]) -> bool:
    """Whether the same number may be added to all scores of a query."""
    return options.get("softcap") is None and options.get("sinks") is None


def uncentred(rows: Encoded) -> Encoded:
    """Rows without what all of a head have in common, if that is stored on its own."""
    if not isinstance(rows.codec, kv.Centered):
        return rows
    return Encoded(rows.codec.inner, rows.parts, rows.state[1:], rows.dtype)


def stored(rows: Encoded) -> tuple[Tensor, Scales, bool]:
    """Rows as the op reads them: numbers or codes, what belongs to codes, whether they are still rotated."""
    codec, rotated = rows.codec, False
    if isinstance(codec, kv.Hadamard):
        codec, rotated = codec.inner, True
    match codec, rows.parts:
        case kv.FP8(scale="head"), (codes,):
            return codes, rows.state[0].expand(*codes.shape[:3], 1), rotated
        case kv.Int8() | kv.FP8(), (codes, scales):
            return codes, scales, rotated
        case kv.Int4() | kv.NVFP4(), (codes, scales, others):
            return codes, (scales, others), rotated
    return rows.decode(), None, False
