"""Root mean square normalisation: a program for each row.

The layout of the arguments is that of `specdec.ops.rms_norm`, which checks them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, pdl
from specdec_kernels._rounding import STEP_BY_STEP

WIDEST = 16_384
"""Numbers of a row, which a program holds in registers."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that the kernel takes."""


def refusal(call: Any) -> str:
    """What the kernel takes instead of these arguments; empty if it takes them."""
    if call.rows.dtype not in DTYPES:
        return f"{', '.join(map(str, DTYPES))}, not {call.rows.dtype}"
    if call.rows.shape[1] > WIDEST:
        return f"{WIDEST} numbers of a row at most, not {call.rows.shape[1]}"
    return ""


def launch(call: Any) -> Tensor:
    """The normalised rows.

    Args:
        call: checked arguments (`specdec.ops.rms_norm.NormCall`) that `refusal` has nothing to say of.
    """
    rows, residual = call.rows, call.residual
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    count, width = rows.shape
    padded = triton.next_power_of_2(width)
    _norm[(count,)](
        rows,
        call.scale.contiguous(),
        residual,
        output,
        *rows.stride(),
        *((0, 0) if residual is None else residual.stride()),
        call.eps,
        WIDTH=width,
        PADDED=padded,
        ROUNDED=call.scale.dtype == rows.dtype,
        LATE=pdl(rows.device),
        num_warps=min(16, max(1, padded // 512)),
        **STEP_BY_STEP,
        **launch_late(rows.device),
    )
    return output


@triton.jit
def _norm(
    rows,
    scale,
    residual,
    output,
    row_stride,
    column_stride,
    residual_row,
    residual_column,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROUNDED: tl.constexpr,
    LATE: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < WIDTH
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    factor = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    given = tl.load(rows + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    found = given * (1.0 / tl.sqrt(tl.sum(given * given, 0) / WIDTH + eps))
    if ROUNDED:
        found = found.to(kind).to(tl.float32)
    found = (found * factor).to(kind)
    if residual is not None:
        added = tl.load(residual + row * residual_row + column * residual_column, mask=inside, other=0.0)
        found = (found.to(tl.float32) + added.to(tl.float32)).to(kind)
    tl.store(output + row * WIDTH + column, found, mask=inside)
