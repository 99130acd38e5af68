"""Several trees over one root become one tree: equal tokens under equal paths are one node, with the better score.

This is how sources combine, such as a lookup chain and a neural tree scored on one scale. Cut the result to a
budget with `topology.best`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.trees import topology
from specdec.types import DraftTree


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """The union of the root paths of `trees`, depth-first numbered.

    Args:
        trees: deterministic trees with the same root in each batch row. One tree is allowed: it loses its double
            siblings.

    Returns:
        A tree in which each path occurs once, with the best score it had. It has as many nodes as there are distinct
        paths.

    Raises:
        ShapeError: if there is no tree, or the batches or roots differ.
        UnsupportedError: if a tree was sampled: the merged siblings would follow no single law.

    Example:
        >>> import torch
        >>> from specdec import DraftTree, trees
        >>> chain = DraftTree(
        ...     tokens=torch.tensor([[7, 5, 6]]), parents=torch.tensor([[-1, 0, 1]]),
        ...     num_nodes=torch.tensor([3]), scores=torch.tensor([[0.0, -1.0, -2.0]]),
        ... )
        >>> other = DraftTree(
        ...     tokens=torch.tensor([[7, 5, 8]]), parents=torch.tensor([[-1, 0, 1]]),
        ...     num_nodes=torch.tensor([3]), scores=torch.tensor([[0.0, -0.5, -3.0]]),
        ... )
        >>> both = trees.merge([chain, other])
        >>> both.tokens.tolist(), both.parents.tolist(), both.scores.tolist()
        ([[7, 5, 6, 8]], [[-1, 0, 1, 1]], [[0.0, -0.5, -2.0, -3.0]])
    """
    _check(trees)
    tokens = torch.cat([tree.tokens for tree in trees], 1)
    scores = torch.cat([tree.scores for tree in trees], 1)
    starts = [sum(tree.width for tree in trees[:index]) for index in range(len(trees))]
    parents = torch.cat(
        [torch.where(tree.parents < 0, -1, tree.parents + start) for tree, start in zip(trees, starts, strict=True)], 1
    )
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # Padding looks like the root, token and parent, and so goes the way of the other roots.
    same = _same_path(tokens, parents)
    first = same.to(torch.uint8).argmax(-1)
    keep = first == index
    counts = keep.sum(-1)
    joined = DraftTree(
        tokens=tokens,
        # The first of equal nodes has its own parent behind the first of the equal parents, so order is kept.
        parents=torch.where(parents < 0, parents, first.gather(1, parents.clamp_min(0))),
        num_nodes=counts,
        scores=scores.unsqueeze(1).where(same, -torch.inf).amax(-1),
    )
    order = keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    kept = order[:, : topology.widest(counts, tokens.shape[1])]
    return topology.dfs_order(topology.take(joined, kept, counts))


def _same_path(
    tokens: Int[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"]
) -> Bool[Tensor, "batch nodes nodes"]:
    """Whether two nodes have equal tokens all the way to their roots."""
    batch, nodes = tokens.shape
    same = torch.zeros(batch, nodes + 1, nodes + 1, dtype=torch.bool, device=tokens.device)
    same[:, :nodes, :nodes] = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    # Above every root stands one more node, which equals itself only.
    same[:, nodes, nodes] = True
    above = torch.nn.functional.pad(parents, (0, 1), value=-1)
    above = torch.where(above < 0, nodes, above)
    # Doubling: paths agree on their last 2k tokens iff the nodes, and then their k-th ancestors, agree on k.
    for _ in range(nodes.bit_length()):
        rows = same.gather(1, above.unsqueeze(2).expand_as(same))
        same = same & rows.gather(2, above.unsqueeze(1).expand_as(same))
        above = above.gather(1, above)
    return same[:, :nodes, :nodes]


def _check(trees: Sequence[DraftTree]) -> None:
    """Raises unless the trees can be merged."""
    if not trees:
        raise ShapeError("merge needs at least one tree, got none.")
    if any(tree.draft_probs is not None for tree in trees):
        raise UnsupportedError(
            "a sampled tree cannot be merged: siblings from two sources follow no single draft law. "
            "Mix the laws in one drafter and draw from the mixture instead."
        )
    roots = [tree.tokens[:, 0] for tree in trees]
    if len({root.shape for root in roots}) > 1:
        raise ShapeError(f"merge needs trees of one batch, got batch sizes {[root.shape[0] for root in roots]}.")
    if topology.readable(roots[0]) and any(bool((root != roots[0]).any()) for root in roots[1:]):
        raise ShapeError(f"merge needs trees over one root per row, got {[root.tolist() for root in roots]}.")
