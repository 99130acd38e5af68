"""Split-KV attention of tree nodes: one pass over the cache for a tile of nodes and query heads of a group.

A work item takes a tile of rows (nodes times the heads of a group, packed), one key/value head of one batch row, and a
run of slots. It keeps an unnormalised sum, the running maximum and the running denominator (flash attention); a second
kernel adds the runs up. Only the tiles that hold the tree, the first visible slots or the edge of a window test a
mask. Maxima and logarithms are in base 2 until the end. `specdec.ops.tree_attention` checks the arguments.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._codes import columns, groups_of, read_rows, scale_strides
from specdec_kernels._hopper import hopper, specialised
from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, pdl, tiled, tiles
from specdec_kernels._split_sum import FAINTEST, LOG2E, combine, room_for
from specdec_kernels._tile import ancestors, in_two_bytes, read_scales, tanh

__all__ = ["DTYPES", "launch", "specialised"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of queries, and of a cache without codes, that the kernel takes."""

TREE_TILES = tl.constexpr(2)
"""Tiles by which the run with the tree is shorter, since it takes longer. On an H200, 1, 2 and 4 differ by 2 %."""


def launch(call: Any, plan: Any) -> tuple[Tensor, Tensor]:
    """Output `[batch, heads, rows, value_dim]` and the natural logarithm of the denominators `[batch, heads, rows]`.

    Args:
        call: checked arguments (`specdec.ops._attention_call.AttentionCall`).
        plan: how the work is cut (`specdec.ops._attention_plan.AttentionPlan`).
    """
    query, visible, blocks = call.query, call.visible, call.blocks
    sinks, window, softcap = call.sinks, call.window, call.softcap
    depths = None if window is None else call.pending_depths
    key_rows, value_rows = call.key_rows, call.value_rows
    keys, values = key_rows.numbers, value_rows.numbers
    key_scales, value_scales = key_rows.row_scales, value_rows.row_scales
    (key_groups, key_group), (value_groups, value_group) = groups_of(key_rows), groups_of(value_rows)
    batch, heads, rows, dim = query.shape
    kv_heads, value_dim, groups = keys.shape[1], value_rows.dim, heads // keys.shape[1]
    # Rows before heads in memory, so that the next projection reads it without a copy.
    output = query.new_empty(batch, rows, heads, value_dim).transpose(1, 2)
    lse = query.new_empty(batch, heads, rows, dtype=torch.float32)
    split = plan.splits > 1
    parts, tops, totals = room_for(query, plan, value_dim)
    if plan.specialised:
        hopper().launch(call, plan, parts, tops, totals)
        combine(parts, tops, totals, sinks, output, lse, ordered=False)
        return output, lse
    query_blocks = triton.cdiv(rows * groups, plan.block)
    integer = keys.dtype == torch.int8 and query.dtype != torch.float32
    kept = (keys, dim), (values, value_dim // plan.portions), (key_scales, None), (value_scales, None)
    whole = blocks is None and not (key_groups or value_groups) and all(tiled(*each) for each in kept)
    _attend[(batch * kv_heads * query_blocks * plan.portions, plan.splits)](
        query,
        keys,
        values,
        *(tiles(*each, plan.tile) if whole else None for each in kept),
        visible,
        call.lengths,
        depths,
        call.starts,
        blocks,
        key_scales,
        value_scales,
        key_groups,
        value_groups,
        sinks,
        output,
        lse,
        parts,
        tops,
        totals,
        *query.stride(),
        *keys.stride(),
        *values.stride(),
        *scale_strides(key_scales),
        *scale_strides(value_scales),
        *visible.stride(),
        *((0, 0) if depths is None else depths.stride()),
        0 if blocks is None else blocks.stride(0),
        *output.stride(),
        call.lengths.stride(0),
        call.scale,
        0.0 if softcap is None else softcap,
        0 if window is None else window,
        rows,
        call.pending,
        query_blocks,
        plan.splits,
        GROUPS=groups,
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim // plan.portions,
        PORTIONS=plan.portions,
        DIM_PADDED=max(32 if integer else 16, triton.next_power_of_2(dim)),
        VALUE_PADDED=max(16, triton.next_power_of_2(value_dim // plan.portions)),
        KEY_GROUP=key_group,
        VALUE_GROUP=value_group,
        WORDS=visible.shape[2],
        PAGE=0 if blocks is None else keys.shape[2],
        BLOCK=plan.block,
        TILE=plan.tile,
        SPLIT=split,
        SPLIT_TILES=plan.split_tiles,
        MASKED_STAGES=masked_stages(plan),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        INTEGER=integer,
        STARTS=call.starts is not None,
        LATE=pdl(query.device),
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_late(query.device),
    )
    if split:
        combine(parts, tops, totals, sinks, output, lse, ordered=plan.split_tiles > 0)
    return output, lse


def masked_stages(plan: Any) -> int:
    """Tiles with masks in flight. A tree has few; to fetch ahead takes code and, for many rows, registers."""
    return min(plan.stages, 1 if plan.block >= 64 else 2)


@triton.jit(do_not_specialize=["window", "rows", "pending", "query_blocks", "splits"])
def _attend(
    query,
    keys,
    values,
    key_tiles,
    value_tiles,
    key_scale_tiles,
    value_scale_tiles,
    visible,
    lengths,
    depths,
    starts,
    blocks,
    key_scales,
    value_scales,
    key_groups,
    value_groups,
    sinks,
    output,
    lse,
    parts,
    tops,
    totals,
    query_batch,
    query_head,
    query_row,
    query_dim,
    key_batch,
    key_head,
    key_slot,
    key_dim,
    value_batch,
    value_head,
    value_slot,
    value_dim,
    key_scale_batch,
    key_scale_head,
    key_scale_slot,
    value_scale_batch,
    value_scale_head,
    value_scale_slot,
    visible_batch,
    visible_row,
    visible_word,
    depth_batch,
    depth_row,
    block_batch,
    output_batch,
    output_head,
    output_row,
    output_dim,
    length_batch,
    scale,
    softcap,
    window,
    rows,
    pending,
    query_blocks,
    splits,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PORTIONS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    INTEGER: tl.constexpr,
    STARTS: tl.constexpr,
    LATE: tl.constexpr,
):
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    # What reads the same slots runs next to each other, so that the second finds them in L2.
    item, split = tl.program_id(0) // PORTIONS, tl.program_id(1)
    portion = tl.program_id(0) % PORTIONS
    group = (item // query_blocks) % KV_HEADS
    batch = (item // query_blocks // KV_HEADS).to(tl.int64)
    packed = (item % query_blocks) * BLOCK + tl.arange(0, BLOCK)
    row = packed // GROUPS
    head = group * GROUPS + packed % GROUPS
    exists = row < rows
    row = tl.where(exists, row, 0)

    # Queries first: they are the most bytes, and nothing needs them before the first product.
    column = columns(DIM, DIM_PADDED, key_groups is not None)
    queries = query + batch * query_batch + head.to(tl.int64) * query_head + row.to(tl.int64) * query_row
    q = tl.load(
        queries[:, None] + column.to(tl.int64)[None, :] * query_dim,
        mask=exists[:, None] & (column < DIM)[None, :],
        other=0.0,
    )
    length = tl.load(lengths + batch * length_batch).to(tl.int32)
    start = 0
    if starts is not None:
        start = tl.load(starts + batch).to(tl.int32)
    masks = visible + batch * visible_batch + row.to(tl.int64) * visible_row
    used = tl.zeros([BLOCK], tl.int64)
    for word in tl.static_range(WORDS):
        used |= tl.load(masks + word * visible_word, mask=exists, other=0)
    used = used != 0

    # The run of tiles of this work item, and the middle part of it in which every row sees every slot.
    end_slot = length + pending
    first_slot, all_from = start, start
    if WINDOWED:
        depths += batch * depth_batch
        depth = tl.load(depths + (pending - rows + row).to(tl.int64) * depth_row, mask=exists, other=0).to(tl.int32)
        first_slot = tl.maximum(first_slot, length + tl.min(tl.where(used, depth, 1 << 30)) - window + 1)
        # In fixed runs all tiles have masks: their order would else follow from the depths of other nodes.
        deepest = tl.max(tl.where(used, depth, 0))
        all_from = end_slot if SPLIT_TILES > 0 else tl.maximum(all_from, length + deepest - window + 1)
    first_tile, last_tile = first_slot // TILE, tl.cdiv(end_slot, TILE)
    if SPLIT_TILES > 0:
        begin = (first_tile // SPLIT_TILES + split) * SPLIT_TILES
        end = tl.minimum(begin + SPLIT_TILES, last_tile)
        begin = tl.maximum(begin, first_tile)
    else:
        # The tree comes last and takes the time of several tiles.
        run = tl.cdiv(last_tile - first_tile + TREE_TILES, splits)
        begin = first_tile + split * run
        end = tl.minimum(begin + run, last_tile)
    end = tl.where(tl.max(used.to(tl.int32)) > 0, tl.maximum(begin, end), begin)
    tree_tile = length // TILE  # from here on, slots of the tree: never in the middle part, which trusts all values
    all_begin = tl.minimum(tl.maximum(tl.minimum(tl.cdiv(all_from, TILE), tree_tile), begin), end)
    all_end = tl.minimum(tl.maximum(tree_tile, all_begin), end)

    factor = scale if CAPPED else scale * LOG2E
    if INTEGER:
        # Products with INT8 keys are then exact, and keys stay as they are.
        q_upper, q_lower, unit = in_two_bytes(q, used)
        factor *= unit
    if blocks is not None:
        blocks += batch * block_batch
    kv_head = group.to(tl.int64)
    keys += kv_head * key_head
    values += kv_head * value_head
    if value_groups is None:
        values += portion.to(tl.int64) * VALUE_DIM * value_dim
    key_source = key_tiles, keys, key_groups, key_batch, key_slot, key_dim
    value_source = value_tiles, values, value_groups, value_batch, value_slot, value_dim
    if key_scales is not None:
        key_scales += kv_head * key_scale_head
    if value_scales is not None:
        value_scales += kv_head * value_scale_head

    acc = tl.zeros([BLOCK, VALUE_PADDED], tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # First the tiles in the middle, then those before and behind it by one body: code that runs once is cold.
    middle = all_end - all_begin
    for masked in tl.static_range(2):
        count = end - begin - middle if masked else middle
        if count > 0:
            for index in tl.range(count, num_stages=MASKED_STAGES if masked else None):
                if not masked:
                    tile = all_begin + index
                elif STARTS or WINDOWED:
                    tile = tl.where(begin + index < all_begin, begin + index, begin + index + middle)
                else:
                    tile = all_end + index
                slot = tile * TILE + tl.arange(0, TILE)
                readable = (slot >= start) & (slot < end_slot)
                if masked:
                    offset = slot - length
                    drafted = (offset >= 0) & (slot < end_slot)
                    seen = (slot < length)[None, :] & used[:, None]
                    seen |= ancestors(masks, visible_word, offset, drafted, exists, WORDS)
                    seen &= readable[None, :]
                    if WINDOWED:
                        slot_depth = tl.load(depths + offset.to(tl.int64) * depth_row, mask=drafted, other=0).to(
                            tl.int32
                        )
                        position = tl.where(drafted, length + slot_depth, slot)
                        seen &= (length + depth)[:, None] - position[None, :] < window
                if blocks is None:
                    page, inner = batch, slot.to(tl.int64)
                else:
                    page = tl.load(blocks + slot // PAGE, mask=readable, other=0).to(tl.int64)
                    inner = (slot % PAGE).to(tl.int64)
                at = batch, group, tile, page, inner, readable
                k = read_rows(key_source, at, 0, DIM, DIM_PADDED, TILE, 1, KEY_GROUP, masked)
                if INTEGER:
                    products = tl.dot(q_upper, tl.trans(k), out_dtype=tl.int32) * 128
                    scores = tl.dot(q_lower, tl.trans(k), products, out_dtype=tl.int32).to(tl.float32)
                else:
                    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
                if key_scales is None:
                    scores *= factor
                else:
                    key_scale = read_scales(key_scale_tiles, key_scales, key_scale_batch, key_scale_slot, at, TILE)
                    scores *= (key_scale * factor)[None, :]
                if CAPPED:
                    scores = tanh(scores / softcap) * (softcap * LOG2E)
                v = read_rows(
                    value_source, at, portion, VALUE_DIM, VALUE_PADDED, TILE, PORTIONS, VALUE_GROUP, masked
                ).to(q.dtype)
                value_scale = read_scales(
                    value_scale_tiles, value_scales, value_scale_batch, value_scale_slot, at, TILE
                )
                if masked:
                    scores = tl.where(seen, scores, float("-inf"))
                    # A value that is not finite reaches the nodes that see it, and no other through 0 x NaN. What lies
                    # before the first slot may be anything.
                    # (`v - v` would be no test: with a product for v, it may be fused to what the product rounds away.)
                    finite = tl.min((tl.abs(v) < float("inf")).to(tl.int32), 1) > 0
                    broken = ~(finite & (tl.abs(value_scale) < float("inf")))
                    v = tl.where(broken[:, None], 0.0, v)
                    value_scale = tl.where(broken, 0.0, value_scale)
                    reached = tl.max((seen & broken[None, :]).to(tl.int32), 1) > 0
                    total = tl.where(reached, float("nan"), total)
                new_top = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(scores - base[:, None])
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(weights, 1)
                if value_scales is not None:
                    weights *= value_scale[None, :]
                acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
                top = new_top

    top = tl.where(used, top, float("-inf"))
    total = tl.where(used, total, 0.0)
    column = columns(VALUE_DIM, VALUE_PADDED, value_groups is not None and PORTIONS == 1)
    inside = exists[:, None] & (column < VALUE_DIM)[None, :]
    heads = KV_HEADS * GROUPS
    place = (batch * heads + head) * rows + row
    if SPLIT:
        if parts.dtype.element_ty == tl.float16:
            # Half the bytes: relative to the largest number of the row, which moves into the maximum.
            size = tl.max(tl.where(tl.abs(acc) < float("inf"), tl.abs(acc), 0.0), 1)
            size = tl.maximum(size, total * FAINTEST)
            size = tl.where(size > 0, size, 1.0)
            share = 1.0 / size
            acc *= share[:, None]
            total *= share
            top += tl.log2(size)
        lines = parts + ((place * splits + split) * PORTIONS + portion)[:, None] * VALUE_DIM + column[None, :]
        tl.store(lines, acc.to(parts.dtype.element_ty), mask=inside)
        places = (place * PORTIONS + portion) * splits + split
        tl.store(tops + places, top, mask=exists)
        tl.store(totals + places, total, mask=exists)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32) * LOG2E
            new_top = tl.where(used, tl.maximum(top, sink), top)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.exp2(top - base)
            total = tl.where(used, total * fade + tl.exp2(sink - base), 0.0)
            acc *= fade[:, None]
            top = new_top
        # Not sliced here: what breaks one portion of a value would not reach the others.
        outputs = output + batch * output_batch + head.to(tl.int64) * output_head + row.to(tl.int64) * output_row
        whole = tl.where(used, total, 1.0)
        share = tl.where(used[:, None], acc * (1.0 / whole)[:, None], 0.0)
        tl.store(outputs[:, None] + column[None, :] * output_dim, share.to(output.dtype.element_ty), mask=inside)
        tl.store(lse + place, (top + tl.log2(whole)) / LOG2E, mask=exists)
