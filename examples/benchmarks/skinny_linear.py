"""GPU benchmark of products with few rows, beside cuBLAS and a single read of the weights.

    python examples/benchmarks/skinny_linear.py

Shapes are those of Llama-8B, of a drafter for a 27B target, of Gemma-4-26B-A4B and of SmolLM2-135M, in BF16. Matrices
take turns, so that none is found in L2, in one captured graph. A gated product stands beside cuBLAS's product of both
projections and one kernel, made by `torch.compile`, that opens the gates. Both are compared with float64 before they
are timed.
"""

from typing import Any

import report
import torch
from torch import Tensor
from torch.nn import functional
from verify_attention import L2_BYTES, bandwidth, seconds

from specdec import ops

SHAPES: dict[str, tuple[int, int, bool]] = {
    "llama_8b.qkv": (6144, 4096, False),
    "llama_8b.o": (4096, 4096, False),
    "llama_8b.gate_up": (28_672, 4096, True),
    "llama_8b.down": (4096, 14_336, False),
    "llama_8b.head": (128_256, 4096, False),
    "drafter_27b.kv": (2048, 5120, False),
    "drafter_27b.o": (5120, 4096, False),
    "gemma4_26b.qkv": (8192, 2816, False),
    "gemma4_26b.o": (2816, 4096, False),
    "smollm2.o": (576, 576, False),
    "smollm2.gate_up": (3072, 576, True),
    "smollm2.down": (576, 1536, False),
}
"""Outputs, inputs, and whether the outputs are gates and their partners."""

ROWS = {16: SHAPES, 64: {name: shape for name, shape in SHAPES.items() if name.startswith("llama")}}
TURNS = 20
"""Products in a graph, at least."""


def main() -> None:
    """Measures all shapes and writes the report."""
    torch.manual_seed(0)
    speed = bandwidth()
    figures = {"read_bandwidth": report.figure(speed / 1e12, "TB/s", "a sum over 4 GB")}
    for rows, shapes in ROWS.items():
        for name, shape in shapes.items():
            product = Product(rows, *shape)
            product.check()
            turns = max(TURNS, product.count)
            ours, theirs = (seconds(run, turns=turns) for run in (product.ours, product.theirs))
            label, against = f"rows{rows}.{name}", "cuBLAS, and a compiled gate" if shape[2] else "cuBLAS"
            share = product.bytes / speed
            figures |= {
                f"{label}.us": report.figure(1e6 * ours, "us", "one product, in a graph"),
                f"{label}.bandwidth": report.figure(share / ours, "of read_bandwidth", "the weights, read once"),
                f"{label}.cublas.us": report.figure(1e6 * theirs, "us", against),
                f"{label}.cublas.bandwidth": report.figure(share / theirs, "of read_bandwidth", against),
                f"vs_cublas.{label}": report.figure(theirs / ours, "times", against),
            }
            print(f"{label}: {1e6 * ours:.2f} us, {share / ours:.2f}; {against}: {1e6 * theirs:.2f} us", flush=True)
            save(figures)
            del product
    save(figures, quiet=False)


def save(figures: dict[str, Any], *, quiet: bool = True) -> None:
    """Writes what there is so far: a run that is cut off still counts."""
    report.write("skinny-linear", figures, device=torch.cuda.get_device_name(), quiet=quiet)


class Product:
    """Random rows, as many matrices as leave L2, and the ways to multiply."""

    def __init__(self, rows: int, outputs: int, inputs: int, gated: bool) -> None:
        self.gate: ops.GateActivation | None = "silu" if gated else None
        self.bytes = 2 * outputs * inputs
        self.count = max(2, int(L2_BYTES / self.bytes) + 1)
        self.rows = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        shape = outputs, inputs
        self.weights = [
            torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=inputs**-0.5) for _ in range(self.count)
        ]
        self.interleaved = [ops.interleave_gate(*each.chunk(2)) if gated else each for each in self.weights]
        self.counters = torch.zeros(self.count, -(-outputs // 64), device="cuda", dtype=torch.int32)

    def ours(self, turn: int) -> Tensor:
        """The op."""
        place = turn % self.count
        return ops.skinny_linear(
            self.rows, self.interleaved[place], gate=self.gate, counters=self.counters[place], impl="triton"
        )

    def theirs(self, turn: int) -> Tensor:
        """Torch's product, and a kernel for the gates if there are any."""
        found = functional.linear(self.rows, self.weights[turn % self.count])
        return opened(found) if self.gate else found

    def check(self) -> None:
        """Both give what float64 gives."""
        expected = ops.skinny_linear(self.rows.double(), self.interleaved[0].double(), gate=self.gate, impl="reference")
        for run in (self.ours, self.theirs):
            torch.testing.assert_close(run(0).double(), expected, rtol=1.6e-2, atol=1.6e-2)


@torch.compile(dynamic=False)
def opened(both: Tensor) -> Tensor:
    """Gates in the first half of the outputs, their partners in the second."""
    gate, up = both.chunk(2, 1)
    return functional.silu(gate) * up


if __name__ == "__main__":
    main()
