"""Speculative sampling on a chain: keep a drafted token with probability min(1, target / draft).

Sources: arXiv 2211.17192 and 2302.01318. It is `TreeRejection` with at most one child per node, and shares its code.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.protocols import TreeBuilder
from specdec.types import DraftTree, TargetLaw
from specdec.verify.base import StepRule, require_chain, require_chain_builder
from specdec.verify.tree_rejection import try_children


class Rejection(StepRule):
    """Standard speculative sampling, for chains. Lossless.

    A sampled token is accepted with probability sum(min(target, draft)) on average. On a deterministic chain the law
    is that of `TargetOnly`.

    Example:
        >>> from specdec import DraftTree
        >>> from specdec.verify import Rejection
        >>> chain = DraftTree(
        ...     tokens=torch.tensor([[0, 1]]), parents=torch.tensor([[-1, 0]]), num_nodes=torch.tensor([2]),
        ...     scores=torch.tensor([[0.0, -0.7]]), draft_probs=torch.full((1, 2, 2), 0.5),
        ... )
        >>> verdict = Rejection()(chain, torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
        >>> verdict.path.tolist(), verdict.bonus.item()
        ([[1]], 0)
    """

    def check(self, builder: TreeBuilder) -> None:
        """Raises `UnsupportedError` unless every tree of `builder` is a chain."""
        require_chain_builder(builder, "Rejection")

    def step(
        self,
        tree: DraftTree,
        node: Int[Tensor, " batch"],
        law: TargetLaw,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """At most one coin per row, and one draw if some row needs it.

        Raises:
            ShapeError: if the tree is not a chain, or its draft laws are not over the target's vocabulary.
        """
        require_chain(tree, "Rejection")
        return try_children(tree, node, law, generator=generator)
