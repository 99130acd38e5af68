"""What the lookup drafters should say, by scanning; and how the tests ask a drafter."""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import FunctionType, ModuleType

import torch
from hypothesis import strategies as st

from specdec.protocols import DraftContext, Drafter
from specdec.types import Candidates, Frontier

Path = tuple[int, ...]
Answers = dict[Path, list[tuple[int, float]]]

texts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.builds(lambda loop: loop * 6, st.lists(st.integers(0, 5), min_size=1, max_size=5)),
)


# ------------------------------------------------------------------------------------------------ asking a drafter


def context(*rows: Sequence[int], vocab_size: int = 100, pad: int = 0) -> DraftContext:
    """Rows of a batch, left-padded with a token that also occurs in texts."""
    width = max(map(len, rows))
    tokens = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], dtype=torch.int64)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return DraftContext(tokens=tokens.view(len(rows), width), mask=mask.view(len(rows), width), vocab_size=vocab_size)


def commit(drafter: Drafter, *rows: Sequence[int]) -> None:
    """Commits a ragged batch; what comes after a row's tokens must not be read."""
    width = max(1, *map(len, rows))
    tokens = torch.tensor([list(row) + [-1] * (width - len(row)) for row in rows], dtype=torch.int64)
    drafter.commit(tokens, torch.tensor([len(row) for row in rows]))


def proposals(answer: Candidates, row: int, node: int) -> list[tuple[int, float]]:
    """What stands in the answer for one node."""
    offered = zip(answer.tokens[row, node].tolist(), answer.log_probs[row, node].tolist(), strict=True)
    return [(token, score) for token, score in offered if score > -torch.inf]


def ask(drafter: Drafter, roots: Sequence[int], *, count: int = 4, depth: int = 3, foreign: int = 7) -> list[Answers]:
    """Every row's answers at the root and below all proposals, and below one token that nobody proposed."""
    batch = len(roots)
    found: list[Answers] = [{} for _ in roots]
    level: list[list[Path]] = [[()] for _ in roots]
    frontier = Frontier.from_root(torch.tensor(roots), torch.ones(batch, dtype=torch.bool))
    for step in range(depth + 1):
        answer = drafter.children(frontier, count)
        check_seam(answer, frontier, count)
        below: list[list[tuple[Path, int]]] = []
        for row in range(batch):
            children: list[tuple[Path, int]] = []
            for node, path in enumerate(level[row]):
                found[row][path] = proposals(answer, row, node)
                offered = [token for token, _ in found[row][path]]
                extra = [] if foreign in offered or node else [foreign]
                children += [((*path, token), node) for token in [*offered, *extra]]
            below.append(children)
        width = max(1, *map(len, below))
        if step == depth or not any(below):
            break
        padding = [((), 0)]
        padded = [children + padding * (width - len(children)) for children in below]
        frontier = Frontier(
            tokens=torch.tensor([[path[-1] if path else 0 for path, _ in row] for row in padded]),
            parents=torch.tensor([[parent for _, parent in row] for row in padded]),
            valid=torch.tensor([[bool(path) for path, _ in row] for row in padded]),
            depth=step + 1,
        )
        level = [[path for path, _ in children] for children in below]
    return found


def check_seam(answer: Candidates, frontier: Frontier, count: int) -> None:
    """The laws of the seam that need no reference: shape, order, distinct ids, nothing below padding."""
    assert answer.tokens.shape == answer.log_probs.shape
    assert answer.tokens.shape[:2] == frontier.tokens.shape
    assert answer.tokens.shape[2] <= count
    assert answer.tokens.dtype == torch.int64
    assert (answer.tokens >= 0).all()
    assert (answer.log_probs <= 0).all()
    assert not answer.log_probs.isnan().any()
    assert (answer.log_probs.exp().sum(-1) <= 1 + 1e-5).all()
    assert answer.log_probs.tolist() == answer.log_probs.sort(dim=-1, descending=True).values.tolist()
    assert (answer.log_probs[~frontier.valid] == -torch.inf).all()
    for row in range(frontier.tokens.shape[0]):
        for node in range(frontier.tokens.shape[1]):
            tokens = [token for token, _ in proposals(answer, row, node)]
            assert len(set(tokens)) == len(tokens)


def calls_of(function: Callable[[], object]) -> int:
    """Function calls made by `function`, Python and C: a measure of work that no clock disturbs."""
    number = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return number


def size_of(thing: object) -> int:
    """Bytes of everything that can be reached from `thing`, code left out."""
    waiting, seen = [thing], dict[int, int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, type | ModuleType | FunctionType):
            seen[id(thing)] = sys.getsizeof(thing)
            waiting += gc.get_referents(thing)
    return sum(seen.values())


# -------------------------------------------------------------------------------------------------------- by scanning


@dataclass(frozen=True)
class Occurrence:
    """A place before which the last `length` tokens of the text stand too; `text` goes on from `position`."""

    length: int
    own: bool
    text: tuple[int, ...]
    position: int

    def token(self, path: Path) -> int | None:
        """What it proposes after `path`; None where it disagrees with the path or its text is over."""
        text = self.text + path if self.own else self.text
        here = text[self.position : self.position + len(path)]
        place = self.position + len(path)
        return text[place] if here == path and place < len(text) else None


def matching(text: Sequence[int], other: Sequence[int], longest: int) -> int:
    """Equal tokens at the ends of two texts, `longest` at most."""
    length = 0
    while length < min(len(text), len(other), longest) and text[-1 - length] == other[-1 - length]:
        length += 1
    return length


def occurrences(
    text: Sequence[int], stored: Sequence[Sequence[int]] = (), *, shortest: int, longest: int
) -> list[Occurrence]:
    """All of them: longest first, own text before stored ones, newest first."""
    found = []
    for own, where in [(True, text), *((False, other) for other in reversed(stored))]:
        for position in range(len(where) - 1, 0, -1):
            length = matching(text, where[:position], longest)
            if length >= shortest:
                found.append(Occurrence(length, own, tuple(where), position))
    return sorted(found, key=lambda occurrence: -occurrence.length)


def lookup_order(found: Sequence[Occurrence], path: Path, vocab_size: int) -> dict[int, int]:
    """Proposed tokens, best first, and how many tokens match before each."""
    ranked: dict[int, int] = {}
    for occurrence in found:
        token = occurrence.token(path)
        if token is not None and 0 <= token < vocab_size:
            ranked.setdefault(token, occurrence.length + len(path))
    return ranked


def counts(found: Sequence[Occurrence], path: Path, vocab_size: int) -> dict[int, int]:
    """How often each token follows, in the order of the best occurrence."""
    seen: dict[int, int] = {}
    for occurrence in found:
        token = occurrence.token(path)
        if token is not None and 0 <= token < vocab_size:
            seen[token] = seen.get(token, 0) + 1
    return seen


def shares(found: Sequence[Occurrence], vocab_size: int, most: int, least: Fraction) -> dict[Path, Fraction]:
    """The `most` nodes of largest share of the trie of `found`, `least` at least: the paper's greedy expansion."""
    kept: dict[Path, Fraction] = {}
    waiting: dict[Path, Fraction] = {(): Fraction(1)}
    while waiting and len(kept) <= most:
        path = max(waiting, key=lambda path: waiting[path])
        kept[path] = share = waiting.pop(path)
        seen = counts(found, path, vocab_size)
        for token, times in seen.items():
            below = share * times / sum(seen.values())
            if below >= least:
                waiting[(*path, token)] = below
    del kept[()]
    return kept


def suffix_choice(
    found: Sequence[Occurrence], vocab_size: int, factor: float, least: Fraction
) -> tuple[int, list[Occurrence]]:
    """The match length whose trie has the largest sum of shares (the longer one on a tie), and its occurrences."""
    best, best_length, chosen = Fraction(0), 0, list[Occurrence]()
    for length in sorted({occurrence.length for occurrence in found}, reverse=True):
        part = [occurrence for occurrence in found if occurrence.length >= length]
        total = sum(shares(part, vocab_size, int(factor * length), least).values(), Fraction(0))
        if total > best:
            best, best_length, chosen = total, length, part
    return best_length, chosen
