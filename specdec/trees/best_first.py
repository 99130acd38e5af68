"""Best-first growth: the tree of the most likely root paths, grown level by level.

The score of a node is the drafter's log-probability of its root path. Scores never rise with depth, so the best
`nodes` nodes of the whole lattice are closed under parents, and a heap that pops the best node first finds exactly
these. They can be found without the heap: keep the best nodes of each level, then the best of all levels. That form
has one drafter call and a fixed number of tensor operations a level, is batched, and needs no host reads.

Ties go to the lower depth, then to the lower parent (the better one, recursively), then to the lower rank.

Parameter choices give the trees of DDTree (arXiv 2604.12989: product of marginals, `branch=None`), of a lattice drafter
such as DFlash 2 (conditional edges), and of EAGLE-2 (arXiv 2406.16858): `width=k, branch=k, depth=d` expands the k best
nodes of each level and then reranks everything that was proposed.
"""

from dataclasses import KW_ONLY, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.ops._checks import require_positive, require_whole
from specdec.protocols import Drafter
from specdec.trees import topology
from specdec.types import DraftTree, Frontier


@dataclass(frozen=True)
class BestFirst:
    """Drafts the `nodes` most likely root paths under the drafter's law.

    Args:
        nodes: tree budget, root excluded.
        temperature: tree temperature, see `tempered`; above 1 widens the tree, below 1 deepens it.
        branch: most children of a node; None leaves it to the budget.
        depth: most levels; None leaves it to the budget. An autoregressive drafter runs one forward a level.
        width: most nodes of a level that are expanded; None expands every node that is still among the best. Nodes
            that are not expanded can still be part of the tree, as leaves.

    Raises:
        UnsupportedError: if an option is not above zero.

    Example:
        >>> from specdec import trees
        >>> trees.BestFirst(nodes=15, temperature=1.25)
        BestFirst(nodes=15, temperature=1.25, branch=None, depth=None, width=None)
        >>> eagle2 = trees.BestFirst(nodes=59, branch=10, width=10, depth=6)
    """

    nodes: int
    temperature: float = 1.0
    _: KW_ONLY
    branch: int | None = None
    depth: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        bounds = {"branch": self.branch, "depth": self.depth, "width": self.width}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        require_whole("BestFirst", nodes=self.nodes, **given)
        require_positive("BestFirst", temperature=self.temperature)

    @property
    def sampled(self) -> bool:
        """False: the tree is what the drafter likes best, not a draw."""
        return False

    @property
    def chain(self) -> bool:
        """Whether every tree is a chain."""
        return 1 in (self.nodes, self.branch)

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
        """Grows the tree of one round, depth-first numbered with the drafter's favourite path first.

        Args:
            drafter: answers which tokens may follow, level by level.
            root: last committed token per row.
            limits: deepest node per row; 0 leaves the root alone.
            budget: most nodes of this round, root excluded; 0 calls no drafter.
            vocab_size: no node is asked for more children.
            generator: unused; nothing is drawn.
        """
        budget = min(budget, self.nodes)
        levels = topology.widest(limits, min(budget, self.depth or budget))
        if levels < 1:
            return DraftTree.from_root(root)
        shortest = topology.narrowest(limits)
        most = min(self.branch or self.nodes, vocab_size)
        frontier = Frontier.from_root(root, valid=limits > 0)
        above = torch.zeros(frontier.tokens.shape, device=root.device)
        store = _Store(root)
        best = above[:, :0]  # scores of the best drafted nodes so far, in falling order
        for depth in range(1, levels + 1):
            # A node of this depth has depth - 1 drafted ancestors, each before it in the order of scores.
            room = budget - depth + 1
            found = drafter.children(frontier, most if self.temperature != 1 else min(most, room))
            ranks = found.tokens.shape[2]
            if ranks == 0:
                break
            edges = tempered(found.log_probs, self.temperature)
            paths = (above.unsqueeze(-1) + edges).masked_fill(~frontier.valid.unsqueeze(-1), -torch.inf)
            scores, order = paths.flatten(1).sort(dim=-1, descending=True, stable=True)
            scores, order = scores[:, :room], order[:, :room]
            earlier = best.shape[1]
            best, place = torch.cat([best, scores], 1).sort(dim=-1, descending=True, stable=True)
            best, place = best[:, :budget], place[:, :budget]
            alive = ((place >= earlier) & (best > -torch.inf)).sum(-1)
            wide = topology.widest(alive, scores.shape[1])
            if wide == 0:
                break
            order = order[:, :wide]
            tokens = found.tokens.flatten(1).gather(1, order)
            parents = order // ranks
            store.add(tokens, parents, scores[:, :wide])
            if depth == levels:
                break
            if depth >= shortest:
                alive = alive * (limits > depth)
                wide = topology.widest(alive, wide)
                if wide == 0:
                    break
            wide = min(wide, self.width or wide)
            valid = torch.arange(wide, device=root.device) < alive[:, None]
            frontier = Frontier(tokens[:, :wide], parents[:, :wide], valid, depth)
            above = scores[:, :wide]
        return store.tree(budget)


def tempered(
    log_probs: Float[Tensor, "batch frontier rank"], temperature: float
) -> Float[Tensor, "batch frontier rank"]:
    """Log-probabilities of the candidates of each node at a tree temperature, never above 0.

    The candidates share their own total mass anew, in proportion to `exp(log_probs / temperature)`: their order and
    their total are kept, only the contrast between siblings changes. (Scaling whole path scores would change no order
    of a product law, and letting the mass grow would favour deep nodes of a drafter that is unsure.) At 1 the
    log-probabilities are returned as they are. Which nodes are drafted depends on this; the target's law never does,
    since the tree stays deterministic.

    Example:
        >>> import torch
        >>> from specdec import trees
        >>> trees.tempered(torch.tensor([[[0.64, 0.16, 0.0]]]).log(), temperature=2.0).exp().round(decimals=4)
        tensor([[[0.5333, 0.2667, 0.0000]]])
    """
    if temperature == 1:
        return log_probs.clamp_max(0)
    scores = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    mass = scores[..., :1] - scores.log_softmax(-1)[..., :1]
    shared = (scores / temperature).log_softmax(-1) + mass
    # Without any proposal both lines give NaN.
    return shared.masked_fill(scores == -torch.inf, -torch.inf).clamp_max(0)


class _Store:
    """The nodes found so far, level after level; parents are counted within the level above."""

    def __init__(self, root: Int[Tensor, " batch"]) -> None:
        self._root = DraftTree.from_root(root)
        self._tokens = [self._root.tokens]
        self._parents = [self._root.parents]
        self._scores = [self._root.scores]
        self._start = 0  # index of the first node of the newest level
        self._end = 1

    def add(
        self, tokens: Int[Tensor, "batch wide"], parents: Int[Tensor, "batch wide"], scores: Float[Tensor, "batch wide"]
    ) -> None:
        """Appends a level."""
        self._tokens.append(tokens)
        self._parents.append(parents + self._start)
        self._scores.append(scores)
        self._start, self._end = self._end, self._end + tokens.shape[1]

    def tree(self, budget: int) -> DraftTree:
        """The root and the best `budget` nodes; levels stand in order, so a stable sort breaks ties by depth."""
        if self._end == 1:
            return self._root
        scores, order = torch.cat(self._scores, 1).sort(dim=-1, descending=True, stable=True)
        counts = (scores[:, : budget + 1] > -torch.inf).sum(-1)
        found = DraftTree(
            tokens=torch.cat(self._tokens, 1),
            parents=torch.cat(self._parents, 1),
            num_nodes=counts,
            scores=torch.cat(self._scores, 1),
        )
        kept = order[:, : topology.widest(counts, min(budget + 1, self._end))]
        return topology.dfs_order(topology.take(found, kept, counts))
