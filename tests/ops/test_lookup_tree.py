"""Trees drafted from the text against their definition with a dict for a trie; every number must be the same."""

import importlib
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
from specdec.trees import topology
from specdec.types import DraftTree
from tests.trees.random_trees import caught

Call = dict[str, Any]
Row = tuple[list[int], list[int]]
Node = tuple[int, int, int]  # weight, depth, rank of the first occurrence

kernel = pytest.mark.skipif(not ops.available("lookup_tree", "cpu")[0], reason="triton is not installed")
both = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])

RULES: dict[str, Callable[..., Any]] = {
    "occurrences": lambda matching, place: (-matching, -place),
    "weight": lambda matching: 2 ** (min(matching, 8) - 1),
    "nodes": lambda weight, depth, first: (-weight, depth, first),
    "numbers": lambda weight, depth, first: (depth, -weight, first),
}


def definition(
    text: list[int], nodes: int, longest: int, occurrences: int, depth: int, rules: dict[str, Callable[..., Any]]
) -> Row:
    """Tokens and parents of the tree of one text, by the words at the head of `specdec/ops/lookup_tree.py`."""
    found = []
    for place in range(len(text) - 1):
        matching = 0
        while matching < min(longest, place + 1) and text[place - matching] == text[-1 - matching]:
            matching += 1
        if matching:
            found.append((matching, place))
    found.sort(key=lambda pair: rules["occurrences"](*pair))
    trie: dict[tuple[int, ...], Node] = {}
    for first, (matching, place) in enumerate(found[:occurrences]):
        ahead = tuple(text[place + 1 :][:depth])
        for size in range(1, len(ahead) + 1):
            weight, _, earlier = trie.get(ahead[:size], (0, size, first))
            trie[ahead[:size]] = (weight + rules["weight"](matching), size, earlier)
    best = sorted(trie, key=lambda path: rules["nodes"](*trie[path]))[:nodes]
    order = [(), *sorted(best, key=lambda path: rules["numbers"](*trie[path]))]
    assert all(path[:-1] in order for path in order[1:]), "not closed under parents"
    pad = nodes + 1 - len(order)
    tokens = [text[-1], *(path[-1] for path in order[1:])] + [0] * pad
    return tokens, [-1, *(order.index(path[:-1]) for path in order[1:])] + [-1] * pad


def expected(call: Call, rules: dict[str, Callable[..., Any]]) -> tuple[Tensor, Tensor, Tensor]:
    rows, depth = [], call["depth"] or call["nodes"]
    for row, length in enumerate(call["lengths"].tolist()):
        limit = depth if call["limits"] is None else min(depth, int(call["limits"][row]))
        text = call["tokens"][row, :length].tolist()
        rows.append(definition(text, call["nodes"], call["longest"], call["occurrences"], max(0, limit), rules))
    tokens, parents = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
    return tokens, parents, 1 + (parents >= 0).sum(1)


def texts(seed: int, lengths: list[int], slack: int, letters: int, style: str) -> Tensor:
    """Rows that repeat themselves; what stands behind them goes on in the same way, so that reading it would show."""
    rng = random.Random(seed)
    capacity = max(lengths) + slack
    motif = [rng.randrange(letters) for _ in range(rng.randint(1, 12))]
    rows = torch.tensor([[rng.randrange(letters) for _ in range(capacity)] for _ in lengths])
    if style == "random":
        return rows
    if style == "copies":  # ends of one text, each followed by something else
        for row, length in enumerate(lengths):
            text: list[int] = []
            while len(text) < capacity:
                text += [*motif[-rng.randint(1, len(motif)) :], rng.randrange(letters)]
            text[max(0, length - len(motif)) : length] = motif[-length:]
            rows[row] = torch.tensor(text[:capacity])
        return rows
    noise = torch.tensor([[rng.random() < 0.05 for _ in range(capacity)] for _ in lengths])
    period = torch.tensor([motif[place % len(motif)] for place in range(capacity)])
    return torch.where(noise, rows, period)


@st.composite
def calls(draw: st.DrawFn, longest_text: int = 60, *, repeating: bool = False) -> Call:
    """Calls of all kinds, or of texts in which long runs of tokens come again."""
    short = st.integers(30, longest_text) if repeating else st.integers(1, 3)
    lengths = draw(st.lists(short | st.integers(1, longest_text), min_size=1, max_size=3))
    slack = draw(st.sampled_from([0, 1, 7]))
    style = draw(st.sampled_from(["periodic", "copies"] if repeating else ["random", "periodic", "copies"]))
    limits = st.lists(st.integers(-1, 9), min_size=len(lengths), max_size=len(lengths)).map(torch.tensor)
    return {
        "tokens": texts(draw(st.integers(0, 2**32)), lengths, slack, draw(st.integers(1, 4)), style),
        "lengths": torch.tensor(lengths),
        "nodes": draw(st.integers(1, 32)),
        "longest": draw(st.sampled_from([9, 16] if repeating else [1, 2, 3, 8, 9, 16])),
        "occurrences": draw(st.integers(1, 32)),
        "depth": draw(st.none() | st.integers(1, 8) | st.just(32)),
        "limits": draw(st.none() | limits),
    }


Change = Callable[[Call], Call]


def law(change: Change, rules: dict[str, Callable[..., Any]], call: Call, impl: ops.Impl = "reference") -> None:
    tokens, parents, num_nodes = ops.lookup_tree(**change(call), impl=impl)
    for found, wanted in zip((tokens, parents, num_nodes), expected(call, rules), strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, wanted)
    topology.check(DraftTree(tokens, parents, num_nodes, scores=torch.zeros(tokens.shape)))


def same(call: Call) -> Call:
    return call


@given(call=calls())
def test_the_reference_is_the_definition(call: Call) -> None:
    law(same, RULES, call)


@kernel
@given(call=calls())
def test_the_kernel_is_the_definition(call: Call) -> None:
    law(same, RULES, call, "triton")


@kernel
@pytest.mark.parametrize(("chunk", "tile"), [(16, 16), (32, 8), (16, 128)])
@settings(max_examples=10)
@given(call=calls(longest_text=150))
def test_any_cut_of_the_text_gives_the_same(chunk: int, tile: int, call: Call) -> None:
    """More chunks than one, more winners than are merged at a time, chunks behind the text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_kernels.lookup_tree.CHUNK", chunk)
        patch.setattr("specdec_kernels.lookup_tree.TILE", tile)
        law(same, RULES, call, "triton")


WRONG_CALLS: dict[str, Change] = {
    "a token that is not committed": lambda call: {
        **call,
        "lengths": (call["lengths"] + 1).clamp_max(call["tokens"].shape[1]),
    },
    "the whole buffer": lambda call: {
        **call,
        "lengths": torch.full_like(call["lengths"], call["tokens"].shape[1]),
    },
    "no limits": lambda call: {**call, "limits": None},
    "limits one too deep": lambda call: {
        **call,
        "limits": call["limits"] if call["limits"] is None else call["limits"] + 1,
    },
    "a longer match": lambda call: {**call, "longest": call["longest"] + 1},
    "one occurrence fewer": lambda call: {**call, "occurrences": max(1, call["occurrences"] - 1)},
    "a shorter continuation": lambda call: {**call, "depth": max(1, (call["depth"] or call["nodes"]) - 1)},
}
WRONG_RULES: dict[str, dict[str, Callable[..., Any]]] = {
    "earlier occurrences first": {"occurrences": lambda matching, place: (-matching, place)},
    "later occurrences first, whatever matches": {"occurrences": lambda _, place: -place},
    "a count of occurrences": {"weight": lambda _: 1},
    "weights without an end": {"weight": lambda matching: 2 ** (matching - 1)},
    "weights that end early": {"weight": lambda matching: 2 ** (min(matching, 7) - 1)},
    "ties by rank alone": {"nodes": lambda weight, depth, first: (-weight, first, depth)},
    "ties the other way round": {"nodes": lambda weight, depth, first: (-weight, depth, -first)},
    "nearest to the root first": {"nodes": lambda weight, depth, first: (depth, -weight, first)},
    "numbers as chosen": {"numbers": lambda weight, depth, first: (-weight, depth, first)},
    "numbers by rank": {"numbers": lambda _, depth, first: (depth, first)},
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_are_caught(name: str) -> None:
    caught(law, WRONG_CALLS[name], RULES, call=calls())


@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_caught(name: str) -> None:
    # Which examples are drawn depends on what else is imported, so what is rare has to be made frequent.
    caught(law, same, RULES | WRONG_RULES[name], call=calls(repeating=name.startswith("weights")))


@both
def test_what_is_not_committed_has_no_influence(impl: ops.Impl) -> None:
    text = texts(3, [40], 20, 2, "random")
    call = {"lengths": torch.tensor([40]), "nodes": 12, "impl": impl}
    clean = ops.lookup_tree(text, **call)
    for poison in (-1, 0, 1, 2**62, int(text[0, 39])):
        text[:, 40:] = poison
        assert all(
            torch.equal(found, wanted) for found, wanted in zip(ops.lookup_tree(text, **call), clean, strict=True)
        )


@both
def test_large_ids_are_told_apart(impl: ops.Impl) -> None:
    """Ids that differ in their upper half alone."""
    far = 2**40
    text = torch.tensor([[7, far + 1, 7 + far, 1, 7]])
    tokens, parents, num_nodes = ops.lookup_tree(text, torch.tensor([5]), nodes=4, impl=impl)
    assert tokens.tolist() == [[7, far + 1, 7 + far, 1, 7]]
    assert parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert num_nodes.tolist() == [5]


@both
def test_the_largest_tree(impl: ops.Impl) -> None:
    text = texts(1, [400, 380], 30, 2, "random")
    call = {"tokens": text, "lengths": torch.tensor([400, 380]), "nodes": 64, "longest": 64, "occurrences": 32}
    law(same, RULES, {**call, "depth": 32, "limits": None}, impl)
    assert ops.lookup_tree(**call, impl=impl)[2].tolist() == [65, 65]


@both
def test_views_with_any_strides(impl: ops.Impl) -> None:
    """Every second slot of a wider buffer, one length for all rows."""
    text = texts(2, [30, 30], 5, 3, "random")
    buffer = torch.full((2, 90), -1)
    view = buffer[:, 3:73:2]
    view.copy_(text)
    lengths, limits = torch.tensor([30]).expand(2), torch.tensor([[4, 9], [5, 9]])[:, 0]
    wanted = ops.lookup_tree(text, lengths.clone(), nodes=9, limits=limits.clone())
    found = ops.lookup_tree(view, lengths, nodes=9, limits=limits, impl=impl)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@both
def test_no_rows(impl: ops.Impl) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    tokens, parents, num_nodes = ops.lookup_tree(nothing.new_zeros(0, 9), nothing, nodes=3, impl=impl)
    assert (tokens.shape, parents.shape, num_nodes.shape) == ((0, 4), (0, 4), (0,))


def test_nothing_is_read_on_the_host() -> None:
    """Tensors on the meta device have no numbers to read."""
    tokens, lengths = (
        torch.zeros(2, 50, dtype=torch.int64, device="meta"),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    )
    found, _, num_nodes = ops.lookup_tree(tokens, lengths, nodes=7, limits=lengths)
    assert (found.shape, num_nodes.shape) == ((2, 8), (2,))
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(lengths.max())


@both
def test_lengths_that_are_not_read_are_clamped(impl: ops.Impl) -> None:
    """On a GPU a wrong length must not reach other memory."""
    text, wrong = texts(4, [20, 20, 20], 0, 2, "random"), torch.tensor([0, -5, 25])
    module = "specdec.ops.lookup_tree" if impl == "reference" else "specdec_kernels.lookup_tree"
    draft = getattr(importlib.import_module(module), "_reference" if impl == "reference" else "launch")
    found = draft(text, wrong, None, nodes=6, longest=16, occurrences=8, depth=6)
    wanted = ops.lookup_tree(text, torch.tensor([1, 1, 20]), nodes=6, occurrences=8)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


GOOD: Call = {"tokens": torch.zeros(2, 9, dtype=torch.int64), "lengths": torch.tensor([9, 3]), "nodes": 4}
BAD: dict[str, tuple[Call, type[Exception], str]] = {
    "one text": ({"tokens": GOOD["tokens"][0]}, ShapeError, r"tokens must be \[batch, 1 or more slots\], got \[9\]"),
    "no slots": ({"tokens": GOOD["tokens"][:, :0]}, ShapeError, r"1 or more slots\], got \[2, 0\]"),
    "lengths of another batch": ({"lengths": torch.tensor([9])}, ShapeError, r"lengths must be \[2\].*got \[1\]"),
    "limits per node": ({"limits": GOOD["tokens"]}, ShapeError, r"limits must be \[2\].*got \[2, 9\]"),
    "tokens as int32": ({"tokens": GOOD["tokens"].int()}, ShapeError, r"tokens must be torch\.int64, got torch\.int32"),
    "lengths as floats": ({"lengths": torch.tensor([9.0, 3.0])}, ShapeError, r"lengths must be torch\.int64"),
    "another device": ({"lengths": GOOD["lengths"].to("meta")}, ShapeError, "lengths must be on cpu .*got meta"),
    "an empty text": (
        {"lengths": torch.tensor([0, 3])},
        ShapeError,
        "lengths must be 1 to 9 .*got 0 to 3",
    ),
    "more than there is": ({"lengths": torch.tensor([10, 3])}, ShapeError, "got 3 to 10"),
    "no nodes": ({"nodes": 0}, UnsupportedError, "nodes must be 1 to 64, got 0"),
    "too many nodes": ({"nodes": 65}, UnsupportedError, "nodes must be 1 to 64, got 65"),
    "too many occurrences": ({"occurrences": 33}, UnsupportedError, "occurrences must be 1 to 32, got 33"),
    "too deep": ({"depth": 33}, UnsupportedError, "depth must be 1 to 32, got 33"),
    "no depth": ({"depth": 0}, UnsupportedError, "depth must be 1 to 32, got 0"),
    "no match": ({"longest": 0}, UnsupportedError, "longest must be 1 to 64, got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, error, message = BAD[name]
    unchecked = inspect.unwrap(ops.lookup_tree)  # outside the tests nobody checks its annotations
    with pytest.raises(error, match=message):
        unchecked(**{**GOOD, **change})


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOnAGPU:
    pytestmark = gpu

    def draw(self, rng: random.Random) -> Call:
        lengths = [rng.randint(1, rng.choice([3, 300, 40_000])) for _ in range(rng.choice([1, 2, 5]))]
        text = texts(
            rng.randrange(2**32),
            lengths,
            rng.choice([0, 1, 5000]),
            rng.choice([1, 3, 50, 5000]),
            rng.choice(["random", "periodic", "copies"]),
        )
        return {
            "tokens": text.cuda(),
            "lengths": torch.tensor(lengths, device="cuda"),
            "nodes": rng.randint(1, 64),
            "longest": rng.randint(1, 64),
            "occurrences": rng.randint(1, 32),
            "depth": rng.choice([None, rng.randint(1, 32)]),
            "limits": rng.choice([None, torch.tensor([rng.randint(0, 9) for _ in lengths], device="cuda")]),
        }

    def test_the_compiled_kernel_is_the_reference(self) -> None:
        rng = random.Random(0)
        for _ in range(40):
            call = self.draw(rng)
            on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items()}
            wanted = ops.lookup_tree(**on_cpu, impl="reference")
            for impl in ("reference", "triton"):
                found = ops.lookup_tree(**call, impl=impl)
                assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))

    @pytest.mark.parametrize("impl", ["reference", "triton"])
    def test_a_captured_graph_follows_the_text(self, impl: ops.Impl) -> None:
        text, lengths = texts(5, [3000, 2000], 100, 4, "random").cuda(), torch.tensor([3000, 2000], device="cuda")
        ops.lookup_tree(text, lengths, nodes=16, impl=impl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.lookup_tree(text, lengths, nodes=16, impl=impl)
        for grown in (0, 1, 50):
            lengths += grown
            text[:, 7] += grown
            graph.replay()
            wanted = ops.lookup_tree(text.cpu(), lengths.cpu(), nodes=16)
            assert all(torch.equal(one.cpu(), other) for one, other in zip(captured, wanted, strict=True))
