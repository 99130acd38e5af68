"""Random rows, routed to random experts, and their definition: row by row, expert by expert, in float64."""

import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "tokens": st.one_of(st.integers(1, 9), st.integers(1, 70)),
    "choices": st.integers(1, 5),
    "experts": st.sampled_from([1, 2, 5, 40]),
    "sizes": st.sampled_from([(1, 1), (8, 8), (5, 7), (40, 33), (64, 16)]),
    "style": st.sampled_from(["any", "differ", "one", "outside"]),
    "activation": st.sampled_from(["silu", "gelu_tanh"]),
}


def experts_call(
    seed: int,
    tokens: int,
    choices: int,
    experts: int,
    sizes: tuple[int, int],
    style: str,
    activation: str,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of the op.

    Sizes are those of a row, and of an expert's gate. In the style `any` an expert may be named twice for a row; in
    `differ` it is not; in `one` all rows have the same experts; `outside` names experts that do not exist.
    """
    draw, rng = torch.Generator(device).manual_seed(seed), random.Random(seed)
    (width, inner), choices = sizes, min(choices, experts) if style == "differ" else choices

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32, device=device).to(dtype)

    low, high = (-2, experts + 2) if style == "outside" else (0, experts)
    rows = [
        rng.sample(range(experts), choices) if style == "differ" else [rng.randrange(low, high) for _ in range(choices)]
        for _ in range(tokens)
    ]
    chosen = torch.tensor([rows[0]] * tokens if style == "one" else rows, device=device)
    return {
        "hidden": normal(tokens, width),
        "chosen": chosen,
        "weights": torch.rand(tokens, choices, generator=draw, dtype=torch.float32, device=device) + 0.1,
        "gate_up": normal(experts, 2 * inner, width) / width**0.5,
        "down": normal(experts, width, inner) / inner**0.5,
        "activation": activation,
    }


def by_definition(call: dict[str, Any]) -> Tensor:
    """What the op promises, in float64, without rounding anything in between."""
    apply = functional.silu if call["activation"] == "silu" else lambda gate: functional.gelu(gate, approximate="tanh")
    rows, weights, gate_up, down = (call[name].double() for name in ("hidden", "weights", "gate_up", "down"))
    output = torch.zeros_like(rows)
    for row, chosen in enumerate(call["chosen"].tolist()):
        for choice, expert in enumerate(chosen):
            if 0 <= expert < len(down):
                gate, up = (gate_up[expert] @ rows[row]).chunk(2)
                output[row] += weights[row, choice] * (down[expert] @ (apply(gate) * up))
    return output


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Up to the tolerance, relative to the largest number that is expected."""
    assert bool(found.isfinite().all())
    worst = float((found.double() - expected).abs().max())
    assert worst <= tolerance * max(1e-3, float(expected.abs().max())), f"off by {worst}"
