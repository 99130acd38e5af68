"""Suffix drafting: continuations of the last tokens with their frequencies, here and in earlier requests.

Source: Oliaro et al., SuffixDecoding, arXiv:2411.04975. For every match length m there is a trie of what followed the
last m tokens, with counts. A child's share is its count over the counts of all siblings, a node's share is the product
along its path, and nodes below a minimum are left out. A trie may hold at most factor * m tokens; the match length
whose trie has the largest sum of shares is used (the longer one on a tie). The paper keeps a suffix tree; here the
tries are unfolded from the positions that an n-gram index finds, which gives the same counts as long as no n-gram has
more than `occurrences` of them, and the newest ones otherwise. Counts of the request and of the store are added up.
"""

import heapq
from itertools import count, groupby
from operator import itemgetter

from specdec.drafters._continuations import Branch, Pool, tokens_after
from specdec.drafters._lookup import LookupDrafter, LookupRow
from specdec.drafters._ngram_index import NGramIndex
from specdec.drafters.hit_rate import HitRate
from specdec.drafters.suffix_store import SuffixStore
from specdec.errors import UnsupportedError

_MIN_MATCH, _FACTOR, _MIN_PROB = 1, 4.0, 0.1  # of a drafter that is not told otherwise
_ROUNDING = 1e-9  # sums and products of shares may miss their exact values by this much


class SuffixDrafter(LookupDrafter):
    """Proposes continuations by how often they were seen after the longest useful match.

    **Scale.** A child's probability is its share among its siblings times the learned probability (`HitRate`) that the
    next token is among the continuations of a match of that length at all. Siblings add up to at most 0.97.

    Args:
        max_match: length at which the count of matching tokens stops.
        min_match: shortest match that proposes anything.
        factor: a match of m tokens proposes nodes down to depth `int(factor * m)`.
        min_prob: smallest share of a proposed node along its path.
        occurrences: occurrences examined per n-gram size and source, newest first: the bound on the work of a token.
        max_requests: finished requests that are remembered; 0 remembers nothing.
        max_tokens: tokens that are remembered, over all requests; the oldest requests go first.

    Attributes:
        store: what earlier requests generated. Fill it beforehand with `store.add(tokens)`.

    Example:
        >>> import torch
        >>> from specdec.protocols import DraftContext
        >>> from specdec.types import Frontier
        >>> drafter = SuffixDrafter()
        >>> drafter.store.add([1, 2, 3, 4])
        >>> text = torch.tensor([[7, 1, 2]])
        >>> drafter.start(DraftContext(tokens=text, mask=torch.ones_like(text, dtype=torch.bool), vocab_size=10))
        >>> roots = Frontier.from_root(text[:, -1], valid=torch.tensor([True]))
        >>> drafter.children(roots, count=1).tokens
        tensor([[[3]]])
    """

    def __init__(
        self,
        *,
        max_match: int = 32,
        min_match: int = _MIN_MATCH,
        factor: float = _FACTOR,
        min_prob: float = _MIN_PROB,
        occurrences: int = 16,
        max_requests: int = 1000,
        max_tokens: int = 131_072,
    ) -> None:
        super().__init__()
        if factor <= 0 or not 0 <= min_prob <= 1:
            raise UnsupportedError(f"need factor > 0 and 0 <= min_prob <= 1, got factor={factor}, min_prob={min_prob}.")
        self._options = {"shortest": min_match, "longest": max_match, "limit": occurrences}
        self._factor, self._min_prob, self._max_match = factor, min_prob, max_match
        self.store = SuffixStore(
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_match=max_match,
            min_match=min_match,
            occurrences=occurrences,
        )

    @property
    def has_device_form(self) -> bool:
        """Whether `ops.lookup_tree` takes every option that was given; nothing is remembered there."""
        return (self._options["shortest"], self._factor, self._min_prob) == (_MIN_MATCH, _FACTOR, _MIN_PROB)

    def _open(self, tokens: list[int], vocab_size: int) -> "_Row":
        log = NGramIndex(**self._options)
        log.extend(tokens)
        return _Row(log, self.store, vocab_size, self._factor, self._min_prob)

    def _close(self, row: LookupRow) -> None:
        # Some prompt goes along, so that the first generated tokens have something to be found by.
        generated = len(row.log.tokens) - row.given
        if generated:
            self.store.add(row.log.tokens[-generated - self._max_match :])


class _Row(LookupRow):
    def __init__(self, log: NGramIndex, store: SuffixStore, vocab_size: int, factor: float, min_prob: float) -> None:
        super().__init__(log)
        self._store, self._vocab_size = store, vocab_size
        self._factor, self._min_prob = factor, min_prob - _ROUNDING
        self._known = HitRate(hits=2.0)

    def probabilities(self, node: Branch) -> dict[int, float]:
        if node.depth >= self._cap(node.length - node.depth):
            return {}
        known = self._known.rate(node.length) if node.children else 0.0
        children = [(child.share, token) for token, child in node.children.items() if child.share >= self._min_prob]
        children.sort(key=itemgetter(0), reverse=True)
        return {token: known * share / node.share for share, token in children}

    def _cap(self, length: int) -> int:
        return int(self._factor * length)

    def _look_up(self) -> Branch:
        """The trie of the match length with the largest sum of shares."""
        logs = self.log, self._store.log
        found = [
            (-length, source, -position)  # sorts by length, own text first, then newest first
            for source, log in enumerate(logs)
            for position, length in log.matches(self.log.tokens).items()
        ]
        found.sort()
        pool = Pool()
        best, best_sum = Branch([], self._vocab_size, 0), 0.0
        for negative, group in groupby(found, key=itemgetter(0)):
            length = -negative
            if best_sum >= self._cap(length) - _ROUNDING:  # a shorter match cannot hold that many tokens
                break
            for _, source, position in group:
                pool.add(tokens_after(logs[source], -position, repeat=source == 0), length)
            trie = Branch(pool.continuations, self._vocab_size, length)
            total = sum_of_shares(trie, self._cap(length), self._min_prob)
            if total > best_sum + _ROUNDING:
                best, best_sum = trie, total
        return best

    def _learn(self, node: Branch, token: int) -> None:
        if node.children:
            self._known.learn(node.length, token in node.children)


def sum_of_shares(trie: Branch, most: int, least: float) -> float:
    """Sum of the `most` largest shares below the root of `trie`, those under `least` left out."""
    total, left, order = 0.0, most, count()
    waiting = [(-trie.share, next(order), trie)]
    while waiting and left:
        share, _, node = heapq.heappop(waiting)
        if node is not trie:
            total, left = total - share, left - 1
        run = node.run(left)  # all of the same share, so they come next
        total, left = total - share * run, left - run
        for child in node.skip(run).children.values() if left else ():
            if child.share >= least:
                heapq.heappush(waiting, (-child.share, next(order), child))
    return total
