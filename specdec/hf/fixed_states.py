"""The states of recurrent layers in device rounds: buffers that stay where they are, for all layers of a model.

A round folds the path of the round before into the states at the beginning of its forward, records what its nodes would
write, and at its end copies the record of the accepted path to where the next round finds it. How long that path is is
a number on the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specdec import ops
from specdec.errors import SpecdecError
from specdec.hf import compat
from specdec.hf.recurrent import RecurrentLayer


class PassedState(compat.LinearAttentionLayer):
    """A recurrent layer as the model sees it: inputs go through, and nothing is known of what came before."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """The new inputs."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """What the rule returned, which nobody reads."""
        return recurrent_states


class FixedStates:
    """Buffers `[layers, batch, ...]` of one batch.

    Args:
        layers: the layers of the prompt's cache, by index of the decoder layer.
        width: rows of a round, the root included.
    """

    def __init__(self, layers: dict[int, RecurrentLayer], width: int) -> None:
        """Allocates buffers like the layers'; `load` fills them."""
        self._places = {index: place for place, index in enumerate(layers)}
        self.serving = 0
        self._words: Int[Tensor, "batch nodes words"] | None = None
        first = next(iter(layers.values()))
        (batch, channels, _), (_, heads, key_dim, value_dim) = first.history.shape, first.state.shape
        key_heads = (channels - heads * value_dim) // (2 * key_dim)
        lead, wide = (len(layers), batch, width), first.state.dtype
        wide = torch.float64 if wide == torch.float64 else torch.float32
        self.history = first.history.new_zeros(len(layers), *first.history.shape)
        self.state = first.state.new_zeros(len(layers), *first.state.shape)
        self.counts = torch.zeros(batch, dtype=torch.int64, device=first.state.device)
        made = [
            (
                first.history.new_zeros(*lead, channels),
                first.history.new_zeros(*lead, key_heads, key_dim),
                first.state.new_zeros(*lead, heads, value_dim, dtype=wide),
                first.state.new_zeros(*lead, heads, *([first.channels] if first.channels else []), dtype=wide),
            )
            for _ in range(2)
        ]
        self.recorded, self.path = made

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All that a round may change."""
        return (self.history, self.state, self.counts, *self.recorded, *self.path)

    def load(self, layers: Sequence[RecurrentLayer]) -> None:
        """Takes over what the layers of a prompt hold."""
        self.counts.zero_()
        for place, layer in enumerate(layers):
            layer.fold()
            self.history[place] = layer.history
            self.state[place] = layer.state

    def begin(self, ancestors: Int[Tensor, "batch nodes words"]) -> None:
        """Announces a forward over a tree."""
        self._words = ancestors

    def serve(self, index: int) -> None:
        """Says which layer's inputs come next."""
        self.serving = self._places[index]

    def keep(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Copies the record of a path, in all layers, to where the next round folds it from."""
        index = nodes.clamp_min(0)
        for kept, recorded in zip(self.path, self.recorded, strict=True):
            wanted = index.view(1, *index.shape, *(1,) * (recorded.dim() - 3)).expand(
                recorded.shape[0], -1, -1, *recorded.shape[3:]
            )
            torch.gather(recorded, 2, wanted, out=kept[:, :, : index.shape[1]])
        self.counts.copy_(counts)

    def convolve(
        self, place: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """The convolution of `[batch, channels, rows]` along the paths of the tree."""
        found = ops.causal_conv_tree(
            inputs.transpose(1, 2),
            weight,
            self.history[place],
            self._tree(),
            bias=bias,
            path=self.path[0][place],
            counts=self.counts,
            activation=activation,
            out=self.recorded[0][place],
        )
        return found.transpose(1, 2)

    def rule(self, place: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The rule's outputs."""
        output, _ = ops.gated_delta_tree(
            query,
            key,
            value,
            decay,
            beta,
            self._tree(),
            self.state[place],
            path=ops.DeltaRecord(*(part[place] for part in self.path[1:])),
            counts=self.counts,
            out=ops.DeltaRecord(*(part[place] for part in self.recorded[1:])),
        )
        return output

    def _tree(self) -> Tensor:
        if self._words is None:
            raise SpecdecError("a device round runs a recurrent layer before it has a tree.")
        return self._words
