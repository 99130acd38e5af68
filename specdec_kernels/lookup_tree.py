"""A tree of what followed earlier occurrences of the last tokens, in two launches that the host knows beforehand.

The first cuts the text into chunks: a program counts the matching tokens of its positions and keeps its best ones,
packed into one number each. The second has a program per row: it merges the winners of the chunks, compares their
continuations, and picks the heaviest nodes of their trie, again as packed numbers.

The definition is that of `specdec.ops.lookup_tree`, which checks the arguments.
"""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Positions that one program searches."""
TILE = 2048
"""Winners of chunks that are merged at a time."""

_POSITION_BITS = tl.constexpr(32)  # an occurrence: matching tokens above its position; 0 is none
_POSITION_MASK = tl.constexpr(2**32 - 1)
_FULL_MATCH = tl.constexpr(8)
_BITS = tl.constexpr(5)  # of a depth or a place among the occurrences, both below 32
_MASK = tl.constexpr(31)


def launch(
    tokens: Tensor,
    lengths: Tensor,
    limits: Tensor | None,
    *,
    nodes: int,
    longest: int,
    occurrences: int,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and parents `[batch, nodes + 1]` and the number of nodes `[batch]`; see `specdec.ops.lookup_tree`."""
    batch, capacity = tokens.shape
    chunks = triton.cdiv(capacity, CHUNK)
    kept = triton.next_power_of_2(occurrences)
    found = tokens.new_empty(batch, chunks, occurrences)
    drafted, parents = tokens.new_empty(2, batch, nodes + 1)
    num_nodes = tokens.new_empty(batch)
    _match[(batch * chunks,)](
        tokens,
        lengths,
        found,
        tokens.stride(0),
        tokens.stride(1),
        lengths.stride(0),
        capacity,
        chunks,
        longest,
        occurrences,
        CHUNK=CHUNK,
        KEPT=kept,
        num_warps=1,
    )
    _grow[(batch,)](
        tokens,
        lengths,
        limits,
        found,
        drafted,
        parents,
        num_nodes,
        tokens.stride(0),
        tokens.stride(1),
        lengths.stride(0),
        0 if limits is None else limits.stride(0),
        capacity,
        chunks,
        occurrences,
        nodes,
        depth,
        CHUNK=CHUNK,
        TILE=TILE,
        KEPT=kept,
        DEPTH=triton.next_power_of_2(depth),
        NODES=triton.next_power_of_2(nodes),
        num_warps=4,
    )
    return drafted, parents, num_nodes


@triton.jit(do_not_specialize=["capacity", "chunks", "longest", "occurrences"])
def _match(
    tokens,
    lengths,
    found,
    token_batch,
    token_slot,
    length_batch,
    capacity,
    chunks,
    longest,
    occurrences,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The best occurrences in one chunk; chunks behind the text are left as they are."""
    chunk = tl.program_id(0) % chunks
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    last = tl.minimum(tl.maximum(tl.load(lengths + batch * length_batch), 1), capacity) - 1
    first = chunk.to(tl.int64) * CHUNK
    if first >= last:
        return
    inner = tl.arange(0, CHUNK)
    text = tokens + batch * token_batch
    ahead = text + (first + inner) * token_slot
    ending = text + last * token_slot

    equal = first + inner < last
    equal &= tl.load(ahead, mask=equal, other=0) == tl.load(ending)
    matching = equal.to(tl.int32)
    back = 1
    # In most texts few positions are left after a step or two.
    while (back < longest) & (tl.max(equal.to(tl.int32), 0) > 0):
        ahead -= token_slot
        ending -= token_slot
        equal &= first + inner >= back
        equal &= tl.load(ahead, mask=equal, other=0) == tl.load(ending, mask=last >= back, other=0)
        matching += equal.to(tl.int32)
        back += 1

    keys = tl.where(matching > 0, matching * CHUNK + inner, 0)
    rank = tl.arange(0, KEPT)
    best = tl.zeros([KEPT], tl.int32)
    place = 0
    top = tl.max(keys, 0)
    while (place < occurrences) & (top > 0):
        best = tl.where(rank == place, top, best)
        keys = tl.where(keys == top, 0, keys)
        top = tl.max(keys, 0)
        place += 1
    packed = ((best // CHUNK).to(tl.int64) << _POSITION_BITS) + first + best % CHUNK
    found += (batch * chunks + chunk) * occurrences
    tl.store(found + rank, tl.where(best > 0, packed, 0), mask=rank < occurrences)


@triton.jit(do_not_specialize=["capacity", "chunks", "occurrences", "nodes", "depth"])
def _grow(
    tokens,
    lengths,
    limits,
    found,
    drafted,
    parents,
    num_nodes,
    token_batch,
    token_slot,
    length_batch,
    limit_batch,
    capacity,
    chunks,
    occurrences,
    nodes,
    depth,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    KEPT: tl.constexpr,
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
):
    """The tree of one row."""
    batch = tl.program_id(0).to(tl.int64)
    last = tl.minimum(tl.maximum(tl.load(lengths + batch * length_batch), 1), capacity) - 1
    reach = depth.to(tl.int64)
    if limits is not None:
        reach = tl.minimum(reach, tl.load(limits + batch * limit_batch))

    # The best occurrences of all chunks.
    rank = tl.arange(0, KEPT)
    best = tl.zeros([KEPT], tl.int64)
    found += batch * chunks * occurrences
    winners = tl.cdiv(last, CHUNK) * occurrences
    for start in range(0, winners, TILE):
        winner = start + tl.arange(0, TILE)
        keys = tl.load(found + winner, mask=winner < winners, other=0)
        merged = tl.zeros([KEPT], tl.int64)
        place = 0
        top = tl.maximum(tl.max(keys, 0), tl.max(best, 0))
        while (place < occurrences) & (top > 0):
            merged = tl.where(rank == place, top, merged)
            keys = tl.where(keys == top, 0, keys)
            best = tl.where(best == top, 0, best)
            top = tl.maximum(tl.max(keys, 0), tl.max(best, 0))
            place += 1
        best = merged

    # Their continuations, one to a line; a node of the trie belongs to the first line that goes through it.
    position = best & _POSITION_MASK
    ends = tl.where(best > 0, tl.minimum(last - position, reach), 0)
    step = tl.arange(0, DEPTH)
    text = tokens + batch * token_batch
    inside = step[None, :] < ends[:, None]
    lines = tl.load(text + (position[:, None] + 1 + step[None, :]) * token_slot, mask=inside, other=0)
    weight = tl.zeros([KEPT, DEPTH], tl.int32)
    owner = tl.full([KEPT, DEPTH], KEPT, tl.int32)
    above = tl.full([KEPT, DEPTH], KEPT, tl.int32)  # owner of the parent
    kept = tl.sum((best > 0).to(tl.int32), 0)
    for other in range(kept):
        key = tl.max(tl.where(rank == other, best, 0), 0)
        start = key & _POSITION_MASK
        end = tl.minimum(last - start, reach)
        line = tl.load(text + (start + 1 + step) * token_slot, mask=step < end, other=0)
        common = tl.min(tl.where(lines == line[None, :], DEPTH, step[None, :]), 1)
        common = tl.minimum(common, end)
        matching = tl.minimum(key >> _POSITION_BITS, _FULL_MATCH).to(tl.int32)
        through = step[None, :] < common[:, None]
        weight += tl.where(through, 1 << (matching - 1), 0)
        owner = tl.where(through, tl.minimum(owner, other), owner)
        above = tl.where(step[None, :] <= common[:, None], tl.minimum(above, other), above)

    # The heaviest nodes, then those nearer to the root, then those of earlier lines. No weight exceeds 2 ** 12.
    heavy = (weight << _BITS) + (step ^ _MASK)[None, :]
    heavy = (heavy << _BITS) + (rank ^ _MASK)[:, None]
    heavy = (heavy << _BITS) + above
    heavy = tl.where(inside & (owner == rank[:, None]), heavy, 0)
    node = tl.arange(0, NODES)
    chosen = tl.zeros([NODES], tl.int32)
    count = 0
    top = tl.max(heavy)
    while (count < nodes) & (top > 0):
        chosen = tl.where(node == count, top, chosen)
        heavy = tl.where(heavy == top, 0, heavy)
        top = tl.max(heavy)
        count += 1

    # Numbered by depth, and within a depth as they were chosen; what was not used looks deepest, and comes last.
    above_of = chosen & _MASK
    line_of = ((chosen >> _BITS) & _MASK) ^ _MASK
    depth_of = ((chosen >> _BITS >> _BITS) & _MASK) ^ _MASK
    used = node < count
    before = (depth_of * NODES + node)[None, :] < (depth_of * NODES + node)[:, None]
    number = 1 + tl.sum(before.to(tl.int32), 1)
    is_parent = (depth_of[None, :] == depth_of[:, None] - 1) & (line_of[None, :] == above_of[:, None])
    parent = tl.sum(tl.where(is_parent, number[None, :], 0), 1)
    start = tl.sum(tl.where(line_of[:, None] == rank[None, :], position[None, :], 0), 1)
    token = tl.load(text + (start + 1 + depth_of) * token_slot, mask=used, other=0)
    drafted += batch * (nodes + 1)
    parents += batch * (nodes + 1)
    tl.store(drafted + number, token, mask=node < nodes)
    tl.store(parents + number, tl.where(used, parent, -1), mask=node < nodes)
    tl.store(drafted, tl.load(text + last * token_slot))
    tl.store(parents, tl.full([], -1, tl.int64))
    tl.store(num_nodes + batch, count + 1)
