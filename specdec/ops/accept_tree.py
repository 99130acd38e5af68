"""The acceptance walk of a round, on the device: which drafts the target agrees with, and what is committed.

The target has chosen a token at every node (its argmax, or a draw). A draft is accepted if it is what was chosen at its
parent and the parent was accepted; the choice at the last accepted node is the bonus token. This is the target-only
rule (`specdec.verify.TargetOnly`) for a whole tree at once: siblings carry distinct tokens, so what is accepted is a
path.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops import _dispatch
from specdec.ops._ancestry import WORD, require_order, unpack
from specdec.ops._checks import demands, legible, record_of, tensors, within
from specdec.ops._dispatch import Impl


@dataclass(frozen=True, slots=True, eq=False)
class TextState:
    """What is committed, on the device; `accept_tree` writes into these int64 tensors.

    Attributes:
        tokens: committed tokens of each row, the prompt first; behind them room for what is committed, of which a GPU
            keeps what there is room for.
        lengths: how many of them are committed.
        cached: slots of the key/value cache that are committed; all tokens but the last have one.
        positions: position of the last committed token.
        remaining: tokens until the length limit; 0 for rows that stopped.
    """

    tokens: Int[Tensor, "batch capacity"]
    lengths: Int[Tensor, " batch"]
    cached: Int[Tensor, " batch"]
    positions: Int[Tensor, " batch"]
    remaining: Int[Tensor, " batch"]


def accept_tree(
    tokens: Int[Tensor, "batch nodes"],
    parents: Int[Tensor, "batch nodes"],
    num_nodes: Int[Tensor, " batch"],
    visible: Int[Tensor, "batch nodes words"],
    depths: Int[Tensor, "batch nodes"],
    chosen: Int[Tensor, "batch nodes"],
    state: TextState,
    stops: Int[Tensor, " stops"],
    *,
    impl: Impl = "auto",
) -> tuple[Int[Tensor, "batch nodes"], Int[Tensor, "batch nodes"], Int[Tensor, " batch"]]:
    """Accepts a path of the tree, commits its tokens and the bonus token, and moves `state` on.

    A row's commitment ends with the first stop token and at its length limit. Rows with nothing remaining commit
    nothing.

    Args:
        tokens: drafted tokens; node 0 is the last committed token.
        parents: of each node; -1 for the root and for padding.
        num_nodes: nodes in use per row, the root included.
        visible: ancestors of each node, from `tree_layout`.
        depths: of each node, from `tree_layout`.
        chosen: the target's token after each node.
        state: what is committed; changed in place.
        stops: tokens that end a row.
        impl: which implementation runs; see `specdec.ops`.

    Returns:
        The nodes at which tokens were chosen, root first (their slots are what the cache keeps), and those tokens, in
        order and -1 after the last one; and how many there are.

    Raises:
        ShapeError: for shapes that do not belong together, dtypes that are not int64, or a state whose rows are
            not contiguous; on a CPU also for nodes, depths and lengths that are not there, and a text without room for
            what may be committed.
        UnsupportedError: if `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> parents, num_nodes = torch.tensor([[-1, 0, 0]]), torch.tensor([3])
        >>> visible, depths = ops.tree_layout(parents, num_nodes)
        >>> one = torch.ones(1, dtype=torch.int64)
        >>> state = ops.TextState(torch.tensor([[7, 0, 0, 0]]), one.clone(), one - 1, one - 1, 9 * one)
        >>> drafts, chosen = torch.tensor([[7, 5, 8]]), torch.tensor([[8, 1, 3]])
        >>> ops.accept_tree(drafts, parents, num_nodes, visible, depths, chosen, state, stops=one[:0])
        (tensor([[ 0,  2, -1]]), tensor([[ 8,  3, -1]]), tensor([2]))
        >>> state.tokens.tolist(), state.lengths.tolist(), state.cached.tolist(), state.remaining.tolist()
        ([[7, 8, 3, 0]], [3], [2], [7])
    """
    tree = {"tokens": tokens, "parents": parents, "num_nodes": num_nodes, "visible": visible, "depths": depths}
    tensors("accept_tree", tree | {"chosen": chosen, "stops": stops})
    record_of("accept_tree", "state", state, TextState)
    if tokens.dim() != 2:
        raise ShapeError(f"accept_tree: tokens must be int64 [batch, nodes], got {tokens.dtype} {list(tokens.shape)}.")
    batch, nodes = tokens.shape
    expected = {
        "tokens": (tokens, (batch, nodes)),
        "parents": (parents, (batch, nodes)),
        "num_nodes": (num_nodes, (batch,)),
        "visible": (visible, (batch, nodes, -(-nodes // WORD))),
        "depths": (depths, (batch, nodes)),
        "chosen": (chosen, (batch, nodes)),
        "stops": (stops, (stops.numel(),)),
        "state.tokens": (state.tokens, (batch, state.tokens.shape[-1])),
        **{
            f"state.{field.name}": (getattr(state, field.name), (batch,))
            for field in fields(state)
            if field.name != "tokens"
        },
    }
    for name, (given, shape) in expected.items():
        if given.shape != shape or given.dtype != torch.int64:
            raise ShapeError(
                f"accept_tree: {name} must be int64 {list(shape)} for tokens {[batch, nodes]}, got {given.dtype} "
                f"{list(given.shape)}."
            )
        if name.startswith("state.") and given.shape[-1] > 1 and given.stride(-1) != 1:
            raise ShapeError(f"accept_tree: {name} must lie in order in memory, got strides {given.stride()}.")
    _look(parents, num_nodes, depths, state)
    kernel = _dispatch.choose("accept_tree", impl, tokens.device)
    run = _reference if kernel is None else kernel.launch
    answer: tuple[Tensor, Tensor, Tensor] = run(tokens, parents, num_nodes, visible, depths, chosen, state, stops)
    return answer


def _look(parents: Tensor, num_nodes: Tensor, depths: Tensor, state: TextState) -> None:
    """Raises for numbers that mean nothing, where looking at them is free."""
    (batch, nodes), room = parents.shape, state.tokens.shape[1]
    if not batch or not nodes or not legible(parents, num_nodes, depths, state.lengths, state.remaining):
        return
    within("accept_tree", "depths", depths, 0, nodes - 1, "from the root on; ops.tree_layout tells them")
    demand = demands("accept_tree")
    demand(int(state.remaining.min()) >= 0, f"state.remaining must be 0 or more, got {state.remaining.tolist()}")
    within("accept_tree", "state.lengths", state.lengths, 0, room, "slots of state.tokens")
    require_order("accept_tree", parents, num_nodes)
    longest = state.lengths + torch.minimum(state.remaining, depths.amax(1) + 1)
    within("accept_tree", "what may be committed", longest, 0, room, "slots of state.tokens; it needs more room")


def _reference(
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    visible: Tensor,
    depths: Tensor,
    chosen: Tensor,
    state: TextState,
    stops: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in plain torch, without reading the device."""
    nodes = tokens.shape[1]
    index = torch.arange(nodes, device=tokens.device)
    valid = index < num_nodes[:, None]
    agrees = (chosen.gather(1, parents.clamp_min(0)) == tokens) | (index == 0)
    sees = unpack(visible, nodes)
    accepted = valid & (~sees | (agrees & valid)[:, None]).all(-1)
    # One node of each depth at most: accepted nodes are a path.
    place = torch.where(accepted, depths, nodes)
    path = torch.full((tokens.shape[0], nodes + 1), -1, dtype=torch.int64, device=tokens.device)
    path = path.scatter(1, place, index.expand_as(place))[:, :nodes]
    found = torch.where(path >= 0, chosen.gather(1, path.clamp_min(0)), -1)
    stopped = (found[..., None] == stops).any(-1) & (path >= 0)
    until = torch.where(stopped, index, nodes).amin(-1) + 1
    counts = torch.minimum(torch.minimum((path >= 0).sum(-1), until), state.remaining.clamp_min(0))
    kept = index < counts[:, None]
    path, found = torch.where(kept, path, -1), torch.where(kept, found, -1)
    room = state.tokens.shape[1]
    slots = torch.where(kept, state.lengths[:, None] + index, room).clamp_max(room)
    longer = torch.nn.functional.pad(state.tokens, (0, 1))  # its last column takes what is not kept
    state.tokens.copy_(longer.scatter(1, slots, found)[:, :room])
    ends = (counts == until) | (counts == state.remaining)
    for grows in (state.lengths, state.cached, state.positions):
        grows += counts
    state.remaining.copy_(torch.where(ends, 0, state.remaining - counts))
    return path, found, counts
