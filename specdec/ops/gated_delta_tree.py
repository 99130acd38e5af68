"""The gated delta rule over the nodes of a tree: every node reads and writes a state of its own path.

A head keeps a matrix S that maps keys to values. Along a path, a token with key k, value v, decay a = exp(g) and
strength b first decays the state, then corrects what it says of k, and reads it at q:

    S_t = a_t S_parent + u_t k_t^T,   u_t = b_t (v_t - a_t S_parent k_t),   o_t = S_t q_t

No state is made for any node. With G the sums of g along each path, M the ancestors of each node (itself included) and
D_ts = exp(G_t - G_s) on M, the corrections U of all nodes solve one triangular system, and everything follows:

    (I + diag(b) (D K K^T, ancestors only)) U = diag(b) (V - diag(exp G) K S^T),
    O = diag(exp G) Q S^T + (D Q K^T on M) U,
    S_leaf = exp(G_leaf) S + sum over the path of exp(G_leaf - G_s) u_s k_s^T

So a tree costs what a chain costs, and keeping a path is a weighted sum over what its nodes wrote. The state is only
written when a path is folded into it, by `gated_delta_fold` or at the beginning of the next tree. The same form for
chains is in Yang et al. 2024 (arXiv 2412.06464); for trees see TreeWY (arXiv 2608.20961).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.ops import _dispatch
from specdec.ops._ancestry import require_ancestors, unpack
from specdec.ops._checks import demands, flags, number, record_of, tensors, within

EPSILON = 1e-6
"""What the models add to the square of a key's or query's length before they divide by it."""

STATES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRecord:
    """What nodes would write into a state: enough to fold any path of them.

    Attributes:
        keys: as they were given, `[batch, nodes, key_heads, key_dim]`.
        updates: what each node adds along its key as it was given (u above, over the key's length),
            `[batch, nodes, heads, value_dim]`, in float32 or float64.
        decays: sums of log-decays along the paths (G above), of the decays' shape, like `updates`.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> record = ops.DeltaRecord(torch.ones(1, 3, 1, 2), torch.ones(1, 3, 2, 4), -torch.arange(6.0).view(1, 3, 2))
        >>> record.along(torch.tensor([[0, 2]])).decays.tolist()
        [[[-0.0, -1.0], [-4.0, -5.0]]]
    """

    keys: Float[Tensor, "batch nodes key_heads key_dim"]
    updates: Float[Tensor, "batch nodes heads value_dim"]
    decays: Float[Tensor, "batch nodes heads"] | Float[Tensor, "batch nodes heads channels"]

    def along(self, nodes: Int[Tensor, "batch path"]) -> "DeltaRecord":
        """The record of some nodes, such as a path, in their order; indices below 0 are read as 0."""
        tensors("DeltaRecord.along", {"nodes": nodes})
        batch, count = self.decays.shape[:2]
        if nodes.dim() != 2 or nodes.shape[0] != batch or nodes.dtype != torch.int64:
            raise ShapeError(
                f"DeltaRecord.along: nodes must be int64 [{batch}, path], got {nodes.dtype} {list(nodes.shape)}."
            )
        within("DeltaRecord.along", "nodes", nodes.clamp_min(0), 0, count - 1, "nodes of the record")
        row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
        return DeltaRecord(*(part[row, nodes.clamp_min(0)] for part in (self.keys, self.updates, self.decays)))


@dataclass(frozen=True, slots=True, eq=False)
class DeltaCall:
    """Checked arguments of one call; without `query`, a path is folded and nothing else is done."""

    state: Tensor
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    decay: Tensor | None
    beta: Tensor | None
    ancestors: Tensor | None
    path: DeltaRecord | None
    counts: Tensor | None
    scale: float
    normalize: bool
    value_first: bool
    out: DeltaRecord | None
    epsilon: float = EPSILON

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return torch.float64 if self.state.dtype == torch.float64 else torch.float32


def gated_delta_tree(
    query: Float[Tensor, "batch nodes key_heads key_dim"],
    key: Float[Tensor, "batch nodes key_heads key_dim"],
    value: Float[Tensor, "batch nodes heads value_dim"],
    decay: Float[Tensor, "batch nodes heads *channels"],
    beta: Float[Tensor, "batch nodes heads"],
    ancestors: Int[Tensor, "batch nodes words"],
    state: Float[Tensor, "batch heads rows columns"],
    *,
    path: DeltaRecord | None = None,
    counts: Int[Tensor, " batch"] | None = None,
    scale: float | None = None,
    normalize: bool = True,
    value_first: bool = False,
    out: DeltaRecord | None = None,
    impl: _dispatch.Impl = "auto",
) -> tuple[Float[Tensor, "batch nodes heads value_dim"], DeltaRecord]:
    """Outputs of all nodes of a tree, and the record that folds a path of them later.

    Without `path`, the state is only read. With it, the path of an earlier tree is folded into the state first, in
    place, exactly as `gated_delta_fold` does; the kernel then reads and writes the state once for both.

    A node that is not finite reaches its descendants only. Nodes without ancestors, not even themselves, are padding:
    what comes out for them is of no meaning, and no other node sees it.

    Args:
        query: of each node and key head; several value heads in a row share a key head.
        key: of each node and key head.
        value: of each node and value head.
        decay: logarithms of the decays, at most 0; with a last dimension of `key_dim`, one for each channel of the keys
            (Kimi Delta Attention), which the reference computes.
        beta: strengths of the corrections, 0 to 1 (to 2 where eigenvalues may be negative).
        ancestors: bit masks of each node's ancestors, itself included, in topological order (`ops.tree_layout`).
        state: what came before the tree, `[batch, heads, key_dim, value_dim]`; with `value_first`
            `[batch, heads, value_dim, key_dim]`. Its dtype says what is computed in: float64 in itself, all others
            in float32.
        path: record of the nodes to be folded first, in the order of their path; see `DeltaRecord.along`.
        counts: how many nodes of `path` count, per batch row; any number from 0 to all.
        scale: what queries are multiplied with; None for `key_dim ** -0.5`.
        normalize: whether queries and keys are divided by their lengths first, with `EPSILON` under the root.
        value_first: layout of the state.
        out: where the record is written; None makes a new one. Must not share memory with `path`.
        impl: which implementation runs; see `specdec.ops`.

    Raises:
        ShapeError: for shapes that do not belong together; on a CPU also for counts and ancestors that are not there.
        UnsupportedError: for dtypes that no implementation takes, flags that are neither True nor False, or if
            `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> key, value = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0]]), torch.tensor([[1.0], [2.0], [4.0]])
        >>> one, none = torch.ones(1, 3, 1), torch.zeros(1, 3, 1)  # full corrections, no decay
        >>> visible, _ = ops.tree_layout(torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
        >>> state = torch.zeros(1, 1, 2, 1)
        >>> call = key[None, :, None], key[None, :, None], value[None, :, None], none, one, visible, state
        >>> output, record = ops.gated_delta_tree(*call, scale=1.0)
        >>> [round(number, 3) for number in output.flatten().tolist()]  # both children read their own correction
        [1.0, 2.0, 4.0]
        >>> ops.gated_delta_fold(state, record.along(torch.tensor([[0, 2]])), torch.tensor([2]))
        >>> [round(number, 3) for number in state.flatten().tolist()]  # the sibling left nothing behind
        [4.0, 0.0]
    """
    required = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
    tensors("gated_delta_tree", required | {"ancestors": ancestors, "state": state}, {"counts": counts})
    for name, record in (("path", path), ("out", out)):
        if record is not None:
            record_of("gated_delta_tree", name, record, DeltaRecord)
    flags("gated_delta_tree", normalize=normalize, value_first=value_first)
    if scale is not None and not number(scale):
        raise ShapeError(f"gated_delta_tree: scale must be a finite number or None, got {scale!r}.")
    scale = max(1, key.shape[-1:].numel()) ** -0.5 if scale is None else float(scale)  # shapes are checked next
    call = DeltaCall(state, query, key, value, decay, beta, ancestors, path, counts, scale, normalize, value_first, out)
    _check("gated_delta_tree", call)
    kernel = _kernel(call, impl)
    if kernel is not None:
        output, parts = kernel.launch(call, _parts(path), _parts(out))
        return output, DeltaRecord(*parts)
    _fold(call)
    output, record = _verify(call)
    if out is None:
        return output, record
    for mine, theirs in zip(_parts(out), _parts(record), strict=True):
        mine.copy_(theirs)
    return output, out


def gated_delta_fold(
    state: Float[Tensor, "batch heads rows columns"],
    path: DeltaRecord,
    counts: Int[Tensor, " batch"],
    *,
    value_first: bool = False,
    impl: _dispatch.Impl = "auto",
) -> None:
    """Folds a path into the state, in place: afterwards the state is that behind the path's last node.

    Args:
        state: as in `gated_delta_tree`.
        path: record of the nodes of the path, in order; see `DeltaRecord.along`.
        counts: how many of them count, per batch row; 0 leaves a state as it is, to the last bit.
        value_first: layout of the state.
        impl: which implementation runs; see `specdec.ops`.

    Raises:
        ShapeError: for shapes that do not belong together; on a CPU also for counts and ancestors that are not there.
        UnsupportedError: for dtypes that no implementation takes, flags that are neither True nor False, or if
            `impl="triton"` cannot run here.
    """
    tensors("gated_delta_fold", {"state": state, "counts": counts})
    record_of("gated_delta_fold", "path", path, DeltaRecord)
    flags("gated_delta_fold", value_first=value_first)
    call = DeltaCall(state, None, None, None, None, None, None, path, counts, 1.0, False, value_first, None)
    _check("gated_delta_fold", call)
    kernel = _kernel(call, impl)
    if kernel is not None:
        kernel.launch(call, _parts(path), _parts(None))
    else:
        _fold(call)


def _kernel(call: DeltaCall, impl: _dispatch.Impl) -> Any:
    """The kernel module if it takes the call, else None."""
    inputs = call.state, call.query, call.key, call.value, call.decay, call.beta
    kernel: Any = _dispatch.choose("gated_delta_tree", impl, call.state.device, *inputs)
    if kernel is None or call.state.numel() == 0:
        return None
    reason = kernel.refusal(call)
    if reason and impl == "triton":
        raise UnsupportedError(f"gated_delta_tree: the kernel takes {reason}.")
    return None if reason else kernel


def _parts(record: DeltaRecord | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if record is None else (record.keys, record.updates, record.decays)


def _spread(rows: Tensor, call: DeltaCall) -> Tensor:
    """Keys or queries `[batch, heads, nodes, key_dim]`, one for each value head."""
    return rows.to(call.dtype).repeat_interleave(call.state.shape[1] // rows.shape[2], 2).transpose(1, 2)


def _over_length(rows: Tensor, call: DeltaCall) -> Tensor:
    """What makes the length of each row one, `[batch, heads, nodes, 1]`; one itself if lengths stay as they are."""
    squares: Tensor = rows.square().sum(-1, keepdim=True)
    return (squares + call.epsilon).rsqrt() if call.normalize else torch.ones_like(squares)


def _decays(decays: Tensor, call: DeltaCall) -> Tensor:
    """Log-decays `[batch, heads, nodes, channels]`: one channel for all keys of a head, or one for each."""
    return (decays[..., None] if decays.dim() == 3 else decays).to(call.dtype).transpose(1, 2)


def _fold(call: DeltaCall) -> None:
    """The state behind a path, in plain torch."""
    if call.path is None or call.counts is None or call.path.decays.shape[1] == 0:
        return
    kept = (torch.arange(call.path.decays.shape[1], device=call.state.device) < call.counts[:, None])[:, None, :, None]
    decays = _decays(call.path.decays, call).masked_fill(~kept, 0)
    ends = (call.counts - 1).clamp_min(0)[:, None, None, None].expand(-1, *decays.shape[1:2], 1, decays.shape[3])
    last = decays.gather(2, ends)
    keys = (_spread(call.path.keys, call) * (last - decays).exp()).masked_fill(~kept, 0)
    updates = call.path.updates.to(call.dtype).transpose(1, 2).masked_fill(~kept, 0)
    state = call.state.transpose(2, 3) if call.value_first else call.state
    folded = state.to(call.dtype) * last.exp().transpose(2, 3) + keys.transpose(2, 3) @ updates
    state.copy_(torch.where((call.counts > 0)[:, None, None, None], folded.to(state.dtype), state))


def _verify(call: DeltaCall) -> tuple[Tensor, DeltaRecord]:
    """All nodes at once, in plain torch: the closed form of the module's docstring."""
    given: Any = call
    nodes = given.value.shape[1]
    member = unpack(given.ancestors, nodes)[:, None]  # [batch, 1, nodes, nodes]
    query, key = (_spread(rows, call) for rows in (given.query, given.key))
    query, shortened = query * _over_length(query, call), _over_length(key, call)
    key = key * shortened
    value, beta = (part.to(call.dtype).transpose(1, 2) for part in (given.value, given.beta))
    decay = _decays(given.decay, call)
    rows = (key, value, decay)
    broken = ~torch.stack([beta.isfinite(), *(part.isfinite().all(-1) for part in rows)]).all(0)
    key, value, decay = (part.masked_fill(broken[..., None], 0) for part in rows)
    beta = beta.masked_fill(broken, 0)
    state = call.state.to(call.dtype)
    state = state.transpose(2, 3) if call.value_first else state
    path_decay = member.to(call.dtype) @ decay
    between = path_decay[:, :, :, None] - path_decay[:, :, None]
    between = between.masked_fill(~member[..., None], 0).exp() * member[..., None]
    carried = path_decay.exp()

    def met(rows: Tensor) -> Tensor:
        """Products of rows with the keys on their paths, decayed on the way."""
        if between.shape[-1] == 1:
            return between[..., 0] * (rows @ key.transpose(2, 3))
        return (rows[:, :, :, None] * key[:, :, None] * between).sum(-1)

    target = beta[..., None] * (value - (key * carried) @ state)
    system = (beta[..., None] * met(key)).tril(-1) + torch.eye(nodes, dtype=call.dtype, device=key.device)
    updates = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    output = (query * carried) @ state + met(query) @ updates
    reached = (member & broken[:, :, None, :]).any(-1)[..., None]
    output, updates = output * call.scale, updates * shortened
    output, updates = (rows.masked_fill(reached, torch.nan).transpose(1, 2) for rows in (output, updates))
    path_decay = path_decay.transpose(1, 2).reshape(given.decay.shape)
    return output.to(given.value.dtype), DeltaRecord(given.key, updates, path_decay)


def _check(op: str, call: DeltaCall) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands(op)
    state = call.state
    demand(state.dim() == 4, f"state must be [batch, heads, key_dim, value_dim], got {list(state.shape)}")
    if state.dtype not in STATES:
        raise UnsupportedError(f"{op}: a state holds float64, float32, float16 or bfloat16, got {state.dtype}.")
    (batch, heads), sizes = state.shape[:2], list(state.shape[2:])
    key_dim, value_dim = sizes[::-1] if call.value_first else sizes
    demand((call.path is None) == (call.counts is None), "path and counts come together")
    tensors = {"state": state}
    if call.key is not None:
        given: Any = call
        nodes, key_heads = given.key.shape[1:3] if given.key.dim() == 4 else (0, 0)
        shapes = {
            "key": [batch, nodes, key_heads, key_dim],
            "query": [batch, nodes, key_heads, key_dim],
            "value": [batch, nodes, heads, value_dim],
            "decay": [batch, nodes, heads, *([key_dim] if given.decay.dim() == 4 else [])],
            "beta": [batch, nodes, heads],
            "ancestors": [batch, nodes, -(-nodes // 64)],
        }
        tensors |= {name: getattr(given, name) for name in shapes}
        for name, wanted in shapes.items():
            came = list(tensors[name].shape)
            demand(came == wanted, f"{name} must be {wanted} for a state {list(state.shape)}, got {came}")
        demand(key_heads > 0 and heads % key_heads == 0, f"{heads} value heads cannot share {key_heads} key heads")
        demand(given.ancestors.dtype == torch.int64, f"ancestors must be int64, got {given.ancestors.dtype}")
        require_ancestors(op, given.ancestors)
    for name, record in (("path", call.path), ("out", call.out)):
        if record is not None:
            _check_record(f"{op}: {name}", record, batch, heads, value_dim, key_dim)
            tensors |= {f"{name}.{part}": getattr(record, part) for part in ("keys", "updates", "decays")}
    if call.counts is not None:
        demand(list(call.counts.shape) == [batch], f"counts must be [{batch}], got {list(call.counts.shape)}")
        demand(call.counts.dtype == torch.int64, f"counts must be int64, got {call.counts.dtype}")
        tensors["counts"] = call.counts
        kept: Any = call.path
        within(op, "counts", call.counts, 0, kept.decays.shape[1], "nodes of the path")
    for name, tensor in tensors.items():
        demand(tensor.device == state.device, f"{name} must be on {state.device} like the state, got {tensor.device}")


def _check_record(place: str, record: DeltaRecord, batch: int, heads: int, value_dim: int, key_dim: int) -> None:
    """Raises unless a record fits a state; `place` is the op and the argument."""
    nodes, key_heads = record.keys.shape[1:3] if record.keys.dim() == 4 else (0, 0)
    decays = [batch, nodes, heads, *([key_dim] if record.decays.dim() == 4 else [])]
    shapes = [batch, nodes, key_heads, key_dim], [batch, nodes, heads, value_dim], decays
    for part, tensor, wanted in zip(("keys", "updates", "decays"), _parts(record), shapes, strict=True):
        if list(tensor.shape) != wanted:
            raise ShapeError(f"{place}.{part} must be {wanted}, got {list(tensor.shape)}.")
