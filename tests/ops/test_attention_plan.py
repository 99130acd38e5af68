"""How attention work is cut: enough work items, never more than there is work, and what the article calculates."""

import dataclasses
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _attention_plan
from specdec.ops._attention_plan import Device
from tests.unchecked import unchecked

SHAPES = st.builds(
    ops.AttentionShape,
    batch=st.integers(1, 64),
    heads=st.sampled_from([8, 16, 32]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 128),
    slots=st.integers(1, 70_000),
    dim=st.sampled_from([64, 80, 96, 128, 192, 256, 512]),
    bytes_per_element=st.sampled_from([2, 1, 0.5]),
    value_bytes_per_element=st.sampled_from([None, 2, 1, 0.5]),
)


@given(SHAPES, st.integers(1, 200), st.sampled_from([227, 163, 99, 64]), st.booleans())
def test_a_plan_fits_the_kernel(
    shape: ops.AttentionShape, multiprocessors: int, shared: int, deterministic: bool
) -> None:
    plan = _attention_plan.make_plan(shape, Device(multiprocessors, shared * 1024), deterministic=deterministic)
    assert plan.block in {16, 32, 64, 128}
    assert plan.tile in {16, 32, 64}
    assert _attention_plan._shared_bytes(shape, plan.block, plan.tile, plan.stages, plan.portions) <= shared * 1024
    assert plan.splits >= 1
    assert plan.portions == 1 or plan.splits > 1, "only the sum over runs takes a broken value to all portions"
    if deterministic:
        assert plan.splits * plan.split_tiles * plan.tile >= shape.slots + _attention_plan.FIXED_SPLIT
    else:
        assert plan.splits == 1 or plan.splits * plan.tile <= shape.slots + plan.tile
        items = ops.occupancy(shape, multiprocessors=multiprocessors)
        assert items.splits == 1 or items.work_items <= 2 * multiprocessors


@given(SHAPES, st.integers(1, 200), st.booleans())
def test_a_specialised_plan_fits_its_kernel(
    shape: ops.AttentionShape, multiprocessors: int, deterministic: bool
) -> None:
    device = Device(multiprocessors)
    usual = _attention_plan.make_plan(shape, device, deterministic=deterministic)
    plan = _attention_plan.make_plan(shape, device, deterministic=deterministic, specialised=True)
    if not plan.specialised:
        assert plan == usual
        return
    assert not deterministic
    assert shape.heads // shape.kv_heads <= plan.block, "rows of a tile are all heads of a group"
    assert plan.splits > 1, "parts of sums are all that this kernel writes"
    assert plan.block == 16 * plan.warps, "a warp has 16 rows"
    assert plan.tile in {16, 32, 64}, "a row sees the slots of a tile by the bits of one word"
    width = shape.dim // plan.portions
    assert shape.dims == (shape.dim, shape.dim)
    assert width <= 256, "sums of a row, in float32, fill the registers of the two threads that hold it"
    if shape.bytes_per_element > 1:
        bytes_of_tiles = 2 * plan.stages * plan.tile * (shape.dim + width)
        assert 2 * plan.block * shape.dim + bytes_of_tiles + 2048 <= device.shared_memory
    else:
        bytes_of_tiles = plan.stages * plan.tile * (shape.dim + width + 8) + 2 * 2 * plan.tile * width
        assert 2 * (2 * plan.block * shape.dim + bytes_of_tiles + 2048) <= device.shared_memory


def test_what_the_specialised_kernel_was_made_for() -> None:
    made_for = ((2, 8, 256, 128, 1), (4, 6, 256, 128, 1), (2, 8, 512, 128, 2), (8, 4, 128, 64, 1))
    for kv_heads, groups, dim, block, portions in made_for:
        shape = ops.AttentionShape(1, kv_heads * groups, kv_heads, 16, 32_784, dim)
        plan = _attention_plan.make_plan(shape, Device(), deterministic=False, specialised=True)
        assert plan.specialised
        assert (plan.block, plan.portions, plan.split_tiles) == (block, portions, 0)
        assert 120 <= plan.splits * plan.portions * kv_heads <= 132
        codes = dataclasses.replace(shape, bytes_per_element=1)
        plan = _attention_plan.make_plan(codes, Device(), deterministic=False, specialised=True)
        assert plan.specialised == (dim == 128)
        assert not plan.specialised or 2 * 128 <= plan.splits * kv_heads <= 2 * 132
        alone = dataclasses.replace(shape, rows=1)
        assert not _attention_plan.make_plan(alone, Device(), deterministic=False, specialised=True).specialised


def test_short_runs_do_not_go_to_the_specialised_kernel() -> None:
    for kv_heads, groups, dim, least in ((2, 8, 256, 66 * 3 * 64), (4, 6, 256, 33 * 3 * 64), (2, 8, 512, 33 * 64)):
        for slots in (least, least + 1):
            shape = ops.AttentionShape(1, kv_heads * groups, kv_heads, 16, slots, dim)
            plan = _attention_plan.make_plan(shape, Device(), deterministic=False, specialised=True)
            assert plan.specialised == (slots > least)


@given(SHAPES, st.integers(1, 200))
def test_deterministic_runs_do_not_follow_batch_rows_or_device(shape: ops.AttentionShape, multiprocessors: int) -> None:
    other = dataclasses.replace(shape, batch=shape.batch + 1)
    first, second = (
        _attention_plan.make_plan(each, Device(count), deterministic=True)
        for each, count in ((shape, multiprocessors), (other, 132))
    )
    assert (first.tile, first.split_tiles) == (second.tile, second.split_tiles)


@pytest.mark.parametrize("change", [{"heads": 3}, {"kv_heads": 0}, {"dim": 0}])
def test_a_shape_that_is_none_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match="cannot share"):
        ops.AttentionShape(**{"batch": 1, "heads": 8, "kv_heads": 2, "rows": 1, "slots": 9, "dim": 64, **change})


@pytest.mark.parametrize(
    "change", [{"heads": "8"}, {"dim": 64.0}, {"batch": None}, {"value_dim": "64"}, {"rows": -1}, {"slots": True}]
)
def test_sizes_are_whole_numbers(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, _attention_plan)  # outside the tests nobody checks annotations
    with pytest.raises(ShapeError, match="sizes must be whole numbers"):
        ops.AttentionShape(**{"batch": 1, "heads": 8, "kv_heads": 2, "rows": 1, "slots": 9, "dim": 64, **change})


@pytest.mark.parametrize("size", ["a", 0, -1, 0.3, 3, float("nan"), float("inf"), [1], True])
def test_numbers_take_bytes(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, _attention_plan)
    for name in ("bytes_per_element", "value_bytes_per_element"):
        with pytest.raises(ShapeError, match="a number takes one of"):
            ops.AttentionShape(1, 8, 2, 1, 9, 64, **{name: size})


@pytest.mark.parametrize("count", ["a", 0, 2.5, float("nan"), True])
def test_multiprocessors_are_counted(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, _attention_plan)
    with pytest.raises(ShapeError, match="multiprocessors must be a whole number from 1 on"):
        _attention_plan.occupancy(ops.AttentionShape(1, 8, 2, 1, 9, 64), multiprocessors=count)


def test_nothing_cannot_be_cut() -> None:
    empty = ops.AttentionShape(batch=1, heads=8, kv_heads=2, rows=1, slots=0, dim=64)
    with pytest.raises(ShapeError, match="nothing to cut"):
        ops.occupancy(empty)


def test_bytes_and_occupancy() -> None:
    shape = ops.AttentionShape(batch=2, heads=32, kv_heads=8, rows=16, slots=1024, dim=128, value_dim=64)
    assert shape.cache_bytes == 2 * 8 * 1024 * (128 + 64) * 2
    codes = dataclasses.replace(shape, bytes_per_element=1, value_bytes_per_element=0.5)
    assert codes.cache_bytes == 2 * 8 * 1024 * (128 + 32)
    whole = ops.occupancy(shape, multiprocessors=132)
    assert whole.unsplit == 16
    assert whole.per_multiprocessor == whole.work_items / 132
    assert "2 query" not in str(whole)


def test_occupancy_tells_of_the_kernel_that_is_taken() -> None:
    shape = ops.AttentionShape(batch=1, heads=24, kv_heads=4, rows=16, slots=32_768, dim=256)
    everywhere, specialised = (ops.occupancy(shape, specialised=can) for can in (False, True))
    assert (everywhere.query_blocks, everywhere.splits) == (2, 16)
    assert (specialised.query_blocks, specialised.splits) == (1, 33), "128 rows with room for 8 heads of a group"
    short = dataclasses.replace(shape, slots=2048)
    assert ops.occupancy(short, specialised=True) == ops.occupancy(short)
    assert ops.occupancy(shape, specialised=True, deterministic=True) == ops.occupancy(shape, deterministic=True)


@pytest.mark.parametrize("size", [4, 8, 0.5])
def test_the_specialised_kernel_takes_half_precision_and_bytes(size: float) -> None:
    shape = ops.AttentionShape(1, 16, 2, 16, 32_768, 256, bytes_per_element=size)
    assert ops.occupancy(shape, specialised=True) == ops.occupancy(shape)


@pytest.mark.parametrize("device", ["cpu", "meta", "nonsense", "cuda:1000", 1000])
def test_occupancy_of_a_device_that_is_not_there_is_refused(device: Any) -> None:
    shape = ops.AttentionShape(1, 16, 2, 7, 100, 64)
    with pytest.raises(UnsupportedError, match="device must be a CUDA device that is there"):
        inspect.unwrap(ops.occupancy)(shape, device)


def test_occupancy_of_what_is_no_shape_or_device_is_refused() -> None:
    shape = ops.AttentionShape(1, 16, 2, 7, 100, 64)
    with pytest.raises(ShapeError, match=r"must be an ops\.AttentionShape, got tuple"):
        inspect.unwrap(ops.occupancy)((1, 16, 2, 7, 100, 64))
    with pytest.raises(ShapeError, match="from 1 on, got -1"):
        ops.occupancy(shape, multiprocessors=-1)
