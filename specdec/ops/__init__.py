"""Ops that a round spends its time in: a plain-torch reference for each, and a Triton kernel where one is available.

Ops with a kernel take `impl="auto" | "reference" | "triton"`. `auto` takes the kernel on a GPU where `available` says
that it can run, if it takes the arguments (their dtype, how many rows there are), and the reference everywhere else.
Both give the same result within the tolerances that the tests write down. Ops are for inference and kernels have no
gradients: where an input asks for one, outside `torch.no_grad()`, the reference runs, or `impl="triton"` is refused.
What is no tensor where one is expected is refused with `ShapeError`, by name and before anything runs.
"""

from specdec.ops._attention_plan import AttentionShape, Occupancy, occupancy
from specdec.ops._dispatch import Impl, available
from specdec.ops._gate import GateActivation
from specdec.ops.accept_tree import TextState, accept_tree
from specdec.ops.causal_conv_tree import causal_conv_tree, conv_fold
from specdec.ops.gated_delta_tree import DeltaRecord, gated_delta_fold, gated_delta_tree
from specdec.ops.grow_tree import grow_tree
from specdec.ops.hadamard import hadamard
from specdec.ops.lookup_tree import lookup_tree
from specdec.ops.move_rows import move_rows
from specdec.ops.rms_norm import rms_norm
from specdec.ops.routed_experts import routed_experts
from specdec.ops.skinny_linear import interleave_gate, skinny_linear
from specdec.ops.tree_attention import split_kv_attention, tree_attention
from specdec.ops.tree_layout import tree_layout
from specdec.ops.write_rows import write_rows

__all__ = [
    "AttentionShape",
    "DeltaRecord",
    "GateActivation",
    "Impl",
    "Occupancy",
    "TextState",
    "accept_tree",
    "available",
    "causal_conv_tree",
    "conv_fold",
    "gated_delta_fold",
    "gated_delta_tree",
    "grow_tree",
    "hadamard",
    "interleave_gate",
    "lookup_tree",
    "move_rows",
    "occupancy",
    "rms_norm",
    "routed_experts",
    "skinny_linear",
    "split_kv_attention",
    "tree_attention",
    "tree_layout",
    "write_rows",
]
