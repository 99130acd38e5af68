"""How often drafted tokens are really accepted, given what the drafter said about them.

A drafter's log-probabilities rank nodes well and are often far off as probabilities. So each *edge* (a node, given
that its parent was accepted) is looked up in a table of outcomes by depth and predicted probability. A cell starts
from its column (the same prediction at other depths), and a column starts from the prediction itself: a Beta prior at
each step. Depth matters on its own account: a lookup that is right once tends to stay right.

The value of a node is the product of the calibrated edges on its path: the probability that it is accepted.

Outcomes are read from the committed tokens and not from what was verified. A `Trail` keeps following a drafted tree
over later rounds, so nodes that were never verified are judged too, at no cost.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.trees import topology
from specdec.types import DraftTree

_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_DEPTHS = (1, 2, 4, 8)  # last depth of each class; deeper nodes form one more
_FADE = 0.99  # weight of older outcomes, per batch of new ones
_TRUST = 2.0  # outcomes that a prior counts for

Outcome = tuple[int, float, bool]
"""Depth of a node whose parent was accepted, the probability predicted for it, and whether it was accepted."""


class Assessment(NamedTuple):
    """What a drafted tree is worth.

    Attributes:
        values: probability that each node is accepted; 1 at the root, 0 on padding.
        floors: the same in a cautious view: nothing is accepted until outcomes say so.
        hopes: the same in a hopeful view: everything is accepted until outcomes say no.
        predicted: the drafter's conditional probability of each node.
    """

    values: Float[Tensor, "batch nodes"]
    floors: Float[Tensor, "batch nodes"]
    hopes: Float[Tensor, "batch nodes"]
    predicted: Float[Tensor, "batch nodes"]


class Calibration:
    """A table of acceptance outcomes by depth and predicted probability; old outcomes fade.

    >>> calibration = Calibration()
    >>> calibration.add([(1, 0.9, False)] * 20)  # the drafter is sure and always wrong
    >>> said = torch.tensor([0.9])
    >>> calibration.edges(said, torch.tensor([1]), prior=said).item() < 0.1
    True
    """

    def __init__(self) -> None:
        columns, rows = len(_BOUNDS) + 1, len(_DEPTHS) + 1
        self._hits = [[0.0] * columns for _ in range(rows)]
        self._trials = [[0.0] * columns for _ in range(rows)]

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Adds a batch of outcomes."""
        outcomes = list(outcomes)
        if not outcomes:
            return
        self._hits = [[_FADE * cell for cell in row] for row in self._hits]
        self._trials = [[_FADE * cell for cell in row] for row in self._trials]
        for depth, predicted, accepted in outcomes:
            row, column = bisect.bisect_left(_DEPTHS, depth), bisect.bisect_left(_BOUNDS, predicted)
            self._hits[row][column] += accepted
            self._trials[row][column] += 1.0

    def edges(
        self, predicted: Float[Tensor, "*shape"], depth: Int[Tensor, "*shape"], prior: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """Probability that a node at this depth is accepted, given that its parent is.

        Args:
            predicted: the drafter's conditional probability of each node.
            depth: depth of each node, from 1 on.
            prior: what to believe of each node before any outcome was seen: the prediction itself, 0 for a cautious
                view, 1 for a hopeful one.
        """
        dtype = predicted.dtype
        hits, trials = torch.tensor(self._hits, dtype=dtype), torch.tensor(self._trials, dtype=dtype)
        column = torch.bucketize(predicted, torch.tensor(_BOUNDS, dtype=dtype))
        cell = torch.bucketize(depth, torch.tensor(_DEPTHS)) * hits.shape[1] + column
        here_hits, here_trials = hits.flatten()[cell], trials.flatten()[cell]
        elsewhere = (_TRUST * prior + hits.sum(0)[column] - here_hits) / (
            _TRUST + trials.sum(0)[column] - here_trials
        )
        return (_TRUST * elsewhere + here_hits) / (_TRUST + here_trials)

    def assess(self, tree: DraftTree) -> "Assessment":
        """Values of all nodes of a deterministic tree that lies on the CPU."""
        parents = tree.parents.clamp_min(0)
        ancestry = topology.ancestor_matrix(tree.parents)
        depth = ancestry.sum(-1) - 1
        scores = torch.where(tree.valid, tree.scores, 0.0).double()
        predicted = (scores - scores.gather(1, parents)).clamp(-30.0, 0.0).exp()

        def along_paths(prior: Tensor) -> Tensor:
            edges = torch.where(depth > 0, self.edges(predicted, depth, prior), 1.0)
            paths = (ancestry.double() @ edges.clamp_min(1e-30).log()[:, :, None]).squeeze(-1)
            return torch.where(tree.valid, paths.exp(), 0.0)

        return Assessment(
            values=along_paths(predicted),
            floors=along_paths(torch.zeros_like(predicted)),
            hopes=along_paths(torch.ones_like(predicted)),
            predicted=predicted,
        )

    def table(self) -> list[tuple[str, float, float]]:
        """For each predicted range with outcomes: its name, the outcomes (faded), and the share accepted."""
        bounds = (0.0, *_BOUNDS, 1.0)
        rows = []
        for column, (low, high) in enumerate(itertools.pairwise(bounds)):
            hits = sum(row[column] for row in self._hits)
            trials = sum(row[column] for row in self._trials)
            if trials > 0:
                rows.append((f"{low:.2f}-{high:.2f}", trials, hits / trials))
        return rows


class Trail:
    """One row's drafted tree, followed by committed tokens until they leave it.

    Args:
        tokens: token id of each node in use.
        parents: parent of each node.
        predicted: the drafter's conditional probability of each node.

    >>> trail = Trail([5, 8, 9], [-1, 0, 1], [1.0, 0.5, 0.25])
    >>> trail.follow([8]), trail.alive
    ([(1, 0.5, True)], True)
    >>> trail.follow([7, 7]), trail.alive
    ([(2, 0.25, False)], False)
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[float]) -> None:
        self._tokens = tokens
        self._predicted = predicted
        self._children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            self._children.setdefault(parents[node], []).append(node)
        self._node, self._depth = 0, 0

    @property
    def alive(self) -> bool:
        """Whether the committed tokens are still inside the tree, with nodes below."""
        return self._node in self._children

    def follow(self, tokens: Sequence[int]) -> list[Outcome]:
        """Walks down by committed tokens; returns one outcome for each node whose fate they decide."""
        outcomes = []
        for token in tokens:
            children = self._children.get(self._node, ())
            self._node, self._depth = -1, self._depth + 1
            for child in children:
                accepted = self._tokens[child] == token
                outcomes.append((self._depth, self._predicted[child], accepted))
                if accepted:
                    self._node = child
            if self._node < 0:
                break
        return outcomes
