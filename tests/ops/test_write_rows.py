"""Writing rows against its definition, codec by codec: the reference and the interpreted kernel, to the last bit."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from specdec import kv, ops
from specdec.errors import ShapeError, UnsupportedError
from tests.ops.stored_rows import FORMS, POISON, WRITINGS, Counted, same, writing
from tests.trees.random_trees import caught

# The interpreter computes with numpy, which warns of the NaN and infinity that these tests put in.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Change = Callable[[dict[str, Any]], dict[str, Any]]
kernel = pytest.mark.skipif(not ops.available("write_rows", "cpu")[0], reason="triton is not installed")


def law(change: Change, impl: ops.Impl, *sizes: Any, **inputs: Any) -> None:
    found = writing(*sizes, **inputs)
    expected = found.by_definition()
    ops.write_rows(**change(found.call), impl=impl)
    for memory, wanted, *kind in zip(found.memory, expected, found.rotated, found.forms, strict=True):
        same(memory, wanted, *kind)


def both() -> list[Any]:
    return ["reference", pytest.param("triton", marks=kernel)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@given(**WRITINGS)
def test_the_reference_is_the_definition(dtype: torch.dtype, **inputs: Any) -> None:
    law(lambda call: call, "reference", **inputs, dtype=dtype)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(**WRITINGS)
def test_the_kernel_is_the_definition(dtype: torch.dtype, **inputs: Any) -> None:
    """In bfloat16 too: the interpreter computes wrongly in it, but the kernel only loads and copies such numbers."""
    law(lambda call: call, "triton", **inputs, dtype=dtype)


WRONG: dict[str, Change] = {
    "slots in order": lambda call: {
        **call,
        "slots": torch.arange(call["slots"].shape[1]).expand_as(call["slots"]),
    },
    "slots clamped": lambda call: {**call, "slots": call["slots"].clamp(0, call["key_parts"][0].shape[2] - 1)},
    "negative slots from the end": lambda call: {
        **call,
        "slots": torch.where(call["slots"] == -1, call["key_parts"][0].shape[2] - 1, call["slots"]),
    },
    "keys as they are": lambda call: {**call, "rotate_keys": False},
    "values as they are": lambda call: {**call, "rotate_values": False},
    "rows rounded before": lambda call: {**call, "values": call["values"].bfloat16().to(call["values"].dtype)},
    "heads before tokens": lambda call: {
        **call,
        "keys": call["keys"].transpose(1, 2).flatten(1, 2).view(call["keys"].shape),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nobody looks at numbers."""
    monkeypatch.setattr(importlib.import_module("specdec.ops.write_rows"), "legible", lambda *_: False)
    caught(law, WRONG[name], "reference", **WRITINGS)


def parts(form: str, heads: int, slots: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    codes = FORMS[form].encode(torch.zeros(1, heads, slots, dim, dtype=dtype))
    return tuple(part.fill_(torch.nan if part.is_floating_point() else POISON) for part in codes)


def written(rows: Tensor, form: str, impl: ops.Impl) -> tuple[Tensor, ...]:
    """Rows `[new, dim]` as one head's keys, in slots in order."""
    keys, values = parts(form, 1, *rows.shape, rows.dtype), parts("plain", 1, *rows.shape, rows.dtype)
    slots = torch.arange(rows.shape[0])[None]
    ops.write_rows(rows[None, None], rows[None, None], keys, values, slots, impl=impl)
    torch.testing.assert_close(values[0][0, 0], rows, rtol=0, atol=0, equal_nan=True)
    return tuple(part[0, 0] for part in keys)


@pytest.mark.parametrize("impl", both())
def test_integers_are_rounded_to_even(impl: ops.Impl) -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5, 0.49999997]])
    codes, scales = written(row, "int8", impl)
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -126, 126, 0]]


@pytest.mark.parametrize("impl", both())
def test_every_half_up_to_the_largest_becomes_the_nearest_e4m3(impl: ops.Impl) -> None:
    """All float16 numbers of that size: the numbers of the format, what lies half way between two, both signs of 0."""
    every = torch.arange(2**16).to(torch.int16).view(torch.float16)
    every = every[every.abs() <= 448]
    rows = torch.nn.functional.pad(every, (0, -len(every) % 511)).view(-1, 511)
    rows = torch.cat([torch.full((len(rows), 1), 448.0, dtype=torch.float16), rows], 1)
    codes, scales = written(rows, "fp8", impl)
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(codes, rows.float().to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("impl", both())
def test_four_bits_are_rounded_to_even(impl: ops.Impl) -> None:
    middles = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    packed, scales, row_scales = written(torch.cat([middles, middles - 6])[None] * 448, "nvfp4", impl)
    assert (scales.view(torch.float8_e4m3fn).tolist(), row_scales.tolist()) == ([[448.0]], [[1.0]])
    assert (packed & 15).tolist() == [[0, 0, 2, 2, 4, 4, 6, 6]]
    assert (packed >> 4).tolist() == [[15, 15, 15, 14, 14, 14, 12, 10]]
    packed, scales, zeros = written(torch.tensor([[-3.0, 12.0, -2.5, -1.5, 0.5, 1.4, 1.6, 11.5]]), "int4", impl)
    assert (scales.tolist(), zeros.tolist()) == ([[1.0]], [[-3.0]])
    assert torch.cat([packed & 15, packed >> 4], -1).tolist() == [[0, 15, 0, 2, 4, 4, 5, 14]]


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize("form", ["int4", "nvfp4"])
def test_nan_stays_in_its_row(impl: ops.Impl, form: str) -> None:
    rows = torch.randn(3, 16)
    clean = written(rows, form, impl)
    rows[1, 2] = torch.nan
    stored = written(rows, form, impl)
    assert bool(FORMS[form].decode(stored)[1].isnan().any())
    for part, before in zip(stored, clean, strict=True):
        assert torch.equal(part[::2], before[::2])


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_stays_broken(impl: ops.Impl, form: str, broken: float) -> None:
    rows = torch.randn(3, 6)
    clean = written(rows, form, impl)
    rows[1, 2] = broken
    stored = written(rows, form, impl)
    assert bool(FORMS[form].decode(stored)[1].isnan().any())
    assert not bool(stored[1][1].isfinite())
    for part, before in zip(stored, clean, strict=True):
        assert torch.equal(part[::2], before[::2])


@pytest.mark.parametrize("impl", both())
def test_bytes_may_be_typed(impl: ops.Impl) -> None:
    found = writing(3, 2, 3, 2, 5, (16, 16), ("fp8", "fp8"), (False, True), "noise", spread=True)
    expected = found.by_definition()
    for name in ("key_parts", "value_parts"):
        codes, scales = found.call[name]
        memory = codes.transpose(1, 2)._base
        typed = memory.view(torch.float8_e4m3fn)[:, 1:, 1:, ::2].transpose(1, 2)
        assert typed.data_ptr() == codes.data_ptr()
        found.call[name] = (typed, scales)
    ops.write_rows(**found.call, impl=impl)
    for memory, wanted in zip(found.memory, expected, strict=True):
        same(memory, wanted, rotated=True)


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_rows_are_cast_to_their_buffer(impl: ops.Impl, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    rows = torch.randn(1, 2, 3, 8).to(dtypes[0])
    keys, values = torch.zeros(2, 1, 2, 3, 8, dtype=dtypes[1])
    ops.write_rows(rows, rows, (keys,), (values,), torch.arange(3)[None], impl=impl)
    assert torch.equal(keys, rows.to(dtypes[1]))


@pytest.mark.parametrize("impl", both())
def test_slots_may_be_a_view_of_short_integers(impl: ops.Impl) -> None:
    found = writing(5, 3, 2, 4, 6, (16, 6), ("int8", "plain"), (False, False), "noise", spread=False)
    found.call["slots"][found.call["slots"] > 100] = -1
    expected = found.by_definition()
    found.call["slots"] = torch.stack([found.call["slots"].T.int()] * 2, -1)[..., 0].T
    assert not found.call["slots"].is_contiguous()
    ops.write_rows(**found.call, impl=impl)
    for memory, wanted in zip(found.memory, expected, strict=True):
        same(memory, wanted, rotated=False)


@pytest.mark.parametrize("impl", both())
@pytest.mark.parametrize(
    ("batch", "heads", "new", "capacity"), [(0, 2, 2, 3), (2, 0, 2, 3), (2, 2, 0, 3), (2, 2, 2, 0)]
)
def test_nothing_to_do(impl: ops.Impl, batch: int, heads: int, new: int, capacity: int) -> None:
    rows, slots = torch.randn(batch, heads, new, 4), torch.arange(new).expand(batch, -1)
    buffer = torch.full((batch, heads, capacity, 4), 5.0)
    ops.write_rows(rows, rows, (buffer,), (buffer.clone(),), slots, impl=impl)
    assert torch.equal(buffer, torch.full_like(buffer, 5.0))


def test_the_host_reads_nothing() -> None:
    """There is nothing to read on the meta device."""
    found = writing(0, 2, 2, 3, 5, (16, 16), ("int8", "plain"), (True, False), "noise", spread=False)
    call = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in found.call.items()}
    call |= {name: tuple(part.to("meta") for part in call[name]) for name in ("key_parts", "value_parts")}
    ops.write_rows(**call)


@kernel
def test_keys_and_values_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("specdec_kernels.write_rows")
    counted = Counted(module._write)
    monkeypatch.setattr(module, "_write", counted)
    law(lambda call: call, "triton", 7, 3, 5, 2, 9, (300, 6), ("int8", "fp8"), (True, False), "noise", spread=False)
    assert counted.launches == 1


GOOD = writing(0, 2, 3, 2, 5, (16, 8), ("int8", "plain"), (True, False), "noise", spread=False).call
CODES, SCALES = GOOD["key_parts"]
FOUR = writing(0, 2, 3, 2, 5, (16, 8), ("int4", "plain"), (False, False), "noise", spread=False).call["key_parts"]
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows of three axes": ({"keys": GOOD["keys"][0]}, ShapeError, "keys must be"),
    "fewer values": ({"values": GOOD["values"][:, :, :1]}, ShapeError, r"values must be .* got \[2, 3, 1, 8\]"),
    "whole numbers": (
        {"keys": GOOD["keys"].long()},
        ShapeError,
        "keys must hold floating-point numbers, got torch.int64",
    ),
    "another dimension": ({"keys": GOOD["keys"][..., :8]}, ShapeError, r"key_parts must be \[2, 3, 5, 8\], got"),
    "another capacity": (
        {"value_parts": (GOOD["value_parts"][0][:, :, :4],)},
        ShapeError,
        r"value_parts must be \[2, 3, 5, 8\], got \[2, 3, 4, 8\]",
    ),
    "scales per head": ({"key_parts": (CODES, SCALES[:, :, :1])}, ShapeError, r"key_parts must be \[2, 3, 5, 1\]"),
    "codes without scales": ({"key_parts": (CODES,)}, UnsupportedError, r"got \[torch.int8\]"),
    "short scales": ({"key_parts": (CODES, SCALES.half())}, UnsupportedError, "float32 scales, or .*, got"),
    "scales and zeros": ({"key_parts": (CODES, SCALES, SCALES)}, UnsupportedError, "key_parts must be one buffer"),
    "groups that do not divide": (
        {"key_parts": (*FOUR[:1], FOUR[1][..., :1].expand(-1, -1, -1, 3), FOUR[2])},
        ShapeError,
        r"key_parts must be \[2, 3, 5, 1\], got \[2, 3, 5, 3\]",
    ),
    "fewer zero points": ({"key_parts": (*FOUR[:2], FOUR[2][..., :1])}, ShapeError, r"must be \[2, 3, 5, 2\], got"),
    "unpacked codes": ({"key_parts": (FOUR[0].repeat(1, 1, 1, 2), *FOUR[1:])}, ShapeError, r"must be \[2, 3, 5, 8\]"),
    "no whole groups": (
        {"value_parts": (CODES.byte(), CODES.byte(), SCALES)},
        ShapeError,
        "nvfp4 codes hold multiples of 16 numbers, got 8",
    ),
    "no buffers": ({"value_parts": ()}, UnsupportedError, r"value_parts must be .* got \[\]"),
    "slots of another batch": ({"slots": GOOD["slots"][:1]}, ShapeError, r"slots must be \[2, 2\], got \[1, 2\]"),
    "slots in floating point": ({"slots": GOOD["slots"].float()}, ShapeError, "slots must hold integers"),
    "a mask for slots": ({"slots": GOOD["slots"] > 0}, ShapeError, "slots must hold integers, got torch.bool"),
    "another device": ({"slots": GOOD["slots"].to("meta")}, ShapeError, "one device, got .'cpu', 'meta'"),
    "a slot twice": ({"slots": torch.tensor([[1, 0], [3, 3]])}, ShapeError, r"must differ, got \[3, 3\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    change, error, message = BAD[name]
    unchecked = inspect.unwrap(ops.write_rows)  # outside the tests nobody checks its annotations
    with pytest.raises(error, match=message):
        unchecked(**{**GOOD, **change})


def test_nothing_is_written_where_something_is_refused() -> None:
    keys, new, slots = torch.zeros(1, 1, 4, 2), torch.randn(1, 1, 1, 2), torch.tensor([[1]])
    leaf, codes = torch.zeros(1, 1, 4, 2, requires_grad=True), torch.zeros(1, 1, 4, 0, dtype=torch.int8)
    with pytest.raises(ShapeError, match="value_parts must not be leaves that require gradients"):
        ops.write_rows(new, new, (keys,), (leaf,), slots)
    with pytest.raises(ShapeError, match="int8 codes hold multiples of 1 numbers, got 0"):
        ops.write_rows(new, new[..., :0], (keys,), (codes, torch.zeros(1, 1, 4, 1)), slots)
    assert not keys.any()
    with torch.no_grad():
        ops.write_rows(new, new, (keys,), (leaf,), slots)
    assert torch.equal(leaf[:, :, 1:2], new)


@kernel
def test_the_kernel_names_dtypes_it_does_not_take() -> None:
    found = writing(0, 1, 1, 1, 2, (4, 4), ("plain", "int8"), (False, False), "noise", False, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"got \['torch.float64'\]"):
        ops.write_rows(**found.call, impl="triton")


@kernel
@pytest.mark.parametrize(("dim", "group"), [(80, 16), (24, 8), (12, 3)])
def test_the_kernel_names_dimensions_it_does_not_take(dim: int, group: int) -> None:
    rows, slots = torch.randn(1, 1, 2, dim), torch.tensor([[0, 1]])
    parts = kv.Int4(group=group).encode(torch.zeros_like(rows))
    with pytest.raises(UnsupportedError, match=rf"powers of two, got \[\({dim}, {group}\)\]"):
        ops.write_rows(rows, rows, parts, (torch.zeros_like(rows),), slots, impl="triton")
    ops.write_rows(rows, rows, parts, (torch.zeros_like(rows),), slots)
    assert all(map(torch.equal, parts, kv.Int4(group=group).encode(rows)))


def test_the_codec_turns_back_what_was_rotated() -> None:
    found = writing(1, 1, 2, 3, 3, (64, 80), ("int8", "int8"), (True, True), "outliers", spread=False)
    found.call["slots"] = torch.arange(3)[None]
    ops.write_rows(**found.call)
    for name in ("key", "value"):
        rows = found.call[f"{name}s"]
        decoded = kv.Hadamard(kv.Int8()).decode(found.call[f"{name}_parts"])
        assert float((decoded - rows).norm() / rows.norm()) < 0.02
