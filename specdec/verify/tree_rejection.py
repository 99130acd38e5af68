"""Recursive rejection: try the children of a node in the order they were drawn, each against what is left.

Exact because each trial serves its part of the target: a child is kept with probability min(1, target / draft), which
hands out min(target, draft) in total; what the target still needs is max(target - draft, 0). The same game goes on
with that as the target, and with the draft law without the failed child: the law the next sibling was drawn from.

Sources: recursive rejection without replacement (arXiv 2402.14160), Sequoia (2402.12374); SpecInfer (2305.09781) is
the same with independent draws.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.types import DraftTree, TargetLaw
from specdec.verify import rules
from specdec.verify.base import StepRule, check_draft_law, flip, pick, token_at


class TreeRejection(StepRule):
    """Recursive rejection without replacement, for sampled trees. Lossless.

    Needs that the number of children of a node was fixed before any of them was drawn; deeper nodes may be drawn
    or not by the values of nodes already drawn. On a deterministic tree the law is that of `TargetOnly`.

    A child outside the draft law (the law is used up, or the node's law is all zero) counts as certain, which is
    exact however it was chosen.

    Example:
        >>> from specdec import DraftTree
        >>> from specdec.verify import TreeRejection
        >>> tree = DraftTree(
        ...     tokens=torch.tensor([[0, 1, 0]]), parents=torch.tensor([[-1, 0, 0]]), num_nodes=torch.tensor([3]),
        ...     scores=torch.tensor([[0.0, -0.7, -0.7]]), draft_probs=torch.full((1, 3, 2), 0.5),
        ... )
        >>> TreeRejection()(tree, torch.tensor([[[1.0, 0.0]] * 3])).path.tolist()  # the second child is right
        [[2]]
    """

    def step(
        self,
        tree: DraftTree,
        node: Int[Tensor, " batch"],
        law: TargetLaw,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """At most one coin per child, and one draw if some row keeps none."""
        return try_children(tree, node, law, generator=generator)


def try_children(
    tree: DraftTree, node: Int[Tensor, " batch"], law: TargetLaw, *, generator: torch.Generator | None
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Recursive rejection at one node of each row: the token to commit and the child that carries it, or -1.

    Raises:
        ShapeError: if the tree's draft laws are not over the target's vocabulary.
    """
    target = rules.law(law.probs)
    check_draft_law(tree, target.shape[1])
    rows = torch.arange(node.shape[0], device=node.device)
    draft = None if tree.draft_probs is None else rules.law(tree.draft_probs[rows, node])
    below = tree.parents == node[:, None]
    rank = below.cumsum(-1)
    taken = torch.full_like(node, -1)
    for trial in range(1, int(rank[:, -1].max()) + 1):
        exists, child = (below & (rank == trial)).max(-1)
        token = token_at(tree, child)
        judged = exists & (taken < 0)
        chance = rules.acceptance(
            rules.at(target, token), None if draft is None else rules.at(draft, token), torch.ones_like(target[:, 0])
        )
        kept = flip(torch.where(judged, chance, 0.0), generator)
        taken = torch.where(kept, child, taken)
        # Reading the coins costs one synchronisation and saves vocabulary-sized work when nothing was rejected.
        failed = judged & ~kept
        if not bool(failed.any()):
            continue
        rest, left, _ = rules.reject(target, draft, token, torch.ones_like(target[:, 0]))
        target = torch.where(failed[:, None], rest, target)
        if draft is not None and left is not None:
            draft = torch.where(failed[:, None], left, draft)
    accepted = taken >= 0
    token = token_at(tree, taken.clamp_min(0))
    if not bool(accepted.all()):
        token = torch.where(accepted, token, pick(target, generator))
    return token, taken
