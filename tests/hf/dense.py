"""An obvious key/value cache, to compare the real one with: lists of numbers that occur once."""

import torch
from torch import Tensor
from transformers import Gemma3TextConfig

from specdec.hf.cache import RowCache

WINDOW = 6
POISON = 1e9


def config(window: int = WINDOW, head_dim: int = 4) -> Gemma3TextConfig:
    """A sliding layer first, so that nothing may be read off layer 0, and a full one."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=2, layer_types=kinds, sliding_window=window, hidden_size=8, head_dim=head_dim
    )


class Dense:
    """The obvious cache: for each row, the numbers of its committed tokens and of the pending ones."""

    def __init__(self, batch: int) -> None:
        self.committed: list[list[float]] = [[] for _ in range(batch)]
        self.pending: list[list[float]] = [[] for _ in range(batch)]
        self._numbers = iter(range(1, 1_000_000))

    def draw(self, rows: int) -> Tensor:
        """Keys `[batch, 1, rows, 1]` of new rows, which are pending from now on."""
        new = [[float(next(self._numbers)) for _ in range(rows)] for _ in self.pending]
        for row, numbers in zip(self.pending, new, strict=True):
            row += numbers
        return torch.tensor(new)[:, None, :, None]

    def keep(self, paths: list[list[int]]) -> None:
        for row, (committed, pending) in enumerate(zip(self.committed, self.pending, strict=True)):
            committed += [pending[node] for node in paths[row]]
        self.pending = [[] for _ in self.pending]


def poison(cache: RowCache, value: float) -> None:
    """Overwrites every slot that no later query may see."""
    for layer in cache.row_layers:
        if not layer.is_initialized:
            continue
        for row, length in enumerate(cache.lengths.tolist()):
            for buffer in (layer.keys, layer.values):
                buffer[row, :, max(0, length - layer.base) :] = value
                if layer.sliding_window is not None:
                    buffer[row, :, : max(0, length - layer.sliding_window + 1 - layer.base)] = value
