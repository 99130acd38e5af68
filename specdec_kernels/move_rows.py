"""Moves the rows of an accepted path to the front of its tree: all layers, heads and buffers in one launch.

A program takes one head of one layer of one buffer. It reads a run of places of the path before it writes any of them:
threads of a program are not in step, so a barrier stands between. Runs need no barrier between them, since a row only
ever moves forward: what a run writes lies before all that the later ones read.

The layout of the arguments is that of `specdec.ops.move_rows`, which checks them and views buffers as integers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = 64
"""Places of a path that are read before they are written."""

NUMBERS = 4096
"""Integers that a program holds at a time."""


def launch(buffers: tuple[Tensor, ...], nodes: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """Moves the rows of all buffers; none is empty."""
    batch, path = nodes.shape
    run = min(RUN, triton.next_power_of_2(path))
    most = max(buffer.shape[0] * buffer.shape[2] for buffer in buffers)
    with torch.cuda.device_of(nodes):
        _move[(batch * most, len(buffers))](
            buffers,
            tuple(buffer.stride()[:4] for buffer in buffers),
            tuple(buffer.shape[0] * buffer.shape[2] for buffer in buffers),
            tuple(buffer.shape[2] for buffer in buffers),
            tuple(buffer.shape[3] for buffer in buffers),
            nodes,
            counts,
            lengths,
            *nodes.stride(),
            counts.stride(0),
            lengths.stride(0),
            path,
            most,
            WIDTHS=tuple(buffer.shape[4] for buffer in buffers),
            COLUMNS=tuple(min(triton.next_power_of_2(buffer.shape[4]), NUMBERS // run) for buffer in buffers),
            RUN=run,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["layer_heads", "heads", "capacities", "path", "most"])
def _move(
    buffers,
    strides,
    layer_heads,
    heads,
    capacities,
    nodes,
    counts,
    lengths,
    node_batch,
    node_path,
    count_batch,
    length_batch,
    path,
    most,
    WIDTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    batch, item = item // most, item % most
    count = tl.minimum(tl.load(counts + batch * count_batch).to(tl.int32), path)
    length = tl.load(lengths + batch * length_batch).to(tl.int64)
    for first in range(0, count, RUN):
        place = first + tl.arange(0, RUN)
        node = tl.load(nodes + batch * node_batch + place.to(tl.int64) * node_path, mask=place < count, other=-1)
        moved = node > place
        if tl.max(moved.to(tl.int32), 0) > 0:
            source, target = length + node, length + place
            for which in tl.static_range(len(WIDTHS)):
                if (tl.program_id(1) == which) & (item < layer_heads[which]):
                    layer, head = item // heads[which], item % heads[which]
                    start = strides[which][0] * layer + strides[which][1] * batch + strides[which][2] * head
                    here = moved & (target >= 0) & (source < capacities[which])
                    _copy(
                        buffers[which] + start,
                        source * strides[which][3],
                        target * strides[which][3],
                        here,
                        WIDTHS[which],
                        COLUMNS[which],
                    )


@triton.jit
def _copy(rows, source, target, moved, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Copies rows that may overlap."""
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = moved[:, None] & (column < WIDTH)[None, :]
        tile = tl.load(rows + source[:, None] + column[None, :], mask=inside, other=0)
        tl.debug_barrier()
        tl.store(rows + target[:, None] + column[None, :], tile, mask=inside)
