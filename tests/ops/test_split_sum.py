"""Runs of split attention added up, against the sum itself: any number of runs, empty ones, and broken ones."""

import math

import pytest
import torch
from torch import Tensor

from specdec import ops

kernel = pytest.mark.skipif(not ops.available("tree_attention", "cpu")[0], reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def runs(splits: int, portions: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parts, maxima and denominators of 12 rows; one is empty, one has empty runs, two hold what is not finite."""
    torch.manual_seed(splits)
    parts = torch.randn(2, 3, 2, splits, dim).half()
    tops, totals = torch.randn(2, 3, 2, portions, splits) * 3, torch.rand(2, 3, 2, portions, splits)
    for row, empty in (((0, 0, 0), slice(None)), ((0, 1, 0), slice(splits // 2, None)), ((1, 2, 1), slice(None))):
        tops[row][:, empty], totals[row][:, empty] = -math.inf, 0
    totals[1, 1, 1, -1, -1] = totals[1, 2, 1, -1, 0] = math.nan
    return parts.to(DEVICE), tops.to(DEVICE), totals.to(DEVICE)


def added(parts: Tensor, tops: Tensor, totals: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in float64, in one piece."""
    tops, totals = tops.double(), totals.double()
    totals = totals.where(~totals.isnan().any(3, keepdim=True), math.nan)
    sink = torch.full((3,), -math.inf) if sinks is None else sinks.double().cpu() / math.log(2)
    sink = sink.to(parts.device).view(3, 1, 1, 1)
    most = tops.amax(-1, keepdim=True)
    used = (most > -math.inf) | totals.isnan().any(-1, keepdim=True)
    base = torch.maximum(most, sink)
    base = base.where(base > -math.inf, 0.0)
    fade = torch.exp2(tops - base)
    whole = (totals * fade).sum(-1, keepdim=True) + torch.exp2(sink - base)
    cut = parts.double().unflatten(-1, (tops.shape[3], -1)).movedim(-2, -3)
    output = ((cut * fade[..., None]).sum(-2) / whole).where(used, 0.0).flatten(-2)
    lse = (base + whole.log2()).where(used, -math.inf) * math.log(2)
    return output, lse[..., 0, 0]


@kernel
@pytest.mark.parametrize("splits", [2, 3, 16, 33, 63, 66])
@pytest.mark.parametrize(("portions", "dim", "ordered"), [(1, 80, False), (1, 80, True), (2, 128, False)])
def test_runs_are_added_up(splits: int, portions: int, dim: int, ordered: bool) -> None:
    from specdec_kernels import _split_sum

    parts, tops, totals = runs(splits, portions, dim)
    for sinks in (None, torch.randn(3, device=DEVICE)):
        output = torch.empty(2, 2, 3, dim, device=DEVICE).transpose(1, 2)
        lse = torch.empty(2, 3, 2, device=DEVICE)
        _split_sum.combine(parts, tops, totals, sinks, output, lse, ordered=ordered)
        expected, expected_lse = added(parts, tops, totals, sinks)
        torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4, equal_nan=True)
        fewer = added(parts[..., :-1, :], tops[..., :-1], totals[..., :-1], sinks)[0]
        assert not torch.allclose(output.double(), fewer, rtol=1e-3, atol=1e-4, equal_nan=True), (
            "no run may be left out"
        )
