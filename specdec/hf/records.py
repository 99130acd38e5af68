"""What `return_dict_in_generate` asks for, collected per committed token and shaped as plain `generate` shapes it.

Every entry belongs to one row and one token index, since rows commit at their own pace. Rows that stopped early have
no entry for later tokens; plain `generate` runs their padding through the model there, and we fill zeros.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from specdec.types import TargetOutput

Entry = TypeVar("Entry")


@dataclass(eq=False)
class Records:
    """Scores, logits, hidden states and attentions of the committed tokens of a batch."""

    batch: int
    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False
    _scores: list[dict[int, Tensor]] = field(default_factory=list)
    _logits: list[dict[int, Tensor]] = field(default_factory=list)
    _hidden: list[dict[int, tuple[Tensor, ...]]] = field(default_factory=list)
    _attentions: list[dict[int, tuple[Tensor, ...]]] = field(default_factory=list)
    _prompt: TargetOutput | None = None

    @property
    def wanted(self) -> bool:
        """Whether anything is to be kept at all."""
        return self.scores or self.logits or self.hidden_states or self.attentions

    def add(
        self,
        row: int,
        index: int,
        node: int,
        logits: Tensor,
        scores: Tensor,
        output: TargetOutput,
        columns: tuple[Tensor, ...] | None,
    ) -> None:
        """Records row `row`'s token number `index`, chosen at `node` from processed `scores`.

        `columns` says which attention columns plain decoding would have had, per layer.
        """
        if self.scores:
            _slot(self._scores, index)[row] = scores[row].clone()
        if self.logits:
            _slot(self._logits, index)[row] = logits[row].clone()
        if index == 0:
            if self.hidden_states or self.attentions:
                self._prompt = output
            return
        if self.hidden_states and output.hidden_states is not None:
            states = tuple(layer[row, node : node + 1].clone() for layer in output.hidden_states)
            _slot(self._hidden, index - 1)[row] = states
        if self.attentions and output.attentions is not None and columns is not None:
            # Some attention functions give no weights at all, here as in plain generate.
            weights = tuple(
                layer[row, :, node : node + 1][..., keep]
                for layer, keep in zip(output.attentions, columns[: len(output.attentions)], strict=True)
            )
            _slot(self._attentions, index - 1)[row] = weights

    def score(self, index: int) -> Tensor:
        """Processed scores `[batch, vocab]` of new token number `index`; zeros for rows without an entry."""
        return self._rows(self._scores[index])

    def output_scores(self) -> tuple[Tensor, ...] | None:
        """One `[batch, vocab]` tensor of processed scores per new token, or None."""
        return tuple(self._rows(entry) for entry in self._scores) if self.scores else None

    def output_logits(self) -> tuple[Tensor, ...] | None:
        """One `[batch, vocab]` tensor of raw logits per new token, or None."""
        return tuple(self._rows(entry) for entry in self._logits) if self.logits else None

    def output_hidden_states(self) -> tuple[tuple[Tensor, ...], ...] | None:
        """Per new token, per layer; the first token's states are those of the whole prompt."""
        if not self.hidden_states:
            return None
        prompt = self._prompt.hidden_states if self._prompt is not None else ()
        return (prompt or (), *(self._layers(entry) for entry in self._hidden))

    def output_attentions(self) -> tuple[tuple[Tensor, ...], ...] | None:
        """Per new token, per layer; the first token's weights are those of the whole prompt."""
        if not self.attentions:
            return None
        prompt = self._prompt.attentions if self._prompt is not None else ()
        return (prompt or (), *(self._layers(entry) for entry in self._attentions))

    def _layers(self, entry: dict[int, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        layers = len(next(iter(entry.values())))
        return tuple(self._rows({row: states[layer] for row, states in entry.items()}) for layer in range(layers))

    def _rows(self, entry: dict[int, Tensor]) -> Tensor:
        blank = torch.zeros_like(next(iter(entry.values())))
        return torch.stack([entry.get(row, blank) for row in range(self.batch)])


def _slot(entries: list[dict[int, Entry]], index: int) -> dict[int, Entry]:
    while len(entries) <= index:
        entries.append({})
    return entries[index]
