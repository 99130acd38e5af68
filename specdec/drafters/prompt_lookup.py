"""Prompt lookup: propose what followed the last tokens when they occurred before.

Source: Saxena, Prompt Lookup Decoding (2023). Three things differ from the common form. The *longest* match wins,
not the first one found, and among equally long ones the most recent. Other continuations follow in that order, so
that a tree can hold several. And scores are estimated probabilities, learned while the request runs (`HitRate`).
"""

from specdec.drafters._continuations import Branch, Pool, tokens_after
from specdec.drafters._lookup import LookupDrafter, LookupRow
from specdec.drafters._ngram_index import NGramIndex
from specdec.drafters.hit_rate import HitRate


class PromptLookupDrafter(LookupDrafter):
    """Copies from the request's own text.

    **Scale.** Continuations are ranked by match length, then by recency. The first has the probability `rate` that a
    match of its length is right; each later one has what the better ones leave over, times the rate of later
    candidates at its length. No score rises with rank, and the scores of siblings add up to at most 1.

    Args:
        max_ngram: length at which the count of matching tokens stops.
        min_ngram: shortest match that proposes anything.
        occurrences: earlier occurrences examined per n-gram size, newest first: the bound on the work of a token.

    Example:
        >>> import torch
        >>> from specdec.protocols import DraftContext
        >>> from specdec.types import Frontier
        >>> drafter = PromptLookupDrafter()
        >>> text = torch.tensor([[5, 6, 7, 8, 6, 9, 5, 6]])
        >>> drafter.start(DraftContext(tokens=text, mask=torch.ones_like(text, dtype=torch.bool), vocab_size=10))
        >>> roots = Frontier.from_root(text[:, -1], valid=torch.tensor([True]))
        >>> drafter.children(roots, count=3).tokens  # after "5 6" came 7; after the last "6" came 9
        tensor([[[7, 9, 0]]])
    """

    def __init__(self, *, max_ngram: int = 16, min_ngram: int = 1, occurrences: int = 16) -> None:
        super().__init__()
        self._options = {"shortest": min_ngram, "longest": max_ngram, "limit": occurrences}
        NGramIndex(**self._options)  # raises on options that do not fit together

    @property
    def has_device_form(self) -> bool:
        """Whether `ops.lookup_tree` takes every option that was given."""
        return self._options["shortest"] == 1

    def _open(self, tokens: list[int], vocab_size: int) -> LookupRow:
        log = NGramIndex(**self._options)
        log.extend(tokens)
        return _Row(log, vocab_size)


class _Row(LookupRow):
    def __init__(self, log: NGramIndex, vocab_size: int) -> None:
        super().__init__(log)
        self._vocab_size = vocab_size
        self._first, self._later = HitRate(), HitRate(hits=0.5, gain=0.5)

    def probabilities(self, node: Branch) -> dict[int, float]:
        chances: dict[int, float] = {}
        left, last, rate = 1.0, 1.0, self._first
        for token, child in node.children.items():
            chance = rate.rate(_match_length(child) - 1)
            chances[token] = last = min(last, left * chance)
            left *= 1.0 - chance
            rate = self._later
        return chances

    def _look_up(self) -> Branch:
        found = self.log.matches(self.log.tokens)
        ranked = sorted(zip(found.values(), found.keys(), strict=True), reverse=True)
        pool = Pool()
        for length, position in ranked:
            pool.add(tokens_after(self.log, position, repeat=True), length)
        return Branch(pool.continuations, self._vocab_size, ranked[0][0] if ranked else 0)

    def _learn(self, node: Branch, token: int) -> None:
        rate = self._first
        for candidate, child in node.children.items():
            rate.learn(_match_length(child) - 1, candidate == token)
            if candidate == token:
                return
            rate = self._later


def _match_length(node: Branch) -> int:
    """Tokens that match before `node` at its best occurrence, those of the path included."""
    return node.continuations[0].length + node.depth
