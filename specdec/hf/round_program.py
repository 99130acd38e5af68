"""A whole round as one program on the model's device: draft, verify, accept, commit, with nothing for the host to do.

Every shape is fixed and everything that changes is the content of a device tensor, so on a CUDA device the program is
captured once as a graph and replayed; elsewhere, or with `capture=False`, the same program runs step by step. What a
round did arrives in pinned memory behind it. Since no step waits for the host, rounds are launched ahead of what the
host has read, and its work is hidden behind them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import ops
from specdec.errors import SpecdecError
from specdec.hf import compat
from specdec.hf.attention import CONTEXT, attending, read
from specdec.hf.cache import RowCache
from specdec.hf.fixed_cache import FixedCache

Draft = Callable[
    [Int[Tensor, "batch capacity"], Int[Tensor, " batch"], Int[Tensor, " batch"]],
    tuple[Int[Tensor, "batch nodes"], Int[Tensor, "batch nodes"], Int[Tensor, " batch"]],
]
Choose = Callable[[Float[Tensor, "batch nodes vocab"]], Int[Tensor, "batch nodes"]]

OPERATOR = "specdec::device_attention"

AHEAD = 2
"""Rounds that may be launched before the host has read the first of them."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What a round did, on the host: a list per batch row."""

    counts: list[int]
    num_nodes: list[int]
    path: list[list[int]]
    committed: list[list[int]]
    tokens: list[list[int]]
    parents: list[list[int]]


class RoundContext:
    """What the attention function needs to know in a device round; the cache writes and hands out rows."""

    def __init__(self, cache: FixedCache, impl: ops.Impl) -> None:
        """Sees nothing yet."""
        self.cache, self.impl = cache, impl
        self.visible: Tensor | None = None
        self.depths: Tensor | None = None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Says whose rows the operator stores."""
        _serving.append(self)
        try:
            yield
        finally:
            _serving.pop()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores the rows of a layer and attends to them, `[batch, rows, heads, dim]`.

        To `torch.compile` this is one operator, which knows by itself whom it serves.
        """
        if torch.compiler.is_compiling():
            wanted = query.shape[-1] ** -0.5 if scale is None else scale
            attended: Tensor = torch.ops.specdec.device_attention(
                query, key, value, sinks, layer, wanted, 0.0 if softcap is None else softcap
            )
            return attended
        if self.visible is None or self.depths is None:
            raise SpecdecError("a device round attends before it has a tree.")
        keys, values, forward, window = self.cache.store(layer, key, value)
        return read(
            query,
            keys,
            values,
            self.visible,
            forward.lengths,
            depths=self.depths,
            starts=forward.starts,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            impl=self.impl,
        )


_serving: list[RoundContext] = []
"""The round that is being run or captured; the operator asks here."""


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes attention an operator that `torch.compile` leaves alone."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: int, scale: float, softcap: float
    ) -> Tensor:
        return _serving[-1].attend(layer, query, key, value, scale, softcap or None, sinks).contiguous()

    def shaped(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001
        batch, heads, rows, _ = query.shape
        return query.new_empty(batch, rows, heads, value.shape[-1])

    schema = "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scale, float softcap) -> Tensor"
    torch.library.custom_op(OPERATOR, attention, mutates_args=(), schema=schema).register_fake(shaped)


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
        compiled: whether `torch.compile` fuses what lies between matrix products.
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
        self._draft, self._choose, self._stops = draft, choose, stops
        self._position_limit, self._generator = position_limit, generator
        self._context = RoundContext(cache, impl)
        register_operator()
        self._forward = torch.compile(model.forward, dynamic=False) if compiled else model
        self._config = model.config.get_text_config(decoder=True)
        self._capture = capture
        self._graph: torch.cuda.CUDAGraph | None = None
        batch, width = state.lengths.shape[0], cache.width
        device = state.lengths.device
        self._record = torch.zeros(batch, 2 + 4 * width, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._arrived = [torch.zeros(self._record.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(AHEAD)]
        self._events = [torch.cuda.Event() if pinned else None for _ in range(AHEAD)]
        self._launched = self._read = 0

    def load(self, source: RowCache, state: ops.TextState, starts: Tensor | None) -> None:
        """Takes over another prompt, of the same batch size and within the same capacity."""
        self.cache.load(source, starts)
        for field in fields(state):
            mine, theirs = getattr(self.state, field.name), getattr(state, field.name)
            mine[..., : theirs.shape[-1]] = theirs
        self._launched = self._read = 0

    @property
    def pending(self) -> int:
        """Rounds that were launched and not yet read."""
        return self._launched - self._read

    @torch.no_grad()
    def launch(self) -> None:
        """Starts a round and the way home of its record; waits for nothing."""
        slot = self._launched % AHEAD
        if self.pending >= AHEAD:
            raise SpecdecError(f"{self.pending} rounds are on their way; read one before the next is launched.")
        if self._capture and self._graph is None:
            self._graph = self._captured()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._round()
        self._arrived[slot].copy_(self._record, non_blocking=True)
        event = self._events[slot]
        if event is not None:
            event.record()
        self._launched += 1

    def read(self) -> RoundRecord:
        """Waits for the oldest round that was not read yet."""
        slot = self._read % AHEAD
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        self._read += 1
        width = self.cache.width
        rows = self._arrived[slot].tolist()
        path, committed, tokens, parents = (
            [row[2 + part * width : 2 + (part + 1) * width] for row in rows] for part in range(4)
        )
        return RoundRecord([row[0] for row in rows], [row[1] for row in rows], path, committed, tokens, parents)

    def stop(self, rows: list[bool]) -> None:
        """Ends rows that the device would still serve: the rounds launched from here on commit nothing to them."""
        stopped = torch.tensor(rows, device=self.state.remaining.device)
        self.state.remaining.masked_fill_(stopped, 0)

    def _round(self) -> None:
        """The program. Draft, verify, accept, commit; nothing here may read the device."""
        state = self.state
        limits = (state.remaining - 1).clamp_min(0)
        if self._position_limit is not None:
            limits = torch.minimum(limits, (self._position_limit - 1 - state.positions).clamp_min(0))
        tokens, parents, num_nodes = self._draft(state.tokens, state.lengths, limits)
        visible, depths = ops.tree_layout(parents, num_nodes)
        self.cache.begin(state.cached.clone())
        self._context.visible, self._context.depths = visible, depths
        with attending(self._config), self._context.serving():
            logits = self._forward(
                input_ids=tokens,
                position_ids=state.positions[:, None] + depths,
                attention_mask=None,
                use_cache=True,
                return_dict=True,
                **{compat.CACHE_NAME: self.cache, CONTEXT: self._context},
            ).logits
        chosen = self._choose(logits)
        path, found, counts = ops.accept_tree(tokens, parents, num_nodes, visible, depths, chosen, state, self._stops)
        self.cache.keep(path, counts)
        torch.cat([counts[:, None], num_nodes[:, None], path, found, tokens, parents], 1, out=self._record)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Runs the program twice for warmth, puts back what that changed, and captures it."""
        kept = {field.name: getattr(self.state, field.name).clone() for field in fields(self.state)}
        source = (
            self._generator
            if self._generator is not None
            else torch.cuda.default_generators[self.state.lengths.device.index or 0]
        )
        seed = source.get_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._round()
        torch.cuda.current_stream().wait_stream(side)
        for name, value in kept.items():
            getattr(self.state, name).copy_(value)
        source.set_state(seed)
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._round()
        return graph
