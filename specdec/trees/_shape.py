"""Trees of a fixed shape: what the shape says about each level, and the one loop that grows them.

A shape is a set of tuples of ranks: `(2, 0)` is the first child of the third child of the root. It is closed under
prefixes. The shape is turned into index tensors once per budget and device; a round then gathers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.ops._checks import whole
from specdec.trees import topology
from specdec.types import DraftTree, Frontier

Choices: TypeAlias = tuple[tuple[int, ...], ...]


def checked(builder: str, choices: Sequence[Sequence[int]]) -> Choices:
    """`choices` as tuples, each behind its parent; raises `UnsupportedError` for a set that is no tree."""
    came: Any = choices
    several = isinstance(came, Sequence) and not isinstance(came, str)
    if not several or not all(isinstance(choice, (tuple, list)) for choice in came):
        raise UnsupportedError(f"{builder}: choices are tuples of ranks, such as [(0,), (0, 0)], got {choices!r}.")
    if not all(whole(rank) for choice in choices for rank in choice):
        raise UnsupportedError(f"{builder}: ranks are whole numbers from 0 (the best child) on, got {choices!r}.")
    given = [tuple(map(int, choice)) for choice in choices]
    known = set(given)
    if not given or () in known:
        raise UnsupportedError(
            f"{builder}: expected at least one choice, each a non-empty tuple of ranks, got {given}."
        )
    if len(known) < len(given):
        twice = next(choice for choice in given if given.count(choice) > 1)
        raise UnsupportedError(f"{builder}: choice {twice} stands there twice; every node needs a path of its own.")
    for choice in given:
        if len(choice) > 1 and choice[:-1] not in known:
            raise UnsupportedError(f"{builder}: choice {choice} has no parent in the tree; add {choice[:-1]}.")
    # A dict keeps the first place of each path.
    return tuple(dict.fromkeys(choice[:end] for choice in given for end in range(1, len(choice) + 1)))


def is_chain(choices: Choices) -> bool:
    """Whether no two nodes share a parent."""
    return len({choice[:-1] for choice in choices}) == len(choices)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The nodes of one depth that have children, and these children.

    Attributes:
        count: ranks in use, most over the nodes.
        members: index of each expanded node among all nodes of its depth.
        above: index of its parent among the expanded nodes one level up; -1 for the root.
        slots: its index in the finished tree.
        parent: for each child, the expanded node it hangs on.
        rank: for each child, its rank.
    """

    count: int
    members: Int[Tensor, " frontier"]
    above: Int[Tensor, "1 frontier"]
    slots: Int[Tensor, " frontier"]
    parent: Int[Tensor, " children"]
    rank: Int[Tensor, " children"]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A shape as index tensors.

    Attributes:
        levels: one per depth that is expanded.
        order: where each node of the finished tree stands in breadth-first order.
        parents: parents in the finished tree, which is numbered depth-first, lower rank first.
    """

    levels: tuple[Level, ...]
    order: Int[Tensor, " nodes"]
    parents: Int[Tensor, "1 nodes"]


@lru_cache(maxsize=256)
def plan(choices: Choices, device: torch.device) -> Plan:
    """The index tensors of a shape whose choices stand behind their parents."""
    depth_first = [(), *sorted(choices)]
    slot = {choice: index for index, choice in enumerate(depth_first)}
    breadth_first = sorted(depth_first, key=lambda choice: (len(choice), choice))
    expanded_paths = {choice[:-1] for choice in choices}
    levels = []
    above: dict[tuple[int, ...], int] = {}
    # Tensors made under inference mode could not be used outside it.
    with torch.inference_mode(mode=False):

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)

        for depth in range(max(map(len, choices), default=0)):
            here = [choice for choice in breadth_first if len(choice) == depth]
            expanded = [choice for choice in here if choice in expanded_paths]
            place = {choice: index for index, choice in enumerate(expanded)}
            children = [choice for choice in breadth_first if len(choice) == depth + 1]
            levels.append(
                Level(
                    count=1 + max(choice[-1] for choice in children),
                    members=tensor([here.index(choice) for choice in expanded]),
                    above=tensor([above[choice[:-1]] if choice else -1 for choice in expanded])[None],
                    slots=tensor([slot[choice] for choice in expanded]),
                    parent=tensor([place[choice[:-1]] for choice in children]),
                    rank=tensor([choice[-1] for choice in children]),
                )
            )
            above = place
        rank_of = {choice: index for index, choice in enumerate(breadth_first)}
        return Plan(
            levels=tuple(levels),
            order=tensor([rank_of[choice] for choice in depth_first]),
            parents=tensor([slot[choice[:-1]] if choice else -1 for choice in depth_first])[None],
        )


Propose: TypeAlias = Callable[[Frontier, Level], tuple[Tensor, Tensor]]


def grow(
    shape: Plan,
    root: Int[Tensor, " batch"],
    limits: Int[Tensor, " batch"],
    propose: Propose,
) -> tuple[DraftTree, Bool[Tensor, "batch nodes"]]:
    """Fills a shape, level by level, until no row has a node left to expand.

    Args:
        shape: where the nodes are.
        root: last committed token per row.
        limits: deepest node per row.
        propose: tokens and log-probabilities `[batch, frontier, rank]` for a frontier; -inf where there is no child.

    Returns:
        The tree in its full shape, and which of its nodes exist; a node without a parent does not.
    """
    tree = DraftTree.from_root(root)
    tokens, scores = [tree.tokens], [tree.scores]
    for depth, level in enumerate(shape.levels):
        above = scores[-1].index_select(1, level.members)
        valid = (above > -torch.inf) & (limits > depth).unsqueeze(-1)
        if not topology.widest(valid.sum(-1), 1):
            break
        heads = tokens[-1].index_select(1, level.members)
        found, edges = propose(Frontier(heads, level.above.expand_as(heads), valid, depth), level)
        if (short := level.count - edges.shape[2]) > 0:
            found = torch.nn.functional.pad(found, (0, short))
            edges = torch.nn.functional.pad(edges, (0, short), value=-torch.inf)
        paths = (above.unsqueeze(-1) + edges.clamp_max(0)).masked_fill(~valid.unsqueeze(-1), -torch.inf)
        tokens.append(found[:, level.parent, level.rank])
        scores.append(paths[:, level.parent, level.rank])
    nodes = shape.order.shape[0]
    drafted = _columns(tokens, nodes, 0).index_select(1, shape.order)
    paths = _columns(scores, nodes, -torch.inf).index_select(1, shape.order)
    exists = paths > -torch.inf
    return DraftTree(drafted, shape.parents.expand_as(drafted), exists.sum(-1), paths), exists


def _columns(parts: list[Tensor], nodes: int, fill: int | float) -> Tensor:
    """The parts side by side, filled up to the number of nodes."""
    joined = torch.cat(parts, 1)
    return torch.nn.functional.pad(joined, (0, nodes - joined.shape[1]), value=fill)


def compact(tree: DraftTree, exists: Bool[Tensor, "batch nodes"]) -> DraftTree:
    """The tree without the nodes that do not exist."""
    if topology.narrowest(tree.num_nodes) == tree.width:
        return tree
    order = exists.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return topology.take(tree, order[:, : topology.widest(tree.num_nodes, tree.width)], tree.num_nodes)
