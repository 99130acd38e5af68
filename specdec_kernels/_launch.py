"""What NVIDIA devices of compute capability 9 and later can do at a launch, and others cannot.

Programmatic dependent launch: a kernel is set up while the one before it still runs. The later kernel waits before it
reads; the earlier one says early that it may be set up.

Tile descriptors: the copy engine fetches a whole tile of a tensor, so that no thread computes addresses.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec_kernels import interpreted

NARROWEST = 32
"""Numbers of a slot that a tile has at least: tensor cores take products of bytes over no fewer."""


def pdl(device: torch.device) -> bool:
    """Whether kernels on a device may be launched this way."""
    return not interpreted() and torch.version.hip is None and generation(device) >= 9


@lru_cache
def generation(device: torch.device) -> int:
    """First number of the compute capability; asked several times in each launch."""
    return torch.cuda.get_device_capability(device)[0]


@lru_cache
def limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a thread block may have; those of an H100 in the interpreter."""
    if device.type != "cuda":
        return 132, 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return int(properties.multi_processor_count), int(shared)


def launch_late(device: torch.device) -> dict[str, Any]:
    """Launch options of the later kernel."""
    return {"launch_pdl": True} if pdl(device) else {}


def tiled(rows: Tensor | None, width: int | None) -> bool:
    """Whether the copy engine can fetch tiles of `[batch, heads, slots, any]`: aligned, a power of two wide.

    Nothing to fetch is no obstacle.

    Args:
        rows: keys, values or their scales.
        width: numbers of a slot that a tile has; None for scales, which are fetched along the slots.
    """
    if rows is None:
        return True
    line = rows.squeeze(3) if width is None else rows
    size = rows.element_size()
    return (
        (interpreted() or pdl(rows.device))
        and (width is None or (width & (width - 1) == 0 and width >= NARROWEST))
        and line.stride(-1) == 1
        and rows.numel() > 0
        and rows.data_ptr() % 16 == 0
        and all(step * size % 16 == 0 for step in line.stride()[:-1])
    )


def tiles(rows: Tensor | None, width: int | None, tile: int) -> TensorDescriptor | None:
    """Tiles of `tile` slots of one head; see `tiled`."""
    if rows is None:
        return None
    if width is None:
        return TensorDescriptor.from_tensor(rows.squeeze(3), [1, 1, tile])
    return TensorDescriptor.from_tensor(rows, [1, 1, tile, width])


__all__ = [
    "gdc_launch_dependents",
    "gdc_wait",
    "generation",
    "launch_late",
    "limits",
    "pdl",
    "tiled",
    "tiles",
]
