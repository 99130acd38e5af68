"""The second half of split-KV attention: adds up the runs of slots that were attended to side by side."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, pdl

LOG2E = tl.constexpr(1.4426950408889634)
FAINTEST = tl.constexpr(2.0**-60)
"""Smallest size of a part over its denominator to which it is scaled, so that no quotient leaves float32."""

_COLUMNS = 64  # value dimensions that one program adds up


def room_for(query: Tensor, plan: Any, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for sums, maxima and denominators, as `combine` takes them; none for a plan without runs.

    Args:
        query: `[batch, heads, rows, dim]`; sums are stored in half precision, unless it is float32.
        plan: how the work is cut (`specdec.ops._attention_plan.AttentionPlan`).
        value_dim: dimension of a value.
    """
    if plan.splits == 1:
        return query.new_empty(0), *query.new_empty((2, 0), dtype=torch.float32)
    lines = query.shape[:3]
    part_dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
    parts = query.new_empty((*lines, plan.splits, value_dim), dtype=part_dtype)
    tops, totals = query.new_empty((2, *lines, plan.portions, plan.splits), dtype=torch.float32)
    return parts, tops, totals


def combine(
    parts: Tensor, tops: Tensor, totals: Tensor, sinks: Tensor | None, output: Tensor, lse: Tensor, *, ordered: bool
) -> None:
    """Fills `output` and `lse` from sums, maxima (base 2) and denominators.

    Args:
        parts: sums `[batch, heads, rows, splits, value_dim]`.
        tops: maxima `[batch, heads, rows, portions, splits]`: each portion of the value dimension has its own.
        totals: denominators, like `tops`.
        sinks: logits `[heads]` that take part in the denominators alone.
        output: `[batch, heads, rows, value_dim]`.
        lse: `[batch, heads, rows]`.
        ordered: add up one after the other.
    """
    batch, heads, rows, splits, value_dim = parts.shape
    columns = min(_COLUMNS, triton.next_power_of_2(value_dim))
    padded = triton.next_power_of_2(splits)
    # Beside 33 runs, 31 would be padding. Beyond 64, more exchanges between warps take longer than padding.
    head = padded if splits == padded or padded > 64 else padded // 2
    _combine[(rows * triton.cdiv(value_dim, columns), heads, batch)](
        parts,
        tops,
        totals,
        sinks,
        output,
        lse,
        *output.stride(),
        heads,
        rows,
        splits,
        VALUE_DIM=value_dim,
        PORTIONS=tops.shape[3],
        COLUMNS=columns,
        HEAD=head,
        TAIL=triton.next_power_of_2(splits - head) if splits > head else 0,
        ORDERED=ordered,
        LATE=pdl(parts.device),
        num_warps=min(8, max(1, head * columns // 2048)),
        **launch_late(parts.device),
    )


@triton.jit(do_not_specialize=["heads", "rows", "splits"])
def _combine(
    parts,
    tops,
    totals,
    sinks,
    output,
    lse,
    output_batch,
    output_head,
    output_row,
    output_dim,
    heads,
    rows,
    splits,
    VALUE_DIM: tl.constexpr,
    PORTIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ORDERED: tl.constexpr,
    LATE: tl.constexpr,
):
    """Adds up the runs of one row. Ordered: one after the other, so that empty runs before or after change nothing.

    Runs are `HEAD`, and what is left of them, padded to a power of two (`TAIL`).
    """
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    row, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = (batch * heads + head) * rows + row
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < VALUE_DIM
    first, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, max(1, TAIL))
    own = (place * PORTIONS + block * COLUMNS // (VALUE_DIM // PORTIONS)) * splits
    # The most bytes first, and all before the first is waited for; of volatile loads the assembler keeps the order.
    if not ORDERED:
        lines = parts + place * splits * VALUE_DIM + column[None, :]
        kept = (first < splits)[:, None] & inside[None, :]
        part = tl.load(lines + first[:, None] * VALUE_DIM, mask=kept, other=0.0, volatile=LATE)
        if TAIL > 0:
            kept = (rest < splits)[:, None] & inside[None, :]
            left = tl.load(lines + rest[:, None] * VALUE_DIM, mask=kept, other=0.0, volatile=LATE)
    total = _whole(totals, place * PORTIONS * splits, own, first, splits, PORTIONS, LATE)
    if TAIL > 0:
        last_total = _whole(totals, place * PORTIONS * splits, own, rest, splits, PORTIONS, LATE)
        last_top = tl.load(tops + own + rest, mask=rest < splits, other=float("-inf"), volatile=LATE)
    top = tl.load(tops + own + first, mask=first < splits, other=float("-inf"), volatile=LATE)
    most = tl.max(top, 0)
    if TAIL > 0:
        most = tl.maximum(most, tl.max(last_top, 0))
    base = most
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        base = tl.maximum(most, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    if ORDERED:
        whole = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for index in range(splits):
            part_top = tl.load(tops + own + index)
            part_total = tl.load(totals + own + index)
            fade = tl.exp2(part_top - base)
            part = tl.load(parts + (place * splits + index) * VALUE_DIM + column, mask=inside, other=0.0).to(tl.float32)
            whole += part_total * fade
            acc += part * fade
    else:
        fade = tl.exp2(top - base)
        whole = tl.sum(total * fade, 0)
        acc = tl.sum(part.to(tl.float32) * fade[:, None], 0)
        if TAIL > 0:
            fade = tl.exp2(last_top - base)
            whole += tl.sum(last_total * fade, 0)
            acc += tl.sum(left.to(tl.float32) * fade[:, None], 0)
    # A row with a broken value has a total of NaN, which must win over the test for emptiness.
    used = (most > float("-inf")) | (whole != whole)
    if sinks is not None:
        whole += tl.exp2(sink - base)
    whole = tl.where(used, whole, 1.0)
    acc = tl.where(used, acc / whole, 0.0)
    outputs = output + batch * output_batch + head.to(tl.int64) * output_head + row.to(tl.int64) * output_row
    tl.store(outputs + column * output_dim, acc.to(output.dtype.element_ty), mask=inside)
    if block == 0:
        tl.store(lse + place, tl.where(used, (base + tl.log2(whole)) / LOG2E, float("-inf")))


@triton.jit
def _whole(totals, start, own, split, splits, PORTIONS: tl.constexpr, LATE: tl.constexpr):
    """Denominators of runs: a value that is not finite in one portion makes the whole row NaN."""
    total = tl.load(totals + own + split, mask=split < splits, other=0.0, volatile=LATE)
    if PORTIONS > 1:
        for portion in tl.static_range(PORTIONS):
            other = tl.load(totals + start + portion * splits + split, mask=split < splits, other=0.0, volatile=LATE)
            total = tl.where(other == other, total, other)
    return total
