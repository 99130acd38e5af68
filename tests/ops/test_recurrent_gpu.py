"""The recurrent ops on a GPU against walks in float64: random trees, dtypes, layouts, states at rest.

pytest -m gpu tests/ops/test_recurrent_gpu.py
"""

import random
from typing import Any

import pytest
import torch

from specdec import ops
from tests.ops.hybrid_problems import DeltaProblem
from tests.ops.test_causal_conv_tree import law as conv_law

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error relative to the largest number: products of three TF32, and outputs of 11 and 8 bits."""


def drawn(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "seed": seed,
        "sizes": [rng.choice([1, 2, 7, 16, 17, 33, 64]) for _ in range(rng.choice([1, 2, 5]))],
        "style": rng.choice(["any", "deep", "chain", "star"]),
        "heads": rng.choice([(1, 1), (2, 6), (4, 4), (1, 3)]),
        "dims": rng.choice([(128, 128), (64, 128), (16, 32), (20, 40), (96, 192), (256, 64)]),
        "hard": rng.random() < 0.4,
        "value_first": rng.random() < 0.5,
        "normalize": rng.random() < 0.8,
        "dtype": rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        "state_dtype": torch.float32,
    }


def on_gpu(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert bool(found.isfinite().all())
    worst = float((found.double().cpu() - expected).abs().max())
    assert worst <= tolerance * max(1.0, float(expected.abs().max())), f"off by {worst}"


@pytest.mark.parametrize("seed", range(48))
def test_the_kernel_is_the_walk(seed: int) -> None:
    problem = DeltaProblem(**drawn(seed))
    tolerance = ROUNDING[problem.dtype]
    call = on_gpu(problem.call)
    state = call["state"].clone()
    output, record = ops.gated_delta_tree(**call, impl="triton")
    for row, expected in enumerate(problem.outputs()):
        near(output[row, : len(expected)], expected, tolerance)
    nodes, counts, chosen = problem.some_path()
    path = {"path": record.along(nodes.cuda()), "counts": counts.cuda()}
    layout = {"value_first": call["value_first"]}
    ops.gated_delta_fold(state, **path, **layout, impl="triton")
    near(state, problem.states(chosen), 2e-5)
    assert torch.equal(state[counts == 0], call["state"][counts == 0])
    # Folding in front of a tree is the same program, and the next tree reads what was stored.
    folding = {**call, "state": call["state"].clone()}
    together = ops.gated_delta_tree(**folding, **path, impl="triton")
    apart = ops.gated_delta_tree(**{**call, "state": state}, impl="triton")
    assert torch.equal(folding["state"], state)
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1].updates, apart[1].updates)


@pytest.mark.parametrize("seed", range(24))
def test_the_convolution_is_the_walk(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])

    with GpuConv():
        conv_law(
            lambda call: call,
            "triton",
            {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype],
            seed,
            [rng.choice([1, 3, 16, 33, 70]) for _ in range(rng.choice([1, 3]))],
            rng.choice(["any", "deep", "chain", "star"]),
            rng.choice([5, 128, 1000]),
            rng.choice([2, 4]),
            rng.choice([0, 1]),
            rng.choice([None, 0, 1, 5, 16]),
            rng.random() < 0.5,
            "silu",
            dtype,
        )


class GpuConv:
    """While it is entered, the convolution runs on the GPU, and what it changes comes back."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        own = ops.causal_conv_tree

        def run(**call: Any) -> torch.Tensor:
            there = on_gpu(call)
            found = own(**there).cpu()
            call["history"].copy_(there["history"])
            call["out"].copy_(there["out"])
            return found

        self._patch.setattr(ops, "causal_conv_tree", run)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
def test_a_state_of_half_precision_is_read_as_it_is_stored(state_dtype: torch.dtype) -> None:
    problem = DeltaProblem(**{**drawn(3), "dtype": torch.bfloat16, "state_dtype": state_dtype})
    call = on_gpu(problem.call)
    state = call["state"].clone()
    _, record = ops.gated_delta_tree(**call, impl="triton")
    nodes, counts, chosen = problem.some_path()
    path = {"path": record.along(nodes.cuda()), "counts": counts.cuda()}
    ops.gated_delta_fold(state, **path, value_first=call["value_first"], impl="triton")
    near(state, problem.states(chosen), 2e-2)
    folding = {**call, "state": call["state"].clone()}
    together = ops.gated_delta_tree(**folding, **path, impl="triton")
    apart = ops.gated_delta_tree(**{**call, "state": state}, impl="triton")
    assert torch.equal(together[0], apart[0])
