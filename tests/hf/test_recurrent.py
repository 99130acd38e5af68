"""States of recurrent layers: after every round, what a fresh pass over the committed tokens would have left.

In float64 everything is compared with a walk through the layers by their definition; with float32 states, which is what
transformers computes in, with its own forward and its own cache.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import ops, trees
from specdec.hf import gated_delta
from specdec.hf.recurrent import RecurrentLayer, RecurrentStates
from specdec.kv import KVCacheConfig
from tests.hf.hybrid import (
    EXACT,
    FLOAT64,
    HYBRID,
    PLAIN,
    Hybrid,
    exact,
    follow,
)
from tests.hf.texts import ROWS, draft, model
from tests.trees.random_trees import caught

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=3)


def some_rows(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", HYBRID)
@given(seed=st.integers(0, 2**32), lengths=LENGTHS, most=st.sampled_from([2, 7, 64]))
@settings(max_examples=4)
def test_after_every_round_states_and_logits_are_exact(family, seed, lengths, most):
    """Trees up to a mask word, rows of their own lengths, commits of any length, states folded early or late."""
    with exact():
        texts = Hybrid(model(family), some_rows(seed, lengths), cache=FLOAT64)
        assert max(follow(texts, seed, rounds=3, most=most)) <= EXACT
    assert {layer.state.dtype for layer in texts.target.cache.recurrent.layers} == {torch.float64}


@pytest.mark.parametrize("family", HYBRID)
@given(seed=st.integers(0, 2**32), lengths=LENGTHS, most=st.sampled_from([2, 7, 64]))
@settings(max_examples=4)
def test_after_every_round_states_and_logits_are_those_of_transformers(family, seed, lengths, most):
    """Its own cache and forward, which hold the rule in float32."""
    texts = Hybrid(model(family), some_rows(seed, lengths))
    assert max(follow(texts, seed, rounds=3, most=most)) <= PLAIN
    assert {layer.state.dtype for layer in texts.target.cache.recurrent.layers} == {torch.float32}


@pytest.mark.parametrize(("states", "least", "most"), [(torch.float16, 1e-6, 2e-3), (torch.bfloat16, 1e-4, 2e-2)])
def test_narrow_states_stay_near(states, least, most):
    """Rounded once a round. They are rounded indeed: the error is that of the dtype, not less."""
    texts = Hybrid(model("qwen3_5"), ROWS[:2], cache=KVCacheConfig(states=states))
    _, error = follow(texts, seed=3, rounds=8, most=6, logits=False)
    assert {layer.state.dtype for layer in texts.target.cache.recurrent.layers} == {states}
    scale = max(float(layer.state.abs().max()) for layer in texts.target.cache.recurrent.layers)
    assert least * scale <= error <= most * scale


def test_states_do_not_drift_over_many_rounds():
    rng = random.Random(5)
    with exact():
        texts = Hybrid(model("olmo_hybrid"), ROWS[:2], cache=FLOAT64)
        for _ in range(40):
            texts._tree = draft(rng.randrange(2**32), [5, 5])
            texts.target.verify(texts._tree)
            texts.commit([rng.choice([None, 0, 1, 4]), rng.randrange(5)])
        assert texts.state_error() <= EXACT
    assert min(map(len, texts.texts)) > 60


@pytest.mark.parametrize("family", HYBRID)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=3)
def test_rows_appended_level_by_level_equal_the_tree_at_once(family, seed, sizes):
    rng = random.Random(seed)
    with exact():
        whole, parts = (Hybrid(model(family), ROWS[:2], cache=FLOAT64) for _ in range(2))
        for _ in range(2):
            tree = draft(rng.randrange(2**32), [sum(sizes)] * 2)
            visible = trees.topology.ancestor_matrix(tree.parents)
            expected, start = whole.target.verify(tree).logits, 0
            for rows in sizes:
                part = slice(start, start + rows)
                start += rows
                depths = visible[:, part].sum(-1) - 1
                found = parts.target.append(tree.tokens[:, part], depths, visible[:, part, :start])
                torch.testing.assert_close(found.logits, expected[:, part], atol=EXACT, rtol=0)
            leaves = [rng.choice([None, *range(sum(sizes))]) for _ in range(2)]
            for texts in (whole, parts):
                texts._tree = tree
                texts.commit(leaves)
                assert texts.state_error() <= EXACT


@pytest.mark.parametrize("family", HYBRID)
def test_a_second_verify_replaces_the_first(family):
    """A tree that was not committed leaves nothing behind, and the path before it is folded once."""
    with exact():
        texts = Hybrid(model(family), ROWS[:2], cache=FLOAT64)
        assert texts.error(draft(1, [5, 3])) <= EXACT
        texts.commit([4, 1])
        assert texts.error(draft(2, [4, 6])) <= EXACT
        layers = texts.target.cache.recurrent.layers
        before = [part.clone() for layer in layers for part in (layer.history, layer.state)]
        for seed, sizes in ((3, [1, 1]), (4, [7, 2]), (5, [3, 3])):
            assert texts.error(draft(seed, sizes)) <= EXACT
        assert all(map(torch.equal, [part for layer in layers for part in (layer.history, layer.state)], before))
        texts.commit([2, None])
        assert texts.state_error() <= EXACT


# ------------------------------------------------------------------------------------------------------------ mutants


def test_a_forward_that_fails_half_way_may_be_tried_again(monkeypatch):
    """An error between a layer's convolution and its rule, such as a lack of memory: nothing is folded twice."""
    texts = Hybrid(model("qwen3_5"), ROWS[:2])
    assert texts.error(draft(1, [5, 3])) <= PLAIN
    texts.commit([4, 1])
    rule, runs = ops.gated_delta_tree, []

    def short_of_memory(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("none is left")
        return rule(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "gated_delta_tree", short_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            texts.target.verify(draft(2, [4, 6]))
    assert texts.error(draft(2, [4, 6])) <= PLAIN
    texts.commit([3, 2])
    assert texts.state_error() <= PLAIN


def law(mutate: Callable[[pytest.MonkeyPatch], None], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch, exact():
        mutate(patch)
        texts = Hybrid(model("qwen3_5"), ROWS[:2], cache=FLOAT64)
        assert max(follow(texts, seed, rounds=3, most=5)) <= EXACT


def test_the_right_states_pass():
    for seed in range(4):
        law(lambda _: None, seed)


def _keeps_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Rejected tokens stay in the state."""
    keep = RecurrentLayer.keep

    def kept(self: RecurrentLayer, nodes: Tensor, counts: Tensor) -> None:
        rows = 0 if self.nodes is None else self.nodes.inputs.shape[1]
        keep(self, torch.arange(rows).expand(len(nodes), -1), torch.full_like(counts, rows))

    patch.setattr(RecurrentLayer, "keep", kept)


def _first_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows are taken by their order, not along the path."""
    keep = RecurrentLayer.keep
    patch.setattr(
        RecurrentLayer,
        "keep",
        lambda self, nodes, counts: keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts),
    )


def _one_less(patch: pytest.MonkeyPatch) -> None:
    keep = RecurrentLayer.keep
    patch.setattr(RecurrentLayer, "keep", lambda self, nodes, counts: keep(self, nodes, (counts - 1).clamp_min(0)))


def _longest_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    """All rows commit as much as the one that commits most."""
    keep = RecurrentLayer.keep

    def kept(self: RecurrentLayer, nodes: Tensor, counts: Tensor) -> None:
        keep(self, nodes, counts.max().expand_as(counts))

    patch.setattr(RecurrentLayer, "keep", kept)


def _empty_rounds_keep_the_path(patch: pytest.MonkeyPatch) -> None:
    """A round that commits nothing leaves the path of the round before, which is folded again."""
    keep, begin = RecurrentStates.keep, RecurrentStates.begin
    paths: dict[RecurrentLayer, Any] = {}

    def begun(self: RecurrentStates, visible: Tensor) -> None:
        paths.update({layer: layer.path for layer in self.layers})
        begin(self, visible)

    def kept(self: RecurrentStates, nodes: Tensor, counts: Tensor) -> None:
        keep(self, nodes, counts)
        if not bool(counts.any()):
            for layer in self.layers:
                layer.path = paths[layer]

    patch.setattr(RecurrentStates, "begin", begun)
    patch.setattr(RecurrentStates, "keep", kept)


def _convolution_is_not_folded(patch: pytest.MonkeyPatch) -> None:
    tree = ops.causal_conv_tree
    patch.setattr(
        ops, "causal_conv_tree", lambda *args, **options: tree(*args, **{**options, "path": None, "counts": None})
    )


def _siblings_in_the_convolution(patch: pytest.MonkeyPatch) -> None:
    tree = ops.causal_conv_tree

    def chained(inputs: Tensor, weight: Tensor, history: Tensor, ancestors: Tensor, **options: Any) -> Tensor:  # noqa: ARG001 - the mistake
        rows = inputs.shape[1]
        chain = torch.ones(rows, rows, dtype=torch.bool).tril().expand(inputs.shape[0], -1, -1)
        return tree(inputs, weight, history, trees.topology.pack(chain), **options)

    patch.setattr(ops, "causal_conv_tree", chained)


MUTANTS = [
    _keeps_the_tree,
    _first_rows,
    _one_less,
    _longest_of_the_batch,
    _empty_rounds_keep_the_path,
    _convolution_is_not_folded,
    _siblings_in_the_convolution,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_wrong_states_are_noticed(mutate):
    gated_delta.tested_layers(model("qwen3_5"))  # or the self-test would notice first
    caught(law, mutate, seed=st.integers(0, 9))
