"""The attention kernel of compute capability 9 as `kernel_resources.py` compiles it."""

from typing import Any

import triton
from triton.experimental.gluon import language as gl

from specdec import ops
from specdec.ops._attention_plan import Device, make_plan
from specdec_kernels import tree_attention_hopper


def described(
    kv_heads: int, groups: int, rows: int, dim: int, *, codes: bool
) -> tuple[Any, dict[str, Any], dict[str, Any], int] | None:
    """The kernel, types and constants of its arguments and the warps of a block; None if it is not for that shape.

    Args:
        kv_heads: key/value heads.
        groups: query heads of each.
        rows: nodes.
        dim: numbers of a head.
        codes: whether keys and values are INT8, not BF16.
    """
    shape = ops.AttentionShape(1, kv_heads * groups, kv_heads, rows, 32_768, dim, bytes_per_element=1 if codes else 2)
    plan = make_plan(shape, Device(), deterministic=False, specialised=True)
    if not plan.specialised:
        return None
    room, width = triton.next_power_of_2(groups), dim // plan.portions
    pieces = tree_attention_hopper.pieces_of(dim)
    constants = {
        **dict.fromkeys(("visible_word", "length_batch"), 1),
        **({} if codes else dict.fromkeys(("key_scale_tiles", "value_scale_tiles"))),
        "GROUPS": groups,
        "ROOM": room,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PIECES": pieces,
        "VALUE_DIM": width,
        "PORTIONS": plan.portions,
        "WORDS": 1,
        "BLOCK": plan.block,
        "TILE": plan.tile,
        "STAGES": plan.stages,
        "LATE": True,
        "WARPS": plan.warps,
    }
    types = {"scale": "fp32", **dict.fromkeys(("visible", "lengths"), "*i64"), "tops": "*fp32", "totals": "*fp32"}
    stored = gl.int8 if codes else gl.bfloat16
    tiles = [
        ("query", gl.bfloat16, [1, plan.block // room, room, dim // pieces]),
        ("key", stored, [1, 1, plan.tile, dim // pieces]),
        ("value", stored, [1, 1, plan.tile, width]),
        ("part", gl.float16, [1, plan.block // room, room, 1, width]),
    ]
    if codes:
        tiles += [(f"{name}_scale", gl.float32, [1, 1, plan.tile]) for name in ("key", "value")]
    for name, number, block in tiles:
        layout = gl.NVMMASharedLayout.get_default_for(block, number)
        types[f"{name}_tiles"] = f"tensordesc<{number.name.replace('int', 'i')}{block},{layout!r}>"
    return tree_attention_hopper._attend, types, constants, plan.warps
