"""GPU benchmark of the experts of a verify pass, beside transformers' grouped and batched products and a single read.

    python examples/benchmarks/routed_experts.py

The shape is that of Gemma-4-26B-A4B: 128 experts of 2816 x 704, 8 of them for each row, in BF16. Eight layers take
turns, so that no weights are found in L2. Rows of a round resemble each other, so half of what decides between experts
is common to all rows. The op is compared with its reference before it is timed.
"""

from typing import Any

import report
import torch
from gpu_rounds import GEMMA4_26B, bandwidth
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from verify_attention import seconds

from specdec import ops

LAYERS = 8
ROWS = (7, 16, 56, 128)
MOST_COPIED = 16
"""Rows up to which batched products run: they copy the weights of all experts of all rows."""


def main() -> None:
    """Measures all numbers of rows and writes the report."""
    torch.manual_seed(0)
    speed = bandwidth()
    figures = {"read_bandwidth": report.figure(speed / 1e12, "TB/s", "adding up 4 GB")}
    layers = Layers()
    for rows in ROWS:
        layers.route(rows)
        layers.check()
        taken = seconds(layers.ours, turns=2 * LAYERS)
        touched = layers.touched()
        label = f"rows{rows}"
        print(f"{label}: {1e6 * taken:.1f} us, {touched:.1f} experts touched", flush=True)
        figures |= {
            f"{label}.us": report.figure(1e6 * taken, "us", "experts of one layer, in a graph"),
            f"{label}.touched": report.figure(touched, "experts", "128, mean over layers"),
            f"{label}.bandwidth": report.figure(
                touched * layers.expert_bytes / taken / speed, "of read_bandwidth", "weights of the experts touched"
            ),
        }
        theirs = {
            "grouped_mm": (layers.grouped_mm, "transformers' experts_implementation='grouped_mm'"),
            "grouped_products": (layers.grouped_products, "its two products alone, rows sorted beforehand"),
            "batched_mm": (layers.batched_mm, "transformers' experts_implementation='batched_mm'"),
        }
        for name, (run, against) in theirs.items():
            if name != "batched_mm" or rows <= MOST_COPIED:
                other = seconds(run, turns=LAYERS)
                figures[f"vs_{name}.{label}"] = report.figure(other / taken, "times", against)
                print(f"  {name}: {1e6 * other:.1f} us", flush=True)
    report.write("routed-experts", figures, device=torch.cuda.get_device_name())


class Layers:
    """Random experts of several layers, rows that are routed to them, and the ways to run one layer."""

    def __init__(self) -> None:
        self.config = Gemma4TextConfig(**GEMMA4_26B)
        self.layers = [self._layer() for _ in range(LAYERS)]
        gate_up, down = self.layers[0].gate_up_proj, self.layers[0].down_proj
        self.expert_bytes = 2 * (gate_up[0].numel() + down[0].numel())

    def _layer(self) -> Any:
        with torch.device("meta"):
            layer = Gemma4TextExperts(self.config)
        for name, weight in list(layer.named_parameters()):
            content = torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda").normal_(
                std=weight.shape[-1] ** -0.5
            )
            setattr(layer, name, nn.Parameter(content, requires_grad=False))
        return layer

    def route(self, rows: int) -> None:
        """Other rows, and other experts for them."""
        experts, choices = self.config.num_experts, self.config.top_k_experts
        self.rows = torch.randn(LAYERS, rows, self.config.hidden_size, device="cuda", dtype=torch.bfloat16)
        scores = torch.randn(LAYERS, rows, experts, device="cuda") + torch.randn(LAYERS, 1, experts, device="cuda")
        weights, self.chosen = scores.softmax(-1).topk(choices, -1)
        self.weights = weights / weights.sum(-1, keepdim=True)
        ids, order = self.chosen.flatten(1).sort(-1)
        self.sorted = [rows[places // choices] for rows, places in zip(self.rows, order, strict=True)]
        self.ends = [(each[:, None] <= torch.arange(experts, device="cuda")).sum(0).int() for each in ids]

    def touched(self) -> float:
        """Experts that some row is routed to, mean over layers."""
        return sum(each.unique().numel() for each in self.chosen) / LAYERS

    def ours(self, turn: int, impl: ops.Impl = "triton") -> Tensor:
        """The op."""
        place = turn % LAYERS
        layer = self.layers[place]
        return ops.routed_experts(
            self.rows[place],
            self.chosen[place],
            self.weights[place],
            layer.gate_up_proj,
            layer.down_proj,
            activation="gelu_tanh",
            impl=impl,
        )

    def grouped_mm(self, turn: int) -> Tensor:
        """What transformers runs."""
        return self._theirs(turn, "grouped_mm")

    def batched_mm(self, turn: int) -> Tensor:
        """What transformers runs where weights may be copied."""
        return self._theirs(turn, "batched_mm")

    def _theirs(self, turn: int, implementation: str) -> Tensor:
        place = turn % LAYERS
        self.config._experts_implementation = implementation
        found: Tensor = self.layers[place](self.rows[place], self.chosen[place], self.weights[place])
        return found

    def grouped_products(self, turn: int) -> Tensor:
        """The two products of it, without what sorts and gathers around them."""
        place = turn % LAYERS
        layer, ends = self.layers[place], self.ends[place]
        both = nn.functional.grouped_mm(self.sorted[place], layer.gate_up_proj.transpose(1, 2), offs=ends)
        return nn.functional.grouped_mm(both[:, : both.shape[1] // 2], layer.down_proj.transpose(1, 2), offs=ends)

    def check(self) -> None:
        """The kernel gives what the reference gives, and what transformers does."""
        found, expected = self.ours(0), self.ours(0, "reference")
        for other in (expected, self.grouped_mm(0)):
            torch.testing.assert_close(found, other, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


if __name__ == "__main__":
    main()
