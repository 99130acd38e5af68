"""One call of verify attention: its arguments, what they must look like, and the shape of the problem."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops._attention_plan import AttentionShape

WORD = 64
STORED = {torch.int8, torch.float8_e4m3fn}


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
    key_scales: Tensor | None
    value_scales: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def pending_depths(self) -> Tensor:
        """Depth of every pending row: as given, or the number of a node's ancestors."""
        if self.depths is not None:
            return self.depths
        bits = torch.bitwise_right_shift(self.visible.unsqueeze(-1), torch.arange(WORD, device=self.visible.device)) & 1
        return bits.sum((-1, -2)) - 1

    def checked(self) -> AttentionShape:
        """The shape of the problem; raises `ShapeError` for arguments that do not belong together."""
        query, keys, values, visible, depths = self.query, self.keys, self.values, self.visible, self.depths
        blocks, window, softcap = self.blocks, self.window, self.softcap

        def demand(condition: bool, message: str) -> None:
            if not condition:
                raise ShapeError(f"tree_attention: {message}.")

        demand(query.dim() == 4, f"query must be [batch, heads, rows, dim], got {list(query.shape)}")
        batch, heads, rows, dim = query.shape
        lead = "[pages, kv_heads, page" if blocks is not None else "[batch, kv_heads, slots"
        demand(
            keys.dim() == 4 and keys.shape[3] == dim and (blocks is not None or keys.shape[0] == batch),
            f"keys must be {lead}, {dim}] for queries {list(query.shape)}, got {list(keys.shape)}",
        )
        demand(
            values.dim() == 4 and values.shape[:3] == keys.shape[:3],
            f"values must be like keys {list(keys.shape)} up to the last dimension, got {list(values.shape)}",
        )
        kv_heads = keys.shape[1]
        demand(kv_heads > 0 and heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} key/value heads")
        demand(visible.dim() == 3 and visible.shape[:2] == (batch, rows), f"visible must be [{batch}, {rows}, words]")
        demand(visible.dtype == torch.int64, f"visible must be int64 bit masks, got {visible.dtype}; use topology.pack")
        pending = rows if depths is None else depths.shape[-1]
        demand(
            visible.shape[2] * WORD >= pending >= rows,
            f"{rows} queries among {pending} pending rows need masks of {-(-max(pending, rows) // WORD)} words, "
            f"got {visible.shape[2]}",
        )
        for name, given, shape in (
            ("lengths", self.lengths, [batch]),
            ("starts", self.starts, [batch]),
            ("depths", depths, [batch, pending]),
            ("sinks", self.sinks, [heads]),
        ):
            demand(given is None or list(given.shape) == shape, f"{name} must be {shape}")
        demand(
            blocks is None or (blocks.dim() == 2 and blocks.shape[0] == batch),
            f"blocks must be [{batch}, blocks per row]",
        )
        demand(window is None or window > 0, f"a window counts positions, its own included, so from 1 on; got {window}")
        demand(softcap is None or 0 < softcap < math.inf, f"softcap must be above 0, got {softcap}")
        for name, stored, scales in (("key", keys, self.key_scales), ("value", values, self.value_scales)):
            wanted = f"{name}s must be {query.dtype} like query, or int8 or float8_e4m3fn with {name}_scales"
            demand(stored.dtype in (STORED if scales is not None else {query.dtype}), f"{wanted}, got {stored.dtype}")
            demand(
                scales is None or (scales.shape == (*stored.shape[:3], 1) and scales.dtype == torch.float32),
                f"{name}_scales must be float32 {[*stored.shape[:3], 1]}",
            )
        tensors = [getattr(self, name) for name in self.__slots__]
        away = [each.device for each in tensors if isinstance(each, Tensor) and each.device != query.device]
        demand(not away, f"all tensors must be on {query.device}, got one on {away[:1]}")
        slots = keys.shape[2] * (blocks.shape[1] if blocks is not None else 1)
        return AttentionShape(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            rows=rows,
            slots=slots if window is None else min(slots, window + pending),
            dim=dim,
            value_dim=values.shape[3],
            bytes_per_element=keys.element_size(),
        )
