"""Ancestors as boolean matrices and as bit masks in int64 words; what every op over trees goes by.

Bit `j % 64` of word `j // 64` of node i is set iff i sees column j. `specdec.trees.topology` hands these functions on.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops._checks import demands, legible, tensors, within

WORD = 64


def ancestor_matrix(parents: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes nodes"]:
    """`out[b, i, j]`: whether j is i or an ancestor of i.

    Padding nodes are roots of their own and see themselves only, so no row is ever empty.

    Raises:
        ShapeError: for what is no batch of trees: no tensor `[batch, nodes]` of integers, or, on a CPU, parents that do
            not come before their children.

    Example:
        >>> import torch
        >>> from specdec.trees import topology
        >>> topology.ancestor_matrix(torch.tensor([[-1, 0, 0]])).int()  # a root and its two children
        tensor([[[1, 0, 0],
                 [1, 1, 0],
                 [1, 0, 1]]], dtype=torch.int32)
    """
    tensors("ancestor_matrix", {"parents": parents})
    demand = demands("ancestor_matrix")
    demand(parents.dim() == 2, f"parents must be [batch, nodes], got {list(parents.shape)}; one tree is a batch of one")
    demand(parents.dtype == torch.int64, f"parents must be int64, got {parents.dtype}")
    require_order("ancestor_matrix", parents)
    return reach(parents)


def require_order(op: str, parents: Int[Tensor, "batch nodes"], num_nodes: Int[Tensor, " batch"] | None = None) -> None:
    """Raises `ShapeError` unless the nodes in use are there and behind their parents; looked at where that is free."""
    if num_nodes is not None and legible(parents, num_nodes):
        within(op, "num_nodes", num_nodes, 0, parents.shape[1], "nodes of a row")
        parents = parents.masked_fill(torch.arange(parents.shape[1]) >= num_nodes[:, None], -1)
    if legible(parents):
        ordered = bool(((parents >= -1) & (parents < torch.arange(parents.shape[1]))).all())
        message = f"a parent must come before its children, and -1 stands for none; got {parents.tolist()}"
        demands(op)(ordered, message)


@lru_cache(maxsize=64)
def _later(nodes: int, words: int) -> Int[Tensor, "nodes words"]:
    """The bits of a node's mask that stand for nodes behind it, and for none."""
    return ~pack(torch.ones(1, nodes, words * WORD, dtype=torch.bool).tril())[0]


def require_ancestors(op: str, ancestors: Int[Tensor, "batch nodes words"]) -> None:
    """Raises `ShapeError` if a node has a later one among its ancestors; looked at where that is free."""
    if ancestors.numel() and legible(ancestors) and bool((ancestors & _later(*ancestors.shape[1:])).any()):
        raise ShapeError(f"{op}: ancestors must stand before a node or be itself; ops.tree_layout makes their masks.")


def reach(parents: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes nodes"]:
    """As `ancestor_matrix`, for parents that are known to be a tree's: rounds ask for it several times."""
    batch, nodes = parents.shape
    # With P the matrix "j is the parent of i", the answer is I + P + P² + ... = (I - P)⁻¹. P is strictly lower
    # triangular, so one unit-triangular solve does it, exactly: every number on the way is 0 or 1.
    steps = torch.zeros(batch, nodes, nodes, device=parents.device)
    steps.scatter_(2, parents.clamp_min(0).unsqueeze(2), -(parents >= 0).to(steps.dtype).unsqueeze(2))
    eye = torch.eye(nodes, device=parents.device).expand(batch, nodes, nodes)
    found: Tensor = torch.linalg.solve_triangular(steps, eye, upper=False, unitriangular=True)
    return found.bool()


def pack(matrix: Bool[Tensor, "batch nodes columns"]) -> Int[Tensor, "batch nodes words"]:
    """Packs boolean columns into int64 words, column j at bit `j % 64` of word `j // 64`.

    Raises:
        ShapeError: for numbers that are no booleans, such as the parents themselves.

    Example:
        >>> import torch
        >>> from specdec.trees import topology
        >>> topology.pack(topology.ancestor_matrix(torch.tensor([[-1, 0, 0]]))).tolist()
        [[[1], [3], [5]]]
    """
    if matrix.dtype != torch.bool or matrix.dim() != 3:
        raise ShapeError(
            f"pack: the matrix must be boolean, [batch, nodes, columns], got {matrix.dtype} {list(matrix.shape)}; "
            "ancestor_matrix makes one of parents."
        )
    columns = matrix.shape[-1]
    words = -(-columns // WORD)
    padded = torch.nn.functional.pad(matrix, (0, words * WORD - columns)).unflatten(-1, (words, WORD))
    return torch.bitwise_left_shift(padded.to(torch.int64), torch.arange(WORD, device=matrix.device)).sum(-1)


def unpack(words: Int[Tensor, "batch nodes words"], columns: int) -> Bool[Tensor, "batch nodes columns"]:
    """Inverse of `pack`."""
    bits = torch.bitwise_right_shift(words.unsqueeze(-1), torch.arange(WORD, device=words.device)) & 1
    return bits.flatten(-2)[..., :columns].bool()
