"""`ops.skinny_linear` on a GPU, in half precision, against float64: pytest -m gpu tests/ops/test_skinny_gpu.py."""

import random
from typing import Any

import pytest
import torch

from specdec import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two and four steps at 1: gates, their activation, the product and a sum with a residual are each rounded by half."""

SHAPES = ((6144, 4096), (2048, 5120), (2816, 4096), (576, 1536), (49_152, 576), (70, 100))
"""Of weights: no split, splits of four and three, few outputs, many, and sizes that are no multiples of anything."""


def problem(rows: int, outputs: int, inputs: int, dtype: torch.dtype, gate: str | None, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    bias = torch.randn(outputs, device="cuda", dtype=dtype) if seed % 2 else None
    return {
        "rows": torch.randn(rows, inputs + 3, device="cuda", dtype=dtype)[:, :inputs],
        "weight": (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).to(dtype),
        "bias": bias,
        "gate": gate,
    }


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int], dtype: torch.dtype, gate: str | None) -> None:
    """All numbers of rows up to the most; twice the same to the last bit, with counters that are left as zeros."""
    outputs, inputs = shape
    if gate:
        outputs = -(-outputs // 64) * 64
    counters = torch.zeros(-(-outputs // 64), dtype=torch.int32, device="cuda")
    for seed, rows in enumerate((1, 7, 16, 17, 33, 64, random.Random(0).randint(1, 64))):
        call = problem(rows, outputs, inputs, dtype, gate, seed)
        wide = {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in call.items()}
        expected = ops.skinny_linear(**wide, impl="reference")
        found = ops.skinny_linear(**call, counters=counters, impl="triton")
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(found, ops.skinny_linear(**call, counters=counters, impl="triton"))
        assert not counters.any()


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_product_is_rounded_before_the_residual_is_added(dtype: torch.dtype, gate: str | None) -> None:
    """As a model does; one instruction for the last product and the sum would not round in between."""
    call = problem(16, 2048, 1024, dtype, gate, 1)
    alone = ops.skinny_linear(**call, impl="triton")
    residual = torch.randn_like(alone)
    assert torch.equal(ops.skinny_linear(**call, residual=residual, impl="triton"), residual + alone)


def test_many_in_a_graph() -> None:
    """Products one after the other, each set up while the one before still runs, share nothing but their inputs."""
    rows = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    weights = [(torch.randn(2048, 2048, device="cuda") / 2048**0.5).bfloat16() for _ in range(20)]
    counters = [torch.zeros(32, dtype=torch.int32, device="cuda") for _ in weights]

    def run() -> torch.Tensor:
        found = rows
        for weight, counter in zip(weights, counters, strict=True):
            found = ops.skinny_linear(found, weight, counters=counter, impl="triton")
        return found

    stepped = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, stepped)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("width", [576, 2816, 4096, 5000])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms(dtype: torch.dtype, width: int, residual: bool) -> None:
    """Against the definition in float64, in which only the rounding differs."""
    torch.manual_seed(width)
    rows = 3 * torch.randn(64, width, device="cuda").to(dtype)
    more = torch.randn(64, width, device="cuda").to(dtype) if residual else None
    for scale in (torch.randn(width, device="cuda").to(dtype), torch.randn(width, device="cuda")):
        wide = None if more is None else more.double()
        expected = ops.rms_norm(rows.double(), scale.double(), 1e-6, residual=wide, impl="reference")
        found = ops.rms_norm(rows, scale, 1e-6, residual=more, impl="triton")
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        same = found == ops.rms_norm(rows, scale, 1e-6, residual=more, impl="reference")
        assert same.double().mean() > 0.999
        if more is not None:  # rounded before the sum, as a model does
            assert torch.equal(found, more + ops.rms_norm(rows, scale, 1e-6, impl="triton"))
