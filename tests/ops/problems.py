"""Random problems for attention ops, and what their answer is by definition: one node at a time, in float64."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.trees import topology
from specdec.types import DraftTree
from tests.trees.random_trees import lineage, random_tree


@dataclass(frozen=True)
class Problem:
    """Arguments of `tree_attention`, and the tree behind its masks."""

    tree: DraftTree
    call: dict[str, Any]
    dense: tuple[Tensor, Tensor]

    def seen(self, row: int, node: int) -> list[int]:
        """Slots that a node sees, by walking; none if its mask is empty."""
        length = int(self.call["lengths"][row])
        start = 0 if self.call["starts"] is None else int(self.call["starts"][row])
        if node >= int(self.tree.num_nodes[row]):
            return []
        line = lineage(self.tree, row, node)
        slots = [*range(start, length), *(length + other for other in line)]
        window = self.call["window"]
        # Committed slots and ancestors are the positions up to the node's own, one after the other.
        return slots if window is None else slots[-window:]


def problem(
    seed: int,
    sizes: list[int],
    lengths: list[int],
    style: str,
    groups: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    skipped: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    padded: bool = False,
    page: int = 0,
    slack: int = 0,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """A batch of trees over caches of the given lengths; what no node may read is NaN."""
    batch = len(sizes)
    lengths = [lengths[row % len(lengths)] for row in range(batch)]
    tree = random_tree(seed, sizes, style)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    nodes = tree.width
    skipped = min(skipped, nodes - 1)
    visible = topology.ancestors(tree).masked_fill(~tree.valid.unsqueeze(-1), 0)[:, skipped:]
    starts = torch.tensor([random.Random(seed + row).randint(0, length) for row, length in enumerate(lengths)])
    slots = max(lengths) + nodes + slack
    slots += -slots % page if page else 0
    keys, values = noise(batch, kv_heads, slots, dim), noise(batch, kv_heads, slots, value_dim)
    for row, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        for rows in (keys, values):
            rows[row, :, length + size :] = math.nan
            if padded:
                rows[row, :, : int(starts[row])] = math.nan
    call: dict[str, Any] = {
        "query": noise(batch, kv_heads * groups, nodes - skipped, dim),
        "keys": keys,
        "values": values,
        "visible": visible,
        "lengths": torch.tensor(lengths),
        "depths": topology.depths(tree.parents),
        "starts": starts if padded else None,
        "blocks": None,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": noise(kv_heads * groups) if sinks else None,
    }
    if page:
        order = torch.randperm(batch * slots // page, generator=generator)
        call["blocks"] = order.view(batch, -1)
        for name in ("keys", "values"):
            runs = call[name].unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
            call[name] = torch.empty_like(runs).index_copy_(0, order, runs)
        unused = torch.arange(slots // page) * page >= call["lengths"][:, None] + nodes
        call["blocks"] = call["blocks"].masked_fill(unused, random.Random(seed).choice([-1, 10**6]))
    return Problem(tree, call, (keys, values))


def definition(problem: Problem) -> tuple[Tensor, Tensor]:
    """Softmax over the slots that a node sees, one node and one head at a time, in float64."""
    call = problem.call
    query, (keys, values) = call["query"].double(), (rows.double() for rows in problem.dense)
    batch, heads, rows, dim = query.shape
    scale = dim**-0.5 if call["scale"] is None else call["scale"]
    output = query.new_zeros(batch, heads, rows, values.shape[3])
    lse = query.new_full((batch, heads, rows), -math.inf)
    skipped = problem.tree.width - rows
    for row in range(batch):
        for node in range(rows):
            slots = problem.seen(row, skipped + node)
            if not slots:
                continue
            for head in range(heads):
                group = head // (heads // keys.shape[1])
                scores = keys[row, group, slots] @ query[row, head, node] * scale
                if call["softcap"] is not None:
                    scores = call["softcap"] * (scores / call["softcap"]).tanh()
                if call["sinks"] is not None:
                    scores = torch.cat([scores, call["sinks"][head, None].double()])
                lse[row, head, node] = scores.logsumexp(0)
                output[row, head, node] = scores.softmax(0)[: len(slots)] @ values[row, group, slots]
    return output, lse


def cases(most_nodes: int = 70, **fixed: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Arguments of `problem`."""
    few, many = st.integers(1, 9), st.integers(1, most_nodes)
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 2**32),
        "sizes": st.lists(st.one_of(few, few, many), min_size=1, max_size=3),
        "lengths": st.lists(st.integers(0, 150), min_size=1, max_size=3),
        "style": st.sampled_from(["any", "deep", "chain", "star"]),
        "groups": st.sampled_from([1, 2, 3, 8]),
        "kv_heads": st.sampled_from([1, 2]),
        "dim": st.sampled_from([1, 8, 20, 64]),
        "value_dim": st.sampled_from([1, 8, 24]),
        "skipped": st.sampled_from([0, 0, 1, 5]),
        "window": st.sampled_from([None, None, 1, 3, 40]),
        "softcap": st.sampled_from([None, None, 2.0]),
        "sinks": st.booleans(),
        "padded": st.booleans(),
        "page": st.sampled_from([0, 0, 16, 1]),
        "slack": st.sampled_from([0, 3, 200]),
        "scale": st.sampled_from([None, 1.0]),
    }
    return drawn | {name: st.just(value) for name, value in fixed.items()}
