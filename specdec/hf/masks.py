"""Attention masks of a verify forward: committed slots, own ancestors, windows by position.

A query at depth d of row b stands at slot position `lengths[b] + d`, wherever its row lies in the cache; siblings
share a position. A window therefore compares positions, never row indices: a node far back in the tree would
otherwise lose part of its window.
"""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.hf import compat

BOOLEAN, ADDITIVE = "sdpa", "eager"


def check_attention(config: Any) -> None:
    """Raises `UnsupportedError` unless the model's attention function takes a 4D mask."""
    name = compat.attention_implementation(config)
    if name not in (BOOLEAN, ADDITIVE):
        raise UnsupportedError(
            f"attention implementation {name!r} cannot take a tree mask; load the model with "
            f"attn_implementation='{BOOLEAN}' or '{ADDITIVE}', or call model.set_attn_implementation('{BOOLEAN}')."
        )


def visible_slots(
    lengths: Int[Tensor, " batch"],
    depths: Int[Tensor, "batch rows"],
    pending_depths: Int[Tensor, "batch pending"],
    visible: Bool[Tensor, "batch rows pending"],
    prompt: Bool[Tensor, "batch prompt"] | None,
    window: int | None,
    first: int,
    end: int,
) -> Bool[Tensor, "batch 1 rows columns"]:
    """Which cache slots `first .. end` each new row sees.

    Args:
        lengths: committed slots per row.
        depths: depth of the new rows.
        pending_depths: depth of every pending row, the new ones last.
        visible: pending rows that a new row sees (its ancestors and itself).
        prompt: False on padding of the prompt, which takes the first slots; None if there is none.
        window: positions a query sees, its own included; None for all.
        first: slot of the first column.
        end: slot after the last column.
    """
    slots = torch.arange(first, end, device=lengths.device)
    committed = slots < lengths[:, None]
    if prompt is not None and first < prompt.shape[1]:
        committed[:, : prompt.shape[1] - first] &= prompt[:, first:][:, : end - first]
    committed = committed[:, None, :]
    if window is not None:
        position = lengths[:, None] + depths
        committed = committed & (slots > position[:, :, None] - window)
        visible = visible & (depths[:, :, None] - pending_depths[:, None, :] < window)
    offset = slots - lengths[:, None]
    inside = (offset >= 0) & (offset < visible.shape[-1])
    index = offset.clamp(0, visible.shape[-1] - 1)[:, None, :].expand(-1, visible.shape[1], -1)
    drafted = visible.gather(2, index) & inside[:, None, :]
    return (committed | drafted)[:, None]


def for_implementation(mask: Bool[Tensor, "..."], config: Any, dtype: torch.dtype) -> Tensor:
    """The mask as the attention function wants it: boolean for sdpa, additive for eager."""
    if compat.attention_implementation(config) == BOOLEAN:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
