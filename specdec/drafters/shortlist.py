"""A part of the target's vocabulary to draft from, which makes the proposal head as small as one likes.

A drafter that proposes from a shortlist is lossless like any other: tokens outside it are never drafted, and come from
the target. How many of the target's own tokens a list covers bounds what can be accepted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """Some of the target's tokens.

    Args:
        ids: distinct ids of the target.
        vocab_size: tokens of the target.

    Raises:
        UnsupportedError: for ids that are not distinct, or no tokens of the target.

    Example:
        >>> import torch
        >>> from specdec import drafters
        >>> counts = torch.tensor([5, 0, 9, 9, 1, 0])  # how often the target chose each token
        >>> shortlist = drafters.Shortlist.from_counts(counts, size=3, pinned=[5])
        >>> shortlist.ids, shortlist.coverage(counts)
        (tensor([2, 3, 5]), 0.75)
    """

    ids: Int[Tensor, " size"]
    vocab_size: int

    def __post_init__(self) -> None:
        ids: Any = self.ids
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UnsupportedError(f"Shortlist: ids must be a tensor of whole numbers, got {ids!r}.")
        known = self.ids.unique()
        if not 0 < len(self.ids) == len(known) or int(known[0]) < 0 or int(known[-1]) >= self.vocab_size:
            raise UnsupportedError(
                f"Shortlist: expected distinct ids from 0 to {self.vocab_size - 1}, one at least; got {self.ids}."
            )

    @staticmethod
    def from_counts(counts: Int[Tensor, " vocab"], size: int, *, pinned: Iterable[int] = ()) -> "Shortlist":
        """The most frequent tokens, the lower id first where counts are equal.

        Args:
            counts: how often the target itself chose each token, over text like that to be drafted.
            size: tokens of the list.
            pinned: tokens that are part of it in any case: those that end or structure a text.

        Raises:
            ShapeError: if the list cannot have this size.
        """
        fixed = sorted(set(pinned))
        if not len(fixed) <= size <= len(counts):
            raise ShapeError(
                f"Shortlist.from_counts: size {size} must be from {len(fixed)} (pinned) to {len(counts)} (tokens)."
            )
        ranked = counts.clone()
        ranked[fixed] = torch.iinfo(ranked.dtype).max
        best = ranked.sort(descending=True, stable=True).indices[:size]
        return Shortlist(best.sort().values, len(counts))

    @staticmethod
    def of(drafters: Sequence[object]) -> "Shortlist | None":
        """The tokens that any of these drafters can propose, as their attributes `shortlist` tell; None for all."""
        lists = [getattr(drafter, "shortlist", None) for drafter in drafters]
        found = [each for each in lists if isinstance(each, Shortlist)]
        if not found or len(found) < len(lists):
            return None
        return Shortlist(torch.cat([each.ids.cpu() for each in found]).unique(), found[0].vocab_size)

    @property
    def mask(self) -> Bool[Tensor, " vocab"]:
        """True for the tokens of the list."""
        return torch.zeros(self.vocab_size, dtype=torch.bool, device=self.ids.device).index_fill(0, self.ids, True)

    def coverage(self, counts: Int[Tensor, " vocab"]) -> float:
        """Share of the counted tokens that the list has: a bound on what can be accepted."""
        return float(counts[self.ids].sum() / counts.sum().clamp_min(1))
