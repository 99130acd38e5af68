"""A bounded memory of token sequences that can be searched by their contents.

First in, first out, by number of sequences and by number of tokens. What is evicted is gone: its tokens, its n-grams
and its links are freed, so memory depends on the limits and not on how much was ever added.
"""

from collections import Counter, deque
from collections.abc import Sequence

from specdec.drafters._ngram_index import Ids, NGramIndex
from specdec.errors import ShapeError, UnsupportedError


class SuffixStore:
    """Sequences of earlier requests, or of any text that the target is likely to repeat.

    Args:
        max_requests: sequences that are kept; 0 keeps nothing.
        max_tokens: tokens that are kept, over all sequences. Of a longer sequence its end is kept.
        max_match: length at which the count of matching tokens stops.
        min_match: shortest match that is found.
        occurrences: occurrences examined per n-gram size, newest first.

    Attributes:
        log: the index that a drafter searches.

    Example:
        >>> store = SuffixStore(max_requests=2)
        >>> for text in [1, 2, 3], [1, 2, 4], [1, 2, 4, 5]:
        ...     store.add(text)
        >>> len(store), store.num_tokens  # the first one is forgotten
        (2, 7)
        >>> store.continuations([9, 1, 2])
        {4: 2}
    """

    def __init__(
        self,
        *,
        max_requests: int = 1000,
        max_tokens: int = 131_072,
        max_match: int = 32,
        min_match: int = 1,
        occurrences: int = 16,
    ) -> None:
        if max_requests < 0 or max_tokens < 1:
            raise UnsupportedError(
                f"need max_requests >= 0 and max_tokens >= 1, got {max_requests} and {max_tokens}; "
                f"max_requests=0 switches the memory off."
            )
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._options = {"shortest": min_match, "longest": max_match, "limit": occurrences}
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.log = NGramIndex(**self._options)
        self._lengths: deque[int] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, over all sequences."""
        return self._num_tokens

    def add(self, tokens: Sequence[int]) -> None:
        """Remembers a sequence of target ids and forgets the oldest ones that no longer fit."""
        if not self._max_requests or not tokens:
            return
        if min(tokens) < 0:
            raise ShapeError(f"a stored sequence must hold token ids >= 0, got {min(tokens)}.")
        kept = tokens[-self._max_tokens :]
        while len(self._lengths) >= self._max_requests or self._num_tokens + len(kept) > self._max_tokens:
            length = self._lengths.popleft()
            self.log.drop(length + 1)  # the separator goes too
            self._num_tokens -= length
        self.log.extend(kept)
        self.log.separate()
        self._lengths.append(len(kept))
        self._num_tokens += len(kept)

    def continuations(self, suffix: Sequence[int]) -> dict[int, int]:
        """How often each token followed the longest stored match of the end of `suffix`, most frequent first."""
        found = self.log.matches(Ids("i", suffix))
        longest = max(found.values(), default=0)
        after = (self.log.tokens[position - self.log.base] for position, n in found.items() if n == longest)
        return dict(Counter(token for token in after if token >= 0).most_common())
