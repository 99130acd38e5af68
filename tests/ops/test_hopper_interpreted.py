"""The attention kernel of compute capability 9, written in Gluon, against the reference in float64: its logic."""

import dataclasses
import functools
import importlib.util
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import kv, ops
from specdec.ops._attention_call import AttentionCall
from specdec.ops._attention_plan import AttentionPlan, Device, make_plan
from tests.ops import gluon_interpreter
from tests.ops.problems import problem
from tests.trees.random_trees import caught

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
many = settings(max_examples=settings().max_examples * 3)  # an example takes a tenth of a second

MODULES = [f"specdec_kernels.{name}" for name in ("_hopper_codes", "_hopper_ring", "tree_attention_hopper")]
ROUNDING = 8e-3
"""Largest error of an output near 1: weights and partial sums are rounded to float16."""

KINDS = {"float16": (128, False, 48), "int8": (128, True, 48), "wide": (256, False, 96), "pieces": (512, False, 96)}
"""Dimension, whether keys and values are codes, and rows for which there is a plan."""


@functools.cache
def kernel(*changes: tuple[str, str]) -> ModuleType:
    module = gluon_interpreter.load(MODULES, dict(changes))
    module.pdl = lambda _device: False  # type: ignore[attr-defined]  # a module that is made here
    module.launch_late = lambda _device: {}  # type: ignore[attr-defined]  # as above
    return module


@functools.cache
def plan(kind: str) -> AttentionPlan:
    """How the kernel is launched for a long cache."""
    dim, codes, rows = KINDS[kind]
    shape = ops.AttentionShape(1, 1, 1, rows, 2**15, dim, bytes_per_element=1 if codes else 2)
    found = make_plan(shape, Device(), deterministic=False, specialised=True)
    assert found.specialised
    return found


def attend(module: ModuleType, plan: AttentionPlan, **call: Any) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the denominators, the runs added up in float64."""
    query, values, sinks = call["query"], call["values"], call["sinks"]
    lines, value_dim = query.shape[:3], values.shape[3]
    parts = torch.full((*lines, plan.splits, value_dim), math.nan, dtype=torch.float16)
    tops, totals = torch.full((2, *lines, plan.portions, plan.splits), math.nan)
    module.launch(AttentionCall(**call), plan, parts, tops, totals)
    parts, tops, totals = parts.double(), tops.double() * math.log(2), totals.double()
    most = tops.amax(-1, keepdim=True)
    base = most if sinks is None else most.maximum(sinks.double().view(-1, 1, 1, 1))
    fade = (tops - base.masked_fill(base == -math.inf, 0)).exp()
    total = (totals * fade).sum(-1, keepdim=True)
    broken = total.isnan().any(-2, keepdim=True)  # in one portion: the whole row
    empty = (most == -math.inf) & ~broken
    if sinks is not None:
        total = total + (sinks.double().view(-1, 1, 1, 1) - base).exp()
    total = total.masked_fill(broken, math.nan).masked_fill(empty, 1)
    sums = torch.einsum("...ps,...spv->...pv", fade, parts.unflatten(-1, (plan.portions, -1)))
    lse = (base + total.log()).masked_fill(empty, -math.inf)
    return (sums / total).masked_fill(empty, 0).flatten(-2), lse[..., 0, 0]


def law(
    *changes: tuple[str, str],
    kind: str,
    sizes: list[int],
    slack: int,
    splits: int,
    emptied: bool,
    broken: list[tuple[int, int, float]],
    **inputs: Any,
) -> None:
    """Output and denominators are those of the reference; rows that see a broken value are NaN.

    Args:
        changes: to the sources of the kernel.
        kind: of the cache.
        sizes: nodes per batch row.
        slack: slots behind the tree, which are NaN.
        splits: runs.
        emptied: whether nobody sees anything in the last batch row of several.
        broken: a node, a value dimension, and what stands there in the first batch row.
        inputs: of `problem`.
    """
    dim, codes, _ = KINDS[kind]
    lengths = inputs["lengths"]
    slack += -(max(lengths[: len(sizes)]) + max(sizes) + slack) % 4  # the copy engine fetches scales by 16 bytes
    dtype = torch.float16
    call = problem(sizes=sizes, slack=slack, dim=dim, value_dim=dim, dtype=dtype, **inputs).call
    call["scale"] = dim**-0.5
    if emptied and len(sizes) > 1:
        call["visible"][-1] = 0
    stored: dict[str, Any] = {"key_scales": None, "value_scales": None}
    dense = {name: call[name].double() for name in ("keys", "values")}
    for name in ("keys", "values") if codes else ():
        call[name], scales = kv.Int8().encode(call[name].float())
        stored[f"{name[:-1]}_scales"] = scales
        dense[name] = call[name].double() * scales.double()
    for node, column, number in broken:
        slot = int(call["lengths"][0]) + node % sizes[0]
        for rows in (dense["values"], stored["value_scales"] if codes else call["values"]):
            rows[0, 0, slot, ... if codes else column % dim] = number
    output, lse = attend(kernel(*changes), dataclasses.replace(plan(kind), splits=splits), **call, **stored)
    exact = {name: each.double() for name, each in call.items() if name in ("query", "sinks") and each is not None}
    expected, expected_lse = ops.tree_attention(**call | exact | dense, impl="reference", return_lse=True)
    seeing = expected.isnan().all(-1)
    assert output[seeing].isnan().all()
    torch.testing.assert_close(output[~seeing], expected[~seeing], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(lse[~seeing], expected_lse[~seeing], rtol=ROUNDING, atol=ROUNDING)


def cases(**fixed: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Arguments of `law`: lengths around the edges of tiles, trees of several words, more runs than tiles."""
    small, large = st.integers(1, 9), st.integers(1, 140)
    bad = st.tuples(st.integers(0, 200), st.integers(0, 511), st.sampled_from([math.nan, math.inf, -math.inf]))
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.sampled_from(sorted(KINDS)),
        "seed": st.integers(0, 2**32),
        "sizes": st.lists(st.one_of(small, small, large), min_size=1, max_size=2),
        "lengths": st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 200, 383, 1000]), min_size=2, max_size=2),
        "style": st.sampled_from(["any", "deep", "chain", "star"]),
        "groups": st.sampled_from([1, 1, 2, 3, 5]),
        "kv_heads": st.sampled_from([1, 2]),
        "skipped": st.sampled_from([0, 0, 1, 5]),
        "sinks": st.booleans(),
        "slack": st.sampled_from([0, 3, 70]),
        "splits": st.sampled_from([2, 3, 7]),
        "emptied": st.booleans(),
        "broken": st.one_of(st.just([]), st.lists(bad, max_size=2)),
    }
    return drawn | {name: st.just(value) for name, value in fixed.items()}


@pytest.mark.parametrize("kind", KINDS)
@many
@given(data=st.data())
def test_the_kernel_is_the_reference(kind: str, data: st.DataObject) -> None:
    law(**data.draw(st.fixed_dictionaries(cases(kind=kind))))


WAITED = """\
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(growing, p))
"""
VALUES_FETCHED = """\
            if step > 0:
                free = before + STAGES
                fetch((value_source,), (values,), batch, group, begin, (column,), free, count, TILE, STAGES)
"""
SCORED = """\
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(coming,))
"""
KEYS_FETCHED = """\
            fetch(key_sources, keys, batch, group, begin, key_columns, step + STAGES, count, TILE, STAGES)
"""
BYTES_SCORED = "            upper, scores = warpgroup_mma_wait(num_outstanding=1, deps=(upper, coming))\n"
SCALED = "            scores = (upper * 256 + scores).to(gl.float32) * key_scale[None, :]\n"
BOTH_FETCHED = "            fetch(both, rings, batch, group, begin, columns, step + STAGES, count, TILE, STAGES)\n"

WRONG: dict[str, tuple[str, dict[str, str]]] = {
    "values fetched before their products": ("wide", {WAITED + VALUES_FETCHED: VALUES_FETCHED + WAITED}),
    "the only tile of values fetched before its products": (
        "pieces",
        {WAITED + VALUES_FETCHED: VALUES_FETCHED + WAITED},
    ),
    "keys fetched before their products": ("wide", {SCORED + KEYS_FETCHED: KEYS_FETCHED + SCORED}),
    "codes fetched before their products": (
        "int8",
        {BYTES_SCORED + SCALED + BOTH_FETCHED: BOTH_FETCHED + BYTES_SCORED + SCALED},
    ),
    "scores before they are there": ("int8", {"num_outstanding=1, deps=(upper": "num_outstanding=2, deps=(upper"}),
    "values widened over those in use": ("int8", {"v = wide.index(before % 2)": "v = wide.index(step % 2)"}),
    "no fence after values are widened": (
        "int8",
        {"    wide.store(found)\n    fence_async_shared()": "    wide.store(found)"},
    ),
    "no fence after queries are cut": (
        "int8",
        {"    bytes.index(1).store(lower)\n    fence_async_shared()": "    bytes.index(1).store(lower)"},
    ),
    "scales that nobody expects": (
        "int8",
        {"sum(each.block_type.nbytes for each in source)": "source[0].block_type.nbytes"},
    ),
    "the phase of the tile before": ("float16", {"(step // STAGES) & 1": "(step // STAGES + 1) & 1"}),
    "a block that ends before its sums are stored": ("wide", {"    tma.store_wait(0)": "    pass"}),
    "a block that ends before its copies": ("float16", {"> 0, count, ahead)": "> 0, count, 1)"}),
    "masks one bit off": ("float16", {"up = 64 * word - offset": "up = 64 * word - offset + 1"}),
    "one word of a mask": ("pieces", {"gl.static_range(WORDS)": "gl.static_range(1)"}),
    "at most 62 committed slots": ("wide", {"gl.maximum(-offset, 0), 63)": "gl.maximum(-offset, 0), 62)"}),
    "one plain tile too many": ("int8", {"plain = length // TILE - begin": "plain = length // TILE + 1 - begin"}),
    "runs too short": ("wide", {"gl.cdiv(last_tile + TREE_TILES, splits)": "(last_tile + TREE_TILES) // splits"}),
    "rows packed without padding": ("float16", {"head, row = packed % ROOM": "head, row = packed % GROUPS"}),
    "the first piece of keys four times": ("pieces", {"key_columns + (piece * WIDTH,)": "key_columns + (0,)"}),
    "the first portion twice": ("pieces", {"column = portion * VALUE_DIM": "column = 0"}),
    "broken values stay": ("float16", {"if gl.max(broken.to(gl.int32), 0) > 0:": "if False:"}),
    "broken scales stay": ("int8", {"gl.where(broken, 0.0, scales)": "scales"}),
    "scales of values left out": ("int8", {"weights *= value_scale[None, :]": "weights *= 1.0"}),
    "high bytes that count 128 times": ("int8", {"upper * 256": "upper * 128"}),
    "bytes of queries in another order": ("int8", {"$0, low, high, 0x7632": "$0, low, high, 0x6732"}),
    "codes without a sign": ("int8", {"xor.b32 code, $4, 0x80808080": "xor.b32 code, $4, 0x00808080"}),
}
"""For each kind of cache, changes to the kernel."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_caught(name: str) -> None:
    kind, changes = WRONG[name]
    caught(law, *changes.items(), **cases(kind=kind))
