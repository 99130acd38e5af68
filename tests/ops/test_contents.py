"""What tensors of integers hold is looked at on a CPU: nothing is written, lost or read where it does not belong."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _ancestry


def ints(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


PARENTS, THREE, ONE = ints([-1, 0, 0]), ints(3), ints(1)
VISIBLE, DEPTHS = ops.tree_layout(PARENTS, THREE)
CYCLE = ints([-1, 2, 0])
NODES = torch.ones(1, 3, 1, 2)
RECORD = ops.DeltaRecord(NODES, NODES, torch.zeros(1, 3, 1))
LATER = torch.full_like(VISIBLE, 7)


def text(**change: Any) -> ops.TextState:
    """Room for four tokens, of which one is committed."""
    zero = ONE - 1
    whole = {"tokens": ints([7, 0, 0, 0]), "lengths": ONE, "cached": zero, "positions": zero, "remaining": 9 * ONE}
    return ops.TextState(**{name: each.clone() for name, each in {**whole, **change}.items()})


def accept(**change: Any) -> Any:
    drafts = {"tokens": ints([7, 5, 8]), "parents": PARENTS, "num_nodes": THREE, "visible": VISIBLE, "depths": DEPTHS}
    return ops.accept_tree(**{**drafts, "chosen": ints([8, 1, 3]), "state": text(), "stops": ONE[:0], **change})


def rule(**change: Any) -> Any:
    one = torch.ones(1, 3, 1)
    call = {"query": NODES, "key": NODES, "value": NODES, "decay": -one, "beta": one, "ancestors": VISIBLE}
    return inspect.unwrap(ops.gated_delta_tree)(**{**call, "state": torch.zeros(1, 1, 2, 2), **change})


def convolution(**change: Any) -> Any:
    call = {"inputs": torch.ones(1, 3, 2), "weight": torch.ones(2, 2), "history": torch.ones(1, 2, 1)}
    return inspect.unwrap(ops.causal_conv_tree)(**{**call, "ancestors": VISIBLE, **change})


def fold(counts: Tensor) -> None:
    ops.gated_delta_fold(torch.zeros(1, 1, 2, 2), RECORD, counts)


def append(counts: Tensor) -> None:
    ops.conv_fold(torch.ones(1, 2, 1), torch.ones(1, 3, 2), counts)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "layout: a cycle": (lambda: ops.tree_layout(CYCLE, THREE), "tree_layout: a parent must come before"),
    "layout: too many nodes": (lambda: ops.tree_layout(PARENTS, 4 * ONE), r"num_nodes must be 0 to 3 .*got 4 to 4"),
    "layout: fewer than none": (lambda: ops.tree_layout(PARENTS, -ONE), "tree_layout: num_nodes must be 0 to 3"),
    "accept: a cycle": (lambda: accept(parents=CYCLE), "accept_tree: a parent must come before its children"),
    "accept: too many nodes": (lambda: accept(num_nodes=4 * ONE), "accept_tree: num_nodes must be 0 to 3"),
    "accept: too deep": (lambda: accept(depths=ints([0, 3, 1])), "accept_tree: depths must be 0 to 2"),
    "accept: less than nothing left": (lambda: accept(state=text(remaining=-ONE)), "state.remaining must be 0 or more"),
    "accept: a longer text": (lambda: accept(state=text(lengths=5 * ONE)), "state.lengths must be 0 to 4"),
    "accept: no room": (lambda: accept(state=text(lengths=3 * ONE)), "what may be committed must be 0 to 4.*got 5 to"),
    "rule: later nodes": (lambda: rule(ancestors=LATER), "gated_delta_tree: ancestors must stand before a node"),
    "rule: too many": (lambda: rule(path=RECORD, counts=4 * ONE), "gated_delta_tree: counts must be 0 to 3"),
    "rule: no number": (lambda: rule(scale=float("nan")), "gated_delta_tree: scale must be a finite number"),
    "rule: a word": (lambda: rule(scale="a"), "gated_delta_tree: scale must be a finite number or None, got 'a'"),
    "fold: too many": (lambda: fold(4 * ONE), "gated_delta_fold: counts must be 0 to 3"),
    "fold: fewer than none": (lambda: fold(-ONE), "gated_delta_fold: counts must be 0 to 3"),
    "along: no such node": (lambda: RECORD.along(ints([0, 3])), r"DeltaRecord\.along: nodes must be 0 to 2"),
    "along: one row": (lambda: inspect.unwrap(ops.DeltaRecord.along)(RECORD, ONE), r"nodes must be int64 \[1, path\]"),
    "convolution: later nodes": (lambda: convolution(ancestors=LATER), "causal_conv_tree: ancestors must stand before"),
    "convolution: too many": (
        lambda: convolution(path=torch.ones(1, 3, 2), counts=4 * ONE),
        "causal_conv_tree: counts must be 0 to 3",
    ),
    "convolution: integers": (lambda: convolution(inputs=ints([[1, 1]] * 3)), "must hold floating-point numbers"),
    "convolution: no taps": (lambda: convolution(weight=torch.ones(2, 0)), "1 or more taps"),
    "append: too many": (lambda: append(4 * ONE), "conv_fold: counts must be 0 to 3"),
    "append: fewer than none": (lambda: append(-ONE), "conv_fold: counts must be 0 to 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_there_is_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ShapeError, match=message):
        call()


def test_what_is_there_is_not() -> None:
    """The same calls with nothing wrong: at the edges of what is allowed."""
    accept(num_nodes=0 * ONE)
    accept(state=text(lengths=2 * ONE))
    accept(state=text(lengths=4 * ONE, remaining=0 * ONE))
    rule(path=RECORD, counts=THREE, scale=2)
    convolution(path=torch.ones(1, 3, 2), counts=THREE)
    fold(THREE)
    append(0 * ONE)
    ops.tree_layout(ints([-1, 0, 9]), 2 * ONE)  # padding may say anything
    assert RECORD.along(ints([2, -1])).keys.shape[1] == 2


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 128, 130])
def test_ancestors_stand_before_a_node(nodes: int) -> None:
    chain = _ancestry.pack(torch.ones(1, nodes, nodes, dtype=torch.bool).tril())
    _ancestry.require_ancestors("op", chain)
    for node in {0, nodes // 2, nodes - 2} & set(range(nodes - 1)):
        later = chain.clone()
        later[0, node, (node + 1) // 64] |= 1 << (node + 1) % 64 if (node + 1) % 64 < 63 else -(1 << 63)
        with pytest.raises(ShapeError, match="op: ancestors must stand before a node or be itself"):
            _ancestry.require_ancestors("op", later)


FLAGS: dict[str, Callable[[], Any]] = {
    "normalize": lambda: rule(normalize="no"),
    "value_first": lambda: rule(value_first=1),
    "rotate_keys": lambda: inspect.unwrap(ops.write_rows)(
        *(NODES, NODES), *((torch.ones(1, 3, 4, 2),),) * 2, ints([0]), rotate_keys="no"
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} must be True or False"):
        FLAGS[name]()


@pytest.mark.parametrize("size", [2.0, "5", None, True, 0, -1, 65])
@pytest.mark.parametrize("name", ["nodes", "longest", "occurrences"])
def test_sizes_are_whole_numbers(name: str, size: Any) -> None:
    call = {"nodes": 2, name: size}
    with pytest.raises(UnsupportedError, match=f"lookup_tree: {name} must be 1 to .*got {size!r}"):
        inspect.unwrap(ops.lookup_tree)(ints([5, 6, 5]), 3 * ONE, **call)
