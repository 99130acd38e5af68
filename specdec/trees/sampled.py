"""A tree whose children are drawn from the drafter's law, without replacement, in the order of the draws.

The verifiers that use the draft law (rejection, block, recursive rejection, traversal) need trees of this kind. Their
proof asks that *how many* children a node gets is decided before any of them is drawn: the shape here is fixed, a
smaller budget cuts the shape and not the drawn nodes, and nothing is dropped for its probability.

One Gumbel top-k is a run of draws without replacement (Kool et al., arXiv 1903.06059): with independent standard
exponentials E, the tokens in falling order of `law / E` are ordered exactly as draws from the law, each renormalised
over what is left.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops._checks import require_whole
from specdec.protocols import Drafter
from specdec.trees import _shape, topology
from specdec.types import Candidates, DraftTree, Frontier


class Sampled:
    """Draws the children of each node from the drafter's law, without replacement.

    A node whose law has fewer tokens than its shape has children gets one child for each of them.

    Args:
        branches: children of a node by depth: `(3, 2, 1)` gives three children to the root, two to each of these and
            one to each of those. `(3, 2, 1)` if neither this nor `choices` is given.
        choices: the shape as tuples of draws, as in `Fixed`: `(0, 1)` is the second draw below the first draw.
        candidates: proposals to ask a drafter for, at least. One that knows its whole law (`Candidates.probs`) draws
            from all of it; for others the draw is among these proposals, normalised.

    Raises:
        UnsupportedError: if both or no usable shape is given, or if a draw is left out (`(1,)` without `(0,)`):
            skipping a drawn token would not be a draw without replacement.

    Example:
        >>> from specdec import trees
        >>> trees.Sampled(branches=(3, 2, 1))
        <Sampled: 15 nodes, 3 levels, 16 candidates>
    """

    def __init__(
        self,
        branches: Sequence[int] | None = None,
        *,
        choices: Sequence[Sequence[int]] | None = None,
        candidates: int = 16,
    ) -> None:
        require_whole("Sampled", candidates=candidates)
        if choices is None:
            choices = _uniform((3, 2, 1) if branches is None else branches)
        elif branches is not None:
            raise UnsupportedError("Sampled: branches and choices both describe the shape; give one of them.")
        checked = _shape.checked("Sampled", choices)
        for choice in checked:
            if choice[-1] > 0 and (*choice[:-1], choice[-1] - 1) not in checked:
                raise UnsupportedError(
                    f"Sampled: {choice} needs {(*choice[:-1], choice[-1] - 1)} before it; a draw cannot be skipped."
                )
        self._choices = tuple(sorted(checked, key=lambda choice: (len(choice), choice)))
        self._candidates = candidates

    def __repr__(self) -> str:
        levels = len(self._choices[-1])
        return f"<Sampled: {self.nodes} nodes, {levels} levels, {self._candidates} candidates>"

    @property
    def nodes(self) -> int:
        """Tree budget: nodes of the shape."""
        return len(self._choices)

    @property
    def sampled(self) -> bool:
        """True: the tree carries the laws it was drawn from."""
        return True

    @property
    def chain(self) -> bool:
        """Whether every node has at most one child."""
        return _shape.is_chain(self._choices)

    def grow(
        self,
        drafter: Drafter,
        root: Int[Tensor, " batch"],
        limits: Int[Tensor, " batch"],
        budget: int,
        *,
        vocab_size: int,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """Draws the tree of one round. Laws of nodes without children are zeros.

        Args:
            drafter: gives the law at each node.
            root: last committed token per row.
            limits: deepest node per row; 0 leaves the root alone.
            budget: how much of the shape to keep, in breadth-first order; 0 calls no drafter.
            vocab_size: width of `draft_probs`.
            generator: source of the draws.

        Raises:
            ShapeError: if the drafter's `probs` are not over `vocab_size` tokens.
        """
        if budget < 1 or not topology.widest(limits, 1):
            return DraftTree.from_root(root)
        shape = _shape.plan(self._choices[:budget], root.device)
        laws: list[Tensor] = []

        def propose(frontier: Frontier, level: _shape.Level) -> tuple[Tensor, Tensor]:
            found = drafter.children(frontier, max(level.count, self._candidates))
            law = found.law(vocab_size)
            law = law.to(laws[0].dtype) if laws else law  # sources of a combination may differ from level to level
            if law.shape[-1] != vocab_size:
                raise ShapeError(
                    f"the drafter's probs are over {law.shape[-1]} tokens, the target has {vocab_size}: "
                    "scatter them over the target's vocabulary."
                )
            laws.append(law)
            return _draw_children(found, law, level.count, generator)

        tree, exists = _shape.grow(shape, root, limits, propose)
        probs = laws[0].new_zeros(*tree.tokens.shape, vocab_size)
        for level, law in zip(shape.levels, laws, strict=False):
            probs.index_copy_(1, level.slots, law)
        full = DraftTree(tree.tokens, tree.parents, tree.num_nodes, tree.scores, probs)
        drawn = _shape.compact(full, exists)
        if drawn is not full and drawn.draft_probs is not None:
            # Where nothing was drawn, a drafter's answer may be anything.
            leaves = topology.num_children(drawn.parents) == 0
            drawn.draft_probs.masked_fill_(leaves.unsqueeze(-1), 0)
        return drawn


def sampled_chain(nodes: int, *, candidates: int = 16) -> Sampled:
    """A sampled chain: one draw a level.

    Example:
        >>> from specdec import trees
        >>> trees.sampled_chain(nodes=4).chain
        True
    """
    require_whole("sampled_chain", nodes=nodes)
    return Sampled((1,) * nodes, candidates=candidates)


def draw(
    law: Float[Tensor, "batch frontier outcomes"], count: int, generator: torch.Generator | None = None
) -> Int[Tensor, "batch frontier draws"]:
    """At most `count` outcomes per node, drawn without replacement, in the order of the draws.

    Outcomes of zero probability come last and are not draws: compare their probability with 0. The law need not be
    normalised.

    Example:
        >>> import torch
        >>> from specdec import trees
        >>> trees.draw(torch.tensor([[[0.0, 1.0, 0.0]]]), count=1)
        tensor([[[1]]])
    """
    if topology.readable(law) and bool((law < 0).any()):
        raise ShapeError("a law to draw from holds negative numbers; a drafter's probs must be probabilities.")
    # In float64: a float32 uniform has 24 bits, and a token below 2**-24 would never be drawn.
    uniform = torch.rand(law.shape, dtype=torch.float64, device=law.device, generator=generator)
    return (law / -uniform.log_()).topk(min(count, law.shape[-1]), dim=-1).indices


def _draw_children(
    found: Candidates, law: Float[Tensor, "batch frontier vocab"], count: int, generator: torch.Generator | None
) -> tuple[Int[Tensor, "batch frontier draws"], Float[Tensor, "batch frontier draws"]]:
    """Drawn tokens and their log-probabilities under the law; -inf where the law has run out."""
    if found.probs is not None:
        tokens = draw(law, count, generator)
        return tokens, law.gather(-1, tokens).log()
    # Only proposals have mass, so that the draw can be among them. Where there is none, the id may be anyone's.
    none = found.log_probs == -torch.inf
    # An id that stands there twice has its mass in the law once, and would be drawn too often.
    again = ((found.tokens.unsqueeze(-1) == found.tokens.unsqueeze(-2)) & ~none.unsqueeze(-2)).tril(-1).any(-1)
    among = law.gather(-1, found.tokens).masked_fill(none | again, 0)
    ranks = draw(among, count, generator)
    return found.tokens.gather(-1, ranks), among.gather(-1, ranks).log()


def _uniform(branches: Sequence[int]) -> list[tuple[int, ...]]:
    """The shape in which every node of a depth has the same number of children."""
    given: Any = branches
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UnsupportedError(f"Sampled: branches are numbers of children, one a level, got {branches!r}.")
    for children in branches:
        require_whole("Sampled", branches=children)
    return [choice for depth in range(len(branches)) for choice in product(*map(range, branches[: depth + 1]))]
