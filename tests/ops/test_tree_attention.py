"""Tree attention against its definition: the reference exactly, the kernel (interpreted) within its rounding."""

import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from specdec import kv, ops
from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _attention_call, _attention_plan
from specdec.protocols import KVCodec
from specdec.trees import topology
from tests.ops.problems import Problem, cases, definition, problem
from tests.trees.random_trees import caught
from tests.unchecked import unchecked

EXACT = 1e-12
ROUNDING = {torch.float32: 1e-5, torch.float16: 8e-3}
"""Largest error of an output near 1: float32 scores up to 20 and their exponentials; float16 weights."""

# The interpreter computes with numpy, which warns of the NaN and infinity that these tests put in.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Change = Callable[[dict[str, Any]], dict[str, Any]]
kernel = pytest.mark.skipif(not ops.available("tree_attention", "cpu")[0], reason="triton is not installed")
few = settings(max_examples=settings().max_examples // 4)  # the interpreter takes seconds for an example


def close(found: Problem, change: Change, impl: ops.Impl, tolerance: float) -> None:
    expected, expected_lse = definition(found)
    output, lse = ops.tree_attention(**change(found.call), impl=impl, return_lse=True)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


def law_reference(change: Change, **inputs: Any) -> None:
    close(problem(**inputs, dtype=torch.float64), change, "reference", EXACT)


@given(**cases())
def test_the_reference_is_the_definition(**inputs: Any) -> None:
    law_reference(lambda call: call, **inputs)


WRONG: dict[str, Change] = {
    "windows that count rows": lambda call: {
        **call,
        "depths": torch.arange(call["depths"].shape[1]).expand_as(call["depths"]),
    },
    "no window": lambda call: {**call, "window": None},
    "windows one too long": lambda call: {**call, "window": call["window"] and call["window"] + 1},
    "visible padding": lambda call: {**call, "starts": None},
    "visible siblings": lambda call: {**call, "visible": call["visible"].masked_fill(call["visible"] != 0, -1)},
    "no sinks": lambda call: {**call, "sinks": None},
    "no cap": lambda call: {**call, "softcap": None},
    "pages in order": lambda call: {
        **call,
        "blocks": call["blocks"] if call["blocks"] is None else call["blocks"].sort().values,
    },
    "a scale of one's own": lambda call: {**call, "scale": 0.5},
    "one slot too few": lambda call: {**call, "lengths": (call["lengths"] - 1).clamp_min(0)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nobody looks at numbers."""
    monkeypatch.setattr(_attention_call, "legible", lambda *_: False)
    caught(law_reference, WRONG[name], **cases())


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@few
@given(**cases())
def test_the_kernel_is_the_definition(dtype: torch.dtype, **inputs: Any) -> None:
    close(problem(**inputs, dtype=dtype), lambda call: call, "triton", ROUNDING[dtype])


@kernel
@settings(max_examples=10)
@given(**cases())
def test_the_kernel_is_the_definition_in_fixed_runs(**inputs: Any) -> None:
    close(problem(**inputs), lambda call: {**call, "deterministic": True}, "triton", ROUNDING[torch.float32])


def stored(codec: KVCodec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales as the op takes them, and what they stand for."""
    codes, scales = codec.encode(rows)
    return (
        codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes,
        scales,
        codec.decode((codes, scales)),
    )


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
@pytest.mark.parametrize(("key_codec", "value_codec"), [(kv.Int8(), kv.Int8()), (kv.FP8(), None), (None, kv.FP8())])
@settings(max_examples=6)
@given(**cases(padded=False, slack=0))
def test_stored_numbers_are_read_with_their_scales(
    impl: ops.Impl, key_codec: KVCodec | None, value_codec: KVCodec | None, **inputs: Any
) -> None:
    call = dict(problem(**inputs).call)
    decoded = dict(call)
    for name, codec in (("key", key_codec), ("value", value_codec)):
        rows = f"{name}s"
        call[rows] = decoded[rows] = call[rows].nan_to_num(0.0)
        if codec is not None:
            call[rows], call[f"{name}_scales"], decoded[rows] = stored(codec, call[rows])
    expected = ops.tree_attention(**decoded, impl="reference", return_lse=True)
    for found, wanted in zip(ops.tree_attention(**call, impl=impl, return_lse=True), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
def test_scales_of_rows_come_alone_or_in_a_tuple(impl: ops.Impl) -> None:
    """As `codes, *scales = codec.encode(rows)` gives them."""
    call = problem(0, sizes=[3], lengths=[20], style="any", groups=2, kv_heads=1, dim=32, value_dim=32).call
    for name in ("keys", "values"):
        call[name], call[f"{name[:-1]}_scales"] = kv.Int8().encode(call[name].nan_to_num(0.0))
    alone = ops.tree_attention(**call, impl=impl)
    call |= {name: (call[name],) for name in ("key_scales", "value_scales")}
    assert torch.equal(ops.tree_attention(**call, impl=impl), alone)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
@pytest.mark.parametrize("edge", [0, 3])
def test_a_broken_committed_value_reaches_those_whose_window_has_it(impl: ops.Impl, edge: int) -> None:
    """The tile at the edge of the windows is another one than that of the tree."""
    rows, length, window = 5, 98, 10
    query, cache = torch.randn(1, 2, rows, 16), torch.randn(1, 1, length + rows, 16)
    cache[0, 0, length + 1 + edge - window, 3] = torch.nan  # the first slot that the node at this depth sees
    keys, lengths = cache.nan_to_num(0.0), torch.tensor([length])
    output = ops.split_kv_attention(query, keys, cache, lengths, window=window, impl=impl)
    assert isinstance(output, torch.Tensor)
    broken = output.isnan()
    assert bool(broken[:, :, : edge + 1].any(-1).all())
    assert not bool(broken[:, :, edge + 1 :].any())


@kernel
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("block", [16, 32])
def test_any_cut_of_the_work_gives_the_same(splits: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than tiles, tiles of rows that end within a group, one split."""
    plan = _attention_plan.AttentionPlan(block=block, tile=16, splits=splits, split_tiles=0, warps=4, stages=2)
    monkeypatch.setattr(sys.modules["specdec.ops.tree_attention"], "make_plan", lambda *_, **__: plan)
    sizes = {
        "sizes": [9, 5],
        "lengths": [0, 70],
        "style": "any",
        "groups": 3,
        "kv_heads": 2,
        "dim": 20,
        "value_dim": 24,
    }
    for seed, (window, sinks) in enumerate(itertools.product((None, 6), (False, True))):
        found = problem(seed, **sizes, window=window, sinks=sinks, padded=True)
        close(found, lambda call: call, "triton", ROUNDING[torch.float32])


@kernel
@pytest.mark.parametrize("splits", [2, 7])
def test_values_in_portions(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion has its own sums; a broken number of one portion still makes the whole row broken."""
    plan = _attention_plan.AttentionPlan(16, 16, splits, split_tiles=0, warps=4, stages=2, portions=2)
    monkeypatch.setattr(sys.modules["specdec.ops.tree_attention"], "make_plan", lambda *_, **__: plan)
    for seed, padded in itertools.product(range(2), (False, True)):
        found = problem(seed, [9, 5], [33, 70], "any", 3, 2, 32, 64, padded=padded)
        close(found, lambda call: call, "triton", ROUNDING[torch.float32])
    found = problem(3, [9], [20], "any", 2, 1, 32, 64)
    for column in (3, 60):
        values = found.call["values"].clone()
        values[0, :, 24, column] = float("nan")
        output, _ = ops.tree_attention(**{**found.call, "values": values}, impl="triton", return_lse=True)
        below = topology.ancestor_matrix(found.tree.parents)[0, :, 4]
        assert 0 < int(below.sum()) < 9
        assert bool(output[:, :, below].isnan().all())
        assert bool(output[:, :, ~below].isfinite().all())


def both() -> list[Any]:
    return ["reference", pytest.param("triton", marks=kernel)]


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_node_reaches_its_descendants_alone(impl: ops.Impl, where: str, poison: float) -> None:
    found = problem(3, [9], [20], "any", 2, 1, 16, 16)
    clean, _ = ops.tree_attention(**found.call, impl=impl, return_lse=True)
    for node in range(9):
        rows = found.call[where].clone()
        rows[0, :, 20 + node] = poison
        output, _ = ops.tree_attention(**{**found.call, where: rows}, impl=impl, return_lse=True)
        below = topology.ancestor_matrix(found.tree.parents)[0, :, node]
        assert 0 < int(below.sum()) < 9 or node == 0
        assert torch.equal(output[:, :, ~below], clean[:, :, ~below])
        assert not bool(output[:, :, below].isfinite().all())


@pytest.mark.parametrize("impl", both())
def test_an_empty_node_gives_zero(impl: ops.Impl) -> None:
    """A softmax over nothing is NaN, and spreads."""
    call = problem(1, [3], [12], "chain", 2, 2, 16, 16).call
    full, full_lse = ops.tree_attention(**call, impl=impl, return_lse=True)
    call["visible"] = call["visible"].clone()
    call["visible"][:, 1] = 0
    output, lse = ops.tree_attention(**call, impl=impl, return_lse=True)
    assert torch.equal(output[:, :, 1], torch.zeros_like(output[:, :, 1]))
    assert torch.equal(lse[:, :, 1], torch.full_like(lse[:, :, 1], -torch.inf))
    assert torch.equal(output[:, :, ::2], full[:, :, ::2])
    assert torch.equal(lse[:, :, ::2], full_lse[:, :, ::2])


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize(("batch", "slots", "rows"), [(0, 5, 2), (2, 1, 1), (2, 4, 0), (2, 0, 0)])
def test_nothing_to_do(impl: ops.Impl, batch: int, slots: int, rows: int) -> None:
    query, cache = torch.randn(batch, 4, rows, 16), torch.randn(batch, 2, slots, 16)
    lengths, visible = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, rows, 1, dtype=torch.int64)
    output, lse = ops.tree_attention(query, cache, cache, visible, lengths, impl=impl, return_lse=True)
    assert (output.shape, lse.shape) == ((batch, 4, rows, 16), (batch, 4, rows))
    assert not output.any()


@pytest.mark.parametrize("impl", both())
def test_views_with_any_strides(impl: ops.Impl) -> None:
    """Queries, keys and values as slices of one buffer, heads transposed, every second number."""
    call = problem(2, [6], [30], "any", 2, 2, 16, 16).call
    expected = ops.tree_attention(**call, impl=impl)
    spread = dict(call)
    for name in ("query", "keys", "values"):
        tensor = call[name]
        buffer = torch.full((*tensor.transpose(1, 2).shape[:3], 40), torch.nan)
        spread[name] = buffer[..., 3:35:2].transpose(1, 2)
        spread[name].copy_(tensor)
        assert not spread[name].is_contiguous()
    assert torch.equal(ops.tree_attention(**spread, impl=impl), expected)


@pytest.mark.parametrize("impl", both())
def test_the_logarithm_is_only_told(impl: ops.Impl) -> None:
    call = problem(2, [6], [30], "any", 2, 2, 16, 16, sinks=True).call
    assert torch.equal(ops.tree_attention(**call, impl=impl), ops.tree_attention(**call, impl=impl, return_lse=True)[0])


@kernel
def test_fixed_runs_depend_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch, the other nodes, the size of the cache: in deterministic mode none of them changes a bit."""
    monkeypatch.setattr(_attention_plan, "FIXED_SPLIT", 64)
    found = problem(5, [6, 4], [300, 170], "any", 2, 1, 16, 16, sinks=True, slack=90)
    call = found.call
    alone = {
        name: value[:1] if name in {"query", "keys", "values", "visible", "lengths", "depths"} else value
        for name, value in call.items()
    }
    tight = {**alone, "keys": alone["keys"][:, :, :306], "values": alone["values"][:, :, :306]}
    first = {
        **tight,
        "query": tight["query"][:, :, :1],
        "visible": tight["visible"][:, :1],
        "depths": tight["depths"][:, :1],
    }

    def row(arguments: dict[str, Any], **options: bool) -> torch.Tensor:
        return ops.tree_attention(**arguments, impl="triton", **options)[0, :, 0]

    fixed = [row(arguments, deterministic=True) for arguments in (call, alone, tight, first)]
    assert all(torch.equal(fixed[0], other) for other in fixed[1:])
    free = [row(arguments) for arguments in (call, alone, tight, first)]
    assert not all(torch.equal(free[0], other) for other in free[1:]), "the test would not notice"


@kernel
def test_fixed_runs_under_a_window_depend_on_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tiles a window cuts depends on the deepest node, and these are added up after those that it does not."""
    plans = {
        split_tiles: _attention_plan.AttentionPlan(16, 32, 1, split_tiles, warps=4, stages=2) for split_tiles in (0, 99)
    }
    same: dict[int, list[bool]] = {split_tiles: [] for split_tiles in plans}
    for (split_tiles, plan), length in itertools.product(plans.items(), range(262, 332, 10)):
        monkeypatch.setattr(sys.modules["specdec.ops.tree_attention"], "make_plan", lambda *_, plan=plan, **__: plan)
        call = problem(length, [4], [length], "star", 1, 1, 16, 16, window=200).call
        deeper = {**call, "visible": torch.tensor([[[0b0001], [0b0010], [0b0110], [0b1110]]])}
        deeper["depths"] = torch.tensor([[0, 1, 2, 3]])
        one, other = (ops.tree_attention(**each, impl="triton") for each in (call, deeper))
        same[split_tiles].append(torch.equal(one[:, :, 0], other[:, :, 0]))
    assert all(same[99])
    assert not all(same[0]), "the test would not notice"


def test_a_chain_is_a_tree() -> None:
    query, cache, lengths = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 90, 8), torch.tensor([20, 3])
    visible = topology.pack(torch.ones(70, 70, dtype=torch.bool).tril()[None].expand(2, -1, -1))
    expected = ops.tree_attention(query, cache, cache, visible, lengths, window=9)
    assert torch.equal(ops.split_kv_attention(query, cache, cache, lengths, window=9), expected)


def test_a_chain_over_stored_numbers() -> None:
    query, cache, lengths = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 90, 8), torch.tensor([20, 3])
    codes, scales, decoded = stored(kv.Int8(), cache)
    found = ops.split_kv_attention(query, codes, codes, lengths, key_scales=scales, value_scales=scales)
    torch.testing.assert_close(found, ops.split_kv_attention(query, decoded, decoded, lengths))


GOOD = problem(0, [4, 4], [9, 5], "any", 2, 2, 16, 16).call
PAGES = torch.zeros(6, 2, 5, 16)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "queries of three axes": ({"query": GOOD["query"][0]}, "query must be"),
    "another key dimension": ({"keys": GOOD["keys"][..., :8]}, "keys must be"),
    "another batch": ({"keys": GOOD["keys"][:1]}, "keys must be"),
    "fewer values": ({"values": GOOD["values"][:, :, :3]}, "values must be like keys"),
    "heads that do not divide": (
        {"query": GOOD["query"][:, :3]},
        r"3 query heads cannot share 2 .* got \[.*, 3, .*\] and \[",
    ),
    "another number of masks": ({"visible": GOOD["visible"][:, :3]}, "visible must be"),
    "a mask over the context": ({"visible": torch.ones(2, 4, 13, dtype=torch.bool)}, "int64 bit masks"),
    "masks that are too short": ({"visible": GOOD["visible"][:, :, :0]}, "masks of 1 words, got 0"),
    "lengths of another batch": ({"lengths": torch.tensor([9])}, r"lengths must be a tensor \[2\], got \[1\]"),
    "fewer depths than rows": ({"depths": GOOD["depths"][:, :2]}, "depths tell of 2 pending rows"),
    "sinks per group": ({"sinks": torch.zeros(2)}, "sinks must be"),
    "lengths that count the tree": ({"lengths": torch.tensor([13, 9])}, "do not fit 13 slots"),
    "negative lengths": ({"lengths": torch.tensor([-1, 5])}, "lengths -1 to 5"),
    "a matrix that is not packed": ({"visible": torch.ones(2, 4, 4, dtype=torch.int64)}, "masks of 1 words, got 4"),
    "whole numbers for queries": ({"query": GOOD["query"].long()}, "floating-point numbers, got torch.int64"),
    "lengths in floating point": ({"lengths": torch.tensor([9.0, 5.0])}, "lengths must hold integers"),
    "an empty window": ({"window": 0}, "a window counts positions"),
    "a cap of zero": ({"softcap": 0.0}, "softcap must be a number above 0"),
    "another dtype": ({"keys": GOOD["keys"].half()}, "keys must be torch.float32 like query.*got torch.float16"),
    "codes without scales": (
        {"values": GOOD["values"].to(torch.int8)},
        "values must be .* or int8 .* with value_scales",
    ),
    "scales without codes": ({"key_scales": torch.ones(2, 2, 13, 1)}, "keys must be .* got torch.float32"),
    "scales per head": (
        {"keys": GOOD["keys"].to(torch.int8), "key_scales": torch.ones(2, 2, 1, 1)},
        "key_scales must be",
    ),
    "another device": ({"lengths": GOOD["lengths"].to("meta")}, "all tensors must be on cpu"),
    "a word for a scale": ({"scale": "a"}, "scale must be a finite number or None, got 'a'"),
    "no number for a scale": ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
    "a truth for a window": ({"window": True}, "a window counts positions, .* got True"),
    "a boundless window": ({"window": 1 << 70}, "a window counts positions, .* below 2"),
    "a word for a cap": ({"softcap": "a"}, "softcap must be a number above 0 or None, got 'a'"),
    "a truth for a scale": ({"scale": True}, "scale must be a finite number or None, got True"),
    "nodes that are not there": ({"visible": GOOD["visible"] | 1 << 4}, "bits behind the 4 pending rows"),
    "a root below 0": ({"depths": GOOD["depths"] - 1}, "depths count from 0 at a root, got -1"),
    "padding behind the text": ({"starts": torch.tensor([0, 6])}, r"starts must be from 0 to lengths, got \[0, 6\]"),
    "padding before the cache": ({"starts": torch.tensor([-1, 0])}, "starts must be from 0 to lengths"),
    "pages by small numbers": (
        {"keys": PAGES, "values": PAGES, "blocks": torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.uint8)},
        "blocks must be int32 or int64, got torch.uint8",
    ),
    "a page that is not there": (
        {"keys": PAGES, "values": PAGES, "blocks": torch.tensor([[0, 1, 2], [3, -1, 4]])},
        "blocks in use must be among 6 pages",
    ),
    "a page behind the last": (
        {"keys": PAGES, "values": PAGES, "blocks": torch.tensor([[0, 1, 6], [3, 4, 5]])},
        "blocks in use must be among 6 pages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = BAD[name]
    unchecked(monkeypatch, _attention_call)  # outside the tests nobody checks annotations
    with pytest.raises(ShapeError, match=message):
        inspect.unwrap(ops.tree_attention)(**{**GOOD, **change})


@pytest.mark.parametrize("flag", ["return_lse", "deterministic"])
def test_flags_are_true_or_false(flag: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{flag} must be True or False, got 'no'"):
        inspect.unwrap(ops.tree_attention)(**GOOD, **{flag: "no"})


def test_numbers_of_numpy_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, _attention_call)
    run, call = inspect.unwrap(ops.tree_attention), {**GOOD, "scale": None, "softcap": None, "window": None}
    expected = run(**{**call, "scale": 0.25, "softcap": 5.0, "window": 4})
    given = {"scale": np.float32(0.25), "softcap": np.float64(5.0), "window": np.int64(4)}
    assert torch.equal(run(**{**call, **given}), expected)


@kernel
def test_the_kernel_names_dtypes_it_does_not_take() -> None:
    call = problem(0, [4], [9], "any", 2, 2, 16, 16, dtype=torch.float64).call
    with pytest.raises(UnsupportedError, match=r"got torch\.float64"):
        ops.tree_attention(**call, impl="triton")
