"""What is no tensor, or has other dimensions, is refused by every op by name; the former before anything runs."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import ops
from specdec.errors import ShapeError
from specdec.ops import _checks

Op = Callable[..., Any]


def _ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers)


ROWS, TREE, ONE = torch.ones(1, 1, 3, 16), _ints([-1, 0, 0]), _ints(1)
SEEN, DEPTHS = ops.tree_layout(TREE, 3 * ONE)
NODES, BETA = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1)
RECORD = ops.DeltaRecord(NODES, NODES, BETA)
STATE = ops.TextState(torch.zeros(1, 9, dtype=torch.int64), ONE.clone(), ONE - 1, ONE - 1, 9 * ONE)
CODES = torch.ones(1, 1, 9, 16, dtype=torch.int8)
SCALES = torch.ones(1, 1, 9, 1)
CHAIN = {
    **{"query": ROWS, "keys": CODES, "values": CODES, "key_scales": SCALES, "value_scales": SCALES, "lengths": ONE},
    **{"blocks": _ints([0]), "starts": 0 * ONE, "sinks": torch.ones(1)},
}
RULE = {"query": NODES, "key": NODES, "value": NODES, "decay": -BETA, "beta": BETA, "ancestors": SEEN}

CALLS: dict[str, dict[str, Any]] = {
    "accept_tree": {
        **{"tokens": TREE + 1, "parents": TREE, "num_nodes": 3 * ONE, "visible": SEEN, "depths": DEPTHS},
        **{"chosen": TREE, "state": STATE, "stops": ONE},
    },
    "causal_conv_tree": {
        **{"inputs": BETA, "weight": torch.ones(1, 2), "history": BETA.mT, "ancestors": SEEN, "bias": torch.ones(1)},
        **{"path": BETA, "counts": ONE, "out": BETA.clone()},
    },
    "conv_fold": {"history": BETA.mT, "path": BETA, "counts": ONE},
    "gated_delta_fold": {"state": torch.zeros(1, 1, 2, 2), "path": RECORD, "counts": ONE},
    "gated_delta_tree": {
        **{"state": torch.zeros(1, 1, 2, 2), "path": RECORD, "counts": ONE, **RULE},
        "out": ops.DeltaRecord(NODES.clone(), NODES.clone(), BETA.clone()),
    },
    "grow_tree": {
        **{"tokens": _ints([[5, 6]]), "scores": -torch.ones(1, 1, 1, 2), "root": ONE, "limits": ONE},
        "nodes": 2,
    },
    "hadamard": {"rows": ROWS},
    "interleave_gate": {"gate": torch.ones(32, 1), "up": torch.ones(32, 1)},
    "lookup_tree": {"tokens": _ints([5, 6, 5]), "lengths": 3 * ONE, "limits": ONE, "nodes": 2},
    "move_rows": {"buffers": (ROWS[None], ROWS[None]), "nodes": _ints([0, 1]), "counts": ONE, "lengths": ONE},
    "rms_norm": {"rows": torch.ones(1, 4), "scale": torch.ones(4), "eps": 1e-6, "residual": torch.ones(1, 4)},
    "routed_experts": {
        **{"hidden": torch.ones(1, 4), "chosen": _ints([0]), "weights": torch.ones(1, 1)},
        **{"gate_up": torch.ones(1, 6, 4), "down": torch.ones(1, 4, 3)},
    },
    "skinny_linear": {
        **{"rows": torch.ones(1, 4), "weight": torch.ones(64, 4), "bias": torch.ones(64)},
        **{"residual": torch.ones(1, 64), "counters": torch.zeros(1, dtype=torch.int32)},
    },
    "split_kv_attention": CHAIN,
    "tree_attention": {**CHAIN, "visible": SEEN, "depths": DEPTHS},
    "tree_layout": {"parents": TREE, "num_nodes": 3 * ONE},
    "write_rows": {
        **{"keys": ROWS, "values": ROWS, "slots": _ints([0, 1, 2])},
        **{"key_parts": (CODES.clone(), SCALES.clone()), "value_parts": (ROWS.repeat(1, 1, 3, 1),)},
    },
}
"""A call of each op with all its tensors."""

WRONG: dict[str, Any] = {"list": [1.0], "ndarray": np.ones(3), "int": 3, "None": None}


def holds_tensors(kind: Any) -> bool:
    """Whether an annotation asks for tensors."""
    if dataclasses.is_dataclass(kind):
        return any(holds_tensors(field.type) for field in dataclasses.fields(kind))
    tensor = kind is Tensor or getattr(kind, "array_type", None) is Tensor
    return tensor or any(map(holds_tensors, typing.get_args(kind)))


def parameters(op: str) -> dict[str, inspect.Parameter]:
    """Parameters of an op that are tensors, or hold some."""
    given = inspect.signature(inspect.unwrap(getattr(ops, op))).parameters
    return {name: each for name, each in given.items() if holds_tensors(each.annotation)}


TAKERS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name)) and parameters(name)]
ARGUMENTS = [(op, argument) for op in TAKERS for argument in parameters(op)]


class Nothing(TorchDispatchMode):
    """Lets no computation pass."""

    def __torch_dispatch__(self, func: Any, *rest: Any) -> Any:
        raise AssertionError(f"{func} ran")


def refuses(run: Op, place: str, kind: str, call: dict[str, Any]) -> None:
    """Demands an error that names a place and what came there, before anything is computed."""
    with Nothing(), pytest.raises(ShapeError, match=rf"^{re.escape(place)} must be .*, got .*{kind}\b"):
        inspect.unwrap(run)(**call)  # outside the tests nobody checks annotations


def changed(holder: Any, wrong: Any) -> dict[str, Any]:
    """A tuple or a record with something wrong in each of its places, by what is written behind its name."""
    if isinstance(holder, tuple):
        return {f"[{i}]": (*holder[:i], wrong, *holder[i + 1 :]) for i in range(len(holder))}
    found = {}
    for field in dataclasses.fields(holder):
        broken = object.__new__(type(holder))
        for name in type(holder).__slots__:
            object.__setattr__(broken, name, wrong if name == field.name else getattr(holder, name))
        found[f".{field.name}"] = broken
    return found


def test_every_op_and_every_tensor_is_looked_at() -> None:
    assert set(TAKERS) == set(CALLS)
    for op in TAKERS:
        assert parameters(op).keys() <= CALLS[op].keys()


@pytest.mark.parametrize("op", TAKERS)
def test_the_calls_are_right_otherwise(op: str) -> None:
    getattr(ops, op)(**CALLS[op])


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_what_is_no_tensor_is_refused_by_name(op: str, argument: str, kind: str) -> None:
    run, call = getattr(ops, op), CALLS[op]
    if kind != "None" or parameters(op)[argument].default is inspect.Parameter.empty:
        several = kind == "list" and "tuple" in str(parameters(op)[argument].annotation)
        place, came = (f"{argument}[0]", "float") if several else (argument, kind)  # a list may stand for a tuple
        refuses(run, f"{op}: {place}", came, {**call, argument: WRONG[kind]})


HOLDERS = [each for each in ARGUMENTS if not isinstance(CALLS[each[0]][each[1]], Tensor)]


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("op", "argument"), HOLDERS)
def test_tuples_and_records_hold_nothing_else(op: str, argument: str, kind: str) -> None:
    for place, broken in changed(CALLS[op][argument], WRONG[kind]).items():
        refuses(getattr(ops, op), f"{op}: {argument}{place}", kind, {**CALLS[op], argument: broken})


def test_a_single_tensor_is_no_tuple() -> None:
    call = {**CALLS["move_rows"], "buffers": ROWS[None]}
    refuses(ops.move_rows, "move_rows: buffers", r"Tensor; a single one goes as \(tensor", call)


def test_nodes_along_a_record() -> None:
    refuses(ops.DeltaRecord.along, "DeltaRecord.along: nodes", "list", {"self": RECORD, "nodes": [[0, 2]]})


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"a tensor, got list; torch\.as_tensor makes one"):
        _checks.tensors("op", {"rows": [1.0]})
    with pytest.raises(ShapeError, match=r"a tensor or None, got int; torch\.as_tensor makes one"):
        _checks.tensors("op", {}, {"rows": 1})
    with pytest.raises(ShapeError, match=r"a tensor, got None; it cannot be left out"):
        _checks.tensors("op", {"rows": None})
    with pytest.raises(ShapeError, match=r"of ops\.DeltaRecord, got tuple; it is made of keys, updates, decays"):
        _checks.record_of("op", "path", (), ops.DeltaRecord)


PLACES = [
    (op, argument)
    for op, argument in ARGUMENTS
    if isinstance(CALLS[op][argument], Tensor) and op != "hadamard"  # takes any number of them
]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda tensor: tensor.flatten()[0],
    "fewer": lambda tensor: tensor[0],
    "more": lambda tensor: tensor[None],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("op", "argument"), PLACES)
def test_another_number_of_dimensions_is_refused(op: str, argument: str, change: str) -> None:
    call = {**CALLS[op], argument: CHANGES[change](CALLS[op][argument])}
    with pytest.raises(ShapeError, match=rf"^{op.removesuffix('_tree').removesuffix('_fold')}.*: .*{argument}"):
        inspect.unwrap(getattr(ops, op))(**call)


def test_a_number_is_not_rotated() -> None:
    with pytest.raises(ShapeError, match=r"hadamard: rows must be \[\.\.\., dim\], got a single number"):
        inspect.unwrap(ops.hadamard)(torch.tensor(1.0))


def _raw(rows: Any) -> None:
    rows.dim()


def _of_another_name(rows: Any) -> None:
    _checks.tensors("op", {"weight": rows})


def _late(rows: Any) -> None:
    torch.zeros(1)
    _checks.tensors("op", {"rows": rows})


@pytest.mark.parametrize("wrong", [_raw, _of_another_name, _late])
def test_the_test_would_notice(wrong: Op) -> None:
    with pytest.raises((AttributeError, AssertionError)):
        refuses(wrong, "op: rows", "list", {"rows": [1.0]})
