"""The best tree over a lattice of candidates, grown on their device, with shapes that the host knows.

A drafter that scores all its slots at once gives, for each level, some candidates and how likely each is after each
candidate of the level before (or after any of them: then the law of a path is a product, and this is the tree of
arXiv 2604.12989). For a path of candidates c_1, ..., c_d:

    score        scores[0, 0, c_1] + scores[1, c_1, c_2] + ... + scores[d-1, c_{d-1}, c_d], added up from the left in
                 float32
    order        the higher score first, then the shallower path, then the one whose parent comes first, then the lower
                 candidate; scores that are not above -inf are no paths

No score rises along a path, so the first `nodes` paths in this order are a tree. They are its nodes, in this order.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.ops import _dispatch
from specdec.ops._checks import sizes, tensors

MOST = {"nodes": 128, "levels": 64, "candidates": 64}
"""Bounds of the arguments: the kernel holds a row's open paths in registers."""


def grow_tree(
    tokens: Int[Tensor, "batch levels candidates"],
    scores: Float[Tensor, "batch levels before candidates"],
    root: Int[Tensor, " batch"],
    *,
    nodes: int,
    limits: Int[Tensor, " batch"] | None = None,
    impl: _dispatch.Impl = "auto",
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"], Int[Tensor, " batch"]]:
    """The best `nodes` paths over a lattice, numbered by falling score.

    Among equals the shallower path comes first, then the one whose parent comes first, then the lower candidate.

    Args:
        tokens: int64; the candidates of each level, distinct within one; at most 64 levels of 64.
        scores: natural log-probabilities in float32: of candidate k of level d after candidate p of level d - 1 at
            `[b, d, p, k]`. With a third size of 1, those after any candidate. The first level reads p = 0. All are at
            most 0, which is checked where reading them is free, on a CPU; -inf and what is no number end their paths.
        root: int64, the token of node 0.
        nodes: drafted nodes at most, the root not counted; 1 to 128.
        limits: int64, deepest node per row; 0 gives a lone root. None leaves it at the number of levels.
        impl: which implementation runs; see `specdec.ops`.

    Returns:
        Three int64 tensors, which are the tokens of the nodes and their parents, both `[batch, nodes + 1]` with the
        root first, and how many nodes each row has, its root counted. The parent of the root is -1; padding has token 0
        and parent -1.

    Raises:
        ShapeError: for tensors that do not belong together, or of other dtypes, and for scores above 0.
        UnsupportedError: for sizes out of range, or if `impl="triton"` cannot run here.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> tokens = torch.tensor([[[5, 6], [7, 8]]])
        >>> scores = torch.tensor([[[[0.6, 0.4]], [[0.9, 0.1]]]]).log()  # the same after 5 and after 6
        >>> ops.grow_tree(tokens, scores, torch.tensor([4]), nodes=3)
        (tensor([[4, 5, 7, 6]]), tensor([[-1,  0,  1,  0]]), tensor([4]))
    """
    tensors("grow_tree", {"tokens": tokens, "scores": scores, "root": root}, {"limits": limits})
    _check(tokens, scores, root, limits, nodes)
    kernel: Any = _dispatch.choose("grow_tree", impl, tokens.device)
    grow = _reference if kernel is None or tokens.shape[0] == 0 else kernel.launch
    tree: tuple[Tensor, Tensor, Tensor] = grow(tokens, scores, root, limits, nodes)
    return tree


def _check(tokens: Tensor, scores: Tensor, root: Tensor, limits: Tensor | None, nodes: int) -> None:
    """Raises for arguments that do not belong together."""
    if tokens.dim() != 3 or 0 in tokens.shape[1:]:
        raise ShapeError(f"grow_tree: tokens must be [batch, levels, candidates], got {list(tokens.shape)}.")
    batch, levels, candidates = tokens.shape
    shapes = [[batch, levels, before, candidates] for before in (1, candidates)]
    if list(scores.shape) not in shapes or scores.dtype != torch.float32:
        raise ShapeError(
            f"grow_tree: scores must be float32 {' or '.join(map(str, shapes))}, got {scores.dtype} "
            f"{list(scores.shape)}."
        )
    for name, given in (("root", root), ("limits", limits)):
        if given is not None and (given.shape != (batch,) or given.dtype != torch.int64):
            raise ShapeError(f"grow_tree: {name} must be int64 [{batch}], got {given.dtype} {list(given.shape)}.")
    if tokens.dtype != torch.int64:
        raise ShapeError(f"grow_tree: tokens must be torch.int64, got {tokens.dtype}.")
    for name, given in (("scores", scores), ("root", root), ("limits", limits)):
        if given is not None and given.device != tokens.device:
            raise ShapeError(f"grow_tree: {name} must be on {tokens.device} like tokens, got {given.device}.")
    if scores.device.type == "cpu" and bool((scores > 0).any()):  # on a GPU, reading them would stall the host
        raise ShapeError("grow_tree: scores must be log-probabilities, at most 0; got some above. Is a .log() missing?")
    sizes("grow_tree", MOST, nodes=nodes, levels=levels, candidates=candidates)


def _reference(
    tokens: Tensor, scores: Tensor, root: Tensor, limits: Tensor | None, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, level by level, without a read on the host.

    Of a level only the first `nodes` paths can be chosen, and only their children are looked at.
    """
    (batch, levels, candidates), device = tokens.shape, tokens.device
    reach = torch.full_like(root, levels) if limits is None else limits.clamp(0, levels)
    above = torch.zeros(batch, 1, dtype=torch.float32, device=device)
    last = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # candidates at the end of these paths
    found: dict[str, list[Tensor]] = {"score": [], "token": [], "parent": [], "depth": []}
    earlier = -1  # where the paths of the level before begin, among all that were found; -1 is the root
    for level in range(levels):
        before = torch.zeros_like(last) if scores.shape[2] == 1 else last
        edges = scores[:, level].gather(1, before[:, :, None].expand(-1, -1, candidates))
        paths = (above[:, :, None] + edges).masked_fill((reach <= level)[:, None, None], -torch.inf)
        kept = min(nodes, paths.shape[1] * candidates)
        above, order = (
            paths.nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1).sort(dim=1, descending=True, stable=True)
        )
        above, order = above[:, :kept], order[:, :kept]
        last, place = order % candidates, order // candidates
        found["score"].append(above)
        found["token"].append(tokens[:, level].gather(1, last))
        found["parent"].append(place + earlier)
        found["depth"].append(torch.full_like(last, level))
        earlier += 1 if level == 0 else found["score"][level - 1].shape[1]
    joined = {name: torch.cat(parts, 1) for name, parts in found.items()}
    score, order = joined["score"].sort(dim=1, descending=True, stable=True)
    score, order = score[:, :nodes], order[:, :nodes]
    used = score > -torch.inf
    place = torch.full_like(joined["parent"], -1).scatter(
        1, order, torch.arange(order.shape[1], device=device).expand_as(order)
    )
    parents = joined["parent"].gather(1, order)
    parents = torch.where(parents < 0, 0, place.gather(1, parents.clamp_min(0)) + 1)
    pad = nodes - order.shape[1]
    drafted, parents = (
        torch.nn.functional.pad(torch.where(used, part, blank), (0, pad), value=blank)
        for part, blank in ((joined["token"].gather(1, order), 0), (parents, -1))
    )
    lone = torch.full_like(root, -1)
    return torch.cat([root[:, None], drafted], 1), torch.cat([lone[:, None], parents], 1), 1 + used.sum(1)
