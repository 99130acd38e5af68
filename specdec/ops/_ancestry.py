"""Ancestors as boolean matrices and as bit masks in int64 words; what every op over trees goes by.

Bit `j % 64` of word `j // 64` of node i is set iff i sees column j. `specdec.trees.topology` hands these functions on.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

WORD = 64


def ancestor_matrix(parents: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes nodes"]:
    """`out[b, i, j]`: whether j is i or an ancestor of i.

    Padding nodes are roots of their own and see themselves only, so no row is ever empty.
    """
    batch, nodes = parents.shape
    # With P the matrix "j is the parent of i", the answer is I + P + P² + ... = (I - P)⁻¹. P is strictly lower
    # triangular, so one unit-triangular solve does it, exactly: every number on the way is 0 or 1.
    steps = torch.zeros(batch, nodes, nodes, device=parents.device)
    steps.scatter_(2, parents.clamp_min(0).unsqueeze(2), -(parents >= 0).to(steps.dtype).unsqueeze(2))
    eye = torch.eye(nodes, device=parents.device).expand(batch, nodes, nodes)
    reach: Tensor = torch.linalg.solve_triangular(steps, eye, upper=False, unitriangular=True)
    return reach.bool()


def pack(matrix: Bool[Tensor, "batch nodes columns"]) -> Int[Tensor, "batch nodes words"]:
    """Packs boolean columns into int64 words, column j at bit `j % 64` of word `j // 64`."""
    columns = matrix.shape[-1]
    words = -(-columns // WORD)
    padded = torch.nn.functional.pad(matrix, (0, words * WORD - columns)).unflatten(-1, (words, WORD))
    return torch.bitwise_left_shift(padded.to(torch.int64), torch.arange(WORD, device=matrix.device)).sum(-1)


def unpack(words: Int[Tensor, "batch nodes words"], columns: int) -> Bool[Tensor, "batch nodes columns"]:
    """Inverse of `pack`."""
    bits = torch.bitwise_right_shift(words.unsqueeze(-1), torch.arange(WORD, device=words.device)) & 1
    return bits.flatten(-2)[..., :columns].bool()
