"""Moves the rows of an accepted path to where the next round expects them, in all layers of a cache.

The nodes of a tree lie behind the committed slots in the order in which they were written. Those that are accepted are
scattered among them and become the slots right behind: slot `lengths[b] + i` becomes what `lengths[b] + nodes[b, i]`
was. How many move is a number on the device, so the host reads nothing and a captured CUDA graph can do it.
"""

import itertools
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.ops import _dispatch
from specdec.ops._checks import demands, legible, several, tensors

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_BUFFERS = 8


def move_rows(
    buffers: tuple[Tensor, ...],
    nodes: Int[Tensor, "batch path"],
    counts: Int[Tensor, " batch"],
    lengths: Int[Tensor, " batch"],
    *,
    impl: _dispatch.Impl = "auto",
) -> None:
    """Moves the rows of each accepted path to the front of its tree, in place; the kernel takes one launch.

    Everything is read before it is written. What lies behind the path stays as it is.

    Args:
        buffers: one to eight, each `[layers, batch, heads, capacity, width]`: all layers of the keys, of their scales,
            and so on. Dtypes and all sizes but the batch may differ; any strides, the last dimension contiguous.
        nodes: the pending rows on the path, in order: increasing, so that `nodes[b, i] >= i`. What follows the first
            `counts[b]` is not looked at.
        counts: nodes on the path of each batch row.
        lengths: committed slots of each batch row, the path not included. A slot outside a buffer is neither read nor
            written.
        impl: which implementation runs; see `specdec.ops`. Both do the same to the last bit.

    Raises:
        ShapeError: for shapes that do not belong together, indices that are no integers, devices that differ, and, on a
            CPU, paths that do not rise.
        UnsupportedError: for elements of another size than 1, 2, 4 or 8 bytes, or if `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> keys = torch.arange(7.0).view(1, 1, 1, 7, 1)  # two committed slots, a tree of four nodes, an unused slot
        >>> ops.move_rows((keys,), torch.tensor([[0, 2, 3]]), counts=torch.tensor([3]), lengths=torch.tensor([2]))
        >>> keys.flatten().tolist()
        [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 6.0]
    """
    several("move_rows", "buffers", buffers)
    tensors("move_rows", {"nodes": nodes, "counts": counts, "lengths": lengths})
    _check(buffers, nodes, counts, lengths)
    kernel: Any = _dispatch.choose("move_rows", impl, nodes.device)
    filled = tuple(buffer for buffer in buffers if buffer.numel())
    if not filled or nodes.numel() == 0:
        return
    if kernel is not None:
        kernel.launch(tuple(map(_in_words, filled)), nodes, counts, lengths)
        return
    for buffer in filled:
        _move(buffer.view(INTEGERS[buffer.element_size()]), nodes, counts, lengths)


def _move(buffer: Tensor, nodes: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """The definition in plain torch. A row that stays repeats the move of one that does not."""
    place = torch.arange(nodes.shape[1], device=nodes.device)
    source, target = lengths[:, None] + nodes, lengths[:, None] + place
    moved = (place < counts[:, None]) & (nodes > place) & (target >= 0) & (source < buffer.shape[3])
    order = torch.where(moved, place, moved.int().argmax(1, keepdim=True))
    # Where nothing moves, slot 0 is written as it is.
    still = ~moved.any(1, keepdim=True)
    source, target = (slots.gather(1, order).masked_fill(still, 0).long() for slots in (source, target))
    row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    buffer[:, row, :, target] = buffer[:, row, :, source]


def _in_words(buffer: Tensor) -> Tensor:
    """The same memory as integers, of four bytes if rows and strides are multiples of 16 of them, as compilers ask."""
    size = buffer.element_size()
    steps = (buffer.shape[4], buffer.storage_offset(), *buffer.stride()[:4])
    return buffer.view(torch.int32 if size < 4 and all(step * size % 64 == 0 for step in steps) else INTEGERS[size])


def _check(buffers: tuple[Tensor, ...], nodes: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands("move_rows")
    demand(0 < len(buffers) <= MOST_BUFFERS, f"there must be 1 to {MOST_BUFFERS} buffers, got {len(buffers)}")
    demand(nodes.dim() == 2, f"nodes must be [batch, path], got {list(nodes.shape)}")
    batch = nodes.shape[0]
    for name, given in (("nodes", nodes), ("counts", counts), ("lengths", lengths)):
        demand(name == "nodes" or list(given.shape) == [batch], f"{name} must be [{batch}], got {list(given.shape)}")
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        demand(whole, f"{name} must hold integers, got {given.dtype}")
    if legible(nodes, counts):
        for path, count in zip(nodes.tolist(), counts.tolist(), strict=True):
            rising = all(node < later for node, later in itertools.pairwise([-1, *path[:count]]))
            demand(0 <= count <= len(path), f"counts must be 0 to {len(path)}, as many as there are nodes, got {count}")
            demand(rising, f"nodes must rise from 0 on, got {path} with a count of {count}")
    for buffer in buffers:
        demand(
            buffer.dim() == 5 and buffer.shape[1] == batch,
            f"a buffer must be [layers, {batch}, heads, capacity, width], got {list(buffer.shape)}",
        )
        demand(
            buffer.stride(4) == 1 or buffer.shape[4] == 1,
            f"the last dimension of a buffer must be contiguous, got strides {list(buffer.stride())}",
        )
        if buffer.element_size() not in INTEGERS:
            raise UnsupportedError(f"move_rows: elements must have 1, 2, 4 or 8 bytes, got {buffer.dtype}.")
    devices = {each.device for each in (*buffers, nodes, counts, lengths)}
    demand(len(devices) == 1, f"all tensors must be on one device, got {sorted(map(str, devices))}")
