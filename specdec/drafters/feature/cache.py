"""Keys and values of a feature drafter: one row per committed token, and behind them the rows of one round's tree.

A committed row is computed from the target's true state and never changes. Rows of drafted tokens are computed from the
drafter's own states; they are written behind the committed ones and forgotten with the round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec import ops
from specdec.drafters._buffers import with_room
from specdec.errors import UnsupportedError
from specdec.types import CommittedRows


class FeatureCache:
    """Rows of a batch, each row of it with a length of its own. What lies behind a length is the round's.

    Args:
        batch: rows of the batch.
        device: where the buffers are.
        target: the target's own keys and values by layer type, for models that attend to them.
    """

    def __init__(
        self, batch: int, device: torch.device | str, target: Callable[[str], CommittedRows] | None = None
    ) -> None:
        """Holds nothing yet."""
        self._target, self._read = target, dict[str, CommittedRows]()
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._lengths = [0] * batch
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def longest(self) -> int:
        """Length of the longest row; reads nothing back."""
        return max(self._lengths)

    def target_rows(self, kind: str, like: Tensor) -> CommittedRows:
        """The target's keys and values, read once a round, where and as a drafter computes.

        Args:
            kind: type of the target's layer.
            like: any tensor of the drafter.

        Raises:
            UnsupportedError: if the request offers none.
        """
        if self._target is None:
            raise UnsupportedError("the drafter attends to the target's keys and values; this request offers none.")
        if kind not in self._read:
            read = self._target(kind)
            places = (each.to(like.device) for each in (read.positions, read.real, read.next))
            self._read[kind] = CommittedRows(read.keys.to(like), read.values.to(like), *places)
        return self._read[kind]

    def forget_target_rows(self) -> None:
        """They are about to change, or have changed."""
        self._read = {}

    def chain(self, width: int) -> "Rows":
        """Places for committed rows: one after another, behind those that are there."""
        batch, device = self.lengths.shape[0], self.lengths.device
        seen = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
        return Rows(self, 0, torch.arange(width, device=device).expand(batch, -1), seen)

    def keep(self, counts: Sequence[int]) -> None:
        """Commits the first `counts[b]` rows behind each length."""
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self.lengths = torch.tensor(self._lengths, device=self.lengths.device)

    def children(self, width: int) -> "Rows":
        """Places for nodes that follow the last committed row of each text, side by side."""
        batch, device = self.lengths.shape[0], self.lengths.device
        own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
        return Rows(self, 0, torch.zeros(batch, width, dtype=torch.int64, device=device), own)

    def write(self, layer: int, rows: "Rows", keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new rows of a layer; returns its keys and values up to the last pending row.

        Args:
            layer: its number.
            rows: where they go.
            keys: [batch, kv_heads, rows, dim].
            values: likewise.
        """
        end = self.longest + rows.pending
        held = self.buffers.get(layer)
        if held is None or held[0].shape[2] < end:
            grown = tuple(new.new_zeros(*new.shape[:2], with_room(end), new.shape[3]) for new in (keys, values))
            for old, new in zip(held or (), grown, strict=False):
                new[:, :, : old.shape[2]] = old
            held = self.buffers[layer] = (grown[0], grown[1])
        slots = self.lengths[:, None] + rows.offset + torch.arange(keys.shape[2], device=self.lengths.device)
        ops.write_rows(keys, values, held[:1], held[1:], slots)
        return held[0][:, :, :end], held[1][:, :, :end]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """New rows of one forward, and what they see: committed rows, and those pending rows that `seen` marks.

    Attributes:
        cache: where they go.
        offset: pending rows before them.
        depths: positions behind the committed rows, of all pending rows, these included at the end.
        seen: which of the pending rows each of these sees.
    """

    cache: FeatureCache
    offset: int
    depths: Int[Tensor, "batch pending"]
    seen: Bool[Tensor, "batch rows pending"]
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Pending rows, these included."""
        return self.seen.shape[2]

    @property
    def positions(self) -> Int[Tensor, "batch rows"]:
        """Positions of these rows; a committed row stands where its state was read."""
        return self.cache.lengths[:, None] + self.depths[:, self.offset :]

    def below(self, parents: Int[Tensor, "batch new"]) -> "Rows":
        """Places for the children of these rows: one position on, seeing what their parents see and themselves."""
        batch, width = parents.shape
        depths = self.depths[:, self.offset :].gather(1, parents) + 1
        before = self.seen.gather(1, parents[:, :, None].expand(-1, -1, self.pending))
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        return Rows(self.cache, self.pending, torch.cat([self.depths, depths], 1), torch.cat([before, own], 2))

    def mask(self, window: int | None = None, first: int = 0) -> Bool[Tensor, "batch rows slots"]:
        """Which slots each row sees: of the committed ones and of its ancestors those that are near enough.

        Args:
            window: a slot is seen by rows that stand less than this many positions after it; None for no limit.
            first: position of the first row that holds anything. Rows before it see themselves.
        """
        if (window, first) not in self._masks:
            lengths = self.cache.lengths[:, None]
            slots = torch.arange(self.cache.longest + self.pending, device=lengths.device)
            place = slots - lengths  # among the pending rows; below 0: committed
            inside = place.clamp(0, self.pending - 1)
            drafted = self.seen.gather(2, inside[:, None].expand(-1, self.seen.shape[1], -1))
            visible = (place < 0)[:, None] | (drafted & (place < self.pending)[:, None])
            own = self.positions[:, :, None]
            position = torch.where(place < 0, slots, lengths + self.depths.gather(1, inside))[:, None]
            if window is not None:
                visible &= own - position < window
            if first > 0:
                visible &= position >= own.clamp_max(first)
            self._masks[window, first] = visible
        return self._masks[window, first]
