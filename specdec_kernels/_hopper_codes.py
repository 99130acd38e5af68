"""INT8 codes in the kernel of compute capability 9: queries as two bytes, and values widened for the tensor cores.

Tensor cores take eight-bit numbers only along the dimension that is added up. Keys lie that way and stay as they are;
values do not. A thread widens eight neighbouring codes at a time, by bits: a code in the last bits of a number that is
large enough, less that number.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_memory = gl.shared_memory_descriptor
as_other = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

_STEPS = gl.constexpr(127.0 * 256.0)  # from zero to the largest number of a query that is written as two bytes
_ROUNDED = gl.constexpr(1.5 * 2.0**23 + 128.0)  # what is added to it leaves an integer in the last bits, plus 128
_NAN = gl.constexpr(tl.PropagateNan.ALL)

_IN_BFLOAT16 = gl.constexpr(
    """{
    .reg .b32 low, high, whole<2>, sign<2>;
    prmt.b32 low, $4, 0x43434343, 0x4140;
    prmt.b32 high, $4, 0x43434343, 0x4342;
    and.b32 whole0, low, 0xFF7FFF7F;
    and.b32 sign0, low, 0xFF80FF80;
    and.b32 whole1, high, 0xFF7FFF7F;
    and.b32 sign1, high, 0xFF80FF80;
    sub.bf16x2 $0, whole0, sign0;
    sub.bf16x2 $1, whole1, sign1;
    prmt.b32 low, $5, 0x43434343, 0x4140;
    prmt.b32 high, $5, 0x43434343, 0x4342;
    and.b32 whole0, low, 0xFF7FFF7F;
    and.b32 sign0, low, 0xFF80FF80;
    and.b32 whole1, high, 0xFF7FFF7F;
    and.b32 sign1, high, 0xFF80FF80;
    sub.bf16x2 $2, whole0, sign0;
    sub.bf16x2 $3, whole1, sign1;
    }"""
)
"""128 and seven bits, less 128 or, for the sign, 256: all of them are bfloat16 numbers."""

_IN_FLOAT16 = gl.constexpr(
    """{
    .reg .b32 low, high, code, much;
    mov.b32 much, 0x64806480;
    xor.b32 code, $4, 0x80808080;
    prmt.b32 low, code, 0x64646464, 0x4140;
    prmt.b32 high, code, 0x64646464, 0x4342;
    sub.f16x2 $0, low, much;
    sub.f16x2 $1, high, much;
    xor.b32 code, $5, 0x80808080;
    prmt.b32 low, code, 0x64646464, 0x4140;
    prmt.b32 high, code, 0x64646464, 0x4342;
    sub.f16x2 $2, low, much;
    sub.f16x2 $3, high, much;
    }"""
)
"""1024 and a code plus 128, less 1152."""


_PACKED = gl.constexpr(
    """{
    .reg .b32 low, high;
    prmt.b32 low, $2, $3, 0x5140;
    prmt.b32 high, $4, $5, 0x5140;
    prmt.b32 $0, low, high, 0x7632;
    prmt.b32 low, low, high, 0x5410;
    xor.b32 $1, low, 0x80808080;
    }"""
)
"""The second bytes of four words, and the first, of which the highest bit is turned."""


@gluon.jit
def widen(codes, wide, WARPS: gl.constexpr):
    """Stores the INT8 numbers of a tile in shared memory as those of another tile, for the tensor cores."""
    LANES: gl.constexpr = codes.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    found = gl.inline_asm_elementwise(
        _IN_BFLOAT16 if wide.dtype == gl.bfloat16 else _IN_FLOAT16,
        "=&r,=&r,=&r,=&r,r,r",
        [codes.load(LAYOUT)],
        dtype=wide.dtype,
        is_pure=True,
        pack=8,
    )
    wide.store(found)
    fence_async_shared()


@gluon.jit
def in_two_bytes(lined, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Writes queries `[rows, dim]` over themselves as two INT8 numbers, the high ones first.

    Returns them and the step of each row, in which the low ones count; the high ones count 256 times as much. A row
    with a number that is not finite has such a step.
    """
    LANES: gl.constexpr = lined.shape[1] // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    q = lined.load(LAYOUT).to(gl.float32)
    peak = gl.reduce(gl.abs(q), 1, _larger)
    step = gl.where(peak == 0, 1.0, peak) * (1.0 / _STEPS)
    bits = (q * (1.0 / step)[:, None] + _ROUNDED).to(gl.int32, bitcast=True)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([lined.shape[0], lined.shape[1]], gl.int8)
    bytes = as_other(lined, gl.int8, [2, lined.shape[0], lined.shape[1]], TILE)
    upper, lower = gl.inline_asm_elementwise(
        _PACKED, "=&r,=&r,r,r,r,r", [bits], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    bytes.index(0).store(upper)
    bytes.index(1).store(lower)
    fence_async_shared()
    return bytes, gl.convert_layout(step, ROWS)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_NAN)


@gluon.jit
def mended(scales, COLUMNS: gl.constexpr):
    """Scales of a tile of values with zeros for those that are not finite, and a bit for each of them."""
    broken = ~(gl.abs(scales) < float("inf"))
    slot = gl.arange(0, scales.shape[0], COLUMNS)
    return gl.where(broken, 0.0, scales), gl.sum(broken.to(gl.uint64) << slot.to(gl.uint64), 0)
