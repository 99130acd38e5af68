"""Ancestor masks and depths of a tree, one program per batch row."""

import triton
import triton.language as tl
from torch import Tensor


def launch(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """See `specdec.ops.tree_layout`, which checks the arguments."""
    batch, nodes = parents.shape
    words = triton.cdiv(nodes, 64)
    visible = parents.new_empty(batch, nodes, words)
    depths = parents.new_empty(batch, nodes)
    _layout[(batch,)](
        parents,
        num_nodes.contiguous(),
        visible,
        depths,
        parents.stride(0),
        parents.stride(1),
        NODES=nodes,
        PADDED=max(16, triton.next_power_of_2(nodes)),
        WORDS=words,
        STEPS=max(1, (nodes - 1).bit_length()),
        num_warps=4 if nodes > 32 else 1,
    )
    return visible, depths


@triton.jit
def _layout(
    parents,
    num_nodes,
    visible,
    depths,
    parent_batch,
    parent_node,
    NODES: tl.constexpr,
    PADDED: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0)
    node = tl.arange(0, PADDED)
    used = node < tl.load(num_nodes + row)
    parent = tl.load(parents + row * parent_batch + node * parent_node, mask=node < NODES, other=-1)
    # Relates every node to ancestors twice as far away in each step; counts are small integers, so float16 is exact.
    reach = ((parent[:, None] == node[None, :]) | (node[:, None] == node[None, :])).to(tl.float16)
    for _ in tl.static_range(STEPS):
        reach = (tl.dot(reach, reach) > 0).to(tl.float16)
    sees = (reach > 0) & used[:, None]
    tl.store(depths + row * NODES + node, tl.maximum(tl.sum(sees.to(tl.int64), 1) - 1, 0), mask=node < NODES)
    for word in tl.static_range(WORDS):
        bit = tl.where((node // 64 == word)[None, :] & sees, tl.full([PADDED, PADDED], 1, tl.int64), 0)
        mask = tl.sum(bit << (node % 64).to(tl.int64)[None, :], 1)
        tl.store(visible + (row * NODES + node) * WORDS + word, mask, mask=node < NODES)
