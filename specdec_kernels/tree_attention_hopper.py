"""Split-KV attention of tree nodes for tensor cores that take their operands from shared memory (compute capability 9).

The same sums as those of `tree_attention`, for what a verify pass mostly is: 16-bit numbers in contiguous caches, no
window, no padding, no soft cap, and runs that are added up. The copy engine keeps a ring of tiles full; while scores of
a tile become weights, the tensor cores multiply the weights of the tile before with its values.

INT8 keys are multiplied as they are, and INT8 values are widened meanwhile into one of two tiles (`_hopper_codes`).
Of wide keys there is room for one tile. It arrives in pieces, and its values when those of the tile before are used.

A launch finds its code outside the caches of a multiprocessor, and what runs once takes longer to arrive than to run.
So there is one loop for all tiles, and the copy engine fetches queries and stores parts.

Written in Gluon, which says where each number lies; triton lowers it as it stands.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec_kernels._hopper_codes import as_other, in_two_bytes, mended, widen
from specdec_kernels._hopper_ring import arrived, copy_tile, fetch, here, rings_for
from specdec_kernels._launch import launch_late, pdl
from specdec_kernels._split_sum import FAINTEST, LOG2E

TREE_TILES = gl.constexpr(1)
"""Tiles by which the run with the tree is shorter, since it takes longer."""

store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # before triton 3.7
_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.int8: gl.int8, torch.float32: gl.float32}


def launch(call: Any, plan: Any, parts: Tensor, tops: Tensor, totals: Tensor) -> None:
    """Fills the parts of the sums, their maxima (base 2) and denominators, as `_split_sum.combine` takes them.

    Args:
        call: checked arguments (`specdec.ops._attention_call.AttentionCall`).
        plan: how the work is cut (`specdec.ops._attention_plan.AttentionPlan`).
        parts: `[batch, heads, rows, splits, value_dim]`, float16.
        tops: `[batch, heads, rows, portions, splits]`.
        totals: like `tops`.
    """
    query, keys, values, visible = call.query, call.keys, call.values, call.visible
    batch, heads, rows, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3] // plan.portions
    groups = heads // kv_heads
    scales = call.key_rows.row_scales, call.value_rows.row_scales
    room = triton.next_power_of_2(groups)  # heads of a group that a tile of rows has room for
    high = plan.block // room
    pieces = pieces_of(dim)
    sums = parts.view(batch * kv_heads, groups, rows, plan.splits, values.shape[3]).transpose(1, 2)
    _attend[(triton.cdiv(rows, high) * plan.portions, batch * kv_heads, plan.splits)](
        _tiles(query.transpose(1, 2), high, room, dim // pieces),
        _tiles(keys, 1, plan.tile, dim // pieces),
        _tiles(values, 1, plan.tile, value_dim),
        *(None if each is None else _tiles(each.squeeze(3), 1, plan.tile) for each in scales),
        _tiles(sums, high, room, 1, value_dim),
        visible,
        call.lengths,
        tops,
        totals,
        *visible.stride(),
        call.lengths.stride(0),
        call.scale,
        rows,
        call.pending,
        plan.splits,
        GROUPS=groups,
        ROOM=room,
        KV_HEADS=kv_heads,
        DIM=dim,
        PIECES=pieces,
        VALUE_DIM=value_dim,
        PORTIONS=plan.portions,
        WORDS=visible.shape[2],
        BLOCK=plan.block,
        TILE=plan.tile,
        STAGES=plan.stages,
        LATE=pdl(query.device),
        WARPS=plan.warps,
        num_warps=plan.warps,
        **launch_late(query.device),
    )


def pieces_of(dim: int) -> int:
    """Pieces in which a tile of keys arrives: of wide keys, only one tile fits, whose first piece must not wait."""
    return 4 if dim > 256 else 1


def _tiles(source: Tensor, *sizes: int) -> TensorDescriptor:
    """Tiles of so many numbers in each dimension but the first, of which they have one."""
    block = [1, *sizes]
    return TensorDescriptor.from_tensor(
        source, block, gl.NVMMASharedLayout.get_default_for(block, _TYPES[source.dtype])
    )


@gluon.jit
def _window(masks, word_stride, offset, used, exists, WORDS: gl.constexpr):
    """For each row, a bit for each slot of a tile that it sees; the first is `offset` behind the committed ones."""
    committed = gl.minimum(gl.maximum(-offset, 0), 63)
    bits = gl.where(used, (gl.full([], 1, gl.uint64) << committed.to(gl.uint64)) - 1, 0)
    for word in gl.static_range(WORDS):
        up = 64 * word - offset  # from a bit of the word to one of the tile
        mask = gl.load(masks + word * word_stride, mask=exists, other=0).to(gl.uint64)
        mask = (mask << gl.maximum(up, 0).to(gl.uint64)) >> gl.maximum(-up, 0).to(gl.uint64)
        bits |= gl.where((up > -64) & (up < 64), mask, 0)
    return bits


@gluon.jit
def _mended(v, NUMBER: gl.constexpr, WARPS: gl.constexpr):
    """A bit for each row of a tile of values that holds a number that is not finite; such rows become zeros."""
    ONES: gl.constexpr = 0x7FFF >> NUMBER.fp_mantissa_width << NUMBER.fp_mantissa_width  # the exponent of such a number
    TILE: gl.constexpr = v.shape[0]
    CHUNKS: gl.constexpr = v.shape[1] // 64  # 128 bytes of all rows lie together
    SHAPE: gl.constexpr = [TILE, 32]
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    chunks = as_other(v, gl.int32, [CHUNKS, TILE, 32], gl.NVMMASharedLayout.get_default_for(SHAPE, gl.int32))
    most = gl.zeros(SHAPE, gl.int32, WORDS)
    for chunk in range(CHUNKS):
        words = chunks.index(chunk).load(WORDS)
        most = gl.maximum(most, gl.maximum(words & (ONES << 16), (words & ONES) << 16))
    broken = gl.max(most, 1) == ONES << 16
    bits = gl.full([], 0, gl.uint64)
    if gl.max(broken.to(gl.int32), 0) > 0:
        for chunk in range(CHUNKS):
            words = chunks.index(chunk).load(WORDS)
            chunks.index(chunk).store(gl.where(broken[:, None], 0, words))
        fence_async_shared()
        row = gl.arange(0, TILE, gl.SliceLayout(1, WORDS))
        bits = gl.sum(broken.to(gl.uint64) << row.to(gl.uint64), 0)
    return bits


@gluon.jit
def _weigh(scores, factor, top, total):
    """Weights of a tile, the new maxima and denominators, and what the sums so far fade by."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * factor[:, None] - base[:, None])
    fade = gl.exp2(top - base)
    return weights, new_top, total * fade + gl.sum(weights, 1), fade


@gluon.jit(do_not_specialize=["rows", "pending", "splits"])
def _attend(
    query_tiles,
    key_tiles,
    value_tiles,
    key_scale_tiles,
    value_scale_tiles,
    part_tiles,
    visible,
    lengths,
    tops,
    totals,
    visible_batch,
    visible_row,
    visible_word,
    length_batch,
    scale,
    rows,
    pending,
    splits,
    GROUPS: gl.constexpr,
    ROOM: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    PIECES: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    PORTIONS: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCK: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    LATE: gl.constexpr,
    WARPS: gl.constexpr,
):
    CODES: gl.constexpr = key_tiles.dtype == gl.int8
    NUMBER: gl.constexpr = query_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 32 if CODES else 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VALUE_DIM if VALUE_DIM < 256 else 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    PARTS: gl.constexpr = [BLOCK, VALUE_DIM]
    WIDTH: gl.constexpr = DIM // PIECES

    lined = gl.allocate_shared_memory(NUMBER, [PIECES, 1, BLOCK // ROOM, ROOM, WIDTH], query_tiles.layout)
    query_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full, count=1)
    if CODES:
        key_sources, value_source = ((key_tiles, key_scale_tiles),), (value_tiles, value_scale_tiles)
    else:
        key_sources, value_source = ((key_tiles,),), (value_tiles,)
    keys, values, key_columns = (rings_for(key_sources[0], STAGES),), rings_for(value_source, STAGES), (0,)
    for piece in gl.static_range(1, PIECES):
        key_sources, keys = key_sources + (key_sources[0],), keys + (rings_for(key_sources[0], STAGES),)
        key_columns = key_columns + (piece * WIDTH,)
    if CODES:
        WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, VALUE_DIM], NUMBER)
        wide = gl.allocate_shared_memory(NUMBER, [2, TILE, VALUE_DIM], WIDE)
    fence_async_shared()
    if LATE:
        _griddep("griddepcontrol.wait;")
        _griddep("griddepcontrol.launch_dependents;")

    # What reads the same slots runs next to each other, so that the second finds them in L2.
    portion, split = gl.program_id(0) % PORTIONS, gl.program_id(2)
    batch, group = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS
    first = gl.program_id(0) // PORTIONS * (BLOCK // ROOM)
    mbarrier.expect(query_full, PIECES * query_tiles.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        copy_tile(query_tiles, [batch, first, group * GROUPS, piece * WIDTH], query_full, lined.index(piece))
    length = gl.load(lengths + batch.to(gl.int64) * length_batch).to(gl.int32)
    packed = gl.arange(0, BLOCK, ROWS)
    head, row = packed % ROOM, first + packed // ROOM
    exists = (row < rows) & (head < GROUPS)
    row = gl.where(exists, row, 0)
    masks = visible + batch.to(gl.int64) * visible_batch + row.to(gl.int64) * visible_row
    bits = gl.load(masks, mask=exists, other=0)
    if WORDS > 1:
        for word in gl.static_range(1, WORDS):
            bits |= gl.load(masks + word * visible_word, mask=exists, other=0)

    # The run of tiles of this work item; the tree comes last and takes longer. If none is left, one that no row sees.
    last_tile = gl.cdiv(length + pending, TILE)
    run = gl.cdiv(last_tile + TREE_TILES, splits)
    begin = split * run
    count = gl.maximum(gl.minimum(run, last_tile - begin), 1)
    plain = length // TILE - begin  # tiles of committed slots alone
    ahead = gl.minimum(count, STAGES)
    column = portion * VALUE_DIM
    both, rings, columns = key_sources + (value_source,), keys + (values,), key_columns + (column,)
    for step in range(ahead):
        fetch(both, rings, batch, group, begin, columns, step, count, TILE, STAGES)
    # Without a node, no more than what is already on its way.
    used = bits != 0
    count = gl.where(gl.max(used.to(gl.int32), 0) > 0, count, ahead)

    factor = gl.full([BLOCK], scale * LOG2E, gl.float32, ROWS)
    nothing = gl.zeros([BLOCK, TILE], gl.int32 if CODES else gl.float32, SCORES)
    acc = gl.zeros(PARTS, gl.float32, SUMS)
    p = gl.zeros([BLOCK, TILE], NUMBER, WEIGHTS)
    top = gl.full([BLOCK], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([BLOCK], gl.float32, ROWS)
    mbarrier.wait(query_full, 0)
    if CODES:
        bytes, unit = in_two_bytes(lined.index(0).reshape([BLOCK, WIDTH]), ROWS, WARPS)
        factor *= unit
    for step in range(count):
        # Scores of this step first, so that they are ready while the weights of the last are multiplied. There are none
        # in the first step: what is multiplied then may be anything, and the second does not add to it.
        first_query = here(0)
        coming = nothing
        for piece in gl.static_range(PIECES):
            k = arrived(keys[piece], step, TILE, WIDTH, STAGES).permute([1, 0])
            if CODES:
                upper = warpgroup_mma(bytes.index(first_query), k, nothing, use_acc=False, is_async=True)
                coming = warpgroup_mma(bytes.index(first_query + 1), k, nothing, use_acc=False, is_async=True)
            else:
                queries = lined.index(first_query + piece).reshape([BLOCK, WIDTH])
                coming = warpgroup_mma(queries, k, coming, use_acc=piece > 0, is_async=True)
        before = gl.maximum(step - 1, 0)
        v = wide.index(before % 2) if CODES else arrived(values, before, TILE, VALUE_DIM, STAGES)
        growing = warpgroup_mma(p, v, acc, use_acc=step > 1, is_async=True)
        if CODES:
            widen(arrived(values, step, TILE, VALUE_DIM, STAGES), wide.index(step % 2), WARPS)
            key_scale = keys[0][2].index(step % STAGES).reshape([TILE]).load(COLUMNS)
            value_scale = values[2].index(step % STAGES).reshape([TILE]).load(COLUMNS)
            upper, scores = warpgroup_mma_wait(num_outstanding=1, deps=(upper, coming))
            scores = (upper * 256 + scores).to(gl.float32) * key_scale[None, :]
            fetch(both, rings, batch, group, begin, columns, step + STAGES, count, TILE, STAGES)
        else:
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(coming,))
            fetch(key_sources, keys, batch, group, begin, key_columns, step + STAGES, count, TILE, STAGES)
        if step >= plain:
            # A tile with the tree. A value that is not finite reaches the nodes that see it, and no other by 0 x NaN.
            seen = _window(masks, visible_word, (begin + step) * TILE - length, used, exists, WORDS)
            if CODES:
                value_scale, broken = mended(value_scale, COLUMNS)
                total = gl.where((seen & broken) != 0, float("nan"), total)
            elif STAGES > 1:
                broken = _mended(arrived(values, step, TILE, VALUE_DIM, STAGES), NUMBER, WARPS)
                total = gl.where((seen & broken) != 0, float("nan"), total)
            slot = gl.arange(0, TILE, COLUMNS)[None, :]
            low, high = (seen & 0xFFFFFFFF).to(gl.uint32)[:, None], (seen >> 32).to(gl.uint32)[:, None]
            seen = (gl.where(slot < 32, low, high) >> ((slot & 31) + here(0)).to(gl.uint32)) & 1 != 0
            scores = gl.where(seen, scores, float("-inf"))
        weights, top, total, fade = _weigh(scores, factor, top, total)
        if CODES:
            weights *= value_scale[None, :]
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(growing, p))
        else:
            # They are there; the branch keeps the assembler from moving the weights behind the products.
            arrived(values, before, TILE, VALUE_DIM, STAGES)
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(growing, p))
            if step > 0:
                free = before + STAGES
                fetch((value_source,), (values,), batch, group, begin, (column,), free, count, TILE, STAGES)
            if STAGES == 1:
                if step >= plain:  # only now is there room for its values
                    seen = _window(masks, visible_word, (begin + step) * TILE - length, used, exists, WORDS)
                    broken = _mended(arrived(values, step, TILE, VALUE_DIM, STAGES), NUMBER, WARPS)
                    total = gl.where((seen & broken) != 0, float("nan"), total)
        acc *= gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(weights.to(NUMBER), WEIGHTS)
    v = wide.index((count - 1) % 2) if CODES else arrived(values, count - 1, TILE, VALUE_DIM, STAGES)
    acc = warpgroup_mma(p, v, acc, use_acc=count > 1)

    # Half the bytes: relative to the largest number of the row, which moves into the maximum.
    size = gl.convert_layout(gl.max(gl.abs(acc), 1), ROWS)
    total = gl.where(used, total, 0.0)
    size = gl.maximum(size, total * FAINTEST)
    size = gl.where(size > 0, size, 1.0)
    share = 1.0 / size
    acc *= gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
    # The queries are of no more use, and each warp has its own rows of them.
    out = as_other(lined, gl.float16, PARTS, gl.NVMMASharedLayout.get_default_for(PARTS, gl.float16))
    out.store(acc.to(gl.float16))
    fence_async_shared()
    out = as_other(out, gl.float16, part_tiles.block_shape, part_tiles.layout)
    store_tile(part_tiles, [gl.program_id(1), first, 0, split, column], out)
    place = (gl.program_id(1) * GROUPS + head).to(gl.int64) * rows + row
    place = (place * PORTIONS + portion) * splits + split
    gl.store(tops + place, gl.where(used, top + gl.log2(size), float("-inf")), mask=exists)
    gl.store(totals + place, total * share, mask=exists)
    tma.store_wait(0)


@gluon.jit
def _griddep(INSTRUCTION: gl.constexpr):
    """Waits for the kernel before, or lets the next be set up."""
    gl.inline_asm_elementwise(INSTRUCTION + " // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
