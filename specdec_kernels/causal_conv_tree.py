"""A causal convolution along the paths of a tree: fold the last path into the history, gather, filter, activate.

A program takes a run of channels of one batch row and all its nodes. What it reads of the history it reads before it
writes, and no other program touches the same channels.

The layout of the arguments is that of `specdec.ops.causal_conv_tree`, which checks them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, pdl

CHANNELS = 64
"""Channels of a program: at least one for each of its threads, so that a column of the history has one writer."""


def launch(
    inputs: Tensor,
    weight: Tensor,
    history: Tensor,
    ancestors: Tensor,
    bias: Tensor | None,
    path: Tensor | None,
    counts: Tensor | None,
    activation: str | None,
    out: Tensor | None,
) -> Tensor:
    """Convolved inputs `[batch, nodes, channels]`."""
    batch, nodes, channels = inputs.shape
    output = torch.empty((batch, nodes, channels), dtype=inputs.dtype, device=inputs.device)
    with torch.cuda.device_of(inputs):
        _convolve[(triton.cdiv(channels, CHANNELS), batch)](
            inputs,
            inputs.stride(),
            weight,
            weight.stride(),
            history,
            history.stride(),
            ancestors,
            ancestors.stride(),
            bias,
            path,
            (0, 0, 0) if path is None else path.stride(),
            counts,
            output,
            output.stride(),
            out,
            (0, 0, 0) if out is None else out.stride(),
            nodes,
            channels,
            0 if path is None else path.shape[1],
            TAPS=weight.shape[1],
            COLUMNS=history.shape[2],
            NODES=triton.next_power_of_2(nodes),
            WORDS=ancestors.shape[2],
            CHANNELS=CHANNELS,
            ACTIVATED=activation is not None,
            LATE=pdl(inputs.device),
            num_warps=CHANNELS // 32,
            **launch_late(inputs.device),
        )
    return output


@triton.jit(do_not_specialize=["nodes", "kept"])
def _convolve(
    inputs,
    input_strides,
    weight,
    weight_strides,
    history,
    history_strides,
    masks,
    mask_strides,
    bias,
    path,
    path_strides,
    counts,
    output,
    output_strides,
    out,
    out_strides,
    nodes,
    channels,
    kept,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    LATE: tl.constexpr,
):
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    channel = channel.to(tl.int64)
    row = tl.arange(0, NODES)
    real = row < nodes
    count = 0
    if counts is not None:
        count = tl.minimum(tl.load(counts + batch).to(tl.int32), kept)
        path += batch * path_strides[0] + channel[None, :] * path_strides[2]
    past = history + batch * history_strides[0] + channel * history_strides[1]

    # The nearest ancestors of each node, one after the other: `node` is the last one found, `found` how many.
    node = row
    found = tl.zeros([NODES], tl.int32)
    inputs += batch * input_strides[0] + channel[None, :] * input_strides[2]
    total = tl.zeros([NODES, CHANNELS], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        if tap > 0:
            node = _before(masks + batch * mask_strides[0], mask_strides, row, node, real, NODES, WORDS)
        inner = real & (node >= 0)
        place = inputs + node.to(tl.int64)[:, None] * input_strides[1]
        own = tl.load(place, mask=inner[:, None] & exists[None, :], other=0.0).to(tl.float32)
        if tap == 0 and out is not None:
            copies = out + batch * out_strides[0] + channel[None, :] * out_strides[2]
            copies += row.to(tl.int64)[:, None] * out_strides[1]
            tl.store(copies, own.to(out.dtype.element_ty), mask=real[:, None] & exists[None, :])
        found += inner.to(tl.int32)
        # Behind the root: the path that is being folded, and the history before it.
        behind = COLUMNS + count - 1 - (tap - found)
        outer = real & (node < 0) & (behind >= 0)
        seen = tl.load(
            past[None, :] + behind.to(tl.int64)[:, None] * history_strides[2],
            mask=(outer & (behind < COLUMNS))[:, None] & exists[None, :],
            other=0.0,
        ).to(tl.float32)
        if counts is not None:
            folded = tl.load(
                path + (behind - COLUMNS).to(tl.int64)[:, None] * path_strides[1],
                mask=(outer & (behind >= COLUMNS))[:, None] & exists[None, :],
                other=0.0,
            )
            seen += folded.to(history.dtype.element_ty).to(tl.float32)
        taps = weight + channel * weight_strides[0] + (TAPS - 1 - tap) * weight_strides[1]
        total += (own + seen) * tl.load(taps, mask=exists, other=0.0).to(tl.float32)[None, :]
    if ACTIVATED:
        total = total / (1.0 + tl.exp(-total))
    places = output + batch * output_strides[0] + channel[None, :] * output_strides[2]
    places += row.to(tl.int64)[:, None] * output_strides[1]
    tl.store(places, total.to(output.dtype.element_ty), mask=real[:, None] & exists[None, :])

    if counts is not None:
        tl.debug_barrier()  # other threads of this program may still read the history
        for step in tl.static_range(COLUMNS):
            # Column by column from the oldest: what is written was read by the same thread, and is not read again.
            source = step + count
            old = channel < tl.where(source < COLUMNS, channels, 0)
            appended = channel < tl.where((source >= COLUMNS) & (source - COLUMNS < kept), channels, 0)
            new = tl.load(past + source * history_strides[2], mask=old, other=0.0).to(tl.float32)
            lines = path + (source - COLUMNS).to(tl.int64) * path_strides[1]
            new += tl.sum(tl.load(lines, mask=appended[None, :], other=0.0).to(tl.float32), 0)
            tl.store(past + step * history_strides[2], new.to(history.dtype.element_ty), mask=exists)


@triton.jit
def _before(masks, strides, row, node, real, NODES: tl.constexpr, WORDS: tl.constexpr):
    """The nearest ancestor of each row before `node`; -1 if there is none."""
    nearest = tl.full([NODES], -1, tl.int32)
    for half in tl.static_range(2 * WORDS):
        words = tl.load(masks + row.to(tl.int64) * strides[1] + (half // 2) * strides[2], mask=real, other=0)
        bits = (words >> (half % 2 * 32)).to(tl.int32)
        other = half * 32 + tl.arange(0, 32)
        member = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
        member &= other[None, :] < node[:, None]
        nearest = tl.maximum(nearest, tl.max(tl.where(member, other[None, :], -1), 1))
    return nearest
