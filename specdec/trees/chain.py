"""A chain: the drafter's best token, then the best token after that one, and so on."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.ops._checks import require_whole
from specdec.protocols import Drafter
from specdec.trees import topology
from specdec.types import DraftTree, Frontier


@dataclass(frozen=True)
class Chain:
    """Drafts one path of at most `nodes` tokens, greedily.

    Args:
        nodes: tree budget; the length of the chain.

    Raises:
        UnsupportedError: if `nodes` is no whole number from 1 on.

    Example:
        >>> from specdec import trees
        >>> trees.Chain(nodes=4).chain
        True
    """

    nodes: int

    def __post_init__(self) -> None:
        require_whole("Chain", nodes=self.nodes)

    @property
    def sampled(self) -> bool:
        """False: the chain is what the drafter likes best, not a draw."""
        return False

    @property
    def chain(self) -> bool:
        """True: every node has at most one child."""
        return True

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
        """Grows the chain of one round: one drafter call a level, until no row has a proposal left.

        Args:
            drafter: answers with its best token.
            root: last committed token per row.
            limits: longest chain per row; 0 leaves the root alone.
            budget: longest chain of this round; 0 calls no drafter.
            vocab_size: unused.
            generator: unused.
        """
        levels = topology.widest(limits, min(budget, self.nodes))
        if levels < 1:
            return DraftTree.from_root(root)
        frontier = Frontier.from_root(root, valid=limits > 0)
        above = torch.zeros_like(frontier.parents)
        tokens, edges, drafted = [], [], []
        for depth in range(1, levels + 1):
            found = drafter.children(frontier, 1)
            if found.tokens.shape[2] == 0:
                break
            edge = found.log_probs[:, :, 0]
            alive = frontier.valid & (edge > -torch.inf)
            if not topology.widest(alive.sum(-1), 1):
                break
            tokens.append(found.tokens[:, :, 0])
            edges.append(edge)
            drafted.append(alive)
            frontier = Frontier(tokens[-1], above, alive & (depth < limits[:, None]), depth)
        return _assemble(root, tokens, edges, drafted)


def _assemble(
    root: Int[Tensor, " batch"], tokens: list[Tensor], edges: list[Tensor], drafted: list[Tensor]
) -> DraftTree:
    """The tree of columns `[batch, 1]`: tokens, log-probabilities and whether a node exists."""
    tree = DraftTree.from_root(root)
    if not tokens:
        return tree
    exists = torch.cat(drafted, 1)
    scores = torch.cat(edges, 1).clamp_max(0).cumsum(-1, dtype=torch.promote_types(edges[0].dtype, torch.float32))
    above = torch.arange(exists.shape[1], device=root.device)
    return DraftTree(
        tokens=torch.cat([tree.tokens, torch.where(exists, torch.cat(tokens, 1), tree.tokens)], 1),
        parents=torch.cat([tree.parents, torch.where(exists, above, -1)], 1),
        num_nodes=exists.sum(-1) + 1,
        scores=torch.cat([tree.scores, scores.masked_fill(~exists, -torch.inf)], 1),
    )
