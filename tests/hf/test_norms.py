"""Norms of a twin: recognised by what they compute, in every form that families use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.hf import norms
from specdec.testing import tiny_model

FAMILIES = {"llama": False, "qwen3": False, "gemma3": True, "gemma4": True, "gpt_oss": True, "qwen3_next": True}
"""Families, and whether their scale is a float32 one."""


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "serves", lambda weight: weight.dim() == 1)


def norm_of(family: str) -> Any:
    """A norm with a scale of its own in bfloat16, for which all forms differ."""
    module: Any = tiny_model(family, dtype=torch.bfloat16).model.norm
    torch.manual_seed(0)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape) + 1)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_a_norm_is_recognised(family: str) -> None:
    module = norm_of(family)
    found = norms.replaced(module)
    assert found is not None
    assert (found.scale.dtype == torch.float32) == FAMILIES[family]
    torch.manual_seed(1)
    for rows in (3, 100):  # the second are more than the kernel takes
        given = 5 * torch.randn(2, rows, module.weight.shape[0]).bfloat16()
        assert (found(given) == module(given)).double().mean() > 0.999


def test_another_module_is_none() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-6

        def forward(self, given: Tensor) -> Tensor:
            centred = given - given.mean(-1, keepdim=True)
            return self.weight * centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)

    class Asking(Shifted):
        def forward(self, given: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]  # as it is meant
            return super().forward(given) * gate

    for module in (Shifted(), Asking(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Embedding(8, 8)):
        assert norms.replaced(module) is None
    without = norm_of("llama")
    del without.variance_epsilon
    assert norms.replaced(without) is None


def test_narrow_norms_and_other_dtypes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not norms.serves(torch.ones(4096))
    assert not norms.serves(torch.ones(4096, dtype=torch.bfloat16))  # on a CPU
    assert not norms.serves(torch.ones(128, dtype=torch.bfloat16, device="meta"))
