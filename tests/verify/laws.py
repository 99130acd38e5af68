"""Laws and trees of the verifier tests: the field log's `pq4`, random laws as hypothesis data, trees by hand."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.trees import topology
from specdec.types import DraftTree
from specdec.verify import exact, rules

Path = tuple[int, ...]
Law = Callable[[Path], Tensor]

CLOSE = 1e-12
"""Errors of exact sums in float64; a wrong rule errs by 1e-3 and more."""

# Two positive residual entries: with a single one several wrong rules would look right.
TARGET = torch.tensor([0.40, 0.35, 0.15, 0.10], dtype=torch.float64)
DRAFT = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)


def always(law: Tensor) -> Law:
    """The same law after every path."""
    return lambda _path: law


class Table:
    """A law for each path, from integer weights; paths longer than the table go on with its first entries."""

    def __init__(self, weights: Sequence[Sequence[int]]) -> None:
        self._laws = [torch.tensor(row, dtype=torch.float64) / sum(row) for row in weights]
        self._vocab = len(weights[0])

    def __repr__(self) -> str:
        return f"Table({[[round(value, 4) for value in law.tolist()] for law in self._laws]})"

    def __call__(self, path: Path) -> Tensor:
        index = 0
        for token in path:
            index = index * self._vocab + token + 1
        return self._laws[index % len(self._laws)]


def tables(vocab: int = 3) -> st.SearchStrategy[Table]:
    """Random laws with zeros, near-certain tokens and ties; a law for each path of up to two tokens."""
    weights = st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 1000]), min_size=vocab, max_size=vocab).filter(any)
    paths = 1 + vocab + vocab**2
    return st.builds(Table, st.lists(weights, min_size=paths, max_size=paths))


def seeded(seed: int, vocab: int = 3) -> Table:
    """A fixed law without zeros, for tests that need one in which a wrong rule shows."""
    rng = random.Random(seed)
    return Table([[1 + rng.randrange(60) for _ in range(vocab)] for _ in range(1 + vocab + vocab**2)])


def deterministic(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> DraftTree:
    """A tree that was not drawn; rows may differ in length."""
    width = max(map(len, tokens))
    pads = [width - len(row) for row in tokens]
    return DraftTree(
        tokens=torch.tensor([[*row, *[row[0]] * pad] for row, pad in zip(tokens, pads, strict=True)]),
        parents=torch.tensor([[*row, *[-1] * pad] for row, pad in zip(parents, pads, strict=True)]),
        num_nodes=torch.tensor([len(row) for row in tokens]),
        scores=torch.tensor([[0.0] * len(row) + [-torch.inf] * pad for row, pad in zip(tokens, pads, strict=True)]),
    )


@st.composite
def deterministic_trees(draw: st.DrawFn, vocab: int = 3, depth: int = 2, chain: bool = False) -> DraftTree:
    """One tree with distinct siblings, in a random topological order."""
    tokens, parents, depths = [draw(st.integers(0, vocab - 1))], [-1], [0]
    for _ in range(draw(st.integers(0, depth if chain else 5))):
        open_nodes = [node for node, level in enumerate(depths) if level < depth and not (chain and node in parents)]
        parent = draw(st.sampled_from(open_nodes))
        used = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        free = [token for token in range(vocab) if token not in used]
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return deterministic([tokens], [parents])


def relisted(tree: DraftTree, seed: int) -> DraftTree:
    """The same trees with their nodes in another topological order; siblings keep their order (that of the draws)."""
    orders = []
    for parents, count in zip(tree.parents.tolist(), tree.num_nodes.tolist(), strict=True):
        rng = random.Random(seed)  # trees of one shape stay of one shape
        waiting = {node: [c for c in range(1, count) if parents[c] == node] for node in range(count)}
        order, heads = [], [0]
        while heads:
            node = heads.pop(rng.randrange(len(heads)))
            order.append(node)
            # The next sibling may come at any time after this one, and so may this node's first child.
            if node and waiting[parents[node]]:
                heads.append(waiting[parents[node]].pop(0))
            if waiting[node]:
                heads.append(waiting[node].pop(0))
        orders.append(order + [0] * (tree.width - count))
    return topology.take(tree, torch.tensor(orders), tree.num_nodes)


def first_token(verifier: Any, tree: DraftTree, target: Law, weights: Tensor | None = None) -> Any:
    """Law of the first committed token."""
    outcome = exact.committed(verifier, tree, exact.laws_at(tree, target), weights)
    return exact.joint(outcome, target, 1).tolist()


@contextlib.contextmanager
def wrong(module: Any, name: str, mutant: Callable[..., Any]) -> Iterator[None]:
    """Puts a wrong function in the place of a right one; the mutant gets the right one first."""
    right = getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args: mutant(right, *args))
        yield


def keeps_target(right: Any, target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """`rules.reject`, but the target's law stays as it was."""
    _, left, share = right(target, draft, token, weight)
    return target, left, share


def keeps_draft(right: Any, target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """`rules.reject`, but the next sibling is judged by the law of the first one."""
    rest, _, share = right(target, draft, token, weight)
    return rest, draft, share


def keeps_weight(right: Any, target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """`rules.reject`, but the weight stays as it was: a mistake of public traversal code."""
    rest, left, _ = right(target, draft, token, weight)
    return rest, left, weight


def divides_mass(right: Any, target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Any:
    """`rules.reject`, but the mass is divided by 1 - draft(token): another mistake of public traversal code."""
    rest, left, _ = right(target, draft, token, weight)
    assert draft is not None
    mass = rules.uncovered(target, draft, token, weight).sum(-1) / (1.0 - rules.at(draft, token)).clamp_min(1e-300)
    return rest, left, rules.weight_after(mass, weight)


def first_failure(_right: Any, passes: Tensor) -> Tensor:
    """`block.longest`, but the walk stops at the first coin that falls wrong."""
    survives = passes.cumprod(-1)
    return survives * torch.cat([1.0 - passes[:, 1:], torch.ones_like(passes[:, :1])], 1)
