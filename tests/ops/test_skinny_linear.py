"""Products for few rows against a loop over outputs in float64: the reference and the interpreted kernel."""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _dispatch
from tests.ops.expert_problems import near
from tests.ops.stored_rows import Counted
from tests.trees.random_trees import caught

kernel = pytest.mark.skipif(not ops.available("skinny_linear", "cpu")[0], reason="triton is not installed")

ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "rows": st.one_of(st.integers(0, 9), st.integers(0, 70)),
    "sizes": st.sampled_from([(1, 1), (5, 7), (64, 128), (70, 100), (130, 257), (65, 1024), (3, 1700)]),
    "gate": st.sampled_from([None, "silu", "gelu_tanh"]),
    "biased": st.booleans(),
    "added": st.booleans(),
    "style": st.sampled_from(["whole", "parts", "columns"]),
}
FEW = {**CASES, "rows": st.one_of(st.integers(1, 9), st.integers(1, 64))}
"""As many rows as the kernel takes; of the sizes, the last two are split."""


@dataclass(frozen=True)
class Problem:
    """Rows, one matrix or gates and their partners, a bias for each, the activation, and what is added."""

    rows: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    gate: str | None
    residual: Tensor | None

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of the op."""
        return {
            "rows": self.rows,
            "weight": joined(self.weights),
            "bias": joined(self.biases) if self.biases else None,
            "gate": self.gate,
            "residual": self.residual,
        }

    def definition(self) -> Tensor:
        """What the op promises, without rounding anything in between."""
        rows, found = self.rows.double(), []
        for place, weight in enumerate(self.weights):
            sums = torch.stack([(rows * line.double()).sum(1) for line in weight], 1)
            found.append(sums + self.biases[place].double() if self.biases else sums)
        output = found[0] if self.gate is None else found[0].clone().apply_(ACTIVATIONS[self.gate]) * found[1]
        return output if self.residual is None else output + self.residual.double()


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else ops.interleave_gate(*parts)


def problem(
    seed: int,
    rows: int,
    sizes: tuple[int, int],
    gate: str | None,
    biased: bool,
    added: bool,
    style: str,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Rows and residuals are whole, parts of wider ones, or columns; weights are parts, unless rows are whole.

    What stands beside a part is NaN.
    """
    draw = torch.Generator().manual_seed(seed)
    (outputs, inputs), wider = sizes, 0 if style == "whole" else 3
    outputs = 32 * -(-outputs // 32) if gate else outputs

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    def part(*shape: int) -> Tensor:
        whole = torch.full((*shape[:-1], shape[-1] + wider), torch.nan, dtype=dtype)
        whole[..., : shape[-1]] = normal(*shape)
        return whole[..., : shape[-1]]

    def lines(count: int, size: int) -> Tensor:
        return normal(size, count).T if style == "columns" else part(count, size)

    count = 2 if gate else 1
    weights = [part(outputs, inputs).div_(inputs**0.5) for _ in range(count)]
    biases = [normal(outputs) for _ in range(count)] if biased else []
    return Problem(lines(rows, inputs), weights, biases, gate, lines(rows, outputs) if added else None)


Change = Callable[[Problem], dict[str, Any]]
"""Arguments that are other than those of a problem."""


def same(_: Problem) -> dict[str, Any]:
    return {}


def law(change: Change, impl: ops.Impl, tolerance: float, dtype: torch.dtype = torch.float64, **inputs: Any) -> None:
    drawn = problem(**inputs, dtype=dtype)
    found, expected = ops.skinny_linear(**drawn.call | change(drawn), impl=impl), drawn.definition()
    assert found.shape == expected.shape
    assert found.dtype == dtype
    if found.numel():
        near(found, expected, tolerance)


@given(**CASES)
def test_the_reference_is_the_definition(**inputs: Any) -> None:
    law(same, "reference", 1e-13, **inputs)


@kernel
@given(**FEW)
def test_the_kernel_is_the_definition(**inputs: Any) -> None:
    law(same, "triton", 1e-5, torch.float32, **inputs)


@kernel
@settings(max_examples=10)
@given(**FEW)
def test_both_round_at_the_same_places(**inputs: Any) -> None:
    """In float16 the reference and the kernel are as good as equal, and both are off the definition."""
    drawn = problem(**inputs, dtype=torch.float16)
    found, expected = (ops.skinny_linear(**drawn.call, impl=impl) for impl in ("triton", "reference"))
    near(found, expected.double(), 2e-3)
    near(found, drawn.definition(), 4e-3)


@kernel
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_gates_are_rounded_as_between_layers(gate: str | None) -> None:
    """Nearly all numbers are equal to the last bit; of those behind gates that were not rounded, half are."""
    drawn = problem(0, 64, (128, 256), gate, True, False, "whole", torch.float16)
    found, expected = (ops.skinny_linear(**drawn.call, impl=impl) for impl in ("triton", "reference"))
    assert float((found == expected).double().mean()) > 0.98
    assert gate is None or float((drawn.definition().half() == expected).double().mean()) < 0.7


def without(drawn: Problem, start: int, end: int) -> dict[str, Any]:
    """What a product gives that leaves out some of the inputs."""
    rows = drawn.rows.clone()
    rows[:, start:end] = 0
    return {"rows": rows}


WRONG: dict[str, Change] = {
    "gates not interleaved": lambda drawn: {"weight": torch.cat(drawn.weights)},
    "partners first": lambda drawn: {"weight": joined(drawn.weights[::-1])},
    "gate and partner by turns": lambda drawn: {"weight": torch.stack(drawn.weights, 1).flatten(0, 1)},
    "biases not interleaved": lambda drawn: {"bias": torch.cat(drawn.biases)} if drawn.biases else {},
    "the other activation": lambda drawn: {"gate": drawn.gate and {"silu": "gelu_tanh"}.get(drawn.gate, "silu")},
    "no bias": lambda _: {"bias": None},
    "nothing added": lambda _: {"residual": None},
    "the first part of a split left out": lambda drawn: without(drawn, 0, 512),
    "the last part of a split left out": lambda drawn: without(drawn, 1024, 1700),
    "the rest of the inputs left out": lambda drawn: without(drawn, drawn.rows.shape[1] // 128 * 128, 1700),
    "rows that stand side by side": lambda drawn: {
        "rows": drawn.rows.as_strided(drawn.rows.shape, (drawn.rows.shape[1], 1))
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str) -> None:
    caught(law, WRONG[name], "reference", 1e-6, torch.float64, **CASES)


def kernels() -> Any:
    return importlib.import_module("specdec_kernels.skinny_linear")


CALL: dict[str, Any] = {
    "seed": 0,
    "rows": 5,
    "sizes": (70, 1700),
    "gate": None,
    "biased": True,
    "added": True,
    "style": "parts",
}
"""Two tiles of outputs, three parts of the inputs."""


class FewerParts(Counted):
    """A kernel whose last part of the inputs does not run, and which nobody waits for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        tiles, splits = grid
        run = super().__getitem__((tiles, splits - 1))

        def launch(*given: Any, **options: Any) -> None:
            given[6].fill_(1)  # as if the last part had been there
            run(*given, **options)

        return launch


@kernel
def test_all_parts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch, whatever buffers held before; a kernel that leaves one out is caught."""
    module, empty = kernels(), Tensor.new_empty
    right = module._skinny_product

    def filled(*given: Any, **options: Any) -> Tensor:
        buffer = empty(*given, **options)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(Tensor, "new_empty", filled)
    for gate in (None, "silu"):
        counted = Counted(right)
        monkeypatch.setattr(module, "_skinny_product", counted)
        law(same, "triton", 1e-5, torch.float32, **{**CALL, "gate": gate})
        assert counted.launches == 1
    monkeypatch.setattr(module, "_skinny_product", FewerParts(right))
    with pytest.raises(AssertionError):
        law(same, "triton", 1e-5, torch.float32, **CALL)


@kernel
@pytest.mark.parametrize("sizes", [(70, 1700), (70, 100)])
def test_counters(sizes: tuple[int, int]) -> None:
    """They are left as zeros, with and without a split; those of other outputs are not touched, and none are needed."""
    drawn = problem(**{**CALL, "sizes": sizes}, dtype=torch.float32)
    counters = torch.tensor([0, 0, 9], dtype=torch.int32)
    found = ops.skinny_linear(**drawn.call, counters=counters, impl="triton")
    assert counters.tolist() == [0, 0, 9]
    assert torch.equal(found, ops.skinny_linear(**drawn.call, counters=counters, impl="triton"))
    assert torch.equal(found, ops.skinny_linear(**drawn.call, impl="triton"))
    near(found, drawn.definition(), 1e-5)


@kernel
@given(
    rows=st.integers(1, 64),
    outputs=st.integers(1, 300_000),
    inputs=st.integers(1, 30_000),
    multiprocessors=st.integers(1, 256),
    kilobytes=st.integers(48, 228),
)
def test_the_plan_fills_a_device(rows: int, outputs: int, inputs: int, multiprocessors: int, kilobytes: int) -> None:
    """As many work items as there are multiprocessors and long enough parts, and steps for which there is room."""
    module = kernels()
    plan = module.make_plan(rows, outputs, inputs, multiprocessors=multiprocessors, shared_memory=kilobytes * 1024)
    assert plan.block == max(16, 2 ** math.ceil(math.log2(rows)))
    tiles = -(-outputs // module.TILE)
    possible = [
        splits
        for splits in range(1, 257)
        if splits == 1 or (tiles * splits <= multiprocessors and inputs >= splits * module.SHORTEST)
    ]
    assert plan.splits == max(possible)
    held = 2 * module.STEP * (module.TILE + plan.block)
    assert 1 <= plan.stages <= module.STAGES
    assert plan.stages * held <= kilobytes * 1024
    assert plan.stages == module.STAGES or (plan.stages + 1) * held > kilobytes * 1024


@kernel
def test_op_and_kernel_agree_on_sizes() -> None:
    """Neither may import the other; counters, interleaved weights and refusals depend on both."""
    module, op = kernels(), importlib.import_module("specdec.ops.skinny_linear")
    assert (module.TILE, module.MOST_ROWS) == (op.TILE, op.MOST_ROWS)


@kernel
def test_plans_by_example() -> None:
    module = kernels()

    def plan(*sizes: int, kilobytes: int = 227) -> tuple[int, int, int]:
        found = module.make_plan(*sizes, multiprocessors=132, shared_memory=kilobytes * 1024)
        return found.block, found.splits, found.stages

    assert plan(16, 6144, 4096) == (16, 1, 5)
    assert plan(17, 4096, 4096) == (32, 2, 5)
    assert plan(64, 576, 1536) == (64, 3, 5)
    assert plan(16, 2048, 5120, kilobytes=64) == (16, 4, 3)
    assert plan(64, 2048, 5120, kilobytes=64) == (64, 4, 2)


GOOD = problem(**{**CALL, "gate": "silu", "sizes": (32, 8)}, dtype=torch.float16).call


@kernel
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({name: GOOD[name].double() for name in ("rows", "weight", "bias", "residual")}, "bfloat16, not torch.float64"),
        ({"rows": torch.ones(65, 8).half(), "residual": None}, "64 rows at most, not 65"),
        ({"rows": torch.ones(0, 8).half(), "residual": None}, r"at least one row, .* not \[0, 8\] and \[64, 8\]"),
        ({"weight": GOOD["weight"].T.contiguous().T}, r"whose rows are contiguous, not strides \(1, 64\)"),
    ],
)
def test_what_the_kernel_does_not_take(change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to torch, unless the kernel was asked for."""
    call = GOOD | change
    with pytest.raises(UnsupportedError, match=f"skinny_linear: the kernel takes .*{said}"):
        ops.skinny_linear(**call, impl="triton")
    expected = ops.skinny_linear(**call, impl="reference")
    monkeypatch.setattr(_dispatch, "choose", lambda *_: kernels())
    assert torch.equal(ops.skinny_linear(**call), expected)


def test_where_there_is_no_kernel() -> None:
    call = {name: each.to("meta") if isinstance(each, Tensor) else each for name, each in GOOD.items()}
    assert ops.skinny_linear(**call).shape == (5, 32)
    with pytest.raises(UnsupportedError, match="skinny_linear: impl='triton' cannot run here"):
        ops.skinny_linear(**call, impl="triton")


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(0, 64, 8), (3, 0, 8), (3, 64, 0)])
def test_nothing_to_do(gate: ops.GateActivation | None, rows: int, outputs: int, inputs: int) -> None:
    """Without inputs there is the bias, and what the gate makes of it."""
    found = ops.skinny_linear(torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(outputs), gate=gate)
    value = ACTIVATIONS[gate](1.0) if gate else 1.0
    torch.testing.assert_close(found, torch.full((rows, outputs // (2 if gate else 1)), value))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a batch": ({"rows": GOOD["rows"][None]}, ShapeError, r"rows must be .* got \[1, 5, 8\]; reshape\(-1, inputs\)"),
    "weights of other rows": ({"weight": GOOD["weight"][:, :7]}, ShapeError, r"weight must be \[outputs, 8\], got \["),
    "a vector": ({"weight": GOOD["weight"][0]}, ShapeError, r"weight must be \[outputs, 8\], got \[8\]"),
    "half a block": ({"weight": GOOD["weight"][:32]}, ShapeError, "weights have a multiple of 64 rows, got 32"),
    "biases of one half": ({"bias": GOOD["bias"][:32]}, ShapeError, r"bias must be \[64\], got \[32\]"),
    "whole numbers": ({"rows": GOOD["rows"].int()}, ShapeError, "rows must hold floating-point .* got torch.int32"),
    "another dtype": (
        {"weight": GOOD["weight"].float()},
        ShapeError,
        "weight must be torch.float16 like rows, got torch",
    ),
    "a wide bias": ({"bias": GOOD["bias"].float()}, ShapeError, "bias must be torch.float16 like rows, got torch"),
    "residuals of the gates": ({"residual": GOOD["weight"]}, ShapeError, r"residual must be \[5, 32\], got \[64, 8\]"),
    "a wide residual": (
        {"residual": GOOD["residual"].float()},
        ShapeError,
        "residual must be .* like rows, got torch.float32",
    ),
    "no counters": ({"counters": torch.zeros(0).int()}, ShapeError, r"counters must be \[1\] or more .* \[0\] of"),
    "wide counters": ({"counters": torch.zeros(1).long()}, ShapeError, "of int32, contiguous, got .* torch.int64"),
    "counters of others": ({"counters": torch.zeros(4).int()[::2]}, ShapeError, r"contiguous, got \[2\] of torch.int"),
    "another device": ({"weight": GOOD["weight"].to("meta")}, ShapeError, "one device, got .'cpu', 'meta'"),
    "another activation": ({"gate": "relu"}, UnsupportedError, "gate must be one of silu, gelu_tanh, got 'relu'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    change, error, message = BAD[name]
    unchecked = inspect.unwrap(ops.skinny_linear)  # outside the tests nobody checks its annotations
    with pytest.raises(error, match=f"skinny_linear: .*{message}"):
        unchecked(**GOOD | change)


@pytest.mark.parametrize(
    ("gate", "up", "said"),
    [
        (torch.ones(32, 2), torch.ones(32, 3), r"got \[32, 2\] and \[32, 3\]"),
        (torch.ones(33, 2), torch.ones(33, 2), r"a multiple of 32 rows, got \[33, 2\]"),
        (torch.ones(()), torch.ones(()), r"got \[\] and \[\]"),
        (torch.ones(32, 2), torch.ones(32, 2).half(), r"got torch.float32 on cpu and torch.float16 on cpu"),
        (torch.ones(32, 2), torch.ones(32, 2, device="meta"), r"on cpu and torch.float32 on meta"),
    ],
)
def test_what_cannot_be_interleaved(gate: Tensor, up: Tensor, said: str) -> None:
    with pytest.raises(ShapeError, match=f"interleave_gate: gate and up must be alike, .*{said}"):
        inspect.unwrap(ops.interleave_gate)(gate, up)
