"""A compiled twin in half precision on a GPU, where kernels for few rows multiply, normalise and add.

pytest -m gpu tests/hf/test_merged_gpu.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.hf import fusion, norms, skinny
from specdec.hf.merged import merged_twin
from specdec.testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]
SIZES = {"hidden_size": 512, "intermediate_size": 704}
ALL_EXPERTS = {"gemma4_moe": {"top_k_experts": 4}, "qwen3_moe": {"num_experts_per_tok": 4}}
"""A near-tie between experts would change a row by more than rounding does."""
SUMS = {"llama": 2, "qwen2": 2, "gemma3": 2, "gemma4_moe": 3, "qwen3_moe": 1}
"""Families, and the sums of a layer that an operator of ours takes over: experts are another operator."""


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, 16), (torch.bfloat16, 64), (torch.bfloat16, 100), (torch.float16, 7)]
)
@pytest.mark.parametrize("family", SUMS)
def test_a_twin_is_as_near_to_float64_as_the_model(
    family: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to half precision elsewhere, logits may be off by as much as the model's own, and not by more."""
    joined: list[int] = []
    add = fusion.add_residuals
    monkeypatch.setattr(fusion, "add_residuals", lambda module: joined.append(add(module)))
    model: Any = tiny_model(family, dtype=dtype, **SIZES, **ALL_EXPERTS.get(family, {})).cuda()
    if family.endswith("moe"):
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # tiny models have weights for a width of 48
                weight.mul_(0.3)
            elif "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
    twin = merged_twin(model)[0]
    kinds = [type(module) for module in twin.modules()]
    layers = len(model.model.layers)
    assert kinds.count(skinny.SkinnyMLP) == (0 if family == "qwen3_moe" else layers)
    assert kinds.count(norms.SkinnyNorm) > 2 * layers
    ids = torch.randint(2, 60, (1, rows), device="cuda")

    def logits(forward: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = forward(input_ids=ids, use_cache=False).logits.double()
        return found

    torch._dynamo.reset()
    ours, own = logits(fusion.compiled(twin.forward)), logits(model)
    assert sum(joined) == (SUMS[family] * layers if rows <= 64 else 0)
    exact = logits(model.double())
    scale = exact.norm()
    # Both round as often, by as much, only elsewhere; half as much again is for chance.
    assert (own - exact).norm() / scale < 0.1, "rounding hides everything"
    assert (ours - exact).norm() < 1.5 * (own - exact).norm()
