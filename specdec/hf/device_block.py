"""Block drafting inside a device round: a context of fixed capacity, one forward of the block, a tree over its lattice.

The target's states of what a round committed become context at the end of the round, all rows of the tree in one shape;
rows behind a text's new length are written over by the next round. The context's lengths follow the committed text, so
nothing has to be put back when a graph is captured.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import ops
from specdec.drafters import BlockDrafter
from specdec.drafters._committed import committed_text
from specdec.drafters._proposals import log_law
from specdec.drafters.block import BlockContext
from specdec.drafters.block.backbone import Block, Masks
from specdec.drafters.block.context import KeysValues
from specdec.drafters.block.heads import best
from specdec.drafters.block.operator import serving
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hf.fusion import compiled as fused
from specdec.hf.merged import Groups, merged_twin
from specdec.ops.grow_tree import MOST
from specdec.protocols import DraftContext

GROUPS: Groups = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that are merged: those of the queries are left out, since context has keys and values alone."""


class DeviceBlock:
    """Trees or chains of a block drafter.

    Args:
        drafter: the drafter.
        nodes: tree budget, root excluded.
        depth: deepest node; None leaves it to the drafter's length.
        chain: whether to draft the best token after the one before, instead of the best paths.
        temperature: of the draft law.

    Raises:
        UnsupportedError: for a drafter that the device has no form of; the message says why.
    """

    def __init__(
        self, drafter: BlockDrafter, nodes: int, *, depth: int | None, chain: bool, temperature: float
    ) -> None:
        """Runs nothing."""
        if drafter.least_confidence is not None:
            raise UnsupportedError("least_confidence= of a block drafter has no place on the device.")
        if drafter.model.markov_head is not None and not chain:
            raise UnsupportedError(
                "a Markov head scores all tokens after each other; on the device it drafts chains: use trees.Chain."
            )
        if nodes > MOST["nodes"]:
            raise UnsupportedError(f"on the device, a block drafter drafts {MOST['nodes']} nodes at most, not {nodes}.")
        self.model, self.nodes, self.chain = drafter.model, nodes, chain
        self._drafts = drafter.model
        self.temperature = drafter.temperature or temperature
        self.length = drafter.length  # a block keeps it, since its rows may see each other
        self.levels = min(self.length, depth or nodes, nodes)
        self._context: BlockContext | None = None
        self._pads: Int[Tensor, " batch"] | None = None
        self._masks: Masks = {}
        self._propose: Callable[[Tensor, BlockContext], tuple[Tensor, Tensor]] = self._proposed
        self._context_rows: Callable[[Tensor, BlockContext], list[KeysValues]] = self.model.context_rows

    def __repr__(self) -> str:
        return f"<DeviceBlock: {self.model.spec.family}, {self.nodes} nodes, {self.levels} levels>"

    def _key(self) -> tuple[Any, ...]:
        return id(self.model), self.nodes, self.chain, self.temperature, self.length, self.levels

    def __eq__(self, other: object) -> bool:
        """Whether the graph of one serves the other."""
        return isinstance(other, DeviceBlock) and self._key() == other._key()

    def __hash__(self) -> int:
        """By what `__eq__` compares."""
        return hash(self._key())

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target states that are read."""
        return self.model.spec.feature_layers

    def compile(self, **options: Any) -> None:
        """Merges projections (see `merged`) and lets `torch.compile` fuse what lies between; the model stays as it is.

        Args:
            **options: for `torch.compile`, instead of those of `fusion`.
        """
        compiled: Any = functools.partial(torch.compile, dynamic=False, **options) if options else fused
        self._drafts = merged_twin(self.model, GROUPS)[0]
        self._propose, self._context_rows = compiled(self._proposed), compiled(self._drafts.context_rows)

    @torch.no_grad()
    def prepare(self, context: DraftContext, capacity: int) -> None:
        """Turns the prompt's states into context.

        Args:
            context: the committed text.
            capacity: slots that the request may come to need.
        """
        text, device = committed_text(context, self.model.spec, self), self.model.norm.weight.device
        batch = context.tokens.shape[0]
        pads = (~context.mask).sum(-1).to(device)
        held = self._context
        if held is None or self._pads is None:
            size = capacity + self.model.spec.rows(self.length)
            held = BlockContext(self.model.spec.windows, batch, device, capacity=size)
            self._context, self._pads, self._masks = held, pads, {}
        else:
            held.lengths.zero_()
            self._pads.copy_(pads)
        self.model.extend(held, text.features.to(self.model.norm.weight), text.counts.to(device))

    def __call__(
        self, tokens: Int[Tensor, "batch capacity"], lengths: Int[Tensor, " batch"], limits: Int[Tensor, " batch"]
    ) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"], Int[Tensor, " batch"]]:
        """Tokens, parents and number of nodes of the tree of each row."""
        context, pads = self._ready()
        context.lengths.copy_(lengths - 1 - pads)
        root = tokens.gather(1, lengths[:, None] - 1).squeeze(1)
        with self._attending(context):
            candidates, scores = self._propose(root, context)
        return ops.grow_tree(candidates, scores, root, nodes=self.nodes, limits=limits)

    def _attending(self, context: BlockContext) -> AbstractContextManager[None]:
        """Lets compiled layers attend to a context and to one block behind it."""
        block, layers = Block(context, self.model.spec.rows(self.length), self._masks), self.model.stack
        return serving(lambda layer, *heads: block.attend(layers[layer].self_attn, *heads))

    def _proposed(self, root: Tensor, context: BlockContext) -> tuple[Tensor, Tensor]:
        """Candidates of each level, and their log-probabilities after those of the level before."""
        hidden = self._drafts.slots(root, context, self.model.spec.rows(self.length))[:, : self.levels]
        logits = self._drafts.logits(hidden)
        candidates, scores = self._chain(root, hidden, logits) if self.chain else self._lattice(root, hidden, logits)
        return candidates, scores.float()

    def absorb(
        self,
        features: Float[Tensor, "batch rows features"],
        path: Int[Tensor, "batch path"],
        counts: Int[Tensor, " batch"],
    ) -> None:
        """Turns the states of what a round committed into context.

        Args:
            features: of all nodes.
            path: nodes at which tokens were committed, the root first.
            counts: how many of them.
        """
        context, _ = self._ready()
        index = path.clamp_min(0)[:, :, None].expand(-1, -1, features.shape[-1])
        rows = self._context_rows(features.gather(1, index).to(self.model.norm.weight), context)
        context.append_fixed(rows, counts)

    def _ready(self) -> tuple[BlockContext, Tensor]:
        if self._context is None or self._pads is None:
            raise SpecdecError("prepare() comes before the first draft.")
        return self._context, self._pads

    def _lattice(self, root: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of each slot, and their log-probabilities after each candidate of the slot before."""
        kept, selector = self.model.shortlist, self.model.candidate_selector
        ids = None if kept is None else kept.ids.to(logits.device)
        if selector is None:
            scores, tokens = best(logits, min(self.nodes, MOST["candidates"], logits.shape[-1]))
            whole = (logits.float() / self.temperature).logsumexp(-1, keepdim=True)
            return tokens if ids is None else ids[tokens], (scores.float() / self.temperature - whole)[:, :, None]
        tokens, unary = selector.candidates(logits, ids)
        first = root[:, None, None].expand(-1, 1, tokens.shape[2])
        before = torch.cat([first, tokens[:, :-1]], 1)
        return tokens, log_law(selector.edges(hidden, tokens, unary, before), self.temperature)

    def _chain(self, root: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best token of each slot after the one before."""
        token, state, drafted, edges = root[:, None], None, [], []
        for slot in range(self.levels):
            ids, scores, state = self.model.scores(hidden[:, slot], logits[:, slot], token, state)
            best, rank = log_law(scores, self.temperature).max(-1, keepdim=True)
            token = (rank if ids is None else ids.gather(-1, rank))[:, 0]
            drafted.append(token)
            edges.append(best)
        return torch.stack(drafted, 1), torch.stack(edges, 1)
