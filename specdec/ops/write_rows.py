"""Writes new keys and values of one layer into a preallocated cache, in the form in which it stores them.

Where a row goes is a number on the device, and a slot outside the buffers drops it, so shapes are the same in every
round: a captured CUDA graph writes as many rows as it was captured for, and the host reads nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.ops import _dispatch
from specdec.ops._checks import demands, flags, legible, several, tensors
from specdec.ops._stored_rows import PLAIN, form_of
from specdec.ops.hadamard import hadamard
from specdec.ops.quantize import NVFP4_GROUP, to_fp8, to_int4, to_int8, to_nvfp4

ENCODE = {"int8": to_int8, "fp8": to_fp8, "nvfp4": to_nvfp4}


def write_rows(
    keys: Float[Tensor, "batch heads new dim"],
    values: Float[Tensor, "batch heads new value_dim"],
    key_parts: tuple[Tensor, ...],
    value_parts: tuple[Tensor, ...],
    slots: Int[Tensor, "batch new"],
    *,
    rotate_keys: bool = False,
    rotate_values: bool = False,
    impl: _dispatch.Impl = "auto",
) -> None:
    """Encodes new rows and writes them into their slots, in place; the kernel takes one launch.

    The buffers say how rows are stored: one buffer `[batch, heads, capacity, dim]` of floating-point numbers holds them
    as they are, cast to its dtype; codes of that shape and float32 scales `[batch, heads, capacity, 1]` hold them as
    `kv.Int8` does (int8 codes) or `kv.FP8` with one scale per token (uint8 or float8_e4m3fn codes); the three tensors
    of `kv.Int4` or `kv.NVFP4` hold them as those do. Rotated, they hold what `kv.Hadamard` of that codec does.

    Args:
        keys: new rows, any strides.
        values: like `keys`; the last dimension may differ.
        key_parts: buffers of the keys, any strides.
        value_parts: buffers of the values.
        slots: where row i of batch row b goes; a row whose slot is outside `0 .. capacity - 1` is dropped. Slots of a
            batch row must differ.
        rotate_keys: whether keys are rotated first, as by `hadamard`.
        rotate_values: whether values are.
        impl: which implementation runs; see `specdec.ops`. Both give the same to the last bit, unless rotated: then
            rotated numbers may differ in their last bit, and a code by one step.

    Raises:
        ShapeError: for shapes that do not belong together, dtypes that are no rows or slots, devices that differ, and,
            on a CPU, slots that are equal.
        UnsupportedError: for buffers of another form, flags that are neither True nor False, or if `impl="triton"`
            cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> keys, values = torch.zeros(1, 1, 4, 2, dtype=torch.int8), torch.zeros(1, 1, 4, 2)
        >>> scales, new = torch.zeros(1, 1, 4, 1), torch.tensor([[[[1.0, -0.5], [3.0, 4.0]]]])
        >>> ops.write_rows(new, new, (keys, scales), (values,), slots=torch.tensor([[2, -1]]))
        >>> keys[0, 0].tolist(), values[0, 0].tolist()
        ([[0, 0], [0, 0], [127, -64], [0, 0]], [[0.0, 0.0], [0.0, 0.0], [1.0, -0.5], [0.0, 0.0]])
    """
    tensors("write_rows", {"keys": keys, "values": values, "slots": slots})
    several("write_rows", "key_parts", key_parts)
    several("write_rows", "value_parts", value_parts)
    flags("write_rows", rotate_keys=rotate_keys, rotate_values=rotate_values)
    sides = Side("key", keys, key_parts, rotate_keys), Side("value", values, value_parts, rotate_values)
    _check(sides, slots)
    kernel: Any = _dispatch.choose("write_rows", impl, slots.device)
    floats = {side.rows.dtype for side in sides} | {side.parts[0].dtype for side in sides if side.form == "plain"}
    if kernel is not None and not floats <= set(kernel.DTYPES):
        if impl == "triton":
            raise UnsupportedError(f"write_rows: the kernel takes {kernel.DTYPES}, got {sorted(map(str, floats))}.")
        kernel = None
    if kernel is not None and not all(side.regular for side in sides):
        if impl == "triton":
            raise UnsupportedError(
                "write_rows: the kernel writes codes of four bits where dimension and group are powers of two, got "
                f"{[(side.rows.shape[3], side.group) for side in sides if not side.regular]}."
            )
        kernel = None
    if 0 in (slots.numel(), keys.shape[1], key_parts[0].shape[2]):
        return
    if kernel is not None:
        kernel.launch(*sides, slots)
        return
    for side, rows in [(side, side.encode()) for side in sides]:  # what fails, fails before anything is written
        _write(side, rows, slots)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The keys or the values of a call: new rows, their buffers, and whether they are rotated."""

    name: str
    rows: Tensor
    parts: tuple[Tensor, ...]
    rotate: bool

    @property
    def form(self) -> str:
        """How rows are stored, as `form_of` tells."""
        return form_of(self.parts)

    @property
    def group(self) -> int:
        """Numbers that share a scale in codes of four bits; 0 for rows of another form."""
        return self.rows.shape[3] // self.parts[1].shape[3] if len(self.parts) == 3 else 0

    @property
    def regular(self) -> bool:
        """Whether dimension and group are powers of two, if rows become codes of four bits."""
        sizes = (self.rows.shape[3], self.group) if len(self.parts) == 3 else ()
        return all(size & (size - 1) == 0 for size in sizes)

    @property
    def widths(self) -> tuple[int, ...]:
        """Last dimensions that the buffers must have; groups of INT4 as they are, if they divide the rows."""
        dim = self.rows.shape[3]
        if self.form == "int4":
            groups = self.parts[1].shape[-1]
            groups = groups if groups and dim % groups == 0 else 1
            return dim // 2, groups, groups
        return {"plain": (dim,), "nvfp4": (dim // 2, dim // NVFP4_GROUP, 1)}.get(self.form, (dim, 1))

    def encode(self) -> tuple[Tensor, ...]:
        """The rows as they are stored."""
        rows = hadamard(self.rows) if self.rotate else self.rows
        if self.form == "plain":
            return (rows.to(self.parts[0].dtype),)
        codes = to_int4(rows, self.group) if self.form == "int4" else ENCODE[self.form](rows)
        return tuple(code.view(part.dtype) for code, part in zip(codes, self.parts, strict=True))


def _write(side: Side, rows: tuple[Tensor, ...], slots: Tensor) -> None:
    """The definition in plain torch. A row that is dropped repeats the write of one that is not."""
    batch, new = slots.shape
    capacity = side.parts[0].shape[2]
    kept = (slots >= 0) & (slots < capacity)
    some = kept.any(1)
    order = torch.where(kept, torch.arange(new, device=slots.device), kept.int().argmax(1, keepdim=True))
    # Where all rows of a batch row are dropped, slot 0 is written as it is.
    target = slots.gather(1, order).masked_fill(~some[:, None], 0).long()
    row = torch.arange(batch, device=slots.device)[:, None]
    for part, code in zip(side.parts, rows, strict=True):
        buffer, content = (each.view(torch.uint8) if each.element_size() == 1 else each for each in (part, code))
        chosen = content[row, :, order]  # [batch, new, heads, width]
        buffer[row, :, target] = torch.where(some[:, None, None, None], chosen, buffer[row, :, target])


def _check(sides: tuple[Side, Side], slots: Tensor) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands("write_rows")
    lead = sides[0].rows.shape[:3]
    for side in sides:
        name, rows, parts = side.name, side.rows, side.parts
        demand(
            rows.dim() == 4 and rows.shape[:3] == lead,
            f"{name}s must be [batch, heads, new, dim], keys and values alike up to dim, got {list(rows.shape)}",
        )
        demand(rows.dtype in PLAIN, f"{name}s must hold floating-point numbers, got {rows.dtype}")
        if not side.form:
            raise UnsupportedError(
                f"write_rows: {name}_parts must be one buffer of floating-point numbers, or int8, uint8 or "
                "float8_e4m3fn codes and float32 scales, or the three buffers of kv.Int4 or kv.NVFP4, got "
                f"{[part.dtype for part in parts]}."
            )
        capacity = sides[0].parts[0].shape[2] if sides[0].parts[0].dim() == 4 else "capacity"
        odd = {"int4": 2, "nvfp4": NVFP4_GROUP}.get(side.form, 1)
        fits = rows.shape[3] % odd == 0 and (rows.shape[3] > 0 or side.form == "plain")
        demand(fits, f"{side.form} codes hold multiples of {odd} numbers, got {rows.shape[3]}")
        leaves = torch.is_grad_enabled() and any(part.is_leaf and part.requires_grad for part in parts)
        demand(not leaves, f"{name}_parts must not be leaves that require gradients: they are written in place")
        for part, width in zip(parts, side.widths, strict=True):
            wanted = [*lead[:2], capacity, width]
            demand(list(part.shape) == wanted, f"a buffer of {name}_parts must be {wanted}, got {list(part.shape)}")
    demand(slots.shape == (lead[0], lead[2]), f"slots must be {[lead[0], lead[2]]}, got {list(slots.shape)}")
    whole = not (slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool)
    demand(whole, f"slots must hold integers, got {slots.dtype}")
    devices = {each.device for side in sides for each in (side.rows, *side.parts)} | {slots.device}
    demand(len(devices) == 1, f"all tensors must be on one device, got {sorted(map(str, devices))}")
    for row in slots.tolist() if legible(slots) else ():
        kept = [slot for slot in row if 0 <= slot < capacity]
        demand(len({*kept}) == len(kept), f"slots of a batch row must differ, got {row}")
