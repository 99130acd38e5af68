"""Sequential temperature scaling (DSpark, arXiv 2607.05147): a drafter's claims, made to mean what they say.

A drafter gives each token a probability given the path before it. Whether a path survives is the product of these, so
errors add up along it. One temperature per depth is fitted from the root on: each makes the product up to its depth as
well calibrated as it can be, given those before it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.trees import topology
from specdec.types import DraftTree, Round

GRID = tuple(math.exp(step * math.log(8) / 24) for step in range(-24, 25))
"""Temperatures that are tried: an eighth to eight."""

BINS = 10
"""Equal parts of the probabilities over which calibration errors are averaged."""


@dataclass(frozen=True, slots=True)
class SequentialTemperatures:
    """A temperature for each depth; deeper nodes have that of the last one.

    Attributes:
        values: temperatures from depth 1 on; above 1 for a drafter that claims too much.

    Raises:
        UnsupportedError: unless there is one at least, and all are above 0.

    >>> import torch
    >>> scaled = SequentialTemperatures((1.0, 2.0))
    >>> scaled.apply(torch.tensor([0.9, 0.9]), torch.tensor([1, 2]))
    tensor([0.9000, 0.7500])
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(0 < value < math.inf for value in self.values):
            raise UnsupportedError(f"temperatures must be above 0, one for a depth at least; got {self.values}.")

    def apply(self, claims: Float[Tensor, "*nodes"], depths: Int[Tensor, "*nodes"]) -> Float[Tensor, "*nodes"]:
        """The probabilities that claims stand for.

        Args:
            claims: probability of a token given the path before it.
            depths: its depth, 1 for children of the root; at the root itself anything.
        """
        values = torch.tensor(self.values, dtype=claims.dtype, device=claims.device)
        temperature = values[(depths - 1).clamp(0, len(self.values) - 1)]
        return (claims.logit() / temperature).sigmoid()

    @staticmethod
    def fit(
        claims: Float[Tensor, "drafts depth"], accepted: Int[Tensor, " drafts"], *, drafted: Int[Tensor, " drafts"]
    ) -> "SequentialTemperatures":
        """Fits temperatures to chains whose fate is known.

        Args:
            claims: probability of each token given the path before it; anything where nothing was drafted.
            accepted: how many tokens of each chain the target accepted.
            drafted: how many it had.

        Raises:
            ShapeError: if there is nothing to fit, or more accepted than drafted.
        """
        if claims.numel() == 0 or bool((accepted > drafted).any()):
            raise ShapeError(f"fit: expected drafted chains, none with more accepted than drafted; got {claims.shape}.")
        survival, found = torch.ones(len(claims), dtype=torch.float64), list[float]()
        odds = claims.to(torch.float64).logit()
        for place in range(claims.shape[1]):
            there = drafted > place
            if not bool(there.any()):
                break
            alive = (accepted > place)[there].to(torch.float64)
            tried = [survival * (odds[:, place] / temperature).sigmoid() for temperature in GRID]
            errors = [calibration_error(each[there], alive) for each in tried]
            best = min(range(len(GRID)), key=lambda index: (errors[index], abs(math.log(GRID[index]))))
            found.append(GRID[best])
            survival = torch.where(there, tried[best], survival)
        return SequentialTemperatures(tuple(found))

    @staticmethod
    def from_rounds(rounds: Iterable[Round]) -> "SequentialTemperatures":
        """Fits temperatures to rounds whose trees were chains, live or replayed (`specdec.evaluate`).

        Raises:
            UnsupportedError: for a tree that is no chain, or if nothing was drafted.
        """
        claims, accepted = list[list[float]](), list[int]()
        for round in rounds:
            tree = round.tree
            if not topology.is_chain(tree):
                raise UnsupportedError("temperatures are fitted to chains; replay the recording with trees.Chain.")
            counts = zip(
                tree.num_nodes.tolist(), round.num_committed.tolist(), round.num_accepted.tolist(), strict=True
            )
            for row, (nodes, committed, taken) in enumerate(counts):
                if committed and nodes > 1:
                    claims.append(tree.scores[row, :nodes].diff().exp().tolist())
                    # A stop may have cut the walk short; what lies behind it was not judged.
                    accepted.append(taken)
                    claims[-1] = claims[-1] if committed > taken else claims[-1][:taken]
        kept = [(chain, taken) for chain, taken in zip(claims, accepted, strict=True) if chain]
        if not kept:
            raise UnsupportedError("from_rounds: nothing was drafted in these rounds.")
        depth = max(len(chain) for chain, _ in kept)
        padded = torch.tensor([[*chain, *[0.5] * (depth - len(chain))] for chain, _ in kept])
        drafted = torch.tensor([len(chain) for chain, _ in kept])
        return SequentialTemperatures.fit(padded, torch.tensor([taken for _, taken in kept]), drafted=drafted)


def calibration_error(claims: Float[Tensor, " drafts"], outcomes: Float[Tensor, " drafts"]) -> float:
    """Mean distance between what was claimed and what came, over bins of claims, each by its share of them."""
    place = (claims * BINS).long().clamp(0, BINS - 1)
    sums = torch.zeros(BINS, dtype=torch.float64).scatter_add(0, place, claims - outcomes)
    return float(sums.abs().sum() / len(claims))


def claims_of(tree: DraftTree) -> Float[Tensor, "batch nodes"]:
    """Probability of each node's token given the path before it, as the drafter claims; anything at the root."""
    above = tree.scores.gather(1, tree.parents.clamp_min(0))
    return (tree.scores - above).exp().clamp(max=1.0).nan_to_num(0.0)


def survivals(
    claims: Float[Tensor, "batch nodes"], tree: DraftTree, temperatures: Sequence[float]
) -> Float[Tensor, "batch nodes"]:
    """Probability that the walk reaches each node, from claims about each step; 1 at the root, 0 on padding."""
    scaled = SequentialTemperatures(tuple(temperatures)).apply(claims, topology.depths(tree.parents))
    steps = scaled.log().masked_fill(tree.parents < 0, 0.0)  # nothing has to happen to be at the root
    path = topology.ancestor_matrix(tree.parents)
    along = torch.where(path, steps[:, None], 0.0).sum(-1).exp()
    along = torch.where(path, along[:, None], 1.0).amin(-1)  # rounding must not lift a node above its parent
    return along.masked_fill(~tree.valid, 0.0)
