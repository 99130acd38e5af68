"""The acceptance walk against a walk in plain Python: the reference and the interpreted kernel."""

import copy
import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import ops, verify
from specdec.errors import ShapeError
from specdec.types import DraftTree
from tests.trees.random_trees import caught, random_tree, trees

Call = dict[str, Any]
Accept = Callable[..., tuple[Tensor, Tensor, Tensor]]
kernel = pytest.mark.skipif(not ops.available("accept_tree", "cpu")[0], reason="triton is not installed")
both = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])
VOCAB = 1000
"""Above every token of a random tree."""


@pytest.fixture(autouse=True, scope="module")
def _unlooked() -> Iterator[None]:
    """Without the look at numbers that a CPU has (`test_contents.py`): GPUs have none, and stay within the text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["specdec.ops.accept_tree"], "_look", lambda *tensors: None)  # noqa: ARG005 - the look's
        yield


def call_for(
    tree: DraftTree,
    seed: int,
    agreement: float,
    *,
    remaining: list[int],
    stops: int = 0,
    room: int | None = None,
    treeless: bool = False,
) -> Call:
    """A round of a target that agrees with some of the drafts; what stands in padding agrees with it entirely.

    Args:
        tree: the drafts.
        seed: of everything that is drawn.
        agreement: how often the token of a node is what its parent's target chose.
        remaining: tokens until the length limit, for each row.
        stops: how many of the tokens at hand are stop tokens.
        room: slots behind the committed tokens; None is enough.
        treeless: whether a row may have no tree at all.
    """
    rng = random.Random(seed)
    tokens, parents, num_nodes = tree.tokens.clone(), tree.parents.clone(), tree.num_nodes.clone()
    chosen = torch.tensor([[rng.randrange(200) for _ in range(tree.width)] for _ in num_nodes])
    for row, size in enumerate(num_nodes.tolist()):
        for node in rng.sample(range(1, size), size - 1):
            if rng.random() < agreement:
                chosen[row, parents[row, node]] = tokens[row, node]
        for node in range(size, tree.width):
            parent = rng.choice([-1, rng.randrange(node)])
            parents[row, node], tokens[row, node] = parent, chosen[row, max(parent, 0)]
        if treeless and rng.random() < 0.2:
            num_nodes[row] = 0
    visible, depths = ops.tree_layout(parents, num_nodes)
    lengths = torch.tensor([rng.randint(1, 5) for _ in num_nodes])
    capacity = int(lengths.max()) + (tree.width if room is None else room)
    state = ops.TextState(
        tokens=torch.tensor([[rng.randrange(-99, -9) for _ in range(capacity)] for _ in num_nodes]),
        lengths=lengths,
        cached=lengths + rng.randint(0, 9),
        positions=lengths - rng.randint(0, 9),
        remaining=torch.tensor([remaining[row % len(remaining)] for row in range(len(num_nodes))]),
    )
    common = [*tokens.flatten().tolist(), *chosen.flatten().tolist()]
    return {
        "tokens": tokens,
        "parents": parents,
        "num_nodes": num_nodes,
        "visible": visible,
        "depths": depths,
        "chosen": chosen,
        "state": state,
        "stops": torch.tensor(rng.sample(common, min(stops, len(common))), dtype=torch.int64),
    }


CALLS: st.SearchStrategy[Call] = st.builds(
    call_for,
    tree=trees(),
    seed=st.integers(0, 2**32),
    agreement=st.sampled_from([0.3, 0.8, 1.0]),
    remaining=st.lists(st.sampled_from([0, 1, 2, 3, 5, 500]), min_size=1, max_size=3),
    stops=st.sampled_from([0, 0, 1, 3]),
    room=st.none() | st.integers(0, 3),
    treeless=st.booleans(),
)


def state_of(call: Call) -> ops.TextState:
    return ops.TextState(**{field.name: getattr(call["state"], field.name).clone() for field in fields(ops.TextState)})


def definition(call: Call) -> tuple[Tensor, Tensor, Tensor, ops.TextState]:
    """Row by row and token by token, going by tokens and parents alone."""
    tokens, parents, chosen = (call[name].tolist() for name in ("tokens", "parents", "chosen"))
    state, stops = state_of(call), call["stops"].tolist()
    path, found = (torch.full_like(call["tokens"], -1) for _ in range(2))
    counts = torch.zeros_like(call["num_nodes"])
    for row, size in enumerate(call["num_nodes"].tolist()):
        node = 0 if size else None
        while node is not None and state.remaining[row] > 0:
            token, step = chosen[row][node], int(counts[row])
            path[row, step], found[row, step] = node, token
            if state.lengths[row] < state.tokens.shape[1]:
                state.tokens[row, state.lengths[row]] = token
            for moved in (counts, state.lengths, state.cached, state.positions):
                moved[row] += 1
            state.remaining[row] = 0 if token in stops else state.remaining[row] - 1
            below = [at for at in range(1, size) if parents[row][at] == node and tokens[row][at] == token]
            node = below[0] if below else None
    return path, found, counts, state


def law(accept: Accept, call: Call) -> None:
    path, found, counts, after = definition(call)
    call = {**call, "state": state_of(call)}
    for got, wanted in zip(accept(**call), (path, found, counts), strict=True):
        assert got.dtype == torch.int64
        assert torch.equal(got, wanted)
    for field in fields(after):
        assert torch.equal(getattr(call["state"], field.name), getattr(after, field.name)), field.name


def reference(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    return ops.accept_tree(**call, impl="reference")


def interpreted(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    return ops.accept_tree(**call, impl="triton")


@given(call=CALLS)
def test_the_reference_is_the_definition(call: Call) -> None:
    law(reference, call)


@kernel
@given(call=CALLS)
def test_the_kernel_is_the_definition(call: Call) -> None:
    law(interpreted, call)


def test_the_walks_are_of_every_kind() -> None:
    """Nothing, the root alone, a part and the deepest node; ends by a stop, by the limit and by a full text."""
    seen = set()
    for seed in range(60):
        tree = random_tree(seed, [1, 9, 70, 128], "deep")
        call = call_for(tree, seed, [0.3, 1.0][seed % 2], remaining=[500, 3, 1, 0], stops=seed % 3, room=seed % 5)
        _, _, counts, after = definition(call)
        for row, count in enumerate(counts.tolist()):
            deepest = int(call["depths"][row].max()) + 1
            seen.add({0: "nothing", 1: "root", deepest: "full"}.get(count, "part"))
            if not after.remaining[row] and call["state"].remaining[row] > count:
                seen.add("stop")
            if 1 < count == call["state"].remaining[row]:
                seen.add("limit")
            if after.lengths[row] > after.tokens.shape[1]:
                seen.add("no room")
    assert seen == {"nothing", "root", "part", "full", "stop", "limit", "no room"}


def _with(**changes: Callable[[Call], Any]) -> Accept:
    """The op with other arguments than it was given."""

    def accept(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
        return reference(**{**call, **{name: change(call) for name, change in changes.items()}})

    return accept


def _own_bit(call: Call) -> Tensor:
    """Masks without ancestors: a node counts as accepted for its own token."""
    nodes = torch.arange(call["tokens"].shape[1])
    return torch.where(
        nodes[:, None] // 64 == torch.arange(call["visible"].shape[2]), 1 << nodes[:, None] % 64, 0
    ).expand(call["visible"].shape)


def _runs_on(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that stopped go on in the next round."""
    left, answer = call["state"].remaining.clone(), reference(**call)
    call["state"].remaining.copy_(left - answer[2])
    return answer


def _without_bonus(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Commits the accepted drafts alone."""
    state = call["state"]
    path, found, counts = reference(**call)
    state.lengths.sub_(1)
    return path, found, counts - 1


WRONG: dict[str, Accept] = {
    "padding is in use": _with(num_nodes=lambda call: torch.full_like(call["num_nodes"], call["tokens"].shape[1])),
    "the last node is padding": _with(num_nodes=lambda call: call["num_nodes"] - 1),
    "ancestors need not agree": _with(visible=_own_bit),
    "depths count the root": _with(depths=lambda call: call["depths"] + 1),
    "drafts are compared with their own choice": _with(
        parents=lambda call: torch.arange(call["tokens"].shape[1]).expand_as(call["tokens"])
    ),
    "the first row's choices": _with(chosen=lambda call: call["chosen"][:1].expand_as(call["chosen"])),
    "no stops": _with(stops=lambda call: call["stops"][:0]),
    "the first stop only": _with(stops=lambda call: call["stops"][:1]),
    "no limit": _with(state=lambda call: dataclasses.replace(call["state"], remaining=call["state"].remaining + 1000)),
    "one more than the limit": _with(
        state=lambda call: dataclasses.replace(call["state"], remaining=call["state"].remaining + 1)
    ),
    "slots and lengths are one": _with(
        state=lambda call: dataclasses.replace(call["state"], cached=call["state"].lengths)
    ),
    "text written by slots": _with(state=lambda call: dataclasses.replace(call["state"], lengths=call["state"].cached)),
    "a stop stops one round": _runs_on,
    "no bonus token": _without_bonus,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_walks_are_caught(name: str) -> None:
    caught(law, lambda **call: WRONG[name](**call), call=CALLS)


@both
@given(tree=trees(), seed=st.integers(0, 2**32), agreement=st.sampled_from([0.3, 0.8, 1.0]))
def test_it_is_the_rule_of_target_only(impl: ops.Impl, tree: DraftTree, seed: int, agreement: float) -> None:
    call = call_for(tree, seed, agreement, remaining=[500])
    law_of_target = torch.nn.functional.one_hot(call["chosen"], VOCAB).float()
    verdict = verify.TargetOnly()(tree, law_of_target)
    path, found, counts = ops.accept_tree(**call, impl=impl)
    for row, accepted in enumerate(verdict.num_accepted.tolist()):
        nodes = verdict.path[row, :accepted].tolist()
        assert path[row, : counts[row]].tolist() == [0, *nodes]
        tokens = [*tree.tokens[row, nodes].tolist(), int(verdict.bonus[row])]
        assert found[row, : counts[row]].tolist() == tokens
        assert call["state"].tokens[row, call["state"].lengths[row] - 1] == verdict.bonus[row]


@both
def test_a_row_that_stopped_stays_as_it_is(impl: ops.Impl) -> None:
    """Round after round, beside a row that goes on."""
    tree = random_tree(5, [40, 40], "deep")
    call = call_for(tree, 5, 1.0, remaining=[0, 50], room=100)
    before = state_of(call)
    for _ in range(3):
        path, found, counts = ops.accept_tree(**call, impl=impl)
        assert counts[0] == 0 < counts[1]
        assert path[0].tolist() == found[0].tolist() == [-1] * 40
    for field in fields(before):
        kept, now = getattr(before, field.name), getattr(call["state"], field.name)
        assert torch.equal(kept[0], now[0])
        assert not torch.equal(kept[1], now[1])


@both
@pytest.mark.parametrize("seed", range(6))
def test_views_with_any_strides(impl: ops.Impl, seed: int) -> None:
    """Arguments are read through their strides; the text may be a part of a wider buffer."""
    call = call_for(random_tree(seed, [70, 33], "deep"), seed, 1.0, remaining=[500, 500], stops=2, room=90)
    path, found, counts, after = definition(call)
    spread = {
        name: torch.stack([given, torch.full_like(given, 3)], -1)[..., 0]
        for name, given in call.items()
        if isinstance(given, Tensor)
    }
    assert not any(given.is_contiguous() for given in spread.values())
    wider = torch.full((2, call["state"].tokens.shape[1] + 9), 7)
    text = wider[:, 4:-5]
    text.copy_(call["state"].tokens)
    state = dataclasses.replace(state_of(call), tokens=text)
    answer = ops.accept_tree(**{**spread, "state": state}, impl=impl)
    assert all(torch.equal(*pair) for pair in zip(answer, (path, found, counts), strict=True))
    assert torch.equal(text, after.tokens)
    assert wider[:, :4].tolist() == [[7] * 4] * 2
    assert wider[:, -5:].tolist() == [[7] * 5] * 2


@both
def test_no_rows(impl: ops.Impl) -> None:
    call = call_for(random_tree(0, [3], "any"), 0, 1.0, remaining=[9])
    none = {name: given[:0] for name, given in call.items() if isinstance(given, Tensor)}
    state = ops.TextState(**{field.name: getattr(call["state"], field.name)[:0] for field in fields(ops.TextState)})
    path, found, counts = ops.accept_tree(**none, state=state, impl=impl)
    assert (path.shape, found.shape, counts.shape) == ((0, 3), (0, 3), (0,))


def test_the_host_reads_nothing() -> None:
    """There is nothing to read on the meta device."""
    call = call_for(random_tree(0, [70, 9], "any"), 0, 1.0, remaining=[9], stops=2)
    meta = {name: given.to("meta") for name, given in call.items() if isinstance(given, Tensor)}
    state = ops.TextState(
        **{field.name: getattr(call["state"], field.name).to("meta") for field in fields(ops.TextState)}
    )
    path, found, counts = ops.accept_tree(**meta, state=state)
    assert (path.shape, found.shape, counts.shape) == ((2, 70), (2, 70), (2,))
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(counts.max())


GOOD = call_for(random_tree(0, [3, 2], "any"), 0, 1.0, remaining=[9], stops=1)


def _state(**changes: Tensor) -> dict[str, Any]:
    state = copy.copy(GOOD["state"])
    for name, value in changes.items():
        object.__setattr__(state, name, value)  # its constructor would check the annotations
    return {"state": state}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "parents of another tree": ({"parents": GOOD["parents"][:, :2]}, r"parents must be int64 \[2, 3\].*\[2, 2\]"),
    "sizes per node": ({"num_nodes": GOOD["parents"]}, r"num_nodes must be int64 \[2\] .*\[2, 3\]"),
    "masks of two words": ({"visible": GOOD["visible"].expand(2, 3, 2)}, r"visible must be int64 \[2, 3, 1\].*3, 2\]"),
    "depths of one row": ({"depths": GOOD["depths"][:1]}, r"depths must be int64 \[2, 3\] .*\[1, 3\]"),
    "choices at the root": ({"chosen": GOOD["chosen"][:, :1]}, r"chosen must be int64 \[2, 3\] .*\[2, 1\]"),
    "choices as logits": ({"chosen": GOOD["chosen"].float()}, r"chosen must be int64 .* got torch\.float32"),
    "stops per row": ({"stops": GOOD["chosen"]}, r"stops must be int64 \[6\] .*\[2, 3\]"),
    "stops as int32": ({"stops": GOOD["stops"].int()}, r"stops must be int64 .* got torch\.int32"),
    "text of one row": (_state(tokens=GOOD["state"].tokens[:1]), r"state\.tokens must be int64 \[2, .*\[1, "),
    "one length": (_state(lengths=GOOD["state"].lengths[:1]), r"state\.lengths must be int64 \[2\] .*\[1\]"),
    "slots as int32": (_state(cached=GOOD["state"].cached.int()), r"state\.cached must be int64 .*torch\.int32"),
    "columns of the text first": (
        _state(tokens=GOOD["state"].tokens.T.contiguous().T),
        r"state\.tokens must lie in order in memory",
    ),
    "every second position": (
        _state(positions=torch.zeros(2, 2, dtype=torch.int64)[:, 0]),
        r"state\.positions must lie in order in memory",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    change, message = BAD[name]
    unchecked = inspect.unwrap(ops.accept_tree)  # outside the tests nobody checks its annotations
    with pytest.raises(ShapeError, match=message):
        unchecked(**{**GOOD, **change})
