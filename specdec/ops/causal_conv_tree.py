"""A causal convolution over time whose past is the path of each node instead of the row before it.

A node's window holds its own input, its parent's, that one's parent's and so on, and behind the root the last inputs of
the committed text. No window is stored for any node: keeping a path means remembering the last inputs along it.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _dispatch
from specdec.ops._ancestry import require_ancestors, unpack
from specdec.ops._checks import demands, tensors, within


def causal_conv_tree(
    inputs: Float[Tensor, "batch nodes channels"],
    weight: Float[Tensor, "channels taps"],
    history: Float[Tensor, "batch channels columns"],
    ancestors: Int[Tensor, "batch nodes words"],
    *,
    bias: Float[Tensor, " channels"] | None = None,
    path: Float[Tensor, "batch kept channels"] | None = None,
    counts: Int[Tensor, " batch"] | None = None,
    activation: str | None = "silu",
    out: Float[Tensor, "batch nodes channels"] | None = None,
    impl: _dispatch.Impl = "auto",
) -> Float[Tensor, "batch nodes channels"]:
    """The convolution of every node along its own path, one filter per channel, and an activation.

    With `path`, the inputs of an earlier tree's path are appended to the history first, in place (its oldest columns
    leave), as `conv_fold` does. Without it, the history is only read.

    Args:
        inputs: of each node.
        weight: filters, the last tap for the node itself.
        history: inputs before the tree, the last one in the last column; at least `taps - 1` columns.
        ancestors: bit masks of each node's ancestors, itself included, in topological order (`ops.tree_layout`).
        bias: added to each channel.
        path: inputs of the nodes to be appended first, in the order of their path.
        counts: how many of them count, per batch row; any number from 0 to all.
        activation: `silu` (`swish` is the same) or None.
        out: where the inputs are copied to, as a record for a later `path`.
        impl: which implementation runs; see `specdec.ops`. Both compute in float32 (float64 if the inputs are).

    Raises:
        ShapeError: for shapes that do not belong together, and on a CPU for counts that are not there.
        UnsupportedError: for another activation, or if `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> visible, _ = ops.tree_layout(torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
        >>> inputs, history = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[[30.0, 20.0, 10.0]]])
        >>> ops.causal_conv_tree(inputs, torch.ones(1, 3), history, visible, activation=None).flatten().tolist()
        [31.0, 13.0, 15.0]
    """
    required = {"inputs": inputs, "weight": weight, "history": history, "ancestors": ancestors}
    tensors("causal_conv_tree", required, {"bias": bias, "path": path, "counts": counts, "out": out})
    _check(inputs, weight, history, ancestors, bias, path, counts, out)
    if activation not in ("silu", "swish", None):
        raise UnsupportedError(f"causal_conv_tree: activation must be 'silu', 'swish' or None, got {activation!r}.")
    kernel: Any = _dispatch.choose("causal_conv_tree", impl, inputs.device, inputs, weight, history, bias, path)
    if kernel is not None and inputs.numel() and inputs.dtype != torch.float64:
        output: Tensor = kernel.launch(inputs, weight, history, ancestors, bias, path, counts, activation, out)
        return output
    if path is not None and counts is not None:
        conv_fold(history, path, counts)
    if out is not None:
        out.copy_(inputs)
    return _reference(inputs, weight, history, ancestors, bias, activation)


def conv_fold(
    history: Float[Tensor, "batch channels columns"],
    path: Float[Tensor, "batch kept channels"],
    counts: Int[Tensor, " batch"],
) -> None:
    """Appends the first `counts[b]` inputs of a path to the history, in place.

    Args:
        history: the last inputs, as in `causal_conv_tree`.
        path: inputs of the nodes of a path, in order.
        counts: how many of them count; 0 leaves a history as it is.

    Raises:
        ShapeError: for shapes that do not belong together, and on a CPU for counts that are not there.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> history = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> ops.conv_fold(history, torch.tensor([[[4.0], [5.0]]]), torch.tensor([1]))
        >>> history.tolist()
        [[[2.0, 3.0, 4.0]]]
    """
    tensors("conv_fold", {"history": history, "path": path, "counts": counts})
    if history.dim() != 3:
        raise ShapeError(f"conv_fold: history must be [batch, channels, columns], got {list(history.shape)}.")
    _check_path("conv_fold", path, counts, history.shape[0], history.shape[1])
    columns = history.shape[2]
    index = counts[:, None] + torch.arange(columns, device=history.device)
    joined = torch.cat([history, path.transpose(1, 2).to(history.dtype)], 2)
    history.copy_(joined.gather(2, index[:, None].expand(-1, history.shape[1], -1)))


def _reference(
    inputs: Tensor, weight: Tensor, history: Tensor, ancestors: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """The definition in plain torch."""
    (batch, nodes, channels), (taps, columns) = inputs.shape, (weight.shape[1], history.shape[2])
    dtype = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    member = unpack(ancestors, nodes)
    place = torch.arange(nodes, device=inputs.device).expand(batch, nodes, nodes)
    nearest = torch.nn.functional.pad(place.masked_fill(~member, -1), (taps, 0), value=-1).topk(taps, -1).values
    behind = torch.arange(taps, device=inputs.device) - member.sum(-1, keepdim=True)  # columns behind the last one
    index = torch.where(nearest >= 0, columns + nearest, (columns - 1 - behind).clamp_min(0))
    known = torch.cat([history.transpose(1, 2).to(dtype), inputs.to(dtype)], 1)
    windows = known.gather(1, index.flatten(1)[..., None].expand(-1, -1, channels)).unflatten(1, (nodes, taps))
    output: Tensor = (windows * weight.to(dtype).flip(1).T).sum(2)
    if bias is not None:
        output = output + bias.to(dtype)
    if activation is not None:
        output = torch.nn.functional.silu(output)
    return output.to(inputs.dtype)


def _check(
    inputs: Tensor,
    weight: Tensor,
    history: Tensor,
    ancestors: Tensor,
    bias: Tensor | None,
    path: Tensor | None,
    counts: Tensor | None,
    out: Tensor | None,
) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands("causal_conv_tree")
    demand(inputs.dim() == 3, f"inputs must be [batch, nodes, channels], got {list(inputs.shape)}")
    demand(inputs.is_floating_point(), f"inputs must hold floating-point numbers, got {inputs.dtype}")
    batch, nodes, channels = inputs.shape
    demand(
        weight.dim() == 2 and weight.shape[0] == channels and weight.shape[1] > 0,
        f"weight must be [{channels}, 1 or more taps], got {list(weight.shape)}",
    )
    taps = weight.shape[1]
    demand(
        history.dim() == 3 and history.shape[:2] == (batch, channels) and history.shape[2] >= taps - 1,
        f"history must be [{batch}, {channels}, {taps - 1} or more columns], got {list(history.shape)}",
    )
    words = [batch, nodes, -(-nodes // 64)]
    demand(list(ancestors.shape) == words, f"ancestors must be {words}, got {list(ancestors.shape)}")
    demand(ancestors.dtype == torch.int64, f"ancestors must be int64, got {ancestors.dtype}")
    require_ancestors("causal_conv_tree", ancestors)
    demand(bias is None or list(bias.shape) == [channels], f"bias must be [{channels}]")
    demand((path is None) == (counts is None), "path and counts come together")
    if path is not None and counts is not None:
        _check_path("causal_conv_tree", path, counts, batch, channels)
    demand(
        out is None or out.shape == inputs.shape,
        f"out must be {list(inputs.shape)}, got {list(out.shape) if out is not None else None}",
    )
    for name, given in (("weight", weight), ("history", history), ("ancestors", ancestors), ("path", path)):
        demand(
            given is None or given.device == inputs.device,
            f"{name} must be on {inputs.device} like inputs, got {given.device if given is not None else None}",
        )


def _check_path(name: str, path: Tensor, counts: Tensor, batch: int, channels: int) -> None:
    """Raises for a path that does not fit a history."""
    if path.dim() != 3 or path.shape[::2] != (batch, channels):
        raise ShapeError(f"{name}: path must be [{batch}, kept, {channels}], got {list(path.shape)}.")
    if list(counts.shape) != [batch] or counts.dtype != torch.int64:
        raise ShapeError(f"{name}: counts must be int64 [{batch}], got {counts.dtype} {list(counts.shape)}.")
    within(name, "counts", counts, 0, path.shape[1], "nodes of the path")
