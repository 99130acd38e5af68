"""Routed experts on a GPU: the compiled kernel against the definition, in graphs, and far into the weights.

pytest -m gpu tests/ops/test_experts_gpu.py
"""

import random
from typing import Any

import pytest
import torch

from specdec import ops
from specdec.ops.routed_experts import ExpertCall
from tests.ops.expert_problems import by_definition, experts_call, near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error relative to the largest number."""


def drawn(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "seed": seed,
        "tokens": rng.choice([1, 2, 7, 16, 17, 56, 130]),
        "choices": rng.choice([1, 2, 6, 8]),
        "experts": rng.choice([1, 8, 60, 128, 512]),
        "sizes": rng.choice([(64, 32), (128, 176), (96, 704), (2816, 64), (33, 17), (256, 100)]),
        "style": rng.choice(["any", "any", "one", "outside"]),
        "activation": rng.choice(["silu", "gelu_tanh"]),
        "dtype": rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.bfloat16]),
        "device": "cuda",
    }


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_is_the_definition(seed: int) -> None:
    inputs = drawn(seed)
    call = experts_call(**inputs)
    found = ops.routed_experts(**call, impl="triton")
    near(found, by_definition(call), ROUNDING[inputs["dtype"]])
    assert torch.equal(found, ops.routed_experts(**call, impl="triton"))


def test_other_plans() -> None:
    kernel = pytest.importorskip("specdec_kernels.routed_experts")
    for tokens in (7, 40):
        call = experts_call(3, tokens, 4, 16, (200, 104), "outside", "gelu_tanh", torch.bfloat16, "cuda")
        for columns, step in ((16, 64), (64, 128)):
            plan = kernel.Plan(columns, step, 4, 4)
            near(kernel.launch(ExpertCall(**call), plan, plan), by_definition(call), ROUNDING[torch.bfloat16])


def test_offsets_beyond_two_to_the_thirty_first() -> None:
    """The last expert of weights that are larger than an int32 can index."""
    width, inner = 2048, 2048
    experts = 2**31 // (2 * inner * width) + 2
    shapes = (experts, 2 * inner, width), (experts, width, inner)
    gate_up, down = (torch.zeros(shape, device="cuda", dtype=torch.float16) for shape in shapes)
    few = experts_call(0, 5, 2, 2, (width, inner), "differ", "silu", torch.float16, "cuda")
    gate_up[-2:], down[-2:] = few["gate_up"], few["down"]
    far = {**few, "gate_up": gate_up, "down": down, "chosen": few["chosen"] + experts - 2}
    assert torch.equal(ops.routed_experts(**far, impl="triton"), ops.routed_experts(**few, impl="triton"))
    near(ops.routed_experts(**few, impl="triton"), by_definition(few), ROUNDING[torch.float16])


def test_a_captured_graph_follows_the_routing() -> None:
    """Several layers, one after the other: each launch waits for what it reads, and buffers are used again."""
    calls = [
        experts_call(seed, 7, 8, 64, (256, 128), "any", "silu", torch.bfloat16, "cuda") for seed in range(6)
    ]  # fmt: skip

    def step() -> torch.Tensor:
        rows = calls[0]["hidden"]
        for call in calls:
            rows = rows + ops.routed_experts(**{**call, "hidden": rows}, impl="triton")
        return rows

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(5):
        for call in calls:
            call["chosen"].copy_(torch.randint(-2, 66, call["chosen"].shape, device="cuda"))
        for _ in range(20):
            graph.replay()
        assert torch.equal(found, step())
