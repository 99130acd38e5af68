"""What a verify pass has to know about a tree: who sees whom, and how deep each node lies.

Trees arrive as parents in topological order. Every other part of a round goes by these two tensors, so a captured
round computes them once, on the device.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops import _dispatch
from specdec.ops._ancestry import pack, reach, require_order
from specdec.ops._checks import tensors
from specdec.ops._dispatch import Impl


def tree_layout(
    parents: Int[Tensor, "batch nodes"], num_nodes: Int[Tensor, " batch"], *, impl: Impl = "auto"
) -> tuple[Int[Tensor, "batch nodes words"], Int[Tensor, "batch nodes"]]:
    """Ancestor masks and depths of the nodes of a tree.

    Args:
        parents: of each node, a smaller index; -1 for the root and for padding.
        num_nodes: nodes in use per row, the root included; 0 for a row without a tree.
        impl: which implementation runs; see `specdec.ops`.

    Returns:
        Ancestors of each node, itself included, as int64 bit masks (all zeros for padding, which so attends to
        nothing), and depths (0 for the root and for padding).

    Raises:
        ShapeError: for other shapes or dtypes; on a CPU also for parents behind their children and nodes that are not
            there.
        UnsupportedError: if `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> visible, depths = ops.tree_layout(torch.tensor([[-1, 0, 0, 1]]), torch.tensor([4]))
        >>> [f"{mask:04b}" for mask in visible[0, :, 0].tolist()], depths.tolist()
        (['0001', '0011', '0101', '1011'], [[0, 1, 1, 2]])
    """
    tensors("tree_layout", {"parents": parents, "num_nodes": num_nodes})
    if parents.dim() != 2 or parents.shape[1] < 1 or num_nodes.shape != parents.shape[:1]:
        raise ShapeError(
            "tree_layout: parents must be [batch, nodes] with at least the root, and num_nodes [batch], got "
            f"{list(parents.shape)} and {list(num_nodes.shape)}."
        )
    if parents.dtype != torch.int64 or num_nodes.dtype != torch.int64:
        raise ShapeError(f"tree_layout: takes int64 tensors, got {parents.dtype} and {num_nodes.dtype}.")
    require_order("tree_layout", parents, num_nodes)
    kernel = _dispatch.choose("tree_layout", impl, parents.device)
    answer: tuple[Tensor, Tensor] = (_reference if kernel is None else kernel.launch)(parents, num_nodes)
    return answer


def _reference(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in plain torch, without reading the device."""
    valid = torch.arange(parents.shape[1], device=parents.device) < num_nodes[:, None]
    reached = reach(parents.masked_fill(~valid, -1)) & valid[:, :, None]
    return pack(reached), (reached.sum(-1) - 1).clamp_min(0)
