"""Split-KV attention of tree nodes for tensor cores that take their operands from shared memory (compute capability 9).

The same sums as those of `tree_attention`, for what a verify pass mostly is: 16-bit numbers in contiguous caches, no
window, no padding, no soft cap, and runs that are added up. The copy engine keeps a ring of tiles full; while scores of
a tile become weights, the tensor cores multiply the weights of the tile before with its values.

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

from specdec_kernels._launch import launch_late, pdl

LOG2E = gl.constexpr(1.4426950408889634)
TREE_TILES = gl.constexpr(1)
"""Tiles by which the run with the tree is shorter, since it takes longer."""

FAINTEST = gl.constexpr(2.0**-60)
"""Smallest size of a part over its denominator to which it is scaled, so that no quotient leaves float32."""

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # before triton 3.7
_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


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
    query_blocks = triton.cdiv(rows * groups, plan.block)
    _attend[(batch * kv_heads * query_blocks * plan.portions, plan.splits)](
        query,
        _tiles(keys, plan.tile, dim),
        _tiles(values, plan.tile, value_dim),
        visible,
        call.lengths,
        parts,
        tops,
        totals,
        *query.stride()[:3],
        *visible.stride(),
        call.lengths.stride(0),
        call.scale,
        rows,
        rows if call.depths is None else call.depths.shape[1],
        query_blocks,
        plan.splits,
        GROUPS=groups,
        KV_HEADS=kv_heads,
        DIM=dim,
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


def _tiles(rows: Tensor, tile: int, width: int) -> TensorDescriptor:
    """Tiles of `tile` slots of one head."""
    block = [1, 1, tile, width]
    return TensorDescriptor.from_tensor(rows, block, gl.NVMMASharedLayout.get_default_for(block, _TYPES[rows.dtype]))


@gluon.jit
def _fetch(tiles, ring, full, batch, head, tile, column, step, last, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Has the copy engine fill the stage of a step, if there is such a step."""
    if step < last:
        barrier = full.index(step % STAGES)
        mbarrier.expect(barrier, tiles.block_type.nbytes)
        place = [batch, head, (tile + step) * TILE, column]
        copy_tile(tiles, place, barrier, ring.index(step % STAGES))


@gluon.jit
def _arrived(ring, full, step, TILE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """The tile of a step, once it is there."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    return ring.index(stage).reshape([TILE, WIDTH])


@gluon.jit
def _sees(masks, word_stride, offset, used, exists, WORDS: gl.constexpr, TILE: gl.constexpr, SCORES: gl.constexpr):
    """Which slots of a tile, the first of them `offset` behind the committed ones, each row sees."""
    committed = gl.minimum(gl.maximum(-offset, 0), 63)
    bits = gl.where(used, (gl.full([], 1, gl.uint64) << committed.to(gl.uint64)) - 1, 0)
    for word in gl.static_range(WORDS):
        up = 64 * word - offset  # from a bit of the word to one of the tile
        mask = gl.load(masks + word * word_stride, mask=exists, other=0).to(gl.uint64)
        mask = (mask << gl.maximum(up, 0).to(gl.uint64)) >> gl.maximum(-up, 0).to(gl.uint64)
        bits |= gl.where((up > -64) & (up < 64), mask, 0)
    slot = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))[None, :]
    low, high = (bits & 0xFFFFFFFF).to(gl.uint32)[:, None], (bits >> 32).to(gl.uint32)[:, None]
    return (gl.where(slot < 32, low, high) >> (slot & 31).to(gl.uint32)) & 1 != 0


@gluon.jit
def _mended(v, NUMBER: gl.constexpr, WORDS: gl.constexpr, SCORES: gl.constexpr):
    """Which rows of a tile of values hold a number that is not finite; they become zeros."""
    ONES: gl.constexpr = 0x7FFF >> NUMBER.fp_mantissa_width << NUMBER.fp_mantissa_width  # the exponent of such a number
    SHAPE: gl.constexpr = [v.shape[0], v.shape[1] // 2]
    pairs = v._reinterpret(gl.int32, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, gl.int32))
    words = pairs.load(WORDS)
    broken = gl.max(gl.maximum(words & (ONES << 16), (words & ONES) << 16), 1) == ONES << 16
    if gl.max(broken.to(gl.int32), 0) > 0:
        pairs.store(gl.where(broken[:, None], 0, words))
        fence_async_shared()
    return gl.convert_layout(broken.to(gl.int32), gl.SliceLayout(0, SCORES)) > 0


@gluon.jit
def _weigh(scores, factor, top, total):
    """Weights of a tile, the new maxima and denominators, and what the sums so far fade by."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * factor - base[:, None])
    fade = gl.exp2(top - base)
    return weights, new_top, total * fade + gl.sum(weights, 1), fade


@gluon.jit(do_not_specialize=["rows", "pending", "query_blocks", "splits"])
def _attend(
    query,
    key_tiles,
    value_tiles,
    visible,
    lengths,
    parts,
    tops,
    totals,
    query_batch,
    query_head,
    query_row,
    visible_batch,
    visible_row,
    visible_word,
    length_batch,
    scale,
    rows,
    pending,
    query_blocks,
    splits,
    GROUPS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    PORTIONS: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCK: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    LATE: gl.constexpr,
    WARPS: gl.constexpr,
):
    if LATE:
        _griddep("griddepcontrol.wait;")
        _griddep("griddepcontrol.launch_dependents;")
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VALUE_DIM if VALUE_DIM < 256 else 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LANES: gl.constexpr = DIM // 8 if DIM < 256 else 32
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    VALUE_LANES: gl.constexpr = VALUE_DIM // 8 if VALUE_DIM < 256 else 32
    VALUE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // VALUE_LANES, VALUE_LANES], [WARPS, 1], [1, 0])
    LONG: gl.constexpr = TILE if TILE < 32 else 32  # threads of a warp along the slots
    EACH: gl.constexpr = TILE * VALUE_DIM // (64 * WARPS)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, EACH], [LONG, 32 // LONG], [TILE // LONG, WARPS * LONG // TILE], [1, 0])
    NUMBER: gl.constexpr = query.dtype.element_ty

    item, split = gl.program_id(0) // PORTIONS, gl.program_id(1)
    portion = gl.program_id(0) % PORTIONS
    group = (item // query_blocks) % KV_HEADS
    batch = item // query_blocks // KV_HEADS
    first = (item % query_blocks) * BLOCK
    packed = first + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    exists = packed // GROUPS < rows
    row = gl.where(exists, packed // GROUPS, 0)
    masks = visible + batch.to(gl.int64) * visible_batch + row.to(gl.int64) * visible_row
    length = gl.load(lengths + batch.to(gl.int64) * length_batch).to(gl.int32)
    bits = gl.load(masks, mask=exists, other=0)
    if WORDS > 1:
        for word in gl.static_range(1, WORDS):
            bits |= gl.load(masks + word * visible_word, mask=exists, other=0)
    used = bits != 0

    # The run of tiles of this work item; the tree comes last and takes the time of several tiles.
    last_tile = gl.cdiv(length + pending, TILE)
    run = gl.cdiv(last_tile + TREE_TILES, splits)
    begin = split * run
    count = gl.maximum(gl.minimum(run, last_tile - begin), 0)
    count = gl.where(gl.max(used.to(gl.int32), 0) > 0, count, 0)
    plain = gl.minimum(gl.maximum(length // TILE - begin, 0), count)  # tiles of committed slots alone

    keys = gl.allocate_shared_memory(NUMBER, [STAGES, 1, 1, TILE, DIM], key_tiles.layout)
    values = gl.allocate_shared_memory(NUMBER, [STAGES, 1, 1, TILE, VALUE_DIM], value_tiles.layout)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
    fence_async_shared()
    column = portion * VALUE_DIM
    for stage in gl.static_range(STAGES):
        _fetch(key_tiles, keys, key_full, batch, group, begin, 0, stage, count, TILE, STAGES)
        _fetch(value_tiles, values, value_full, batch, group, begin, column, stage, count, TILE, STAGES)

    line = first + gl.arange(0, BLOCK, gl.SliceLayout(1, LINES))
    inside = line // GROUPS < rows
    lines = query + batch.to(gl.int64) * query_batch + (group * GROUPS + line % GROUPS).to(gl.int64) * query_head
    lines += gl.where(inside, line // GROUPS, 0).to(gl.int64) * query_row
    q = gl.load(lines[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, LINES))[None, :], mask=inside[:, None], other=0.0)
    queries = gl.allocate_shared_memory(
        NUMBER, [BLOCK, DIM], gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], NUMBER), q
    )
    fence_async_shared()

    factor = scale * LOG2E
    nothing = gl.zeros([BLOCK, TILE], gl.float32, SCORES)
    acc = gl.zeros([BLOCK, VALUE_DIM], gl.float32, SUMS)
    top = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SCORES))
    if plain > 0:
        k = _arrived(keys, key_full, 0, TILE, DIM, STAGES)
        scores = warpgroup_mma(queries, k.permute([1, 0]), nothing, use_acc=False)
        _fetch(key_tiles, keys, key_full, batch, group, begin, 0, STAGES, count, TILE, STAGES)
        weights, top, total, fade = _weigh(scores, factor, top, total)
        p = gl.convert_layout(weights.to(NUMBER), WEIGHTS)
        for step in range(1, plain):
            # Scores of this step first, so that they are ready while the weights of the last are multiplied.
            k = _arrived(keys, key_full, step, TILE, DIM, STAGES)
            coming = warpgroup_mma(queries, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
            v = _arrived(values, value_full, step - 1, TILE, VALUE_DIM, STAGES)
            growing = warpgroup_mma(p, v, acc, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(coming,))
            _fetch(key_tiles, keys, key_full, batch, group, begin, 0, step + STAGES, count, TILE, STAGES)
            weights, top, total, fade = _weigh(scores, factor, top, total)
            # They are there; the branch keeps the assembler from moving the weights behind the products.
            _arrived(values, value_full, step - 1, TILE, VALUE_DIM, STAGES)
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(growing, p))
            before = step - 1 + STAGES
            _fetch(value_tiles, values, value_full, batch, group, begin, column, before, count, TILE, STAGES)
            acc *= gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            p = gl.convert_layout(weights.to(NUMBER), WEIGHTS)
        v = _arrived(values, value_full, plain - 1, TILE, VALUE_DIM, STAGES)
        acc = warpgroup_mma(p, v, acc)
        before = plain - 1 + STAGES
        _fetch(value_tiles, values, value_full, batch, group, begin, column, before, count, TILE, STAGES)

    for step in range(plain, count):
        # The tiles with the tree. A value that is not finite reaches the nodes that see it, and no other by 0 x NaN.
        v = _arrived(values, value_full, step, TILE, VALUE_DIM, STAGES)
        broken = _mended(v, NUMBER, PAIRS, SCORES)
        k = _arrived(keys, key_full, step, TILE, DIM, STAGES)
        scores = warpgroup_mma(queries, k.permute([1, 0]), nothing, use_acc=False)
        seen = _sees(masks, visible_word, (begin + step) * TILE - length, used, exists, WORDS, TILE, SCORES)
        reached = gl.max((seen & broken[None, :]).to(gl.int32), 1) > 0
        total = gl.where(reached, float("nan"), total)
        weights, top, total, fade = _weigh(gl.where(seen, scores, float("-inf")), factor, top, total)
        acc *= gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        acc = warpgroup_mma(gl.convert_layout(weights.to(NUMBER), WEIGHTS), v, acc)
        _fetch(key_tiles, keys, key_full, batch, group, begin, 0, step + STAGES, count, TILE, STAGES)
        _fetch(value_tiles, values, value_full, batch, group, begin, column, step + STAGES, count, TILE, STAGES)

    # Half the bytes: relative to the largest number of the row, which moves into the maximum.
    top = gl.where(used, top, float("-inf"))
    total = gl.where(used, total, 0.0)
    size = gl.convert_layout(gl.max(gl.abs(acc), 1), gl.SliceLayout(1, SCORES))
    size = gl.maximum(size, total * FAINTEST)
    size = gl.where(size > 0, size, 1.0)
    share = 1.0 / size
    heads = KV_HEADS * GROUPS
    place = (batch.to(gl.int64) * heads + group * GROUPS + packed % GROUPS) * rows + row
    places = (place * PORTIONS + portion) * splits + split
    gl.store(tops + places, top + gl.log2(size), mask=exists)
    gl.store(totals + places, total * share, mask=exists)
    acc *= gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
    out = gl.convert_layout(acc.to(gl.float16), VALUE_LINES)
    line = _again(first) + gl.arange(0, BLOCK, gl.SliceLayout(1, VALUE_LINES))
    inside = line // GROUPS < rows
    place = (batch.to(gl.int64) * heads + group * GROUPS + line % GROUPS) * rows + line // GROUPS
    place = ((place * splits + split) * PORTIONS + portion) * VALUE_DIM
    at = parts + place[:, None] + gl.arange(0, VALUE_DIM, gl.SliceLayout(0, VALUE_LINES))[None, :]
    gl.store(at, out, mask=inside[:, None])


@gluon.jit
def _again(number):
    """The same number, from which the compiler computes anew instead of keeping all that it computed before."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _griddep(INSTRUCTION: gl.constexpr):
    """Waits for the kernel before, or lets the next be set up."""
    gl.inline_asm_elementwise(INSTRUCTION + " // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
