"""Random problems for the ops that write and move rows of a cache, and what their answer is by definition: a loop."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec import kv
from specdec.ops._stored_rows import form_of
from specdec.protocols import KVCodec


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


FORMS: dict[str, KVCodec] = {
    "plain": kv.Plain(),
    "int8": kv.Int8(),
    "fp8": kv.FP8(),
    "int4": kv.Int4(group=8),
    "nvfp4": kv.NVFP4(),
}
FOUR_BITS = {"int4", "nvfp4"}
POISON = 77
"""What stands in integer buffers that nobody has written; NaN stands in the others."""


def codec(form: str, rotate: bool) -> KVCodec:
    """The codec that `write_rows` repeats."""
    return kv.Hadamard(FORMS[form]) if rotate else FORMS[form]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, spread: bool, device: str) -> tuple[Tensor, Tensor]:
    """A buffer, and all memory around it: heads behind slots and every second number, if spread."""
    batch, heads, capacity, width = shape
    memory = torch.zeros(batch, capacity + 1, heads + 1, 2 * width, device=device).to(dtype)
    memory.fill_(torch.nan if dtype.is_floating_point else POISON)
    if spread:
        return memory[:, 1:, 1:, ::2].transpose(1, 2), memory
    whole = memory.flatten()[: batch * heads * capacity * width].clone().view(shape)
    return whole, whole


@dataclass(frozen=True)
class Writing:
    """Arguments of `write_rows`, all memory that its buffers lie in, whether what lies there is rotated, its form."""

    call: dict[str, Any]
    memory: list[Tensor]
    rotated: list[bool]
    forms: list[str]

    def by_definition(self) -> list[Tensor]:
        """The memory after row upon row has been encoded and written; the memory itself stays as it is."""
        call, kept = self.call, [memory.clone() for memory in self.memory]
        for name in ("key", "value"):
            rows, parts = call[f"{name}s"], call[f"{name}_parts"]
            form = form_of(parts)
            for row, index in torch.cartesian_prod(*map(torch.arange, call["slots"].shape)).tolist():
                slot = int(call["slots"][row, index])
                if 0 <= slot < parts[0].shape[2]:
                    encoded = codec(form, call[f"rotate_{name}s"]).encode(rows[row, :, index])
                    for part, code in zip(parts, encoded, strict=True):
                        part[row, :, slot] = code
        written = [memory.clone() for memory in self.memory]
        for memory, before in zip(self.memory, kept, strict=True):
            memory.copy_(before)
        return written


def rows(generator: torch.Generator, shape: tuple[int, ...], style: str, dtype: torch.dtype) -> Tensor:
    """New rows as a model hands them out, heads behind tokens in memory; NaN follows each in memory."""
    batch, heads, new, dim = shape
    noise = torch.randn(batch, new, heads, dim, generator=generator, device=generator.device)
    if style == "outliers":
        noise[..., :: max(1, dim // 4)] *= 20
    elif style == "zeros":
        noise[:, ::2] = 0
    elif style == "ties":
        noise = (noise * 4).round() / 2
        noise[..., 0] = 127
    elif style == "tiny":
        noise *= 1e-6 if dtype == torch.float16 else 1e-41
    wider = torch.full((batch, new, heads, dim + 3), torch.nan, device=generator.device)
    wider[..., :dim] = noise
    return wider.to(dtype)[..., :dim].transpose(1, 2)


def writing(
    seed: int,
    batch: int,
    heads: int,
    new: int,
    capacity: int,
    dims: tuple[int, int],
    forms: tuple[str, str],
    rotate: tuple[bool, bool],
    style: str,
    spread: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Writing:
    """Rows for distinct slots of each batch row, some of which lie outside the buffers."""
    generator = torch.Generator(device).manual_seed(seed)
    order = random.Random(seed)
    outside = [-1, -9, capacity, capacity + 5, 2**40]
    slots = [
        [slot if slot < capacity else order.choice(outside) for slot in order.sample(range(capacity + new + 2), new)]
        for _ in range(batch)
    ]
    call: dict[str, Any] = {"slots": torch.tensor(slots, device=device).view(batch, new)}
    memory, rotated, held = [], [], []
    for name, dim, form, turned in zip(("key", "value"), dims, forms, rotate, strict=True):
        if form in FOUR_BITS:
            dim = max(16, 1 << (dim - 1).bit_length())  # the kernel writes powers of two
        call[f"{name}s"] = rows(generator, (batch, heads, new, dim), style, dtype)
        call[f"rotate_{name}s"] = turned
        like = codec(form, turned).encode(call[f"{name}s"][:, :, :0])
        made = [poisoned((batch, heads, capacity, part.shape[3]), part.dtype, spread, device) for part in like]
        call[f"{name}_parts"] = tuple(buffer for buffer, _ in made)
        memory += [around for _, around in made]
        rotated += [turned] * len(made)
        held += [form if part.element_size() == 1 and form in FOUR_BITS and part is like[0] else "" for part in like]
    return Writing(call, memory, rotated, held)


def ordered(codes: Tensor, form: str = "") -> Tensor:
    """Codes so that neighbours differ by one: floats have their sign in front; of four bits there are two in a byte."""
    numbers = codes.int()
    if form:
        numbers = torch.stack([numbers & 15, numbers >> 4])
    sign = {"": 128 if codes.dtype == torch.uint8 else 256, "int4": 16, "nvfp4": 8}[form]
    return torch.where(numbers < sign, numbers, sign - numbers)


def same(found: Tensor, expected: Tensor, rotated: bool, form: str = "") -> None:
    """Equal; rotated numbers may differ in their last bit, and a code of them by one step."""
    if found.is_floating_point():
        rounding = (1e-6 if found.dtype != torch.float16 else 1e-3) if rotated else 0
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding / 10, equal_nan=True)
    else:
        assert int((ordered(found, form) - ordered(expected, form)).abs().amax()) <= rotated


WRITINGS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32),
    "batch": st.integers(1, 3),
    "heads": st.integers(1, 5),
    "new": st.integers(1, 4),
    "capacity": st.integers(1, 9),
    "dims": st.tuples(*[st.sampled_from([1, 6, 16, 32, 80])] * 2),
    "forms": st.tuples(*[st.sampled_from(sorted(FORMS))] * 2),
    "rotate": st.tuples(*[st.booleans()] * 2),
    "style": st.sampled_from(["noise", "outliers", "zeros", "ties", "tiny"]),
    "spread": st.booleans(),
}


@dataclass(frozen=True)
class Moving:
    """Arguments of `move_rows`, and all memory that its buffers lie in."""

    call: dict[str, Any]
    memory: list[Tensor]

    def by_definition(self) -> list[Tensor]:
        """The memory after slot upon slot has been copied from a copy; the memory itself stays as it is."""
        call, kept = self.call, [memory.clone() for memory in self.memory]
        for buffer in call["buffers"]:
            before = buffer.clone()
            for row, count in enumerate(call["counts"].tolist()):
                for place in range(count):
                    target = int(call["lengths"][row]) + place
                    source = int(call["lengths"][row]) + int(call["nodes"][row, place])
                    if target >= 0 and source < buffer.shape[3]:
                        buffer[:, row, :, target] = before[:, row, :, source]
        moved = [memory.clone() for memory in self.memory]
        for memory, content in zip(self.memory, kept, strict=True):
            memory.copy_(content)
        return moved


KINDS = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def moving(
    seed: int,
    batch: int,
    longest: int,
    nodes: int,
    kinds: list[tuple[int, int, int, torch.dtype]],
    style: str = "any",
    device: str = "cpu",
) -> Moving:
    """Paths through trees of up to `nodes` nodes, in buffers of (layers, heads, width, dtype) full of random bits."""
    order = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    counts = [min(order.randint(0, longest), nodes) for _ in range(batch)]
    lengths = [order.choice([0, order.randint(0, 20)]) for _ in range(batch)]
    if style == "outside":
        lengths = [length - order.randint(0, 4) for length in lengths]
    capacity = max(lengths) + nodes - (order.randint(0, nodes) if style == "outside" else -1)
    # What follows a path must not be looked at.
    table = torch.full((batch, longest), order.choice([-1, nodes - 1, 10**6]), device=device)
    for row, count in enumerate(counts):
        path = range(count) if style == "in place" else sorted(order.sample(range(nodes), count))
        table[row, :count] = torch.tensor(list(path), device=device, dtype=torch.int64)
    memory, buffers = [], []
    for layers, heads, width, dtype in kinds:
        size = width * dtype.itemsize
        padding = order.choice([0, dtype.itemsize, 64])  # rows of every alignment
        shape = (layers, batch, heads, max(1, capacity), size + padding)
        whole = torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)
        memory.append(whole)
        buffers.append(whole.view(dtype)[..., :width])
    call = {
        "buffers": tuple(buffers),
        "nodes": table,
        "counts": torch.tensor(counts, device=device),
        "lengths": torch.tensor(lengths, device=device),
    }
    return Moving(call, memory)


MOVINGS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32),
    "batch": st.integers(1, 3),
    "longest": st.integers(1, 9),
    "nodes": st.integers(1, 20),
    "kinds": st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 16, 64]), st.sampled_from(KINDS)),
        min_size=1,
        max_size=4,
    ),
    "style": st.sampled_from(["any", "any", "any", "in place", "outside"]),
}
