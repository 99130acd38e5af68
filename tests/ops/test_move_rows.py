"""Moving accepted rows against its definition, a copy of the cache: the reference and the interpreted kernel."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from tests.ops.stored_rows import MOVINGS, Counted, Moving, moving
from tests.trees.random_trees import caught

Move = Callable[..., None]
kernel = pytest.mark.skipif(not ops.available("move_rows", "cpu")[0], reason="triton is not installed")


def check(move: Move, found: Moving) -> None:
    expected = found.by_definition()
    move(**found.call)
    for memory, wanted in zip(found.memory, expected, strict=True):
        assert torch.equal(memory, wanted)


def law(move: Move, **inputs: Any) -> None:
    check(move, moving(**inputs))


def reference(**call: Any) -> None:
    ops.move_rows(**call, impl="reference")


def interpreted(**call: Any) -> None:
    ops.move_rows(**call, impl="triton")


def both() -> list[Any]:
    return [reference, pytest.param(interpreted, marks=kernel)]


@given(**MOVINGS)
def test_the_reference_is_the_definition(**inputs: Any) -> None:
    law(reference, **inputs)


@kernel
@given(**MOVINGS)
def test_the_kernel_is_the_definition(**inputs: Any) -> None:
    law(interpreted, **inputs)


def one_by_one(order: Callable[[range], Any], read_first: bool = False) -> Move:
    """Moves slot upon slot in some order."""

    def move(buffers: tuple[Tensor, ...], nodes: Tensor, counts: Tensor, lengths: Tensor) -> None:
        for buffer in buffers:
            before = buffer.clone() if read_first else buffer
            for row, count in enumerate(counts.tolist()):
                for place in order(range(count)):
                    target, source = int(lengths[row]) + place, int(lengths[row] + nodes[row, place])
                    if target >= 0 and source < buffer.shape[3]:
                        buffer[:, row, :, target] = before[:, row, :, source]

    return move


def test_threads_in_any_step_need_a_read_before_the_writes() -> None:
    """Rows move forward only, so one after the other they may go in place; in another order they may not."""
    found = moving(0, 2, 9, 20, [(2, 2, 4, torch.float32)])
    check(one_by_one(lambda places: places), found)
    check(one_by_one(lambda places: reversed(places), read_first=True), found)
    caught(law, one_by_one(lambda places: reversed(places)), **MOVINGS)
    caught(law, one_by_one(lambda places: [*places[1::2], *places[::2]]), **MOVINGS)


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "all counts": lambda call: {**call, "counts": torch.full_like(call["counts"], call["nodes"].shape[1])},
    "one too few": lambda call: {**call, "counts": call["counts"] - 1},
    "lengths that count the root": lambda call: {**call, "lengths": call["lengths"] + 1},
    "nodes in order": lambda call: {**call, "nodes": torch.arange(call["nodes"].shape[1]).expand_as(call["nodes"])},
    "one layer": lambda call: {**call, "buffers": tuple(buffer[:1] for buffer in call["buffers"])},
    "one buffer": lambda call: {**call, "buffers": call["buffers"][:1]},
    "the first row's path": lambda call: {**call, "nodes": call["nodes"][:1].expand_as(call["nodes"])},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nobody looks at numbers."""
    monkeypatch.setattr(importlib.import_module("specdec.ops.move_rows"), "legible", lambda *_: False)
    caught(law, lambda **call: reference(**WRONG[name](call)), **MOVINGS)


@kernel
@pytest.mark.parametrize(("run", "numbers"), [(1, 4096), (4, 4096), (4, 16), (64, 64)])
def test_any_cut_of_the_work_gives_the_same(run: int, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of several runs, rows of several pieces, both with a rest."""
    module = importlib.import_module("specdec_kernels.move_rows")
    monkeypatch.setattr(module, "RUN", run)
    monkeypatch.setattr(module, "NUMBERS", numbers)
    for seed in range(4):
        check(interpreted, moving(seed, 2, 11, 20, [(2, 1, 20, torch.float32), (1, 2, 24, torch.float16)]))


@pytest.mark.parametrize("move", both())
def test_a_path_longer_than_a_run(move: Move) -> None:
    check(move, moving(3, 1, 150, 160, [(1, 1, 8, torch.int8), (1, 1, 1, torch.float32)]))


@kernel
def test_all_buffers_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("specdec_kernels.move_rows")
    counted = Counted(module._move)
    monkeypatch.setattr(module, "_move", counted)
    codes, scales = (3, 4, 64, torch.int8), (3, 4, 1, torch.float32)
    check(
        interpreted,
        moving(1, 2, 5, 12, [codes, scales, codes, scales, (2, 1, 80, torch.bfloat16), (1, 6, 3, torch.float64)]),
    )
    assert counted.launches == 1


@pytest.mark.parametrize("move", both())
def test_transposed_heads_and_short_integers(move: Move) -> None:
    """Buffers with heads behind slots in memory, indices as views."""
    found = moving(4, 3, 6, 12, [(2, 3, 16, torch.float16), (2, 3, 16, torch.int8)])
    expected = found.by_definition()
    buffers = tuple(buffer.transpose(2, 3).contiguous().transpose(2, 3) for buffer in found.call["buffers"])
    assert not any(buffer.is_contiguous() for buffer in buffers)
    nodes = torch.stack([found.call["nodes"].T.int()] * 2, -1)[..., 1].T
    move(buffers=buffers, nodes=nodes, counts=found.call["counts"].int(), lengths=found.call["lengths"])
    for buffer, memory, original in zip(buffers, expected, found.call["buffers"], strict=True):
        wanted = memory.view(original.dtype)[..., : original.shape[4]]
        assert torch.equal(buffer.view(torch.int8), wanted.contiguous().view(torch.int8))


@pytest.mark.parametrize("move", both())
@pytest.mark.parametrize("sizes", [(0, 2, 1, 4, 3), (2, 0, 1, 4, 3), (2, 1, 0, 4, 3), (2, 1, 1, 0, 3), (2, 1, 1, 4, 0)])
@pytest.mark.parametrize("path", [0, 2])
def test_nothing_to_do(move: Move, sizes: tuple[int, ...], path: int) -> None:
    buffer = torch.zeros(sizes)
    counts = torch.full((sizes[1],), path)
    nodes = torch.arange(1, path + 1).expand(sizes[1], -1)
    move(buffers=(buffer,), nodes=nodes, counts=counts, lengths=counts)
    assert not buffer.any()


def test_the_host_reads_nothing() -> None:
    """There is nothing to read on the meta device."""
    call = moving(0, 2, 5, 9, [(2, 2, 4, torch.float16)]).call
    meta = {name: value.to("meta") for name, value in call.items() if isinstance(value, Tensor)}
    ops.move_rows(tuple(buffer.to("meta") for buffer in call["buffers"]), **meta)


GOOD = moving(0, 2, 5, 9, [(2, 2, 4, torch.float16)]).call
BUFFER = torch.zeros(3, 2, 2, 12, 4)


def twice(row: Any) -> Tensor:
    """The same for both batch rows."""
    return torch.tensor([row, row])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no buffers": ({"buffers": ()}, ShapeError, "1 to 8 buffers, got 0"),
    "too many buffers": ({"buffers": (BUFFER,) * 9}, ShapeError, "1 to 8 buffers, got 9"),
    "one layer's buffer": (
        {"buffers": (BUFFER[0],)},
        ShapeError,
        r"a buffer must be \[layers, 2, .* got \[2, 2, 12, 4\]",
    ),
    "another batch": ({"buffers": (BUFFER, BUFFER[:, :1])}, ShapeError, r"got \[3, 1, 2, 12, 4\]"),
    "columns first": ({"buffers": (BUFFER.mT,)}, ShapeError, "last dimension of a buffer must be contiguous"),
    "wide elements": ({"buffers": (BUFFER.to(torch.complex128),)}, UnsupportedError, "got torch.complex128"),
    "a flat path": ({"nodes": GOOD["nodes"][0]}, ShapeError, r"nodes must be \[batch, path\], got \[5\]"),
    "counts of another batch": ({"counts": GOOD["counts"][:1]}, ShapeError, r"counts must be \[2\], got \[1\]"),
    "lengths per node": ({"lengths": GOOD["nodes"]}, ShapeError, r"lengths must be \[2\], got \[2, 5\]"),
    "counts in floating point": ({"counts": torch.ones(2)}, ShapeError, "counts must hold integers, got torch.float32"),
    "a mask for nodes": ({"nodes": GOOD["nodes"] > 0}, ShapeError, "nodes must hold integers, got torch.bool"),
    "another device": ({"lengths": GOOD["lengths"].to("meta")}, ShapeError, "one device, got .'cpu', 'meta'"),
    "a path that turns back": (
        {"nodes": twice([0, 3, 2, 4, 5]), "counts": twice(4)},
        ShapeError,
        "must rise from 0 on",
    ),
    "a node twice": ({"nodes": twice([0, 2, 2, 4, 5]), "counts": twice(3)}, ShapeError, "must rise from 0 on"),
    "a node before the tree": (
        {"nodes": twice([-1, 2, 3, 4, 5]), "counts": twice(1)},
        ShapeError,
        "must rise from 0 on",
    ),
    "more nodes than there are": ({"counts": twice(6)}, ShapeError, "counts must be 0 to 5, .* got 6"),
    "fewer than none": ({"counts": twice(-1)}, ShapeError, "counts must be 0 to 5, .* got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    change, error, message = BAD[name]
    unchecked = inspect.unwrap(ops.move_rows)  # outside the tests nobody checks its annotations
    with pytest.raises(error, match=message):
        unchecked(**{**GOOD, **change})
