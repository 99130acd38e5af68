"""Typical acceptance: keep what the target finds likely enough. Lossy.

A child is kept when its target probability exceeds min(epsilon, delta x exp(-entropy)): a fixed bar where the target
is sure, a lower one where it hesitates. The output is no longer a draw of the target, by design: tokens above the bar
come as often as the drafter proposes them.

Source: Medusa (arXiv 2401.10774), section on typical acceptance.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.trees.topology import child_with_token
from specdec.types import DraftTree, TargetLaw
from specdec.verify import rules
from specdec.verify.base import StepRule, token_at


class Typical(StepRule):
    """Typical acceptance, for any tree. **Lossy**: the output law is not the target's, unless the request is greedy.

    Of the children above the bar the target's favourite is taken, the first among equals. Where no child is above it,
    the target's token is drawn, and followed if a child carries it.

    Args:
        epsilon: highest bar; in (0, 1).
        delta: factor of exp(-entropy), the entropy in nats; positive.

    Raises:
        UnsupportedError: for values outside these ranges.

    Example:
        >>> from specdec import DraftTree
        >>> from specdec.verify import Typical
        >>> tree = DraftTree(
        ...     tokens=torch.tensor([[0, 1]]), parents=torch.tensor([[-1, 0]]), num_nodes=torch.tensor([2]),
        ...     scores=torch.tensor([[0.0, -0.7]]),
        ... )
        >>> Typical()(tree, torch.tensor([[[0.8, 0.2]] * 2])).path.tolist()  # 0.2 > min(0.09, ...): always kept
        [[1]]
    """

    lossless: bool = False

    def __init__(self, *, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0.0 < epsilon < 1.0 or not delta > 0.0:
            raise UnsupportedError(f"epsilon must lie in (0, 1) and delta above 0, got {epsilon=}, {delta=}.")
        self.epsilon = epsilon
        self.delta = delta

    def step(
        self,
        tree: DraftTree,
        node: Int[Tensor, " batch"],
        law: TargetLaw,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """One draw if some row has no child above the bar, else none."""
        probs = rules.law(law.probs)
        entropy = torch.special.entr(probs).sum(-1, keepdim=True)
        bar = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        below = tree.parents == node[:, None]
        on_child = probs.gather(1, tree.tokens)
        likely = below & (on_child > bar)
        child = torch.where(likely, on_child, -1.0).argmax(-1)
        found = likely.any(-1)
        if bool(found.all()):
            return token_at(tree, child), child
        drawn = law.draw(generator)
        return (
            torch.where(found, token_at(tree, child), drawn),
            torch.where(found, child, child_with_token(tree, node, drawn)),
        )
