"""Which implementation runs, and what is said where a kernel cannot."""

import inspect

import pytest
import torch

from specdec import ops
from specdec.errors import UnsupportedError
from specdec.ops import _dispatch


def test_a_device_without_kernels() -> None:
    assert ops.available("tree_attention", "meta") == (False, "kernels run on CUDA or ROCm devices, not on 'meta'")
    with pytest.raises(UnsupportedError, match=r"cannot run here.*not on 'meta'"):
        _dispatch.choose("tree_attention", "triton", torch.device("meta"))


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
