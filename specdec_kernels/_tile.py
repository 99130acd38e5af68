"""Small pieces of attention kernels: a tile of rows from memory, a mask, queries in bytes, a hyperbolic tangent."""

import triton
import triton.language as tl

from specdec_kernels._split_sum import LOG2E

_STEPS = tl.constexpr(127.0 * 128.0)  # from zero to the largest number of a query that is written as two bytes


@triton.jit
def read_tile(base, place, stride, readable, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """A tile `[slots, width]` of keys or values; slots that may not be read are zeros."""
    column = tl.arange(0, PADDED)
    pointers = base + place[:, None] + column.to(tl.int64)[None, :] * stride
    if MASKED:
        return tl.load(pointers, mask=readable[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def read_scales(tiles, scales, batch_stride, slot_stride, at, TILE: tl.constexpr):
    """The scale of each slot of a tile, 1 where there are none."""
    batch, head, tile, page, inner, readable = at
    if scales is None:
        return tl.full([TILE], 1.0, tl.float32)
    elif tiles is not None:
        return tiles.load([batch.to(tl.int32), head, tile * TILE]).reshape(TILE)
    else:
        return tl.load(scales + page * batch_stride + inner * slot_stride, mask=readable, other=0.0)


@triton.jit
def in_two_bytes(q, used):
    """Used rows as two INT8 numbers each, the high one first, and what the low one counts in."""
    peak = tl.max(tl.where(used[:, None], tl.abs(q.to(tl.float32)), 0.0))
    unit = tl.where(peak > 0, peak, 1.0) / _STEPS
    whole = tl.floor(tl.where(used[:, None], q.to(tl.float32), 0.0) / unit + 0.5).to(tl.int32)
    upper = (whole + 64) >> 7
    lower = (whole - (upper << 7)).to(tl.int8)
    return upper.to(tl.int8), lower, unit


@triton.jit
def ancestors(masks, word_stride, offset, drafted, exists, WORDS: tl.constexpr):
    """Which of the slots, `offset` behind the committed ones, each row sees among the drafted ones."""
    seen = tl.zeros([exists.shape[0], offset.shape[0]], tl.int1)
    for half in tl.static_range(2 * WORDS):
        # Half a word at a time: 64-bit numbers would take twice the registers.
        bits = (tl.load(masks + (half // 2) * word_stride, mask=exists, other=0) >> (half % 2 * 32)).to(tl.int32)
        here = drafted & (offset // 32 == half)
        seen |= ((bits[:, None] >> (offset & 31)[None, :]) & here.to(tl.int32)[None, :]) != 0
    return seen


@triton.jit
def tanh(x):
    """Hyperbolic tangent in base 2; beyond 15 it is 1 in float32."""
    x = tl.minimum(tl.maximum(x, -15.0), 15.0)
    return 1.0 - 2.0 / (tl.exp2(x * LOG2E * 2.0) + 1.0)
