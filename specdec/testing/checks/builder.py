"""Does a tree builder keep the laws of `specdec.protocols.TreeBuilder`?

The checker grows trees from tables: with talkative, tight-lipped and silent drafters, with rows that have stopped or
are about to, with every budget. A drafter in between looks at the frontiers that the builder asks about. A builder that
draws is given thousands of equal rows, and what it drew is counted against the law that it says it drew from.
"""

from collections import Counter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import LawError, ShapeError
from specdec.protocols import TreeBuilder
from specdec.testing.table import TableDrafter
from specdec.trees import topology
from specdec.types import Candidates, DraftTree, Frontier

_VOCAB = 11
_ROWS = 3000  # equal rows from which draws are counted
_SIGMAS = 5.0  # a count this many standard deviations (and as many counts) off is no accident

Outcome = tuple[int, ...]
Law = tuple[float, ...]


def check_builder(builder: TreeBuilder, *, seed: int = 0) -> None:
    """Raises `LawError` with the law and the tree if `builder` breaks one.

    Args:
        builder: grows the trees.
        seed: seed of the tables and of the draws.

    Raises:
        LawError: for the first law that is broken.

    Example:
        >>> from specdec.testing import check_builder
        >>> from specdec.trees import BestFirst, Sampled
        >>> check_builder(BestFirst(nodes=6))
        >>> check_builder(Sampled(branches=(2, 2)))
    """
    name = type(builder).__name__
    if not isinstance(builder, TreeBuilder):
        missing = [member for member in ("nodes", "sampled", "chain", "grow") if not hasattr(builder, member)]
        raise LawError(f"{name} is no tree builder: it lacks {', '.join(missing)}.")
    if builder.nodes < 1:
        raise LawError(f"{name}.nodes is the largest tree budget, at least 1, got {builder.nodes}.")
    chance = torch.Generator().manual_seed(seed)
    probs = _table(_VOCAB, chance)
    listed = probs * (torch.rand(probs.shape, generator=chance) < 0.3)
    listed /= listed.sum(-1, keepdim=True).clamp_min(1e-9)
    roots = torch.arange(6)
    limits = torch.tensor([100, 0, 1, 2, 3, 100])
    for table in (probs, listed, torch.zeros_like(probs)):
        for budget in sorted({0, 1, 2, builder.nodes - 1, builder.nodes}):
            if budget <= builder.nodes:
                _check_growth(builder, name, table, roots, limits, budget, seed)
    if builder.sampled:
        for whole_law in (True, False):
            _check_draws(builder, name, TableDrafter(_table(6, chance), whole_law=whole_law), chance)


def _table(vocab: int, chance: torch.Generator) -> Float[Tensor, "vocab vocab"]:
    """A random law after each token."""
    weights = torch.rand(vocab, vocab, generator=chance, dtype=torch.float64) ** 2 + 0.02
    return weights / weights.sum(-1, keepdim=True)


def _check_growth(
    builder: TreeBuilder,
    name: str,
    table: Float[Tensor, "vocab vocab"],
    roots: Int[Tensor, " batch"],
    limits: Int[Tensor, " batch"],
    budget: int,
    seed: int,
) -> None:
    """One batch of trees: their form, and that they depend on nothing they should not."""

    def grow(rows: Int[Tensor, " rows"], seed: int) -> DraftTree:
        drafter = _Witness(table, name, roots[rows], limits[rows])
        given = roots[rows], limits[rows]
        kept = given[0].clone(), given[1].clone()
        chance = torch.Generator().manual_seed(seed)
        tree = builder.grow(drafter, *given, budget, vocab_size=_VOCAB, generator=chance)
        if not (torch.equal(kept[0], given[0]) and torch.equal(kept[1], given[1])):
            raise LawError(f"{name}.grow changed the roots or the limits it was given; they are the caller's.")
        _check_tree(tree, builder, name, *given, budget)
        return tree

    everyone = torch.arange(len(roots))
    tree = grow(everyone, seed)
    if not _equal(tree, grow(everyone, seed)):
        raise LawError(f"{name} grew two trees from one seed; take all randomness from `generator`.")
    if builder.sampled:
        return
    if not _equal(tree, grow(everyone, seed + 1)):
        raise LawError(f"{name} says sampled=False, but its tree depends on `generator`; say so, and give draft_probs.")
    for row in range(len(roots)):
        alone = grow(everyone[row : row + 1], seed)
        if _paths(alone, 0) != _paths(tree, row):
            raise LawError(
                f"{name}: row {row} of a batch grew {_paths(tree, row)}, and {_paths(alone, 0)} alone; "
                "rows may not depend on each other."
            )


def _check_tree(
    tree: DraftTree,
    builder: TreeBuilder,
    name: str,
    roots: Int[Tensor, " batch"],
    limits: Int[Tensor, " batch"],
    budget: int,
) -> None:
    """The form of a tree."""
    if not isinstance(tree, DraftTree):
        raise LawError(f"{name}.grow must return a DraftTree, got {type(tree).__name__}.")
    shape = list(tree.tokens.shape)
    if shape[:1] != [len(roots)] or not (shape == list(tree.parents.shape) == list(tree.scores.shape)):
        raise LawError(
            f"{name}: tokens, parents and scores must be [{len(roots)}, nodes], got {shape}, "
            f"{list(tree.parents.shape)} and {list(tree.scores.shape)}."
        )
    try:
        topology.check(tree)
    except ShapeError as error:
        raise LawError(f"{name} grew no tree: {error}") from error
    if not torch.equal(tree.tokens[:, 0], roots):
        raise LawError(f"{name}: node 0 is the root, {roots.tolist()}, got {tree.tokens[:, 0].tolist()}.")
    if bool(((tree.tokens < 0) | (tree.tokens >= _VOCAB)).any()):
        raise LawError(f"{name}: every id must be valid, padding included, got {tree.tokens.tolist()}; pad with roots.")
    if bool((tree.num_nodes > budget + 1).any()):
        raise LawError(f"{name}: a budget of {budget} allows {budget + 1} nodes, got {tree.num_nodes.tolist()}.")
    depths = topology.depths(tree.parents)
    if bool((depths.amax(-1) > limits).any()):
        raise LawError(f"{name}: limits {limits.tolist()} are the deepest nodes, got {depths.amax(-1).tolist()}.")
    above = torch.where(tree.parents >= 0, tree.scores.gather(1, tree.parents.clamp_min(0)), 0.0)
    if bool((tree.valid & ~(tree.scores <= above + 1e-6)).any()) or bool((tree.scores[:, 0] != 0).any()):
        raise LawError(f"{name}: scores are 0 at the root and never rise on the way down, got {tree.scores.tolist()}.")
    if builder.chain and bool((topology.num_children(tree.parents) > 1).any()):
        raise LawError(f"{name} says chain=True, but a node has several children: {tree.parents.tolist()}.")
    if tree.draft_probs is not None and not builder.sampled:
        raise LawError(f"{name} says sampled=False, but the tree has draft_probs; leave them out or say sampled=True.")
    if builder.sampled and tree.width > 1 and (tree.draft_probs is None or tree.draft_probs.shape[2] != _VOCAB):
        raise LawError(
            f"{name} says sampled=True, so a tree needs draft_probs [batch, nodes, {_VOCAB}], the laws its children "
            f"were drawn from; got {None if tree.draft_probs is None else list(tree.draft_probs.shape)}."
        )


def _check_draws(builder: TreeBuilder, name: str, drafter: TableDrafter, chance: torch.Generator) -> None:
    """Children are draws from the claimed law, without replacement, in order, and as many as decided beforehand."""
    roots = torch.zeros(_ROWS, dtype=torch.int64)
    tree = builder.grow(drafter, roots, torch.full_like(roots, 100), builder.nodes, vocab_size=6, generator=chance)
    if tree.draft_probs is None:
        raise LawError(f"{name} says sampled=True, but its tree has no draft_probs.")
    for (count, law), outcomes in _outcomes(tree, tree.draft_probs).items():
        total = sum(outcomes.values())
        expected = {outcome: total * prob for outcome, prob in _without_replacement(law, min(count, 2)).items()}
        for outcome in expected.keys() | outcomes.keys():
            want, got = expected.get(outcome, 0.0), outcomes[outcome]
            if abs(got - want) > (_SIGMAS * want**0.5 + _SIGMAS if want > 0 else 0):
                raise LawError(
                    f"{name}: of {total} nodes with {count} children and the law {[round(value, 3) for value in law]}, "
                    f"{want:.0f} should begin with children {list(outcome)}, and {got} do. draft_probs must be the law "
                    "that children were drawn from, without replacement, siblings in the order of the draws, and their "
                    "number must be decided before any is drawn."
                )


def _outcomes(tree: DraftTree, laws: Float[Tensor, "batch nodes vocab"]) -> dict[tuple[int, Law], Counter[Outcome]]:
    """How often the first two children of a node came out how, by its number of children and its law."""
    found: dict[tuple[int, Law], Counter[Outcome]] = {}
    known = [[tuple(law) for law in row] for row in laws.double().round(decimals=9).tolist()]
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        children: dict[int, list[int]] = {}
        for token, parent in zip(tokens, parents, strict=True):
            if parent >= 0:
                children.setdefault(parent, []).append(token)
        for node, drawn in children.items():
            found.setdefault((len(drawn), known[row][node]), Counter())[tuple(drawn[:2])] += 1
    return found


def _without_replacement(law: Law, count: int) -> dict[Outcome, float]:
    """Probability of the first `count` draws, in order."""
    total = sum(law)
    first: dict[Outcome, float] = {(token,): value / total for token, value in enumerate(law) if value > 0}
    if count == 1:
        return first
    return {
        (one, two): chance * law[two] / (total - law[one])
        for (one,), chance in first.items()
        for two in range(len(law))
        if two != one and law[two] > 0
    }


class _Witness:
    """A table drafter that looks at what it is asked."""

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        table: Float[Tensor, "vocab vocab"],
        name: str,
        roots: Int[Tensor, " batch"],
        limits: Int[Tensor, " batch"],
    ) -> None:
        self._drafter = TableDrafter(table, whole_law=False)
        self._name, self._roots, self._limits = name, roots, limits
        self._last: tuple[Frontier, Candidates] | None = None

    def start(self, context: object) -> None:
        raise LawError(f"{self._name} called drafter.start(); that is the loop's part.")

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        raise LawError(f"{self._name} called drafter.commit(); that is the loop's part.")

    def finish(self) -> None:
        raise LawError(f"{self._name} called drafter.finish(); that is the loop's part.")

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The table's answer to a lawful frontier."""
        self._check(frontier, count)
        answer = self._drafter.children(frontier, count)
        self._last = frontier, answer
        return answer

    def _check(self, frontier: Frontier, count: int) -> None:
        depth = 0 if self._last is None else self._last[0].depth + 1
        place = f"{self._name} asked about a frontier of depth {frontier.depth}"
        if frontier.depth != depth or count < 1:
            raise LawError(f"{place}, {count} proposals; expected depth {depth}, and at least one proposal.")
        if bool((frontier.valid & (self._limits <= depth)[:, None]).any()):
            raise LawError(f"{place} in rows that may not be drafted deeper (limits {self._limits.tolist()}).")
        if self._last is None:
            if not torch.equal(frontier.tokens, self._roots[:, None]):
                raise LawError(f"{place} with {frontier.tokens.tolist()}; the first frontier is the roots.")
            return
        above, answer = self._last
        for row, node in frontier.valid.nonzero().tolist():
            parent, token = int(frontier.parents[row, node]), int(frontier.tokens[row, node])
            if not 0 <= parent < above.tokens.shape[1] or not bool(above.valid[row, parent]):
                raise LawError(f"{place} with parent {parent}, which is no valid node of the previous frontier.")
            offered = answer.tokens[row, parent][answer.log_probs[row, parent] > -torch.inf].tolist()
            if token not in offered:
                raise LawError(
                    f"{place} with token {token} below node {parent}, for which {offered} was proposed; "
                    "`Frontier.parents` counts within the previous frontier."
                )


def _paths(tree: DraftTree, row: int) -> list[Outcome]:
    """Root path of each node of a row."""
    paths: list[Outcome] = [()]
    pairs = zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)
    for token, parent in list(pairs)[1 : int(tree.num_nodes[row])]:
        paths.append((*paths[parent], token))
    return paths


def _equal(one: DraftTree, two: DraftTree) -> bool:
    return all(_paths(one, row) == _paths(two, row) for row in range(len(one.tokens)))
