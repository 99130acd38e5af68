"""Writes new keys and values into a cache as it stores them: rotated, quantised, with their scales, in one launch.

A program takes one new row of one batch row, a few of its heads, and either the keys or the values. All arithmetic is
in float32 and rounds once per operation, as the codecs do, so codes are the same to the last bit. Rounding to integers
and to E4M3 is done on the bits: it needs no instruction that some devices lack.

The layout of the arguments is that of `specdec.ops.write_rows`, which checks them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._pack import to_int4, to_nvfp4
from specdec_kernels._rounding import nearest, to_e4m3

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of rows, and of buffers that hold them as they are, that the kernel takes."""

NUMBERS = 1024
"""Numbers that one program writes, at least one row of a head."""

_INT8 = tl.constexpr(1 / 127)
_E4M3 = tl.constexpr(1 / 448)


def launch(keys: Any, values: Any, slots: Tensor) -> None:
    """Writes both sides (checked `specdec.ops.write_rows.Side`)."""
    sides = (keys, values)
    batch, heads, new, _ = keys.rows.shape
    rows, scales = [side.parts[0] for side in sides], [side.parts[-1] for side in sides]
    groups = [side.parts[len(side.parts) // 2] for side in sides]
    dims = [side.rows.shape[3] for side in sides]
    padded = [triton.next_power_of_2(dim) for dim in dims]
    # A row is rotated in runs of the largest power of two that divides it; a run of one stays as it is.
    stages = [(dim & -dim).bit_length() - 1 if side.rotate else 0 for side, dim in zip(sides, dims, strict=True)]
    block = min(triton.next_power_of_2(heads), max(1, NUMBERS // max(padded)))
    head_blocks = triton.cdiv(heads, block)
    with torch.cuda.device_of(slots):
        _write[(batch * new * head_blocks, 2)](
            tuple(side.rows for side in sides),
            tuple(map(_as_bytes, rows)),
            tuple(map(_as_bytes, groups)),
            tuple(scales),
            slots,
            tuple(side.rows.stride() for side in sides),
            tuple(part.stride() for part in rows),
            tuple(part.stride() for part in groups),
            tuple(part.stride() for part in scales),
            *slots.stride(),
            new,
            heads,
            head_blocks,
            rows[0].shape[2],
            FORMS=tuple(side.form for side in sides),
            DIMS=tuple(dims),
            PADDED=tuple(padded),
            GROUPS=tuple(side.group for side in sides),
            STAGES=tuple(stages),
            NORMS=tuple(2 ** (-stage / 2) for stage in stages),
            BLOCK=block,
            num_warps=min(4, block),  # a row within a warp: its sums need no shared memory
        )


def _as_bytes(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


@triton.jit(do_not_specialize=["new", "heads", "head_blocks", "capacity"])
def _write(
    sources,
    rows,
    groups,
    scales,
    slots,
    source_strides,
    row_strides,
    group_strides,
    scale_strides,
    slot_batch,
    slot_new,
    new,
    heads,
    head_blocks,
    capacity,
    FORMS: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0)
    head = (item % head_blocks) * BLOCK + tl.arange(0, BLOCK)
    place = (item // head_blocks).to(tl.int64)
    batch, index = place // new, place % new
    slot = tl.load(slots + batch * slot_batch + index * slot_new).to(tl.int64)
    exists = head < tl.where((slot >= 0) & (slot < capacity), heads, 0)  # a row that is dropped has no heads
    head = head.to(tl.int64)
    for side in tl.static_range(2):
        if tl.program_id(1) == side:
            strides = source_strides[side]
            column = tl.arange(0, PADDED[side])
            inside = exists[:, None] & (column < DIMS[side])[None, :]
            column = column.to(tl.int64)
            start = sources[side] + batch * strides[0] + index * strides[2]
            x = tl.load(start + head[:, None] * strides[1] + column[None, :] * strides[3], mask=inside, other=0.0)
            if STAGES[side] > 0:
                x = _rotate(x.to(tl.float32), BLOCK, PADDED[side], STAGES[side]) * NORMS[side]
            targets = _places(rows[side], row_strides[side], batch, head, slot, column)
            if FORMS[side] == "plain":
                tl.store(targets, x.to(rows[side].dtype.element_ty), mask=inside)
            elif GROUPS[side] > 0:
                x = x.to(tl.float32)
                if FORMS[side] == "int4":
                    packed, scale, other = to_int4(x, BLOCK, PADDED[side], GROUPS[side])
                else:
                    packed, scale, other = to_nvfp4(x, BLOCK, PADDED[side], GROUPS[side])
                    other = other[:, None]
                kept = exists[:, None]
                column = tl.arange(0, PADDED[side] // 2)
                targets = _places(rows[side], row_strides[side], batch, head, slot, column)
                tl.store(targets, packed.to(tl.uint8), mask=kept)
                column = tl.arange(0, PADDED[side] // GROUPS[side])
                targets = _places(groups[side], group_strides[side], batch, head, slot, column)
                tl.store(targets, scale.to(groups[side].dtype.element_ty), mask=kept)
                column = tl.arange(0, other.shape[1])
                targets = _places(scales[side], scale_strides[side], batch, head, slot, column)
                tl.store(targets, other, mask=kept)
            else:
                x = x.to(tl.float32)
                # Numbers without a sign are ordered as their bits are, NaN above all: a broken row has a broken scale.
                largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
                scale = largest * (_INT8 if FORMS[side] == "int8" else _E4M3)
                step = tl.broadcast_to(tl.where(scale == 0, 1.0, scale)[:, None], [BLOCK, PADDED[side]])
                x = tl.div_rn(x, step)
                code = nearest(x, -127.0, 127.0) if FORMS[side] == "int8" else to_e4m3(x)
                tl.store(targets, code.to(rows[side].dtype.element_ty), mask=inside)
                strides = scale_strides[side]
                tl.store(scales[side] + batch * strides[0] + slot * strides[2] + head * strides[1], scale, mask=exists)


@triton.jit
def _places(base, strides, batch, head, slot, column):
    """Where numbers of a slot lie, for some heads."""
    start = base + batch * strides[0] + slot * strides[2]
    return start + head[:, None] * strides[1] + column.to(tl.int64)[None, :] * strides[3]


@triton.jit
def _rotate(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Sums and differences of numbers 1, 2, 4, ... apart, `STAGES` times: `specdec.ops.hadamard` before its norm.

    The two halves of a pair meet in a reduction, which needs no shared memory where a row lies within a warp.
    """
    second = tl.arange(0, 2)[None, None, :, None] == 1
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, [ROWS, WIDTH // (2 << stage), 2, 1 << stage])
        sums = tl.expand_dims(tl.sum(pairs, 2), 2)
        differences = tl.expand_dims(tl.sum(tl.where(second, -pairs, pairs), 2), 2)
        x = tl.reshape(tl.where(second, differences, sums), [ROWS, WIDTH])
    return x
