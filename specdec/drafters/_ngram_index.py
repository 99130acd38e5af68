"""Where did the last few tokens occur before? An index of n-grams over a growing token log.

The idea is that of the match finder of LZ77 compressors: for some sizes n, a table maps each n-gram to the newest
position it precedes, and every position links to the one before it with the same n-gram. A query walks a chain from
the newest position back, at most `limit` links a size, so its cost does not depend on the length of the log. The chain
of the largest size is walked first: it finds long matches that are too old to be among the newest of a short n-gram.
Smaller sizes are walked only as long as fewer than `limit` occurrences are known.

A position is the index of the token *after* the n-gram, the one that an occurrence proposes. It is counted from the
first token ever appended, so positions stay what they are when old tokens are dropped. A log may hold several
sequences, each closed by a separator; no n-gram crosses one.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdec.errors import UnsupportedError

if TYPE_CHECKING:
    Ids = array[int]
else:  # not subscriptable at run time before Python 3.12
    Ids = array

SEPARATOR = -1
_SIZES = (2, 4, 8)


class NGramIndex:
    """A token log and the chains of its n-grams.

    Args:
        shortest: shortest match that is found, in tokens.
        longest: length at which the count of matching tokens stops.
        limit: occurrences examined per n-gram size, newest first.

    Example:
        >>> log = NGramIndex(shortest=1, longest=8, limit=16)
        >>> log.extend([5, 6, 7, 9, 6, 7])
        >>> log.matches(log.tokens)  # "6 7" came before position 3
        {3: 2}
    """

    def __init__(self, *, shortest: int, longest: int, limit: int) -> None:
        if not 1 <= shortest <= longest or limit < 1:
            raise UnsupportedError(
                f"need 1 <= shortest match <= longest match and at least one occurrence to examine, got "
                f"shortest={shortest}, longest={longest}, occurrences={limit}."
            )
        sizes = sorted({shortest, *(size for size in _SIZES if shortest < size <= longest)})
        self.tokens: Ids = array("i")
        self.base = 0  # position of tokens[0]
        self._start = 0  # position of the first token of the open sequence
        self._longest, self._limit = longest, limit
        self._chains: list[tuple[int, dict[bytes, int], Ids]] = [(size, {}, array("q")) for size in sizes]

    @property
    def end(self) -> int:
        """Position of the token that will be appended next."""
        return self.base + len(self.tokens)

    def append(self, token: int) -> None:
        """Appends one token; the n-grams before it now have an occurrence that proposes it."""
        tokens = self.tokens
        length = len(tokens)
        position = self.base + length
        inside = position - self._start
        for size, newest, links in self._chains:
            if inside < size:
                links.append(-1)
            else:
                key = tokens[length - size :].tobytes()
                links.append(newest.get(key, -1))
                newest[key] = position
        tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens in order."""
        for token in tokens:
            self.append(token)

    def separate(self) -> None:
        """Closes the sequence; the next token starts another one."""
        self.tokens.append(SEPARATOR)
        for _, _, links in self._chains:
            links.append(-1)
        self._start = self.end

    def matches(self, tail: Ids) -> dict[int, int]:
        """Positions before which the end of `tail` occurs, and how many tokens match there (at most `longest`).

        `tail` may be this log's own `tokens`. Positions found by way of the same n-gram size come newest first.
        """
        found: dict[int, int] = {}
        tokens, base, limit = self.tokens, self.base, self._limit
        whole = tail[-self._longest :]
        most = len(whole)
        for size, newest, links in reversed(self._chains):
            if size > most or len(found) >= limit:
                continue
            position = newest.get(whole[most - size :].tobytes(), -1)
            for _ in range(limit):
                index = position - base
                if index < 0:
                    break
                if position not in found:
                    length = size
                    if index >= most and tokens[index - most : index] == whole:
                        length = most
                    while length < most and length < index and tokens[index - 1 - length] == whole[-1 - length]:
                        length += 1
                    found[position] = length
                position = links[index]
        return found

    def drop(self, count: int) -> None:
        """Forgets the first `count` tokens, which must be whole closed sequences, and frees their memory."""
        tokens, end = self.tokens, self.base + count
        for size, newest, links in self._chains:
            for stop in range(size, count):
                key = tokens[stop - size : stop].tobytes()
                if newest.get(key, end) < end:
                    del newest[key]
            del links[:count]
        del tokens[:count]
        self.base = end
