"""Confidence scheduling (DSpark, arXiv 2607.05147): verify the nodes that are likely to be reached, while it pays.

All nodes of a batch are taken in the order of their probability to be reached, for as long as the next one raises the
expected tokens per time. The first that does not ends it, even if a later one would. So what is known of a node decides
about those that are likelier, never about a node that it follows. That keeps drawn chains lossless, if what is known of
a node was known before it was drawn: a confidence head tells it (`BlockDrafter.confidence`), a drafter's scores do not.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.control.costs import VerifyCosts
from specdec.control.temperatures import SequentialTemperatures, claims_of, survivals
from specdec.errors import UnsupportedError
from specdec.trees import topology
from specdec.types import DraftTree, Frontier, Round


def admitted(survival: Float[Tensor, "batch nodes"], costs: VerifyCosts) -> Bool[Tensor, "batch nodes"]:
    """Which nodes to verify; the root of each row is among them.

    A verify forward is as wide as its widest row, so a node that does not widen it costs nothing.

    Args:
        survival: probability that the walk reaches each node, node 0 the root; 0 where there is none.
        costs: cost of a forward by its width.

    >>> import torch
    >>> costs = VerifyCosts.from_measurements({1: 1.0, 4: 1.9})
    >>> admitted(torch.tensor([[1.0, 0.8, 0.5, 0.1]]), costs)  # a node costs 0.3 of a plain round
    tensor([[ True,  True,  True, False]])
    """
    batch = survival.shape[0]
    keep = torch.zeros(survival.shape, dtype=torch.bool)
    keep[:, 0] = True
    nodes, expected = [1] * batch, float(batch)
    rate = expected / costs.relative(1)
    drafted = survival[:, 1:].flatten().cpu()
    values, order = drafted.sort(descending=True, stable=True)
    for value, place in zip(values.tolist(), order.tolist(), strict=True):
        row, node = divmod(place, survival.shape[1] - 1)
        width = max(*nodes, nodes[row] + 1)
        better = (expected + value) / costs.relative(width)
        if value <= 0 or better <= rate:
            break
        keep[row, node + 1] = True
        nodes[row] += 1
        expected, rate = expected + value, better
    return keep


Confidence = Callable[[Frontier], Float[Tensor, "batch frontier"]]
"""Probability that the target accepts the child of each node, told without knowing which child that is."""


def told(tree: DraftTree, confidence: Confidence) -> Float[Tensor, "batch nodes"]:
    """What a confidence head says of each node; 1 at the root. Siblings are told the same.

    Args:
        tree: the tree.
        confidence: asked about all nodes at each depth; answers about nodes of other depths are not used.
    """
    depths = topology.depths(tree.parents)
    claims = torch.ones_like(tree.scores)
    for depth in range(int(depths.max())):
        said = confidence(Frontier(tree.tokens, tree.parents, tree.valid & (depths == depth), depth))
        claims = torch.where(depths == depth + 1, said.to(claims).gather(1, tree.parents.clamp_min(0)), claims)
    return claims


class ConfidenceSchedule:
    """Drafts the whole tree and verifies what is worthwhile by its scores, or by what a confidence head says of it.

    Args:
        costs: measured verify costs of the target.
        temperatures: what the claims mean, fitted on rounds; None takes them as they are.
        confidence: `drafter.confidence` of a drafter with a confidence head; None takes the scores for claims.

    Attributes:
        claims: of the last tree that was grown, the probability of each node given its parent, before temperatures;
            None if they were not needed.

    Of sampled trees, chains are cut where a confidence head is asked. All others are verified whole: which drawn nodes
    are verified must not depend on the draws.

    >>> costs = VerifyCosts.from_measurements({1: 0.040, 4: 0.080, 16: 0.128})
    >>> controller = ConfidenceSchedule(costs, SequentialTemperatures((1.5,)))
    >>> controller.start(nodes=15, sampled=False)
    >>> controller.budget()
    15
    """

    def __init__(
        self,
        costs: VerifyCosts,
        temperatures: SequentialTemperatures | None = None,
        *,
        confidence: Confidence | None = None,
    ) -> None:
        for name, given, kind in (
            ("costs", costs, VerifyCosts),
            ("temperatures", temperatures, SequentialTemperatures),
        ):
            if not isinstance(given, kind) and not (name == "temperatures" and given is None):
                raise UnsupportedError(f"{name}= takes {kind.__name__}, got {type(given).__name__}.")
        head: Any = confidence
        if head is not None and not callable(head):
            raise UnsupportedError(
                f"confidence= takes a function such as drafter.confidence, got {type(head).__name__}."
            )
        self.costs = costs
        self.temperatures = temperatures
        self.confidence = confidence
        self.start(nodes=0, sampled=False)

    def __repr__(self) -> str:
        return f"ConfidenceSchedule({self.costs!r}, {self.temperatures!r})"

    def start(self, nodes: int, sampled: bool) -> None:
        """Begins a request with this tree budget."""
        self._nodes, self._sampled = nodes, sampled
        self.claims: Float[Tensor, "batch nodes"] | None = None

    def budget(self) -> int:
        """The whole tree budget, in every round."""
        return self._nodes

    def prune(self, tree: DraftTree) -> DraftTree:
        """The nodes that raise expected tokens per time; the tree itself if they must not be chosen."""
        self.claims = None
        if tree.width == 1 or (self._sampled and (self.confidence is None or not topology.is_chain(tree))):
            return tree
        self.claims = claims_of(tree) if self.confidence is None else told(tree, self.confidence)
        temperatures = (1.0,) if self.temperatures is None else self.temperatures.values
        reached = survivals(self.claims, tree, temperatures)
        return topology.prune(tree, admitted(reached, self.costs).to(tree.tokens.device) & tree.valid)

    def observe(self, round: Round) -> None:
        """Learns nothing: what is learned is fitted beforehand."""
