"""What gated projections have in common: the activation of a gate, and where gates and their partners stand."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

from specdec.errors import UnsupportedError

GateActivation: TypeAlias = Literal["silu", "gelu_tanh"]
"""What is applied to a gate: SiLU, or GELU in its form with a hyperbolic tangent."""


def known(name: str, argument: str, activation: str) -> None:
    """Raises for an activation that nobody knows, in the name of an op and of its argument."""
    if activation not in get_args(GateActivation):
        raise UnsupportedError(
            f"{name}: {argument} must be one of {', '.join(get_args(GateActivation))}, got {activation!r}."
        )


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of the gate times its partner, each rounded to the dtype of the gate, as models do."""
    opened = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return opened * up


def interleaved(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """Rows of two matrices in turns, `block` of the first and `block` of the second."""
    return torch.stack([gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))], 1).flatten(0, 2)
