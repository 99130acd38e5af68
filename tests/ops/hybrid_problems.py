"""Random problems of the recurrent ops, and their definitions: every path walked token by token."""

import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec import ops
from tests.trees.random_trees import lineage, random_tree

CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "sizes": st.lists(st.one_of(st.integers(1, 9), st.integers(1, 64)), min_size=1, max_size=2),
    "style": st.sampled_from(["any", "deep", "chain", "star"]),
    "heads": st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    "dims": st.sampled_from([(4, 4), (16, 32), (8, 5), (20, 40)]),
    "hard": st.booleans(),
    "value_first": st.booleans(),
    "normalize": st.sampled_from([True, True, False]),
}


class DeltaProblem:
    """A tree, a state and a path of an earlier tree; `call` holds the arguments of the op without the path."""

    def __init__(
        self,
        seed: int,
        sizes: list[int],
        style: str,
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        hard: bool = False,
        value_first: bool = False,
        normalize: bool = True,
        channelwise: bool = False,
        dtype: torch.dtype = torch.float64,
        state_dtype: torch.dtype = torch.float64,
    ) -> None:
        """Hard problems have keys that are nearly the same, full corrections and hardly any decay.

        With `channelwise`, each channel of the keys has a decay of its own.
        """
        self.channelwise = channelwise
        self.draw, self.rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self.tree = random_tree(seed, sizes, style)
        self.dtype, self.heads, self.dims, self.hard = dtype, heads, dims, hard
        batch, nodes = self.tree.tokens.shape
        visible, _ = ops.tree_layout(self.tree.parents, self.tree.num_nodes)
        state = self.normal(batch, heads[1], *dims)
        state = state.transpose(2, 3).contiguous() if value_first else state
        names = ("query", "key", "value", "decay", "beta")
        self.call: dict[str, Any] = dict(zip(names, self.tokens(batch, nodes), strict=True))
        if not normalize:  # lengths below one, or corrections could grow without end
            self.call |= {name: self.call[name] / dims[0] for name in ("query", "key")}
        self.call |= {"ancestors": visible, "state": state.to(state_dtype)}
        self.call |= {"value_first": value_first, "normalize": normalize}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw, dtype=torch.float64).to(self.dtype)

    def tokens(self, batch: int, nodes: int) -> tuple[Tensor, ...]:
        """What nodes ask, say and forget."""
        (key_heads, heads), (key_dim, value_dim) = self.heads, self.dims
        query, key = self.normal(batch, nodes, key_heads, key_dim), self.normal(batch, nodes, key_heads, key_dim)
        value = self.normal(batch, nodes, heads, value_dim)
        channels = (key_dim,) if self.channelwise else ()
        decay, beta = -self.normal(batch, nodes, heads, *channels).abs(), self.normal(batch, nodes, heads).sigmoid()
        if self.hard:
            key = self.normal(batch, 1, key_heads, key_dim) + 0.2 * key  # the cosine of two of them is about 0.96
            decay, beta = decay * 1e-3, 1 - beta * 1e-3
        return query, key, value, decay, beta

    def walk(self, row: int, steps: list[tuple[Tensor, ...]], state: Tensor) -> tuple[Tensor | None, Tensor]:
        """The output of the last of some tokens, and the state behind it `[heads, key_dim, value_dim]`."""
        output, groups = None, self.heads[1] // self.heads[0]
        for query, key, value, decay, beta in (tuple(part.double() for part in step) for step in steps):
            if self.call["normalize"]:
                query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
            query, key = (part.repeat_interleave(groups, 0) for part in (query, key))
            state = state * (decay[..., None] if self.channelwise else decay[:, None, None]).exp()
            known = torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, beta[:, None] * (value - known))
            output = torch.einsum("hkv,hk->hv", state, query) * self.dims[0] ** -0.5
        return output, state

    def before(self, row: int) -> Tensor:
        state: Tensor = self.call["state"][row].double()
        return state.transpose(1, 2) if self.call["value_first"] else state

    def steps(self, row: int, nodes: list[int]) -> list[tuple[Tensor, ...]]:
        """The tokens of some nodes."""
        names = ("query", "key", "value", "decay", "beta")
        return [tuple(self.call[name][row, node] for name in names) for node in nodes]

    def outputs(self) -> list[Tensor]:
        """Of each row, the outputs of the nodes in use, `[nodes, heads, value_dim]`."""
        found = []
        for row, size in enumerate(self.tree.num_nodes.tolist()):
            paths = (lineage(self.tree, row, node) for node in range(size))
            answers = [self.walk(row, self.steps(row, path), self.before(row))[0] for path in paths]
            found.append(torch.stack([answer for answer in answers if answer is not None]))
        return found

    def some_path(self) -> tuple[Tensor, Tensor, list[list[int]]]:
        """A random path of each row, of any length from nothing on: padded, with its lengths, and as lists."""
        chosen = []
        for row, size in enumerate(self.tree.num_nodes.tolist()):
            path = lineage(self.tree, row, self.rng.randrange(size))
            chosen.append(path[: self.rng.choice([0, 1, len(path), len(path)])])
        most = max(1, *map(len, chosen))
        nodes = torch.tensor([path + [self.rng.randrange(-1, 1)] * (most - len(path)) for path in chosen])
        return nodes, torch.tensor([len(path) for path in chosen]), chosen

    def states(self, chosen: list[list[int]]) -> Tensor:
        """The states behind paths, laid out as the op's."""
        found = torch.stack(
            [self.walk(row, self.steps(row, path), self.before(row))[1] for row, path in enumerate(chosen)]
        )
        return found.transpose(2, 3) if self.call["value_first"] else found


def conv_windows(inputs: Tensor, history: Tensor, parents: list[int], taps: int) -> Tensor:
    """The last inputs of each node of one row, itself included, oldest first: `[nodes, taps, channels]`."""
    windows = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        line = torch.cat([history.T, inputs[path[::-1]]])
        windows.append(line[-taps:])
    return torch.stack(windows)
