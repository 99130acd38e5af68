"""A product of few rows with a matrix that is read once.

A work item takes 64 outputs and a run of the inputs. Weights are the left operand, so that outputs fill the tensor
cores' rows and the few rows are columns. Where inputs are split, each item leaves its sums; the one that finds, by a
counter, that it is the last adds them up in their order and sets the counter back.

The layout of the arguments is that of `specdec.ops.skinny_linear`, which checks them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import interpreted
from specdec_kernels._gate import gated
from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, limits, pdl
from specdec_kernels._rounding import STEP_BY_STEP

DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes that the kernel takes; float32 in the interpreter alone, where there is no other to compare."""

TILE, STEP, STAGES, WARPS = 64, 128, 5, 4
"""Outputs of a work item, inputs that pass by at a time, how many such steps are in flight, warps."""

SHORTEST = 512
"""Inputs of a work item for which a split pays."""

MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """How a launch is cut.

    Attributes:
        block: rows, padded.
        splits: parts of the inputs.
        stages: steps in flight.
    """

    block: int
    splits: int
    stages: int


def make_plan(rows: int, outputs: int, inputs: int, *, multiprocessors: int, shared_memory: int) -> Plan:
    """One work item per multiprocessor, or fewer where inputs are few; more where there are more outputs."""
    block = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(outputs, TILE)
    splits = max(1, min(multiprocessors // tiles, inputs // SHORTEST))
    held = 2 * STEP * (TILE + block)
    return Plan(block, splits, max(1, min(STAGES, shared_memory // held)))


def refusal(call: Any) -> str:
    """What the kernel takes instead of these arguments; empty if it takes them."""
    rows = call.rows
    if rows.dtype not in DTYPES and not (interpreted() and rows.dtype == torch.float32):
        return f"{', '.join(map(str, DTYPES))}, not {rows.dtype}"
    if rows.shape[0] > MOST_ROWS:
        return f"{MOST_ROWS} rows at most, not {rows.shape[0]}"
    if 0 in (call.rows.shape[0], *call.weight.shape):
        return f"at least one row, input and output, not {list(call.rows.shape)} and {list(call.weight.shape)}"
    if call.weight.stride(1) != 1:
        return f"weights whose rows are contiguous, not strides {call.weight.stride()}"
    return ""


def launch(call: Any) -> Tensor:
    """The outputs `[rows, outputs]`, or half as many behind a gate.

    Args:
        call: checked arguments (`specdec.ops.skinny_linear.SkinnyCall`) that `refusal` has nothing to say of.
    """
    rows = call.rows if call.rows.stride(1) == 1 else call.rows.contiguous()
    (count, inputs), outputs, residual = rows.shape, call.weight.shape[0], call.residual
    multiprocessors, shared_memory = limits(rows.device)
    plan = make_plan(count, outputs, inputs, multiprocessors=multiprocessors, shared_memory=shared_memory)
    tiles = triton.cdiv(outputs, TILE)
    parts, counters = None, None
    if plan.splits > 1:
        parts = rows.new_empty(tiles * plan.splits * TILE * plan.block, dtype=torch.float32)
        counters = call.counters
        if counters is None:
            counters = torch.zeros(tiles, dtype=torch.int32, device=rows.device)
    output = rows.new_empty(count, outputs // (2 if call.gate else 1))
    _skinny_product[(tiles, plan.splits)](
        rows,
        call.weight,
        call.bias,
        residual,
        output,
        parts,
        counters,
        rows.stride(0),
        call.weight.stride(0),
        *((0, 0) if residual is None else residual.stride()),
        count,
        outputs,
        inputs,
        GATE=call.gate or "",
        TILE=TILE,
        BLOCK=plan.block,
        STEP=STEP,
        EVEN=inputs % STEP == 0,
        SPLITS=plan.splits,
        LATE=pdl(rows.device),
        num_warps=WARPS,
        num_stages=plan.stages,
        **STEP_BY_STEP,
        **launch_late(rows.device),
    )
    return output


@triton.jit(do_not_specialize=["count"])
def _skinny_product(
    rows,
    weight,
    bias,
    residual,
    output,
    parts,
    counters,
    row_stride,
    weight_stride,
    residual_row,
    residual_column,
    count,
    outputs,
    inputs,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    LATE: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    out, row, inner = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK), tl.arange(0, STEP)
    # What lies behind the last output is computed like it, and not stored.
    lines = weight + tl.minimum(out, outputs - 1).to(tl.int64)[:, None] * weight_stride
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    given = rows + row.to(tl.int64)[:, None] * row_stride
    real = (row < count)[:, None]
    steps = tl.cdiv(inputs, STEP)
    run = tl.cdiv(steps, SPLITS)
    acc = tl.zeros([TILE, BLOCK], tl.float32)
    for step in range(split * run, tl.minimum((split + 1) * run, steps)):
        place = step * STEP + inner
        if EVEN:
            left = tl.load(lines + place[None, :])
            right = tl.load(given + place[None, :], mask=real, other=0.0)
        else:
            inside = (place < inputs)[None, :]
            left = tl.load(lines + place[None, :], mask=inside, other=0.0)
            right = tl.load(given + place[None, :], mask=real & inside, other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    added = residual, residual_row, residual_column
    if SPLITS > 1:
        spot = tl.arange(0, TILE)[:, None] * BLOCK + row[None, :]
        kept = parts + tile.to(tl.int64) * (SPLITS * TILE * BLOCK)
        tl.store(kept + split * (TILE * BLOCK) + spot, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            acc = tl.zeros([TILE, BLOCK], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(kept + part * (TILE * BLOCK) + spot, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _keep(acc, bias, added, output, out, row, outputs, count, tile, GATE, TILE, BLOCK)
    else:
        _keep(acc, bias, added, output, out, row, outputs, count, tile, GATE, TILE, BLOCK)


@triton.jit
def _keep(
    acc,
    bias,
    added,
    output,
    out,
    row,
    outputs,
    count,
    tile,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores finished sums `[TILE, BLOCK]`, behind the gate if there is one."""
    kind = output.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + tl.minimum(out, outputs - 1)).to(tl.float32)[:, None]
    if GATE == "":
        column, kept = out, outputs
        found = acc.to(kind)
    else:
        HALF: tl.constexpr = TILE // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, BLOCK]), (1, 2, 0)))
        column, kept = tile * HALF + tl.arange(0, HALF), outputs // 2
        found = gated(gate, up, kind, GATE).to(kind)
    line = row.to(tl.int64)[None, :]
    inside = (row < count)[None, :] & (column < kept)[:, None]
    residual, residual_row, residual_column = added
    if residual is not None:
        more = tl.load(residual + line * residual_row + column[:, None] * residual_column, mask=inside, other=0.0)
        found = (found.to(tl.float32) + more.to(tl.float32)).to(kind)
    tl.store(output + line * kept + column[:, None], found, mask=inside)
