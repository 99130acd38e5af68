"""What verifiers share: the walk down a tree, the two kinds of chance, and the checks of what they are given.

All chance in this package is one of two decisions: a coin per row (`flip`) or a token per row (`pick`). They are
plain `torch.bernoulli` and `torch.multinomial` calls; `specdec.verify.exact` enumerates exactly these.
"""

import abc

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import StepVerifier, TreeBuilder
from specdec.trees import topology
from specdec.types import DraftTree, TargetLaw, Verdict


class StepRule(abc.ABC):
    """A rule that decides node by node: give it `step` and it verifies whole trees too.

    Optional convenience; any object with the members of `specdec.protocols.StepVerifier` is a verifier.
    """

    lossless: bool = True
    stepwise: bool = True

    def check(self, builder: TreeBuilder) -> None:  # noqa: B027 - most rules fit every builder
        """Accepts every tree builder."""

    @abc.abstractmethod
    def step(
        self,
        tree: DraftTree,
        node: Int[Tensor, " batch"],
        law: TargetLaw,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The token to commit after `node`, and the child that carries it (-1 when the token ends the round)."""

    def __call__(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch nodes vocab"],
        *,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        """Verifies a whole tree by walking it with `step`; see `walk`."""
        return walk(self, tree, target_probs, generator=generator)


def walk(
    verifier: StepVerifier,
    tree: DraftTree,
    target_probs: Float[Tensor, "batch nodes vocab"],
    *,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Walks every row from its root with `verifier.step` until no row has an accepted child.

    One step serves all rows; what it says about rows that have ended is ignored.

    Args:
        verifier: decides at one node of each row.
        tree: the drafted tokens.
        target_probs: the target's probabilities at every node; padding is never read.
        generator: source of randomness; None is torch's default.

    Raises:
        ShapeError: if `target_probs` does not fit the tree.
    """
    check_shapes(tree, target_probs)
    rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    node = torch.zeros_like(tree.num_nodes)
    bonus = torch.zeros_like(tree.num_nodes)
    active = torch.ones_like(node, dtype=torch.bool)
    path = []
    while True:
        probs = target_probs[rows, node]
        scores = (probs if probs.dtype == torch.float64 else probs.to(torch.float32)).log()
        if not bool(active.all()):
            # Ended rows get a law without chance: what is drawn for them means nothing.
            certain = torch.full_like(scores, -torch.inf)
            certain[:, 0] = 0.0
            scores = torch.where(active[:, None], scores, certain)
        token, child = verifier.step(tree, node, TargetLaw(scores=scores, greedy=False), generator=generator)
        onward = active & (child >= 0)
        bonus = torch.where(active & ~onward, token, bonus)
        path.append(torch.where(onward, child, -1))
        node, active = torch.where(onward, child, node), onward
        if not bool(active.any()):
            break
    taken = torch.stack(path[:-1] or path, 1)
    return Verdict(path=taken, num_accepted=(taken >= 0).sum(-1), bonus=bonus)


def flip(chance: Float[Tensor, " batch"], generator: torch.Generator | None) -> Bool[Tensor, " batch"]:
    """One coin per row: True with probability `chance`; never at 0, always at 1."""
    return torch.bernoulli(chance, generator=generator).to(torch.bool)


def pick(weights: Float[Tensor, "batch vocab"], generator: torch.Generator | None) -> Int[Tensor, " batch"]:
    """One index per row with probability proportional to its weight; never an index of weight 0."""
    return torch.multinomial(weights, num_samples=1, generator=generator).squeeze(1)


def token_at(tree: DraftTree, node: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Token of one node per row."""
    return tree.tokens.gather(1, node[:, None]).squeeze(1)


def check_shapes(tree: DraftTree, target_probs: Float[Tensor, "batch nodes vocab"]) -> None:
    """Raises `ShapeError` unless there is one target law per node, over the draft law's vocabulary."""
    expected = tuple(tree.tokens.shape)
    if target_probs.ndim != 3 or tuple(target_probs.shape[:2]) != expected:
        raise ShapeError(
            f"target_probs must be [batch, nodes, vocab] with one law per node of the tree, [{expected[0]}, "
            f"{expected[1]}, vocab], got {list(target_probs.shape)}; pass the target's probabilities of the whole tree."
        )
    check_draft_law(tree, target_probs.shape[2])


def check_draft_law(tree: DraftTree, vocab: int) -> None:
    """Raises `ShapeError` if the tree carries draft laws that are not laws over `vocab` tokens at its nodes."""
    if tree.draft_probs is None:
        return
    expected = [*tree.tokens.shape, vocab]
    if list(tree.draft_probs.shape) != expected:
        raise ShapeError(
            f"tree.draft_probs must have the target's vocabulary, {expected} [batch, nodes, vocab], got "
            f"{list(tree.draft_probs.shape)}; pad or scatter the draft law to the target's token ids before drawing."
        )


def require_chain(tree: DraftTree, rule: str) -> None:
    """Raises `ShapeError` if a node has two children or a chain's nodes are out of order."""
    if not topology.is_chain(tree):
        raise ShapeError(
            f"{rule} verifies chains (node i is the child of node i - 1), got parents {tree.parents.tolist()}; "
            "use TreeRejection or Traversal for sampled trees and TargetOnly for deterministic ones."
        )


def require_chain_builder(builder: TreeBuilder, rule: str) -> None:
    """Raises `UnsupportedError` if a builder may grow anything but chains."""
    if not builder.chain:
        other = "TreeRejection or Traversal" if builder.sampled else "TargetOnly"
        raise UnsupportedError(
            f"{rule} verifies chains, but {type(builder).__name__} grows trees with siblings; use {other} with this "
            f"builder, or grow chains for {rule}."
        )
