"""The best tree over a lattice of candidates, in one launch: a program per row takes the best open path, over and over.

A path that was taken opens its children. Open paths are packed numbers of which the smallest is the next node: the bits
of its negated score, its depth, and the place of its parent with its candidate. The definition is that of
`specdec.ops.grow_tree`, which checks the arguments.
"""

import triton
import triton.language as tl
from torch import Tensor

_CLOSED = tl.constexpr(2**63 - 1)
_INFINITE = tl.constexpr(0x7F800000)  # bits of a score that is none


def launch(
    tokens: Tensor, scores: Tensor, root: Tensor, limits: Tensor | None, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and parents `[batch, nodes + 1]` and the number of nodes `[batch]`; see `specdec.ops.grow_tree`."""
    batch, levels, candidates = tokens.shape
    drafted, parents = tokens.new_empty(2, batch, nodes + 1)
    num_nodes = tokens.new_empty(batch)
    wide, places = triton.next_power_of_2(candidates), triton.next_power_of_2(nodes + 1)
    _grow[(batch,)](
        tokens,
        scores,
        root,
        limits,
        drafted,
        parents,
        num_nodes,
        *tokens.stride(),
        *scores.stride(),
        root.stride(0),
        0 if limits is None else limits.stride(0),
        levels,
        candidates,
        nodes,
        ANY=scores.shape[2] == 1,
        PLACES=places,
        CANDIDATES=wide,
        num_warps=1 if wide * places <= 512 else 4,
    )
    return drafted, parents, num_nodes


@triton.jit(do_not_specialize=["levels", "candidates", "nodes"])
def _grow(
    tokens,
    scores,
    root,
    limits,
    drafted,
    parents,
    num_nodes,
    token_batch,
    token_level,
    token_candidate,
    score_batch,
    score_level,
    score_before,
    score_candidate,
    root_batch,
    limit_batch,
    levels,
    candidates,
    nodes,
    ANY: tl.constexpr,
    PLACES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The tree of one row."""
    batch = tl.program_id(0).to(tl.int64)
    tokens += batch * token_batch
    scores += batch * score_batch
    drafted += batch * (nodes + 1)
    parents += batch * (nodes + 1)
    deepest = levels
    if limits is not None:
        deepest = tl.minimum(deepest, tl.load(limits + batch * limit_batch)).to(tl.int32)

    place = tl.arange(0, PLACES)[:, None]
    candidate = tl.arange(0, CANDIDATES)
    flat = place * CANDIDATES + candidate[None, :]
    open_paths = tl.full([PLACES, CANDIDATES], _CLOSED, tl.int64)
    tl.store(drafted, tl.load(root + batch * root_batch))
    tl.store(parents, tl.full([], -1, tl.int64))

    taken = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)
    cost = tl.full([], 0.0, tl.float32)
    going = nodes > 0
    while going:
        # The children of the node that was taken last.
        inside = (candidate < candidates) & (candidate * 0 + depth < deepest)
        row = scores + depth * score_level
        if not ANY:
            row += before.to(tl.int64) * score_before
        edge = tl.load(row + candidate * score_candidate, mask=inside, other=float("-inf"))
        total = cost - edge
        bits = tl.where(total == total, total, float("inf")).to(tl.int32, bitcast=True)
        keys = (
            (bits.to(tl.int64) << 32) | ((depth + 1).to(tl.int64) << 16) | (taken * CANDIDATES + candidate).to(tl.int64)
        )
        keys = tl.where(bits < _INFINITE, keys, _CLOSED)
        open_paths = tl.where(place == taken, keys[None, :], open_paths)
        # The best of all that are open.
        best = tl.min(tl.min(open_paths, 1), 0)
        going = best != _CLOSED
        if going:
            chosen = (best & 0xFFFF).to(tl.int32)
            open_paths = tl.where(flat == chosen, _CLOSED, open_paths)
            cost = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            depth = ((best >> 16) & 0xFFFF).to(tl.int32)
            before = chosen % CANDIDATES
            taken += 1
            token = tl.load(tokens + (depth - 1) * token_level + before.to(tl.int64) * token_candidate)
            tl.store(drafted + taken, token)
            tl.store(parents + taken, (chosen // CANDIDATES).to(tl.int64))
            going = taken < nodes
    tl.store(num_nodes + batch, (taken + 1).to(tl.int64))
    rest = tl.arange(0, PLACES)
    empty = (rest > taken) & (rest <= nodes)
    tl.store(drafted + rest, tl.zeros([PLACES], tl.int64), mask=empty)
    tl.store(parents + rest, tl.full([PLACES], -1, tl.int64), mask=empty)
