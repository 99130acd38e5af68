"""A linear layer for few rows: its time is that of reading the weights once.

A verify pass multiplies a handful of rows with every matrix of the model. Libraries' products are made for many rows;
for few, cuBLAS reads weights at half to nine tenths of what the memory of an H200 gives, at less where they are small.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _dispatch, _gate
from specdec.ops._checks import demands, tensors

MOST_ROWS = 64
"""Rows that the kernel takes."""

TILE = 64
"""Outputs that are computed side by side; each has a counter."""

GATE_BLOCK = TILE // 2
"""Gates that stand side by side in interleaved weights, followed by as many of their partners."""


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyCall:
    """Checked arguments of one call."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    gate: str | None
    residual: Tensor | None
    counters: Tensor | None


def skinny_linear(
    rows: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
    *,
    gate: _gate.GateActivation | None = None,
    residual: Float[Tensor, "rows kept"] | None = None,
    counters: Int[Tensor, " tiles"] | None = None,
    impl: _dispatch.Impl = "auto",
) -> Float[Tensor, "rows kept"]:
    """`torch.nn.functional.linear` for few rows, with the gate of an MLP if there is one; one launch of the kernel.

    The kernel takes up to 64 rows in half precision and adds up in float32, in a fixed order: a call that is repeated
    gives the same to the last bit. Where outputs are too few to fill the device, inputs are split too, and whoever
    comes last adds up the parts.

    Args:
        rows: rows, any strides.
        weight: a row for each output, of the rows' dtype; the kernel wants the last dimension contiguous.
        bias: added to the outputs, before the gate.
        gate: activation; outputs are then pairs, interleaved as by `interleave_gate`, and half as many are returned:
            the activation of the first times the second, each rounded as if the layers were run one by one. Whether
            weights are interleaved cannot be seen: two matrices one below the other give another result, no error.
        residual: added to the rounded result, which is rounded once more.
        counters: int32 zeros, at least one for every 64 outputs or part of 64; left as zeros. Without, they are made,
            which takes a launch. Calls that may run at the same time must not share them.
        impl: which implementation runs; see `specdec.ops`.

    Raises:
        ShapeError: for shapes, dtypes and devices that do not belong together.
        UnsupportedError: for another activation, or if `impl="triton"` cannot run here or does not take the arguments.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> rows, gate, up = torch.ones(3, 16), torch.randn(32, 16), torch.randn(32, 16)
        >>> ops.skinny_linear(rows, gate).shape
        torch.Size([3, 32])
        >>> found = ops.skinny_linear(rows, ops.interleave_gate(gate, up), gate="silu")
        >>> torch.allclose(found, torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T), atol=1e-5)
        True
    """
    optional = {"bias": bias, "residual": residual, "counters": counters}
    tensors("skinny_linear", {"rows": rows, "weight": weight}, optional)
    call = SkinnyCall(rows, weight, bias, gate, residual, counters)
    _check(call)
    kernel: Any = _dispatch.choose("skinny_linear", impl, rows.device, rows, weight, bias, residual)
    reason = kernel.refusal(call) if kernel is not None else ""
    if reason and impl == "triton":
        raise UnsupportedError(f"skinny_linear: the kernel takes {reason}.")
    if kernel is None or reason:
        return linear(rows, weight, bias, gate, residual)
    found: Tensor = kernel.launch(call)
    return found


def interleave_gate(gate: Float[Tensor, "outputs ..."], up: Float[Tensor, "outputs ..."]) -> Float[Tensor, "both ..."]:
    """Weights of a gate and of its partner as `skinny_linear` reads them: 32 rows of the one, 32 of the other.

    Args:
        gate: a row for each gate; a multiple of 32 of them.
        up: a row for each partner, of the same shape, dtype and device. Biases can be interleaved alike, as vectors.

    Raises:
        ShapeError: if they are not alike, or their rows are not a multiple of 32.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> ops.interleave_gate(torch.zeros(64, 1), torch.ones(64, 1))[:, 0].unflatten(0, (-1, 32))[:, 0]
        tensor([0., 1., 0., 1.])
    """
    tensors("interleave_gate", {"gate": gate, "up": up})
    if gate.shape != up.shape or gate.dim() == 0 or gate.shape[0] % GATE_BLOCK:
        raise ShapeError(
            f"interleave_gate: gate and up must be alike, with a multiple of {GATE_BLOCK} rows, "
            f"got {list(gate.shape)} and {list(up.shape)}. Rows of zeros may be added to both: they give zeros."
        )
    if (gate.dtype, gate.device) != (up.dtype, up.device):
        raise ShapeError(
            f"interleave_gate: gate and up must be alike, "
            f"got {gate.dtype} on {gate.device} and {up.dtype} on {up.device}."
        )
    return _gate.interleaved(gate, up, GATE_BLOCK)


def linear(
    given: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None, residual: Tensor | None = None
) -> Tensor:
    """The definition in plain torch, for rows of any shape `[..., inputs]`."""
    found = functional.linear(given, weight, bias)
    if gate:
        opened, up = found.unflatten(-1, (found.shape[-1] // TILE, 2, GATE_BLOCK)).unbind(-2)
        found = _gate.gated(opened.flatten(-2), up.flatten(-2), gate)
    return found if residual is None else residual + found


def _check(call: SkinnyCall) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands("skinny_linear")
    rows, weight, counters = call.rows, call.weight, call.counters
    if call.gate is not None:
        _gate.known("skinny_linear", "gate", call.gate)
    demand(
        rows.dim() == 2,
        f"rows must be [rows, inputs], got {list(rows.shape)}; reshape(-1, inputs) puts them below each other",
    )
    demand(
        weight.dim() == 2 and weight.shape[1] == rows.shape[1],
        f"weight must be [outputs, {rows.shape[1]}], got {list(weight.shape)}",
    )
    outputs = weight.shape[0]
    demand(
        call.gate is None or outputs % TILE == 0,
        f"with a gate, interleaved weights have a multiple of {TILE} rows, got {outputs}; see interleave_gate",
    )
    bias = call.bias
    demand(bias is None or list(bias.shape) == [outputs], f"bias must be [{outputs}], got {_shape(bias)}")
    demand(rows.is_floating_point(), f"rows must hold floating-point numbers, got {rows.dtype}")
    kept = [rows.shape[0], outputs // (2 if call.gate else 1)]
    residual = call.residual
    demand(residual is None or list(residual.shape) == kept, f"residual must be {kept}, got {_shape(residual)}")
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        kind = rows.dtype if tensor is None else tensor.dtype
        demand(kind == rows.dtype, f"{name} must be {rows.dtype} like rows, got {kind}")
    if counters is not None:
        tiles = -(-outputs // TILE)
        enough = counters.dim() == 1 and counters.shape[0] >= tiles and counters.dtype == torch.int32
        demand(
            enough and counters.is_contiguous(),
            f"counters must be [{tiles}] or more of int32, contiguous, got {_shape(counters)} of {counters.dtype}",
        )
    devices = {each.device for each in (rows, weight, bias, residual, counters) if each is not None}
    demand(len(devices) == 1, f"all tensors must be on one device, got {sorted(map(str, devices))}")


def _shape(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else list(tensor.shape)
