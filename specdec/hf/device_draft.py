"""Drafting inside a device round: from the text, or with a draft model that keeps a cache of its own there.

A draft model drafts chains. Each round it first runs the last committed tokens, as many as a round can commit, so that
its cache holds what was committed and never its own guesses; then one token after the other, each its most likely one.
Shapes are fixed: rows that were run before are simply written again.
"""

from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec import ops
from specdec.drafters import BlockDrafter, ModelDrafter
from specdec.drafters.on_device import DeviceLookup, on_device
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hf import support
from specdec.hf.cache import RowCache
from specdec.hf.device_block import DeviceBlock
from specdec.hf.fixed_cache import FixedCache
from specdec.hf.round_context import RoundContext
from specdec.hf.target import ModelTarget
from specdec.ops.grow_tree import MOST
from specdec.protocols import Drafter, TreeBuilder
from specdec.trees import BestFirst, Chain

Draft: TypeAlias = "DeviceLookup | DeviceChain | DeviceBlock"


def device_form(drafter: Drafter, tree: TreeBuilder, nodes: int, temperature: float = 1.0) -> Draft:
    """What drafts in a device round in place of a drafter and its tree builder, for a budget of `nodes`.

    A block drafter's law follows the `temperature` of the request.

    Raises:
        UnsupportedError: if there is nothing; the message says why.
    """
    if not isinstance(tree, BestFirst | Chain):
        raise UnsupportedError(f"{tree!r} cannot be grown on the device; use trees.BestFirst or trees.Chain.")
    depth = tree.depth if isinstance(tree, BestFirst) else None
    if isinstance(tree, BestFirst) and tree != BestFirst(tree.nodes, depth=depth):
        raise UnsupportedError(f"on the device, trees.BestFirst takes nodes= and depth= only, not {tree!r}.")
    if isinstance(drafter, BlockDrafter):
        return DeviceBlock(drafter, nodes, depth=depth, chain=tree.chain, temperature=temperature)
    if not isinstance(drafter, ModelDrafter):
        return on_device(drafter, nodes=nodes, depth=depth, chain=tree.chain)
    if not tree.chain:
        raise UnsupportedError(f"a draft model drafts chains on the device, not {tree!r}; use trees.Chain.")
    if drafter.maps_vocabulary:
        raise UnsupportedError("a draft model with a tokenizer or vocabulary of its own drafts on the host.")
    if not drafter.drafts_plainly:
        raise UnsupportedError("temperature= and overflow= of a draft model have no place on the device.")
    if nodes > MOST["nodes"]:
        raise UnsupportedError(f"on the device, a draft model drafts {MOST['nodes']} tokens at most, not {nodes}.")
    cache = RowCache(drafter.model.config)
    if cache.recurrent.layers:
        raise UnsupportedError("a draft model with recurrent layers drafts on the host.")
    if not cache.own:
        raise UnsupportedError("a draft model with layers that share keys and values drafts on the host.")
    return DeviceChain(drafter.model, nodes)


class DeviceChain:
    """Chains of a draft model.

    Args:
        model: a causal language model with the target's tokenizer; either may have more ids than the tokenizer.
        nodes: length of the chain.
    """

    def __init__(self, model: Any, nodes: int) -> None:
        """Runs nothing."""
        self.model, self.nodes = model, nodes
        self._cache: FixedCache | None = None
        self._context: RoundContext | None = None
        self._limit = support.position_limit(model.config)
        self._ids = int(model.get_output_embeddings().weight.shape[0])
        self._vocab = self._ids

    def __eq__(self, other: object) -> bool:
        """Whether the graph of one serves the other."""
        return isinstance(other, DeviceChain) and self.model is other.model and self.nodes == other.nodes

    def __hash__(self) -> int:
        """By what `__eq__` compares."""
        return hash((id(self.model), self.nodes))

    @torch.no_grad()
    def prepare(
        self,
        tokens: Int[Tensor, "batch text"],
        mask: Bool[Tensor, "batch text"],
        capacity: int,
        vocab_size: int,
        impl: ops.Impl,
    ) -> None:
        """Runs the draft model over the committed text, the last token left out.

        Args:
            tokens: committed tokens.
            mask: False on padding on the left.
            capacity: slots that the request may come to need.
            vocab_size: ids of the target.
            impl: implementation of the attention.

        Raises:
            UnsupportedError: if the text has no token before the last one, or the model cannot be served.
        """
        if tokens.shape[1] < 2:
            raise UnsupportedError("a draft model needs the token ids of a prompt of two tokens or more.")
        kwargs: dict[str, Any] = {}
        if not bool(mask.all()):
            real = mask[:, :-1]
            kwargs = {"attention_mask": real.long(), "position_ids": (real.cumsum(-1) - 1).clamp_min(0)}
        self._vocab = min(self._ids, vocab_size)
        source = ModelTarget(self.model, tokens[:, :-1].clamp_max(self._ids - 1), model_kwargs=kwargs)
        source.prefill()
        if self._cache is not None:
            self._cache.load(source.cache, source.starts)
            return
        self._cache = FixedCache(
            source.cache, width=self.nodes + 1, capacity=capacity, starts=source.starts, bounded=False
        )
        self._context = RoundContext(self._cache, self.model, impl)

    def __call__(
        self, tokens: Int[Tensor, "batch capacity"], lengths: Int[Tensor, " batch"], limits: Int[Tensor, " batch"]
    ) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"], Int[Tensor, " batch"]]:
        """Tokens, parents and number of nodes of the chain of each row."""
        batch, width = tokens.shape[0], self.nodes + 1
        row = torch.arange(width, device=tokens.device)
        starts = self._served.cache.starts
        known = (lengths - width).clamp_min(0) if starts is None else torch.maximum(lengths - width, starts)
        index = known[:, None] + row
        parents = (row - 1).expand(batch, -1)
        visible, depths = ops.tree_layout(parents, (lengths - known).clamp_max(width))
        given = tokens.gather(1, index.clamp_max(tokens.shape[1] - 1))
        logits = self._forward(given, index, visible, depths, known)
        last = (lengths - known - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
        chain = [tokens.gather(1, lengths[:, None] - 1), logits.gather(1, last).argmax(-1)]
        alone = torch.ones_like(visible[:, :1, :1])  # a row that sees itself
        for step in range(self.nodes - 1):
            here = lengths + step
            logits = self._forward(chain[-1], here[:, None], alone, depths[:, :1] * 0, here)
            chain.append(logits.argmax(-1))
        room = limits
        if self._limit is not None:
            pads = 0 if starts is None else starts
            room = torch.minimum(limits, (self._limit - lengths + pads).clamp_min(0))
        num_nodes = 1 + room.clamp_max(self.nodes)
        inside = row < num_nodes[:, None]
        return torch.where(inside, torch.cat(chain, 1), 0), torch.where(inside, parents, -1), num_nodes

    @property
    def _served(self) -> RoundContext:
        if self._context is None:
            raise SpecdecError("prepare() comes before the first draft.")
        return self._context

    def _forward(
        self,
        tokens: Int[Tensor, "batch rows"],
        index: Int[Tensor, "batch rows"],
        visible: Int[Tensor, "batch rows words"],
        depths: Int[Tensor, "batch rows"],
        cached: Int[Tensor, " batch"],
    ) -> Tensor:
        """Logits of rows at these places of the text."""
        starts = self._served.cache.starts
        positions = index if starts is None else (index - starts[:, None]).clamp_min(0)
        if self._limit is not None:
            positions = positions.clamp_max(self._limit - 1)
        given = tokens.clamp_max(self._ids - 1)
        logits, _ = self._served.run(self.model, given, positions, visible, depths, cached)
        return logits[..., : self._vocab]
