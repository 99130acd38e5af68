"""Which implementation runs, and what is said where a kernel cannot."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.errors import UnsupportedError
from specdec.ops import _dispatch


def test_a_device_without_kernels() -> None:
    assert ops.available("tree_attention", "meta") == (False, "kernels run on CUDA or ROCm devices, not on 'meta'")
    with pytest.raises(UnsupportedError, match=r"cannot run here.*not on 'meta'"):
        _dispatch.choose("tree_attention", "triton", torch.device("meta"))


@pytest.mark.parametrize("device", ["nonsense", None])
def test_what_is_no_device(device: Any) -> None:
    can, reason = inspect.unwrap(ops.available)("tree_attention", device)
    assert (can, reason) == (False, f"{device!r} names no device that torch knows")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_kernels", lambda: (object(), ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ops.available("rms_norm", "cuda") == ops.available("rms_norm", "cuda:1") == (True, "")
    assert ops.available("rms_norm", "cuda:2") == (False, "there is no device 'cuda:2'; torch sees 2 of its kind")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not ops.available("rms_norm", "cuda")[0]


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_kernels", lambda: (None, "the kernels need triton (no module)"))
    assert ops.available("tree_attention", "cuda") == (False, "the kernels need triton (no module)")
    assert not ops.available("tree_attention", "cpu")[0]
    assert _dispatch.choose("tree_attention", "auto", torch.device("cpu")) is None


@pytest.mark.skipif(not ops.available("tree_attention", "cpu")[0], reason="triton is not installed")
def test_the_interpreter_is_taken_only_when_asked_for() -> None:
    cpu = torch.device("cpu")
    assert _dispatch.choose("tree_attention", "auto", cpu) is None
    assert _dispatch.choose("tree_attention", "reference", cpu) is None
    assert _dispatch.choose("tree_attention", "triton", cpu).__name__ == "specdec_kernels.tree_attention"
    can, reason = ops.available("no_such_op", cpu)
    assert not can
    assert "there is no kernel for 'no_such_op'; there are accept_tree, " in reason


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="impl must be 'auto', 'reference' or 'triton', got 'cuda'"):
        inspect.unwrap(_dispatch.choose)("tree_attention", "cuda", torch.device("cpu"))


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


SEEN = torch.ones(1, 1, 1, dtype=torch.int64)
CALLS: dict[str, tuple[Any, list[Tensor], dict[str, Any]]] = {
    "skinny_linear": (ops.skinny_linear, [_ones(1, 16), _ones(64, 16), _ones(64)], {}),
    "rms_norm": (ops.rms_norm, [_ones(1, 16), _ones(16)], {"eps": 1e-6}),
    "routed_experts": (
        lambda hidden, weights, gate_up, down, **options: ops.routed_experts(
            hidden, torch.zeros(1, 1, dtype=torch.int64), weights, gate_up, down, **options
        ),
        [_ones(1, 16), _ones(1, 1), _ones(1, 64, 16), _ones(1, 16, 32)],
        {},
    ),
    "tree_attention": (
        lambda query, keys, values, **options: ops.tree_attention(
            query, keys, values, SEEN, torch.tensor([0]), **options
        ),
        [_ones(1, 1, 1, 16), _ones(1, 1, 1, 16), _ones(1, 1, 1, 16)],
        {},
    ),
    "causal_conv_tree": (
        lambda inputs, weight, **options: ops.causal_conv_tree(inputs, weight, _ones(1, 2, 3), SEEN, **options),
        [_ones(1, 1, 2), _ones(2, 3)],
        {},
    ),
    "gated_delta_tree": (
        lambda *rows, **options: ops.gated_delta_tree(*rows, SEEN, _ones(1, 1, 16, 16), **options),
        [_ones(1, 1, 1, 16), _ones(1, 1, 1, 16), _ones(1, 1, 1, 16), -_ones(1, 1, 1), _ones(1, 1, 1)],
        {},
    ),
}
"""Ops with what gradients could flow to."""


@pytest.mark.skipif(not ops.available("tree_attention", "cpu")[0], reason="triton is not installed")
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_is_not_taken_where_a_gradient_is_wanted(name: str) -> None:
    run, inputs, options = CALLS[name]
    for place in range(len(inputs)):
        given = [each.clone().requires_grad_(index == place) for index, each in enumerate(inputs)]
        with pytest.raises(UnsupportedError, match=r"impl='triton' cannot run here: it has no gradient"):
            run(*given, **options, impl="triton")
        with torch.no_grad():
            run(*given, **options, impl="triton")
        found = run(*given, **options)
        (found[0] if isinstance(found, tuple) else found).sum().backward()
        assert given[place].grad is not None
