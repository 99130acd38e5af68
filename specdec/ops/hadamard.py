"""The normalised Hadamard transform of rows: orthonormal, symmetric, its own inverse."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops._checks import tensors


def hadamard(rows: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead dim"]:
    """Rotates each row by a block-diagonal Hadamard matrix, in float32 or wider.

    A row is cut into runs of the largest power of two that divides its length (80 is five runs of 16), and each run is
    multiplied by the Hadamard matrix of that size over its square root. Applying it twice gives the row back.

    Args:
        rows: any shape; the last dimension is rotated.

    Raises:
        ShapeError: for rows that are no tensor, or a single number.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> ops.hadamard(torch.tensor([2.0, 0.0, 0.0, 0.0]))
        tensor([1., 1., 1., 1.])
    """
    tensors("hadamard", {"rows": rows})
    if rows.dim() == 0:
        raise ShapeError("hadamard: rows must be [..., dim], got a single number.")
    dim = rows.shape[-1]
    size = dim & -dim
    result = rows.to(torch.promote_types(rows.dtype, torch.float32))
    step = 1
    while step < size:
        pairs = result.unflatten(-1, (-1, 2, step))
        first, second = pairs.unbind(-2)
        result = torch.stack([first + second, first - second], -2).flatten(-3)
        step *= 2
    return result / math.sqrt(size)
