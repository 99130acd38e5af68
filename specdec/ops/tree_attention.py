"""Attention of the nodes of a tree over a key/value cache, reading it once for a tile of nodes and a group's heads.

The cache of a batch row holds its committed slots, and behind them one slot for each pending row in the order in which
they were written. What a node sees among the pending rows is a bit mask, so a tree needs no mask over the context:

    sees(i, slot) = start <= slot < length                       and position(i) - slot < window
                 or bit (slot - length) of visible[i]            and depth(i) - depth(slot - length) < window

with `position(i) = length + depth(i)`: a window counts positions, never the order in which siblings were written.

The kernel splits the cache over work items where heads and rows are too few to fill a GPU ("3D" or split-KV attention,
flash-decoding), and adds the parts up in a fixed order.
"""

from numbers import Integral, Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _dispatch
from specdec.ops._ancestry import pack, unpack
from specdec.ops._attention_call import AttentionCall
from specdec.ops._attention_plan import device_of, make_plan
from specdec.ops._checks import flags, several, tensors


def tree_attention(
    query: Float[Tensor, "batch heads rows dim"],
    keys: Shaped[Tensor, "..."],
    values: Shaped[Tensor, "..."],
    visible: Int[Tensor, "batch rows words"],
    lengths: Int[Tensor, " batch"],
    *,
    depths: Int[Tensor, "batch pending"] | None = None,
    starts: Int[Tensor, " batch"] | None = None,
    blocks: Int[Tensor, "batch blocks"] | None = None,
    key_scales: Shaped[Tensor, "..."] | tuple[Tensor, ...] | None = None,
    value_scales: Shaped[Tensor, "..."] | tuple[Tensor, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: _dispatch.Impl = "auto",
) -> Float[Tensor, "batch heads rows value_dim"] | tuple[Tensor, Float[Tensor, "batch heads rows"]]:
    """Attention of tree nodes over committed slots and their own ancestors.

    Args:
        query: queries of the nodes, after any rotary embedding.
        keys: `[batch, kv_heads, slots, dim]`, or `[pages, kv_heads, page, dim]` with `blocks`; any strides. Numbers in
            the dtype of `query`, or codes with `key_scales`; codes of four bits are bytes `[..., dim / 2]`, the first
            half of a row in the low bits.
        values: like `keys`; its last dimension and its form may differ.
        visible: per node, which pending rows it sees: bit `j % 64` of word `j // 64` stands for pending row j, the node
            itself included. In `specdec.trees`, `topology.pack(topology.ancestor_matrix(parents))` makes it, and
            `topology.ancestors` of a whole `DraftTree`. A node without any bit is empty and sees nothing. Bits beyond
            the pending rows must be clear.
        lengths: committed slots per batch row, the pending rows not counted; pending row j is at slot
            `lengths[b] + j`, and all of them must lie in the cache (checked where reading them is free, on a CPU).
        depths: depth of every pending row, of which the queries are the last ones. None says that all pending rows are
            queried and that a node's depth is the number of its ancestors.
        starts: first slot of a batch row that is no padding; None is 0.
        blocks: page of each run of `page` slots, for a cache in pages. Entries behind the last pending row are not
            read and may say anything, such as -1; on a GPU the others are not checked.
        key_scales: what belongs to codes, shaped like `keys` up to the last dimension. For INT8 or FP8 (E4M3) codes
            the float32 scale of each row `[..., 1]`, alone or in a tuple; for codes of `kv.Int4` its float16 scales and
            zero points `[..., groups]`; for those of `kv.NVFP4` its E4M3 scales `[..., dim / 16]` and the float32 scale
            of each row `[..., 1]`.
        value_scales: the same for values.
        scale: of the scores; None is `dim ** -0.5`.
        window: positions that a query sees, its own included; None for all.
        softcap: `softcap * tanh(score / softcap)` before the mask; None for none.
        sinks: a logit per head that takes part in the softmax and has no value.
        return_lse: also return the natural logarithm of the softmax denominator, sinks included, -inf for empty nodes.
        deterministic: fixes the runs of slots that are added up first, so that a node's sum does not depend on the
            batch or on how large the cache is. Another number of nodes may be multiplied by other instructions.
        impl: which implementation runs; see `specdec.ops`.

    Returns:
        The attended values in the dtype of `query`, zeros for empty nodes; with `return_lse` also the logarithm, in
        float32 (float64 for float64 inputs).

    Raises:
        ShapeError: for shapes that do not belong together, or dtypes and devices that differ; on a CPU also for
            lengths, bits and pages that are not there.
        UnsupportedError: if `impl="triton"` cannot run here, and for flags that are neither True nor False.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> query, cache = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16)
        >>> chain = torch.tensor([[[0b001], [0b011], [0b111]]])  # each node sees itself and those before
        >>> ops.tree_attention(query, cache, cache, chain, lengths=torch.tensor([6])).shape
        torch.Size([1, 4, 3, 16])
    """
    given = {"query": query, "keys": keys, "values": values, "visible": visible, "lengths": lengths}
    optional = {"depths": depths, "starts": starts, "blocks": blocks, "sinks": sinks}
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    _look("tree_attention", given, optional, scales)
    numbers = {"scale": scale, "window": window, "softcap": softcap}
    options = {"return_lse": return_lse, "deterministic": deterministic}
    return _attend("tree_attention", {**given, **optional, **scales}, numbers, options, impl)


def split_kv_attention(
    query: Float[Tensor, "batch heads rows dim"],
    keys: Shaped[Tensor, "..."],
    values: Shaped[Tensor, "..."],
    lengths: Int[Tensor, " batch"],
    *,
    starts: Int[Tensor, " batch"] | None = None,
    blocks: Int[Tensor, "batch blocks"] | None = None,
    key_scales: Shaped[Tensor, "..."] | tuple[Tensor, ...] | None = None,
    value_scales: Shaped[Tensor, "..."] | tuple[Tensor, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: _dispatch.Impl = "auto",
) -> Float[Tensor, "batch heads rows value_dim"] | tuple[Tensor, Float[Tensor, "batch heads rows"]]:
    """Attention of a chain: each of the last `rows` tokens sees the committed slots and the tokens before it.

    The same kernel as `tree_attention`, with the mask of a chain; one row is plain decoding. What is not told here is
    as there.

    Args:
        query: queries of the chain, the first right after the committed slots.
        keys: `[batch, kv_heads, slots, dim]`, the chain's own behind the committed ones.
        values: `[batch, kv_heads, slots, value_dim]`.
        lengths: committed slots per batch row, the chain not included.
        starts: first slot of a batch row that is no padding; None is 0.
        blocks: pages of each row.
        key_scales: what belongs to codes of keys.
        value_scales: what belongs to codes of values.
        scale: of the scores; None is `dim ** -0.5`.
        window: positions that a query sees, its own included; None for all.
        softcap: of the scores; None for none.
        sinks: a logit per head.
        return_lse: also return the logarithm of the denominator.
        deterministic: fixes the order of the sum.
        impl: which implementation runs; see `specdec.ops`.

    Returns:
        As `tree_attention`.

    Raises:
        ShapeError: as `tree_attention`.
        UnsupportedError: as `tree_attention`.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> cache = torch.randn(1, 2, 9, 16)
        >>> ops.split_kv_attention(torch.randn(1, 4, 1, 16), cache, cache, lengths=torch.tensor([8])).shape
        torch.Size([1, 4, 1, 16])
    """
    given = {"query": query, "keys": keys, "values": values, "lengths": lengths}
    optional = {"starts": starts, "blocks": blocks, "sinks": sinks}
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    _look("split_kv_attention", given, optional, scales)
    if query.dim() != 4:
        raise ShapeError(f"split_kv_attention: query must be [batch, heads, rows, dim], got {list(query.shape)}.")
    visible = chain_mask(query.shape[2], query.device).expand(query.shape[0], -1, -1)
    numbers = {"scale": scale, "window": window, "softcap": softcap}
    options = {"return_lse": return_lse, "deterministic": deterministic}
    chain = {"visible": visible, "depths": None}
    return _attend("split_kv_attention", {**given, **optional, **scales, **chain}, numbers, options, impl)


def _look(op: str, given: dict[str, Any], optional: dict[str, Any], scales: dict[str, Any]) -> None:
    """Raises `ShapeError` unless all of them are tensors; scales may be several."""
    tensors(op, given, optional)
    for name, each in scales.items():
        if isinstance(each, (tuple, list)):
            several(op, name, each)
        else:
            tensors(op, {}, {name: each})


def _attend(
    op: str, given: dict[str, Any], numbers: dict[str, Any], options: dict[str, Any], impl: _dispatch.Impl
) -> Tensor | tuple[Tensor, Tensor]:
    """What both ops return, from tensors, numbers and flags by the names of `tree_attention`."""
    flags(op, **options)
    query: Tensor = given["query"]
    own = {name: _plain(number) for name, number in numbers.items()}  # checked next
    if own["scale"] is None:
        own["scale"] = max(1, query.shape[-1:].numel()) ** -0.5
    call = AttentionCall(**given, **own)
    shape = call.checked(op)
    inputs = query, call.keys, call.values, call.sinks
    kernel: Any = _dispatch.choose("tree_attention", impl, query.device, *inputs, asked=op)
    if kernel is not None and query.dtype not in kernel.DTYPES:
        if impl == "triton":
            raise UnsupportedError(f"{op}: the kernel takes {kernel.DTYPES}, got {query.dtype}.")
        kernel = None
    if kernel is None or query.numel() == 0 or shape.slots == 0:
        output, lse = _reference(call)
    else:
        device, specialised = device_of(query.device), kernel.specialised(call)
        plan = make_plan(shape, device, deterministic=options["deterministic"], specialised=specialised)
        output, lse = kernel.launch(call, plan)
    return (output, lse) if options["return_lse"] else output


def _plain(given: Any) -> Any:
    """A number of numpy as one of Python, which kernels are launched with; anything else as it came."""
    if type(given) is not bool and isinstance(given, Real):
        return int(given) if isinstance(given, Integral) else float(given)
    return given


def chain_mask(rows: int, device: torch.device) -> Int[Tensor, "1 rows words"]:
    """The mask in which row i sees rows 0 to i."""
    return pack(torch.ones(1, rows, max(1, rows), dtype=torch.bool, device=device).tril())


def _reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The definition in plain torch, in float32 or wider."""
    query = call.query
    exact = torch.promote_types(query.dtype, torch.float32)
    keys, values = call.key_rows.decode(exact), call.value_rows.decode(exact)
    if call.blocks is not None:
        keys, values = (_unpaged(pages, call.blocks) for pages in (keys, values))
    groups = query.shape[1] // keys.shape[1]
    packed = query.to(exact).unflatten(1, (keys.shape[1], groups)).flatten(2, 3)  # [batch, kv_heads, group x rows, dim]
    scores = (packed @ keys.transpose(-1, -2) * call.scale).unflatten(2, (groups, -1)).flatten(1, 2)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    mask = visible_slots(call, slots=keys.shape[2])
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True) if keys.shape[2] else scores.new_full((*scores.shape[:3], 1), -torch.inf)
    empty = ~mask.any(-1)[:, None]
    if call.sinks is not None:
        sink = call.sinks.to(exact)[None, :, None, None]
        top = torch.maximum(top, sink)
    weights = (scores - top.masked_fill(empty.unsqueeze(-1), 0)).exp()
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + (sink - top).exp()
    weights = (weights / total.masked_fill(empty.unsqueeze(-1), 1)).unflatten(1, (keys.shape[1], groups)).flatten(2, 3)
    # A value that is not finite reaches the nodes that see it, and no other through 0 x NaN.
    broken = ~values.isfinite().all(-1)
    output = (weights @ values.masked_fill(broken.unsqueeze(-1), 0)).unflatten(2, (groups, -1)).flatten(1, 2)
    reached = (mask[:, None] & broken[:, :, None]).any(-1).repeat_interleave(groups, 1)
    output = output.masked_fill(reached.unsqueeze(-1), torch.nan)
    lse = (total.log() + top).squeeze(-1).masked_fill(empty, -torch.inf)
    return output.to(query.dtype), lse


def visible_slots(call: AttentionCall, slots: int) -> Bool[Tensor, "batch rows slots"]:
    """Which of the first `slots` slots each node sees; see the head of this file."""
    visible, lengths, depths, window = call.visible, call.lengths, call.pending_depths, call.window
    rows, pending = visible.shape[1], depths.shape[1]
    drafted = unpack(visible, pending)
    slot = torch.arange(slots, device=lengths.device)
    committed = slot < lengths[:, None]
    if call.starts is not None:
        committed = committed & (slot >= call.starts[:, None])
    committed = committed[:, None] & drafted.any(-1, keepdim=True)
    if window is not None:
        own = depths[:, pending - rows :, None]
        committed = committed & (lengths[:, None, None] + own - slot < window)
        drafted = drafted & (own - depths[:, None] < window)
    offset = slot - lengths[:, None]
    inside = (offset >= 0) & (offset < pending)
    index = offset.clamp(0, max(pending - 1, 0))[:, None].expand(-1, rows, -1)
    return committed | (drafted.gather(2, index) & inside[:, None])


def _unpaged(pages: Tensor, blocks: Tensor) -> Tensor:
    """A cache in pages as `[batch, kv_heads, slots, dim]`; entries of a table that are not in use may say anything."""
    return pages[blocks.clamp(0, pages.shape[0] - 1)].transpose(1, 2).flatten(2, 3)
