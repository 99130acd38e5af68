"""How often drafted tokens are really accepted, given what the drafter said about them.

A drafter's log-probabilities rank nodes well and are often far off as probabilities. So each *edge* (a node, given
that its parent was accepted) is looked up in a table of outcomes by depth and predicted probability. A cell starts
from the other depths of its column, and a column starts from a prior: a Beta prior at each step. Depth matters on its
own account: a lookup that is right once tends to stay right.

The value of a node is the product of the edges on its path: the probability that it is accepted.
"""

import bisect
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.trees import topology
from specdec.types import DraftTree

_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_DEPTHS = (1, 2, 4, 8)  # last depth of each class; deeper nodes form one more
_COLUMNS = len(_BOUNDS) + 1
_CELLS = (len(_DEPTHS) + 1) * _COLUMNS
_TRUST = 2.0  # outcomes that a prior counts for
_FADE = 0.99  # weight of older outcomes, per batch of new ones
_LEAST = 1e-12  # keeps logarithms finite
_DEEPER = 1e-12  # relative loss of value per level: rounding must not lift a node above its parent


class Outcome(NamedTuple):
    """What became of a drafted node whose parent was accepted.

    Attributes:
        depth: depth of the node, from 1 on.
        predicted: the drafter's probability of the node, given its parent.
        accepted: whether it was accepted.
    """

    depth: int
    predicted: float
    accepted: bool


class Assessment(NamedTuple):
    """What a drafted tree is worth.

    Attributes:
        values: probability that each node is accepted; 1 at the root, 0 on padding.
        floors: the same in a cautious view: nothing is accepted until outcomes say so.
        hopes: the same in a hopeful view: everything is accepted until outcomes say no.
        predicted: the drafter's probability of each node, given its parent.
    """

    values: Float[Tensor, "batch nodes"]
    floors: Float[Tensor, "batch nodes"]
    hopes: Float[Tensor, "batch nodes"]
    predicted: Float[Tensor, "batch nodes"]


class Calibration:
    """A table of acceptance outcomes by depth and predicted probability; old outcomes fade.

    >>> calibration = Calibration()
    >>> calibration.edge(1, 0.9, prior=0.9)
    0.9
    >>> calibration.add([Outcome(depth=1, predicted=0.9, accepted=False)] * 4)  # the drafter is sure, and wrong
    >>> round(calibration.edge(1, 0.9, prior=0.9), 3)
    0.3
    """

    def __init__(self) -> None:
        self._hits = [0.0] * _CELLS
        self._trials = [0.0] * _CELLS
        self._update()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Adds a batch of outcomes."""
        cells = [(_cell(depth, predicted), accepted) for depth, predicted, accepted in outcomes]
        if not cells:
            return
        self._hits = [_FADE * hits for hits in self._hits]
        self._trials = [_FADE * trials for trials in self._trials]
        for cell, accepted in cells:
            self._hits[cell] += accepted
            self._trials[cell] += 1.0
        self._update()

    def _update(self) -> None:
        """Writes each cell's posterior mean as `base + slope * prior`."""
        base, slope = [], []
        for cell, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            column = slice(cell % _COLUMNS, None, _COLUMNS)
            strength = _TRUST + sum(self._trials[column]) - trials
            base.append((hits + _TRUST * (sum(self._hits[column]) - hits) / strength) / (_TRUST + trials))
            slope.append(_TRUST * _TRUST / strength / (_TRUST + trials))
        self._line = torch.tensor([base, slope], dtype=torch.float64)

    def edge(self, depth: int, predicted: float, *, prior: float) -> float:
        """Probability that a node is accepted, given that its parent is.

        Args:
            depth: depth of the node, from 1 on.
            predicted: the drafter's probability of the node, given its parent.
            prior: what to believe of it before any outcome was seen: the prediction, 0 in a cautious view, 1 in a
                hopeful one.
        """
        base, slope = self._line[:, _cell(depth, predicted)].tolist()
        return float(base + slope * prior)

    def assess(self, tree: DraftTree) -> Assessment:
        """Values of all nodes of a deterministic tree that lies on the CPU."""
        ancestry = topology.ancestor_matrix(tree.parents)
        depth = ancestry.sum(-1) - 1
        valid = tree.valid
        scores = tree.scores.double().masked_fill(~valid, 0.0)
        predicted = (scores - scores.gather(1, tree.parents.clamp_min(0))).clamp(-30.0, 0.0).exp()
        cell = torch.bucketize(depth, torch.tensor(_DEPTHS)) * _COLUMNS
        cell = cell + torch.bucketize(predicted, torch.tensor(_BOUNDS, dtype=torch.float64))
        base, slope = self._line[:, cell]
        edges = torch.stack([base + slope * predicted, base, base + slope], -1).clamp_min(_LEAST)
        edges = edges.masked_fill((depth == 0)[:, :, None], 1.0)
        views = (ancestry.double() @ edges.log() - _DEEPER * depth[:, :, None]).exp() * valid[:, :, None]
        return Assessment(views[..., 0], views[..., 1], views[..., 2], predicted)

    def table(self) -> list[tuple[str, float, float]]:
        """For each predicted range with outcomes: its name, the outcomes (faded), and the share accepted."""
        rows = []
        for column, (low, high) in enumerate(itertools.pairwise((0.0, *_BOUNDS, 1.0))):
            trials = sum(self._trials[column::_COLUMNS])
            if trials > 0:
                rows.append((f"{low:.2f}-{high:.2f}", trials, sum(self._hits[column::_COLUMNS]) / trials))
        return rows


def _cell(depth: int, predicted: float) -> int:
    return bisect.bisect_left(_DEPTHS, depth) * _COLUMNS + bisect.bisect_left(_BOUNDS, predicted)
