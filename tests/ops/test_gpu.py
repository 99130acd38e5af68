"""Tree attention on a GPU: the compiled kernel against the float64 reference, over many shapes.

pytest -m gpu tests/ops/test_gpu.py
"""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import kv, ops
from specdec.ops import _attention_plan
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
        build = PARTS * (number // 6) + part
        compare(draw(rng, dtype, build=build), TOLERANCE[dtype], deterministic=number % 4 == 3)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture
def specialised(monkeypatch: pytest.MonkeyPatch) -> list[_attention_plan.AttentionPlan]:
    """The plans of calls that all go to the kernel of compute capability 9, however few rows and slots they have."""
    plans: list[_attention_plan.AttentionPlan] = []
    make_plan = _attention_plan.make_plan

    def recorded(*args: Any, **options: Any) -> _attention_plan.AttentionPlan:
        plans.append(make_plan(*args, **options))
        return plans[-1]

    monkeypatch.setattr(_attention_plan, "_FEWEST", 1)
    more = {(128, True): (4, 0), (256, False): (2, 0)}
    for name, given in (("_SPECIALISED", more), ("_SPECIALISED_CODES", {})):
        shapes = {shape: (stages, 0) for shape, (stages, _) in getattr(_attention_plan, name).items()}
        monkeypatch.setattr(_attention_plan, name, shapes | given)
    monkeypatch.setattr(sys.modules["specdec.ops.tree_attention"], "make_plan", recorded)
    return plans


def drawn_for_hopper(rng: random.Random, dtype: torch.dtype, dim: int, groups: int, most: int) -> dict[str, Any]:
    """A problem that the kernel of compute capability 9 takes; lengths about the edges of tiles."""
    kv_heads, batch = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3])
    sizes = [rng.randint(1, most) for _ in range(batch)]
    sizes[0] = most
    edge = rng.choice([0, 32, 64, 128, 192, 4096])
    near = [0, 1, edge - 1, edge, edge + 1, edge - most, edge - most + 1, rng.randint(0, 3000)]
    lengths = [max(0, rng.choice(near)) for _ in range(batch)]
    if rng.random() < 0.1:
        lengths[0] = rng.randint(0, 70_000)
    tree = random_tree(rng.randrange(2**32), sizes, rng.choice(["any", "deep", "chain", "star"]))
    visible = topology.ancestors(tree).masked_fill(~tree.valid.unsqueeze(-1), 0)
    if batch > 1 and rng.random() < 0.3:
        visible[-1] = 0  # a batch row without nodes
    slots = max(lengths) + tree.width + rng.choice([64, 65, 300])
    seed = torch.Generator("cuda").manual_seed(rng.randrange(2**32))

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seed, device="cuda").to(dtype)

    def cached() -> Tensor:
        view = rows(batch, slots, kv_heads, dim + 16)[..., :dim].transpose(1, 2)
        for row, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            view[row, :, length + size :] = torch.nan
        return view

    return {
        "query": rows(batch, tree.width, kv_heads * groups, dim).transpose(1, 2),
        "keys": cached(),
        "values": cached(),
        "visible": visible.cuda(),
        "lengths": torch.tensor(lengths, device="cuda"),
        "depths": topology.depths(tree.parents).cuda() if rng.random() < 0.5 else None,
        "sinks": rows(kv_heads * groups).float() if rng.random() < 0.3 else None,
    }


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("dim", "groups", "most"),
    [
        *[(128, 1, 1), (128, 4, 16), (128, 8, 16)],
        *[(256, 7, 3), (256, 6, 16), (256, 8, 16), (256, 1, 100), (256, 16, 9)],
        *[(512, 8, 9), (512, 8, 16), (512, 4, 64), (512, 1, 100)],
    ],
)
def test_the_specialised_kernel(
    dtype: torch.dtype, dim: int, groups: int, most: int, specialised: list[_attention_plan.AttentionPlan]
) -> None:
    rng = random.Random(f"{dtype} {dim} {groups} {most}")
    for _ in range(16):
        compare(drawn_for_hopper(rng, dtype, dim, groups, most), TOLERANCE[dtype])
    assert sum(plan.specialised for plan in specialised) >= 8


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9")
@pytest.mark.parametrize("dim", [128, 256, 512])
def test_the_specialised_kernel_takes_what_is_not_finite_to_descendants_alone(
    dim: int, specialised: list[_attention_plan.AttentionPlan]
) -> None:
    rng = random.Random(dim)
    for broken in (torch.nan, torch.inf, -torch.inf) * 4:
        call = drawn_for_hopper(rng, torch.bfloat16, dim, 8, 12)
        length, most = int(call["lengths"][0]), call["query"].shape[2]
        call["values"][0, 0, length + rng.randrange(most), rng.randrange(dim)] = broken
        expected = ops.tree_attention(**{**call, **unseen_are_zeros(call)}, impl="reference")
        output = ops.tree_attention(**call, impl="triton")
        torch.testing.assert_close(output.double(), expected, rtol=1.6e-2, atol=1.6e-2, equal_nan=True)
    assert any(plan.specialised for plan in specialised)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("groups", "most"), [(1, 1), (1, 64), (3, 9), (4, 16), (8, 7)])
def test_the_specialised_kernel_takes_codes(
    dtype: torch.dtype, groups: int, most: int, specialised: list[_attention_plan.AttentionPlan]
) -> None:
    rng = random.Random(f"{dtype} {groups} {most}")
    for _ in range(16):
        faint = 1e-4 if dtype == torch.bfloat16 else 1e-2  # of weights times scales
        call, stored = coded(drawn_for_hopper(rng, dtype, 128, groups, most), rng.choice([faint, 1.0, 300.0]))
        expected, expected_lse = exact(call)
        output, lse = ops.tree_attention(**stored, impl="triton", return_lse=True)
        tolerance = 2 * TOLERANCE[dtype]  # weights times scales of rows are rounded once more
        size = call["values"].double().nan_to_num(0.0).abs().max()
        torch.testing.assert_close(output.double() / size, expected / size, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-3, atol=1e-3)
    assert sum(plan.specialised for plan in specialised) >= 8


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9")
@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
def test_the_specialised_kernel_takes_broken_scales_to_descendants_alone(
    name: str, specialised: list[_attention_plan.AttentionPlan]
) -> None:
    rng = random.Random(name)
    for _ in range(12):
        call, stored = coded(drawn_for_hopper(rng, torch.bfloat16, 128, 4, 12), 1.0)
        node = int(call["lengths"][0]) + rng.randrange(call["query"].shape[2])
        stored[name][0, 0, node] = call[name.replace("_scales", "s")][0, 0, node, 1:] = torch.nan
        expected = ops.tree_attention(**{**call, **unseen_are_zeros(call)}, impl="reference")
        output = ops.tree_attention(**stored, impl="triton")
        torch.testing.assert_close(output.double(), expected, rtol=3.2e-2, atol=3.2e-2, equal_nan=True)
    assert any(plan.specialised for plan in specialised)


def coded(call: dict[str, Any], size: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call with values of some size as INT8 stands for them, and the same with codes; what is unused stays NaN."""
    call, stored = dict(call), dict(call)
    for name, factor in (("key", 1.0), ("value", size)):
        unused = call[f"{name}s"].isnan().any(3, keepdim=True)
        codes, scales = kv.Int8().encode(call[f"{name}s"].nan_to_num(0.0).float() * factor)
        aligned = torch.nn.functional.pad(scales, (0, 0, 0, -scales.shape[2] % 4))[:, :, : scales.shape[2]]
        call[f"{name}s"] = (codes.double() * scales).masked_fill(unused, torch.nan)
        stored[f"{name}s"], stored[f"{name}_scales"] = codes, aligned.masked_fill_(unused, torch.nan)
    return call, stored


def unseen_are_zeros(call: dict[str, Any]) -> dict[str, Tensor]:
    """Numbers in float64; slots behind the tree of a batch row are zeros, and what is broken inside it stays."""
    wide = {name: call[name].double() for name in ("query", "keys", "values")}
    for row, length in enumerate(call["lengths"].tolist()):
        behind = wide["keys"][row, 0, :, 0].isnan().nonzero()
        first = int(behind[0]) if len(behind) else wide["keys"].shape[2]
        assert first > length or not call["visible"][row].any()
        wide["keys"][row, :, first:], wide["values"][row, :, first:] = 0, 0
    return wide


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
        call = draw(rng, dtype, longest=4000, build=number // 4)
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
