"""Comparing feature drafters with a reference, level by level."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.protocols import DraftContext
from specdec.types import Frontier

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

Text = tuple[Tensor, list[int]]
"""Features of all tokens but the last one, and the tokens."""

Law = Callable[[list[int]], tuple[Tensor, Tensor]]
"""Target ids and logits of the token after a path of drafted ones."""


def start(drafter: Any, lengths: Sequence[int], seed: int, vocab: int = 97) -> list[Text]:
    """Starts a request with texts of these lengths and their anchors, padded on the left; returns them."""
    source = torch.Generator().manual_seed(seed)
    width, size = max(lengths) + 1, drafter.model.spec.feature_size * len(drafter.feature_layers)
    features = torch.randn(len(lengths), width, size, generator=source, dtype=torch.float64)
    tokens = torch.randint(1, vocab, (len(lengths), width), generator=source)
    mask = torch.arange(width) >= width - 1 - torch.tensor(lengths)[:, None]
    features[~mask] = float("nan")  # padding may hold anything
    drafter.start(DraftContext(tokens, mask, vocab, features=features))
    return [
        (features[row, width - 1 - length : -1], tokens[row, width - 1 - length :].tolist())
        for row, length in enumerate(lengths)
    ]


@torch.no_grad()
def check_children(drafter: Any, laws: Sequence[Law], seed: int, *, levels: int, vocab: int = 97) -> None:
    """Asks for the children of random frontiers and compares each node's law with that along its path."""
    source, batch = torch.Generator().manual_seed(seed), len(laws)
    paths: list[list[list[int]]] = [[[]] for _ in laws]
    frontier = Frontier.from_root(torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.bool))
    for depth in range(levels):
        found = drafter.children(frontier, 6)
        for row, law in enumerate(laws):
            for node, path in enumerate(paths[row]):
                ids, logits = law(path)
                dense = torch.zeros(vocab, dtype=torch.float64).scatter(0, ids, logits.softmax(-1))
                torch.testing.assert_close(found.law(vocab)[row, node], dense, **CLOSE)
                best = logits.log_softmax(-1).sort(descending=True, stable=True)
                torch.testing.assert_close(found.log_probs[row, node], best.values[:6], **CLOSE)
                assert set(found.tokens[row, node].tolist()) == set(ids[best.indices[:6]].tolist())
        parents = torch.randint(0, frontier.tokens.shape[1], (batch, 3), generator=source)
        tokens = torch.randint(0, vocab, (batch, 3), generator=source)
        paths = [
            [[*paths[row][parent], token] for parent, token in zip(parents[row], tokens[row].tolist(), strict=True)]
            for row in range(batch)
        ]
        frontier = Frontier(tokens, parents, torch.ones(batch, 3, dtype=torch.bool), depth + 1)
