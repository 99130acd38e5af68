"""Several drafters in one tree: every source is asked about every node, and answers are merged on one scale.

The scale is that of `Candidates.log_probs`: each source estimates the probability that the target takes a token. Where
two sources propose the same token, the more confident estimate counts. The estimates of a node's children may then
add up to more than 1; if so, they are divided by their sum, which keeps their order. All sources are told the same
frontier, so a node that one proposed is continued by every other that can: a model always, a lookup if the token is
in its trie.
"""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafters.shortlist import Shortlist
from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import DraftContext, Drafter
from specdec.types import Candidates, Frontier


class CombinedDrafter:
    """Merges the proposals of several drafters.

    If a source gives its whole law (`Candidates.probs`) and another source proposes something too, the answer has no
    whole law: what is merged is a list of proposals. If only one source proposes, its answer is handed on unchanged.

    Args:
        drafters: the sources; on equal scores the earlier one ranks first.

    Raises:
        UnsupportedError: for an object that is not a drafter.
        UnsupportedError: for the same drafter twice.
        UnsupportedError: for no drafter.

    Example:
        >>> import torch
        >>> from specdec.drafters import PromptLookupDrafter, SuffixDrafter
        >>> from specdec.protocols import DraftContext
        >>> from specdec.types import Frontier
        >>> drafter = CombinedDrafter(PromptLookupDrafter(), SuffixDrafter())
        >>> text = torch.tensor([[5, 6, 7, 8, 6, 9, 5, 6]])
        >>> drafter.start(DraftContext(tokens=text, mask=torch.ones_like(text, dtype=torch.bool), vocab_size=10))
        >>> roots = Frontier.from_root(text[:, -1], valid=torch.tensor([True]))
        >>> drafter.children(roots, count=2).tokens
        tensor([[[7, 9]]])
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise UnsupportedError("CombinedDrafter needs at least one drafter, got none.")
        for drafter in drafters:
            if isinstance(drafter, type) or not isinstance(drafter, Drafter):
                raise UnsupportedError(f"CombinedDrafter takes drafters (specdec.protocols.Drafter), got {drafter!r}.")
        if len({id(drafter) for drafter in drafters}) < len(drafters):
            raise UnsupportedError("the same drafter was given twice: it would see every token twice. Build two.")
        self._drafters = drafters

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers that any source reads, each once, in order of first mention."""
        return tuple(dict.fromkeys(layer for drafter in self._drafters for layer in drafter.feature_layers))

    @property
    def shortlist(self) -> Shortlist | None:
        """The target's tokens that any source can propose; None for all."""
        return Shortlist.of(self._drafters)

    def start(self, context: DraftContext) -> None:
        """Begins a request with every source, each seeing the features it asked for."""
        shares = self._split(context.features)
        for drafter, features in zip(self._drafters, shares, strict=True):
            drafter.start(dataclasses.replace(context, features=features))

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The best `count` of what the sources propose for each frontier node."""
        answers = [drafter.children(frontier, count) for drafter in self._drafters]
        speaking = [answer for answer in answers if answer.probs is not None or _proposes(answer, frontier)]
        if len(speaking) < 2:
            return speaking[0] if speaking else answers[0]
        return _merge(speaking, count)

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Tells every source what the round committed."""
        for drafter, share in zip(self._drafters, self._split(features), strict=True):
            drafter.commit(tokens, counts, share)

    def finish(self) -> None:
        """Ends the request for every source."""
        for drafter in self._drafters:
            drafter.finish()

    def _split(self, features: Float[Tensor, "batch rows features"] | None) -> Sequence[Tensor | None]:
        layers = self.feature_layers
        if features is None or not layers:
            return [None] * len(self._drafters)
        if features.shape[-1] % len(layers):
            raise ShapeError(
                f"features of {len(layers)} layers {layers} must be concatenated, got a width of "
                f"{features.shape[-1]}, which {len(layers)} does not divide."
            )
        by_layer = dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))
        return [
            torch.cat([by_layer[layer] for layer in drafter.feature_layers], -1) if drafter.feature_layers else None
            for drafter in self._drafters
        ]


def _proposes(answer: Candidates, frontier: Frontier) -> bool:
    return bool(((answer.log_probs[..., :1] > -torch.inf) & frontier.valid[..., None]).any())  # the best comes first


def _merge(answers: Sequence[Candidates], count: int) -> Candidates:
    log_probs = torch.cat([answer.log_probs.float() for answer in answers], -1)
    tokens = torch.cat([answer.tokens for answer in answers], -1)
    log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    rank = torch.arange(tokens.shape[-1], device=tokens.device)
    said_before = (tokens[..., :, None] == tokens[..., None, :]) & (rank[:, None] > rank)
    log_probs = log_probs.masked_fill(said_before.any(-1), -torch.inf)
    log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    total = log_probs.logsumexp(-1, keepdim=True).clamp_min(0.0)
    return Candidates(tokens=tokens[..., :count], log_probs=(log_probs - total)[..., :count])
