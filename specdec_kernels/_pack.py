"""Rows as codes of four bits, two in a byte: the arithmetic of `specdec.ops.quantize`, to the last bit.

All is in float32 and rounds once per operation. Dimensions and groups are powers of two, so that groups, and the two
halves of a row, are axes of the same numbers.
"""

import triton
import triton.language as tl

from specdec_kernels._codes import e4m3
from specdec_kernels._rounding import nearest, to_e4m3

_INT4 = tl.constexpr(1 / 15)
_NVFP4 = tl.constexpr(1 / (6 * 448))
_LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def to_int4(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Bytes `[rows, width / 2]`, scales and zero points `[rows, groups]`."""
    x = tl.reshape(x, [ROWS, WIDTH // GROUP, GROUP])
    broken = tl.max((x != x).to(tl.int32), 2) > 0  # a maximum leaves out NaN
    lowest, highest = tl.min(x, 2), tl.max(x, 2)
    scale = tl.where(broken, float("nan"), _half((highest - lowest) * _INT4))
    zero = tl.where(broken, float("nan"), _half(lowest))
    step = tl.where(scale == 0, 1.0, scale)
    code = nearest(tl.div_rn(x - zero[:, :, None], tl.broadcast_to(step[:, :, None], x.shape)), 0.0, 15.0)
    return _packed(code & 15, ROWS, WIDTH), scale.to(tl.float16), zero.to(tl.float16)


@triton.jit
def to_nvfp4(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Bytes `[rows, width / 2]`, E4M3 scales `[rows, groups]` and scales of rows `[rows]`."""
    x = tl.reshape(x, [ROWS, WIDTH // GROUP, GROUP])
    # Numbers without a sign are ordered as their bits are, NaN above all: a broken row has a broken scale.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    row_scale = tl.max(largest, 1).to(tl.float32, bitcast=True) * _NVFP4
    row_step = tl.where(row_scale == 0, 1.0, row_scale)[:, None]
    largest = largest.to(tl.float32, bitcast=True)
    scale = to_e4m3(tl.div_rn(largest, tl.broadcast_to(6.0 * row_step, largest.shape)))
    step = e4m3(scale) * row_step
    step = tl.where(step == 0, 1.0, step)
    x = tl.div_rn(x, tl.broadcast_to(step[:, :, None], x.shape))
    return _packed(_to_e2m1(x), ROWS, WIDTH), scale, row_scale


@triton.jit
def _half(x):
    """The nearest float16 in its finite range, as float32."""
    return tl.minimum(tl.maximum(x, -_LARGEST_HALF), _LARGEST_HALF).to(tl.float16).to(tl.float32)


@triton.jit
def _to_e2m1(x):
    """The nearest E2M1 code, ties to the even one."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return (code + (size > 5.0).to(tl.int32)) | ((x < 0).to(tl.int32) << 3)


@triton.jit
def _packed(code, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first half of each row in the low bits. The halves meet in a sum, as those of a rotation do."""
    halves = tl.reshape(code, [ROWS, 2, WIDTH // 2])
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.sum(tl.where(second, halves << 4, halves), 1)
