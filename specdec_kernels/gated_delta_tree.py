"""The gated delta rule over a tree: fold the last path, read the state once, solve, write the outputs and the record.

A program takes one value head of one batch row and a run of its value channels. The part of the state that belongs to
them passes through registers once: it is folded, stored, and multiplied with keys and queries. The corrections of all
nodes solve a triangular system, by as many sweeps as the tree is deep: after as many, a node is exact, since its
ancestors were before it. (Inverting by doubling loses everything to cancellation where keys resemble each other.)
Products are in float32 on tensor cores, as three of TF32.

The layout of the arguments is that of `specdec.ops.gated_delta_tree`, which checks them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that the kernel takes."""

MOST_NODES, WIDEST = 64, 256
"""Nodes that the kernel takes, and numbers of a key."""

CHUNK, STAGES = 32, 3
"""Keys of the state that pass by at a time, and how many such parts are under way."""


def refusal(call: Any) -> str:
    """What the kernel takes instead of these arguments; empty if it takes them."""
    tensors = (call.state, call.query, call.key, call.value, call.decay, call.beta)
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if not dtypes <= set(DTYPES):
        return f"{', '.join(map(str, DTYPES))}, not {', '.join(sorted(map(str, dtypes - set(DTYPES))))}"
    nodes = max(0 if call.value is None else call.value.shape[1], 0 if call.path is None else call.path.keys.shape[1])
    width = call.state.shape[3 if call.value_first else 2]
    if nodes > MOST_NODES or width > WIDEST:
        return f"up to {MOST_NODES} nodes and keys of up to {WIDEST} numbers, not {nodes} and {width}"
    return ""


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
    block = _block(batch * heads, value_dim, max(rows, kept))
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
            STAGES=STAGES,
            NORMALIZE=call.normalize,
            COPIED=copied,
            PRECISION="ieee" if torch.version.hip else "tf32x3",
            num_warps=4,
        )
    return output, record


def _block(items: int, value_dim: int, nodes: int) -> int:
    """Value channels of a program: few where that makes enough programs, and where many nodes take the registers."""
    most = 32 if nodes > 32 or items < 256 else 64
    return min(most, max(16, triton.next_power_of_2(value_dim)))


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
    STAGES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COPIED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, KEY_PADDED)
    cells = state + batch * state_strides[0] + head * state_strides[1]
    cells += column.to(tl.int64)[None, :] * state_strides[3]
    path_head, key_head = head // PATH_GROUPS, head // GROUPS
    last = 0.0
    stay = 0

    # Everything that is not the state first: lengths, weights, what is broken.
    node = tl.arange(0, KEPT)
    if counts is not None:
        count = tl.load(counts + batch).to(tl.int32)
        stay = tl.where(count > 0, VALUE_DIM, 0)
        counted = node < tl.minimum(count, kept)
        whole = _rows(old[0], old_strides[0], batch, node, path_head, channel, counted, KEY_DIM)
        added = _rows(old[1], old_strides[1], batch, node, head, column, counted, VALUE_DIM)
        decays = _numbers(old[2], old_strides[2], batch, node, head, counted)
        last = tl.sum(tl.where(node == count - 1, decays, 0.0))
        weights = tl.where(counted, tl.exp(last - decays), 0.0)
        added *= (weights * _over_length(whole, epsilon, NORMALIZE))[:, None]
    row = tl.arange(0, ROWS)
    real = row < rows
    if output is not None:
        raw = _rows(given[1], strides[1], batch, row, key_head, channel, real, KEY_DIM)
        if COPIED and (tl.program_id(0) == 0) & (head % GROUPS == 0):
            _write(new[0], new_strides[0], batch, row, key_head, channel, real, KEY_DIM, raw)
        value = _rows(given[2], strides[2], batch, row, head, column, real, VALUE_DIM)
        decay = _numbers(given[3], flat_strides[0], batch, row, head, real)
        beta = _numbers(given[4], flat_strides[1], batch, row, head, real)
        member = _members(given[5] + batch * flat_strides[2][0], flat_strides[2], row, real, ROWS)
        # A node that is not finite is taken out, and put back into what its descendants have.
        broken = tl.max(((raw - raw) != 0).to(tl.int32), 1) | tl.max(((value - value) != 0).to(tl.int32), 1)
        broken |= ((decay - decay) != 0).to(tl.int32) | ((beta - beta) != 0).to(tl.int32)
        value = tl.where(broken[:, None] > 0, 0.0, value)
        decay, beta = tl.where(broken > 0, 0.0, decay), tl.where(broken > 0, 0.0, beta)
        key_factor = _over_length(raw, epsilon, NORMALIZE)
        query_factor = scale * _over_length(
            _rows(given[0], strides[0], batch, row, key_head, channel, real, KEY_DIM), epsilon, NORMALIZE
        )

    # The state passes by once, a few of its keys at a time.
    alike = tl.zeros([ROWS, ROWS], tl.float32)
    asked = tl.zeros([ROWS, ROWS], tl.float32)
    known = tl.zeros([ROWS, BLOCK], tl.float32)
    read = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, KEY_PADDED, CHUNK, num_stages=STAGES):
        part = start + tl.arange(0, CHUNK)
        places = cells + part.to(tl.int64)[:, None] * state_strides[2]
        inside = (part < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
        tile = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        if counts is not None:
            keys = _rows(old[0], old_strides[0], batch, node, path_head, part, counted, KEY_DIM)
            tile = tl.dot(tl.trans(keys), added, tile * tl.exp(last), input_precision=PRECISION)
            stored = tile.to(state.dtype.element_ty)
            tl.store(places, stored, mask=inside & (column < stay)[None, :])
            tile = stored.to(tl.float32)  # what is read is what is stored
        if output is not None:
            key = _rows(given[1], strides[1], batch, row, key_head, part, real, KEY_DIM) * key_factor[:, None]
            key = tl.where(broken[:, None] > 0, 0.0, key)
            query = _rows(given[0], strides[0], batch, row, key_head, part, real, KEY_DIM) * query_factor[:, None]
            alike = tl.dot(key, tl.trans(key), alike, input_precision=PRECISION)
            asked = tl.dot(query, tl.trans(key), asked, input_precision=PRECISION)
            known = tl.dot(key, tile, known, input_precision=PRECISION)
            read = tl.dot(query, tile, read, input_precision=PRECISION)

    if output is not None:
        along = tl.sum(tl.where(member, decay[None, :], 0.0), 1)
        between = tl.where(member, tl.exp(tl.where(member, along[:, None] - along[None, :], 0.0)), 0.0)
        before = tl.where(row[:, None] > row[None, :], beta[:, None] * between * alike, 0.0)
        carried = tl.exp(along)[:, None]
        target = beta[:, None] * (value - carried * known)
        update = target
        for _ in range(tl.max(tl.sum(member.to(tl.int32), 1)) - 1):
            update = target - tl.dot(before, update, input_precision=PRECISION)
        # Zero times a query that is not finite is no zero.
        read = tl.dot(tl.where(member, between * asked, 0.0), update, carried * read, input_precision=PRECISION)
        reached = (tl.sum(tl.where(member, broken[None, :], 0), 1) > 0)[:, None]
        read, update = tl.where(reached, float("nan"), read), tl.where(reached, float("nan"), update)
        _write(output, output_strides, batch, row, head, column, real, VALUE_DIM, read)
        _write(new[1], new_strides[1], batch, row, head, column, real, VALUE_DIM, update)
        if tl.program_id(0) == 0:
            places = new[2] + batch * new_strides[2][0] + row.to(tl.int64) * new_strides[2][1]
            tl.store(places + head * new_strides[2][2], along, mask=real)


@triton.jit
def _places(base, strides, batch, row, head, column):
    """Where rows of a head lie in `[batch, nodes, heads, numbers]`."""
    start = base + batch * strides[0] + head * strides[2]
    return start + row.to(tl.int64)[:, None] * strides[1] + column.to(tl.int64)[None, :] * strides[3]


@triton.jit
def _rows(base, strides, batch, row, head, column, real, WIDTH: tl.constexpr):
    """Rows of a head, zeros where there are none."""
    inside = real[:, None] & (column < WIDTH)[None, :]
    return tl.load(_places(base, strides, batch, row, head, column), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(base, strides, batch, row, head, column, real, WIDTH: tl.constexpr, numbers):
    """Stores rows of a head."""
    inside = real[:, None] & (column < WIDTH)[None, :]
    tl.store(_places(base, strides, batch, row, head, column), numbers.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _numbers(base, strides, batch, row, head, real):
    """One number of each row of a head."""
    place = base + batch * strides[0] + row.to(tl.int64) * strides[1] + head * strides[2]
    return tl.load(place, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _over_length(rows, epsilon, NORMALIZE: tl.constexpr):
    """What makes the length of each row one; one itself if lengths stay as they are."""
    squares = tl.sum(rows * rows, 1)
    return tl.rsqrt(squares + epsilon) if NORMALIZE else tl.full([rows.shape[0]], 1.0, tl.float32)


@triton.jit
def _members(masks, strides, row, real, ROWS: tl.constexpr):
    """Which nodes are on the path of each, itself included."""
    words = tl.load(masks + row.to(tl.int64) * strides[1], mask=real, other=0)
    found = tl.zeros([ROWS, ROWS], tl.int32)
    node = tl.arange(0, ROWS)
    for half in tl.static_range(2):
        # Half a word at a time: 64-bit numbers would take twice the registers.
        bits = (words >> (half * 32)).to(tl.int32)
        found |= ((bits[:, None] >> (node & 31)[None, :]) & 1) & (node // 32 == half).to(tl.int32)[None, :]
    return found != 0
