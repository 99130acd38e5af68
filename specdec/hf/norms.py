"""Normalisation of a compiled twin, as `ops.rms_norm` computes it.

A norm is recognised by what it computes: its own forward is run once on random rows, and so is the op, in the forms
that models use.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from specdec import ops
from specdec.hf.trial import tried
from specdec.ops.rms_norm import norm
from specdec.ops.skinny_linear import MOST_ROWS

OPERATOR = "specdec::rms_norm"

NARROWEST = 512
"""Numbers of a row from which on a norm is one of whole states; those of heads are better fused with what follows."""

EPSILONS = ("variance_epsilon", "eps")
"""Names under which norms keep what they add to the mean square."""


class SkinnyNorm(nn.Module):
    """A norm of few rows.

    Args:
        scale: as `ops.rms_norm` takes it.
        eps: what is added to the mean square.
    """

    def __init__(self, scale: Tensor, eps: float) -> None:
        """Runs nothing."""
        super().__init__()
        self.scale, self.eps = scale, eps
        register_operator()

    def forward(self, given: Tensor) -> Tensor:
        """As the norm."""
        if given.shape[:-1].numel() > MOST_ROWS:
            return norm(given, self.scale, self.eps, None)
        found: Tensor = torch.ops.specdec.rms_norm(given, self.scale, None, self.eps)
        return found


def replaced(module: nn.Module) -> SkinnyNorm | None:
    """What stands in a twin for a norm; None if the module is something else, or its kernel does not run there."""
    weights = dict(module.named_parameters())
    weight = weights.get("weight")
    eps = next((getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if set(weights) != {"weight"} or module._buffers or weight is None or eps is None or not serves(weight):
        return None
    trial = tried(module, weight)
    if trial is None:
        return None
    given, expected = trial
    wide = weight.detach().float()
    scales = (weight.detach(), wide, 1.0 + wide)
    return next((SkinnyNorm(scale, eps) for scale in scales if _same(ops.rms_norm(given, scale, eps), expected)), None)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are one. Ways to write a root differ in its last bit, so rarely in what is rounded."""
    alike = expected.shape == found.shape and expected.dtype == found.dtype
    same = alike and bool((found == expected).double().mean() > 0.999)
    return same and torch.allclose(found, expected, rtol=2.0**-7)


def serves(weight: Tensor) -> bool:
    """Whether the kernel normalises where a weight is."""
    half = weight.dtype in (torch.float16, torch.bfloat16) and weight.dim() == 1 and weight.shape[0] >= NARROWEST
    return half and weight.is_cuda and ops.available("rms_norm", weight.device)[0]


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes the norm an operator that `torch.compile` leaves alone."""

    def normalised(given: Tensor, scale: Tensor, residual: Tensor | None, eps: float) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        more = None if residual is None else residual.reshape(rows.shape)
        return ops.rms_norm(rows, scale, eps, residual=more).view(given.shape)

    def shaped(given: Tensor, *rest: object) -> Tensor:  # noqa: ARG001 - the operator's
        return given.new_empty(given.shape)

    schema = "(Tensor given, Tensor scale, Tensor? residual, float eps) -> Tensor"
    torch.library.custom_op(OPERATOR, normalised, mutates_args=(), schema=schema).register_fake(shaped)
