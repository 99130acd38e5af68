"""What drafters that copy from text have in common: the seam's tensors become host-side rows, and back.

Every batch row is a request of its own with its own log, matches and hit rates. The tree builder asks level by level;
the drafter remembers one trie node per node of the last frontier, so a level costs one dictionary look-up a node. A
node that another source proposed, and that this trie lacks, has no trie node, and nothing is proposed below it.
Tensors are read once a call and answers are built once a call, on the device of the frontier.
"""

from abc import ABC, abstractmethod
from array import array
from itertools import chain, compress

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafters._continuations import Branch
from specdec.drafters._ngram_index import NGramIndex
from specdec.errors import ShapeError, SpecdecError
from specdec.protocols import DraftContext
from specdec.types import Candidates, Frontier


class LookupRow(ABC):
    """One request: its tokens, and what they say about the next ones.

    It learns from every committed token by walking down the trie of an earlier position for as long as the text does,
    and from a new one when the text leaves it. What is learned depends on the tokens alone, not on how many of them
    came at once.

    Args:
        log: the tokens committed so far, padding left out; the row appends to it.
    """

    def __init__(self, log: NGramIndex) -> None:
        self.log = log
        self.given = len(log.tokens)
        self._root: Branch | None = None
        self._walk: Branch | None = None

    @property
    def root(self) -> Branch:
        """The trie of what may follow the committed tokens."""
        if self._root is None:
            self._root = self._look_up()
        return self._root

    def push(self, token: int) -> None:
        """Takes one committed token."""
        node = self._walk or self.root
        self._learn(node, token)
        below = node.children.get(token)
        self._walk = below if below and below.children else None
        self._root = None
        self.log.append(token)

    @abstractmethod
    def probabilities(self, node: Branch) -> dict[int, float]:
        """Probability of each proposed child of `node`, falling; together at most 1."""

    @abstractmethod
    def _look_up(self) -> Branch:
        """Searches for the last committed tokens."""

    @abstractmethod
    def _learn(self, node: Branch, token: int) -> None:
        """Is told which token came at `node`."""


class LookupDrafter(ABC):
    """A drafter whose answers come from rows on the host. A family says how a row is opened and closed."""

    def __init__(self) -> None:
        self._rows: list[LookupRow] | None = None
        self._nodes: list[list[Branch | None]] = []
        self._depth = -1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Empty: text is all a lookup needs."""
        return ()

    @abstractmethod
    def _open(self, tokens: list[int], vocab_size: int) -> LookupRow:
        """A row that has committed `tokens`."""

    def _close(self, row: LookupRow) -> None:  # noqa: B027 - most families remember nothing
        """Takes leave of a row whose request ended."""

    def start(self, context: DraftContext) -> None:
        """Begins a request: indexes the committed tokens of each row."""
        self._rows, self._nodes, self._depth = None, [], -1
        texts = [list(compress(*row)) for row in zip(context.tokens.tolist(), context.mask.tolist(), strict=True)]
        if any(token < 0 for token in chain.from_iterable(texts)):
            raise ShapeError("context.tokens holds a negative id where context.mask is True; mark padding in the mask.")
        self._rows = [self._open(text, context.vocab_size) for text in texts]

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """At most `count` proposals per frontier node, in `count` columns; -inf where there is none."""
        rows = self._started("children")
        self._check(frontier, count, rows)
        packed = torch.stack([frontier.tokens, frontier.parents, frontier.valid.to(frontier.tokens.dtype)], 1)
        nodes, ids, probs = [], list[int](), list[float]()
        for row, above, level in zip(rows, self._nodes or [[]] * len(rows), packed.tolist(), strict=True):
            found = [
                self._find(row, above, frontier.depth, token, parent) if valid else None
                for token, parent, valid in zip(*level, strict=True)
            ]
            nodes.append(found)
            for node in found:
                offered = {} if node is None else row.probabilities(node)
                kept = min(count, len(offered))
                ids += [*offered][:kept] + [0] * (count - kept)
                probs += [*offered.values()][:kept] + [0.0] * (count - kept)
        self._nodes, self._depth = nodes, frontier.depth
        shape, device = (*frontier.tokens.shape, count), frontier.tokens.device
        return Candidates(
            tokens=torch.frombuffer(array("q", ids), dtype=torch.int64).view(shape).to(device),
            log_probs=torch.frombuffer(array("f", probs), dtype=torch.float32).log_().view(shape).to(device),
        )

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Appends the first `counts[b]` of `tokens[b]` to row b."""
        rows = self._started("commit")
        if tokens.shape[0] != len(rows):
            raise ShapeError(f"the request has {len(rows)} rows, got tokens for {tokens.shape[0]}.")
        self._nodes, self._depth = [], -1
        for row, (count, *new) in zip(rows, torch.cat([counts[:, None], tokens], 1).tolist(), strict=True):
            if not 0 <= count <= len(new) or min(new[:count], default=0) < 0:
                raise ShapeError(f"counts must lie in 0..{len(new)} and cover valid ids, got {count} of {new}.")
            for token in new[:count]:
                row.push(token)

    def finish(self) -> None:
        """Ends the request and frees its rows; does nothing where none was started."""
        rows, self._rows, self._nodes, self._depth = self._rows, None, [], -1
        for row in rows or ():
            self._close(row)

    def _started(self, call: str) -> list[LookupRow]:
        if self._rows is None:
            raise SpecdecError(f"{type(self).__name__}.{call} was called outside a request; call start(context) first.")
        return self._rows

    def _check(self, frontier: Frontier, count: int, rows: list[LookupRow]) -> None:
        if count < 1 or not frontier.tokens.numel():
            raise ShapeError(
                f"need count >= 1 and a node to ask for, got {count} for {[*frontier.tokens.shape]} nodes."
            )
        if frontier.tokens.shape[0] != len(rows):
            raise ShapeError(f"the request has {len(rows)} rows, got a frontier of {frontier.tokens.shape[0]}.")
        if frontier.depth not in (0, self._depth + 1):
            raise ShapeError(
                f"a frontier of depth {frontier.depth} cannot follow one of depth {self._depth}; "
                f"begin each round with the roots (depth 0) and ask level by level."
            )

    @staticmethod
    def _find(row: LookupRow, above: list[Branch | None], depth: int, token: int, parent: int) -> Branch | None:
        if depth == 0:
            if not len(row.log.tokens) or row.log.tokens[-1] != token:
                raise ShapeError(
                    f"the root carries token {token}, but the last committed tokens are "
                    f"{row.log.tokens[-3:].tolist()}; commit every token before the next round."
                )
            return row.root
        if not 0 <= parent < len(above):
            raise ShapeError(f"parent {parent} is not in the previous frontier of {len(above)} nodes.")
        node = above[parent]
        return None if node is None else node.children.get(token)
