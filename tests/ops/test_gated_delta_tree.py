"""The gated delta rule over trees against walks along every path: the closed form, and the interpreted kernel."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from tests.ops.hybrid_problems import CASES, DeltaProblem
from tests.trees.random_trees import caught

EXACT = 1e-13
ROUNDING = 1e-5
"""Largest error relative to the largest number: float64, and float32 products in every order."""

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
kernel = pytest.mark.skipif(not ops.available("gated_delta_tree", "cpu")[0], reason="triton is not installed")
few = settings(max_examples=settings().max_examples // 3)  # the interpreter takes a second for an example
Change = Callable[[dict[str, Any]], dict[str, Any]]


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    worst = float((found.double() - expected).abs().max()) if found.numel() else 0.0
    assert worst <= tolerance * max(1.0, float(expected.abs().max())), f"off by {worst}"


def law(change: Change, impl: ops.Impl, tolerance: float, **inputs: Any) -> None:
    """Outputs, and the state after a path was folded: on demand, and at the beginning of the next tree."""
    problem = DeltaProblem(**inputs)
    state = problem.call["state"].clone()
    output, record = ops.gated_delta_tree(**change(problem.call), impl=impl)
    assert torch.equal(problem.call["state"], state), "a tree alone writes no state"
    for row, expected in enumerate(problem.outputs()):
        near(output[row, : len(expected)], expected, tolerance)
    nodes, counts, chosen = problem.some_path()
    expected = problem.states(chosen)
    layout = {"value_first": problem.call["value_first"]}
    path = change({"path": record.along(nodes), "counts": counts})
    ops.gated_delta_fold(state, **path, **layout, impl=impl)
    near(state, expected, tolerance)
    assert torch.equal(state[counts == 0], problem.call["state"][counts == 0]), "nothing kept, nothing changed"
    tree = {**problem.call, **path, "state": problem.call["state"].clone()}
    again = {**problem.call, "state": state.clone()}
    together, apart = ops.gated_delta_tree(**tree, impl=impl), ops.gated_delta_tree(**again, impl=impl)
    # Folding is the same program wherever it is done, but may be cut otherwise, and on some processors numpy, which
    # interprets the kernel, adds up products of another shape in another order. On a GPU equality is demanded.
    bound = 0.0 if impl == "reference" else ROUNDING
    for found, wanted in ((tree["state"], state), (together[0], apart[0]), (together[1].updates, apart[1].updates)):
        near(found, wanted.double(), bound)


@given(**CASES)
def test_the_closed_form_is_the_walk(**inputs: Any) -> None:
    law(lambda call: call, "reference", EXACT, **inputs)


@given(**CASES)
def test_with_a_decay_for_each_channel(**inputs: Any) -> None:
    law(lambda call: call, "reference", EXACT, **inputs, channelwise=True)


@given(**CASES)
def test_in_float32(**inputs: Any) -> None:
    law(lambda call: call, "reference", ROUNDING, **inputs, dtype=torch.float32, state_dtype=torch.float32)


@kernel
@few
@given(**CASES)
def test_the_kernel_is_the_walk(**inputs: Any) -> None:
    law(lambda call: call, "triton", ROUNDING, **inputs, dtype=torch.float32, state_dtype=torch.float32)


def without(bits: int) -> Change:
    return lambda call: {**call, "ancestors": call["ancestors"] & ~bits} if "ancestors" in call else call


def changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda call: {**call, name: change(call[name])} if name in call else call


WRONG: dict[str, Change] = {
    "the root unseen": without(1),
    "siblings seen": changed("ancestors", lambda masks: masks | 1 | (masks >> 1)),
    "a chain": changed(
        "ancestors",
        lambda masks: (
            masks.new_tensor([(1 << (n + 1)) - 1 for n in range(63)] + [-1])[: masks.shape[1], None]
            .expand_as(masks)
            .contiguous()
        ),
    ),
    "no decay": changed("decay", torch.zeros_like),
    "full strength": changed("beta", torch.ones_like),
    "keys as they are": lambda call: {**call, "normalize": not call["normalize"]} if "normalize" in call else call,
    "the path backwards": changed(
        "path", lambda path: path.along(torch.arange(path.keys.shape[1]).flip(0)[None].expand(path.keys.shape[0], -1))
    ),
    "one node less": changed("counts", lambda counts: (counts - 1).clamp_min(0)),
    "the whole path": changed("counts", lambda counts: torch.full_like(counts, int(counts.max()))),
    "siblings' updates": changed("path", lambda path: ops.DeltaRecord(path.keys, path.updates.roll(1, 1), path.decays)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str) -> None:
    caught(law, WRONG[name], "reference", 1e-6, **CASES)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
@pytest.mark.parametrize("broken", ["key", "value", "decay", "beta", "query"])
def test_what_is_not_finite_reaches_descendants_only(impl: ops.Impl, broken: str) -> None:
    problem = DeltaProblem(3, [6], "star", (1, 2), (8, 8), dtype=torch.float32, state_dtype=torch.float32)
    clean, record = ops.gated_delta_tree(**problem.call, impl=impl)
    problem.call[broken][0, 2] = torch.nan
    output, spoilt = ops.gated_delta_tree(**problem.call, impl=impl)
    assert output[0, 2].isnan().all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(output[0, others], clean[0, others])
    path = spoilt.along(torch.tensor([[0, 4, 2]]))
    states = [problem.call["state"].clone() for _ in range(2)]
    ops.gated_delta_fold(states[0], path, torch.tensor([2]), impl=impl)
    ops.gated_delta_fold(states[1], record.along(torch.tensor([[0, 4]])), torch.tensor([2]), impl=impl)
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
def test_the_record_is_written_where_it_is_wanted(impl: ops.Impl) -> None:
    problem = DeltaProblem(5, [9, 4], "any", (1, 3), (16, 16), dtype=torch.float32, state_dtype=torch.float32)
    output, record = ops.gated_delta_tree(**problem.call, impl=impl)
    out = ops.DeltaRecord(*(torch.full_like(part, torch.nan) for part in (record.keys, record.updates, record.decays)))
    again, same = ops.gated_delta_tree(**problem.call, out=out, impl=impl)
    assert same.updates.data_ptr() == out.updates.data_ptr()
    assert torch.equal(again, output)
    for part in ("keys", "updates", "decays"):
        assert torch.equal(getattr(out, part), getattr(record, part))


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.float32])
@kernel
def test_a_state_is_read_as_it_is_stored(state_dtype: torch.dtype) -> None:
    """The kernel folds in registers, and reads what it stored: as if another call had folded."""
    inputs: dict[str, Any] = {"seed": 8, "sizes": [7, 5], "style": "any", "heads": (1, 2), "dims": (16, 16)}
    law(lambda call: call, "triton", 3e-3, **inputs, dtype=torch.float16, state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": torch.zeros(1, 3, 1, 5)}, r"key must be \[1, 3, 1, 4\]"),
        ({"beta": torch.zeros(1, 3, 1)}, r"beta must be \[1, 3, 2\]"),
        ({"ancestors": torch.zeros(1, 3, 2, dtype=torch.int64)}, r"ancestors must be \[1, 3, 1\]"),
        ({"ancestors": torch.zeros(1, 3, 1, dtype=torch.int32)}, "ancestors must be int64"),
        ({"state": torch.zeros(1, 3, 4, 4)}, "value must be|share"),
        ({"counts": torch.tensor([1])}, "come together"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], said: str) -> None:
    problem = DeltaProblem(1, [3], "any", (1, 2), (4, 4))
    with pytest.raises(ShapeError, match=said):
        inspect.unwrap(ops.gated_delta_tree)(**{**problem.call, **change})


def test_states_of_integers_are_refused() -> None:
    problem = DeltaProblem(1, [3], "any", (1, 2), (4, 4))
    with pytest.raises(UnsupportedError, match=r"float64, float32, float16 or bfloat16, got torch\.int64"):
        inspect.unwrap(ops.gated_delta_tree)(**{**problem.call, "state": problem.call["state"].long()})


@kernel
def test_the_kernel_refuses_float64_by_name() -> None:
    problem = DeltaProblem(1, [3], "any", (1, 2), (4, 4))
    with pytest.raises(UnsupportedError, match=r"not torch\.float64"):
        inspect.unwrap(ops.gated_delta_tree)(**problem.call, impl="triton")
