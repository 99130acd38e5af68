"""What came after the occurrences of a match, as a trie that is unfolded only where somebody asks.

Each occurrence contributes the tokens that followed it. An occurrence that overlaps the end of its own text (the text
repeats with period T) runs out after T tokens; it is continued by its own repetition, which is what copying token by
token would give: in a loop of period 1 the draft is as long as one likes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.drafters._ngram_index import Ids, NGramIndex

HORIZON = 64  # tokens kept of a continuation: the deepest node a lookup proposes


class Continuation(NamedTuple):
    """Tokens that followed one or more occurrences.

    Attributes:
        tokens: at most `HORIZON` token ids; nothing counts from the first id on that cannot be proposed.
        length: matching tokens of the best of these occurrences.
        times: how many occurrences were followed by just these tokens.
    """

    tokens: Ids
    length: int
    times: int = 1


@dataclass(slots=True)
class Branch:
    """A node of the trie: the continuations that share the path to it, best first.

    Attributes:
        continuations: those that go through this node.
        vocab_size: ids from here on are never proposed.
        length: tokens before this node that match, those of the path included.
        depth: tokens on the path from the root.
        share: product along the path of a child's count over the counts of its siblings and itself.
    """

    continuations: list[Continuation]
    vocab_size: int
    length: int
    depth: int = 0
    share: float = 1.0
    _children: dict[int, "Branch"] | None = field(default=None, repr=False)

    @property
    def children(self) -> "dict[int, Branch]":
        """Child by token, in the order of its best continuation; not to be changed."""
        if self._children is None:
            self._children = self._unfold()
        return self._children

    def _unfold(self) -> "dict[int, Branch]":
        depth, groups = self.depth, dict[int, list[Continuation]]()
        for continuation in self.continuations:
            if depth < len(continuation.tokens) and 0 <= (token := continuation.tokens[depth]) < self.vocab_size:
                groups.setdefault(token, []).append(continuation)
        counts = [sum(item.times for item in group) for group in groups.values()]
        total = sum(counts)
        return {
            token: Branch(group, self.vocab_size, self.length + 1, depth + 1, self.share * count / total)
            for (token, group), count in zip(groups.items(), counts, strict=True)
        }

    def run(self, most: int) -> int:
        """How many tokens, at most `most`, follow before the continuations part or one of them ends."""
        if not self.continuations:
            return 0
        ahead = [item.tokens[self.depth : self.depth + most] for item in self.continuations]
        first, last = min(ahead), max(ahead)  # in lexical order: all others agree as far as these two do
        for place, (token, other) in enumerate(zip(first, last, strict=False)):
            if token != other or not 0 <= token < self.vocab_size:
                return place
        return min(len(first), len(last))

    def skip(self, run: int) -> "Branch":
        """The node at the end of `run` tokens that follow without a choice."""
        return Branch(self.continuations, self.vocab_size, self.length + run, self.depth + run, self.share)


def tokens_after(log: NGramIndex, position: int, *, repeat: bool) -> Ids:
    """What follows an occurrence, at most `HORIZON` tokens; `repeat` goes round where the log ends."""
    start = position - log.base
    if start < 0:  # dropped since it was found
        return Ids("i")
    tokens = log.tokens[start : start + HORIZON]
    if repeat and len(tokens) < HORIZON:
        tokens = (tokens * (HORIZON // len(tokens) + 1))[:HORIZON]
    return tokens


class Pool:
    """Occurrences, added best first; those with the same continuation are counted as one."""

    def __init__(self) -> None:
        self._items: dict[bytes, tuple[Ids, int]] = {}
        self._times: dict[bytes, int] = {}

    def add(self, tokens: Ids, length: int) -> None:
        """Adds one occurrence: what followed it, and how many tokens match before."""
        key = tokens.tobytes()
        times = self._times.get(key, 0)
        if not times:
            self._items[key] = tokens, length
        self._times[key] = times + 1

    @property
    def continuations(self) -> list[Continuation]:
        """The distinct continuations so far, best first."""
        items = zip(self._items.values(), self._times.values(), strict=True)
        return [Continuation(tokens, length, times) for (tokens, length), times in items]
