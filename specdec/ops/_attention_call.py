"""One call of verify attention: its arguments, what they must look like, and the shape of the problem."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.ops._ancestry import WORD, unpack
from specdec.ops._attention_plan import AttentionShape
from specdec.ops._checks import demands, legible, number, whole
from specdec.ops._stored_rows import StoredRows


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of `tree_attention`, defaults resolved; see there."""

    query: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    lengths: Tensor
    depths: Tensor | None
    starts: Tensor | None
    blocks: Tensor | None
    key_scales: Tensor | tuple[Tensor, ...] | None
    value_scales: Tensor | tuple[Tensor, ...] | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def key_rows(self) -> StoredRows:
        """The keys as they are stored."""
        return StoredRows(self.keys, _parts(self.key_scales))

    @property
    def value_rows(self) -> StoredRows:
        """The values as they are stored."""
        return StoredRows(self.values, _parts(self.value_scales))

    @property
    def pending(self) -> int:
        """Rows behind the committed ones."""
        return self.visible.shape[1] if self.depths is None else self.depths.shape[1]

    @property
    def pending_depths(self) -> Tensor:
        """Depth of every pending row: as given, or the number of a node's ancestors."""
        if self.depths is not None:
            return self.depths
        return unpack(self.visible, WORD * self.visible.shape[2]).sum(-1) - 1

    def checked(self, op: str) -> AttentionShape:
        """The shape of the problem; raises `ShapeError`, in the name of an op, if arguments do not belong together."""
        query, keys, values, visible, depths = self.query, self.keys, self.values, self.visible, self.depths
        blocks, softcap = self.blocks, self.softcap
        window: Any = self.window

        demand = demands(op)
        demand(query.is_floating_point(), f"query must hold floating-point numbers, got {query.dtype}")
        demand(query.dim() == 4, f"query must be [batch, heads, rows, dim], got {list(query.shape)}")
        batch, heads, rows, dim = query.shape
        lead = "[pages, kv_heads, page" if blocks is not None else "[batch, kv_heads, slots"
        stored = {"key": self.key_rows, "value": self.value_rows}
        for name, side in stored.items():
            form = side.form if side.scales or side.codes.dtype == query.dtype else ""
            demand(
                form != "",
                f"{name}s must be {query.dtype} like query, or int8 or FP8 codes (float8_e4m3fn, or uint8 as stored) "
                f"with {name}_scales in float32, or uint8 codes in pairs with the two {name}_scales of kv.Int4 or "
                f"kv.NVFP4, got {side.codes.dtype} with {[scale.dtype for scale in side.scales] or 'no scales'}",
            )
        width = f"{dim} / 2" if stored["key"].packed else str(dim)
        demand(
            keys.dim() == 4 and stored["key"].dim == dim and (blocks is not None or keys.shape[0] == batch),
            f"keys must be {lead}, {width}] for queries {list(query.shape)}, got {list(keys.shape)}",
        )
        demand(
            values.dim() == 4 and values.shape[:3] == keys.shape[:3],
            f"values must be like keys {list(keys.shape)} up to the last dimension, got {list(values.shape)}",
        )
        kv_heads = keys.shape[1]
        demand(
            kv_heads > 0 and heads % kv_heads == 0,
            f"{heads} query heads cannot share {kv_heads} key/value heads; queries are [batch, heads, rows, dim], keys "
            f"{lead}, {width}], got {list(query.shape)} and {list(keys.shape)}",
        )
        demand(
            visible.dim() == 3 and visible.shape[:2] == (batch, rows),
            f"visible must be [{batch}, {rows}, words], got {list(visible.shape)}",
        )
        demand(
            visible.dtype == torch.int64,
            f"visible must be int64 bit masks, got {visible.dtype}; use trees.topology.pack",
        )
        demand(
            depths is None or depths.dim() == 2,
            f"depths must be [{batch}, pending], got {list(depths.shape) if depths is not None else None}",
        )
        pending = self.pending
        demand(
            pending >= rows,
            f"depths tell of {pending} pending rows, but there are {rows} queries; the queries are the last of them",
        )
        demand(
            visible.shape[2] == -(-pending // WORD) or pending == 0,
            f"{pending} pending rows need masks of {-(-pending // WORD)} words, got {visible.shape[2]}; "
            "use trees.topology.pack for a matrix",
        )
        for name, given, shape in (
            ("lengths", self.lengths, [batch]),
            ("starts", self.starts, [batch]),
            ("depths", depths, [batch, pending]),
            ("sinks", self.sinks, [heads]),
        ):
            came = shape if given is None else list(given.shape)
            demand(came == shape, f"{name} must be a tensor {shape}, got {came}")
        demand(
            blocks is None or (blocks.dim() == 2 and blocks.shape[0] == batch),
            f"blocks must be [{batch}, blocks per row], got {list(blocks.shape) if blocks is not None else None}",
        )
        for name, given in (("lengths", self.lengths), ("starts", self.starts), ("depths", depths), ("blocks", blocks)):
            integers = given is None or not (given.is_floating_point() or given.dtype == torch.bool)
            demand(integers, f"{name} must hold integers, got {getattr(given, 'dtype', None)}")
        demand(
            blocks is None or blocks.dtype in (torch.int32, torch.int64),
            f"blocks must be int32 or int64, got {getattr(blocks, 'dtype', None)}",
        )
        demand(
            window is None or (whole(window, least=1) and window < 1 << 31),
            f"a window counts positions, its own included, so from 1 on and below 2^31; got {window!r}",
        )
        demand(
            softcap is None or (number(softcap) and softcap > 0),
            f"softcap must be a number above 0 or None, got {softcap!r}",
        )
        demand(number(self.scale), f"scale must be a finite number or None, got {self.scale!r}")
        for name, side in stored.items():
            wrong = side.mismatch()
            demand(not wrong, f"{name}_scales must be those of {side.form} codes {list(side.codes.shape)}, got {wrong}")
        tensors = [getattr(self, name) for name in self.__slots__]
        tensors += [scale for side in stored.values() for scale in side.scales]
        away = [each.device for each in tensors if isinstance(each, Tensor) and each.device != query.device]
        demand(not away, f"all tensors must be on {query.device} like query, got {sorted(set(map(str, away)))}")
        slots = keys.shape[2] * (blocks.shape[1] if blocks is not None else 1)
        if batch and legible(self.lengths):
            least, most = int(self.lengths.min()), int(self.lengths.max())
            demand(
                least >= 0 and most + pending <= slots,
                f"lengths {least} to {most} and {pending} pending rows do not fit {slots} slots; "
                "lengths count committed slots only",
            )
            spare = pending % WORD  # bits of the last word that have a row; none if all have
            clear = spare == 0 or not bool((visible[:, :, -1] & -1 << spare).any())
            demand(clear, f"visible has bits behind the {pending} pending rows")
        if depths is not None and depths.numel() and legible(depths):
            demand(int(depths.min()) >= 0, f"depths count from 0 at a root, got {int(depths.min())}")
        if self.starts is not None and batch and legible(self.starts, self.lengths):
            inside = bool(((self.starts >= 0) & (self.starts <= self.lengths)).all())
            demand(inside, f"starts must be from 0 to lengths, got {self.starts.tolist()}")
        if blocks is not None and blocks.numel() and legible(blocks, self.lengths):
            used = torch.arange(blocks.shape[1]) * keys.shape[2] < self.lengths[:, None] + pending
            pages = blocks[used]
            inside = bool(((pages >= 0) & (pages < keys.shape[0])).all())
            demand(inside, f"blocks in use must be among {keys.shape[0]} pages, got {blocks.tolist()}")
        return AttentionShape(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            rows=rows,
            slots=slots if window is None else min(slots, window + pending),
            dim=dim,
            value_dim=stored["value"].dim,
            bytes_per_element=stored["key"].bytes_per_element,
            value_bytes_per_element=stored["value"].bytes_per_element,
        )


def _parts(scales: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if scales is None:
        return ()
    return (scales,) if isinstance(scales, Tensor) else tuple(scales)
