"""Whether the attention kernel of compute capability 9 can take a call. It is imported only where it can."""

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from specdec_kernels._launch import generation, pdl, tiled


def specialised(call: Any) -> bool:
    """Whether `tree_attention_hopper` can attend: what it leaves out is not asked for, and its device is there.

    Args:
        call: checked arguments (`specdec.ops._attention_call.AttentionCall`).
    """
    query, keys, values = call.query, call.keys, call.values
    scales = call.key_rows.row_scales, call.value_rows.row_scales
    plain = keys.dtype == values.dtype == query.dtype
    return (
        all(each is None for each in (call.blocks, call.starts, call.window, call.softcap))
        and query.dtype in (torch.float16, torch.bfloat16)
        and (plain or (keys.dtype == values.dtype == torch.int8 and all(tiled(each, None) for each in scales)))
        and call.scale > 0
        and tiled(query, query.shape[3])
        and tiled(keys, keys.shape[3])
        and tiled(values, values.shape[3])
        and pdl(query.device)
        and generation(query.device) == 9
        and hopper() is not None
    )


@lru_cache
def hopper() -> ModuleType | None:
    """The kernel written in Gluon, or None for a triton that lacks what it needs."""
    try:
        return importlib.import_module("specdec_kernels.tree_attention_hopper")
    except (ImportError, AttributeError):
        return None
