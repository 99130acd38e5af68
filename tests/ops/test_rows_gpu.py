"""Writing and moving rows on a GPU: the compiled kernels against the codecs, row by row, and against a copy.

pytest -m gpu tests/ops/test_rows_gpu.py
"""

import itertools
import random

import pytest
import torch
from torch import Tensor

from specdec import ops
from tests.ops.stored_rows import FORMS, KINDS, moving, same, writing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DIMS = [64, 80, 96, 128, 192, 256, 512]
STYLES = ["noise", "outliers", "zeros", "ties", "tiny"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("forms", list(itertools.product(sorted(FORMS), repeat=2)), ids="-".join)
def test_written_rows_are_those_of_the_codecs(forms: tuple[str, str], dtype: torch.dtype) -> None:
    order = random.Random(f"{forms} {dtype}")
    for _ in range(5):
        found = writing(
            seed=order.randrange(2**32),
            batch=order.choice([1, 2, 5]),
            heads=order.choice([1, 2, 3, 8, 32]),
            new=order.choice([1, 7, 64]),
            capacity=order.choice([1, 60, 300]),
            dims=(order.choice(DIMS), order.choice(DIMS)),
            forms=forms,
            rotate=(order.random() < 0.5, order.random() < 0.5),
            style=order.choice(STYLES),
            spread=order.random() < 0.3,
            dtype=dtype,
            device="cuda",
        )
        expected = found.by_definition()
        ops.write_rows(**found.call, impl="triton")
        for memory, wanted, *kind in zip(found.memory, expected, found.rotated, found.forms, strict=True):
            same(memory, wanted, *kind)


def test_rotated_rows_are_rounded_to_the_buffer() -> None:
    rows = torch.randn(2, 4, 9, 128, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.zeros(2, 2, 4, 9, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(9, device="cuda").expand(2, -1)
    ops.write_rows(rows, rows, (keys,), (values,), slots, rotate_keys=True, impl="triton")
    assert torch.equal(values, rows)
    torch.testing.assert_close(keys, ops.hadamard(rows).bfloat16(), rtol=2**-7, atol=0)


def test_every_e4m3_number_is_rounded_right() -> None:
    """All float16 numbers up to the largest; what lies half way between two is among them."""
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.float16)
    every = every[every.abs() <= 448]
    rows = torch.nn.functional.pad(every, (0, -len(every) % 511)).view(-1, 511)
    rows = torch.cat([torch.full_like(rows[:, :1], 448), rows], 1)[None, None]
    keys = rows.new_zeros(rows.shape, dtype=torch.uint8), rows.new_zeros(*rows.shape[:3], 1, dtype=torch.float32)
    slots = torch.arange(rows.shape[2], device="cuda")[None]
    ops.write_rows(rows, rows, keys, (torch.zeros_like(rows),), slots, impl="triton")
    assert torch.equal(keys[0], rows.float().to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("style", ["any", "in place", "outside"])
def test_moved_rows_are_those_of_a_copy(style: str) -> None:
    order = random.Random(style)
    for _ in range(25):  # each is compiled for
        kinds = [
            (order.choice([1, 5, 30]), order.choice([1, 2, 8]), order.choice([1, *DIMS]), order.choice(KINDS))
            for _ in range(order.randint(1, 8))
        ]
        longest = order.choice([1, 8, 16, 64, 100])
        found = moving(order.randrange(2**32), order.choice([1, 3]), longest, 128, kinds, style, "cuda")
        expected = found.by_definition()
        ops.move_rows(**found.call, impl="triton")
        for memory, wanted in zip(found.memory, expected, strict=True):
            assert torch.equal(memory, wanted)


def test_a_path_that_overlaps_itself_is_read_before_it_is_written() -> None:
    """Every row moves by one slot: a thread that wrote early would destroy what its neighbour has yet to read."""
    nodes = torch.arange(1, 65, device="cuda").expand(4, -1)
    counts, lengths = (torch.full((4,), count, device="cuda") for count in (64, 3))
    for width in (16, 128, 512):
        for _ in range(50):
            buffer = torch.randn(8, 4, 8, 70, width, device="cuda", dtype=torch.bfloat16)
            before = buffer.clone()
            ops.move_rows((buffer,), nodes, counts, lengths, impl="triton")
            assert torch.equal(buffer[:, :, :, 3:67], before[:, :, :, 4:68])
            assert torch.equal(buffer[:, :, :, :3], before[:, :, :, :3])
            assert torch.equal(buffer[:, :, :, 67:], before[:, :, :, 67:])


def test_h1_offsets_beyond_two_to_the_thirty_first() -> None:
    """Slots at the far end of a cache that is larger than an int32 can index."""
    slots, dim = 2**31 // 64 + 1024, 64
    codes = torch.zeros(1, 1, slots, dim, dtype=torch.int8, device="cuda")
    scales = torch.zeros(1, 1, slots, 1, device="cuda")
    values = torch.zeros(1, 1, slots, dim, dtype=torch.float16, device="cuda")
    rows = torch.randn(1, 1, 8, dim, device="cuda", dtype=torch.float16)
    place = torch.arange(slots - 8, slots, device="cuda")[None]
    ops.write_rows(rows, rows, (codes, scales), (values,), place, impl="triton")
    assert torch.equal(values[:, :, -8:], rows)
    assert torch.equal(codes[:, :, -8:], FORMS["int8"].encode(rows)[0])
    assert not codes[:, :, :-8].any()

    def index(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device="cuda")

    ops.move_rows((values[None], codes[None]), index(1, 3)[None], index(2), index(slots - 8), impl="triton")
    assert torch.equal(values[0, 0, -8:-6], rows[0, 0, [1, 3]])
    assert torch.equal(values[0, 0, -6:], rows[0, 0, 2:])


def test_a_captured_graph_follows_the_slots() -> None:
    """Shapes are fixed, contents are not: the graph of one round serves the next."""
    found = writing(1, 2, 4, 7, 40, (128, 128), ("int8", "plain"), (True, False), "noise", False, device="cuda")
    call, parts = found.call, (*found.call["key_parts"], *found.call["value_parts"])
    nodes = torch.tensor([[0, 2, 5], [0, 1, 6]], device="cuda")
    counts, lengths = torch.tensor([3, 2], device="cuda"), torch.tensor([4, 9], device="cuda")

    def step() -> None:
        ops.write_rows(**call)
        ops.move_rows(tuple(part[None] for part in parts), nodes, counts, lengths)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for start in (4, 20, 38):
        lengths.copy_(torch.tensor([start, start // 2], device="cuda"))
        call["slots"].copy_(lengths[:, None] + torch.arange(7, device="cuda"))
        before = [part.clone() for part in parts]
        graph.replay()
        replayed = [part.clone() for part in parts]
        for part, content in zip(parts, before, strict=True):
            part.copy_(content)
        step()
        for part, content in zip(parts, replayed, strict=True):
            torch.testing.assert_close(part, content, rtol=0, atol=0, equal_nan=True)
