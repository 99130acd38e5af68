"""Masks of a verify forward against their definition, spelled out slot by slot and node by node."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.hf import masks
from specdec.hf.target import ModelTarget
from specdec.testing import tiny_model
from specdec.trees import topology
from specdec.types import DraftTree
from tests import helpers
from tests.trees.random_trees import caught, lineage, random_tree

SLOTS = 12
"""Prompt columns; some of them are padding, wherever they lie."""


def seen(
    tree: DraftTree, row: int, node: int, length: int, real: list[bool], window: int | None, first: int, end: int
) -> list[bool]:
    """The definition: which of the slots `first .. end` a node sees.

    It sees the committed tokens and its own ancestors, itself included, as far back as its window reaches. Depth
    counts, not the place in the tree: the node stands `depth` positions after the first free slot.
    """
    path = lineage(tree, row, node)
    position = length + len(path) - 1
    shown = []
    for slot in range(first, end):
        if slot < length:
            visible = (slot >= len(real) or real[slot]) and (window is None or position - slot < window)
        else:
            drafted = slot - length
            visible = drafted in path and (window is None or len(path) - 1 - path.index(drafted) < window)
        shown.append(visible)
    return shown


CASES = {
    "seed": st.integers(0, 2**32),
    "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=3),
    "style": st.sampled_from(["any", "deep", "chain", "star"]),
    "lengths": st.lists(st.integers(1, 20), min_size=3, max_size=3),
    "real": st.lists(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS), min_size=3, max_size=3),
    "window": st.sampled_from([None, 1, 2, 3, 6, 40]),
    "first": st.integers(0, 30),
}


def law(
    mutant: Any,
    seed: int,
    sizes: list[int],
    style: str,
    lengths: list[int],
    real: list[list[bool]],
    window: int | None,
    first: int,
) -> None:
    tree = random_tree(seed, sizes, style)
    batch = len(sizes)
    lengths, real = lengths[:batch], real[:batch]
    first = min(first, *lengths)
    end = max(lengths) + tree.width
    visible = topology.ancestor_matrix(tree.parents)
    depths = visible.sum(-1) - 1
    mask = mutant(torch.tensor(lengths), depths, depths, visible, torch.tensor(real), window, first, end)
    assert mask.shape == (batch, 1, tree.width, end - first)
    for row, length in enumerate(lengths):
        for node in range(tree.width):
            # Padding nodes stand alone: their parent is -1 like the root's.
            expected = seen(tree, row, node, length, real[row], window, first, end)
            assert mask[row, 0, node].tolist() == expected
    assert bool(mask.any(-1).all()), "a row that sees nothing has no defined attention"


@given(**CASES)
def test_each_node_sees_the_committed_tokens_and_its_ancestors(**case):
    """G1, G3, G8: rows that see nothing, masks as wide as something else, code for one shape of tree."""
    law(masks.visible_slots, **case)


def _window_by_row(lengths, depths, _, visible, prompt, window, first, end):
    rows = torch.arange(depths.shape[1]).expand_as(depths)
    return masks.visible_slots(lengths, rows, rows, visible, prompt, window, first, end)


def _window_of_the_root(lengths, depths, pending, visible, prompt, window, first, end):
    return masks.visible_slots(lengths, depths * 0, pending * 0, visible, prompt, window, first, end)


def _padding_shifted(lengths, depths, pending, visible, prompt, window, first, end):
    return masks.visible_slots(lengths, depths, pending, visible, prompt.roll(1, -1), window, first, end)


def _one_length(lengths, depths, pending, visible, prompt, window, first, end):
    return masks.visible_slots(lengths.max().expand_as(lengths), depths, pending, visible, prompt, window, first, end)


def _columns_from_zero(lengths, depths, pending, visible, prompt, window, first, end):
    return masks.visible_slots(lengths, depths, pending, visible, prompt, window, 0, end - first)


@pytest.mark.parametrize(
    "mutant", [_window_by_row, _window_of_the_root, _padding_shifted, _one_length, _columns_from_zero]
)
def test_a_wrong_mask_is_noticed(mutant):
    caught(law, mutant, **CASES)


@given(seed=st.integers(0, 2**32), levels=st.lists(st.integers(1, 5), min_size=1, max_size=4), window=CASES["window"])
def test_rows_that_come_level_by_level_see_what_they_see_together(seed, levels, window):
    """A drafter appends level after level; the mask of the last rows must not depend on that."""
    tree = random_tree(seed, [sum(levels)] * 2, "any")
    visible = topology.ancestor_matrix(tree.parents)
    depths, lengths = visible.sum(-1) - 1, torch.tensor([3, 7])
    end = 7 + tree.width
    whole = masks.visible_slots(lengths, depths, depths, visible, None, window, 0, end)
    start = 0
    for rows in levels:
        part = slice(start, start + rows)
        start += rows
        mask = masks.visible_slots(
            lengths, depths[:, part], depths[:, :start], visible[:, part, :start], None, window, 0, 7 + start
        )
        assert torch.equal(mask, whole[:, :, part, : 7 + start])
        assert not whole[:, :, part, 7 + start :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_g2_the_additive_mask_says_the_same_as_the_boolean_one(dtype):
    """A 1/0 mask read as additive bias, or the reverse."""
    eager = tiny_model("llama", dtype=dtype)
    eager.set_attn_implementation("eager")
    mask = torch.tensor([[True, False, True], [True, True, True]])[None, None]
    added = masks.for_implementation(mask, eager.config, dtype)
    assert added.dtype == dtype
    assert torch.equal(added == 0, mask)
    assert bool((added[~mask] == torch.finfo(dtype).min).all())
    assert masks.for_implementation(mask, helpers.model().config, dtype) is mask
    scores = torch.randn(1, 1, 2, 3, dtype=dtype)
    weights = (scores + added).softmax(-1)
    assert torch.equal(weights, scores.masked_fill(~mask, -torch.inf).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_g1_padding_nodes_are_finite_and_change_nothing(dtype, implementation):
    """Fully masked rows are NaN, mean values or even unmasked attention, and NaN spreads."""
    model = tiny_model("llama", dtype=dtype)
    model.set_attn_implementation(implementation)
    wide = random_tree(3, [2, 9], "any")
    tokens = wide.tokens % 97
    tree = DraftTree(tokens, wide.parents, wide.num_nodes, wide.scores)
    prompt = torch.tensor([[0, 0, 0, 5], [6, 7, 8, 9]])
    target = ModelTarget(model, prompt, model_kwargs={"attention_mask": (prompt > 0).long()})
    target.prefill()
    logits = target.verify(tree).logits
    assert bool(logits.isfinite().all())
    target.commit(torch.tensor([[0], [0]]), torch.tensor([0, 0]))
    narrow = DraftTree(tokens[:, :2], wide.parents[:, :2], torch.tensor([2, 2]), wide.scores[:, :2])
    assert torch.allclose(target.verify(narrow).logits[0], logits[0, :2], atol=2e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("columns", [0, 2, 4, 9])
def test_g3_a_visibility_matrix_of_the_wrong_width_is_refused(columns):
    """A mask of the wrong shape that is accepted and reads outside."""
    target = ModelTarget(helpers.model(), torch.tensor([[5, 6]]))
    target.prefill()
    with pytest.raises(ShapeError, match=r"visible of shape \[1, 3, 3\]"):
        target.append(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]]), torch.ones(1, 3, columns, dtype=torch.bool))
    assert target.cache.pending == 0


@pytest.mark.parametrize(
    "name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager", "paged|sdpa", "made up", None]
)
def test_attention_functions_without_a_4d_mask_are_refused_by_name(name):
    class Config:
        _attn_implementation = name

    with pytest.raises(UnsupportedError, match=repr(str(name)).replace("|", r"\|")):
        masks.check_attention(Config())


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_functions_with_a_4d_mask_are_served(name):
    class Config:
        _attn_implementation = name

    masks.check_attention(Config())


def test_a_window_shorter_than_the_tree_hides_ancestors():
    """The example of the module: a chain of five under a window of three."""
    parents = torch.tensor([[-1, 0, 1, 2, 3]])
    visible = topology.ancestor_matrix(parents)
    depths = torch.arange(5)[None]
    mask = masks.visible_slots(torch.tensor([2]), depths, depths, visible, None, 3, 0, 7)
    expected: Tensor = torch.tensor(
        [
            [1, 1, 1, 0, 0, 0, 0],
            [0, 1, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1, 1, 0],
            [0, 0, 0, 0, 1, 1, 1],
        ]
    ).bool()
    assert torch.equal(mask[0, 0], expected)
