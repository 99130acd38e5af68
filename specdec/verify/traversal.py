"""Traversal verification of a sampled tree: from the leaves up, a whole path at a time.

Leaves are visited in draw order. A leaf is kept, with its whole path, with the weight of that path (as in block
verification, which this is for a chain). A leaf that fails is deleted; its parent loses the share of the target that
the leaf could serve, in law and in weight, and becomes a leaf itself once it has no child left. The root has weight 1
and is always kept in the end.

Source: traversal verification (arXiv 2505.12398).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.protocols import TreeBuilder
from specdec.trees.topology import path_to
from specdec.types import DraftTree, Verdict
from specdec.verify import rules
from specdec.verify.base import check_shapes, flip, pick, token_at


class Traversal:
    """Traversal verification, for sampled trees. Lossless; equals `BlockVerification` in law on chains.

    Needs what `TreeRejection` needs of the tree, and the target's law at all nodes at once, so it cannot serve
    requests whose processors keep state.

    Example:
        >>> from specdec import DraftTree
        >>> from specdec.verify import Traversal
        >>> half = torch.tensor([[[0.5, 0.5]] * 3])
        >>> tree = DraftTree(
        ...     tokens=torch.tensor([[0, 1, 0]]), parents=torch.tensor([[-1, 0, 0]]), num_nodes=torch.tensor([3]),
        ...     scores=torch.tensor([[0.0, -0.7, -0.7]]), draft_probs=half,
        ... )
        >>> Traversal()(tree, half).path.tolist()  # drawn from the target's own law: the first leaf is kept
        [[1]]
    """

    lossless: bool = True
    stepwise: bool = False

    def check(self, builder: TreeBuilder) -> None:
        """Accepts every tree builder."""

    def __call__(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch nodes vocab"],
        *,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        """At most one coin per node, and one draw.

        Every turn moves each row one node: down to its next child, or up after a failed coin. Rows that have ended
        stand still, so a batch takes as many turns as its longest row.

        Args:
            tree: the drafted tokens; siblings in the order in which they were drawn.
            target_probs: the target's probabilities at every node; padding is never read.
            generator: source of randomness; None is torch's default.

        Raises:
            ShapeError: if `target_probs` does not fit the tree.
        """
        check_shapes(tree, target_probs)
        rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
        # Both laws of a node change as its children fail; the caller's tensors must not.
        target = rules.law(target_probs)
        draft = None if tree.draft_probs is None else rules.law(tree.draft_probs)
        weight = torch.ones_like(target[:, :, 0])
        alive = tree.valid
        node = torch.zeros_like(tree.num_nodes)
        ended = torch.zeros_like(node, dtype=torch.bool)
        while True:
            exists, child = (alive & (tree.parents == node[:, None])).max(-1)
            down = exists & ~ended
            judged = ~exists & ~ended
            if bool(down.any()):
                token = token_at(tree, child)
                entered = rules.acceptance(
                    target[rows, node, token], None if draft is None else draft[rows, node, token], weight[rows, node]
                )
                weight[rows, child] = torch.where(down, entered, weight[rows, child])
                node = torch.where(down, child, node)
            if not bool(judged.any()):
                continue
            kept = flip(torch.where(judged, weight[rows, node], 0.0), generator)
            ended = ended | kept
            if bool(ended.all()):
                break
            failed = judged & ~kept
            parent = tree.parents[rows, node].clamp_min(0)
            rest, left, share = rules.reject(
                target[rows, parent],
                None if draft is None else draft[rows, parent],
                token_at(tree, node),
                weight[rows, parent],
            )
            alive[rows, node] = alive[rows, node] & ~failed
            target[rows, parent] = torch.where(failed[:, None], rest, target[rows, parent])
            if draft is not None and left is not None:
                draft[rows, parent] = torch.where(failed[:, None], left, draft[rows, parent])
            weight[rows, parent] = torch.where(failed, share, weight[rows, parent])
            node = torch.where(failed, parent, node)
        path = path_to(tree, node)
        return Verdict(path=path, num_accepted=(path >= 0).sum(-1), bonus=pick(target[rows, node], generator))
