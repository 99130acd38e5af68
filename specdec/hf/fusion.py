"""What `torch.compile` makes of a twin: sums move into the operators before them, the rest is fused by Inductor."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

OPTIONS = {"combo_kernels": True, "benchmark_combo_kernel": True}
"""Of Inductor: small kernels that do not depend on each other are one launch where that is faster."""

RESIDUAL = {"specdec.skinny_linear": 3, "specdec.rms_norm": 2}
"""Operators that can add a residual to what they return, and which argument that is."""


IN_PLACE = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"}
"""Functions of `operator` that write to their first argument."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, compiled for one shape."""
    made: Callable[..., Any] = torch.compile(function, dynamic=False, backend=backend)
    return made


def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """What `torch.compile` calls with a graph."""
    add_residuals(module)
    return lowered(module, inputs)


def lowered(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """What Inductor makes of a graph."""
    from torch._inductor.compile_fx import compile_fx  # it takes a second to import

    return compile_fx(module, inputs, config_patches=OPTIONS)


def add_residuals(module: fx.GraphModule) -> int:
    """Lets operators of ours add what is added to their result and to nothing else of theirs; returns how many do.

    `residual + product` becomes one operator with the same rounding, if both are alike in shape, dtype and device. It
    stands where the sum stood, so nothing may have been written in place since the product: it may have read that.
    """
    count = 0
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    written = [place for node, place in order.items() if _writes(node)]
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in (operator.add, torch.add):
            continue
        if len(node.args) != 2 or node.kwargs or not all(isinstance(each, fx.Node) for each in node.args):
            continue
        for product, other in (node.args[::-1], node.args):
            place = RESIDUAL.get(str(product.target).removesuffix(".default"))
            if place is None or product is other or len(product.users) > 1 or product.args[place] is not None:
                continue
            if not _alike(product, other) or any(order[product] < place < order[node] for place in written):
                continue
            with module.graph.inserting_before(node):
                arguments = (*product.args[:place], other, *product.args[place + 1 :])
                joined = module.graph.call_function(product.target, arguments)
            joined.meta, order[joined] = dict(node.meta), order[node]
            node.replace_all_uses_with(joined)
            module.graph.erase_node(node)
            module.graph.erase_node(product)
            count += 1
            break
    module.recompile()
    return count


def _writes(node: fx.Node) -> bool:
    """Whether a node may change a tensor in place: by a name that says so, `+=` and the like, or `out=`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    trailing = name.endswith("_") and not name.endswith("__")
    calls = node.op in ("call_function", "call_method")
    return calls and (trailing or name in IN_PLACE or "out" in node.kwargs)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two results have the same shape, dtype and device."""
    first, second = (node.meta.get("example_value") for node in (one, other))
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
