"""Tree attention on a GPU: the compiled kernel against the float64 reference, over many shapes.

pytest -m gpu tests/ops/test_gpu.py
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import kv, ops
from specdec.trees import topology
from tests.trees.random_trees import random_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES, PARTS = 500, 14
DIMS = [64, 80, 96, 128, 192, 256, 512]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of an output of size one: float32 sums, and weights and results rounded to 11 and 8 bits."""


def draw(
    rng: random.Random, dtype: torch.dtype, device: str = "cuda", longest: int = 70_000, build: int | None = None
) -> dict[str, Any]:
    """One problem: fresh tensors, odd lengths, unused slots NaN, strides of a larger buffer.

    Problems with the same `build` share what a kernel is compiled for.
    """
    fixed = random.Random(rng.randrange(2**32) if build is None else build)
    kv_heads, groups = fixed.choice([1, 2, 3, 8]), fixed.choice([1, 2, 3, 4, 6, 7, 8, 16])
    dim, value_dim = fixed.choice(DIMS), fixed.choice(DIMS)
    if fixed.random() < 0.7:
        value_dim = dim
    most = fixed.choice([1, 7, 16, 64, 100])
    windowed, capped, sunk, padded = (fixed.random() < share for share in (0.5, 0.3, 0.3, 0.3))
    batch = rng.choice([1, 1, 2, 3])
    sizes = [rng.randint(1, most) for _ in range(batch)]
    sizes[0] = most
    budget = longest if rng.random() < 0.1 else 2000
    lengths = [rng.choice([0, 1, rng.randint(0, budget)]) for _ in range(batch)]
    tree = random_tree(rng.randrange(2**32), sizes, rng.choice(["any", "deep", "chain", "star"]))
    slots = max(lengths) + tree.width + rng.choice([0, 1, 300])
    starts = torch.tensor([rng.randint(0, length) for length in lengths]) if padded else None
    seed = torch.Generator(device).manual_seed(rng.randrange(2**32))

    def rows(count: int, width: int) -> Tensor:
        buffer = torch.randn(batch, slots, count, width + 16, generator=seed, device=device, dtype=torch.float32)
        view = buffer.to(dtype)[..., :width].transpose(1, 2)
        for row, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            view[row, :, length + size :] = torch.nan
            if starts is not None:
                view[row, :, : int(starts[row])] = torch.nan
        return view

    visible = topology.ancestors(tree).masked_fill(~tree.valid.unsqueeze(-1), 0)
    return {
        "query": torch.randn(
            batch, tree.width, kv_heads * groups, dim, generator=seed, device=device, dtype=torch.float32
        )
        .to(dtype)
        .transpose(1, 2),
        "keys": rows(kv_heads, dim),
        "values": rows(kv_heads, value_dim),
        "visible": visible.to(device),
        "lengths": torch.tensor(lengths, device=device),
        "depths": topology.depths(tree.parents).to(device),
        "starts": None if starts is None else starts.to(device),
        "window": rng.choice([1, 5, 300]) if windowed else None,
        "softcap": 30.0 if capped else None,
        "sinks": torch.randn(kv_heads * groups, generator=seed, device=device) if sunk else None,
    }


def exact(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    wide = {name: call[name].double() for name in ("query", "keys", "values")}
    # Slots that nobody sees must not matter to the reference either.
    wide |= {name: wide[name].nan_to_num(0.0) for name in ("keys", "values")}
    return ops.tree_attention(**{**call, **wide}, impl="reference", return_lse=True)


def compare(call: dict[str, Any], tolerance: float, **options: Any) -> None:
    expected, expected_lse = exact(call)
    output, lse = ops.tree_attention(**call, impl="triton", return_lse=True, **options)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("part", range(PARTS))
def test_shapes(dtype: torch.dtype, part: int) -> None:
    rng = random.Random(f"{dtype} {part}")
    for number in range(SHAPES // (PARTS * len(TOLERANCE)) + 1):
        build = PARTS * (number // 4) + part
        compare(draw(rng, dtype, build=build), TOLERANCE[dtype], deterministic=number % 4 == 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "codecs",
    [
        (kv.Int8(), kv.Int8()),
        (kv.FP8(), kv.FP8()),
        (kv.Int8(), kv.Int4(group=16)),
        (kv.Int4(group=16), kv.Int4(group=16)),
        (kv.NVFP4(), kv.NVFP4()),
    ],
    ids=str,
)
def test_stored_numbers(codecs: Any, dtype: torch.dtype) -> None:
    rng = random.Random(repr(codecs))
    for number in range(12):
        call = draw(rng, dtype, longest=4000, build=number // 3)
        stored = dict(call)
        for name, codec in zip(("key", "value"), codecs, strict=True):
            parts = codec.encode(call[f"{name}s"].nan_to_num(0.0))
            call[f"{name}s"] = codec.decode(parts, dtype=dtype)
            stored[f"{name}s"], stored[f"{name}_scales"] = parts[0], parts[1] if len(parts) == 2 else parts[1:]
        expected, _ = exact(call)
        output = ops.tree_attention(**stored, impl="triton")
        # Weights times scales of rows are rounded once more.
        torch.testing.assert_close(output.double(), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("codec", [kv.Int4(group=16), kv.NVFP4()])
def test_codes_of_four_bits_are_exact(codec: Any, dtype: torch.dtype) -> None:
    """A node that sees itself alone is given its value: every code under many scales, E4M3 scales of all sizes."""
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(4)
    values = (codes[:32] | codes[32:] << 4).expand(64, 1, 1, 32).contiguous()
    if isinstance(codec, kv.NVFP4):
        scales = torch.arange(256, dtype=torch.uint8, device="cuda").view(64, 1, 1, 4)
        scales = scales.masked_fill((scales & 127) == 127, 0), torch.full((64, 1, 1, 1), 0.37, device="cuda")
    else:
        scales = torch.randn(64, 1, 1, 4, device="cuda").half(), torch.randn(64, 1, 1, 4, device="cuda").half()
    ones = torch.ones(64, 1, 1, 64, device="cuda", dtype=dtype)
    start = torch.zeros(64, dtype=torch.int64, device="cuda")
    output = ops.split_kv_attention(ones, ones, values, start, value_scales=scales, impl="triton")
    assert torch.equal(output, codec.decode((values, *scales), dtype=dtype))


def test_h1_offsets_beyond_two_to_the_thirty_first() -> None:
    """The same rows at the start and at the far end of a cache that is larger than an int32 can index."""
    heads, slots, dim = 1, 2**31 // 64 + 1024, 64
    cache = torch.zeros(1, heads, slots, dim, dtype=torch.int8, device="cuda")
    scales = torch.full((1, heads, slots, 1), 0.05, device="cuda")
    rows = torch.randint(-127, 128, (40, dim), dtype=torch.int8, device="cuda")
    cache[0, 0, :40], cache[0, 0, -40:] = rows, rows
    query = torch.randn(1, 4, 8, dim, device="cuda", dtype=torch.float16)
    outputs = [
        ops.split_kv_attention(
            query,
            cache,
            cache,
            torch.tensor([end - 8], device="cuda"),
            starts=torch.tensor([end - 40], device="cuda"),
            key_scales=scales,
            value_scales=scales,
            impl="triton",
        )
        for end in (40, slots)
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)


def test_h14_more_work_items_than_a_grid_axis() -> None:
    """131,072 rows of length one."""
    query = torch.randn(16_384, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(16_384, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    output = ops.split_kv_attention(query, cache, cache, torch.zeros(16_384, dtype=torch.int64, device="cuda"))
    assert torch.equal(output, cache)


def test_fixed_runs_depend_on_nothing_else() -> None:
    call = draw(random.Random(5), torch.bfloat16)
    call |= {"window": None, "starts": None, "sinks": None}
    call["keys"], call["values"] = (call[name].nan_to_num(0.0) for name in ("keys", "values"))
    whole = ops.tree_attention(**call, deterministic=True)
    for row in range(call["query"].shape[0]):
        alone = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in call.items()}
        assert torch.equal(ops.tree_attention(**alone, deterministic=True)[0], whole[row])


def test_a_captured_graph_follows_the_lengths() -> None:
    """Shapes are fixed, contents are not: the graph of one round serves the next."""
    call = draw(random.Random(9), torch.bfloat16)
    call |= {"window": None, "starts": None, "softcap": None, "sinks": None}
    call["keys"], call["values"] = (call[name].nan_to_num(0.0) for name in ("keys", "values"))
    ops.tree_attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.tree_attention(**call)
    for shorter in (0, 1):
        call["lengths"].sub_(shorter).clamp_(min=0)
        graph.replay()
        assert torch.equal(output, ops.tree_attention(**call))
