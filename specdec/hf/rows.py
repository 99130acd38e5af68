"""The keys, or the values, of one layer: encoded rows in preallocated buffers, one for each part of their code."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.errors import ShapeError
from specdec.protocols import KVCodec

Place: TypeAlias = slice | tuple[Tensor, Tensor]
"""Slots of every batch row, or batch indices and slot indices."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Rows as they are stored, for an attention function that reads codes instead of numbers."""

    codec: KVCodec
    parts: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    dtype: torch.dtype

    def decode(self) -> Float[Tensor, "batch heads slots dim"]:
        """The rows that the codes stand for."""
        return self.codec.decode(self.parts, self.state, self.dtype)


class Rows:
    """Rows `[batch, heads, slots, dim]` of one layer, held as `codec` encodes them.

    What lies in a slot that was never written is zeros.

    Args:
        codec: how rows are stored.
    """

    def __init__(self, codec: KVCodec) -> None:
        self.codec = codec
        self.parts: tuple[Tensor, ...] = ()
        self.state: tuple[Tensor, ...] = ()
        self._dtype = torch.float32

    @property
    def slots(self) -> int:
        """Slots that the buffers have room for."""
        return self.parts[0].shape[2]

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.parts, *self.state))

    def start(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> None:
        """Learns what the codec needs from the first rows of a text, and makes empty buffers like their code."""
        self._dtype = rows.dtype
        self.state = self.codec.fit(rows, real)
        parts: Any = self.codec.encode(rows[:, :, :0], self.state)
        lead = (*rows.shape[:2], 0)
        if not isinstance(parts, tuple) or not all(isinstance(p, Tensor) and p.shape[:3] == lead for p in parts):
            shown = [tuple(p.shape) for p in parts if isinstance(p, Tensor)] if isinstance(parts, tuple) else parts
            raise ShapeError(
                f"{type(self.codec).__name__}.encode must answer with a tuple of tensors whose first dimensions are "
                f"those of the rows, {list(lead)} for no rows yet, got {shown!r}."
            )
        self.parts = parts

    def resize(self, slots: int, first: int, last: int) -> None:
        """Moves slots `first .. last` to the front of new buffers."""
        grown = []
        for part in self.parts:
            buffer = part.new_zeros(*part.shape[:2], slots, part.shape[3])
            buffer[:, :, : last - first] = part[:, :, first:last]
            grown.append(buffer)
        self.parts = tuple(grown)

    def write(self, rows: Float[Tensor, "batch heads new dim"], place: Place) -> None:
        """Encodes new rows into their slots."""
        for part, code in zip(self.parts, self.codec.encode(rows, self.state), strict=True):
            if isinstance(place, slice):
                part[:, :, place] = code
            else:
                part[place[0], :, place[1]] = code.transpose(1, 2)

    def encoded(self, first: int, last: int) -> Encoded:
        """A view of slots `first .. last`, as they are stored."""
        return Encoded(self.codec, self._view(first, last), self.state, self._dtype)

    def read(self, first: int, last: int) -> Float[Tensor, "batch heads slots dim"]:
        """Slots `first .. last`, decoded; with a plain codec a view."""
        return self.codec.decode(self._view(first, last), self.state, self._dtype)

    def _view(self, first: int, last: int) -> tuple[Tensor, ...]:
        return tuple(part[:, :, first:last] for part in self.parts)

    def move(self, batch: Tensor, source: Tensor, target: Tensor) -> None:
        """Copies slots `source` to slots `target`, per batch row; reads everything before it writes."""
        for part in self.parts:
            part[batch, :, target] = part[batch, :, source]
