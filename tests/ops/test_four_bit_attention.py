"""Tree attention over codes of four bits: the same numbers as the codec's, read by the reference and by the kernel."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import kv, ops
from specdec.errors import ShapeError
from specdec.ops import _attention_plan
from specdec.ops._stored_rows import StoredRows
from specdec.protocols import KVCodec
from specdec.trees import topology
from tests.ops.problems import cases, problem
from tests.trees.random_trees import caught

ROUNDING = {torch.float32: 1e-5, torch.float16: 8e-3}
"""Largest error of an output near 1; as for numbers that are stored as they are."""

CODECS: dict[str, KVCodec] = {
    "int4, groups of 4": kv.Int4(group=4),
    "int4, one group": kv.Int4(group=48),
    "int4, groups across the halves": kv.Int4(group=16),
    "int4, groups of 3": kv.Int4(group=3),
    "nvfp4": kv.NVFP4(),
    "int8": kv.Int8(),
    "plain": kv.Plain(),
}
PAIRS = [
    ("int4, groups of 4", "int4, one group"),
    ("int4, groups across the halves", "int4, groups of 3"),
    ("nvfp4", "nvfp4"),
    ("int8", "int4, groups of 4"),
    ("nvfp4", "plain"),
    ("plain", "int4, groups of 3"),
]
"""Codecs of keys and values."""

# The interpreter computes with numpy, which warns of the NaN and infinity that these tests put in.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Change = Callable[[dict[str, Any]], dict[str, Any]]
kernel = pytest.mark.skipif(not ops.available("tree_attention", "cpu")[0], reason="triton is not installed")


def both() -> list[Any]:
    return ["reference", pytest.param("triton", marks=kernel)]


def encoded(call: dict[str, Any], codecs: tuple[KVCodec, KVCodec]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call over codes, with rubbish in slots that no node may read, and over what the codes stand for."""
    coded, decoded = dict(call), dict(call)
    for name, codec in zip(("key", "value"), codecs, strict=True):
        rows = call[f"{name}s"]
        unread = rows.isnan().any(-1, keepdim=True)
        parts = codec.encode(rows.nan_to_num(0.0))
        decoded[f"{name}s"] = codec.decode(parts, dtype=rows.dtype)
        parts = tuple(part.masked_fill(unread, torch.nan if part.is_floating_point() else 127) for part in parts)
        coded[f"{name}s"] = parts[0]
        coded[f"{name}_scales"] = {1: None, 2: parts[-1]}.get(len(parts), parts[1:])
    return coded, decoded


def law(
    change: Change, impl: ops.Impl, codecs: tuple[KVCodec, KVCodec], dtype: torch.dtype = torch.float32, **inputs: Any
) -> None:
    coded, decoded = encoded(problem(**inputs, dtype=dtype).call, codecs)
    expected = ops.tree_attention(**decoded, impl="reference", return_lse=True)
    for found, wanted in zip(ops.tree_attention(**change(coded), impl=impl, return_lse=True), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


INPUTS = cases(most_nodes=20) | {"dim": st.sampled_from([48, 96]), "value_dim": st.sampled_from([48, 96])}


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("reference", torch.float32),
        pytest.param("triton", torch.float32, marks=kernel),
        pytest.param("triton", torch.float16, marks=kernel),
    ],
)
@settings(max_examples=6)
@given(**INPUTS)
def test_codes_are_read_as_the_codec_reads_them(
    impl: ops.Impl, dtype: torch.dtype, pair: tuple[str, str], **inputs: Any
) -> None:
    law(lambda call: call, impl, (CODECS[pair[0]], CODECS[pair[1]]), dtype, **inputs)


@kernel
@pytest.mark.parametrize(
    ("codecs", "dims"),
    [
        ((kv.Int4(group=2), kv.Int4(group=1)), (2, 6)),
        ((kv.Int4(), kv.Int4()), (64, 128)),
        ((kv.NVFP4(), kv.NVFP4()), (16, 80)),
        ((kv.Int4(group=128), kv.NVFP4()), (128, 64)),
        ((kv.Int4(group=10), kv.Int4(group=5)), (80, 20)),
    ],
)
@settings(max_examples=5)
@given(**cases(most_nodes=9))
def test_rows_of_any_dimension(codecs: tuple[KVCodec, KVCodec], dims: tuple[int, int], **inputs: Any) -> None:
    law(lambda call: call, "triton", codecs, **{**inputs, "dim": dims[0], "value_dim": dims[1]})


def _other_halves(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "values": (call["values"] << 4) | (call["values"] >> 4)}


def _scales(name: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    return lambda call: {**call, f"{name}_scales": change(*call[f"{name}_scales"])}


WRONG: dict[str, Change] = {
    "halves exchanged": _other_halves,
    "groups in reverse": _scales("key", lambda scales, zeros: (scales.flip(-1), zeros)),
    "no zero points": _scales("value", lambda scales, zeros: (scales, torch.zeros_like(zeros))),
    "one scale for a row": _scales("value", lambda scales, zeros: (scales[..., :1].expand_as(scales), zeros)),
    "scales of the slot before": _scales("key", lambda scales, zeros: (scales.roll(1, 2), zeros)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_readings_are_caught(name: str) -> None:
    caught(law, WRONG[name], "reference", (kv.Int4(group=4), kv.Int4(group=4)), **INPUTS)


def alone(values: Tensor, scales: tuple[Tensor, Tensor], impl: ops.Impl) -> Tensor:
    """What a node that sees itself alone is given: its own value, with a weight of one."""
    query, keys = torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16)
    found = ops.split_kv_attention(query, keys, values, torch.tensor([0]), value_scales=scales, impl=impl)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("impl", both())
def test_every_float_code_under_every_scale_is_exact(impl: ops.Impl) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(256)
    packed = codes[:2048] | codes[2048:] << 4
    scales = torch.arange(256, dtype=torch.uint8)
    scales[[127, 255]] = 0  # those are NaN
    row_scales = torch.tensor([0.37])
    parts = tuple(part[None, None, None] for part in (packed, scales, row_scales))
    found = alone(parts[0], parts[1:], impl)
    assert torch.equal(found, kv.NVFP4().decode(parts))
    assert found.unique().numel() > 400


@pytest.mark.parametrize("impl", both())
def test_every_integer_code_is_exact(impl: ops.Impl) -> None:
    """Under scales and zero points of all sizes, the largest and the smallest float16 among them."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(16, dtype=torch.uint8).repeat(128)
    packed = codes[:1024] | codes[1024:] << 4
    scales, zeros = torch.randint(0, 31744, (2, 128), generator=generator).to(torch.int16).view(torch.float16)
    scales[:2] = torch.tensor([65504.0, 2**-24])
    parts = tuple(part[None, None, None] for part in (packed, scales, -zeros))
    assert torch.equal(alone(parts[0], parts[1:], impl), kv.Int4().decode(parts))


@pytest.mark.parametrize("codec", [kv.Int4(group=4), kv.NVFP4()])
def test_the_reference_decodes_as_the_codec(codec: KVCodec) -> None:
    parts = codec.encode(torch.randn(2, 3, 5, 48))
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(StoredRows(parts[0], parts[1:]).decode(dtype), codec.decode(parts).to(dtype))


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize("codec", [kv.Int4(group=4), kv.NVFP4()])
def test_views_with_any_strides(impl: ops.Impl, codec: KVCodec) -> None:
    """Codes and scales as slices of larger buffers, heads behind slots, every second number."""
    call, _ = encoded(problem(2, [6], [30], "any", 2, 2, 48, 48).call, (codec, codec))
    expected = ops.tree_attention(**call, impl=impl)

    def spread(part: Tensor) -> Tensor:
        buffer = torch.full((*part.transpose(1, 2).shape[:3], 2 * part.shape[3] + 5), 3).to(part.dtype)
        view = buffer[..., 3 : 3 + 2 * part.shape[3] : 2].transpose(1, 2)
        return view.copy_(part)

    for name in ("key", "value"):
        call[f"{name}s"] = spread(call[f"{name}s"])
        call[f"{name}_scales"] = tuple(map(spread, call[f"{name}_scales"]))
    assert torch.equal(ops.tree_attention(**call, impl=impl), expected)


def test_bytes_of_scales_may_be_typed() -> None:
    call, _ = encoded(problem(2, [6], [30], "any", 2, 2, 48, 48).call, (kv.NVFP4(), kv.NVFP4()))
    expected = ops.tree_attention(**call)
    scales, rows = call["key_scales"]
    assert torch.equal(ops.tree_attention(**{**call, "key_scales": (scales.view(torch.float8_e4m3fn), rows)}), expected)


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("codec", [kv.Int4(group=16), kv.NVFP4()])
def test_a_broken_node_reaches_its_descendants_alone(impl: ops.Impl, part: int, codec: KVCodec) -> None:
    found = problem(3, [9], [20], "any", 2, 1, 48, 48)
    call, _ = encoded(found.call, (codec, codec))
    clean, _ = ops.tree_attention(**call, impl=impl, return_lse=True)
    for node in (0, 3, 8):
        scales = [scale.clone() for scale in call["value_scales"]]
        scales[part][0, :, 20 + node, 0] = torch.nan if scales[part].is_floating_point() else 127
        output, _ = ops.tree_attention(**{**call, "value_scales": tuple(scales)}, impl=impl, return_lse=True)
        below = topology.ancestor_matrix(found.tree.parents)[0, :, node]
        assert torch.equal(output[:, :, ~below], clean[:, :, ~below])
        assert bool(output[:, :, below].isnan().any(-1).all())


@kernel
@pytest.mark.parametrize(("splits", "portions"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("codec", [kv.Int4(group=16), kv.Int4(group=64), kv.NVFP4()])
def test_any_cut_of_the_work_gives_the_same(
    splits: int, portions: int, codec: KVCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portions of values are the halves of their bytes."""
    plan = _attention_plan.AttentionPlan(16, 16, splits, split_tiles=0, warps=4, stages=2, portions=portions)
    monkeypatch.setattr(sys.modules["specdec.ops.tree_attention"], "make_plan", lambda *_, **__: plan)
    for seed, padded in enumerate((False, True)):
        sizes: dict[str, Any] = {"sizes": [9, 5], "lengths": [33, 70], "groups": 3, "kv_heads": 2}
        inputs = {"seed": seed, "style": "any", "dim": 64, "value_dim": 64, "padded": padded, **sizes}
        law(lambda call: call, "triton", (codec, codec), **inputs)


GOOD, _ = encoded(problem(0, [4, 4], [9, 5], "any", 2, 2, 16, 16).call, (kv.Int4(group=4), kv.NVFP4()))
SCALES, ZEROS = GOOD["key_scales"]
BLOCKS, ROWS = GOOD["value_scales"]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "codes of other queries": (
        {"query": GOOD["query"][..., :8]},
        r"keys must be .*, 8 / 2\] for .* got \[2, 2, 13, 8\]",
    ),
    "codes without scales": ({"key_scales": None}, "keys must be"),
    "scales alone": ({"key_scales": SCALES}, r"uint8 codes in pairs .* got torch.uint8 with \[torch.float16\]"),
    "wide scales": ({"key_scales": (SCALES.float(), ZEROS)}, r"keys must be .* with \[torch.float32, torch.float16\]"),
    "fewer zero points": (
        {"key_scales": (SCALES, ZEROS[..., :2])},
        r"key_scales must be those of int4 codes \[2, 2, 13, 8\], got shapes .*13, 2\]\], expected .*13, 4\]\]",
    ),
    "groups that do not divide": (
        {"key_scales": (SCALES[..., :3], ZEROS[..., :3])},
        "key_scales must be .* got 3 groups, which do not divide rows of 16 numbers",
    ),
    "no groups": ({"key_scales": (SCALES[..., :0], ZEROS[..., :0])}, "0 groups"),
    "scales of fewer slots": ({"key_scales": (SCALES[:, :, :5], ZEROS[:, :, :5])}, "key_scales must be"),
    "blocks of other numbers": (
        {"value_scales": (BLOCKS.repeat(1, 1, 1, 2), ROWS)},
        "value_scales must be those of nvfp4",
    ),
    "rows that have no whole blocks": (
        {"values": GOOD["values"][..., :4]},
        "value_scales must be .* rows of 8 numbers, which have no whole groups of 16",
    ),
    "scales on another device": ({"value_scales": (BLOCKS.to("meta"), ROWS)}, "all tensors must be on cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    change, message = BAD[name]
    unchecked = inspect.unwrap(ops.tree_attention)  # outside the tests nobody checks its annotations
    with pytest.raises(ShapeError, match=message):
        unchecked(**{**GOOD, **change})
