"""The exact law of what a verifier commits, by enumeration: for testing verifiers, also your own.

`committed` runs a verifier as it is and follows every outcome of every random decision, so it judges the real code
and not a model of it. The decisions it can follow are `torch.bernoulli` and `torch.multinomial` with one draw per row;
other sources of chance raise. Nothing is drawn: results are exact up to rounding, and a wrong rule is told from a right
one at 1e-12.

`draws` lists all trees that a sampled builder can give, with their probabilities, and `lossless_error` puts the two
together: the largest error in the joint law of the next few tokens. Tokens after the first round are taken from the
target, which is what later rounds of a lossless verifier give.

Example:
    >>> from specdec.verify import TreeRejection, exact
    >>> def target(path):  # the law after the tokens of a path
    ...     return torch.tensor([0.5, 0.5] if path else [0.1, 0.9], dtype=torch.float64)
    >>> def draft(path):
    ...     return torch.tensor([0.8, 0.2], dtype=torch.float64)
    >>> trees, weights = exact.draws(draft, branches=(2, 1))
    >>> exact.lossless_error(TreeRejection(), trees, target, weights, length=3) < 1e-12
    True
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import Verifier
from specdec.types import DraftTree, Verdict

__all__ = ["committed", "draws", "joint", "laws_at", "lossless_error", "mean_accepted", "outcomes", "plain"]

Path = tuple[int, ...]
Law = Callable[[Path], Float[Tensor, " vocab"]]
"""Next-token law after the root and the tokens of a path."""


def draws(draft: Law, *, branches: Sequence[int], root: int = 0) -> tuple[DraftTree, Float[Tensor, " batch"]]:
    """All trees whose children are drawn from `draft` in index order, without replacement.

    Args:
        draft: law of the children after a path.
        branches: children of each node, by the node's depth; fewer where the law has no more tokens.
        root: token of the root.

    Returns:
        One row per tree, nodes by level, and the probability of each row.
    """
    found = [(nodes, chance) for nodes, chance in _grow([((), -1)], 0, branches, draft, 1.0)]
    width = max(len(nodes) for nodes, _ in found)
    pads = [width - len(nodes) for nodes, _ in found]
    paths = [[path for path, _ in nodes] + [()] * pad for (nodes, _), pad in zip(found, pads, strict=True)]
    laws = {path: draft(path).to(torch.float64) for path in {path for row in paths for path in row}}
    counts = torch.tensor([len(nodes) for nodes, _ in found])
    padding = torch.arange(width) >= counts[:, None]
    scores = torch.tensor([[_score(path, laws) for path in row] for row in paths], dtype=torch.float64)
    tree = DraftTree(
        tokens=torch.tensor([[path[-1] if path else root for path in row] for row in paths]),
        parents=torch.tensor(
            [[parent for _, parent in nodes] + [-1] * pad for (nodes, _), pad in zip(found, pads, strict=True)]
        ),
        num_nodes=counts,
        scores=scores.masked_fill(padding, -torch.inf),
        draft_probs=torch.stack([torch.stack([laws[path] for path in row]) for row in paths]),
    )
    return tree, torch.tensor([chance for _, chance in found], dtype=torch.float64)


def _grow(
    nodes: list[tuple[Path, int]], index: int, branches: Sequence[int], draft: Law, chance: float
) -> Iterator[tuple[list[tuple[Path, int]], float]]:
    """Gives children to node `index` and those after it, in every possible way."""
    if index == len(nodes) or len(nodes[index][0]) == len(branches):
        yield nodes, chance
        return
    path = nodes[index][0]
    for tokens, share in _orders(draft(path).tolist(), branches[len(path)]):
        children = [((*path, token), index) for token in tokens]
        yield from _grow(nodes + children, index + 1, branches, draft, chance * share)


def _orders(law: list[float], count: int) -> Iterator[tuple[Path, float]]:
    """Ordered draws without replacement with their probabilities; shorter ones where the law is used up."""
    left = sum(law)
    if count == 0 or left <= 0.0:
        yield (), 1.0
        return
    for token, mass in enumerate(law):
        if mass > 0.0:
            rest = [0.0 if other == token else value for other, value in enumerate(law)]
            for tokens, share in _orders(rest, count - 1):
                yield (token, *tokens), share * mass / left


def _score(path: Path, laws: dict[Path, Tensor]) -> float:
    return sum((float(laws[path[:depth]][token].log()) for depth, token in enumerate(path)), 0.0)


def laws_at(tree: DraftTree, law: Law) -> Float[Tensor, "batch nodes vocab"]:
    """`law` at every node of a tree, under the node's own path; NaN on padding, which nobody may read."""
    cache: dict[Path, Tensor] = {}
    rows = []
    for tokens, parents, count in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True
    ):
        paths: list[Path] = [()]
        for node in range(1, count):
            paths.append((*paths[parents[node]], tokens[node]))
        for path in paths:
            if path not in cache:
                cache[path] = law(path).to(torch.float64)
        padding = [torch.full_like(cache[()], torch.nan)] * (tree.width - count)
        rows.append(torch.stack([cache[path] for path in paths] + padding))
    return torch.stack(rows)


def committed(
    verifier: Verifier,
    tree: DraftTree,
    target_probs: Float[Tensor, "batch nodes vocab"],
    weights: Float[Tensor, " batch"] | None = None,
) -> dict[Path, float]:
    """Probability of each sequence of tokens that one round can commit, the bonus token included.

    Args:
        verifier: any verifier whose chance is `torch.bernoulli` and `torch.multinomial` on one row per batch row.
        tree: one row per possible tree.
        target_probs: the target's law at each node.
        weights: probability of each row; None for a batch of one.

    Raises:
        ShapeError: if `weights` is missing for several rows.
        UnsupportedError: if the verifier takes chance from anywhere else.
    """
    if weights is None:
        if len(tree.tokens) != 1:
            raise ShapeError(f"weights must say how likely each of the {len(tree.tokens)} rows is; got None.")
        weights = torch.ones(1, dtype=torch.float64)
    outcome: dict[Path, float] = {}
    shapes: dict[Path, list[int]] = {}
    for row, parents in enumerate(tree.parents.tolist()):
        shapes.setdefault(tuple(parents), []).append(row)
    # Trees of one shape are verified together: all rows take the same outcome, each with its own probability.
    for rows in shapes.values():
        part = _take(tree, rows)
        scripts: list[Path] = [()]
        while scripts:
            with _Scripted(scripts.pop(), weights[rows]) as run:
                verdict = verifier(part, target_probs[rows])
            _add(outcome, part, verdict, run.chance)
            scripts += run.open
    return outcome


def outcomes(call: Callable[[], Path]) -> dict[Path, float]:
    """Probability of each result of anything that takes chance as a verifier may: of a whole request, say.

    Args:
        call: run once for every way that chance can go; must do the same whenever it goes the same way. Its draws are
            `torch.bernoulli` and `torch.multinomial` of a single row.

    Raises:
        UnsupportedError: if it takes chance from anywhere else.

    Example:
        >>> from specdec.verify import exact
        >>> coin = torch.tensor([0.25], dtype=torch.float64)
        >>> exact.outcomes(lambda: (int(torch.bernoulli(coin) + torch.bernoulli(coin)),))
        {(0,): 0.5625, (1,): 0.375, (2,): 0.0625}
    """
    found: dict[Path, float] = {}
    scripts: list[Path] = [()]
    while scripts:
        with _Scripted(scripts.pop(), torch.ones(1, dtype=torch.float64)) as run:
            result = call()
        found[result] = found.get(result, 0.0) + float(run.chance)
        scripts += run.open
    return found


def _add(outcome: dict[Path, float], tree: DraftTree, verdict: Verdict, weights: Float[Tensor, " batch"]) -> None:
    drafted = tree.tokens.gather(1, verdict.path.clamp_min(0)).tolist()
    ends = zip(verdict.num_accepted.tolist(), verdict.bonus.tolist(), weights.tolist(), strict=True)
    for tokens, (count, bonus, weight) in zip(drafted, ends, strict=True):
        path = (*tokens[:count], bonus)
        outcome[path] = outcome.get(path, 0.0) + weight


def mean_accepted(outcome: dict[Path, float]) -> float:
    """Expected accepted tokens of a round, the bonus token excluded."""
    return sum(chance * (len(path) - 1) for path, chance in outcome.items())


def plain(target: Law, length: int) -> Float[Tensor, "..."]:
    """Joint law of the next `length` tokens of plain sampling, one axis per token."""
    return joint({(): 1.0}, target, length)


def joint(outcome: dict[Path, float], target: Law, length: int) -> Float[Tensor, "..."]:
    """Joint law of the next `length` tokens, one axis per token; `target` fills in what a round left open."""
    vocab = target(()).shape[0]
    law = torch.zeros((vocab,) * length, dtype=torch.float64)
    open_: dict[Path, float] = {}
    for path, chance in outcome.items():
        open_[path[:length]] = open_.get(path[:length], 0.0) + chance
    for path in itertools.product(range(vocab), repeat=length):
        tails = [1.0]
        for depth in range(length - 1, -1, -1):
            tails.append(tails[-1] * float(target(path[:depth])[path[depth]]))
        law[path] = sum(open_.get(path[:depth], 0.0) * tails[length - depth] for depth in range(length + 1))
    return law


def lossless_error(
    verifier: Verifier,
    tree: DraftTree,
    target: Law,
    weights: Float[Tensor, " batch"] | None = None,
    *,
    length: int,
) -> float:
    """Largest absolute error of the joint law of the next `length` tokens; rounding only for a lossless rule."""
    outcome = committed(verifier, tree, laws_at(tree, target), weights)
    return float((joint(outcome, target, length) - plain(target, length)).abs().max())


def _take(tree: DraftTree, rows: list[int]) -> DraftTree:
    return DraftTree(
        tokens=tree.tokens[rows],
        parents=tree.parents[rows],
        num_nodes=tree.num_nodes[rows],
        scores=tree.scores[rows],
        draft_probs=None if tree.draft_probs is None else tree.draft_probs[rows],
    )


_OTHER_CHANCE = frozenset(
    {
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like),
        *(torch.randperm, torch.normal, torch.Tensor.exponential_, torch.Tensor.uniform_, torch.Tensor.normal_),
        *(torch.Tensor.random_, torch.Tensor.bernoulli_, torch.Tensor.bernoulli, torch.Tensor.multinomial),
    }
)


class _Scripted(TorchFunctionMode):
    """Replaces random draws by the outcomes of a script; past its end, by the first possible outcome.

    Every row takes the same outcome. `chance` is how likely each row was to come this way; outcomes that some row could
    have taken instead are kept in `open`, as scripts.
    """

    def __init__(self, script: Path, chance: Float[Tensor, " rows"]) -> None:
        super().__init__()
        self.chance = chance.to(torch.float64)
        self.open: list[Path] = []
        self._script = script
        self._taken: list[int] = []

    @no_type_check  # every torch call comes through here
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.bernoulli:
            chance = args[0] if args else kwargs["input"]
            if chance.ndim != 1:
                raise UnsupportedError(f"only one coin per row can be enumerated, got coins {list(chance.shape)}.")
            return self._choose(torch.stack([1.0 - chance, chance], 1)).to(chance.dtype)
        if func is torch.multinomial:
            weights = args[0] if args else kwargs["input"]
            samples = args[1] if len(args) > 1 else kwargs["num_samples"]
            if weights.ndim != 2 or samples != 1:
                raise UnsupportedError(
                    f"only one draw per row can be enumerated, got {samples} from weights {list(weights.shape)}."
                )
            return self._choose(weights)[:, None]
        if func in _OTHER_CHANCE:
            raise UnsupportedError(f"{func.__name__} cannot be enumerated; use torch.bernoulli or torch.multinomial.")
        return func(*args, **kwargs)

    def _choose(self, weights: Float[Tensor, "rows options"]) -> Int[Tensor, " rows"]:
        if len(weights) != len(self.chance):
            raise UnsupportedError(f"chance must have one row per batch row, {len(self.chance)}, got {len(weights)}.")
        wide = weights.to(torch.float64)
        chances = self.chance[:, None] * (wide / wide.sum(-1, keepdim=True))
        call = len(self._taken)
        if call < len(self._script):
            option = self._script[call]
        else:
            option, *others = (chances > 0).any(0).nonzero().flatten().tolist()
            self.open += [(*self._taken, other) for other in others]
        self._taken.append(option)
        self.chance = chances[:, option]
        # A row that cannot come this way has chance 0 from here on; it goes a way of its own so that it ends.
        return torch.where(wide[:, option] > 0, option, wide.argmax(-1))
