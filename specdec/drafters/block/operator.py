"""A block's attention as one operator of `torch.compile`, which asks whose block is drafted.

The rows of a block are written into the context's buffers and attended to there. As one operator, which takes neither
the buffers nor the masks, it leaves the layers of a drafter one graph, in which everything else can be fused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

OPERATOR = "specdec::block_attention"

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer by its number, from queries, keys and values `[batch, heads, rows, head_dim]`."""

_serving: list[Attend] = []
"""The attention of the block that is run or captured."""


@contextmanager
def serving(attend: Attend) -> Iterator[None]:
    """Says what the operator does while a compiled forward runs.

    Args:
        attend: attention of the layers, `[batch, rows, heads, head_dim]`.
    """
    register_operator()
    _serving.append(attend)
    try:
        yield
    finally:
        _serving.pop()


def compiling() -> bool:
    """Whether the operator stands for attention: what is compiled runs where somebody says what it does."""
    return torch.compiler.is_compiling() and bool(_serving)


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes the attention an operator that `torch.compile` leaves alone; it relies on results that are contiguous."""

    def attention(query: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        return _serving[-1](layer, query, keys, values).contiguous()

    def shaped(query: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:  # noqa: ARG001 - the operator's
        batch, heads, rows, _ = query.shape
        return query.new_empty(batch, rows, heads, values.shape[-1])

    schema = "(Tensor query, Tensor keys, Tensor values, int layer) -> Tensor"
    torch.library.custom_op(OPERATOR, attention, mutates_args=(), schema=schema).register_fake(shaped)
