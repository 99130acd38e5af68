"""GPU benchmark of verify attention: share of the measured read bandwidth, beside masked attention and no splits.

    python examples/benchmarks/verify_attention.py

Every shape is checked against the float64 reference before it is timed. Caches are rotated so that none is found in
L2. The limit is the streaming read bandwidth measured in the same run.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import report
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from specdec import kv, ops
from specdec.protocols import KVCodec
from specdec.trees import topology

CODECS: dict[str, tuple[KVCodec, KVCodec]] = {
    "int8": (kv.Int8(), kv.Int8()),
    "int8_int4": (kv.Int8(), kv.Int4()),
    "int4": (kv.Int4(), kv.Int4()),
    "nvfp4": (kv.NVFP4(), kv.NVFP4()),
}
"""Of keys and values."""

SHAPES = {"h8g4d128": (8, 4, 128), "h4g6d256": (4, 6, 256), "h2g8d256": (2, 8, 256), "h2g8d512": (2, 8, 512)}
CONTEXTS = (32_768, 8_192)
L2_BYTES = 300e6


def main() -> None:
    """Times every shape at both contexts, then the article's shape without splits, then codes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    limit = bandwidth()
    figures = {"read_bandwidth": report.figure(limit / 1e12, "TB/s", "a sum over 4 GB")}
    for context, (name, shape) in itertools.product(CONTEXTS, SHAPES.items()):
        problem = Problem(*shape, arguments.rows, context)
        check(problem)
        label = f"l{context}.rows{arguments.rows}.{name}"
        ours = seconds(problem.ours)
        figures[f"share.{label}"] = report.figure(problem.bytes / ours / limit, "share", "the read bandwidth")
        figures[f"microseconds.{label}"] = report.figure(1e6 * ours, "us", "one launch and its sum")
        figures[f"vs_sdpa.{label}"] = report.figure(seconds(problem.sdpa) / ours, "times", "SDPA with a mask")
        portable = seconds(problem.portable) / ours
        figures[f"vs_portable.{label}"] = report.figure(portable, "times", "the kernel of all devices")
        save(figures)
        print(label, f"{figures[f'share.{label}']['value']:.2f}", f"{1e6 * ours:.1f} us", flush=True)
    for batch in (1, 4):
        problem = Problem(2, 8, 512, 7, 32_768, batch=batch)
        ratio = seconds(problem.unsplit) / seconds(problem.ours)
        figures[f"vs_unsplit.gemma4_full.b{batch}"] = report.figure(ratio, "times", "the same without splits")
        save(figures)
    problem = Problem(8, 4, 128, arguments.rows, 32_768)
    plain = seconds(problem.ours)
    for name, codecs in CODECS.items():
        ratio = plain / seconds(problem.coded(codecs))
        figures[f"{name}_over_bf16_speed.l32768.rows16.h8g4d128"] = report.figure(
            ratio, "times", "BF16 keys and values"
        )
        save(figures)
    for name, shape in SHAPES.items():  # last: it takes the compiler's time
        problem = Problem(*shape, arguments.rows, CONTEXTS[0])
        flex = seconds(problem.flex()) / seconds(problem.ours)
        figures[f"vs_flex.l{CONTEXTS[0]}.rows{arguments.rows}.{name}"] = report.figure(
            flex, "times", "compiled FlexAttention with the tree as a mask"
        )
        save(figures)
    save(figures, quiet=False)


def save(figures: dict[str, Any], *, quiet: bool = True) -> None:
    """Writes what there is so far: a run that is cut off still counts."""
    report.write("verify-attention", figures, device=torch.cuda.get_device_name(), quiet=quiet)


class Problem:
    """Random caches of one shape, enough of them to leave L2, and the ways to attend to them."""

    def __init__(self, kv_heads: int, groups: int, dim: int, rows: int, context: int, batch: int = 1) -> None:
        self.groups = groups
        slots = context + rows
        self.shape = ops.AttentionShape(batch, kv_heads * groups, kv_heads, rows, slots, dim)
        self.bytes = self.shape.cache_bytes
        count = max(2, int(L2_BYTES / self.bytes) + 1)
        self.caches = [
            torch.randn(2, batch, kv_heads, slots, dim, device="cuda", dtype=torch.bfloat16) for _ in range(count)
        ]
        self.query = torch.randn(batch, kv_heads * groups, rows, dim, device="cuda", dtype=torch.bfloat16)
        parents = torch.tensor([[-1, *((node - 1) // 2 for node in range(1, rows))]]).expand(batch, -1)
        sees = topology.ancestor_matrix(parents)
        self.visible = topology.pack(sees).cuda()
        self.depths = (sees.sum(-1) - 1).cuda()
        self.lengths = torch.full((batch,), context, device="cuda")
        self.mask = torch.cat([sees.new_ones(batch, rows, context), sees], -1)[:, None].cuda()

    def ours(self, turn: int) -> Tensor:
        """The op as it plans."""
        keys, values = self.caches[turn % len(self.caches)]
        return self._attend(keys, values)

    def unsplit(self, turn: int) -> Tensor:
        """The op with one run of slots."""
        return self._planned(turn, splits=1)

    def portable(self, turn: int) -> Tensor:
        """The op by the kernel that all devices have."""
        return self._planned(turn)

    def _planned(self, turn: int, **changes: int) -> Tensor:
        """The op by the kernel that all devices have, with another plan."""
        module: Any = sys.modules["specdec.ops.tree_attention"]
        planned = module.make_plan
        module.make_plan = lambda *a, **k: dataclasses.replace(planned(*a, **{**k, "specialised": False}), **changes)
        try:
            return self.ours(turn)
        finally:
            module.make_plan = planned

    def coded(self, codecs: tuple[KVCodec, KVCodec]) -> Callable[[int], Tensor]:
        """The op over codes; checked against the op over what they stand for."""
        caches = [[codec.encode(rows) for codec, rows in zip(codecs, cache, strict=True)] for cache in self.caches]

        def attend(turn: int) -> Tensor:
            (keys, *key_scales), (values, *value_scales) = caches[turn % len(caches)]
            scales = [each[0] if len(each) == 1 else tuple(each) for each in (key_scales, value_scales)]
            return self._attend(keys, values, key_scales=scales[0], value_scales=scales[1])

        decoded = (codec.decode(parts, dtype=torch.bfloat16) for codec, parts in zip(codecs, caches[0], strict=True))
        torch.testing.assert_close(attend(0), self._attend(*decoded), rtol=2e-2, atol=2e-3)
        return attend

    def sdpa(self, turn: int) -> Tensor:
        """Masked attention of torch."""
        keys, values = self.caches[turn % len(self.caches)]
        return torch.nn.functional.scaled_dot_product_attention(
            self.query, keys, values, attn_mask=self.mask, enable_gqa=True
        )

    def flex(self) -> Callable[[int], Tensor]:
        """FlexAttention, compiled, with a block mask over the slots and the ancestors of each node."""
        rows, sees, length = self.query.shape[2], self.mask[0, 0], self.mask.shape[-1]

        def visible(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:  # noqa: ARG001 - FlexAttention's signature
            return sees[row, slot]

        block = create_block_mask(visible, None, None, rows, length, device="cuda")
        attend: Any = torch.compile(flex_attention, dynamic=False)
        return lambda turn: attend(self.query, *self.caches[turn % len(self.caches)], block_mask=block, enable_gqa=True)

    def _attend(self, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        return ops.tree_attention(
            self.query, keys, values, self.visible, self.lengths, depths=self.depths, impl="triton", **options
        )


def check(problem: Problem) -> None:
    """Raises unless the kernel gives what float64 gives."""
    keys, values = problem.caches[0]
    expected = ops.tree_attention(
        problem.query.double(), keys.double(), values.double(), problem.visible, problem.lengths, impl="reference"
    )
    torch.testing.assert_close(problem.ours(0).double(), expected, rtol=2e-2, atol=2e-3)


def bandwidth() -> float:
    """Bytes per second of reading a large tensor once."""
    data = torch.empty(2**30, device="cuda", dtype=torch.float32).fill_(1.0)
    return data.numel() * 4 / seconds(lambda _: data.sum())


def seconds(run: Callable[[int], Any], turns: int = 40) -> float:
    """Median time of a call inside a captured graph of several, so that launches do not count."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            run(turn)
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / turns)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
