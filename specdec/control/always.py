"""The controller that never doubts: every round drafts and verifies the whole tree."""

from specdec.errors import UnsupportedError
from specdec.types import DraftTree, Round


class Always:
    """Drafts the full tree in every round, or a smaller fixed one.

    Args:
        nodes: tree budget of every round, root excluded; None for the tree builder's own. A larger value than the
            tree builder's has no effect; 0 drafts nothing.

    >>> controller = Always(nodes=4)
    >>> controller.start(nodes=15, sampled=False)
    >>> controller.budget()
    4
    """

    def __init__(self, nodes: int | None = None) -> None:
        if nodes is not None and nodes < 0:
            raise UnsupportedError(f"nodes is a number of drafted nodes (0 or more) or None, got {nodes}.")
        self.nodes = nodes
        self._budget = 0

    def start(self, nodes: int, sampled: bool) -> None:
        """Begins a request with this tree budget."""
        self._budget = nodes if self.nodes is None else min(self.nodes, nodes)

    def budget(self) -> int:
        """The same tree budget in every round."""
        return self._budget

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree as it is."""
        return tree

    def observe(self, round: Round) -> None:
        """Learns nothing."""
