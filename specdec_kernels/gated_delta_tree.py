"""The gated delta rule over a tree: fold the last path, read the state once, solve, write the outputs and the record.

A program takes one value head of one batch row and a run of its value channels. The part of the state that belongs to
them passes through registers once: it is folded, stored, and multiplied with keys and queries. The corrections of all
nodes solve a triangular system, by as many sweeps as the tree is deep: after as many, a node is exact, since its
ancestors were before it. (Inverting by doubling loses everything to cancellation where keys resemble each other.)
Products with keys and queries in bfloat16 take them as they are, and the other factor in three parts of its bits; other
products of float32 numbers are six of bfloat16. Lengths of keys and queries come out of the products, so that nothing
is read before the state.

The layout of the arguments is that of `specdec.ops.gated_delta_tree`, which checks them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import interpreted
from specdec_kernels._launch import gdc_launch_dependents, gdc_wait, launch_late, pdl

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that the kernel takes."""

MOST_NODES, WIDEST = 64, 256
"""Nodes that the kernel takes, and numbers of a key."""

CHUNK = 32
"""Keys of the state that pass by at a time."""


def refusal(call: Any) -> str:
    """What the kernel takes instead of these arguments; empty if it takes them."""
    tensors = (call.state, call.query, call.key, call.value, call.decay, call.beta)
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if not dtypes <= set(DTYPES):
        return f"{', '.join(map(str, DTYPES))}, not {', '.join(sorted(map(str, dtypes - set(DTYPES))))}"
    if any(part is not None and part.dim() == 4 for part in (call.decay, call.path and call.path.decays)):
        return "one decay of a head, not one of each channel"
    nodes = max(0 if call.value is None else call.value.shape[1], 0 if call.path is None else call.path.keys.shape[1])
    width = call.state.shape[3 if call.value_first else 2]
    if nodes > MOST_NODES or width > WIDEST:
        return f"up to {MOST_NODES} nodes and keys of up to {WIDEST} numbers, not {nodes} and {width}"
    return ""


PRECISION = "ieee" if interpreted() else "bf16x6"
"""Products of float32 numbers, as exact as these."""

Record = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Keys, updates and decays."""


def launch(call: Any, path: Record, out: Record) -> tuple[Tensor | None, Record]:
    """Output `[batch, nodes, heads, value_dim]` and record; nothing if a path is only folded.

    Args:
        call: checked arguments (`specdec.ops.gated_delta_tree.DeltaCall`).
        path: the record to be folded.
        out: where the new one is written; if there is nothing, it is made.
    """
    state = call.state.transpose(2, 3) if call.value_first else call.state
    batch, heads, key_dim, value_dim = state.shape
    output, record, copied = None, out, out[0] is not None
    if call.value is not None:
        output = torch.empty(call.value.shape, dtype=call.value.dtype, device=state.device)
        if not copied:
            shapes = call.value.shape, call.decay.shape
            record = call.key, *(torch.empty(shape, dtype=torch.float32, device=state.device) for shape in shapes)
    rows = 0 if call.value is None else call.value.shape[1]
    kept = 0 if path[0] is None else path[0].shape[1]
    narrow = all(part is None or part.dtype == torch.bfloat16 for part in (call.query, call.key, path[0]))
    block = _block(batch * heads if narrow else 0, value_dim, max(rows, kept))
    with torch.cuda.device_of(state):
        _delta[(triton.cdiv(value_dim, block), heads, batch)](
            (call.query, call.key, call.value, call.decay, call.beta, call.ancestors),
            tuple(_strides(part, 4) for part in (call.query, call.key, call.value)),
            tuple(_strides(part, 3) for part in (call.decay, call.beta, call.ancestors)),
            state,
            state.stride(),
            path,
            _record_strides(path),
            call.counts,
            output,
            _strides(output, 4),
            record,
            _record_strides(record),
            call.scale,
            call.epsilon,
            rows,
            kept,
            GROUPS=1 if call.key is None else heads // call.key.shape[2],
            PATH_GROUPS=1 if path[0] is None else heads // path[0].shape[2],
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PADDED=max(16, triton.next_power_of_2(key_dim)),
            BLOCK=block,
            ROWS=max(16, triton.next_power_of_2(max(rows, 1))),
            KEPT=max(16, triton.next_power_of_2(max(kept, 1))),
            CHUNK=min(CHUNK, max(16, triton.next_power_of_2(key_dim))),
            NARROW=narrow,
            NORMALIZE=call.normalize,
            COPIED=copied,
            PRECISION=PRECISION,
            LATE=pdl(state.device),
            num_warps=_warps(max(rows, kept)),
            **launch_late(state.device),
        )
    return output, record


def _block(items: int, value_dim: int, nodes: int) -> int:
    """Value channels of a program: more where programs are many enough to fill a device, fewer where nodes are many."""
    most = 16 if nodes > 32 else 64 if items >= 256 and nodes <= 16 else 32
    return min(most, max(16, triton.next_power_of_2(value_dim)))


def _warps(nodes: int) -> int:
    """Few warps wait little for each other; the products of more nodes need the registers of more of them."""
    return 2 if nodes <= 16 else 4


def _strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()


def _record_strides(record: Record) -> tuple[Any, ...]:
    return tuple(_strides(part, dims) for part, dims in zip(record, (4, 4, 3), strict=True))


@triton.jit(do_not_specialize=["rows", "kept"])
def _delta(
    given,
    strides,
    flat_strides,
    state,
    state_strides,
    old,
    old_strides,
    counts,
    output,
    output_strides,
    new,
    new_strides,
    scale,
    epsilon,
    rows,
    kept,
    GROUPS: tl.constexpr,
    PATH_GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COPIED: tl.constexpr,
    PRECISION: tl.constexpr,
    LATE: tl.constexpr,
):
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = column < VALUE_DIM
    cells = state + batch * state_strides[0] + head * state_strides[1]
    cells += column[:, None] * state_strides[3]
    path_head, key_head = head // PATH_GROUPS, head // GROUPS
    node, row = tl.arange(0, KEPT), tl.arange(0, ROWS)
    real = row < rows
    fading = 1.0
    stay = 0
    if counts is not None:
        # No load waits for the count; what is beyond it is taken out afterwards.
        count = tl.load(counts + batch).to(tl.int32)
        decays = _numbers(old[2], old_strides[2], batch, node, head, node < kept)
        added = _columns(old[1], old_strides[1], batch, node, head, column, node < kept, here).to(tl.float32)
        stay = tl.where(count > 0, VALUE_DIM, 0)
        counted = node < tl.minimum(count, kept)
        last = tl.sum(tl.where(node == count - 1, decays, 0.0))
        fading = tl.exp(last)
        added = tl.where(counted[None, :], added * tl.where(counted, tl.exp(last - decays), 0.0)[None, :], 0.0)
    if output is not None:
        value = _columns(given[2], strides[2], batch, row, head, column, real, here).to(tl.float32)
        decay = _numbers(given[3], flat_strides[0], batch, row, head, real)
        beta = _numbers(given[4], flat_strides[1], batch, row, head, real)
        member = _members(given[5] + batch * flat_strides[2][0], flat_strides[2], row, real, ROWS)

    # The state passes by once, a few of its keys at a time. All tiles have nodes as columns.
    alike = tl.zeros([ROWS, ROWS], tl.float32)
    asked = tl.zeros([ROWS, ROWS], tl.float32)
    asking = tl.zeros([ROWS, ROWS], tl.float32)
    known = tl.zeros([BLOCK, ROWS], tl.float32)
    read = tl.zeros([BLOCK, ROWS], tl.float32)
    part = tl.arange(0, CHUNK)
    coming = tl.load(
        cells + part[None, :] * state_strides[2], mask=here[:, None] & (part < KEY_DIM)[None, :], other=0.0
    )
    for step in range(KEY_PADDED // CHUNK):  # unrolled, the same steps took longer on an H200
        part = step * CHUNK + tl.arange(0, CHUNK)
        some = part < KEY_DIM
        places = cells + part[None, :] * state_strides[2]
        tile = coming.to(tl.float32)
        later = part + CHUNK
        coming = tl.load(
            cells + later[None, :] * state_strides[2], mask=here[:, None] & (later < KEY_DIM)[None, :], other=0.0
        )
        if counts is not None:
            keys = _lines(old[0], old_strides[0], batch, node, path_head, part, node < kept, some)
            keys = tl.where(counted[:, None], keys, 0.0).to(keys.dtype)
            tile = _times(added, keys, tile * fading, NARROW, PRECISION)
            stored = tile.to(state.dtype.element_ty)
            tl.store(places, stored, mask=(column < tl.minimum(stay, VALUE_DIM))[:, None] & some[None, :])
            tile = stored.to(tl.float32)  # what is read is what is stored
        if output is not None:
            key = _lines(given[1], strides[1], batch, row, key_head, part, real, some)
            query = _lines(given[0], strides[0], batch, row, key_head, part, real, some)
            if COPIED:
                first = row < tl.where((tl.program_id(0) == 0) & (head % GROUPS == 0), rows, 0)
                copies = _places(new[0], new_strides[0], batch, row, key_head, part)
                tl.store(copies, key.to(new[0].dtype.element_ty), mask=first[:, None] & some[None, :])
            keys_on, queries_on = tl.trans(key), tl.trans(query)
            alike = _dot(key, keys_on, alike, NARROW, PRECISION)
            asked = _dot(key, queries_on, asked, NARROW, PRECISION)
            if NORMALIZE:
                asking = _dot(query, queries_on, asking, NARROW, PRECISION)
            known = _times(tile, keys_on, known, NARROW, PRECISION)
            read = _times(tile, queries_on, read, NARROW, PRECISION)

    if output is not None:
        own = row[:, None] == row[None, :]
        lengths = tl.sum(tl.where(own, alike, 0.0), 0)
        # A node that is not finite is taken out, and put back into what its descendants have.
        broken = ((lengths - lengths) != 0) | ((decay - decay) != 0) | ((beta - beta) != 0)
        broken = broken.to(tl.int32) | tl.max(((value - value) != 0).to(tl.int32), 0)
        key_factor = tl.where(broken > 0, 0.0, tl.rsqrt(lengths + epsilon) if NORMALIZE else 1.0)
        query_factor = tl.full([ROWS], 1.0, tl.float32) * scale
        if NORMALIZE:
            query_factor *= tl.rsqrt(tl.sum(tl.where(own, asking, 0.0), 0) + epsilon)
        kept_decay = tl.where(broken > 0, 0.0, decay)
        along = tl.sum(tl.where(member, kept_decay[:, None], 0.0), 0)
        between = tl.where(member, tl.exp(tl.where(member, along[None, :] - along[:, None], 0.0)), 0.0)
        between *= key_factor[:, None]
        strength = tl.where(broken > 0, 0.0, beta * key_factor)
        before = tl.where((between != 0) & (row[:, None] < row[None, :]), between * alike, 0.0)
        before = tl.where(broken[None, :] > 0, 0.0, before * strength[None, :])
        carried = tl.exp(along)
        target = tl.where(broken[None, :] > 0, 0.0, beta[None, :] * value - (strength * carried)[None, :] * known)
        update = target
        for _ in range(tl.max(tl.sum(member.to(tl.int32), 0)) - 1):
            update = target - _exactly(update, before, NARROW, PRECISION)
        # Zero times a query that is not finite is no zero.
        weights = tl.where(between != 0, between * asked, 0.0) * query_factor[None, :]
        read *= (carried * query_factor)[None, :]
        read += _exactly(update, weights, NARROW, PRECISION)
        reached = (tl.sum(tl.where(member, broken[:, None], 0), 0) > 0)[None, :]
        read = tl.where(reached, float("nan"), read)
        update = tl.where(reached, float("nan"), update * key_factor[None, :])
        inside = real[None, :] & here[:, None]
        places = tl.trans(_places(output, output_strides, batch, row, head, column))
        tl.store(places, read.to(output.dtype.element_ty), mask=inside)
        places = tl.trans(_places(new[1], new_strides[1], batch, row, head, column))
        tl.store(places, update.to(new[1].dtype.element_ty), mask=inside)
        sums = new[2] + batch * new_strides[2][0] + head * new_strides[2][2] + row * new_strides[2][1]
        tl.store(sums, along, mask=row < tl.where(tl.program_id(0) == 0, rows, 0))


@triton.jit
def _dot(left, right, total, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """Products of numbers as they were given: of bfloat16 they are exact, others are widened first."""
    if NARROW:
        return tl.dot(left, right, total)
    else:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=PRECISION)


@triton.jit
def _times(wide, narrow, total, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """Products of float32 with numbers as they were given; with bfloat16 ones, in three parts that hold all bits."""
    if NARROW:
        first, second, third = _parts(wide)
        total = tl.dot(first, narrow, total)
        total = tl.dot(second, narrow, total)
        return tl.dot(third, narrow, total)
    else:
        return tl.dot(wide, narrow.to(tl.float32), total, input_precision=PRECISION)


@triton.jit
def _exactly(left, right, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """Products of float32 numbers: those of their parts that do not vanish beside the largest."""
    if NARROW:
        first, second, third = _parts(left)
        one, two, three = _parts(right)
        small = tl.dot(first, three)
        small = tl.dot(second, two, small)
        small = tl.dot(third, one, small)
        large = tl.dot(first, two)
        large = tl.dot(second, one, large)
        return tl.dot(first, one, large) + small
    else:
        return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _parts(numbers):
    """Three bfloat16 numbers that add up to each float32 one: eight bits of it each, cut, not rounded."""
    first = (numbers.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = numbers - first
    second = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return _upper(first), _upper(second), _upper(rest - second)


@triton.jit
def _upper(numbers):
    """The upper half of the bits of float32 numbers, as bfloat16 ones."""
    return (numbers.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _places(base, strides, batch, row, head, column):
    """Where rows of a head lie in `[batch, nodes, heads, numbers]`."""
    start = base + batch * strides[0] + head * strides[2]
    return start + (row[:, None] * strides[1] + column[None, :] * strides[3])


@triton.jit
def _lines(base, strides, batch, row, head, column, real, some):
    """Rows of a head as they are, `[nodes, numbers]`; zeros where there are none."""
    return tl.load(_places(base, strides, batch, row, head, column), mask=real[:, None] & some[None, :], other=0.0)


@triton.jit
def _columns(base, strides, batch, row, head, column, real, some):
    """The same with nodes as columns."""
    places = tl.trans(_places(base, strides, batch, row, head, column))
    return tl.load(places, mask=some[:, None] & real[None, :], other=0.0)


@triton.jit
def _numbers(base, strides, batch, row, head, real):
    """One number of each row of a head."""
    place = base + batch * strides[0] + head * strides[2] + row * strides[1]
    return tl.load(place, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _members(masks, strides, row, real, ROWS: tl.constexpr):
    """Which nodes are on the path of each, itself included: `[node, of which]`."""
    words = tl.load(masks + row * strides[1], mask=real, other=0)
    found = tl.zeros([ROWS, ROWS], tl.int32)
    for half in tl.static_range(2):
        # Half a word at a time: 64-bit numbers would take twice the registers.
        bits = (words >> (half * 32)).to(tl.int32)
        found |= ((bits[None, :] >> (row & 31)[:, None]) & 1) & (row // 32 == half).to(tl.int32)[:, None]
    return found != 0
