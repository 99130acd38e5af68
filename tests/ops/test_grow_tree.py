"""Trees grown over a lattice against an enumeration of all paths; every number must be the same."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from specdec.ops.grow_tree import MOST
from specdec.trees import topology
from specdec.types import DraftTree

Call = dict[str, Any]
Rule = Callable[..., Any]

kernel = pytest.mark.skipif(not ops.available("grow_tree", "cpu")[0], reason="triton is not installed")
both = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])


def order(score: float, depth: int, path: tuple[int, ...]) -> Any:  # noqa: ARG001 - wrong orders read the path
    return -score, depth


def definition(call: Call, row: int, rule: Rule = order) -> tuple[list[int], list[int]]:
    """Tokens and parents of one row, by enumeration of all paths."""
    tokens, scores = call["tokens"][row], call["scores"][row]
    levels, candidates = tokens.shape
    limit = levels if call["limits"] is None else int(call["limits"][row].clamp(0, levels))
    paths: dict[tuple[int, ...], Tensor] = {(): torch.tensor(0.0)}
    frontier: list[tuple[int, ...]] = [()]
    for level in range(limit):
        grown = []
        for path in frontier:
            before = path[-1] if path and scores.shape[1] > 1 else 0
            for candidate in range(candidates):
                score = paths[path] + scores[level, before, candidate]
                if score > -torch.inf:
                    paths[*path, candidate] = score
                    grown.append((*path, candidate))
        frontier = grown
    chosen: list[tuple[int, ...]] = [()]
    while len(chosen) <= call["nodes"]:
        # A parent comes before its children, so its place is known.
        waiting = [path for path in paths if path not in chosen and path[:-1] in chosen]
        if not waiting:
            break
        best = min(
            waiting,
            key=lambda path: (rule(float(paths[path]), len(path), path), chosen.index(path[:-1]), path[-1]),
        )
        chosen.append(best)
    pad = call["nodes"] + 1 - len(chosen)
    drafted = [int(tokens[len(path) - 1, path[-1]]) for path in chosen[1:]]
    parents = [chosen.index(path[:-1]) for path in chosen[1:]]
    return [int(call["root"][row]), *drafted] + [0] * pad, [-1, *parents] + [-1] * pad


def lattice(seed: int, batch: int, levels: int, candidates: int, *, conditional: bool, ties: bool) -> Call:
    source = torch.Generator().manual_seed(seed)
    before = candidates if conditional else 1
    scores = torch.randn(batch, levels, before, candidates, generator=source).log_softmax(-1)
    if ties:  # few values, exact in float32, and paths that are none
        scores = torch.randint(-3, 1, scores.shape, generator=source).float() / 4
        scores = scores.masked_fill(torch.rand(scores.shape, generator=source) < 0.2, -torch.inf)
    tokens = torch.rand(batch, levels, 97, generator=source).argsort(-1)[..., :candidates]
    root = torch.randint(0, 97, (batch,), generator=source)
    return {"tokens": tokens, "scores": scores, "root": root, "limits": None}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    candidates, levels, batch = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    options = {"conditional": draw(st.booleans()), "ties": draw(st.booleans())}
    call = lattice(draw(st.integers(0, 2**31)), batch, levels, candidates, **options)
    limits = draw(st.none() | st.lists(st.integers(-1, 6), min_size=batch, max_size=batch))
    return call | {"nodes": draw(st.integers(1, 20)), "limits": None if limits is None else torch.tensor(limits)}


def law(call: Call, impl: ops.Impl, rule: Rule = order) -> None:
    tokens, parents, num_nodes = ops.grow_tree(**call, impl=impl)
    for row in range(len(call["root"])):
        wanted = definition(call, row, rule)
        assert (tokens[row].tolist(), parents[row].tolist()) == wanted
        assert int(num_nodes[row]) == 1 + sum(parent >= 0 for parent in wanted[1])
    topology.check(DraftTree(tokens, parents, num_nodes, scores=torch.zeros(tokens.shape)))


@settings(max_examples=60)
@given(call=calls())
def test_the_reference_is_the_definition(call: Call) -> None:
    law(call, "reference")


@kernel
@settings(max_examples=40)
@given(call=calls())
def test_the_kernel_is_the_definition(call: Call) -> None:
    law(call, "triton")


@both
@pytest.mark.parametrize(
    "wrong",
    [lambda score, depth, _: (-score, -depth), lambda score, depth, _: (depth, -score)],
    ids=["deep", "breadth"],
)
def test_another_order_is_noticed(wrong: Rule, impl: ops.Impl) -> None:
    call = lattice(3, 1, 4, 3, conditional=True, ties=True) | {"nodes": 9}
    law(call, impl)
    with pytest.raises(AssertionError):
        law(call, impl, wrong)


@kernel
@pytest.mark.parametrize(("nodes", "levels", "candidates"), [(16, 15, 16), (64, 7, 10), (128, 3, 64)])
def test_the_kernel_is_the_reference_on_large_lattices(nodes: int, levels: int, candidates: int) -> None:
    call = lattice(nodes, 2, levels, candidates, conditional=candidates < 64, ties=False) | {"nodes": nodes}
    found = ops.grow_tree(**call, impl="triton")
    assert all(map(torch.equal, found, ops.grow_tree(**call, impl="reference")))
    strided = {
        name: value.transpose(-1, -2).contiguous().transpose(-1, -2)
        for name, value in call.items()
        if name in ("tokens", "scores")
    }
    assert all(map(torch.equal, found, ops.grow_tree(**(call | strided), impl="triton")))


@both
def test_scores_that_are_none_end_paths(impl: ops.Impl) -> None:
    call = lattice(1, 2, 3, 2, conditional=False, ties=False) | {"nodes": 5}
    call["scores"][0, 0], call["scores"][1, 1] = -torch.inf, torch.nan
    tokens, parents, num_nodes = ops.grow_tree(**call, impl=impl)
    assert num_nodes.tolist() == [1, 3]
    assert parents[0].tolist() == [-1] * 6
    assert tokens[0, 1:].tolist() == [0] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(20))
def test_the_compiled_kernel_is_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    sizes = rng.randint(1, 9), rng.randint(1, 20), rng.randint(1, 40)
    call = lattice(seed, *sizes, conditional=rng.random() < 0.5, ties=rng.random() < 0.3)
    limits = torch.tensor([rng.randint(0, 20) for _ in range(sizes[0])])
    call |= {"nodes": rng.randint(1, 128), "limits": limits}
    there = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in call.items()}
    found = ops.grow_tree(**there, impl="triton")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, ops.grow_tree(**call, impl="reference"), strict=True))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, ShapeError, r"tokens must be \[batch, levels, candidates\]"),
    ({"tokens": torch.zeros(1, 2, 3, dtype=torch.int32)}, ShapeError, "tokens must be torch.int64"),
    ({"scores": torch.zeros(1, 2, 2, 3)}, ShapeError, r"scores must be float32 \[1, 2, 1, 3\] or \[1, 2, 3, 3\]"),
    ({"scores": torch.zeros(1, 2, 1, 3, dtype=torch.float64)}, ShapeError, "scores must be float32"),
    ({"root": torch.zeros(2, dtype=torch.int64)}, ShapeError, r"root must be int64 \[1\]"),
    ({"limits": torch.zeros(1)}, ShapeError, r"limits must be int64 \[1\], got torch.float32"),
    ({"nodes": 0}, UnsupportedError, "nodes must be 1 to 128, got 0"),
    ({"nodes": 129}, UnsupportedError, "nodes must be 1 to 128, got 129"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_wrong_arguments_are_told(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {
        "tokens": torch.zeros(1, 2, 3, dtype=torch.int64),
        "scores": torch.zeros(1, 2, 1, 3),
        "root": torch.zeros(1, dtype=torch.int64),
        "nodes": 3,
    }
    with pytest.raises(error, match=message):
        inspect.unwrap(ops.grow_tree)(**(call | change))


def test_bounds() -> None:
    rng = random.Random(0)
    wide = lattice(rng.randrange(99), 1, 1, MOST["candidates"] + 1, conditional=False, ties=False)
    with pytest.raises(UnsupportedError, match="candidates must be 1 to 64, got 65"):
        ops.grow_tree(**wide, nodes=3)


def test_probabilities_in_place_of_logarithms_are_noticed() -> None:
    call = lattice(1, 1, 2, 2, conditional=False, ties=False)
    with pytest.raises(ShapeError, match=r"at most 0; got some above\. Is a \.log\(\) missing"):
        ops.grow_tree(**(call | {"scores": call["scores"].exp()}), nodes=3)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_an_empty_batch(impl: ops.Impl) -> None:
    call = lattice(0, 0, 3, 2, conditional=True, ties=False)
    tokens, parents, num_nodes = ops.grow_tree(**call, nodes=5, impl=impl)
    assert tokens.shape == parents.shape == (0, 6)
    assert num_nodes.shape == (0,)
