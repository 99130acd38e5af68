"""Target-only verification: draw the target's token at a node and follow it while a child carries it.

The tokens are plain draws of the target, so nothing about the tree can bias them: top-k trees, pruned trees, lookups
and hand-made trees are all safe. With one generator the tokens equal plain sampling, seed for seed.

Source: used with deterministic trees throughout the field, e.g. DDTree (arXiv 2604.12989), section on verification.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.trees.topology import child_with_token
from specdec.types import DraftTree, TargetLaw
from specdec.verify.base import StepRule


class TargetOnly(StepRule):
    """Accepts a child iff the target, drawn at its parent, gives the child's token. Lossless for every tree.

    A child with target probability x is accepted with probability x, which is the most that any exact rule can do
    for a deterministic tree. For sampled trees `Rejection` and `TreeRejection` accept more.

    Example:
        >>> from specdec import DraftTree
        >>> from specdec.verify import TargetOnly
        >>> tree = DraftTree.from_root(torch.tensor([0]))
        >>> verdict = TargetOnly()(tree, torch.tensor([[[0.0, 1.0]]]))
        >>> verdict.num_accepted.item(), verdict.bonus.item()
        (0, 1)
    """

    def step(
        self,
        tree: DraftTree,
        node: Int[Tensor, " batch"],
        law: TargetLaw,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """One `law.draw` for the whole batch, and nothing else from `generator`."""
        token = law.draw(generator)
        return token, child_with_token(tree, node, token)
