"""Codes of four bits as attention reads them: two in a byte, with a scale (and a zero point) for groups of numbers.

The low half of a byte holds a number of the first half of the row, the high half one of the second: a tile of bytes
becomes a tile of numbers without moving any between threads. Numbers are made of bits, in float32, exactly: no
instruction is needed that some devices lack, and a conversion would take more time than all the rest.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._tile import read_tile

_E2M1 = tl.constexpr(2.0**126)  # float32 counts exponents from 127, E2M1 from 1
_E2M1_BITS = tl.constexpr(0x81C00000)  # its sign and its three other bits, where float32 has them
_E4M3 = tl.constexpr(2.0**8)  # float16 counts exponents from 15, E4M3 from 7


def groups_of(rows: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
    """What `read_rows` needs of rows (`specdec.ops._stored_rows.StoredRows`): tensors with strides, and constants.

    The constants: numbers that share a scale; numbers that certainly do and lie next to each other in a tile; scales of
    a row that one instruction may fetch; whether the codes are integers.
    """
    if not rows.packed:
        return None, (0, 0, 0, False)
    scales, others = rows.groups
    integers = rows.form == "int4"
    group = rows.dim // scales.shape[3]
    common = math.gcd(group, rows.dim // 2)
    together = scales.shape[3] & -scales.shape[3]
    for each in (scales, others) if integers else (scales,):
        together = math.gcd(together, *each.stride()[:3]) if each.stride(3) == 1 else 1
    return (scales, others, scales.stride(), others.stride()), (group, common & -common, together, integers)


def scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    """Strides of scales `[batch, heads, slots, 1]`; zeros where there are none."""
    return (0, 0, 0) if scales is None else scales.stride()[:3]


@triton.jit
def columns(WIDTH: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr):
    """Which number of a row each column of a tile holds; `WIDTH` or more where it holds none.

    Rows whose codes share bytes come in two halves, of which each is padded.
    """
    column = tl.arange(0, PADDED)
    if PACKED and WIDTH < PADDED:
        inner = column % (PADDED // 2)
        column = tl.where(inner < WIDTH // 2, column // (PADDED // 2) * (WIDTH // 2) + inner, WIDTH)
    return column


@triton.jit
def read_rows(
    source,
    at,
    portion,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PORTIONS: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile `[slots, width]` of a portion of keys or values.

    Numbers and codes of eight bits come as they are stored, those of four bits as the float32 numbers that they stand
    for. Slots that may not be read are zeros.
    """
    tiles, rows, groups, batch_stride, slot_stride, dim_stride = source
    batch, head, tile, page, inner, readable = at
    place = page * batch_stride + inner * slot_stride
    if tiles is not None:
        return tiles.load([batch.to(tl.int32), head, tile * TILE, portion * WIDTH]).reshape(TILE, WIDTH)
    elif groups is None:
        return read_tile(rows, place, dim_stride, readable, WIDTH, PADDED, MASKED)
    else:
        # Of two portions each is one half of a row: all bytes, and of each one code.
        BYTES: tl.constexpr = WIDTH // 2 if PORTIONS == 1 else WIDTH
        packed = read_tile(rows, place, dim_stride, readable, BYTES, PADDED * BYTES // WIDTH, MASKED)
        return _numbers(packed, groups, at, portion, WIDTH, PADDED, TILE, PORTIONS, GROUP, MASKED)


@triton.jit
def _numbers(
    packed,
    groups,
    at,
    portion,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PORTIONS: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What a tile of codes stands for."""
    readable = at[5]
    # Runs of neighbouring columns share a scale; a group may be several of them.
    RUN: tl.constexpr = GROUP[1]
    RUNS: tl.constexpr = PADDED // RUN
    run = columns(WIDTH // RUN, RUNS, PORTIONS == 1)
    rows, mask = None, None
    if MASKED:
        rows = readable[:, None]
        mask = rows & (run < WIDTH // RUN)[None, :]
    elif WIDTH < PADDED:
        mask = (run < WIDTH // RUN)[None, :]
    group = (run + portion * (WIDTH // RUN)) // (GROUP[0] // RUN)
    scale = _read(groups[0], groups[2], at, group, mask, GROUP[2])
    if GROUP[3]:
        scale = scale.to(tl.float32)
        zero = _read(groups[1], groups[3], at, group, mask, GROUP[2]).to(tl.float32)
    else:
        scale = e4m3(scale) * _read(groups[1], groups[3], at, tl.arange(0, 1), rows, 1)
    packed = packed.to(tl.uint32)
    if PORTIONS == 1:
        halves = tl.join(_number(packed & 15, 0, GROUP[3]), _number(packed & 240, 4, GROUP[3]))
        number = tl.permute(halves, (0, 2, 1))
    else:
        number = _number((packed >> (4 * portion).to(tl.uint32)) & 15, 0, GROUP[3])
    number = tl.reshape(number, [TILE, RUNS, RUN]) * scale[:, :, None]
    if GROUP[3]:
        number += zero[:, :, None]
    return tl.reshape(number, [TILE, PADDED])


@triton.jit
def _read(base, strides, at, column, mask, TOGETHER: tl.constexpr):
    """What belongs to some groups of each slot of a tile; `TOGETHER` of them lie side by side, as loads want them."""
    _, head, _, page, inner, _ = at
    place = tl.multiple_of(page * strides[0] + head.to(tl.int64) * strides[1] + inner * strides[2], TOGETHER)
    return tl.load(base + place[:, None] + column[None, :] * strides[3], mask=mask, other=None if mask is None else 0)


@triton.jit
def _number(code, SHIFT: tl.constexpr, INTEGERS: tl.constexpr):
    """Numbers of codes alone in their word, `SHIFT` bits from its end."""
    if INTEGERS:
        # The last bits of a float32 that is a large power of two.
        return (code | ((150 - SHIFT) << 23)).to(tl.float32, bitcast=True) - 2.0 ** (23 - SHIFT)
    else:
        # One product moves the sign and the other bits at once.
        bits = (code * ((1 << 28 | 1 << 22) >> SHIFT)) & _E2M1_BITS
        return bits.to(tl.float32, bitcast=True) * _E2M1


@triton.jit
def e4m3(byte):
    """E4M3 numbers of their bytes."""
    bits = byte.to(tl.uint16)
    number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * _E4M3
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
