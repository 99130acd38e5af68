"""Keys and values of the committed text in a block drafter's layers: appended to, never rolled back."""

import itertools
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

KeysValues: TypeAlias = tuple[
    Float[Tensor, "batch kv_heads slots head_dim"], Float[Tensor, "batch kv_heads slots head_dim"]
]

GROWTH = 256
"""Smallest step by which buffers grow; from four times of it on, they grow by a quarter."""


class BlockContext:
    """What the target's features became, per layer: position i of a row's text lies in slot i.

    Rows of a batch have lengths of their own. What lies behind a row's length is never read.

    Args:
        batch: rows.
        device: where the buffers are.
    """

    def __init__(self, batch: int, device: torch.device | str) -> None:
        """Holds nothing yet."""
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._longest, self._lengths = 0, [0] * batch
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def layers(
        self,
    ) -> list[KeysValues]:
        """Keys and values of each layer, up to the longest row."""
        return [(keys[:, :, : self._longest], values[:, :, : self._longest]) for keys, values in self._buffers]

    def append(
        self,
        layers: list[KeysValues],
        counts: Int[Tensor, " batch"],
    ) -> None:
        """Writes the first `counts[b]` new rows of each layer behind what a batch row holds."""
        kept = counts.tolist()
        lengths = [length + count for length, count in zip(self._lengths, kept, strict=True)]
        self._reserve(layers, max(lengths))
        new = layers[0][0].shape[2]
        index = torch.arange(new, device=self.lengths.device)
        batch, source = (index < counts.to(index.device)[:, None]).nonzero(as_tuple=True)
        slots = self.lengths[batch] + source
        for buffers, given in zip(self._buffers, layers, strict=True):
            for buffer, rows in zip(buffers, given, strict=True):
                buffer[batch, :, slots] = rows[batch, :, source].to(buffer.dtype)
        self._lengths, self._longest = lengths, max(lengths)
        self.lengths = self.lengths + counts.to(self.lengths.device)

    def _reserve(self, layers: list[tuple[Tensor, Tensor]], slots: int) -> None:
        """Makes room for so many slots."""
        held = self._buffers[0][0].shape[2] if self._buffers else -1
        if slots <= held:
            return
        size = slots + max(GROWTH, slots // 4)
        old, self._buffers = self._buffers, []
        for before, given in itertools.zip_longest(old, layers):
            grown = []
            for part, rows in enumerate(given):
                buffer = rows.new_zeros(*rows.shape[:2], size, rows.shape[3])
                if before is not None:
                    buffer[:, :, : before[part].shape[2]] = before[part]
                grown.append(buffer)
            self._buffers.append((grown[0], grown[1]))
