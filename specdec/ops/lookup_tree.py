"""A token tree drafted from the committed tokens themselves, on their device, with shapes that the host knows.

Where the last tokens stood before, what followed there may follow here (prompt lookup, Saxena 2023), and what followed
at several places makes a tree with weights (SuffixDecoding, arXiv:2411.04975). Nothing is read on the host and no index
is kept between calls, so the op can stand in a captured graph. Integers only: every implementation gives the same tree.

For a text of `length` tokens:

    occurrence   a position i < length - 1 whose token, and those before it, equal the last token and those before it:
                 m of them, counted up to `longest` and to the start of the text, m >= 1
    kept         the best `occurrences` of these: longer matches first, later positions first among equals
    continuation tokens i + 1, i + 2, ..., at most `depth` of them and none past the end of the text
    weight       2 ** (min(m, 8) - 1): one more matching token counts as much as a second occurrence
    trie         a node for each prefix of a continuation; its weight is the sum over the kept occurrences that go
                 through it, and its rank the place of the first of them in the order above

No weight rises along a path, so the best `nodes` of the trie (heavier first, then nearer to the root, then by rank)
are a tree. They are numbered by depth, then heavier first, then by rank.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from specdec.errors import ShapeError
from specdec.ops import _dispatch
from specdec.ops._checks import sizes, tensors, within

MOST = {"nodes": 64, "occurrences": 32, "depth": 32, "longest": 64}
"""Bounds of the arguments: the kernel holds a row's trie in registers."""

_POSITION_BITS = 32  # an occurrence is packed as its matching tokens above its position
_FULL_MATCH = 8  # matching tokens beyond these add no weight


def lookup_tree(
    tokens: Int[Tensor, "batch capacity"],
    lengths: Int[Tensor, " batch"],
    *,
    nodes: int,
    longest: int = 16,
    occurrences: int = 16,
    depth: int | None = None,
    limits: Int[Tensor, " batch"] | None = None,
    impl: _dispatch.Impl = "auto",
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"], Int[Tensor, " batch"]]:
    """A tree of what followed earlier occurrences of the last tokens; the head of its file has the exact definition.

    Args:
        tokens: int64; the first `lengths[b]` of row b are committed, the last of them is the root. What stands behind
            them has no influence.
        lengths: int64, from 1 to `capacity`; checked where reading them is free, on a CPU, and clamped elsewhere.
        nodes: drafted nodes at most, the root not counted; 1 to 64.
        longest: length at which the count of matching tokens stops; 1 to 64.
        occurrences: earlier occurrences that are kept; 1 to 32.
        depth: deepest node; 1 to 32. None is `nodes`, at most 32.
        limits: int64, deepest node per row; 0 gives a lone root. None leaves it at `depth`.
        impl: which implementation runs; see `specdec.ops`.

    Returns:
        Three int64 tensors, which are the tokens of the nodes and their parents, both `[batch, nodes + 1]` in
        topological order with the root first, and how many nodes each row has, its root counted. The parent of the
        root is -1; padding has token 0 and parent -1.

    Raises:
        ShapeError: for tensors that do not belong together, other dtypes than int64, or lengths that do not fit.
        UnsupportedError: for bounds out of range, or if `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> text = torch.tensor([[5, 6, 7, 8, 6, 9, 5, 6, 0, 0]])  # the last two are not committed
        >>> tokens, parents, num_nodes = ops.lookup_tree(text, lengths=torch.tensor([8]), nodes=5, depth=2)
        >>> tokens  # after "5 6" came 7 and 8; after the other "6" came 9 and 5
        tensor([[6, 7, 9, 8, 5, 0]])
        >>> parents
        tensor([[-1,  0,  0,  1,  2, -1]])
        >>> num_nodes
        tensor([5])
    """
    tensors("lookup_tree", {"tokens": tokens, "lengths": lengths}, {"limits": limits})
    sizes("lookup_tree", MOST, nodes=nodes, longest=longest, occurrences=occurrences)
    depth = min(nodes, MOST["depth"]) if depth is None else depth
    sizes("lookup_tree", MOST, depth=depth)
    _check(tokens, lengths, limits)
    kernel: Any = _dispatch.choose("lookup_tree", impl, tokens.device)
    draft = _reference if kernel is None or tokens.shape[0] == 0 else kernel.launch
    tree: tuple[Tensor, Tensor, Tensor] = draft(
        tokens, lengths, limits, nodes=nodes, longest=longest, occurrences=occurrences, depth=depth
    )
    return tree


def _check(tokens: Tensor, lengths: Tensor, limits: Tensor | None) -> None:
    """Raises for arguments that do not belong together."""
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ShapeError(f"lookup_tree: tokens must be [batch, 1 or more slots], got {list(tokens.shape)}.")
    batch, capacity = tokens.shape
    for name, given in (("tokens", tokens), ("lengths", lengths), ("limits", limits)):
        if given is None:
            continue
        if name != "tokens" and given.shape != (batch,):
            raise ShapeError(f"lookup_tree: {name} must be [{batch}] like the rows of tokens, got {list(given.shape)}.")
        if given.dtype != torch.int64:
            raise ShapeError(f"lookup_tree: {name} must be torch.int64, got {given.dtype}.")
        if given.device != tokens.device:
            raise ShapeError(f"lookup_tree: {name} must be on {tokens.device} like tokens, got {given.device}.")
    within("lookup_tree", "lengths", lengths, 1, capacity, "slots of tokens")


def _reference(
    tokens: Tensor, lengths: Tensor, limits: Tensor | None, *, nodes: int, longest: int, occurrences: int, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in plain torch, without a read on the host."""
    capacity, device = tokens.shape[1], tokens.device
    last = lengths.clamp(1, capacity)[:, None] - 1
    reach = torch.full_like(last, depth) if limits is None else limits[:, None].clamp(0, depth)
    rank, step = torch.arange(occurrences, device=device), torch.arange(depth, device=device)

    # Occurrences, packed so that the larger number is the better one; 0 is none.
    place = torch.arange(capacity, device=device)
    equal, matching = place < last, torch.zeros_like(tokens)
    for back in range(min(longest, capacity)):
        ending = tokens.gather(1, (last - back).clamp_min(0))
        equal = equal & (place >= back) & (tokens.roll(back, 1) == ending)
        matching = matching + equal
    keys = torch.where(matching > 0, (matching << _POSITION_BITS) + place, 0)
    keys = pad(keys, (0, max(0, occurrences - capacity))).topk(occurrences).values
    matching, place = keys >> _POSITION_BITS, keys & ((1 << _POSITION_BITS) - 1)

    # Their continuations, and which of them agree down to which depth.
    ends = torch.where(keys > 0, torch.minimum(last - place, reach), 0)
    slots = (place[:, :, None] + 1 + step).clamp_max(capacity - 1)
    ahead = tokens.gather(1, slots.flatten(1)).view_as(slots)
    agree = (ahead[:, :, None] == ahead[:, None]) & (step < torch.minimum(ends[:, :, None], ends[:, None])[..., None])
    agree = agree.long().cumprod(-1)  # [batch, occurrence, other, depth]

    # A node of the trie belongs to the first occurrence that goes through it.
    weights = 1 << (matching.clamp(1, _FULL_MATCH) - 1)
    weight = (agree * weights[:, None, :, None]).sum(2)
    owner = torch.where(agree > 0, rank[:, None], occurrences).amin(2)
    order = (weight * depth + (depth - 1 - step)) * occurrences + (occurrences - 1 - rank[:, None])
    order = torch.where(owner == rank[:, None], order, -1).flatten(1)
    order, chosen = pad(order, (0, max(0, nodes - order.shape[1])), value=-1).topk(nodes)
    count = (order >= 0).sum(1)

    # Numbered by depth; topk has put them in order within a depth.
    level, inner = torch.where(order >= 0, chosen % depth, depth).sort(dim=1, stable=True)
    used = level < depth
    chosen = torch.where(used, chosen.gather(1, inner), -1)
    above = owner.flatten(1).gather(1, (chosen - 1).clamp_min(0)) * depth + level - 1  # where the parent was chosen
    number = torch.arange(1, nodes + 1, device=device)
    parents = torch.where(above[:, :, None] == chosen[:, None], number, 0).sum(2)
    parents = torch.where(used, torch.where(level > 0, parents, 0), -1)
    drafted = torch.where(used, ahead.flatten(1).gather(1, chosen.clamp_min(0)), 0)
    return torch.cat([tokens.gather(1, last), drafted], 1), pad(parents, (1, 0), value=-1), count + 1
