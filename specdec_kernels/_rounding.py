"""Rounding on the bits of float32, which needs no instruction that some devices lack; and rounding that stays."""

import triton
import triton.language as tl

_UNIT = tl.constexpr(1.5 * 2**23)  # added to a small number, this leaves its nearest integer, ties to even
_TINY = tl.constexpr(2.0**14)  # added to a number below 2 ** -6, this leaves its E4M3 code
_TINY_BITS = tl.constexpr((127 + 14) << 23)

STEP_BY_STEP = {"enable_fp_fusion": False}
"""Launch option: a product that is rounded to half precision and then added to a number stays rounded.

Otherwise the compiler takes one instruction for both, which rounds once, and a model would not get its own numbers.
"""


@triton.jit
def nearest(x, lowest, highest):
    """The nearest integer of a range, ties to even, in the low byte."""
    x = tl.minimum(tl.maximum(x, lowest), highest)
    return (x + _UNIT).to(tl.int32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """The nearest E4M3 code, ties to even, what is too large as the largest."""
    bits = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits &= 0x7FFFFFFF
    tiny = (bits.to(tl.float32, bitcast=True) + _TINY).to(tl.int32, bitcast=True) - _TINY_BITS
    # Cut to three bits of the fraction, the exponent counted from 7 instead of 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(bits < 121 << 23, tiny, normal) | sign
