"""The rotation is orthonormal, its own inverse, and the textbook matrix."""

import pytest
import torch
from scipy.linalg import hadamard as textbook

from specdec.ops import hadamard


@pytest.mark.parametrize(("dim", "size"), [(1, 1), (6, 2), (64, 64), (80, 16), (96, 32), (192, 64), (256, 256)])
def test_it_is_the_block_diagonal_textbook_matrix(dim: int, size: int) -> None:
    rows = torch.randn(3, 5, dim, dtype=torch.float64)
    matrix = torch.block_diag(*[torch.tensor(textbook(size), dtype=torch.float64)] * (dim // size)) / size**0.5
    torch.testing.assert_close(hadamard(rows), rows @ matrix)
    torch.testing.assert_close(hadamard(hadamard(rows)), rows)


def test_scores_stay_the_same() -> None:
    query, keys = torch.randn(4, 128, dtype=torch.float64), torch.randn(9, 128, dtype=torch.float64)
    torch.testing.assert_close(hadamard(query) @ hadamard(keys).T, query @ keys.T)


def test_half_precision_is_rotated_in_float32() -> None:
    assert hadamard(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32
