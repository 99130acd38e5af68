"""What all drafters that read the target's states have in common: their first text, and a doubt about its layers."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import DraftContext

HOPELESS = 64
"""Rounds of which no token was accepted, after which a drafter warns."""


def check_options(reader: str, length: Any, temperature: float | None) -> None:
    """Raises `UnsupportedError` for a length that is no number of tokens, or a temperature that is not above 0."""
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise UnsupportedError(f"{reader}: length must be a number of tokens, 1 or more, got {length!r}.")
    if temperature is not None and not temperature > 0:
        raise UnsupportedError(f"{reader}: temperature must be above 0, got {temperature}.")


@dataclass(frozen=True, slots=True, eq=False)
class CommittedText:
    """Committed tokens of each row from its first real one on, and what the target made of them.

    Attributes:
        tokens: ids; row b has `counts[b] + 1`, the last of which is the root.
        features: of all of them but the root.
        counts: tokens before the root.
    """

    tokens: Int[Tensor, "batch real"]
    features: Float[Tensor, "batch rows features"]
    counts: Int[Tensor, " batch"]


def committed_text(context: DraftContext, spec: Any, reader: object) -> CommittedText:
    """The text that a request starts with, real tokens to the front of each row.

    Args:
        context: the request.
        spec: of the drafter: `feature_layers`, `feature_size` and `vocab_size`.
        reader: the drafter, for messages.

    Raises:
        UnsupportedError: if there are no features, or the target's tokens are not the drafter's.
        ShapeError: if there are too few, or of another width.
    """
    layers, vocab_size, width = spec.feature_layers, spec.vocab_size, len(spec.feature_layers) * spec.feature_size
    if context.features is None:
        raise UnsupportedError(f"{reader!r} reads features of layers {layers}; the request has none.")
    if context.vocab_size != vocab_size:
        raise UnsupportedError(f"{reader!r} was made for {vocab_size} tokens, the target has {context.vocab_size}.")
    counts = (context.mask.sum(-1) - 1).clamp_min(0)
    order = (~context.mask).to(torch.int64).sort(dim=-1, stable=True).indices[:, : int(counts.max()) + 1]
    features = context.features.to(order.device)
    rows = order[:, :-1].clamp_max(max(features.shape[1] - 1, 0))  # past a row's real tokens anything will do
    if features.shape[1] + 1 < context.mask.shape[1]:
        raise ShapeError(
            f"{reader!r} was given features of {features.shape[1]} columns for {context.mask.shape[1]} tokens; "
            "expected those of all tokens but the last."
        )
    if features.shape[2] != width:
        raise ShapeError(
            f"{reader!r} was given features of {features.shape[2]} numbers; expected {len(layers)} states of "
            f"{spec.feature_size} numbers side by side. Was the drafter made for this target?"
        )
    return CommittedText(
        tokens=context.tokens.gather(1, order),
        features=features.gather(1, rows[:, :, None].expand(-1, -1, features.shape[-1])),
        counts=counts,
    )


class Doubt:
    """Warns, once, if drafts are never accepted: a drafter that reads wrong states raises nothing anywhere."""

    def __init__(self, logger: logging.Logger) -> None:
        """Saw nothing yet."""
        self._logger = logger
        self._fruitless: int | None = 0  # None once a token was accepted, or the warning given

    def judge(self, drafter: object, counts: Int[Tensor, " batch"]) -> None:
        """Learns how many tokens each row of a round committed that was drafted for (on the CPU)."""
        if self._fruitless is None or bool((counts > 1).any()):
            self._fruitless = None
            return
        self._fruitless += int((counts > 0).sum())
        if self._fruitless >= HOPELESS:
            self._logger.warning(
                "%r: no token of %d drafts was accepted. Was it made for this target? drafters.inspect() tells which "
                "hidden states it reads and which row predicts which token.",
                drafter,
                self._fruitless,
            )
            self._fruitless = None
