"""Hidden states of committed tokens, kept from the prompt on until a drafter that reads them starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def joined(output: Any, layers: Sequence[int]) -> Float[Tensor, "batch rows features"]:
    """The hidden states of some layers, side by side."""
    return torch.cat([output.hidden_states[layer] for layer in layers], -1)


@contextmanager
def hidden_states(model: torch.nn.Module, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collects the states of some layers from every forward of a model; of none, nothing is watched."""
    found: list[Tensor] = []
    if not layers:
        yield found
        return
    handle = model.register_forward_hook(lambda _, __, output: found.append(joined(output, layers)))
    try:
        yield found
    finally:
        handle.remove()


class FeatureRecord:
    """What a drafter will be told when it starts: the features of all tokens in the target's cache.

    A drafter may start late, since a controller may choose to draft nothing at first; the rounds before it count, too.
    """

    def __init__(self) -> None:
        """Holds nothing."""
        self._parts: list[Tensor] = []
        self._counts: list[Int[Tensor, " batch"]] = []
        self._last: Tensor | None = None

    def prompt(self, features: Float[Tensor, "batch prompt features"]) -> None:
        """The features of all columns of the prompt."""
        self._parts = [features]

    def verified(self, features: Float[Tensor, "batch nodes features"]) -> None:
        """The features of a tree, of which `committed` will keep some."""
        self._last = features

    def committed(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Keeps the first `counts[b]` of the nodes of the last tree."""
        if self._last is not None:
            index = nodes.clamp_min(0)[:, :, None].expand(-1, -1, self._last.shape[-1])
            self._parts.append(self._last.gather(1, index.to(self._last.device)))
            self._counts.append(counts)
            self._last = None

    def take(self, columns: int) -> Float[Tensor, "batch columns features"]:
        """Features by column of the committed tokens, zeros where there are none; forgets them."""
        prompt, *rounds = self._parts
        batch, length, size = prompt.shape
        found = prompt.new_zeros(batch, columns, size)
        found[:, :length] = prompt
        ends = torch.full((batch,), length, device=prompt.device)
        for part, counts in zip(rounds, self._counts, strict=True):
            place = torch.arange(part.shape[1], device=prompt.device)
            row, node = (place < counts.to(prompt.device)[:, None]).nonzero(as_tuple=True)
            found[row, ends[row] + node] = part[row, node]
            ends = ends + counts.to(prompt.device)
        self._parts, self._counts = [], []
        return found
