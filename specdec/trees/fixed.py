"""A tree of a fixed shape filled with the drafter's best tokens (Medusa, arXiv 2401.10774; Sequoia, arXiv 2402.12374).

The shape is chosen beforehand, from measured acceptance by rank and depth. It costs one gather a level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.protocols import Drafter
from specdec.trees import _shape, topology
from specdec.types import DraftTree, Frontier


@dataclass(frozen=True)
class Fixed:
    """Drafts the same ranks in every round.

    Args:
        choices: one tuple of ranks per node, such as `(0, 1)` for the second-best child of the best child, in order
            of worth: a smaller budget keeps the first ones (a parent counts from its first descendant on).

    Raises:
        UnsupportedError: for an empty set, a repeated path, a negative rank or a node whose parent is missing.

    Example:
        >>> from specdec import trees
        >>> trees.Fixed(choices=[(0,), (1,), (0, 0)]).nodes
        3
    """

    choices: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", _shape.checked("Fixed", self.choices))

    @property
    def nodes(self) -> int:
        """Tree budget: the number of choices."""
        return len(self.choices)

    @property
    def sampled(self) -> bool:
        """False: the tree holds what the drafter likes best, not a draw."""
        return False

    @property
    def chain(self) -> bool:
        """Whether every node has at most one child."""
        return _shape.is_chain(self._choices)

    @property
    def _choices(self) -> _shape.Choices:
        return self.choices  # type: ignore[return-value]  # checked() has made tuples of it

    def grow(
        self,
        drafter: Drafter,
        root: Int[Tensor, " batch"],
        limits: Int[Tensor, " batch"],
        budget: int,
        *,
        vocab_size: int,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """Grows the tree of one round; choices the drafter has no proposal for are left out with their descendants.

        Args:
            drafter: answers with as many proposals per node as the level has ranks.
            root: last committed token per row.
            limits: deepest node per row; 0 leaves the root alone.
            budget: how many choices to keep; 0 calls no drafter.
            vocab_size: unused.
            generator: unused; nothing is drawn.
        """
        if budget < 1 or not topology.widest(limits, 1):
            return DraftTree.from_root(root)

        def propose(frontier: Frontier, level: _shape.Level) -> tuple[Tensor, Tensor]:
            found = drafter.children(frontier, level.count)
            return found.tokens, found.log_probs

        shape = _shape.plan(self._choices[:budget], root.device)
        return _shape.compact(*_shape.grow(shape, root, limits, propose))
