"""GPU benchmark of verify attention beside other libraries' kernels, as far as they are installed.

    python examples/benchmarks/attention_peers.py --fa3 _vllm_fa3_C.abi3.so

FlashInfer takes the tree as a packed mask over all slots, xformers as a bias over the drafted ones. FlashAttention 3
has no tree masks and is compared on chains; it is loaded from the library that vLLM's wheel carries. A peer that is not
there or does not serve a shape is named, with its reason, and has no figure. Whatever is timed is checked first.
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


def xformers(problem: Problem) -> tuple[Way, Way]:
    """Committed slots and drafted ones apart, and merged."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention

    rows, groups, context = problem.query.shape[2], problem.groups, int(problem.lengths[0])
    seen = problem.mask[0, 0, :, context:]
    bias = torch.zeros(rows, rows, device="cuda", dtype=problem.query.dtype).masked_fill(~seen, -torch.inf)
    before = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen=[rows], kv_seqlen=[context], kv_padding=context)
    query = problem.query.unflatten(1, (-1, groups)).permute(0, 3, 1, 2, 4).contiguous()

    def split(cached: Tensor) -> tuple[Tensor, Tensor]:
        wide = cached.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, groups, -1)
        return wide[:, :context], wide[:, context:]

    def run(turn: int) -> Tensor:
        (keys, new_keys), (values, new_values) = map(split, problem.caches[turn % len(problem.caches)])
        found = tree_attention(query, new_keys, new_values, keys, values, bias, before)
        return found.permute(0, 2, 3, 1, 4).flatten(1, 2)

    return run, problem.ours


def fa3(problem: Problem) -> tuple[Way, Way]:
    """A chain: the last rows of a causal mask."""
    query, scale = problem.query.transpose(1, 2).contiguous(), problem.query.shape[-1] ** -0.5

    def run(turn: int) -> Tensor:
        keys, values = (cached.transpose(1, 2) for cached in problem.caches[turn % len(problem.caches)])
        absent = [None] * 5
        found = torch.ops._vllm_fa3_C.fwd(
            *(query, keys, values, None, None, None, None, *absent, None, None, None, None, None, *absent),
            *(None, scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None),
        )
        return found[0].transpose(1, 2)

    def ours(turn: int) -> Tensor:
        keys, values = problem.caches[turn % len(problem.caches)]
        return ops.split_kv_attention(problem.query, keys, values, problem.lengths, impl="triton")

    return run, ours


PEERS: dict[str, Callable[[Problem], tuple[Way, Way]]] = {"flashinfer": flashinfer, "xformers": xformers, "fa3": fa3}
AGAINST = {
    "flashinfer": "FlashInfer's prefill with a packed mask",
    "xformers": "xformers' tree_attention",
    "fa3": "FlashAttention 3 on a chain",
}

if __name__ == "__main__":
    main()
