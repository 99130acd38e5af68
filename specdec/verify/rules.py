"""The arithmetic of acceptance: pure functions of probabilities, shared by every rule.

A draft rule compares the target's law at a node with the law a child was drawn from. What a rejection leaves is the
part of the target that the draft law did not cover; normalised, it is the law for the next child or the last token.
Path rules carry a *weight* besides, the share of the target's law at a node that is still to be served there: 1 for
rules that decide node by node.

Sources: speculative sampling (arXiv 2211.17192, 2302.01318), block verification (2403.10444), drawing without
replacement (2402.14160, 2402.12374), traversal verification (2505.12398).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def normalise(
    weights: Float[Tensor, "*rows vocab"], otherwise: Float[Tensor, "*rows vocab"] | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Divides each row by its sum; rows without mass become `otherwise` (as they are if None).

    Example:
        >>> normalise(torch.tensor([[1.0, 3.0], [0.0, 0.0]])).tolist()
        [[0.25, 0.75], [0.0, 0.0]]
    """
    total = weights.sum(-1, keepdim=True)
    known = total > 0
    shares = weights / torch.where(known, total, 1.0)
    return shares if otherwise is None else torch.where(known, shares, otherwise)


def law(weights: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """A normalised copy in float32 or better: half-precision probabilities do not sum to one."""
    wide = weights if weights.dtype == torch.float64 else weights.to(torch.float32)
    return normalise(wide)


def at(probs: Float[Tensor, "*rows vocab"], token: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Probability of one token per row."""
    return probs.gather(-1, token[..., None]).squeeze(-1)


def acceptance(
    target_prob: Float[Tensor, "*rows"], draft_prob: Float[Tensor, "*rows"] | None, weight: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """min(1, weight x target / draft) for one child per row; a draft probability of zero counts as one.

    Example:
        >>> acceptance(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.1]), torch.ones(2)).tolist()
        [0.25, 1.0]
    """
    if draft_prob is None:
        return (weight * target_prob).clamp(max=1.0)
    draft_prob = draft_prob.to(target_prob.dtype)
    return (weight * target_prob / torch.where(draft_prob > 0, draft_prob, 1.0)).clamp(max=1.0)


def uncovered(
    target_probs: Float[Tensor, "*rows vocab"],
    draft_probs: Float[Tensor, "*rows vocab"] | None,
    token: Int[Tensor, "*rows"],
    weight: Float[Tensor, "*rows"],
) -> Float[Tensor, "*rows vocab"]:
    """max(weight x target - draft, 0): the mass that the child `token` cannot serve. Not normalised.

    A child to which the draft law gives no mass (deterministic tree, or a law that is used up) counts as certain, as
    if its law were one-hot. The rule then serves the target's law for each value of the child, so it does not matter
    how the child was chosen.
    """
    rest = weight[..., None] * target_probs
    child = token[..., None]
    if draft_probs is None:
        return rest.scatter_(-1, child, 0.0)
    inside = draft_probs.gather(-1, child) > 0
    rest.addcmul_(draft_probs.to(rest.dtype), inside.to(rest.dtype), value=-1.0).clamp_(min=0.0)
    return rest.scatter_(-1, child, torch.where(inside, rest.gather(-1, child), 0.0))


def weight_after(mass: Float[Tensor, "*rows"], weight: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Share of the target's law that is left at a node when its child failed: mass / (mass + 1 - weight).

    `mass` is the sum of `uncovered`. Where nothing was left to chance (0 / 0) the share stays 1.
    """
    total = mass + (1.0 - weight)  # in this order: weight 1 must stay exactly 1
    return torch.where(total > 0, mass / total, 1.0)


def reject(
    target_probs: Float[Tensor, "*rows vocab"],
    draft_probs: Float[Tensor, "*rows vocab"] | None,
    token: Int[Tensor, "*rows"],
    weight: Float[Tensor, "*rows"],
) -> tuple[Float[Tensor, "*rows vocab"], Float[Tensor, "*rows vocab"] | None, Float[Tensor, "*rows"]]:
    """What a node is left with after its child `token` was rejected.

    Returns:
        The target's remaining law, the law of the next child (drawn without replacement; all zero when it is used
        up), and the remaining weight.
    """
    rest = uncovered(target_probs, draft_probs, token, weight)
    left = None if draft_probs is None else normalise(draft_probs.scatter(-1, token[..., None], 0.0))
    return normalise(rest, target_probs), left, weight_after(rest.sum(-1), weight)
