"""A target beside the texts that its rows have committed, judged by full forwards of the model without a cache."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.cache import RowCache
from specdec.hf.target import ModelTarget
from specdec.testing import tiny_model
from specdec.types import DraftTree
from tests import helpers
from tests.trees.random_trees import lineage, random_tree

ROWS = [[5, 6, 7], [5, 9, 8, 7, 6, 5, 4, 3, 2], list(range(20, 37)), [11]]


@functools.cache
def model(family: str, implementation: str = "sdpa", **options: Any) -> PreTrainedModel:
    made = tiny_model(family, **options)
    made.set_attn_implementation(implementation)
    return made


@contextmanager
def float64_softmax() -> Iterator[None]:
    """Eager attention of transformers rounds its weights to float32; without that it is as exact as sdpa."""
    softmax = torch.nn.functional.softmax

    def exact(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if scores.dtype == torch.float64:
            kwargs.pop("dtype", None)
        return softmax(scores, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", exact)
        yield


class Texts:
    """A target and the committed text of each of its rows."""

    def __init__(self, target_model: PreTrainedModel, rows: list[list[int]], **options: Any) -> None:
        batch = helpers.batch(rows)
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        kwargs: dict[str, Any] = {"position_ids": positions}
        if not bool(batch["attention_mask"].all()):
            kwargs["attention_mask"] = batch["attention_mask"]
        self.model, self.texts = target_model, [list(row) for row in rows]
        self.target = ModelTarget(target_model, batch["input_ids"], model_kwargs=kwargs, **options)
        self.first = self.target.prefill()
        self._tree: DraftTree | None = None

    @torch.no_grad()
    def full(self, text: list[int]) -> Tensor:
        """Logits after a text, by one forward over all of it."""
        return self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    def error(self, tree: DraftTree) -> float:
        """Largest difference over all nodes that are in use."""
        self._tree = tree
        logits = self.target.verify(tree).logits
        return max(
            float((logits[row, node] - self.full(self.texts[row] + self.path(row, node))).abs().max())
            for row in range(len(self.texts))
            for node in range(int(tree.num_nodes[row]))
        )

    def path(self, row: int, node: int) -> list[int]:
        assert self._tree is not None
        return [int(self._tree.tokens[row, step]) for step in lineage(self._tree, row, node)]

    def commit(self, leaves: list[int | None]) -> None:
        """Keeps the path to one node of each row, of a tree or of rows that were appended; None keeps nothing."""
        assert self._tree is not None
        paths = [[] if leaf is None else lineage(self._tree, row, leaf) for row, leaf in enumerate(leaves)]
        width = max(1, *map(len, paths))
        nodes = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
        for row, leaf in enumerate(leaves):
            self.texts[row] += [] if leaf is None else self.path(row, leaf)
        keep = self.target.commit if self.target._tree is not None else self.target.keep
        keep(nodes, torch.tensor([len(path) for path in paths]))


def draft(seed: int, sizes: list[int], style: str = "any") -> DraftTree:
    """A random tree over the vocabulary of the tiny models."""
    tree = random_tree(seed, sizes, style)
    return DraftTree(tree.tokens % 97, tree.parents, tree.num_nodes, tree.scores)


def play(texts: Texts, seed: int, rounds: int, most: int = 7) -> float:
    """Largest error over some rounds with ragged commits, some of them empty."""
    rng, worst = random.Random(seed), 0.0
    for index in range(rounds):
        sizes = [rng.randint(1, most) for _ in texts.texts]
        worst = max(worst, texts.error(draft(rng.randrange(2**32), sizes, rng.choice(["any", "deep", "chain"]))))
        texts.commit([rng.choice([None, *range(size)]) if index else size - 1 for size in sizes])
    return worst


@contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Overwrites, after the prompt and after every round, all that must not be read."""
    keep, end = RowCache.keep, RowCache.end_prefill

    def spoil(cache: RowCache) -> None:
        for layer in cache.row_layers:
            for row, length in enumerate(cache.lengths.tolist()):
                window = layer.sliding_window
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, length - layer.base :] = value
                    if window is not None:
                        buffer[row, :, : max(0, length - window + 1 - layer.base)] = value

    def keep_and_spoil(self: RowCache, *args: Any) -> None:
        keep(self, *args)
        spoil(self)

    def end_and_spoil(self: RowCache, *args: Any) -> None:
        end(self, *args)
        spoil(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCache, "keep", keep_and_spoil)
        patch.setattr(RowCache, "end_prefill", end_and_spoil)
        yield
