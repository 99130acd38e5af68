"""Which implementation of an op runs: the only place that knows `specdec_kernels`, and imports it lazily.

`import specdec` works on a machine without triton or a GPU; a kernel package is looked for when an op is first used.
"""

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.ops._checks import there

KERNELS = frozenset(
    {
        "accept_tree",
        "causal_conv_tree",
        "gated_delta_tree",
        "grow_tree",
        "lookup_tree",
        "move_rows",
        "rms_norm",
        "routed_experts",
        "skinny_linear",
        "tree_attention",
        "tree_layout",
        "write_rows",
    }
)
"""Ops that have a kernel."""

Impl: TypeAlias = Literal["auto", "reference", "triton"]


def available(name: str, device: torch.device | str) -> tuple[bool, str]:
    """Whether the kernel of an op can run on a device, and if not, why.

    Args:
        name: name of the op, as in `specdec.ops`.
        device: where its tensors are.

    What arguments the kernel takes is another question; `impl="triton"` says so if it does not take them.

    Example:
        >>> from specdec import ops
        >>> ops.available("tree_attention", "meta")
        (False, "kernels run on CUDA or ROCm devices, not on 'meta'")
    """
    if name not in KERNELS:
        return False, f"there is no kernel for {name!r}; there are {', '.join(sorted(KERNELS))}"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        return False, f"{device!r} names no device that torch knows"
    can, reason = _runs(device)
    if can and device.type == "cuda" and not there(device):
        return False, f"there is no device {str(device)!r}; torch sees {torch.cuda.device_count()} of its kind"
    return can, reason


def choose(name: str, impl: Impl, device: torch.device, *inputs: Tensor | None, asked: str = "") -> ModuleType | None:
    """The kernel module to run, or None for the reference.

    Args:
        name: of the op.
        impl: what was asked for.
        device: where its tensors are.
        *inputs: what gradients could flow to. Where one is wanted the reference runs: kernels have none.
        asked: for, which errors name; empty is the op whose kernel it is.

    Raises:
        UnsupportedError: if the kernel is asked for and cannot run, or `impl` is unknown.
    """
    op = asked or name
    if impl not in ("auto", "reference", "triton"):
        raise UnsupportedError(f"{op}: impl must be 'auto', 'reference' or 'triton', got {impl!r}.")
    if impl == "reference":
        return None
    can, reason = _runs(device)
    if can and torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        can, reason = False, "it has no gradient, which an input asks for outside torch.no_grad()"
    if can and (impl == "triton" or device.type == "cuda"):
        return importlib.import_module(f"specdec_kernels.{name}")
    if impl == "triton":
        raise UnsupportedError(f"{op}: impl='triton' cannot run here: {reason}. Use impl='auto' or 'reference'.")
    return None


def _runs(device: torch.device) -> tuple[bool, str]:
    """Whether kernels run where a tensor is, and if not, why."""
    kernels, reason = _kernels()
    if device.type == "cuda" or (device.type == "cpu" and kernels is not None and kernels.interpreted()):
        return kernels is not None, reason
    return False, f"kernels run on CUDA or ROCm devices, not on {device.type!r}"


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, str]:
    """The kernel package, or None and why it cannot be had."""
    try:
        return importlib.import_module("specdec_kernels"), ""
    except ImportError as error:
        return None, f"the kernels need triton ({error})"
