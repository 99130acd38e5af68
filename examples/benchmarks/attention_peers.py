"""GPU benchmark of verify attention beside other libraries' kernels, as far as they are installed.

    python examples/benchmarks/attention_peers.py --fa3 _vllm_fa3_C.abi3.so

FlashInfer takes the tree as a packed mask over all slots. FlashAttention 3 has no tree masks and is compared on chains;
it is loaded from the library that vLLM's wheel carries. A peer that is not there or does not serve a shape is named,
with its reason, and has no figure. Whatever is timed is checked first.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor
from verify_attention import CONTEXTS, SHAPES, Problem, seconds

from specdec import ops

Way = Callable[[int], Tensor]


def main() -> None:
    """Times each peer and ours on every shape, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--fa3", type=Path, help="vLLM's library of FlashAttention 3")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.fa3:
        torch.ops.load_library(str(arguments.fa3))
    figures: dict[str, Any] = {}
    for context in CONTEXTS:
        for name, shape in SHAPES.items():
            problem = Problem(*shape, arguments.rows, context)
            label = f"l{context}.rows{arguments.rows}.{name}"
            for peer, make in PEERS.items():
                try:
                    theirs, ours = make(problem)
                    torch.testing.assert_close(theirs(0).flatten(), ours(0).flatten(), rtol=2e-2, atol=2e-3)
                    ratio = seconds(theirs) / seconds(ours)
                except Exception as error:
                    print(f"{peer:12}{label:26}{type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
                    continue
                figures[f"vs_{peer}.{label}"] = report.figure(ratio, "times", AGAINST[peer])
                print(f"{peer:12}{label:26}{ratio:.2f}", flush=True)
    report.write("attention-peers", figures, device=torch.cuda.get_device_name())


def flashinfer(problem: Problem) -> tuple[Way, Way]:
    """A prefill with a mask over all slots, packed beforehand."""
    from flashinfer import single_prefill_with_kv_cache

    bits = 1 << torch.arange(8, device="cuda")
    mask = (problem.mask[0, 0].unflatten(-1, (-1, 8)) * bits).sum(-1).to(torch.uint8).flatten()
    query = problem.query[0].transpose(0, 1).contiguous()

    def run(turn: int) -> Tensor:
        keys, values = problem.caches[turn % len(problem.caches)]
        found = single_prefill_with_kv_cache(query, keys[0], values[0], packed_custom_mask=mask, kv_layout="HND")
        return found.transpose(0, 1)

    return run, problem.ours


def fa3(problem: Problem) -> tuple[Way, Way]:
    """A chain: the last rows of a causal mask."""
    query, scale = problem.query[0].transpose(0, 1).contiguous(), problem.query.shape[-1] ** -0.5
    rows, slots = query.shape[0], problem.caches[0][0].shape[2]
    query_ends, key_ends = (torch.tensor([0, end], dtype=torch.int32, device="cuda") for end in (rows, slots))

    def run(turn: int) -> Tensor:
        keys, values = (cached[0].transpose(0, 1) for cached in problem.caches[turn % len(problem.caches)])
        absent = [None] * 5
        found = torch.ops._vllm_fa3_C.fwd(
            *(query, keys, values, None, None, None, None, query_ends, key_ends, None, None, None, rows, slots),
            *(*absent, None, None, None, None),
            *(scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None),
        )
        return found[0].transpose(0, 1)

    def ours(turn: int) -> Tensor:
        keys, values = problem.caches[turn % len(problem.caches)]
        return ops.split_kv_attention(problem.query, keys, values, problem.lengths, impl="triton")

    return run, ours


PEERS: dict[str, Callable[[Problem], tuple[Way, Way]]] = {"flashinfer": flashinfer, "fa3": fa3}
AGAINST = {
    "flashinfer": "FlashInfer's prefill with a packed mask",
    "fa3": "FlashAttention 3 on a chain",
}

if __name__ == "__main__":
    main()
