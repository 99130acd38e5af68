"""Routed experts against a loop over rows and experts: the reference and the interpreted kernel."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from tests.ops.expert_problems import CASES, by_definition, experts_call, near
from tests.ops.stored_rows import Counted
from tests.trees.random_trees import caught

kernel = pytest.mark.skipif(not ops.available("routed_experts", "cpu")[0], reason="triton is not installed")
few = settings(max_examples=settings().max_examples // 3)  # the interpreter takes a second for an example
Change = Callable[[dict[str, Any]], dict[str, Any]]


def law(change: Change, impl: ops.Impl, tolerance: float, dtype: torch.dtype = torch.float64, **inputs: Any) -> None:
    call = experts_call(**inputs, dtype=dtype)
    near(ops.routed_experts(**change(call), impl=impl), by_definition(call), tolerance)


def same(call: dict[str, Any]) -> dict[str, Any]:
    return call


@given(**CASES)
def test_the_reference_is_the_definition(**inputs: Any) -> None:
    law(same, "reference", 1e-13, **inputs)


@kernel
@few
@given(**CASES)
def test_the_kernel_is_the_definition(**inputs: Any) -> None:
    law(same, "triton", 1e-5, torch.float32, **inputs)


@kernel
@settings(max_examples=10)
@given(**CASES)
def test_both_round_at_the_same_places(**inputs: Any) -> None:
    """In float16 the reference and the kernel are as good as equal, and both are off the definition."""
    call = experts_call(**inputs, dtype=torch.float16)
    found, expected = (ops.routed_experts(**call, impl=impl) for impl in ("triton", "reference"))
    near(found, expected.double(), 2e-3)
    near(found, by_definition(call), 1e-2)


WRONG: dict[str, Change] = {
    "up first": lambda call: {**call, "gate_up": torch.cat(call["gate_up"].chunk(2, 1)[::-1], 1)},
    "gate and up by turns": lambda call: {
        **call,
        "gate_up": torch.cat([call["gate_up"][:, ::2], call["gate_up"][:, 1::2]], 1),
    },
    "the other activation": lambda call: {
        **call,
        "activation": "silu" if call["activation"] == "gelu_tanh" else "gelu_tanh",
    },
    "weights in another order": lambda call: {**call, "weights": call["weights"].flip(1)},
    "the first choice alone": lambda call: {**call, "chosen": call["chosen"][:, :1], "weights": call["weights"][:, :1]},
    "the first row's experts": lambda call: {**call, "chosen": call["chosen"][:1].expand_as(call["chosen"])},
    "the nearest expert that exists": lambda call: {**call, "chosen": call["chosen"].clamp(0, len(call["down"]) - 1)},
    "the last expert, counted from behind": lambda call: {
        **call,
        "chosen": call["chosen"].where(call["chosen"] >= 0, call["chosen"] + len(call["down"])),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str) -> None:
    caught(law, WRONG[name], "reference", 1e-6, torch.float64, **CASES)


@kernel
@pytest.mark.parametrize(("tokens", "experts", "rows"), [(7, 40, 16), (40, 3, 32), (40, 20, 16), (70, 3, 32)])
def test_any_cut_of_the_work_gives_the_same(tokens: int, experts: int, rows: int) -> None:
    """Columns, steps and rows in several pieces, with and without a rest."""
    module: Any = importlib.import_module("specdec_kernels.routed_experts")
    call = experts_call(1, tokens, 3, experts, (40, 24), "any", "silu", torch.float32)
    assert module._rows(tokens, 3 * tokens, experts) == rows
    found = module.launch(checked(call), module.Plan(16, 32, 4, 3), module.Plan(32, 64, 4, 2))
    near(found, by_definition(call), 1e-5)


def checked(call: dict[str, Any]) -> Any:
    return importlib.import_module("specdec.ops.routed_experts").ExpertCall(**call)


@kernel
def test_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("specdec_kernels.routed_experts")
    counted = {name: Counted(getattr(module, name)) for name in ("_experts_product", "_experts_sum")}
    for name, each in counted.items():
        monkeypatch.setattr(module, name, each)
    law(same, "triton", 1e-5, torch.float32, **{**CALL, "tokens": 20})
    assert [each.launches for each in counted.values()] == [2, 1]


CALL: dict[str, Any] = {
    "seed": 0,
    "tokens": 3,
    "choices": 2,
    "experts": 5,
    "sizes": (8, 4),
    "style": "any",
    "activation": "silu",
}


def filled(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer


@kernel
def test_weights_that_nobody_is_routed_to_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither they nor buffers that nobody wrote reach the result; here both are full of NaN."""
    call = experts_call(**{**CALL, "style": "outside", "choices": 3}, dtype=torch.float32)
    used = set(call["chosen"].unique().tolist())
    assert not used.issuperset(range(5))
    for name in ("gate_up", "down"):
        for expert in set(range(5)) - used:
            call[name][expert] = torch.nan
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **more: filled(empty(*args, **more)))
    for impl in ("reference", "triton"):
        near(ops.routed_experts(**call, impl=impl), by_definition(call), 1e-5)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
def test_views(impl: ops.Impl) -> None:
    """Rows, ids and routing weights with any strides, weights of experts as parts of a larger tensor."""
    call = experts_call(**CALL, dtype=torch.float32)
    wide = {name: torch.stack([call[name]] * 2, -1)[..., 1] for name in ("hidden", "chosen", "weights")}
    parts = {name: torch.cat([call[name]] * 2, 2)[..., : call[name].shape[2]] for name in ("gate_up", "down")}
    assert not any(tensor.is_contiguous() for tensor in (wide | parts).values())
    found = ops.routed_experts(**(call | wide | parts | {"chosen": wide["chosen"].int()}), impl=impl)
    near(found, by_definition(call), 1e-5)


@kernel
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda call: {name: call[name].double() for name in ("hidden", "gate_up", "down")}, "not torch.float64"),
        (lambda call: {"down": call["down"].mT.contiguous().mT}, "whose rows are contiguous, not strides"),
    ],
)
def test_what_the_kernel_does_not_take(change: Change, said: str) -> None:
    call = experts_call(**CALL, dtype=torch.float32)
    call |= change(call)
    near(ops.routed_experts(**call), by_definition(call), 1e-5)
    with pytest.raises(UnsupportedError, match=said):
        ops.routed_experts(**call, impl="triton")


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "sizes"),
    [(0, 2, 5, (8, 4)), (3, 0, 5, (8, 4)), (3, 2, 0, (8, 4)), (3, 2, 5, (0, 4)), (3, 2, 5, (8, 0))],
)
def test_nothing_to_do(impl: ops.Impl, tokens: int, choices: int, experts: int, sizes: tuple[int, int]) -> None:
    width, inner = sizes
    shapes = (tokens, width), (tokens, choices), (experts, 2 * inner, width), (experts, width, inner)
    hidden, weights, gate_up, down = (torch.ones(shape) for shape in shapes)
    found = ops.routed_experts(hidden, torch.zeros(tokens, choices).long(), weights, gate_up, down, impl=impl)
    assert torch.equal(found, torch.zeros(tokens, width))


def test_the_host_reads_nothing() -> None:
    """There is nothing to read on the meta device."""
    call = experts_call(**CALL)
    meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    assert ops.routed_experts(**meta).shape == (3, 8)


GOOD = experts_call(**CALL, dtype=torch.float16)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a batch": ({"hidden": GOOD["hidden"][None]}, ShapeError, r"hidden must be \[tokens, hidden\], got \[1, 3, 8\]"),
    "one expert": ({"down": GOOD["down"][0]}, ShapeError, r"down must be \[experts, hidden, inner\], got \[8, 4\]"),
    "experts of other rows": ({"chosen": GOOD["chosen"][:2]}, ShapeError, r"chosen must be \[3, choices\], got \[2, "),
    "weights of other choices": ({"weights": GOOD["weights"][:, :1]}, ShapeError, r"weights must be \[3, 2\], got"),
    "rows of another size": (
        {"hidden": GOOD["hidden"][:, :7]},
        ShapeError,
        r"down must be \[experts, 7, inner\], got \[5, 8, ",
    ),
    "one half": ({"gate_up": GOOD["gate_up"][:, :4]}, ShapeError, r"gate_up must be \[5, 8, 8\], got \[5, 4, 8\]"),
    "no integers": ({"chosen": GOOD["weights"]}, ShapeError, "chosen must hold integers, got torch.float32"),
    "whole weights": ({"weights": GOOD["chosen"]}, ShapeError, "weights must hold floating-point .* got torch.int64"),
    "another dtype": ({"down": GOOD["down"].float()}, ShapeError, "down must be torch.float16 like hidden, got"),
    "another device": ({"down": GOOD["down"].to("meta")}, ShapeError, "one device, got .'cpu', 'meta'"),
    "another activation": (
        {"activation": "relu"},
        UnsupportedError,
        "activation must be one of silu, gelu_tanh, got 'relu'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    change, error, message = BAD[name]
    unchecked = inspect.unwrap(ops.routed_experts)  # outside the tests nobody checks its annotations
    with pytest.raises(error, match=message):
        unchecked(**{**GOOD, **change})
