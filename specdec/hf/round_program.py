"""A whole round as one program on the model's device: draft, verify, accept, commit, with nothing for the host to do.

Every shape is fixed and everything that changes is the content of a device tensor, so on a CUDA device the program is
captured once as a graph and replayed; elsewhere, or with `capture=False`, the same program runs step by step. What a
round did travels home on a stream of its own, while the next round runs. No step waits for the host, so rounds are
launched ahead of what the host has read, and its work goes on beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import ops
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hf import support
from specdec.hf.cache import RowCache, grown
from specdec.hf.device_block import DeviceBlock
from specdec.hf.device_draft import Draft
from specdec.hf.fixed_cache import FixedCache
from specdec.hf.fusion import compiled as fused
from specdec.hf.merged import merged_twin
from specdec.hf.round_context import RoundContext

Numbers: TypeAlias = npt.NDArray[np.int64]
Choose = Callable[[Float[Tensor, "batch nodes vocab"]], Int[Tensor, "batch nodes"]]

AHEAD = 2
"""Rounds that may be launched before the host has read the first of them."""


def capacity(length: int, width: int) -> int:
    """Slots, and places for tokens, of a request that ends at a length at most, with rounds of so many rows."""
    return grown(0, length + AHEAD * width)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What a round did, on the host, in arrays `[batch]` and `[batch, width]`: for few numbers torch takes longer."""

    counts: Numbers
    num_nodes: Numbers
    path: Numbers
    committed: Numbers
    tokens: Numbers
    parents: Numbers


class Homeward:
    """The way home of what a round did, beside the rounds that follow it.

    Args:
        record: the record of the rounds, on their device, written anew by each.
    """

    def __init__(self, record: Int[Tensor, "batch numbers"]) -> None:
        """Sends nothing."""
        cuda = record.device.type == "cuda"
        self._sent = torch.zeros_like(record)
        self._host = torch.zeros_like(record, device="cpu", pin_memory=cuda)
        self._stream = torch.cuda.Stream(record.device) if cuda else None
        self._copied = torch.cuda.Event() if cuda else None

    def send(self, record: Int[Tensor, "batch numbers"]) -> None:
        """Starts the copy of a record; on a CUDA device nothing waits for it.

        The one before has arrived, or nobody will read it: copies follow each other, so the last one is what is there.
        """
        if self._stream is None or self._copied is None:
            self._host.copy_(record)
            return
        self._sent.copy_(record)
        self._stream.wait_stream(torch.cuda.current_stream(record.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._sent, non_blocking=True)
            self._copied.record()

    def arrived(self) -> Numbers:
        """Waits for what was sent; a copy, since the next one is sent to the same place."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy().copy()


class RoundProgram:
    """Buffers and program of the rounds of one request.

    Args:
        model: the target, on one device.
        cache: its keys and values, holding the prompt.
        state: the committed text; changed in place by every round.
        draft: tokens, lengths and deepest nodes in; tokens, parents and number of nodes of a tree out.
        choose: the target's token after each node, from its logits.
        stops: tokens that end a row.
        position_limit: positions the model was built for; None if unbounded.
        impl: implementation of the attention.
        capture: whether to capture a CUDA graph.
        compiled: whether projections are merged (see `merged`) and `torch.compile` fuses what lies between.
        generator: source of randomness of `choose`.
    """

    def __init__(
        self,
        model: Any,
        cache: FixedCache,
        state: ops.TextState,
        draft: Draft,
        choose: Choose,
        *,
        stops: Int[Tensor, " stops"],
        position_limit: int | None,
        impl: ops.Impl,
        capture: bool,
        compiled: bool,
        generator: torch.Generator | None,
    ) -> None:
        """Runs nothing."""
        self.model, self.cache, self.state = model, cache, state
        self.draft, self._choose, self._stops = draft, choose, stops
        self._position_limit, self._generator = position_limit, generator
        self._context = RoundContext(cache, model, impl)
        self._forward: Any = model
        if compiled:
            self._forward = fused(merged_twin(support.plain(model))[0].forward)
            if isinstance(draft, DeviceBlock):
                draft.compile()
        self._capture = capture
        self._graph: torch.cuda.CUDAGraph | None = None
        batch, width = state.lengths.shape[0], cache.width
        device = state.lengths.device
        self._record = torch.zeros(batch, 2 + 4 * width, dtype=torch.int64, device=device)
        self._homeward = [Homeward(self._record) for _ in range(AHEAD)]
        self._launched = self._read = 0

    def load(self, source: RowCache, state: ops.TextState, starts: Tensor | None) -> None:
        """Takes over another prompt, of the same batch size and capacity."""
        self.cache.load(source, starts)
        for field in fields(state):
            getattr(self.state, field.name).copy_(getattr(state, field.name))
        self._launched = self._read = 0

    @property
    def pending(self) -> int:
        """Rounds that were launched and not yet read."""
        return self._launched - self._read

    @torch.no_grad()
    def launch(self) -> None:
        """Starts a round and the way home of its record; waits for nothing."""
        if self.pending >= AHEAD:
            raise SpecdecError(f"{self.pending} rounds are on their way; read one before the next is launched.")
        if self._capture and self._graph is None:
            try:
                self._graph = self._captured()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise UnsupportedError(
                    f"{type(support.plain(self.model)).__name__} could not be captured as a CUDA graph; its forward "
                    "probably waits for the device. Use execution='host'."
                ) from error
        if self._graph is not None:
            self._graph.replay()
        else:
            self._round()
        self._homeward[self._launched % AHEAD].send(self._record)
        self._launched += 1

    def read(self) -> RoundRecord:
        """Waits for the oldest round that was not read yet."""
        arrived = self._homeward[self._read % AHEAD].arrived()
        self._read += 1
        width = self.cache.width
        parts = (arrived[:, 2 + part * width : 2 + (part + 1) * width] for part in range(4))
        return RoundRecord(arrived[:, 0], arrived[:, 1], *parts)

    def stop(self, rows: list[bool]) -> None:
        """Ends rows that the device would still serve: the rounds launched from here on commit nothing to them."""
        remaining = self.state.remaining
        stopped = torch.tensor(rows, pin_memory=remaining.device.type == "cuda")  # else the copy waits for the rounds
        remaining.masked_fill_(stopped.to(remaining.device, non_blocking=True), 0)

    def _round(self) -> None:
        """The program. Draft, verify, accept, commit; nothing here may read the device."""
        state = self.state
        limits = (state.remaining - 1).clamp_min(0)
        if self._position_limit is not None:
            limits = torch.minimum(limits, (self._position_limit - 1 - state.positions).clamp_min(0))
        tokens, parents, num_nodes = self.draft(state.tokens, state.lengths, limits)
        visible, depths = ops.tree_layout(parents, num_nodes)
        positions = state.positions[:, None] + depths
        wanted = self.draft.feature_layers if isinstance(self.draft, DeviceBlock) else ()
        logits, features = self._context.run(
            self._forward, tokens, positions, visible, depths, state.cached.clone(), wanted
        )
        chosen = self._choose(logits)
        path, found, counts = ops.accept_tree(tokens, parents, num_nodes, visible, depths, chosen, state, self._stops)
        self.cache.keep(path, counts)
        if features is not None and isinstance(self.draft, DeviceBlock):
            self.draft.absorb(features, path, counts)
        torch.cat([counts[:, None], num_nodes[:, None], path, found, tokens, parents], 1, out=self._record)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Runs the program twice for warmth, puts back what that changed, and captures it."""
        kept = {field.name: getattr(self.state, field.name).clone() for field in fields(self.state)}
        source = (
            self._generator
            if self._generator is not None
            else torch.cuda.default_generators[self.state.lengths.device.index or 0]
        )
        changed = [(buffer, buffer.clone()) for buffer in self.cache.changed]
        seed = source.get_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._round()
        torch.cuda.current_stream().wait_stream(side)
        for name, value in kept.items():
            getattr(self.state, name).copy_(value)
        for buffer, value in changed:
            buffer.copy_(value)
        source.set_state(seed)
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._round()
        return graph
