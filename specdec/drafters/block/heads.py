"""Heads that make a slot's law depend on the token before it, and one that tells how sure a slot is.

A block drafter's slots are computed side by side and know nothing of each other's tokens. The candidate selector
(DFlash 2) adds a low-rank edge between a candidate and the token before it, the Markov head (DSpark) a low-rank bias
over the whole vocabulary. Names of modules are those of published checkpoints.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters.block.spec import BlockSpec


class CandidateSelector(nn.Module):
    """Scores of the best candidates of a slot, given the token before it (DFlash 2)."""

    def __init__(self, spec: BlockSpec) -> None:
        """Codebooks of zeros, which select by the logits alone."""
        super().__init__()
        self.top_k = spec.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(spec.vocab_size, spec.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(spec.vocab_size, spec.selector_rank))
        self.hidden_projection = nn.Linear(spec.hidden_size, spec.selector_rank, bias=False)

    def forward(
        self,
        hidden: Float[Tensor, "batch hidden"],
        logits: Float[Tensor, "batch vocab"],
        previous: Int[Tensor, "batch paths"],
        to_target: Int[Tensor, " vocab"] | None = None,
    ) -> tuple[Int[Tensor, "batch paths rank"], Float[Tensor, "batch paths rank"]]:
        """Candidates of one slot and their scores after each of several tokens.

        Args:
            hidden: the slot's output.
            logits: its logits.
            previous: tokens that may stand before it.
            to_target: id of each logit; None if they are all tokens in order.
        """
        tokens, unary = self.candidates(logits, to_target)
        return tokens[:, None].expand(-1, previous.shape[1], -1), self.edges(hidden, tokens, unary, previous)

    def candidates(
        self, logits: Float[Tensor, "*lead vocab"], to_target: Int[Tensor, " vocab"] | None = None
    ) -> tuple[Int[Tensor, "*lead rank"], Float[Tensor, "*lead rank"]]:
        """The best tokens by the logits alone, and these logits."""
        unary, tokens = best(logits, self.top_k)
        return tokens if to_target is None else to_target[tokens], unary

    def edges(
        self,
        hidden: Float[Tensor, "*lead hidden"],
        tokens: Int[Tensor, "*lead rank"],
        unary: Float[Tensor, "*lead rank"],
        previous: Int[Tensor, "*lead paths"],
    ) -> Float[Tensor, "*lead paths rank"]:
        """Scores of candidates after each of several tokens, of any number of slots at once."""
        paths = self.predecessor_codebook[previous] * self.hidden_projection(hidden).unsqueeze(-2)
        edges: Tensor = paths @ self.successor_codebook[tokens].transpose(-1, -2)
        return unary.unsqueeze(-2) + edges


class MarkovHead(nn.Module):
    """A bias on a slot's logits that depends on the token before it (DSpark).

    `vanilla` looks it up, `gated` lets the slot's output weigh the look-up, `rnn` keeps a state along the path.
    """

    def __init__(self, spec: BlockSpec) -> None:
        """Random weights."""
        super().__init__()
        self.kind, rank = spec.markov_kind, spec.markov_rank
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(spec.hidden_size + rank, rank) if self.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank) if self.kind == "rnn" else None

    def forward(
        self,
        hidden: Float[Tensor, "batch hidden"],
        previous: Int[Tensor, "batch paths"],
        state: Float[Tensor, "batch paths rank"] | None = None,
    ) -> tuple[Float[Tensor, "batch paths vocab"], Float[Tensor, "batch paths rank"] | None]:
        """The bias of one slot after each of several tokens, and the state of each path with that token.

        Args:
            hidden: the slot's output.
            previous: tokens that may stand before it.
            state: what this returned for the paths before those tokens; None at the anchor.
        """
        token = self.markov_w1(previous)
        spread = hidden[:, None].expand(-1, previous.shape[1], -1).to(token.dtype)
        if self.gate_proj is not None:
            token = self.gate_proj(torch.cat([spread, token], -1)).sigmoid() * token
        if self.joint_proj is not None:
            before = torch.zeros_like(token) if state is None else state
            gate, new, out = self.joint_proj(torch.cat([before, token, spread], -1)).chunk(3, -1)
            gate = gate.sigmoid()
            return self.markov_w2(out.tanh()), gate * before + (1 - gate) * new.tanh()
        return self.markov_w2(token), None


class ConfidenceHead(nn.Module):
    """Probability that the target accepts what a slot drafts, given that all before it is accepted (DSpark)."""

    def __init__(self, inputs: int) -> None:
        """Random weights."""
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(
        self, hidden: Float[Tensor, "batch paths hidden"], token: Float[Tensor, "batch paths rank"] | None
    ) -> Float[Tensor, "batch paths"]:
        """The probability, from a slot's output and the Markov head's row of the token before it."""
        given = hidden if token is None else torch.cat([hidden, token.to(hidden.dtype)], -1)
        logit: Tensor = self.proj(given).squeeze(-1)
        return logit.sigmoid()


PART = 4096
"""Numbers among which the largest are found at once."""


def best(
    logits: Float[Tensor, "*lead vocab"], count: int
) -> tuple[Float[Tensor, "*lead rank"], Int[Tensor, "*lead rank"]]:
    """The largest logits and their places, largest first; of a large vocabulary part by part, side by side."""
    size = logits.shape[-1]
    if size <= 2 * PART or count > PART:
        values, places = logits.topk(count, dim=-1)
        return values, places
    parts = nn.functional.pad(logits, (0, -size % PART), value=-torch.inf).unflatten(-1, (-1, PART))
    values, places = parts.topk(count, dim=-1)
    places = places + torch.arange(0, parts.shape[-2] * PART, PART, device=logits.device)[:, None]
    values, chosen = values.flatten(-2).topk(count, dim=-1)
    return values, places.flatten(-2).gather(-1, chosen)
