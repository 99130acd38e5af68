"""Linear layers and gated MLPs of a compiled twin, as `ops.skinny_linear` computes them.

Layers of half precision on a GPU that has the kernel are served; more rows than it takes go to torch. An MLP is
recognised by what it computes: its own forward is run once beside the same three layers, and must give the same.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from specdec import ops
from specdec.hf.trial import tried
from specdec.ops import _gate
from specdec.ops.skinny_linear import GATE_BLOCK, MOST_ROWS, TILE, linear

OPERATOR = "specdec::skinny_linear"

GATES: dict[type[nn.Module], ops.GateActivation] = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu_tanh"}
"""Activations of gates, by the modules that apply them."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the layers of a gated MLP; a module `act_fn` may stand beside them."""


def serves(weight: Tensor) -> bool:
    """Whether the kernel multiplies with a weight where it is."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return half and weight.dim() == 2 and weight.is_cuda and ops.available("skinny_linear", weight.device)[0]


class SkinnyLinear(nn.Module):
    """A linear layer, whose weights stay where they are.

    Args:
        weight: `[outputs, inputs]`.
        bias: `[outputs]`.
        gate: activation of interleaved gates (`ops.interleave_gate`); half as many outputs are returned.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gate: ops.GateActivation | None = None) -> None:
        """Runs nothing."""
        super().__init__()
        self.weight, self.bias, self.gate = weight.detach(), None if bias is None else bias.detach(), gate
        self.kernel = serves(weight)
        self.counters = torch.zeros(-(-weight.shape[0] // TILE), dtype=torch.int32, device=weight.device)
        register_operator()

    def forward(self, given: Tensor) -> Tensor:
        """As the layer, and the gate behind it."""
        if given.shape[:-1].numel() > MOST_ROWS or not self.kernel:
            return linear(given, self.weight, self.bias, self.gate)
        found: Tensor = torch.ops.specdec.skinny_linear(
            given, self.weight, self.bias, None, self.counters, self.gate or ""
        )
        return found


class SkinnyMLP(nn.Module):
    """A gated MLP of two products; gates and their partners are copied into one matrix."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: ops.GateActivation) -> None:
        """Copies the weights of gates and partners."""
        super().__init__()
        weight = ops.interleave_gate(gate.weight.detach(), up.weight.detach())
        bias: Any = gate.bias
        both = None if bias is None else ops.interleave_gate(bias.detach(), up.bias.detach())
        self.both = SkinnyLinear(weight, both, activation)
        self.down = SkinnyLinear(down.weight, down.bias)

    def forward(self, given: Tensor) -> Tensor:
        """As the MLP."""
        output: Tensor = self.down(self.both(given))
        return output


def mlp(module: nn.Module) -> SkinnyMLP | None:
    """What stands in a twin for a gated MLP; None if the module is something else."""
    named = dict(module.named_children())
    act = named.pop("act_fn", None)
    if set(named) != set(PROJECTIONS) or module._parameters or module._buffers:
        return None
    linears: list[Any] = [named[name] for name in PROJECTIONS]
    gate, up, down = linears
    if not all(type(each) is nn.Linear and serves(each.weight) for each in linears):
        return None
    alike = gate.weight.shape == up.weight.shape and (gate.bias is None) == (up.bias is None)
    known = {activation for kind, activation in GATES.items() if act is None or type(act) is kind}
    found = tried(module, gate.weight) if alike and known and gate.out_features % GATE_BLOCK == 0 else None
    if found is None:
        return None
    opened, partner = (linear(found[0], each.weight, each.bias) for each in (gate, up))
    for activation in known:
        if torch.equal(linear(_gate.gated(opened, partner, activation), down.weight, down.bias), found[1]):
            return SkinnyMLP(gate, up, down, activation)
    return None


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes the product an operator that `torch.compile` leaves alone. Counters are as before when it returns."""

    def product(
        given: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, counters: Tensor, gate: str
    ) -> Tensor:
        kind: Any = gate or None
        rows = given.reshape(-1, given.shape[-1])
        more = None if residual is None else residual.reshape(-1, residual.shape[-1])
        found = ops.skinny_linear(rows, weight, bias, gate=kind, residual=more, counters=counters)
        return found.view(*given.shape[:-1], found.shape[-1])

    def shaped(given: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return given.new_empty(*given.shape[:-1], weight.shape[0] // (2 if rest[-1] else 1))

    schema = "(Tensor given, Tensor weight, Tensor? bias, Tensor? residual, Tensor counters, str gate) -> Tensor"
    torch.library.custom_op(OPERATOR, product, mutates_args=(), schema=schema).register_fake(shaped)
