"""From a drafter's scores to candidates of the target."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.types import Candidates


def log_law(scores: Float[Tensor, "*lead rank"], temperature: float) -> Float[Tensor, "*lead rank"]:
    """Log-probabilities of scores at a temperature, in float32 or wider."""
    return (scores / temperature).log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def candidates(
    log_probs: Float[Tensor, "batch frontier rank"],
    ids: Int[Tensor, "batch frontier rank"] | None,
    count: int,
    vocab_size: int,
    device: torch.device,
) -> Candidates:
    """The best tokens of each node, and the law over the target's vocabulary that draws follow.

    Args:
        log_probs: of a drafter's tokens.
        ids: the target's id of each; None if they are all tokens in order.
        count: most proposals of a node.
        vocab_size: tokens of the target.
        device: where the answer is wanted.
    """
    top, ranks = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    law = log_probs.exp()
    if ids is not None:
        ranks = ids.gather(-1, ranks)
        law = law.new_zeros(*law.shape[:2], vocab_size).scatter_(-1, ids, law)
    return Candidates(ranks.to(device), top.to(device), law.to(device))


def nothing(tokens: Int[Tensor, "batch frontier"]) -> Candidates:
    """No proposal for any node."""
    return Candidates(tokens[:, :, None], torch.full((*tokens.shape, 1), -torch.inf, device=tokens.device))


def spread(found: Candidates, frontier: int) -> Candidates:
    """The answer for one node as that of all nodes of a level."""
    shared = (found.tokens, found.log_probs, found.probs)
    return Candidates(*(None if each is None else each.expand(-1, frontier, -1) for each in shared))  # type: ignore[arg-type]  # tokens and log-probabilities are there
