"""The experts of a few rows, reading the weights of those that some row is routed to, once for up to 32 rows of each.

Two launches stream weights: gate and up projection with the activation, then the down projection; a third adds up the
experts of a row in their order. A program of the first two takes one expert and some columns of its result. Every
program finds its expert by itself, as the n-th of those that were chosen, and its rows by counting. So programs of one
expert stand side by side, and programs that are left over end the grid. The first launch waits for the ids of the
experts, so the second finds its experts before the first has ended. Fetching weights with the copy engine, and asking
for those of the second launch while the first still runs, gained nothing.

The layout of the arguments is that of `specdec.ops.routed_experts`, which checks them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels._gate import gated
from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, limits, pdl

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that the kernel takes."""

ADDED = 256
"""Columns that a program of the last launch adds up."""

FEW, MANY = 16, 32
"""Rows of an expert that pass by its weights at a time: the least that a tensor core takes, and the most."""


class Plan(NamedTuple):
    """How a launch cuts its work."""

    columns: int  # of the result, of a program
    step: int  # numbers of a row of weights that pass by at a time
    warps: int
    stages: int


UP = Plan(32, 128, 4, 4)
DOWN = Plan(64, 128, 4, 4)


def refusal(call: Any) -> str:
    """What the kernel takes instead of these arguments; empty if it takes them."""
    if call.hidden.dtype not in DTYPES:
        return f"{', '.join(map(str, DTYPES))}, not {call.hidden.dtype}"
    if any(weight.stride(2) != 1 for weight in (call.gate_up, call.down)):
        return f"weights whose rows are contiguous, not strides {call.gate_up.stride()} and {call.down.stride()}"
    return ""


def _stages(plan: Plan, rows: int, first: bool, size: int, shared: int) -> int:
    """Stages for which there is shared memory: one is at work, the others are on their way."""
    return min(plan.stages, 1 + shared // (plan.step * (rows + plan.columns * (2 if first else 1)) * size))


def _rows(tokens: int, pairs: int, experts: int) -> int:
    """Rows of an expert that are multiplied at a time: twice as many as it has on average, if there are as many."""
    usual = triton.next_power_of_2(triton.cdiv(2 * pairs, experts))
    return max(FEW, min(MANY, usual, triton.next_power_of_2(tokens)))


def launch(call: Any, up: Plan = UP, down: Plan = DOWN) -> Tensor:
    """The sum `[tokens, hidden]`.

    Args:
        call: checked arguments (`specdec.ops.routed_experts.ExpertCall`); nothing is empty.
        up: how the gate and the up projection are cut.
        down: how the down projection is.
    """
    (tokens, choices), (experts, width, inner) = call.chosen.shape, call.down.shape
    hidden = call.hidden if call.hidden.stride(1) == 1 else call.hidden.contiguous()
    ids, weights = call.chosen.contiguous(), call.weights.contiguous()
    device, pairs, chosen = hidden.device, tokens * choices, triton.next_power_of_2(choices)
    between, parts = (hidden.new_empty(pairs, size) for size in (inner, width))
    rows = _rows(tokens, pairs, experts)
    with torch.cuda.device_of(hidden):
        for source, weight, target, plan in ((hidden, call.gate_up, between, up), (between, call.down, parts, down)):
            first = weight is call.gate_up
            columns, depth = target.shape[1], source.shape[1]
            step = min(plan.step * 2 // hidden.element_size(), max(16, triton.next_power_of_2(depth)))
            programs, blocks = triton.cdiv(columns, plan.columns), triton.cdiv(tokens, rows)
            _experts_product[(min(pairs, experts) * programs * blocks,)](
                source,
                source.stride(0),
                ids,
                weight,
                weight.stride(0),
                weight.stride(1),
                target,
                tokens,
                PROGRAMS=programs,
                BLOCKS=blocks,
                CHOICES=choices,
                CHOSEN=chosen,
                EXPERTS=experts,
                BINS=max(32, triton.next_power_of_2(experts)),
                WIDTH=columns,
                DEPTH=depth,
                ACTIVATION=call.activation if first else "",
                ROWS=rows,
                COLUMNS=plan.columns,
                STEP=step,
                CHUNK=FEW if tokens <= FEW else MANY,
                LATE=pdl(device),
                num_warps=plan.warps,
                num_stages=_stages(plan._replace(step=step), rows, first, hidden.element_size(), limits(device)[1]),
                **launch_late(device),
            )
        output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        block = min(ADDED, triton.next_power_of_2(width))
        _experts_sum[(tokens, triton.cdiv(width, block))](
            parts,
            ids,
            weights,
            output,
            width,
            EXPERTS=experts,
            CHOICES=choices,
            CHOSEN=chosen,
            BLOCK=block,
            LATE=pdl(device),
            num_warps=4,
            **launch_late(device),
        )
    return output


@triton.jit(do_not_specialize=["tokens"])
def _experts_product(
    source,
    source_stride,
    ids,
    weights,
    expert_stride,
    column_stride,
    target,
    tokens,
    PROGRAMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    LATE: tl.constexpr,
):
    FIRST: tl.constexpr = ACTIVATION != ""
    if LATE:
        if FIRST:
            gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0) % BLOCKS * ROWS
    place = tl.program_id(0) // BLOCKS
    column = place % PROGRAMS * COLUMNS
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, tokens, CHUNK, num_stages=1):
        named = _named(ids, start, tokens, CHUNK, CHOICES, CHOSEN)
        known = (named >= 0) & (named < EXPERTS)
        flat = tl.where(known, named, 0).to(tl.int32).reshape(CHUNK * CHOSEN)
        counts += tl.histogram(flat, BINS, mask=known.reshape(CHUNK * CHOSEN))
    before = tl.cumsum((counts > 0).to(tl.int32), 0)
    expert = tl.sum((before <= place // PROGRAMS).to(tl.int32), 0)
    count = tl.sum(tl.where(tl.arange(0, BINS) == expert, counts, 0), 0)
    if LATE and not FIRST:
        gdc_wait()
    if first < count:
        pair = tl.full([ROWS], -1, tl.int32)
        rank = first + tl.arange(0, ROWS)
        seen = 0
        for start in tl.range(0, tokens, CHUNK, num_stages=1):
            match = _named(ids, start, tokens, CHUNK, CHOICES, CHOSEN) == expert
            choice = tl.min(tl.where(match, tl.arange(0, CHOSEN)[None, :], CHOSEN), 1)
            here = choice < CHOSEN
            where = (start + tl.arange(0, CHUNK)) * CHOICES + choice
            found = seen + tl.cumsum(here.to(tl.int32), 0) - 1
            taken = here[None, :] & (found[None, :] == rank[:, None])
            pair = tl.maximum(pair, tl.max(tl.where(taken, where[None, :], -1), 1))
            seen += tl.sum(here.to(tl.int32), 0)
        _block(
            source,
            source_stride,
            weights + expert.to(tl.int64) * expert_stride,
            column_stride,
            target,
            pair,
            column,
            CHOICES if FIRST else 1,
            WIDTH,
            DEPTH,
            ACTIVATION,
            ROWS,
            COLUMNS,
            STEP,
        )


@triton.jit
def _named(ids, start, tokens, CHUNK: tl.constexpr, CHOICES: tl.constexpr, CHOSEN: tl.constexpr):
    """Experts `[CHUNK, CHOSEN]` of some rows; -1 where there is none."""
    token, choice = start + tl.arange(0, CHUNK), tl.arange(0, CHOSEN)
    real = (token < tokens)[:, None] & (choice < CHOICES)[None, :]
    return tl.load(ids + token[:, None] * CHOICES + choice[None, :], mask=real, other=-1)


@triton.jit
def _block(
    source,
    source_stride,
    weights,
    column_stride,
    target,
    pair,
    first_column,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Some columns of some rows of an expert."""
    real = pair >= 0
    pair = tl.where(real, pair, 0).to(tl.int64)
    row = source + pair // SHARED * source_stride
    column = first_column + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    line = weights + column.to(tl.int64) * column_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, STEP):
        inner = start + tl.arange(0, STEP)
        some = tl.load(row[:, None] + inner[None, :], mask=real[:, None] & (inner < DEPTH)[None, :], other=0.0)
        taken = inside[:, None] & (inner < DEPTH)[None, :]
        tile = tl.load(line[:, None] + inner[None, :], mask=taken, other=0.0)
        total = tl.dot(some, tile.T, total, input_precision="ieee")
        if ACTIVATION != "":
            tile = tl.load(line[:, None] + (WIDTH * column_stride + inner)[None, :], mask=taken, other=0.0)
            second = tl.dot(some, tile.T, second, input_precision="ieee")
    kind = target.dtype.element_ty
    if ACTIVATION != "":
        total = gated(total, second, kind, ACTIVATION)
    place = target + pair[:, None] * WIDTH + column[None, :]
    tl.store(place, total.to(kind), mask=real[:, None] & inside[None, :])


@triton.jit
def _experts_sum(
    parts,
    ids,
    weights,
    output,
    width,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    LATE: tl.constexpr,
):
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOSEN)
    pair = token * CHOICES + choice
    expert = tl.load(ids + pair, mask=choice < CHOICES, other=-1)
    again = tl.load(ids + pair, mask=choice < CHOICES, other=-1)
    known = (expert >= 0) & (expert < EXPERTS)
    weight = tl.load(weights + pair, mask=known, other=0.0).to(tl.float32)
    # An expert that is named twice was multiplied once, where it is named first.
    pair = token * CHOICES + tl.min(tl.where(expert[:, None] == again[None, :], choice[None, :], CHOSEN), 1)
    place = parts + pair[:, None] * width + column[None, :]
    part = tl.load(place, mask=known[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(weight[:, None] * part, 0)
    tl.store(output + token * width + column, total.to(output.dtype.element_ty), mask=column < width)
