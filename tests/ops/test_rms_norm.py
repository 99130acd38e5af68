"""`ops.rms_norm`: the definition row by row, the interpreted kernel against it, and what both refuse."""

import inspect
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError

kernel = pytest.mark.skipif(not ops.available("rms_norm", "cpu")[0], reason="triton is not installed")
KINDS = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]
"""Of rows and of the scale."""


def problem(rows: int, width: int, seed: int, kinds: tuple[torch.dtype, torch.dtype], *, residual: bool) -> Any:
    torch.manual_seed(seed)
    wide = 3 * torch.randn(rows, 2 * width).to(kinds[0])
    return {
        "rows": wide[:, ::2] if seed % 2 else wide[:, :width],
        "scale": torch.randn(width).to(kinds[1]),
        "eps": 10.0 ** -(seed % 7),
        "residual": torch.randn(width, rows).T.to(kinds[0]) if residual else None,
    }


def by_hand(rows: Tensor, scale: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """Number by number in float64."""
    found = torch.empty(rows.shape, dtype=torch.float64)
    for index, row in enumerate(rows.double().tolist()):
        root = math.sqrt(math.fsum(number * number for number in row) / len(row) + eps)
        found[index] = torch.tensor([number / root for number in row], dtype=torch.float64) * scale.double()
    return found if residual is None else found + residual.double()


SHAPES: Any = {
    "rows": st.integers(0, 5),
    "width": st.integers(1, 70),
    "seed": st.integers(0, 2**20),
    "residual": st.booleans(),
}


@given(**SHAPES)
def test_the_definition(rows: int, width: int, seed: int, residual: bool) -> None:
    call = problem(rows, width, seed, KINDS[0], residual=residual)
    wide = {name: each.double() if isinstance(each, Tensor) else each for name, each in call.items()}
    torch.testing.assert_close(ops.rms_norm(**wide, impl="reference"), by_hand(**wide), rtol=1e-12, atol=1e-12)


@kernel
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@settings(max_examples=15)
@given(**SHAPES)
def test_the_kernel(kinds: Any, rows: int, width: int, seed: int, residual: bool) -> None:
    call = problem(rows, width, seed, kinds, residual=residual)
    found, expected = (ops.rms_norm(**call, impl=impl) for impl in ("triton", "reference"))
    assert found.dtype == kinds[0]
    assert found.is_contiguous()
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3}[kinds[0]]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@kernel
def test_where_the_result_is_rounded() -> None:
    """By the dtype of the scale: a half one multiplies what was rounded, a float32 one is rounded with the product."""
    rows = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).half()
    scale = (1 + torch.rand(30, generator=torch.Generator().manual_seed(1))).half()
    wide = rows.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    early, late = normal.half() * scale, (normal * scale.float()).half()
    assert not torch.equal(early, late)
    for impl in ("reference", "triton"):
        assert (ops.rms_norm(rows, scale, 1e-6, impl=impl) == early).double().mean() > 0.999
        assert (ops.rms_norm(rows, scale.float(), 1e-6, impl=impl) == late).double().mean() > 0.999


@pytest.mark.parametrize("wrong", ["the mean is subtracted", "eps outside the root", "the residual is normalised too"])
def test_a_wrong_norm_is_noticed(wrong: str) -> None:
    call = problem(3, 20, 0, KINDS[0], residual=True)
    rows, scale, eps, residual = call.values()
    if wrong.startswith("the mean"):
        rows = rows - rows.mean(-1, keepdim=True)
    root = rows.pow(2).mean(-1, keepdim=True)
    root = root.sqrt() + eps if wrong.startswith("eps") else (root + eps).sqrt()
    found = rows / root * scale + residual
    if wrong.startswith("the residual"):
        found = ops.rms_norm(rows + residual, scale, eps)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.double(), by_hand(**call), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.ones(2, 3, 4)}, r"rows must be \[rows, width\], got \[2, 3, 4\]"),
        ({"rows": torch.ones(2, 4).int()}, "rows must hold floating-point numbers, got torch.int32"),
        ({"scale": torch.ones(5)}, r"scale must be \[4\], got \[5\]"),
        ({"scale": torch.ones(4).half()}, "scale must be torch.float32, got torch.float16"),
        ({"residual": torch.ones(4, 2)}, r"residual must be \[2, 4\], got \[4, 2\]"),
        ({"residual": torch.ones(2, 4).half()}, "residual must be torch.float32 like rows, got torch.float16"),
        ({"eps": float("nan")}, "eps must be a number from 0 on, got nan"),
        ({"eps": -1e-6}, "eps must be a number from 0 on, got -1e-06"),
        ({"scale": torch.ones(4, device="meta")}, "all tensors must be on one device"),
    ],
)
def test_arguments_that_do_not_belong_together(change: dict[str, Any], message: str) -> None:
    call: Any = {"rows": torch.ones(2, 4), "scale": torch.ones(4), "eps": 1e-6, **change}
    with pytest.raises(ShapeError, match=message):
        inspect.unwrap(ops.rms_norm)(**call)


@kernel
def test_what_the_kernel_does_not_take() -> None:
    rows = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"the kernel takes .*, not torch\.float64"):
        ops.rms_norm(rows, rows[0], 1e-6, impl="triton")
    wide = torch.ones(1, 20_000)
    with pytest.raises(UnsupportedError, match="16384 numbers of a row at most, not 20000"):
        ops.rms_norm(wide, wide[0], 1e-6, impl="triton")
    assert ops.rms_norm(wide, wide[0], 0.0).eq(1).all()
