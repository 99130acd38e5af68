"""Ancestor masks and depths against a walk up the parents: the reference and the interpreted kernel."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import ops
from specdec.errors import ShapeError
from specdec.trees import topology
from tests.trees.random_trees import caught, random_tree, trees

Layout = Callable[..., tuple[Tensor, Tensor]]
kernel = pytest.mark.skipif(not ops.available("tree_layout", "cpu")[0], reason="triton is not installed")
both = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=kernel)])


def definition(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """A word of bits for each 64 nodes, node by node and step by step."""
    batch, nodes = parents.shape
    visible = torch.zeros(batch, nodes, -(-nodes // 64), dtype=torch.int64)
    depths = torch.zeros(batch, nodes, dtype=torch.int64)
    for row in range(batch):
        for node in range(int(num_nodes[row])):
            steps, at = 0, node
            while at >= 0:
                bit = 1 << at % 64
                visible[row, node, at // 64] |= bit - (1 << 64) * (bit >> 63)  # the last bit is the sign
                steps, at = steps + 1, int(parents[row, at])
            depths[row, node] = steps - 1
    return visible, depths


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Tensor]:
    """Trees, rows without one, and padding whose parents are there but must not be looked at."""
    tree = draw(trees())
    rng = random.Random(draw(st.integers(0, 2**32)))
    parents, num_nodes = tree.parents.clone(), tree.num_nodes.clone()
    for row in range(len(num_nodes)):
        if rng.random() < 0.2:
            num_nodes[row] = 0
        for node in range(max(1, int(num_nodes[row])), tree.width):
            parents[row, node] = rng.choice([-1, rng.randrange(node)])
    return {"parents": parents, "num_nodes": num_nodes}


def law(layout: Layout, call: dict[str, Tensor]) -> None:
    for found, wanted in zip(layout(**call), definition(**call), strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, wanted)


def reference(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    return ops.tree_layout(parents, num_nodes, impl="reference")


def interpreted(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    return ops.tree_layout(parents, num_nodes, impl="triton")


@given(call=calls())
def test_the_reference_is_the_definition(call: dict[str, Tensor]) -> None:
    law(reference, call)


@kernel
@given(call=calls())
def test_the_kernel_is_the_definition(call: dict[str, Tensor]) -> None:
    law(interpreted, call)


@given(tree=trees())
def test_it_agrees_with_the_index_algebra_of_trees(tree: Any) -> None:
    visible, depths = reference(tree.parents, tree.num_nodes)
    assert torch.equal(visible, topology.ancestors(tree).masked_fill(~tree.valid[..., None], 0))
    assert torch.equal(depths, topology.depths(tree.parents).masked_fill(~tree.valid, 0))


def _one_step(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Every node sees its parent and no further."""
    _, depths = reference(parents, num_nodes)
    nodes = torch.arange(parents.shape[1])
    matrix = (parents[..., None] == nodes) | (nodes[:, None] == nodes)
    return topology.pack(matrix & (nodes < num_nodes[:, None])[..., None]), depths


def _children(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Every node sees what lies below it."""
    visible, depths = reference(parents, num_nodes)
    return topology.pack(topology.unpack(visible, parents.shape[1]).mT), depths


WRONG: dict[str, Layout] = {
    "padding is in use": lambda parents, num_nodes: reference(parents, torch.full_like(num_nodes, parents.shape[1])),
    "the last node is padding": lambda parents, num_nodes: reference(parents, num_nodes - 1),
    "one size for all rows": lambda parents, num_nodes: reference(parents, num_nodes.amax().expand_as(num_nodes)),
    "one tree for all rows": lambda parents, num_nodes: reference(parents[:1].expand_as(parents), num_nodes),
    "nobody sees a grandparent": _one_step,
    "nodes see those below": _children,
    "depths count the root": lambda *call: (reference(*call)[0], reference(*call)[1] + 1),
    "the same word twice": lambda *call: (reference(*call)[0][..., :1].expand_as(reference(*call)[0]), call[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layouts_are_caught(name: str) -> None:
    caught(law, lambda parents, num_nodes: WRONG[name](parents, num_nodes), call=calls())


@both
@pytest.mark.parametrize("nodes", [1, 2, 15, 16, 17, 63, 64, 65, 128])
def test_sizes_around_the_words_and_tiles(impl: ops.Impl, nodes: int) -> None:
    """A chain as long as there are nodes: each doubling of the reach is needed, and each bit of each word."""
    call = {"parents": torch.arange(-1, nodes - 1)[None], "num_nodes": torch.tensor([nodes])}
    for found, wanted in zip(ops.tree_layout(**call, impl=impl), definition(**call), strict=True):
        assert torch.equal(found, wanted)


@both
def test_views_with_any_strides(impl: ops.Impl) -> None:
    tree = random_tree(3, [20, 5, 12], "any")
    wanted = ops.tree_layout(tree.parents, tree.num_nodes)
    wider = torch.full((3, 46), 7)
    wider[:, 4:44:2] = tree.parents
    sizes = torch.stack([tree.num_nodes, tree.num_nodes * 0 + 1], 1)[:, 0]
    assert not sizes.is_contiguous()
    for parents in (wider[:, 4:44:2], tree.parents.T.contiguous().T):
        found = ops.tree_layout(parents, sizes, impl=impl)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@both
def test_no_rows(impl: ops.Impl) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    visible, depths = ops.tree_layout(nothing.new_zeros(0, 70), nothing, impl=impl)
    assert (visible.shape, depths.shape) == ((0, 70, 2), (0, 70))


def test_the_host_reads_nothing() -> None:
    """There is nothing to read on the meta device."""
    parents, num_nodes = (torch.zeros(*size, dtype=torch.int64, device="meta") for size in ((2, 70), (2,)))
    visible, depths = ops.tree_layout(parents, num_nodes)
    assert (visible.shape, depths.shape) == ((2, 70, 2), (2, 70))
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(num_nodes.max())


GOOD = {"parents": torch.tensor([[-1, 0, 1]]), "num_nodes": torch.tensor([3])}
BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "one tree without a batch": ({"parents": GOOD["parents"][0]}, r"\[batch, nodes\] .*got \[3\] and \[1\]"),
    "no root": ({"parents": GOOD["parents"][:, :0]}, r"at least the root.*got \[1, 0\]"),
    "sizes of another batch": ({"num_nodes": torch.tensor([3, 3])}, r"num_nodes \[batch\], got \[1, 3\] and \[2\]"),
    "parents as int32": ({"parents": GOOD["parents"].int()}, r"int64 tensors, got torch\.int32 and torch\.int64"),
    "sizes as floats": ({"num_nodes": torch.tensor([3.0])}, r"int64 tensors, got torch\.int64 and torch\.float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, message = BAD[name]
    unchecked = inspect.unwrap(ops.tree_layout)  # outside the tests nobody checks its annotations
    with pytest.raises(ShapeError, match=message):
        unchecked(**{**GOOD, **change})
