"""A decoder layer's MLP and a mixture of experts for a handful of rows, by ops that read each weight once.

    python examples/few_rows.py --rows 16

On a GPU the ops are timed beside the same layers in plain torch. `SpeculativeGenerator.compile()` puts them in place of
a model's own layers; here they are called by hand.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdec import ops

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 5632, 16, 2


def main() -> None:
    """Compares both ways, and times them where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="narrow layers")
    arguments = parser.parse_args()
    hidden, inner = (64, 96) if arguments.tiny else (HIDDEN, INNER)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(device, dtype)

    rows, scale = torch.randn(arguments.rows, hidden).to(device, dtype), torch.rand(hidden).to(device, dtype)
    gate, up, down = weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)
    both = ops.interleave_gate(gate, up)  # once, when the model is loaded

    def mlp(rows: Tensor) -> Tensor:
        normed = ops.rms_norm(rows, scale, 1e-6)
        return ops.skinny_linear(ops.skinny_linear(normed, both, gate="silu"), down, residual=rows)

    def plain(rows: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(rows, scale.shape, scale, 1e-6)
        return rows + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    compare("gated MLP", mlp, plain, rows)

    gate_up, last = weight(EXPERTS, 2 * inner, hidden), weight(EXPERTS, hidden, inner)
    chances, chosen = torch.randn(arguments.rows, EXPERTS).softmax(-1).to(device, dtype).topk(CHOSEN)
    touched = chosen.unique().numel()
    print(f"{arguments.rows} rows touch {touched} of {EXPERTS} experts")

    def mixture(rows: Tensor) -> Tensor:
        return ops.routed_experts(rows, chosen, chances, gate_up, last, activation="silu")

    def one_by_one(rows: Tensor) -> Tensor:
        found = torch.zeros_like(rows)
        for row, experts in enumerate(chosen.tolist()):
            for chance, expert in zip(chances[row], experts, strict=True):
                opened, partner = (gate_up[expert] @ rows[row]).chunk(2)
                found[row] += chance * (last[expert] @ (silu(opened) * partner))
        return found

    compare("experts", mixture, one_by_one, rows)
    can, reason = ops.available("skinny_linear", device)
    print("kernels for few rows are used" if can else f"the reference is used: {reason}")


def compare(name: str, ours: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Prints how far two ways are apart and, on a GPU, how long each takes."""
    difference = float((ours(rows) - plain(rows)).abs().max())
    print(f"{name}: largest difference to plain torch {difference:.1e}")
    if rows.is_cuda:
        print(f"{name}: {1e6 * seconds(ours, rows):.0f} us, plain torch {1e6 * seconds(plain, rows):.0f} us")
    if difference > (0.2 if rows.is_cuda else 1e-4):  # half precision there
        raise SystemExit("The two differ: please report this.")


def seconds(run: Callable[[Tensor], Tensor], rows: Tensor, turns: int = 20) -> float:
    """Mean time of a call."""
    run(rows)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(turns):
        run(rows)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / turns


if __name__ == "__main__":
    main()
