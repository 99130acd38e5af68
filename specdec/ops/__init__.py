"""Ops that a round spends its time in: a plain-torch reference for each, and a Triton kernel where one is available.

Every op takes `impl="auto" | "reference" | "triton"`. `auto` takes the kernel where `available` says that it can run,
and the reference everywhere else; both give the same result within the tolerances that the tests write down.
"""

from specdec.ops._attention_plan import AttentionShape, Occupancy, occupancy
from specdec.ops._dispatch import Impl, available
from specdec.ops.hadamard import hadamard
from specdec.ops.tree_attention import split_kv_attention, tree_attention

__all__ = [
    "AttentionShape",
    "Impl",
    "Occupancy",
    "available",
    "hadamard",
    "occupancy",
    "split_kv_attention",
    "tree_attention",
]
