"""Keys and values of the committed text in a block drafter's layers: appended to, never rolled back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import ops
from specdec.drafters._buffers import with_room
from specdec.errors import ShapeError, SpecdecError

Heads: TypeAlias = Float[Tensor, "batch kv_heads slots head_dim"]
KeysValues: TypeAlias = tuple[Heads, Heads]


@dataclass(slots=True)
class LayerContext:
    """What one layer holds: position `base + i` of a row's text lies in slot i.

    Attributes:
        window: positions before the anchor that are ever read; None for all.
        base: position of the first slot; what lay before it was dropped.
        buffers: keys and values, with room behind them.
    """

    window: int | None
    base: int = 0
    buffers: tuple[Tensor, ...] = ()

    @property
    def slots(self) -> int:
        """Slots that the buffers have."""
        return self.buffers[0].shape[2] if self.buffers else 0

    def reserve(self, like: KeysValues, shortest: int, longest: int) -> None:
        """Makes room for texts of these lengths, dropping what is out of the window of all of them.

        Args:
            like: rows of the same heads.
            shortest: least of the lengths; no position before its window is ever read again.
            longest: slots are needed up to this position.
        """
        if self.buffers and longest - self.base <= self.slots:
            return
        first = self.base if self.window is None else max(self.base, shortest - self.window)
        grown = []
        for part, rows in enumerate(like):
            buffer = rows.new_zeros(*rows.shape[:2], with_room(longest - first), rows.shape[3])
            if self.buffers:
                kept = self.buffers[part][:, :, first - self.base :]
                buffer[:, :, : kept.shape[2]] = kept
            grown.append(buffer)
        self.base, self.buffers = first, tuple(grown)


class BlockContext:
    """What the target's features became, per layer.

    Rows of a batch have lengths of their own. What lies behind a row's length is never read. A layer with a sliding
    window holds its window and some room, whatever the length of the text.

    Args:
        windows: sliding window of each layer, None for full attention.
        batch: rows.
        device: where the buffers are.
        capacity: positions that are ever needed, those of a block included. With it, buffers are made once and hold
            all of them, and nothing reads the device: `extend` takes counts from there.

    Example:
        >>> import torch
        >>> from specdec.drafters.block import BlockContext, LayerContext
        >>> context = BlockContext([None, 16], batch=1, device="cpu")
        >>> rows = torch.zeros(1, 2, 1000, 8)
        >>> context.append([(rows, rows), (rows, rows)], counts=[1000])
        >>> context.lengths, [layer.base for layer in context.layers]
        (tensor([1000]), [0, 984])
        >>> all(isinstance(layer, LayerContext) for layer in context.layers)
        True
    """

    def __init__(
        self, windows: Sequence[int | None], batch: int, device: torch.device | str, *, capacity: int | None = None
    ) -> None:
        """Holds nothing yet."""
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.layers = [LayerContext(window) for window in windows]
        self._lengths = [0] * batch

    def with_room(self, layer: int, block: KeysValues) -> LayerContext:
        """A layer, with room for the rows of a block behind each text.

        Raises:
            SpecdecError: if the context was never extended.
        """
        held = self.layers[layer]
        if not held.buffers:
            raise SpecdecError("the context was never extended; extend it with features, of 0 rows if there are none.")
        if self.capacity is None:
            held.reserve(block, min(self._lengths), max(self._lengths) + block[0].shape[2])
        return held

    def append_fixed(self, layers: Sequence[KeysValues], counts: Int[Tensor, " batch"]) -> None:
        """As `append`, into buffers of a fixed capacity, by counts that stay on their device.

        What is written behind a row's new length is no part of it, and is overwritten by what comes next.
        """
        slots = self.lengths[:, None] + torch.arange(layers[0][0].shape[2], device=counts.device)
        for layer, given in zip(self.layers, layers, strict=True):
            if not layer.buffers:
                capacity = cast(int, self.capacity)
                layer.buffers = tuple(rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3]) for rows in given)
            ops.write_rows(*given, layer.buffers[:1], layer.buffers[1:], slots)
        self.lengths += counts

    def append(self, layers: Sequence[KeysValues], counts: Sequence[int]) -> None:
        """Writes the first `counts[b]` new rows of each layer behind what a batch row holds; reads nothing back."""
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        added = torch.tensor(counts, device=self.lengths.device)
        for layer, given in zip(self.layers, layers, strict=True):
            layer.reserve(given, min(self._lengths), max(self._lengths))
            place = torch.arange(given[0].shape[2], device=added.device)
            # A slot below 0 is dropped: behind the count, or out of the window.
            slots = (self.lengths[:, None] + place - layer.base).masked_fill(place >= added[:, None], -1)
            ops.write_rows(*given, layer.buffers[:1], layer.buffers[1:], slots)
        self.lengths = self.lengths + added


def require_context(place: str, given: Any) -> None:
    """Raises `ShapeError` for what is no context."""
    if not isinstance(given, BlockContext):
        raise ShapeError(
            f"{place}: expected a BlockContext (BlockModel.context makes one), got {type(given).__name__}."
        )
