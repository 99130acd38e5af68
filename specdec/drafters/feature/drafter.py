"""Drafts with models that continue the target's own states: EAGLE-3, P-EAGLE, MTP heads and their like.

Every committed token has a row, made of the target's state before it; its output predicts the token after. A tree is
drafted level by level: the nodes of a level are rows of one forward, each with its parent's output in place of a state
of the target, and each seeing the committed rows and its own ancestors. After a round these rows are forgotten, and the
committed tokens are run with the true states. Models that draft all tokens at once answer for a whole level alike.
"""

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters._committed import Doubt, check_options, committed_text
from specdec.drafters._proposals import candidates, log_law, nothing, spread
from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.feature.model import FeatureModel, Parallel, Recurrent, States
from specdec.drafters.shortlist import Shortlist
from specdec.errors import SpecdecError, UnsupportedError
from specdec.protocols import DraftContext
from specdec.types import Candidates, Frontier

logger = logging.getLogger(__name__)

LATER = "FeatureDrafter was asked for a later level first; a round begins at the root."

CHUNK = 512
"""Most rows of a text that run at once."""


class FeatureDrafter:
    """Drafts with an EAGLE-3, P-EAGLE or MTP model, a Gemma 4 assistant or Medusa heads.

    Args:
        model: the model, with what it borrows of the target.
        length: longest path that is drafted; None is as long as the model was trained for.
        temperature: of the draft law; None follows the request (1 when it is greedy).

    Raises:
        UnsupportedError: for bad arguments.

    Example:
        >>> from specdec import drafters
        >>> drafter = drafters.from_pretrained("deepseek-ai/eagle3_qwen3_4b_ttt7", target)  # doctest: +SKIP
    """

    def __init__(self, model: FeatureModel, *, length: int | None = None, temperature: float | None = None) -> None:
        """Remembers the model; runs nothing."""
        made: Any = model
        if not isinstance(made, nn.Module) or not isinstance(made, Recurrent | Parallel):
            raise UnsupportedError(
                f"FeatureDrafter: model must be a torch.nn.Module with the members of drafters.Recurrent or "
                f"drafters.Parallel, got {type(made).__name__}; drafters.from_pretrained loads published ones."
            )
        check_options("FeatureDrafter", length, temperature)
        most = model.spec.longest
        if length is not None and most is not None and length > most:
            raise UnsupportedError(
                f"FeatureDrafter: length={length}, but this {model.spec.family} model drafts {most} tokens at most."
            )
        self.model, self.length = model, length or int(model.spec.depth)
        self._weight = next(cast(nn.Module, model).parameters(), torch.zeros(()))
        self._given_temperature, self._doubt = temperature, Doubt(logger)
        self._cache: FeatureCache | None = None
        self._last: States | None = None
        self._level: tuple[Rows | None, States] | None = None
        self._slots: Tensor | None = None
        self._asked = False  # whether this round drafts

    def __repr__(self) -> str:
        return f"<FeatureDrafter: {self.model.spec.family}, drafts {self.length} tokens>"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target states that the drafter reads."""
        return cast(tuple[int, ...], self.model.spec.feature_layers)

    @property
    def shortlist(self) -> Shortlist | None:
        """The target's tokens that can be drafted; None for all."""
        return self.model.shortlist

    def start(self, context: DraftContext) -> None:
        """Runs the rows of the committed text.

        Raises:
            UnsupportedError: if there are no features, or the target's tokens are not the drafter's.
        """
        text = committed_text(context, self.model.spec, self)
        self.model.check_complete()
        self._device = context.tokens.device
        self._temperature = self._given_temperature or context.temperature or 1.0
        self._cache = FeatureCache(len(text.counts), self._weight.device, context.rows)
        self._last = self._level = None
        self._run(text.tokens[:, 1:], text.features, text.counts.tolist())

    @torch.no_grad()
    def _run(
        self, tokens: Int[Tensor, "batch rows"], features: Float[Tensor, "batch rows features"], counts: Sequence[int]
    ) -> None:
        """Commits the first `counts[b]` rows, and keeps the output of each text's last row."""
        cache, device = self._started(), self._weight.device
        cache.forget_target_rows()
        if not self.model.remembers:
            final = torch.tensor(counts, device=tokens.device)[:, None].clamp_min(1) - 1
            tokens, counts = tokens.gather(1, final), [min(count, 1) for count in counts]
            features = features.gather(1, final.to(features.device)[:, :, None].expand(-1, -1, features.shape[-1]))
        real = torch.arange(tokens.shape[1], device=device) < torch.tensor(counts, device=device)[:, None]
        tokens = tokens.clamp_min(0).to(device)
        features = features.to(self._weight).masked_fill(~real[:, :, None], 0.0)  # anything may stand there
        for first in range(0, max(counts), CHUNK):
            chunk = slice(first, first + CHUNK)
            ids, new = tokens[:, chunk], [min(max(count - first, 0), CHUNK) for count in counts]
            states = self.model.committed(ids, features[:, chunk], cache.chain(ids.shape[1]), self._last)
            place = torch.tensor(new, device=device)[:, None]
            ends = states.at((place - 1).clamp_min(0))
            before, some = self._last or ends, (place > 0)[:, :, None]
            self._last = States(torch.where(some, ends.normed, before.normed), torch.where(some, ends.fed, before.fed))
            cache.keep(new)

    @torch.no_grad()
    def children(self, frontier: Frontier, count: int) -> Candidates:
        """One forward over the frontier; at the root, or with all slots at once, none that is not done already."""
        cache, last, width = self._started(), self._last, frontier.tokens.shape[1]
        if last is None or frontier.depth >= self.length:
            return nothing(frontier.tokens)
        self._asked = True
        if isinstance(self.model, Parallel):
            if frontier.depth == 0:
                self._slots = self.model.slots(last, cache, self.length)
            if self._slots is None:
                raise SpecdecError(LATER)
            return spread(self._candidates(self._slots[:, frontier.depth : frontier.depth + 1], count), width)
        model = cast(Recurrent, self.model)
        if frontier.depth == 0:
            self._level = (None, last)
            return self._candidates(model.logits(last.normed), count)
        if self._level is None:
            raise SpecdecError(LATER)
        rows, states = self._level
        parents = frontier.parents.clamp_min(0).to(self._weight.device)
        places = cache.children(width) if rows is None else rows.below(parents)
        states = model.drafted(frontier.tokens.to(parents.device), states.at(parents), places, frontier.depth)
        self._level = (places, states)
        return self._candidates(model.logits(states.normed), count)

    def _candidates(self, logits: Float[Tensor, "batch rows vocab"], count: int) -> Candidates:
        """The law of each row's next token."""
        log_probs = log_law(logits, self._temperature)
        empty = self._started().lengths.to(log_probs.device) == 0
        log_probs = log_probs.masked_fill(empty[:, None, None], -torch.inf)  # no state of the target goes before
        kept = self.model.shortlist
        ids = None if kept is None else kept.ids.to(log_probs.device).expand_as(log_probs)
        return candidates(log_probs, ids, count, self.model.spec.vocab_size, self._device)

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Runs the committed tokens with the target's true states; the tree's rows are forgotten."""
        if features is None:
            raise UnsupportedError(f"{self!r} reads the target's features; commit() was given none.")
        kept = counts.cpu()  # the one thing that is read back
        self._run(tokens, features, kept.tolist())
        if self._asked:
            self._doubt.judge(self, kept)
        self._level, self._slots, self._asked = None, None, False

    def finish(self) -> None:
        """Drops the request's rows."""
        self._cache = self._last = self._level = self._slots = None

    def _started(self) -> FeatureCache:
        if self._cache is None:
            raise SpecdecError("FeatureDrafter was called outside a request; call start(context) first.")
        return self._cache
