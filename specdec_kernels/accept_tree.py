"""The acceptance walk of a round, one program per batch row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch(
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    visible: Tensor,
    depths: Tensor,
    chosen: Tensor,
    state: Any,
    stops: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec.ops.accept_tree`, which checks the arguments."""
    batch, nodes = tokens.shape
    path, found = (torch.empty(batch, nodes, dtype=torch.int64, device=tokens.device) for _ in range(2))
    counts = num_nodes.new_empty(batch)
    tokens, parents, num_nodes, visible, depths, chosen, stops = (
        given.contiguous() for given in (tokens, parents, num_nodes, visible, depths, chosen, stops)
    )
    _accept[(batch,)](
        tokens,
        parents,
        num_nodes,
        visible,
        depths,
        chosen,
        state.tokens,
        state.lengths,
        state.cached,
        state.positions,
        state.remaining,
        stops,
        path,
        found,
        counts,
        state.tokens.stride(0),
        state.tokens.shape[1],
        NODES=nodes,
        PADDED=triton.next_power_of_2(nodes),
        WORDS=visible.shape[2],
        STOPS=stops.numel(),
        num_warps=1,
    )
    return path, found, counts


@triton.jit(do_not_specialize=["room"])
def _accept(
    tokens,
    parents,
    num_nodes,
    visible,
    depths,
    chosen,
    text,
    lengths,
    cached,
    positions,
    remaining,
    stops,
    path,
    found,
    counts,
    text_batch,
    room,
    NODES: tl.constexpr,
    PADDED: tl.constexpr,
    WORDS: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PADDED)
    inside = node < NODES
    valid = node < tl.load(num_nodes + row)
    base = row * NODES
    parent = tl.load(parents + base + node, mask=inside, other=0)
    choice = tl.load(chosen + base + node, mask=inside, other=-1)
    expected = tl.load(chosen + base + tl.maximum(parent, 0), mask=inside, other=-1)
    drafted = tl.load(tokens + base + node, mask=inside, other=-2)
    depth = tl.load(depths + base + node, mask=inside, other=0)
    agrees = valid & ((expected == drafted) | (node == 0))

    accepted = valid
    for word in tl.static_range(WORDS):
        bit = tl.full([PADDED], 1, tl.int64) << (node % 64).to(tl.int64)
        agreed = tl.sum(tl.where(agrees & (node // 64 == word), bit, 0), 0)
        needed = tl.load(visible + (base + node) * WORDS + word, mask=inside, other=0)
        accepted &= (needed & agreed) == needed

    most = tl.max(tl.where(accepted, depth, -1), 0) + 1
    ends = accepted & (node < 0)
    for index in tl.static_range(STOPS):
        ends |= accepted & (choice == tl.load(stops + index))
    until = tl.min(tl.where(ends, depth, NODES), 0) + 1
    left = tl.load(remaining + row)
    count = tl.minimum(tl.minimum(most, until), tl.maximum(left, 0))

    length = tl.load(lengths + row)
    tl.store(path + base + node, tl.full([PADDED], -1, tl.int64), mask=inside & (node >= count))
    tl.store(found + base + node, tl.full([PADDED], -1, tl.int64), mask=inside & (node >= count))
    kept = accepted & (depth < count)
    tl.store(path + base + depth, node.to(tl.int64), mask=kept)
    tl.store(found + base + depth, choice, mask=kept)
    tl.store(text + row * text_batch + length + depth, choice, mask=kept & (length + depth < room))
    tl.store(counts + row, count)
    tl.store(lengths + row, length + count)
    tl.store(cached + row, tl.load(cached + row) + count)
    tl.store(positions + row, tl.load(positions + row) + count)
    tl.store(remaining + row, tl.where((count == until) | (count == left), 0, left - count))
