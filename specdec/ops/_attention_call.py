"""One call of verify attention: its arguments, what they must look like, and the shape of the problem."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops._ancestry import WORD, unpack
from specdec.ops._attention_plan import AttentionShape

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
        return unpack(self.visible, WORD * self.visible.shape[2]).sum(-1) - 1

    def checked(self) -> AttentionShape:
        """The shape of the problem; raises `ShapeError` for arguments that do not belong together."""
        query, keys, values, visible, depths = self.query, self.keys, self.values, self.visible, self.depths
        blocks, softcap = self.blocks, self.softcap
        window: Any = self.window

        def demand(condition: bool, message: str) -> None:
            if not condition:
                raise ShapeError(f"tree_attention: {message}.")

        for name in ("query", "keys", "values", "visible", "lengths"):
            given: Any = getattr(self, name)
            demand(isinstance(given, Tensor), f"{name} must be a tensor, got {type(given).__name__}")
        demand(query.is_floating_point(), f"query must hold floating-point numbers, got {query.dtype}")
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
        demand(
            visible.dim() == 3 and visible.shape[:2] == (batch, rows),
            f"visible must be [{batch}, {rows}, words], got {list(visible.shape)}",
        )
        demand(visible.dtype == torch.int64, f"visible must be int64 bit masks, got {visible.dtype}; use topology.pack")
        pending = rows if depths is None else depths.shape[-1]
        demand(
            pending >= rows,
            f"depths tell of {pending} pending rows, but there are {rows} queries; the queries are the last of them",
        )
        demand(
            visible.shape[2] == -(-pending // WORD) or pending == 0,
            f"{pending} pending rows need masks of {-(-pending // WORD)} words, got {visible.shape[2]}; "
            "use topology.pack for a matrix",
        )
        for name, given, shape in (
            ("lengths", self.lengths, [batch]),
            ("starts", self.starts, [batch]),
            ("depths", depths, [batch, pending]),
            ("sinks", self.sinks, [heads]),
        ):
            came = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            demand(given is None or came == shape, f"{name} must be a tensor {shape}, got {came}")
        demand(
            blocks is None or (blocks.dim() == 2 and blocks.shape[0] == batch),
            f"blocks must be [{batch}, blocks per row]",
        )
        for name, given in (("lengths", self.lengths), ("starts", self.starts), ("depths", depths), ("blocks", blocks)):
            integers = given is None or not (given.is_floating_point() or given.dtype == torch.bool)
            demand(integers, f"{name} must hold integers, got {getattr(given, 'dtype', None)}")
        demand(
            window is None or (isinstance(window, int) and window > 0),
            f"a window counts positions, its own included, so from 1 on; got {window}",
        )
        demand(softcap is None or 0 < softcap < math.inf, f"softcap must be above 0, got {softcap}")
        for name, stored, scales in (("key", keys, self.key_scales), ("value", values, self.value_scales)):
            wanted = f"{name}s must be {query.dtype} like query, or int8 or float8_e4m3fn with {name}_scales"
            demand(stored.dtype in (STORED if scales is not None else {query.dtype}), f"{wanted}, got {stored.dtype}")
            demand(
                scales is None or (scales.shape == (*stored.shape[:3], 1) and scales.dtype == torch.float32),
                f"{name}_scales must be float32 {[*stored.shape[:3], 1]}, got {getattr(scales, 'dtype', None)} "
                f"{list(getattr(scales, 'shape', ()))}",
            )
        tensors = [getattr(self, name) for name in self.__slots__]
        away = [each.device for each in tensors if isinstance(each, Tensor) and each.device != query.device]
        demand(not away, f"all tensors must be on {query.device}, got one on {away[:1]}")
        slots = keys.shape[2] * (blocks.shape[1] if blocks is not None else 1)
        if batch and self.lengths.device.type == "cpu":  # on a GPU, reading them would stall the host
            least, most = int(self.lengths.min()), int(self.lengths.max())
            demand(
                least >= 0 and most + pending <= slots,
                f"lengths {least} to {most} and {pending} pending rows do not fit {slots} slots; "
                "lengths count committed slots only",
            )
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
