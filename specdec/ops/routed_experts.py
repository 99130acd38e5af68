"""The experts of a mixture, for few rows: reads the weights of the experts that some row was routed to, and no others.

A verify pass has a handful of rows, and each goes through a few of many experts. Nearly all of its time is the reading
of their weights. Which experts those are is known on the device alone, so nothing here asks the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.ops import _dispatch, _gate
from specdec.ops._checks import demands, tensors


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCall:
    """Checked arguments of one call."""

    hidden: Tensor
    chosen: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    activation: str


def routed_experts(
    hidden: Float[Tensor, "tokens hidden"],
    chosen: Int[Tensor, "tokens choices"],
    weights: Float[Tensor, "tokens choices"],
    gate_up: Float[Tensor, "experts both hidden"],
    down: Float[Tensor, "experts hidden inner"],
    *,
    activation: _gate.GateActivation = "silu",
    impl: _dispatch.Impl = "auto",
) -> Float[Tensor, "tokens hidden"]:
    """Each row's weighted sum of the experts that were chosen for it; the kernel takes three launches.

    Expert `e` maps a row `x` to `down[e] @ (act(gate) * up)`; `gate` and `up` are the two halves of `gate_up[e] @ x`.
    Products and the sum over choices are added up in float32 (in float64 for rows of that), and what lies between them
    is rounded to the dtype of the rows, as models do. The order of all sums is fixed: a call that is repeated gives the
    same to the last bit.

    Args:
        hidden: rows, any strides.
        chosen: experts of each row. One that is outside `0 .. experts - 1` contributes nothing; one that is named twice
            contributes twice.
        weights: what each expert's result is multiplied with, in any floating-point dtype.
        gate_up: weights of both projections, all gates first (not interleaved), each row of them a row of the result;
            of the rows' dtype. The kernel wants the last dimension contiguous.
        down: weights of the last projection, alike.
        activation: what is applied to the gate.
        impl: which implementation runs; see `specdec.ops`.

    Raises:
        ShapeError: for shapes, dtypes and devices that do not belong together.
        UnsupportedError: for another activation, or if `impl="triton"` cannot run here or does not take the arguments.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> gate_up = torch.tensor([[[9.0], [1.0]], [[9.0], [2.0]]])  # of one number; up is x, or 2 x
        >>> down = torch.tensor([[[1.0]], [[1.0]]])
        >>> rows, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5, 0.5], [1.0, 1.0]])
        >>> found = ops.routed_experts(rows, torch.tensor([[0, 1], [1, 7]]), weights, gate_up, down)
        >>> [round(number, 1) for number in found.flatten().tolist()]  # 9 (1 + 2) / 2, then 18 * 4 of expert 1 alone
        [13.5, 72.0]
    """
    given = {"hidden": hidden, "chosen": chosen, "weights": weights, "gate_up": gate_up, "down": down}
    tensors("routed_experts", given)
    call = ExpertCall(hidden, chosen, weights, gate_up, down, activation)
    _check(call)
    if 0 in (hidden.numel(), chosen.numel(), gate_up.numel()):
        return torch.zeros_like(hidden)
    kernel: Any = _dispatch.choose("routed_experts", impl, hidden.device, hidden, weights, gate_up, down)
    reason = kernel.refusal(call) if kernel is not None else ""
    if reason and impl == "triton":
        raise UnsupportedError(f"routed_experts: the kernel takes {reason}.")
    found: Tensor = _sum(call) if kernel is None or reason else kernel.launch(call)
    return found


def _sum(call: ExpertCall) -> Tensor:
    """The definition in plain torch: choice by choice, each row times the weights of its own expert."""
    kind = call.hidden.dtype
    wide = torch.float64 if kind == torch.float64 else torch.float32
    known = (call.chosen >= 0) & (call.chosen < call.down.shape[0])
    total = torch.zeros_like(call.hidden, dtype=wide)
    for ids, weights, real in zip(call.chosen.T, call.weights.T, known.T, strict=True):
        expert = ids.where(real, 0).long()
        gate, up = _times(call.gate_up[expert], call.hidden, wide).chunk(2, 1)
        opened = _gate.gated(gate, up, call.activation)
        found = _times(call.down[expert], opened, wide).to(wide) * weights[:, None].to(wide)
        total += found.where(real[:, None], 0)
    return total.to(kind)


def _times(matrices: Tensor, rows: Tensor, wide: torch.dtype) -> Tensor:
    """Each row times its own matrix."""
    return (matrices.to(wide) @ rows[:, :, None].to(wide))[:, :, 0].to(rows.dtype)


def _check(call: ExpertCall) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands("routed_experts")
    _gate.known("routed_experts", "activation", call.activation)
    demand(
        call.hidden.dim() == 2,
        f"hidden must be [tokens, hidden], got {list(call.hidden.shape)}; reshape(-1, hidden) makes one batch of it",
    )
    demand(call.down.dim() == 3, f"down must be [experts, hidden, inner], got {list(call.down.shape)}")
    tokens, width = call.hidden.shape
    experts, inner = call.down.shape[0], call.down.shape[2]
    demand(
        call.chosen.dim() == 2 and call.chosen.shape[0] == tokens,
        f"chosen must be [{tokens}, choices], got {list(call.chosen.shape)}",
    )
    demand(call.down.shape[1] == width, f"down must be [experts, {width}, inner], got {list(call.down.shape)}")
    for name, tensor, wanted in (
        ("gate_up", call.gate_up, [experts, 2 * inner, width]),
        ("weights", call.weights, list(call.chosen.shape)),
    ):
        demand(list(tensor.shape) == wanted, f"{name} must be {wanted}, got {list(tensor.shape)}")
    whole = not (call.chosen.is_floating_point() or call.chosen.is_complex() or call.chosen.dtype == torch.bool)
    demand(whole, f"chosen must hold integers, got {call.chosen.dtype}")
    for name, tensor in (("hidden", call.hidden), ("weights", call.weights)):
        demand(tensor.is_floating_point(), f"{name} must hold floating-point numbers, got {tensor.dtype}")
    for name, tensor in (("gate_up", call.gate_up), ("down", call.down)):
        demand(tensor.dtype == call.hidden.dtype, f"{name} must be {call.hidden.dtype} like hidden, got {tensor.dtype}")
    devices = {each.device for each in (call.hidden, call.chosen, call.weights, call.gate_up, call.down)}
    demand(len(devices) == 1, f"all tensors must be on one device, got {sorted(map(str, devices))}")
