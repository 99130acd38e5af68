"""States of recurrent layers that no verify forward writes: what its nodes did is recorded, and folded later.

A layer holds the state behind the committed tokens that were folded, the path that was kept since, and the record of
the tree that is pending. The next forward folds the path first; nothing is ever undone, and no node has a state of its
own. Rows that are appended level by level run again with those before them: the closed form solves for all at once.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec import ops
from specdec.hf import compat
from specdec.trees import topology

CHUNK = 64
"""Tokens of a prompt that run at once where the state is in float64, which transformers' own rule cannot hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """What a layer was given for the pending rows, and what they would write."""

    inputs: Float[Tensor, "batch nodes channels"]
    rows: tuple[Tensor, ...] = ()
    record: ops.DeltaRecord | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """What was kept of a tree and is not folded yet; without inputs, the convolution has had them."""

    inputs: Float[Tensor, "batch kept channels"] | None
    record: ops.DeltaRecord
    counts: Int[Tensor, " batch"]


class RecurrentLayer(compat.LinearAttentionLayer):
    """The last inputs and the state of one layer; during a prompt, as transformers keeps them.

    Args:
        dtype: of the state at rest; None for that of the model's own rule, float32.

    Attributes:
        channels: decays of a head, where each channel of its keys has one; 0 for one decay.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.state_dtype = dtype
        self.channels = 0
        self.nodes: Nodes | None = None
        self.path: Path | None = None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """The new inputs; in a prompt, those before them too."""
        if self.record_past:
            return conv_states
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Takes the state behind a prompt; that behind a tree does not exist."""
        own = self.record_past or self.state_dtype == torch.float64  # the state was written by the rule
        return self.state if own else super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    @property
    def history(self) -> Float[Tensor, "batch channels columns"]:
        """The last inputs of the convolution, as far as they were folded."""
        return cast(Tensor, self.conv_states[0])

    @property
    def state(self) -> Float[Tensor, "batch heads key_dim value_dim"]:
        """The recurrent state, as far as it was folded."""
        return cast(Tensor, self.recurrent_states[0])

    @property
    def bytes(self) -> int:
        """Size of what it holds: history, state, and the records of pending rows or of a path that was kept."""
        held = [self.history, self.state]
        if self.nodes is not None:
            held += [self.nodes.inputs, *self.nodes.rows]
            held += [] if self.nodes.record is None else [self.nodes.record.updates, self.nodes.record.decays]
        if self.path is not None:
            held += [self.path.record.keys, self.path.record.updates, self.path.record.decays]
            held += [] if self.path.inputs is None else [self.path.inputs]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def load(self, layer: compat.LinearAttentionLayer) -> None:
        """Copies what a layer of transformers holds."""
        if layer.conv_states[0] is not None and layer.recurrent_states[0] is not None:
            _fill(self, layer.conv_states[0], layer.recurrent_states[0])

    def store(self, layer: compat.LinearAttentionLayer) -> None:
        """Copies history and state into a layer of transformers, in float32 as there; what was kept must be folded."""
        _fill(layer, self.history, self.state.to(torch.float32))

    def end_prefill(self) -> None:
        """From here on every forward is a tree."""
        self.record_past = True
        self.has_previous_state[0] = False  # or transformers would take its way for single tokens
        if self.state_dtype is not None:
            self.recurrent_states[0] = self.state.to(self.state_dtype)

    def keep(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Remembers a path of the pending rows and forgets the others."""
        if self.nodes is not None and self.nodes.record is not None:
            nodes, counts = nodes.to(self.state.device), counts.to(self.state.device)
            row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
            self.path = Path(self.nodes.inputs[row, nodes.clamp_min(0)], self.nodes.record.along(nodes), counts)
        self.nodes = None

    def fold(self) -> None:
        """Brings history and state to the last committed token."""
        if self.path is not None:
            if self.path.inputs is not None:
                ops.conv_fold(self.history, self.path.inputs, self.path.counts)
            ops.gated_delta_fold(self.state, self.path.record, self.path.counts)
            self.path = None


class RecurrentCache(compat.Cache):
    """A cache that tells its states whose turn it is; `recurrent` are those states."""

    recurrent: Any

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a recurrent layer asks for first, however many tokens it runs."""
        self.recurrent.serve(layer_idx)
        found: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return found


def _fill(layer: compat.LinearAttentionLayer, history: Tensor, state: Tensor) -> None:
    layer.lazy_initialization(conv_states=history)
    layer.lazy_initialization(recurrent_states=state)
    layer.has_previous_state[0] = True
    cast(Tensor, layer.conv_states[0]).copy_(history)
    cast(Tensor, layer.recurrent_states[0]).copy_(state)


class RecurrentStates:
    """The recurrent layers of a model, and the tree that runs through them; what a forward's layers ask.

    Args:
        layers: by index of the decoder layer, the dtype of its state.
    """

    def __init__(self, layers: dict[int, torch.dtype | None]) -> None:
        """Nothing has run yet."""
        self.by_index = {index: RecurrentLayer(dtype) for index, dtype in layers.items()}
        self.layers = list(self.by_index.values())
        self.ran = False
        self._serving: RecurrentLayer | None = None
        self._visible: Bool[Tensor, "batch nodes nodes"] | None = None
        self._words: Int[Tensor, "batch nodes words"] | None = None
        self._new = 0

    def serve(self, index: int) -> None:
        """Says which layer's inputs come next."""
        self._serving = self.by_index[index]

    def end_prefill(self) -> None:
        """From here on every forward is a tree."""
        for layer in self.layers:
            layer.end_prefill()

    def begin(self, visible: Bool[Tensor, "batch rows pending"]) -> None:
        """Announces a forward over new rows: which pending rows, the new ones last, are on the path of each."""
        _, new, pending = visible.shape
        if pending > new and self._visible is not None:
            visible = torch.cat([torch.nn.functional.pad(self._visible, (0, new)), visible], 1)
        else:
            for layer in self.layers:
                layer.nodes = None
        self._visible, self._words, self._new = visible, topology.pack(visible), new

    def keep(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Remembers a path of the pending rows in every layer."""
        for layer in self.layers:
            layer.keep(nodes, counts)

    def fold(self) -> None:
        """Brings every layer to the last committed token."""
        for layer in self.layers:
            layer.fold()

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor | None:
        """The convolution of the new rows along their paths; None in a prompt."""
        layer = self._serving
        if layer is None or self._words is None:
            return None
        rows = inputs.transpose(1, 2)
        path = None if layer.path is None or layer.path.inputs is None else layer.path
        if layer.nodes is not None:
            rows = torch.cat([layer.nodes.inputs, rows], 1)
        found = ops.causal_conv_tree(
            rows,
            weight,
            layer.history,
            self._words.to(rows.device),
            bias=bias,
            path=None if path is None else path.inputs,
            counts=None if path is None else path.counts,
            activation=activation,
        )
        if path is not None:  # a forward that fails from here on does not fold twice when it is tried again
            layer.path = replace(path, inputs=None)
        earlier = () if layer.nodes is None else layer.nodes.rows
        layer.nodes = Nodes(rows, earlier)
        return found[:, -self._new :].transpose(1, 2)

    def rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The rule over the new rows, and the state before them; None in a prompt, unless float64 was asked for."""
        layer = self._serving
        if layer is None:
            return None
        rows = query, key, value, decay, beta
        layer.channels = decay.shape[3] if decay.dim() == 4 else 0
        if self._words is None:
            return _prompt(layer, rows) if layer.state_dtype == torch.float64 else None
        nodes, path = cast(Nodes, layer.nodes), layer.path
        if nodes.rows:
            rows = cast(Any, tuple(torch.cat(pair, 1) for pair in zip(nodes.rows, rows, strict=True)))
        output, record = ops.gated_delta_tree(
            *rows,
            self._words.to(query.device),
            layer.state,
            path=None if path is None else path.record,
            counts=None if path is None else path.counts,
        )
        layer.nodes, layer.path, self.ran = Nodes(nodes.inputs, rows, record), None, True
        return output[:, -self._new :], layer.state


def _prompt(layer: RecurrentLayer, rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A run of tokens after each other: outputs, and the state behind them."""
    batch, _, heads, width = rows[2].shape
    if not layer.is_recurrent_states_initialized[0]:
        empty = rows[2].new_zeros(batch, heads, rows[1].shape[3], width, dtype=torch.float64)
        layer.lazy_initialization(recurrent_states=empty)
    state = layer.state
    outputs = []
    for chunk in zip(*(part.split(CHUNK, 1) for part in rows), strict=True):
        size = chunk[0].shape[1]
        chain = torch.ones(size, size, dtype=torch.bool, device=state.device).tril().expand(batch, -1, -1)
        query, key, value, decay, beta = chunk
        output, record = ops.gated_delta_tree(query, key, value, decay, beta, topology.pack(chain), state)
        ops.gated_delta_fold(state, record, torch.full((batch,), size, device=state.device))
        outputs.append(output)
    return torch.cat(outputs, 1), state
