"""Class h of the field log: kernels that are right only for the shapes they were written with.

H1 and H14 need a GPU (`test_gpu.py`). H10 is met by running kernels in float32 and float16 only.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import kv, ops

TRITON = ops.available("tree_attention", "cpu")[0]
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.skipif(not TRITON, reason="triton is not installed"))]


def exact(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """Causal attention of the last rows of a cache, row by row in float64."""
    groups, rows = query.shape[1] // keys.shape[1], query.shape[2]
    output = torch.zeros(*query.shape[:3], values.shape[3], dtype=torch.float64)
    for head in range(query.shape[1]):
        for row in range(rows):
            seen = slice(0, length + row + 1)
            scores = keys[0, head // groups, seen].double() @ query[0, head, row].double() * query.shape[3] ** -0.5
            output[0, head, row] = scores.softmax(0) @ values[0, head // groups, seen].double()
    return output


@pytest.mark.parametrize("impl", IMPLS)
def test_h2_views_of_one_fused_buffer(impl: ops.Impl) -> None:
    """Query, keys and values as slices of one projection, heads transposed, numbers two apart."""
    torch.manual_seed(0)
    fused = torch.randn(1, 9, 3, 2, 32)[..., ::2]
    query, keys, values = (fused[:, :, part].transpose(1, 2) for part in range(3))
    assert query.stride(3) == 2
    lengths = torch.tensor([5])
    outputs = [
        ops.split_kv_attention(
            *(given[:, :, -4:] if index == 0 else given for index, given in enumerate(each)), lengths, impl=impl
        )
        for each in ((query, keys, values), tuple(given.contiguous() for given in (query, keys, values)))
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (2, 3), (5, 8), (16, 16), (17, 5)])
def test_h4_few_rows_and_small_dimensions(impl: ops.Impl, rows: int, dim: int) -> None:
    torch.manual_seed(rows)
    query, keys, values = torch.randn(1, 2, rows, dim), torch.randn(1, 1, 40, dim), torch.randn(1, 1, 40, dim)
    for length in (0, 3, 40 - rows):
        output = ops.split_kv_attention(query, keys, values, torch.tensor([length]), impl=impl)
        torch.testing.assert_close(output.double(), exact(query, keys, values, length), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_h5_rows_without_nodes_and_without_a_cache(impl: ops.Impl) -> None:
    torch.manual_seed(0)
    query, cache = torch.randn(4, 2, 3, 16), torch.randn(4, 1, 10, 16)
    nodes, lengths = torch.tensor([0, 3, 1, 0]), torch.tensor([5, 0, 7, 0])
    visible, depths = ops.tree_layout(torch.tensor([[-1, 0, 1]] * 4), nodes, impl=impl)
    output: Any
    output, lse = ops.tree_attention(query, cache, cache, visible, lengths, depths=depths, return_lse=True, impl=impl)
    unused = torch.arange(3) >= nodes[:, None]
    assert (output.transpose(1, 2)[unused] == 0).all()
    assert (lse.transpose(1, 2)[unused] == -torch.inf).all()
    wanted = exact(query[1:2], cache[1:2], cache[1:2], 0)
    torch.testing.assert_close(output[1:2].double(), wanted, rtol=1e-5, atol=1e-5)
    nothing = ops.tree_attention(query[:0], cache[:0], cache[:0], visible[:0], lengths[:0], impl=impl)
    assert nothing.shape == (0, 2, 3, 16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("length", [3, 1500])
def test_h8_asking_for_the_denominator_changes_nothing(impl: ops.Impl, length: int) -> None:
    """With few slots, which are not split, and with many, which are."""
    torch.manual_seed(0)
    query, cache = torch.randn(1, 2, 3, 16), torch.randn(1, 1, length + 3, 16)
    alone = ops.split_kv_attention(query, cache, cache, torch.tensor([length]), impl=impl)
    both = ops.split_kv_attention(query, cache, cache, torch.tensor([length]), impl=impl, return_lse=True)
    assert torch.equal(alone, both[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_h11_float32_is_float32(impl: ops.Impl) -> None:
    """Large, nearly equal keys: products rounded to 11 bits would be off by far more."""
    torch.manual_seed(0)
    query, keys = torch.randn(1, 1, 4, 64), torch.randn(1, 1, 200, 64)
    keys = 8 + keys * 0.1
    values = torch.randn(1, 1, 200, 64)
    output = ops.split_kv_attention(query, keys, values, torch.tensor([196]), impl=impl)
    wanted = exact(query, keys, values, 196)
    # Scores reach a hundred, where float32 steps are 8e-6; a weight is off by that share.
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-4)
    rough = exact(query.bfloat16().float(), keys.bfloat16().float(), values, 196)
    assert (rough - wanted).abs().max() > 1e-3


def test_h13_importing_leaves_other_packages_as_they_are() -> None:
    script = """
import importlib, torch, transformers
watched = [torch, transformers, torch.nn.functional, transformers.AttentionInterface]
try:
    import triton, triton.language
    watched += [triton, triton.language, triton.runtime.autotuner]
except ImportError:
    pass
before = [{name: id(value) for name, value in vars(each).items()} for each in watched]
import specdec
if len(watched) > 4:
    import specdec_kernels.tree_attention
for each, names in zip(watched, before):
    changed = [name for name, value in names.items() if id(vars(each).get(name)) != value]
    assert not changed, (each, changed)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("dim", [6, 48, 96])
def test_h16_dimensions_that_are_no_power_of_two(dim: int) -> None:
    torch.manual_seed(dim)
    rows = torch.randn(2, 3, 5, dim)
    torch.testing.assert_close(ops.hadamard(ops.hadamard(rows)), rows, rtol=0, atol=1e-5)
    for codec in (kv.Int8(), kv.Hadamard(kv.Int8()), kv.Int4(group=3 if dim < 16 else 48)):
        error = (codec.decode(codec.encode(rows)) - rows).norm(dim=-1)
        # Half a step in every number: of 127 steps to the largest of the row, which a rotation can make larger by the
        # root of the dimension at most, or of 15 from the smallest to the largest of a group. INT4's scales and zeros
        # are float16, good for a thousandth more.
        steps = 15 / 2 if isinstance(codec, kv.Int4) else 127
        largest = rows.norm(dim=-1) if isinstance(codec, kv.Hadamard) else rows.abs().amax(-1)
        assert (error <= 1.01 * dim**0.5 * largest / steps / 2).all()


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize("absent", ["depths", "starts", "window", "softcap", "sinks", "scale"])
def test_h17_each_option_given_and_not(absent: str) -> None:
    torch.manual_seed(0)
    query, cache = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 20, 16)
    visible, depths = ops.tree_layout(torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
    options: dict[str, Any] = {
        "depths": depths,
        "starts": torch.tensor([2]),
        "window": 9,
        "softcap": 5.0,
        "sinks": torch.randn(2),
        "scale": 0.3,
    }
    for given in ({**options, absent: None}, {absent: options[absent]}):
        if given.get("depths") is None and given.get("window") is not None:
            given["window"] = None  # positions of a tree come from its depths
        outputs = [
            ops.tree_attention(query, cache, cache, visible, torch.tensor([15]), impl=impl, **given)
            for impl in ("reference", "triton")
        ]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
