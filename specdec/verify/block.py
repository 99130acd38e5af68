"""Block verification of a chain: decide on all drafted tokens at once and keep the longest prefix that passes.

Token-by-token rejection wastes luck: a token that the target likes much more than the draft does cannot make up for
an earlier one it liked less. Here each prefix carries a weight, the running product of target / draft cut at 1, and
the longest prefix whose coin falls right is kept, even where shorter ones failed.

Source: block verification (arXiv 2403.10444).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.protocols import TreeBuilder
from specdec.types import DraftTree, Verdict
from specdec.verify import rules
from specdec.verify.base import check_shapes, pick, require_chain, require_chain_builder


class BlockVerification:
    """Block verification, for chains. Lossless, and never accepts fewer tokens on average than `Rejection`.

    Needs the target's law at all nodes at once, so it cannot serve requests whose processors keep state.

    Example:
        >>> from specdec import DraftTree
        >>> from specdec.verify import BlockVerification
        >>> half = torch.tensor([[[0.5, 0.5]] * 3])
        >>> chain = DraftTree(
        ...     tokens=torch.tensor([[0, 1, 1]]), parents=torch.tensor([[-1, 0, 1]]), num_nodes=torch.tensor([3]),
        ...     scores=torch.tensor([[0.0, -0.7, -1.4]]), draft_probs=half,
        ... )
        >>> BlockVerification()(chain, half).num_accepted.item()  # drawn from the target's own law
        2
    """

    lossless: bool = True
    stepwise: bool = False

    def check(self, builder: TreeBuilder) -> None:
        """Raises `UnsupportedError` unless every tree of `builder` is a chain."""
        require_chain_builder(builder, "BlockVerification")

    def __call__(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch nodes vocab"],
        *,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        """Two draws per row: how many tokens to keep, and the token after them.

        Args:
            tree: a chain per row; rows may differ in length.
            target_probs: the target's probabilities at every node; padding is never read.
            generator: source of randomness; None is torch's default.

        Raises:
            ShapeError: if the tree is not a chain or `target_probs` does not fit it.
        """
        check_shapes(tree, target_probs)
        require_chain(tree, "BlockVerification")
        target = rules.law(target_probs)
        parents, token = target[:, :-1], tree.tokens[:, 1:]
        draft = None if tree.draft_probs is None else rules.law(tree.draft_probs[:, :-1])
        weight = path_weights(
            torch.where(tree.valid[:, 1:], rules.at(parents, token), 0.0),
            None if draft is None else rules.at(draft, token),
        )
        rest = rules.uncovered(parents, draft, token, weight[:, :-1])
        last = (tree.num_nodes - 1)[:, None]
        index = torch.arange(tree.width, device=last.device)
        passes = torch.cat([rules.weight_after(rest.sum(-1), weight[:, :-1]), weight[:, -1:]], 1)
        passes = torch.where(index < last, passes, torch.where(index == last, weight, 0.0))
        kept = pick(longest(passes), generator)

        rows = torch.arange(kept.shape[0], device=kept.device)
        bonus_law = target[rows, kept]
        if tree.width > 1:
            cut = rest[rows, kept.clamp_max(tree.width - 2)]
            bonus_law = torch.where((kept < last[:, 0])[:, None], rules.normalise(cut, bonus_law), bonus_law)
        steps = torch.arange(1, max(2, tree.width), device=kept.device)
        path = torch.where(steps <= kept[:, None], steps, -1)
        return Verdict(path=path, num_accepted=kept, bonus=pick(bonus_law, generator))


def path_weights(
    target_prob: Float[Tensor, "batch depth"], draft_prob: Float[Tensor, "batch depth"] | None
) -> Float[Tensor, "batch nodes"]:
    """Weight of each prefix of a chain: 1 for the empty one, then min(1, weight x target / draft)."""
    weights = [target_prob.new_ones(target_prob.shape[0])]
    for depth in range(target_prob.shape[1]):
        weights.append(
            rules.acceptance(target_prob[:, depth], None if draft_prob is None else draft_prob[:, depth], weights[-1])
        )
    return torch.stack(weights, 1)


def longest(passes: Float[Tensor, "batch nodes"]) -> Float[Tensor, "batch nodes"]:
    """Law of the last index whose independent coin falls right, if coin i does so with probability `passes[:, i]`.

    Example:
        >>> longest(torch.tensor([[1.0, 0.5, 0.25]])).tolist()
        [[0.375, 0.375, 0.25]]
    """
    fails = (1.0 - passes).flip(-1).cumprod(-1).flip(-1)
    none_later = torch.cat([fails[:, 1:], torch.ones_like(fails[:, :1])], 1)
    return passes * none_later
