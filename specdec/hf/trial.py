"""What a module gives for random rows: modules of a twin are recognised by what they compute, not by their names."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def tried(module: nn.Module, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Some random rows that fit a weight `[..., width]`, and what a module makes of them; None if it takes no rows."""
    source = torch.Generator(weight.device).manual_seed(0)
    given = torch.randn(8, weight.shape[-1], dtype=weight.dtype, device=weight.device, generator=source)
    try:
        found = module(given)
    except Exception:  # it asks for other arguments or shapes, and may find that out anywhere
        return None
    return (given, found) if isinstance(found, Tensor) else None
