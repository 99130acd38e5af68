"""Index algebra of token trees: parents, ancestors, depths, paths, order, pruning.

A tree is its `parents` array in topological order (`parents[i] < i`, -1 at the root and on padding). Ancestor sets,
the node itself included, are bit masks in int64 words: bit `j % 64` of word `j // 64` of node i is set iff j is an
ancestor of i. One word holds 64 nodes. The same mask serves attention, the recurrent layers and the acceptance walk;
a node's depth is its popcount minus one.

Everything is batched tensor work without a loop over nodes. On the CPU, results are as wide as their widest row; on
other devices they keep a width that is known without reading the device (see `widest`).
"""

import dataclasses

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops._ancestry import WORD as WORD
from specdec.ops._ancestry import ancestor_matrix as ancestor_matrix
from specdec.ops._ancestry import pack as pack
from specdec.ops._ancestry import reach as reach
from specdec.ops._ancestry import unpack as unpack
from specdec.types import DraftTree


def readable(tensor: Tensor) -> bool:
    """Whether the host can read this tensor for free.

    On an accelerator such a read stalls the host and forbids graph capture, so shapes keep their bounds there, and what
    is only a check is left out.
    """
    return tensor.device.type == "cpu"


def widest(counts: Int[Tensor, " batch"], most: int) -> int:
    """The largest of `counts` where it is `readable`, else its bound `most`: shapes that follow what is in use."""
    return min(int(counts.max()), most) if readable(counts) else most


def narrowest(counts: Int[Tensor, " batch"]) -> int:
    """The smallest of `counts` where it is `readable`, else its bound 0."""
    return int(counts.min()) if readable(counts) else 0


def require_trees(place: str, tree: DraftTree, batch: int) -> None:
    """Raises `ShapeError` for trees of another batch, and, if `readable`, for nodes without a parent before them."""
    parents = tree.parents
    if parents.shape[0] != batch:
        raise ShapeError(f"{place}: expected a tree for each of {batch} texts, got parents {list(parents.shape)}.")
    if readable(parents):
        index = torch.arange(tree.width)
        lost = (parents < 0) | (parents >= index)
        if bool((lost & tree.valid & (index > 0)).any()):
            raise ShapeError(
                f"{place}: every node needs a parent before it (parents[i] < i), got parents {parents.tolist()}."
            )


def require_path(
    place: str, parents: Int[Tensor, "batch nodes"], nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]
) -> None:
    """Raises `ShapeError` unless the first `counts[b]` of `nodes[b]` are a path from the root, or none."""
    batch = parents.shape[0]
    for name, given, shape in (("nodes", nodes, (batch, *nodes.shape[1:2])), ("counts", counts, (batch,))):
        if given.shape != shape or given.dtype != torch.int64:
            raise ShapeError(f"{place}: {name} must be int64 {list(shape)}, got {given.dtype} {list(given.shape)}.")
    if not readable(parents) or not readable(nodes) or not readable(counts):
        return
    for row, (above, path, count) in enumerate(zip(parents.tolist(), nodes.tolist(), counts.tolist(), strict=True)):
        kept = path[: max(0, count)]
        inside = len(kept) == count and all(0 <= node < len(above) for node in kept)
        if not inside or [above[node] for node in kept] != [-1, *kept][:count] or kept[:1] not in ([], [0]):
            raise ShapeError(
                f"{place}: row {row}: the first {count} of nodes {path} are not a root path of a tree with parents "
                f"{above}."
            )


def check(tree: DraftTree) -> None:
    """Raises `ShapeError` unless the tree is rooted, topologically ordered, padded at the end, with distinct siblings.

    It reads the tree on the host: a tool for tests and for builders of one's own, not for every round.
    """
    parents, valid = tree.parents, tree.valid
    index = torch.arange(tree.width, device=parents.device)
    if tree.width == 0 or bool((tree.num_nodes < 1).any()) or bool((tree.num_nodes > tree.width).any()):
        raise ShapeError(
            f"num_nodes must lie in 1..{tree.width} (the root is always there), got {tree.num_nodes.tolist()}."
        )
    require_trees("check", tree, parents.shape[0])
    inner = valid & (index > 0)
    if bool((~inner & (parents != -1)).any()):
        raise ShapeError(f"the root and padding must have parent -1, got parents {parents.tolist()}.")
    twins = (parents[:, :, None] == parents[:, None, :]) & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
    if bool((twins & (index[:, None] < index) & inner[:, :, None] & inner[:, None, :]).any()):
        raise ShapeError(
            "children of one node must carry distinct tokens; `trees.merge([tree])` joins equal ones. "
            f"Got tokens {tree.tokens.tolist()} with parents {parents.tolist()}."
        )


def ancestors(tree: DraftTree) -> Int[Tensor, "batch nodes words"]:
    """Ancestor masks as int64 words, the node itself included."""
    return pack(reach(tree.parents))


def depths(parents: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch nodes"]:
    """Distance of each node from its root; 0 for the root and for padding."""
    return reach(parents).sum(-1) - 1


def num_children(parents: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch nodes"]:
    """Number of children of each node."""
    return torch.zeros_like(parents).scatter_add_(1, parents.clamp_min(0), (parents >= 0).to(parents.dtype))


def is_chain(tree: DraftTree) -> bool:
    """Whether every node is the child of the node before it, in each row.

    >>> import torch
    >>> is_chain(DraftTree.from_root(torch.tensor([7])))
    True
    """
    before = torch.arange(-1, tree.width - 1, device=tree.parents.device)
    return not bool((tree.valid & (tree.parents != before)).any())


def child_with_token(
    tree: DraftTree, node: Int[Tensor, " batch"], token: Int[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """The child of `node` that carries `token`, or -1; also -1 where `node` is -1."""
    inner = tree.parents >= 0
    match = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & inner
    found, index = match.max(-1)
    return torch.where(found, index, -1)


def path_to(tree: DraftTree, node: Int[Tensor, " batch"]) -> Int[Tensor, "batch depth"]:
    """Nodes from depth 1 down to `node` (the root is left out); -1 after the last one."""
    rows = torch.arange(node.shape[0], device=node.device)
    on_path = reach(tree.parents)[rows, node]
    on_path[:, 0] = False
    order = torch.where(on_path, torch.arange(tree.width, device=node.device), tree.width)
    path = order.sort(-1).values[:, : max(1, widest(on_path.sum(-1), tree.width - 1))]
    return torch.where(path == tree.width, -1, path)


def take(tree: DraftTree, nodes: Int[Tensor, "batch kept"], counts: Int[Tensor, " batch"]) -> DraftTree:
    """The tree on the first `counts[b]` of `nodes[b]`, renumbered in that order.

    `nodes` must start with the root, contain the parent of each kept node before it, and is ignored after `counts`.
    A sampled tree must keep the order of its siblings, which is the order of the draws.
    """
    kept = torch.arange(nodes.shape[1], device=nodes.device)
    # Slot `width` collects what is not kept.
    target = torch.where(kept < counts[:, None], nodes, tree.width)
    renumber = torch.zeros(nodes.shape[0], tree.width + 1, dtype=torch.int64, device=nodes.device)
    renumber.scatter_(1, target, kept.expand_as(target))
    return _gathered(tree, nodes, renumber, counts)


def _gathered(
    tree: DraftTree,
    order: Int[Tensor, "batch kept"],
    renumber: Int[Tensor, "batch slots"],
    counts: Int[Tensor, " batch"],
) -> DraftTree:
    """The tree whose node i was node `order[b, i]`; `renumber` maps old to new indices."""
    inside = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    source = torch.where(inside, order, 0)
    parents = tree.parents.gather(1, source)
    probs = tree.draft_probs
    if probs is not None:
        probs = probs[torch.arange(probs.shape[0], device=probs.device)[:, None], source]
    # Padding repeats the root, so its parent is -1 like the root's.
    return dataclasses.replace(
        tree,
        tokens=tree.tokens.gather(1, source),
        parents=torch.where(parents < 0, parents, renumber.gather(1, parents.clamp_min(0))),
        num_nodes=counts,
        scores=torch.where(inside, tree.scores.gather(1, source), -torch.inf),
        draft_probs=probs,
    )


def prune(tree: DraftTree, keep: Bool[Tensor, "batch nodes"]) -> DraftTree:
    """The tree on the nodes marked in `keep` whose ancestors are all marked too, in their old order.

    The root always stays. Not for sampled trees unless `keep` was fixed before the draws.
    """
    marked = keep & tree.valid
    marked[:, 0] = True
    whole = (~reach(tree.parents) | marked[:, None, :]).all(-1) & marked
    counts = whole.sum(-1)
    order = whole.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return take(tree, order[:, : widest(counts, tree.width)], counts)


def best(tree: DraftTree, budget: int) -> DraftTree:
    """The tree on the root and the `budget` best-scored nodes; earlier nodes win ties.

    Scores must not rise along a path, so that the result is closed under parents. Raises `UnsupportedError` for a
    sampled tree: dropping a drawn node for its probability would bias every rule that uses `draft_probs`.
    """
    if tree.width <= budget + 1:
        return tree
    if tree.draft_probs is not None:
        raise UnsupportedError(
            "a sampled tree cannot be cut by score: its draft_probs would no longer be the law of what is left. "
            "Grow it with a smaller budget instead."
        )
    order = tree.scores.argsort(dim=-1, descending=True, stable=True)[:, : budget + 1]
    counts = tree.num_nodes.clamp_max(budget + 1)
    # Back in the old order, in which padding is last.
    kept = order.sort(-1).values[:, : widest(counts, budget + 1)]
    return take(tree, kept, counts)


def dfs_order(tree: DraftTree) -> DraftTree:
    """Renumbers nodes depth-first, best-scored child first; earlier nodes win ties.

    The drafter's favourite path then occupies nodes 1, 2, ... so that keeping it in the cache moves nothing. Children
    of a sampled tree stay in the order of their draws.
    """
    index = torch.arange(tree.width, device=tree.parents.device)
    before = (index < index[:, None]).expand(tree.parents.shape[0], -1, -1)
    if tree.draft_probs is None:
        mine, other = tree.scores.unsqueeze(2), tree.scores.unsqueeze(1)
        before = (other > mine) | ((other == mine) & before)
    above = reach(tree.parents)
    # A node stands behind its parent and the whole subtrees of its earlier siblings; sum that over its ancestors.
    # Padding has parent -1 like the root, and so comes behind the whole tree without a special case.
    before = before & (tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1))
    steps = (before * above.sum(1).unsqueeze(1)).sum(-1) + 1
    position = (above * steps.unsqueeze(1)).sum(-1) - 1
    order = torch.empty_like(position).scatter_(1, position, index.expand_as(position))
    return _gathered(tree, order, position, tree.num_nodes)
