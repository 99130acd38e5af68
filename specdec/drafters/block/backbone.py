"""The layers that all block drafters share: slots of a block attend to the target's features and to each other.

The features of the committed text become keys and values once, in every layer by its own projections, and are cached;
they never run through the layers themselves. The keys and values of a block live as long as its forward. Names of
modules are those of published checkpoints.
"""

from typing import TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec import ops
from specdec.drafters._layers import MLP, RMSNorm
from specdec.drafters.block.context import BlockContext, KeysValues, require_context
from specdec.drafters.block.operator import compiling
from specdec.drafters.block.spec import BlockSpec
from specdec.drafters.rope import rotate
from specdec.errors import ShapeError
from specdec.ops._checks import tensors
from specdec.trees import topology


class BlockAttention(nn.Module):
    """Attention of a block's slots to the committed text and to the block."""

    def __init__(self, spec: BlockSpec, layer: int) -> None:
        """The attention of one layer."""
        super().__init__()
        self.spec, self.layer = spec, layer
        self.window, self.causal = spec.windows[layer], spec.causal[layer]
        inner, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, inner, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, narrow, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, narrow, bias=spec.attention_bias)
        self.o_proj = nn.Linear(inner, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None

    def keys_values(self, rows: Float[Tensor, "batch rows hidden"], tables: tuple[Tensor, Tensor]) -> KeysValues:
        """Keys, turned to their positions, and values."""
        keys, values = (
            projection(rows).unflatten(-1, (self.spec.num_kv_heads, -1)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        return rotate(self.k_norm(keys), tables), values * self.spec.value_scale

    def forward(
        self, rows: Float[Tensor, "batch rows hidden"], tables: tuple[Tensor, Tensor], block: "Block"
    ) -> Float[Tensor, "batch rows hidden"]:
        """What the slots read.

        Args:
            rows: the slots.
            tables: cosines and sines of their positions.
            block: where they are.
        """
        query = self.q_norm(self.q_proj(rows).unflatten(-1, (self.spec.num_heads, -1)).transpose(1, 2))
        read = block.attend(self, rotate(query, tables), *self.keys_values(rows, tables))
        output: Tensor = self.o_proj(read.flatten(2).to(rows.dtype))
        return output


Masks: TypeAlias = dict[tuple[int | None, bool], Tensor]
"""Which rows of a block see each other, by window and causality (`Block.visible`)."""


class Block:
    """Rows of one draft forward: they stand behind a text, one after the other.

    Args:
        context: the text.
        rows: how many they are.
        masks: which rows see each other, of earlier blocks of this shape; what is made here is added.
    """

    def __init__(self, context: BlockContext, rows: int, masks: Masks | None = None) -> None:
        """Computes what all layers share."""
        self.context = context
        self._place = torch.arange(rows, device=context.lengths.device)
        self.depths = self._place.expand(context.lengths.shape[0], -1)
        self._masks: Masks = {} if masks is None else masks
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}
        self._starts: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: BlockAttention, query: Tensor, keys: Tensor, values: Tensor
    ) -> Float[Tensor, "batch rows heads head_dim"]:
        """Writes the rows of a layer behind the text, where they are no part of it, and attends to both.

        In compiled drafts of device rounds this is one operator (see `operator`); `torch.compile` elsewhere leaves it
        alone.

        Args:
            layer: the layer.
            query: `[batch, heads, rows, head_dim]`, turned to their positions as the keys are.
            keys: `[batch, kv_heads, rows, head_dim]`.
            values: the same.
        """
        if compiling():
            found: Tensor = torch.ops.specdec.block_attention(query, keys, values, layer.layer)
            return found
        alone: Tensor = self._attended(layer, query, keys, values)
        return alone

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def _attended(self, layer: BlockAttention, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held = self.context.with_room(layer.layer, (keys, values))
        (lengths, slots), (every_key, every_value) = self._behind(held.base), held.buffers
        ops.write_rows(keys, values, (every_key,), (every_value,), slots)
        moving = layer.spec.window_from == "query"
        window = layer.window if moving else None
        read = ops.tree_attention(
            query.to(every_key.dtype),
            every_key,
            every_value,
            self.visible(window, layer.causal),
            lengths,
            depths=self.depths,
            starts=None if layer.window is None or moving else self._from(held.base, layer.window),
            window=window,
            sinks=layer.attention_sink_bias,
        )
        return cast(Tensor, read).transpose(1, 2)

    def visible(self, window: int | None, causal: bool) -> Int[Tensor, "batch rows words"]:
        """Which rows of the block each of them sees, as `ops.tree_attention` takes it.

        Args:
            window: no row sees another that is so far away; None for no limit.
            causal: whether a row sees later ones.
        """
        if (window, causal) not in self._masks:
            ahead = self._place - self._place[:, None]
            seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
            seen = seen if window is None else seen & (ahead.abs() < window)
            self._masks[window, causal] = topology.pack(seen.expand(self.depths.shape[0], -1, -1))
        return self._masks[window, causal]

    def _behind(self, base: int) -> tuple[Int[Tensor, " batch"], Int[Tensor, "batch rows"]]:
        """Slots that texts take in layers whose first slot holds position `base`, and those of the rows behind them."""
        if base not in self._ends:
            lengths = self.context.lengths - base if base else self.context.lengths
            self._ends[base] = lengths, lengths[:, None] + self._place
        return self._ends[base]

    def _from(self, base: int, window: int) -> Int[Tensor, " batch"]:
        """First slots that are seen of a window before the block."""
        if (base, window) not in self._starts:
            self._starts[base, window] = (self._behind(base)[0] - window).clamp_min(0)
        return self._starts[base, window]


class DynamicConv(nn.Module):
    """Grouped dynamic causal convolution along the slots of a block, around a sublayer (DFlash 2).

    A tap is a learned number per channel plus one per group of channels that depends on the slot. The taps of both
    sides come from the sublayer's normed input.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        """Identity until weights are loaded."""
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def kernels(self, rows: Float[Tensor, "batch rows size"]) -> list[Float[Tensor, "batch rows taps size"]]:
        """The taps before the sublayer and after it."""
        dynamic = self.kernel_projection(rows).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        return [self.base_kernel[side] + dynamic[:, :, side] for side in range(2)]

    @staticmethod
    def convolve(
        rows: Float[Tensor, "batch rows size"], kernel: Float[Tensor, "batch rows taps size"]
    ) -> Float[Tensor, "batch rows size"]:
        """Each slot's sum over itself and the slots before it; nothing lies before the anchor."""
        output = rows * kernel[:, :, 0]
        for tap in range(1, min(kernel.shape[2], rows.shape[1])):
            output = output + nn.functional.pad(rows[:, :-tap], (0, 0, tap, 0)) * kernel[:, :, tap]
        return output


class BlockLayer(nn.Module):
    """Attention and MLP, each with a norm before it, a residual, and with DFlash 2 a convolution around it."""

    def __init__(self, spec: BlockSpec, layer: int) -> None:
        """One layer."""
        super().__init__()
        self.self_attn = BlockAttention(spec, layer)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        taps, group = spec.conv_kernel_size, spec.conv_group_size
        self.attention_conv = DynamicConv(spec.hidden_size, taps, group) if taps else None
        self.mlp_conv = DynamicConv(spec.hidden_size, taps, group) if taps else None

    def forward(
        self,
        rows: Float[Tensor, "batch rows hidden"],
        tables: tuple[Tensor, Tensor],
        block: Block,
    ) -> Float[Tensor, "batch rows hidden"]:
        """See `BlockAttention.forward`."""
        normed = self.input_layernorm(rows)
        if self.attention_conv is None:
            rows = rows + self.self_attn(normed, tables, block)
        else:
            before, after = self.attention_conv.kernels(normed)
            read = self.self_attn(self.attention_conv.convolve(normed, before), tables, block)
            rows = rows + self.attention_conv.convolve(read, after)
        normed = self.post_attention_layernorm(rows)
        if self.mlp_conv is None:
            rows = rows + self.mlp(normed)
        else:
            before, after = self.mlp_conv.kernels(normed)
            rows = rows + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(normed, before)), after)
        return rows


class BlockBackbone(nn.Module):
    """The layers, the projection of features before them and the norm behind them.

    Args:
        spec: what the drafter is.
    """

    def __init__(self, spec: BlockSpec) -> None:
        """Random weights."""
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.feature_layers) * spec.feature_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(spec, layer) for layer in range(len(spec.windows)))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    @property
    def stack(self) -> list[BlockLayer]:
        """The layers."""
        return cast(list[BlockLayer], list(self.layers))

    def extend(
        self, context: BlockContext, features: Float[Tensor, "batch rows features"], counts: Int[Tensor, " batch"]
    ) -> None:
        """Appends the first `counts[b]` features of each row to the context, at the positions that follow.

        Args:
            context: what is appended to.
            features: states of the target, those of `feature_layers` side by side.
            counts: how many of each row are real.

        Raises:
            ShapeError: if these do not fit each other or the drafter.
        """
        require_context("extend", context)
        tensors("extend", {"features": features, "counts": counts})
        width, windows = self.fc.in_features, tuple(layer.window for layer in context.layers)
        batch = context.lengths.shape[0]
        if counts.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"extend: counts must hold integers, got {counts.dtype}.")
        if features.shape[::2] != (batch, width) or counts.shape != (batch,):
            states = f"{len(self.spec.feature_layers)} states of {self.spec.feature_size} numbers side by side"
            raise ShapeError(
                f"features {list(features.shape)} and counts {list(counts.shape)} for a context of batch {batch}; "
                f"expected {states}: [{batch}, rows, {width}] and [{batch}]. Was the drafter made for this target?"
            )
        if context.capacity is not None:
            context.append_fixed(self.context_rows(features, context), counts)
            return
        kept = counts.tolist()
        if windows != self.spec.windows or not all(0 <= count <= features.shape[1] for count in kept):
            raise ShapeError(
                f"a context with windows {windows} and counts {kept} of {features.shape[1]} features; "
                f"expected windows {self.spec.windows} (see BlockModel.context) and counts from 0 on, to as many."
            )
        context.append(self.context_rows(features, context), kept)

    def context_rows(self, features: Float[Tensor, "batch rows features"], context: BlockContext) -> list[KeysValues]:
        """Keys and values of features that follow a text, in every layer."""
        encoded = self.hidden_norm(self.fc(features))
        positions = context.lengths[:, None] + torch.arange(features.shape[1], device=features.device)
        tables = self.spec.rope.tables(positions, encoded.dtype)
        return [layer.self_attn.keys_values(encoded, tables) for layer in self.stack]

    def forward(
        self, embedded: Float[Tensor, "batch rows hidden"], context: BlockContext
    ) -> Float[Tensor, "batch rows hidden"]:
        """Normed outputs of the slots of a block that begins right after the context, which stays as it is.

        Args:
            embedded: embeddings of the anchor and of mask tokens.
            context: the committed text, the anchor not included.
        """
        rows, width = embedded, embedded.shape[1]
        positions = context.lengths[:, None] + torch.arange(width, device=rows.device)
        tables = self.spec.rope.tables(positions, rows.dtype)
        block = Block(context, width)
        for layer in self.stack:
            rows = layer(rows, tables, block)
        output: Tensor = self.norm(rows)
        return output
