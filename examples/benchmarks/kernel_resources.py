"""What the kernels take of a GPU: registers, spills and shared memory, by cross-compiling them. Needs no GPU.

    python examples/benchmarks/kernel_resources.py

A spill would show in no test and in every timing; a compile for an architecture that lacks something fails here.
"""

import argparse
import itertools
import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hopper_kernel
import report
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from specdec import ops
from specdec.ops._attention_plan import AttentionPlan, Device, make_plan
from specdec_kernels import gated_delta_tree, routed_experts, skinny_linear, tree_attention

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


WINDOWED = ("h8g4d128.rows16", "h4g6d256.rows16")
"""Shapes that are compiled once more with a sliding window."""

STORED = {
    "h8g4d128.rows16": (("int8", "int8"), ("int8", "int4"), ("int4", "int4"), ("nvfp4", "nvfp4")),
    "h2g8d256.rows16": (("int4", "int4"), ("nvfp4", "nvfp4")),
    "h2g8d512.rows16": (("int4", "int4"),),
}
"""Shapes that are compiled once more for codes of keys and values."""

EXPERTS = {
    f"{name}.rows{rows}": (plan, rows)
    for name, plan in (("up", routed_experts.UP), ("down", routed_experts.DOWN))
    for rows in (routed_experts.FEW, routed_experts.MANY)
}
"""Launches of the experts, for up to so many rows of one expert."""

SKINNY = {
    f"{name}.rows{rows}": (outputs, gate, rows)
    for name, outputs, gate in (("linear", 4096, ""), ("gated", 28_672, "silu"))
    for rows in (16, 64)
}
"""Products with 4,096 inputs of each row: outputs, activation, rows. The first are split, and added to something."""

BF16 = ("bf16", "bf16")
SIZES = {"bf16": 2, "int8": 1, "int4": 0.5, "nvfp4": 0.5}
CODES = {"bf16": "bf16", "int8": "i8", "int4": "u8", "nvfp4": "u8"}
GROUPS = {"int4": 32, "nvfp4": 16}
SCALES = {"int4": ("*fp16", "*fp16"), "nvfp4": ("*u8", "*fp32")}
"""Of groups, and what else belongs to codes of four bits."""

DIVISIBLE = [["tt.divisibility", 16]]
PLAIN = {
    "window",
    "rows",
    "pending",
    "query_blocks",
    "splits",
    "visible_row",
    "visible_batch",
    "depth_batch",
    "length_batch",
    "kept",
    "tokens",
    "count",
}
"""Numbers of which the compiler knows nothing."""


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
    for target, shape in itertools.product(arguments.target or TARGETS, arguments.shape or SHAPES):
        kinds = [(shape, BF16, False)] + [(f"{shape}.window", BF16, True)] * (shape in WINDOWED)
        kinds += [(f"{shape}.{'_'.join(dict.fromkeys(forms))}", forms, False) for forms in STORED.get(shape, ())]
        for name, forms, windowed in kinds:
            found = resources(target, shape, forms, windowed=windowed)
            print(f"{target:8}{name:26}{found}", flush=True)
            figures |= described(target, name, found)
    for shape, codes in itertools.product(arguments.shape or SHAPES, (False, True)):
        found = specialised_resources(shape, codes=codes) if "sm_90" in (arguments.target or TARGETS) else None
        if found is not None:
            name = f"{shape}.int8.specialised" if codes else f"{shape}.specialised"
            print(f"{'sm_90':8}{name:26}{found}", flush=True)
            figures |= described("sm_90", name, found)
    for target, nodes in itertools.product(arguments.target or TARGETS, () if arguments.shape else (16, 32, 64)):
        found = delta_resources(target, nodes)
        print(f"{target:8}{f'delta.t{nodes}':26}{found}", flush=True)
        figures |= described(target, f"delta.t{nodes}", found)
    for target, (name, (plan, rows)) in itertools.product(
        arguments.target or TARGETS, () if arguments.shape else EXPERTS.items()
    ):
        found = expert_resources(target, plan, rows, first=name.startswith("up"))
        print(f"{target:8}{f'experts.{name}':26}{found}", flush=True)
        figures |= described(target, f"experts.{name}", found)
    for target, (name, product) in itertools.product(
        arguments.target or TARGETS, () if arguments.shape else SKINNY.items()
    ):
        found = skinny_resources(target, *product)
        print(f"{target:8}{name:26}{found}", flush=True)
        figures |= described(target, name, found)
    if not arguments.target and not arguments.shape:
        report.write(
            "kernel-resources",
            figures,
            device="cross-compiled, no GPU",
            versions={**report.installed(), "triton": triton.__version__},
        )


def described(target: str, name: str, found: Resources) -> dict[str, Any]:
    """The figures of one kernel."""
    limit = SHARED_LIMIT[target]
    assert found.shared <= limit * 1024, f"{name} cannot be launched on {target}: {found}, {limit} KiB are shared"
    most = 512 if target.startswith("gfx") else 255  # there, accumulation registers count too
    return {
        f"registers.{target}.{name}": report.figure(found.registers, "registers", f"{most} of a thread"),
        f"stack.{target}.{name}": report.figure(found.stack, "bytes", "0 without spills"),
        f"shared.{target}.{name}": report.figure(found.shared / 1024, "KiB", f"{limit} of a block"),
    }


def resources(target: str, shape: str, forms: tuple[str, str] = BF16, *, windowed: bool = False) -> Resources:
    """Compiles the attention kernel for one shape, with keys and values stored in these forms."""
    kv_heads, groups, rows, dim = SHAPES[shape]
    sizes = (SIZES[form] for form in forms)
    problem = ops.AttentionShape(1, kv_heads * groups, kv_heads, rows, 32_768, dim, None, *sizes)
    plan = make_plan(problem, Device(shared_memory=SHARED_LIMIT[target] * 1024), deterministic=False)
    compiled = triton.compile(
        source(groups, kv_heads, dim, plan, forms, tiled=target in TILED, windowed=windowed),
        target=TARGETS[target],
        options={"num_warps": plan.warps, "num_stages": plan.stages},
    )
    return taken(target, compiled)


def specialised_resources(shape: str, *, codes: bool) -> Resources | None:
    """Compiles the attention kernel of compute capability 9 for one shape, or None if it is not for that shape."""
    problem = hopper_kernel.described(*SHAPES[shape], codes=codes)
    if problem is None:
        return None
    kernel, types, constants, warps = problem
    compiled = triton.compile(
        GluonASTSource(kernel, *_described(kernel.arg_names, types, constants)),
        target=TARGETS["sm_90"],
        options={"num_warps": warps, "launch_pdl": True},
    )
    return taken("sm_90", compiled)


def delta_resources(target: str, nodes: int) -> Resources:
    """Compiles the gated delta kernel for trees of so many nodes, with BF16 rows and a float32 state."""
    kernel: Any = gated_delta_tree._delta
    heads, key_heads, dim = 48, 16, 128
    constants: dict[str, Any] = {
        "GROUPS": heads // key_heads,
        "PATH_GROUPS": heads // key_heads,
        "KEY_DIM": dim,
        "VALUE_DIM": dim,
        "KEY_PADDED": dim,
        "BLOCK": gated_delta_tree._block(heads, dim, nodes),
        "ROWS": nodes,
        "KEPT": nodes,
        "CHUNK": gated_delta_tree.CHUNK,
        "NARROW": True,
        "NORMALIZE": True,
        "COPIED": True,
        "PRECISION": "bf16x6",
        "LATE": target in TILED,
    }
    four, three = ("i32", "i32", "i32", "constexpr"), ("i32", "i32", "constexpr")
    record = ("*bf16", "*fp32", "*fp32")
    types: dict[str, Any] = {
        "given": ("*bf16", "*bf16", "*bf16", "*fp32", "*bf16", "*i64"),
        "strides": (four, four, four),
        "flat_strides": (three, three, three),
        "state": "*fp32",
        "state_strides": four,
        "counts": "*i64",
        "output": "*bf16",
        "output_strides": four,
        "scale": "fp32",
        "epsilon": "fp32",
        **dict.fromkeys(("old", "new"), record),
        **dict.fromkeys(("old_strides", "new_strides"), (four, four, three)),
    }
    compiled = triton.compile(
        ASTSource(kernel, *_described(kernel.arg_names, types, constants)),
        target=TARGETS[target],
        options={"num_warps": gated_delta_tree._warps(nodes)},
    )
    return taken(target, compiled)


def expert_resources(target: str, plan: routed_experts.Plan, rows: int, *, first: bool) -> Resources:
    """Compiles one launch of the experts of Gemma-4-26B-A4B in BF16: gate and up projection, or the down projection."""
    kernel: Any = routed_experts._experts_product
    columns, depth = (704, 2816) if first else (2816, 704)
    constants: dict[str, Any] = {
        "PROGRAMS": triton.cdiv(columns, plan.columns),
        "BLOCKS": 2,
        "CHOICES": 8,
        "CHOSEN": 8,
        "EXPERTS": 128,
        "BINS": 128,
        "WIDTH": columns,
        "DEPTH": depth,
        "ACTIVATION": "gelu_tanh" if first else "",
        "ROWS": rows,
        "COLUMNS": plan.columns,
        "STEP": plan.step,
        "CHUNK": rows,
        "LATE": target in TILED,
    }
    types: dict[str, Any] = dict.fromkeys(("source", "weights", "target"), "*bf16") | {"ids": "*i64"}
    compiled = triton.compile(
        ASTSource(kernel, *_described(kernel.arg_names, types, constants)),
        target=TARGETS[target],
        options={
            "num_warps": plan.warps,
            "num_stages": routed_experts._stages(plan, rows, first, 2, SHARED_LIMIT[target] * 1024),
        },
    )
    return taken(target, compiled)


def skinny_resources(target: str, outputs: int, gate: str, rows: int) -> Resources:
    """Compiles the product of few rows in BF16."""
    kernel: Any = skinny_linear._skinny_product
    plan = skinny_linear.make_plan(rows, outputs, 4096, multiprocessors=132, shared_memory=SHARED_LIMIT[target] * 1024)
    split = plan.splits > 1
    constants: dict[str, Any] = {
        "bias": None,
        "GATE": gate,
        "TILE": skinny_linear.TILE,
        "BLOCK": plan.block,
        "STEP": skinny_linear.STEP,
        "EVEN": True,
        "SPLITS": plan.splits,
        "LATE": target in TILED,
        **({"residual": None} if gate else {"residual_column": 1}),
        **({} if split else {"parts": None, "counters": None}),
    }
    types: dict[str, Any] = dict.fromkeys(("rows", "weight", "residual", "output"), "*bf16")
    types |= {"parts": "*fp32", "counters": "*i32"} if split else {}
    compiled = triton.compile(
        ASTSource(kernel, *_described(kernel.arg_names, types, constants)),
        target=TARGETS[target],
        options={"num_warps": skinny_linear.WARPS, "num_stages": plan.stages},
    )
    return taken(target, compiled)


def taken(target: str, compiled: Any) -> Resources:
    """What a compiled kernel takes."""
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
    groups: int,
    kv_heads: int,
    dim: int,
    plan: AttentionPlan,
    forms: tuple[str, str] = BF16,
    *,
    tiled: bool = True,
    windowed: bool = False,
) -> ASTSource:
    """The kernel as it is launched for BF16 queries and contiguous rows: last strides 1, the others divisible by 16."""
    kernel: Any = tree_attention._attend
    constants: dict[str, Any] = {
        **dict.fromkeys(("starts", "blocks", "sinks") if windowed else ("depths", "starts", "blocks", "sinks")),
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
        "MASKED_STAGES": tree_attention.masked_stages(plan),
        "WINDOWED": windowed,
        "CAPPED": False,
        "INTEGER": forms[0] == "int8",
        "STARTS": False,
        "LATE": tiled,
    }
    types: dict[str, Any] = dict.fromkeys(("query", "output"), "*bf16") | {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("visible", "lengths", "depths") if windowed else ("visible", "lengths"), "*i64")
    types |= dict.fromkeys(("lse", "tops", "totals"), "*fp32") | {"parts": "*fp16"}
    whole = tiled and not any(form in GROUPS for form in forms)
    for side, form, width in zip(("key", "value"), forms, (dim, dim // plan.portions), strict=True):
        types[f"{side}s"] = f"*{CODES[form]}"
        tiles = {
            f"{side}_tiles": f"tensordesc<{CODES[form]}[1, 1, {plan.tile}, {width}]>",
            f"{side}_scale_tiles": f"tensordesc<fp32[1, 1, {plan.tile}]>" if form == "int8" else None,
        }
        given = {**tiles} if whole else dict.fromkeys(tiles)
        given[f"{side}_scales"] = "*fp32" if form == "int8" else None
        strides = ("i32", "i32", "i32", "constexpr")
        given[f"{side}_groups"] = (*SCALES[form], strides, strides) if form in GROUPS else None
        types |= {name: kind for name, kind in given.items() if kind}
        constants |= {name: None for name, kind in given.items() if not kind} | {
            f"{side.upper()}_GROUP": (0, 0, 0, False)
        }
        if form == "int8":
            constants[f"{side}_scale_slot"] = 1
        if form in GROUPS:
            common = math.gcd(GROUPS[form], dim // 2)
            group = (GROUPS[form], common & -common, dim // GROUPS[form], form == "int4")
            constants[f"{side.upper()}_GROUP"] = group
    return ASTSource(kernel, *_described(kernel.arg_names, types, constants))


def _described(
    names: list[str], types: dict[str, Any], constants: dict[str, Any]
) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and divisibility of the arguments as the compiler wants them."""
    signature: dict[str, Any] = {}
    values: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}

    def describe(place: tuple[int, ...], kind: Any) -> None:
        """Last strides are 1, the others and all addresses are divisible by 16."""
        if isinstance(kind, tuple):
            for inner, each in enumerate(kind):
                describe((*place, inner), each)
        elif kind == "constexpr":
            values.setdefault(place, 1)
        elif not kind.startswith(("tensordesc", "fp32")):
            attributes[place] = DIVISIBLE

    for index, name in enumerate(names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in constants:
            values[(index,)] = constants[name]
        elif name not in PLAIN or signature[name] != "i32":
            describe((index,), signature[name])
    return signature, values, attributes


if __name__ == "__main__":
    main()
