"""Reads from the committed tokens which drafted nodes were right.

For a deterministic tree it does not matter what was verified: a node is right if the text went its way. So a drafted
tree is followed by the committed tokens, over later rounds too if need be, and nodes that were pruned before the
target saw them are judged as well, at no cost. That is how drafting can be watched while nothing is verified.

In a sampled tree acceptance is the verifier's decision, so only what it decided counts, and depth by depth: which
sibling was drawn says nothing.
"""

from collections.abc import Sequence

from specdec.control.calibration import Outcome
from specdec.types import Round


class Trail:
    """One row's drafted tree, followed by committed tokens until they leave it.

    Args:
        tokens: token id of each node, padding included.
        parents: parent of each node.
        predicted: the drafter's probability of each node, given its parent.
        nodes: nodes in use.

    >>> trail = Trail([5, 8, 9], [-1, 0, 1], [1.0, 0.5, 0.25], nodes=3)
    >>> trail.follow([8])
    [Outcome(depth=1, predicted=0.5, accepted=True)]
    >>> trail.alive, trail.follow([7, 7]), trail.alive
    (True, [Outcome(depth=2, predicted=0.25, accepted=False)], False)
    """

    def __init__(
        self, tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[float], *, nodes: int
    ) -> None:
        self._tokens = tokens
        self._predicted = predicted
        self._children: dict[int, list[int]] = {}
        for node in range(1, nodes):
            self._children.setdefault(parents[node], []).append(node)
        self._node, self._depth = 0, 0

    @property
    def alive(self) -> bool:
        """Whether the committed tokens are still inside the tree, with nodes below."""
        return self._node in self._children

    def follow(self, tokens: Sequence[int]) -> list[Outcome]:
        """Walks down by committed tokens; returns one outcome for each node whose fate they decide."""
        outcomes: list[Outcome] = []
        for token in tokens:
            if not self.alive:
                break
            children, self._node, self._depth = self._children[self._node], -1, self._depth + 1
            for child in children:
                accepted = self._tokens[child] == token
                outcomes.append(Outcome(self._depth, self._predicted[child], accepted))
                if accepted:
                    self._node = child
        return outcomes


class Trails:
    """The trails of a batch. A row takes up a new tree only when the text has left its old one.

    Rounds of full-width drafting start where the text left a tree, too: so the outcomes are those it would have had.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Trail] = {}

    def follow(self, committed: Sequence[Sequence[int]], drafted: "DraftedRows | None") -> list[Outcome]:
        """Outcomes of one round.

        Args:
            committed: tokens committed, per row.
            drafted: the trees of this round, if it drafted.
        """
        outcomes: list[Outcome] = []
        for row, tokens in enumerate(committed):
            trail = self._rows.get(row)
            if drafted is not None and (trail is None or not trail.alive):
                trail = self._rows[row] = drafted.trail(row)
            if trail is not None:
                outcomes += trail.follow(tokens)
        return outcomes


class DraftedRows:
    """The drafted trees of one round on the host, row by row.

    Args:
        tokens: token ids, per row.
        parents: parents, per row.
        predicted: the drafter's probability of each node given its parent, per row.
        nodes: nodes in use, per row.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        predicted: Sequence[Sequence[float]],
        nodes: Sequence[int],
    ) -> None:
        self._rows = tokens, parents, predicted, nodes

    def trail(self, row: int) -> Trail:
        """The trail at the root of a row's tree."""
        tokens, parents, predicted, nodes = self._rows
        return Trail(tokens[row], parents[row], predicted[row], nodes=nodes[row])


def verified_outcomes(round: Round, predicted: float) -> list[Outcome]:
    """One outcome per row and depth that verification decided; what a stop cut off was not decided.

    Args:
        round: a finished round with a sampled tree.
        predicted: the probability to book them under.
    """
    outcomes = []
    columns = (round.tree.parents, round.tree.num_nodes, round.path, round.num_accepted, round.num_committed)
    for parents, nodes, path, accepted, committed in zip(*(column.tolist() for column in columns), strict=True):
        inner = set(parents[1:nodes])
        decided = accepted + (committed > accepted)
        for depth, node in enumerate([0, *path[:accepted]][:decided], start=1):
            if node in inner:
                outcomes.append(Outcome(depth, predicted, depth <= accepted))
    return outcomes
