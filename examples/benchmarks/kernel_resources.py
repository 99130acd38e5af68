"""What the kernels take of a GPU: registers, spills and shared memory, by cross-compiling them. Needs no GPU.

    python examples/benchmarks/kernel_resources.py

A spill would show in no test and in every timing; a compile for an architecture that lacks something fails here.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec import ops
from specdec.ops._attention_plan import AttentionPlan, Device, make_plan
from specdec_kernels import tree_attention

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TILED = {"sm_90", "sm_120"}  # have a copy engine that fetches tiles, and dependent launches
SHARED_LIMIT = {"sm_80": 163, "sm_90": 227, "sm_120": 99, "gfx942": 64}  # KiB per thread block
SHAPES = {
    "h8g4d128.rows1": (8, 4, 1, 128),
    "h8g4d128.rows16": (8, 4, 16, 128),
    "h4g6d256.rows16": (4, 6, 16, 256),
    "h2g8d256.rows16": (2, 8, 16, 256),
    "h2g8d512.rows7": (2, 8, 7, 512),
    "h2g8d512.rows16": (2, 8, 16, 512),
}
"""Key/value heads, query heads per group, rows, dimension."""


ABSENT = ("starts", "blocks", "sinks", "key_scales", "value_scales", "key_scale_tiles", "value_scale_tiles")


@dataclass(frozen=True)
class Resources:
    """What one thread block takes."""

    registers: int
    stack: int
    shared: int


def main() -> None:
    """Compiles every shape for every target, prints a table, writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    arguments = parser.parse_args()
    figures = {}
    for target in arguments.target or TARGETS:
        for name in arguments.shape or SHAPES:
            found = resources(target, name)
            print(f"{target:8}{name:18}{found}", flush=True)
            figures[f"registers.{target}.{name}"] = report.figure(found.registers, "registers", "255 of a thread")
            figures[f"stack.{target}.{name}"] = report.figure(found.stack, "bytes", "0 without spills")
            limit = SHARED_LIMIT[target]
            figures[f"shared.{target}.{name}"] = report.figure(found.shared / 1024, "KiB", f"{limit} of a block")
    if not arguments.target and not arguments.shape:
        report.write(
            "kernel-resources",
            figures,
            device="cross-compiled, no GPU",
            versions={**report.installed(), "triton": triton.__version__},
        )


def resources(target: str, shape: str) -> Resources:
    """Compiles the attention kernel for one shape."""
    kv_heads, groups, rows, dim = SHAPES[shape]
    problem = ops.AttentionShape(1, kv_heads * groups, kv_heads, rows, 32_768, dim)
    plan = make_plan(problem, Device(shared_memory=SHARED_LIMIT[target] * 1024), deterministic=False)
    compiled = triton.compile(
        source(groups, kv_heads, dim, plan, tiled=target in TILED),
        target=TARGETS[target],
        options={"num_warps": plan.warps, "num_stages": plan.stages},
    )
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        counts = [int(re.search(rf"{field}:\s+(\d+)", text)[1]) for field in (r"\.vgpr_count", r"\.vgpr_spill_count")]
        return Resources(counts[0], 4 * counts[1], compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage.stdout)[1]) for field in ("REG", "STACK"))
    return Resources(registers, stack, compiled.metadata.shared)


def source(
    groups: int, kv_heads: int, dim: int, plan: AttentionPlan, dtype: str = "bf16", *, tiled: bool = True
) -> ASTSource:
    """The kernel as it is launched for contiguous rows: last strides 1, the others divisible by 16."""
    kernel: Any = tree_attention._attend
    constants: dict[str, Any] = {
        **dict.fromkeys(ABSENT if tiled else (*ABSENT, "key_tiles", "value_tiles")),
        **dict.fromkeys(("query_dim", "key_dim", "value_dim", "output_dim", "visible_word", "depth_row"), 1),
        "GROUPS": groups,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "VALUE_DIM": dim // plan.portions,
        "PORTIONS": plan.portions,
        "DIM_PADDED": triton.next_power_of_2(dim),
        "VALUE_PADDED": triton.next_power_of_2(dim // plan.portions),
        "WORDS": 1,
        "PAGE": 0,
        "BLOCK": plan.block,
        "TILE": plan.tile,
        "SPLIT": plan.splits > 1,
        "SPLIT_TILES": plan.split_tiles,
        "WINDOWED": False,
        "CAPPED": False,
        "INTEGER": False,
        "STARTS": False,
        "LATE": tiled,
    }
    pointers = dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}")
    pointers |= dict.fromkeys(("visible", "lengths", "depths"), "*i64")
    pointers |= dict.fromkeys(("lse", "tops", "totals"), "*fp32") | {"parts": "*fp16"}
    plain = {
        "window",
        "rows",
        "pending",
        "query_blocks",
        "splits",
        "visible_row",
        "visible_batch",
        "depth_batch",
        "length_batch",
    }
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("key_tiles", "value_tiles"):
            width = dim // (plan.portions if name == "value_tiles" else 1)
            signature[name] = f"tensordesc<{dtype}[1, 1, {plan.tile}, {width}]>"
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            signature[name] = pointers.get(name, "i32")
            if name not in plain:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


if __name__ == "__main__":
    main()
