"""Does a verifier keep the laws of `specdec.protocols.Verifier`?

Losslessness is summed up exactly over a vocabulary of three, with every outcome of every coin (`verify.exact`): on
chains and trees, chosen and drawn, for as many of them as the verifier accepts.
"""

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import LawError, UnsupportedError
from specdec.protocols import StepVerifier, TreeBuilder, Verifier
from specdec.trees import Chain, Fixed, Sampled, sampled_chain, topology
from specdec.types import DraftTree, TargetLaw, Verdict
from specdec.verify import exact, walk

_VOCAB = 3
# Where the draft's favourite is rejected, the target still needs both other tokens: with one of them alone, rules that
# confuse what is left would go unnoticed.
_TARGET = (0.5, 0.4, 0.1)
_DRAFT = (0.15, 0.25, 0.6)
_CLOSE = 1e-6  # room for float32 in a verifier; a wrong rule errs by 1e-3 and more

Law = Callable[[tuple[int, ...]], Float[Tensor, " vocab"]]
Outcome = dict[tuple[int, ...], float]


def check_verifier(verifier: Verifier) -> None:
    """Raises `LawError` with the law and the tree if `verifier` breaks one.

    A verifier that says `lossless = False` is checked for everything but its law. Its chance has to be
    `torch.bernoulli` and `torch.multinomial`, one draw per row, which is what can be enumerated.

    Args:
        verifier: the rule.

    Raises:
        LawError: for the first law that is broken.
        UnsupportedError: if its chance cannot be enumerated.

    Example:
        >>> from specdec.testing import check_verifier
        >>> from specdec.verify import TreeRejection
        >>> check_verifier(TreeRejection())
    """
    name = type(verifier).__name__
    if not isinstance(verifier, Verifier):
        members = ("lossless", "stepwise", "check", "__call__")
        missing = [member for member in members if not hasattr(verifier, member)]
        raise LawError(f"{name} is no verifier: it lacks {', '.join(missing)}.")
    if verifier.stepwise and not isinstance(verifier, StepVerifier):
        raise LawError(f"{name} says stepwise=True, but has no step().")
    fits = False
    for what, builder, trees, weights in _cases():
        try:
            verifier.check(builder)
        except UnsupportedError:
            continue
        fits = True
        for greedy, target in ((False, _law(*_TARGET)), (True, _law(0.0, 0.0, 1.0))):
            probs = exact.laws_at(trees, target)
            _check_verdict(verifier, name, what, trees, probs)
            outcome = exact.committed(verifier, trees, probs, weights)
            if verifier.lossless:
                _check_law(name, what, outcome, target)
            if verifier.stepwise and isinstance(verifier, StepVerifier) and not greedy:
                steps = exact.committed(_Walked(verifier), trees, probs, weights)
                _check_steps(name, what, outcome, steps)
                if verifier.lossless:
                    _check_greedy_step(verifier, name, what, trees, probs)
    if not fits:
        raise LawError(f"{name}.check refuses every tree builder, so it can verify nothing.")


def _cases() -> list[tuple[str, TreeBuilder, DraftTree, Float[Tensor, " batch"] | None]]:
    """What is verified, who would grow it, one row per possible tree, and how likely each is; None is a sure tree."""
    chain = DraftTree(
        tokens=torch.tensor([[0, 1, 2]]),
        parents=torch.tensor([[-1, 0, 1]]),
        num_nodes=torch.tensor([3]),
        scores=torch.tensor([[0.0, -1.0, -2.0]]),
    )
    tree = DraftTree(
        tokens=torch.tensor([[0, 2, 1, 0, 0, 1]]),
        parents=torch.tensor([[-1, 0, 0, 1, 2, 2]]),
        num_nodes=torch.tensor([6]),
        scores=torch.tensor([[0.0, -0.5, -1.0, -1.5, -2.0, -3.0]]),
    )
    draft, sure = _law(*_DRAFT), _law(0.0, 1.0, 0.0)
    return [
        ("a chain", Chain(2), chain, None),
        ("a tree", Fixed(choices=[(0,), (1,), (0, 0), (1, 0), (1, 1)]), tree, None),
        ("a drawn chain", sampled_chain(2), *exact.draws(draft, branches=(1, 1))),
        ("a drawn tree", Sampled((2, 1)), *exact.draws(draft, branches=(2, 1))),
        ("a drawn chain of a sure drafter", sampled_chain(2), *exact.draws(sure, branches=(1, 1))),
    ]


def _law(*base: float) -> Law:
    """The same three probabilities after every path, each time for other tokens."""
    return lambda path: torch.tensor(base, dtype=torch.float64).roll(sum(path) + len(path))


def _check_law(name: str, what: str, outcome: Outcome, target: Law) -> None:
    """The exact law of the next three tokens."""
    error = float((exact.joint(outcome, target, 3) - exact.plain(target, 3)).abs().max())
    if not error < _CLOSE:
        raise LawError(
            f"{name} says lossless=True, but on {what} the law of the next three tokens is off by {error:.3g}, where "
            f"the target says {[round(value, 3) for value in target(()).tolist()]} for the first one. "
            "If this is meant, say lossless=False; if the rule needs other trees, refuse these in check()."
        )


def _check_steps(name: str, what: str, outcome: Outcome, steps: Outcome) -> None:
    """Walking by steps commits what a call commits."""
    gap = max(abs(outcome.get(path, 0.0) - steps.get(path, 0.0)) for path in outcome.keys() | steps.keys())
    if gap > _CLOSE:
        raise LawError(f"{name}: step() and __call__() differ by {gap:.3g} on {what}; both must be the same rule.")


def _check_greedy_step(
    verifier: StepVerifier, name: str, what: str, trees: DraftTree, probs: Float[Tensor, "batch nodes vocab"]
) -> None:
    """A greedy request gets the most likely token, and the child that carries it, if there is one."""
    root = torch.zeros_like(trees.num_nodes)
    law = TargetLaw(scores=probs[:, 0].log(), greedy=True)
    token, child = verifier.step(trees, root, law, generator=torch.Generator())
    best = law.scores.argmax(-1)
    expected = topology.child_with_token(trees, root, best)
    if not torch.equal(token, best) or not torch.equal(child, expected):
        raise LawError(
            f"{name}.step on {what}: a greedy law asks for tokens {best.tolist()} and children {expected.tolist()} "
            f"(-1 for none), got {token.tolist()} and {child.tolist()}."
        )


def _check_verdict(
    verifier: Verifier,
    name: str,
    what: str,
    trees: DraftTree,
    probs: Float[Tensor, "batch nodes vocab"],
) -> None:
    """The form of a verdict, that it depends on `generator` alone, and that nothing given is changed."""
    values = [getattr(trees, field.name) for field in dataclasses.fields(trees)]
    given = [value for value in (*values, probs) if isinstance(value, Tensor)]
    before = [value.clone() for value in given]
    verdict = verifier(trees, probs, generator=torch.Generator().manual_seed(0))
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, given, strict=True)):
        raise LawError(f"{name} changed the tree or the probabilities it was given; they are the caller's.")
    again = verifier(trees, probs, generator=torch.Generator().manual_seed(0))
    parts = [(getattr(verdict, part), getattr(again, part)) for part in ("path", "num_accepted", "bonus")]
    if not all(torch.equal(one, two) for one, two in parts):
        raise LawError(f"{name} gave two verdicts from one seed; take all randomness from `generator`.")
    for row, (path, count, bonus) in enumerate(
        zip(verdict.path.tolist(), verdict.num_accepted.tolist(), verdict.bonus.tolist(), strict=True)
    ):
        nodes = [0, *path[:count]]
        parents = trees.parents[row].tolist()
        on_tree = all(0 < node < len(parents) and parents[node] == above for above, node in pairwise(nodes))
        if not on_tree or len(nodes) != count + 1 or any(node != -1 for node in path[count:]):
            raise LawError(
                f"{name}: path must hold num_accepted = {count} nodes, each the child of the one before (the first of "
                f"the root), then -1; got {path} on {what} with parents {parents}."
            )
        if not 0 <= bonus < _VOCAB or (verifier.lossless and not probs[row, nodes[-1], bonus] > 0):
            raise LawError(f"{name}: the bonus token {bonus} is impossible after the accepted path {path}, on {what}.")


@dataclasses.dataclass(frozen=True)
class _Walked:
    """The verifier that calls nothing but `step`."""

    verifier: StepVerifier
    lossless: bool = True
    stepwise: bool = False

    def check(self, builder: TreeBuilder) -> None:
        """Accepts what the step verifier was already asked about."""

    def __call__(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch nodes vocab"],
        *,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        return walk(self.verifier, tree, target_probs, generator=generator)
