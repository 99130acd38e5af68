"""The second half of split-KV attention: adds up the runs of slots that were attended to side by side."""

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, pdl

LOG2E = tl.constexpr(1.4426950408889634)
_COLUMNS = 64  # value dimensions that one program adds up


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
    portions = tops.shape[3]
    padded = triton.next_power_of_2(splits)
    _combine[(batch * heads * rows, triton.cdiv(value_dim, _COLUMNS))](
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
        PORTIONS=portions,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(value_dim)),
        SPLITS_PADDED=padded,
        ORDERED=ordered,
        LATE=pdl(parts.device),
        num_warps=min(8, max(1, padded * _COLUMNS // 2048)),
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
    SPLITS_PADDED: tl.constexpr,
    ORDERED: tl.constexpr,
    LATE: tl.constexpr,
):
    """Adds up the runs of one row. Ordered: one after the other, so that empty runs before or after change nothing."""
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    row, head, batch = place % rows, (place // rows) % heads, place // rows // heads
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < VALUE_DIM
    split = tl.arange(0, SPLITS_PADDED)
    if not ORDERED:
        # The most bytes first; nothing below needs them before the sum.
        kept = (split < splits)[:, None] & inside[None, :]
        part = tl.load(parts + (place * splits + split)[:, None] * VALUE_DIM + column[None, :], mask=kept, other=0.0)
    line = (place * PORTIONS + tl.program_id(1) * COLUMNS // (VALUE_DIM // PORTIONS)) * splits
    top = tl.load(tops + line + split, mask=split < splits, other=float("-inf"))
    total = tl.load(totals + line + split, mask=split < splits, other=0.0)
    if PORTIONS > 1:
        # A value that is not finite in one portion makes the whole row NaN.
        for portion in tl.static_range(PORTIONS):
            other = tl.load(totals + (place * PORTIONS + portion) * splits + split, mask=split < splits, other=0.0)
            total = tl.where(other == other, total, other)
    most = tl.max(top, 0)
    # A row with a broken value has a total of NaN, which must win over the test for emptiness.
    used = (most > float("-inf")) | (tl.max((total != total).to(tl.int32), 0) > 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        most = tl.where(used, tl.maximum(most, sink), most)
    base = tl.where(most == float("-inf"), 0.0, most)
    if ORDERED:
        whole = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for index in range(splits):
            part_top = tl.load(tops + line + index)
            part_total = tl.load(totals + line + index)
            fade = tl.exp2(part_top - base)
            part = tl.load(parts + (place * splits + index) * VALUE_DIM + column, mask=inside, other=0.0).to(tl.float32)
            whole += part_total * fade
            acc += part * fade
    else:
        fade = tl.exp2(top - base)
        whole = tl.sum(total * fade, 0)
        acc = tl.sum(part.to(tl.float32) * fade[:, None], 0)
    if sinks is not None:
        whole = tl.where(used, whole + tl.exp2(sink - base), 0.0)
    whole = tl.where(used, whole, 1.0)
    acc = tl.where(used, acc / whole, 0.0)
    outputs = output + batch * output_batch + head * output_head + row * output_row
    tl.store(outputs + column * output_dim, acc.to(output.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(lse + place, tl.where(used, (base + tl.log2(whole)) / LOG2E, float("-inf")))
