"""Drafters for the tests of tree builders: random conditional laws that can be asked twice; checks of the caller."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.protocols import DraftContext, TreeBuilder
from specdec.trees import topology
from specdec.types import Candidates, DraftTree, Frontier

Path = tuple[int, ...]


@dataclass
class Lattice:
    """Answers from a law that depends on the whole path, and checks each frontier it is asked about.

    Styles: `smooth` (normalised over the vocabulary), `ties` (few distinct values, zero included), `holes` (ties, and
    many nodes without or with few proposals), `product` (the law depends on the depth alone).
    """

    vocab: int
    ranks: int
    style: str = "smooth"
    seed: int = 0
    whole: bool = False  # also answer with `probs`
    dtype: torch.dtype = torch.float64
    idle: bool = False  # may be asked about padding alone
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # depth, frontier width, count
    feature_layers: tuple[int, ...] = ()
    _paths: list[list[Path | None]] = field(default_factory=list)
    _known: dict[tuple[int, Path], tuple[list[int], Tensor]] = field(default_factory=dict)

    def start(self, context: DraftContext) -> None: ...

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None: ...

    def finish(self) -> None: ...

    def proposals(self, row: int, path: Path) -> tuple[list[int], Tensor]:
        """Tokens, best first, and their log-probabilities after a path from the root on."""
        if (row, path) not in self._known:
            self._known[row, path] = self._drawn(row, path)
        return self._known[row, path]

    def _drawn(self, row: int, path: Path) -> tuple[list[int], Tensor]:
        rng = random.Random(str((self.seed, len(path)) if self.style == "product" else (self.seed, row, path)))
        tokens = rng.sample(range(self.vocab), self.ranks)
        if self.style in ("ties", "holes"):
            values = [-rng.choice([0.0, 0.5, 0.5, 1.0, 1.5]) for _ in tokens]
            if self.style == "holes":
                values = values[: max(0, rng.randrange(-2, self.ranks + 1))]
            scores = torch.tensor(values, dtype=self.dtype)
        else:
            logits = torch.tensor([rng.gauss(0, 1.5) for _ in range(self.vocab)], dtype=self.dtype)
            scores = logits.log_softmax(-1)[: self.ranks]
        return tokens[: len(scores)], scores.sort(descending=True).values

    def law(self, row: int, path: Path) -> Tensor:
        """The law over the vocabulary from which children are drawn."""
        tokens, scores = self.proposals(row, path)
        dense = torch.zeros(self.vocab, dtype=self.dtype)
        if tokens:
            dense[tokens] = scores.softmax(-1)
        return dense

    def children(self, frontier: Frontier, count: int) -> Candidates:
        assert count >= 1
        self._follow(frontier)
        self.asked.append((frontier.depth, frontier.tokens.shape[1], count))
        ranks = min(count, self.ranks)
        rows, wide = frontier.tokens.shape
        tokens = torch.zeros(rows, wide, ranks, dtype=torch.int64)
        # Answers for padding are ignored, whether they look good or not.
        noise = torch.nan if (self.seed + frontier.depth) % 2 else -0.25
        scores = torch.full((rows, wide, ranks), noise, dtype=self.dtype)
        probs = torch.full((rows, wide, self.vocab), abs(noise), dtype=self.dtype) if self.whole else None
        for row, paths in enumerate(self._paths):
            for node, path in enumerate(paths):
                if path is None:
                    continue
                found, values = self.proposals(row, path)
                found, values = found[:ranks], values[:ranks]
                tokens[row, node, : len(found)] = torch.tensor(found, dtype=torch.int64)
                scores[row, node] = -torch.inf
                scores[row, node, : len(found)] = values
                if probs is not None:
                    probs[row, node] = self.law(row, path)
        return Candidates(tokens, scores, probs)

    def _follow(self, frontier: Frontier) -> None:
        """Finds the path of each frontier node, and fails if the caller broke the rules of a round."""
        previous = self._paths
        self._paths = []
        if frontier.depth:
            assert self.asked[-1][0] == frontier.depth - 1, "levels are asked for one after the other"
        for row, (tokens, parents, valid) in enumerate(
            zip(frontier.tokens.tolist(), frontier.parents.tolist(), frontier.valid.tolist(), strict=True)
        ):
            paths: list[Path | None] = []
            for token, parent, used in zip(tokens, parents, valid, strict=True):
                assert 0 <= token < max(self.vocab, 1000)
                if frontier.depth == 0:
                    assert parent == -1
                    assert len(tokens) == 1
                    paths.append((token,) if used else None)
                    continue
                assert 0 <= parent < len(previous[row]), "parents count within the previous frontier"
                if not used:
                    paths.append(None)
                    continue
                above = previous[row][parent]
                assert above is not None, "a node below padding"
                known = self.law(row, above).nonzero().flatten().tolist() if self.whole else []
                assert token in known or token in self.proposals(row, above)[0]
                paths.append((*above, token))
            used_paths = [path for path in paths if path is not None]
            assert len(set(used_paths)) == len(used_paths)
            self._paths.append(paths)
        used = any(path is not None for paths in self._paths for path in paths)
        assert self.idle or used, "asked about nothing at all"


def same_tree(left: DraftTree, right: DraftTree) -> bool:
    """Whether two trees agree up to columns that are padding in every row."""
    width = min(left.width, right.width)
    wide = left if left.width > right.width else right
    return (
        torch.equal(left.num_nodes, right.num_nodes)
        and not bool(wide.valid[:, width:].any())
        and torch.equal(left.tokens[:, :width], right.tokens[:, :width])
        and torch.equal(left.parents[:, :width], right.parents[:, :width])
        and torch.equal(left.scores[:, :width], right.scores[:, :width])
    )


class CountedOps(TorchDispatchMode):
    """Counts the operations that torch runs, and those of them that read a tensor on the host."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.reads = 0
        self._paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
        if not self._paused:
            self.total += 1
            self.reads += func.overloadpacket.__name__ in self.READS
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count what runs inside."""
        self._paused = True
        yield
        self._paused = False


@dataclass
class Uncounted:
    """A drafter whose own operations are not counted."""

    drafter: Lattice
    count: CountedOps
    feature_layers: tuple[int, ...] = ()

    def start(self, context: DraftContext) -> None: ...

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None: ...

    def finish(self) -> None: ...

    def children(self, frontier: Frontier, count: int) -> Candidates:
        with self.count.paused():
            return self.drafter.children(frontier, count)


def grown_as_on_an_accelerator(
    builder: TreeBuilder, lattice: Lattice, root: Tensor, limits: Tensor, budget: int, **options: object
) -> DraftTree:
    """Grows with the shapes of a device whose tensors must not be read on the host, and fails if one is read."""
    lattice.idle = True
    count = CountedOps()
    with accelerator_shapes(), count:
        tree = builder.grow(Uncounted(lattice, count), root, limits, budget, vocab_size=lattice.vocab, **options)
    assert count.reads == 0
    return tree


@contextmanager
def accelerator_shapes() -> Iterator[None]:
    """Lets the CPU take the path of other devices."""
    with mock.patch.object(topology, "readable", return_value=False):
        yield
