"""Layers that the drafters of several families share. Names of modules are those of published checkpoints."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm, in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        """A norm of rows of `size` numbers."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, rows: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        """The rows at a mean square of 1, times the weight."""
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(rows.dtype)


class MLP(nn.Module):
    """Gated MLP with SiLU, without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        """Random weights."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, rows: Float[Tensor, "*lead hidden"]) -> Float[Tensor, "*lead hidden"]:
        """`down(silu(gate) * up)`."""
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output
