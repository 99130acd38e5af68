"""A smaller causal model as drafter (arXiv 2211.17192, 2302.01318), for chains and trees, in batches.

The draft model runs once per level of the tree, over the whole frontier, with a tree mask over its own cache. What it
has run and what was committed meet in `commit`: rows of the accepted path stay, everything else is dropped, and
committed tokens that it has not run yet are run together with the next root. Its context is therefore always the
committed text, never its own guesses.
"""

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.drafters.vocabulary import VocabularyMap
from specdec.errors import SpecdecError, UnsupportedError
from specdec.protocols import DraftContext, ModelRunner
from specdec.types import Candidates, Frontier

logger = logging.getLogger(__name__)

Overflow = Literal["stop", "window", "extend"]


@dataclass(slots=True)
class _Row:
    """One request: draft ids in the draft model's cache, and committed ones that it has not run yet.

    A `full` row has a text that is longer than the draft model's positions; it drafts nothing any more.
    """

    fed: list[int]
    waiting: list[int]
    full: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """One forward of a round: the frontier it answered, and where its rows lie among the pending ones."""

    frontier: Frontier
    offset: int
    depths: Int[Tensor, "batch frontier"]
    visible: Bool[Tensor, "batch frontier pending"]
    usable: Bool[Tensor, "batch frontier"]


class ModelDrafter:
    """Drafts with a second model.

    Args:
        model: a causal language model (one that `SpeculativeGenerator` would accept as target).
        tokenizer: the draft model's tokenizer. Needed when it differs from the target's, or to exclude padding rows.
        target_tokenizer: the target's tokenizer; None says that both models use the same one.
        vocabulary: which tokens of the two models correspond, instead of what the tokenizers say.
        temperature: of the draft law; None follows the request (1 when it is greedy).
        overflow: at the draft model's last position, `stop` drafting, go on with a `window` of recent tokens (half
            of its positions, run anew), or `extend` beyond it (only for models without a table of positions).

    Raises:
        UnsupportedError: for bad arguments, or vocabularies that share no tokens.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, drafters, trees
        >>> from specdec.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> generator = SpeculativeGenerator(model, drafters.ModelDrafter(model), trees.Chain(3))
        >>> ids = generator.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False)
        >>> generator.stats.target_passes
        3
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
        vocabulary: VocabularyMap | None = None,
        temperature: float | None = None,
        overflow: Overflow = "stop",
    ) -> None:
        """Remembers the model; runs nothing."""
        if not all(hasattr(model, name) for name in ("config", "get_output_embeddings", "get_input_embeddings")):
            raise UnsupportedError(f"ModelDrafter takes a causal language model, got {type(model).__name__}.")
        if vocabulary is not None and tokenizer is not None:
            raise UnsupportedError("vocabulary= and tokenizer= both say which tokens correspond; pass one of them.")
        if target_tokenizer is not None and tokenizer is None:
            raise UnsupportedError("target_tokenizer= was given without tokenizer=; pass both or neither.")
        if temperature is not None and not temperature > 0:
            raise UnsupportedError(f"temperature must be above 0, got {temperature}.")
        if overflow not in ("stop", "window", "extend"):
            raise UnsupportedError(f"overflow must be 'stop', 'window' or 'extend', got {overflow!r}.")
        self.model = model
        self._tokenizer, self._target_tokenizer = tokenizer, target_tokenizer
        self._given_temperature, self._overflow = temperature, overflow
        self._positions = None if overflow == "extend" else _positions(model)
        if overflow == "extend" and _has_position_table(model):
            raise UnsupportedError(
                f"overflow='extend': {type(model).__name__} looks positions up in a table of {_positions(model)} rows; "
                "use 'stop' or 'window'."
            )
        self._given_vocabulary, self._vocabulary = vocabulary, vocabulary
        self._warned = False
        self._runner: ModelRunner | None = None
        self._rows: list[_Row] = []
        self._levels: list[_Level] = []

    def __repr__(self) -> str:
        return f"<ModelDrafter: {type(self.model).__name__}, overflow={self._overflow!r}>"

    @property
    def drafts_plainly(self) -> bool:
        """Whether neither the draft law nor what happens at the last position was asked to be another one."""
        return self._given_temperature is None and self._overflow == "stop"

    @property
    def maps_vocabulary(self) -> bool:
        """Whether tokens of the two models correspond by a map instead of being the same."""
        return self._tokenizer is not None or self._given_vocabulary is not None

    def start(self, context: DraftContext) -> None:
        """Runs the draft model over the committed tokens, the last one left out."""
        if context.open_model is None:
            raise UnsupportedError("the request offers no way to open a model; pass DraftContext(open_model=...).")
        self._open, self._device = context.open_model, context.tokens.device
        self._temperature = self._given_temperature or context.temperature or 1.0
        self._map = self._vocabulary_map(context.vocab_size)
        self._rows, self._levels = [], []
        for ids, mask in zip(context.tokens.tolist(), context.mask.tolist(), strict=True):
            real = [token for token, keep in zip(ids, mask, strict=True) if keep] or [0]
            fed = [piece for token in real[:-1] for piece in self._map.to_draft(token)]
            # A row needs at least one token before the root; any token will do, it only colours the drafts.
            self._rows.append(_Row(fed=fed or [0], waiting=self._map.to_draft(real[-1])))
        self._fit()
        for row in self._rows:
            row.fed = row.fed[-1:] if row.full else row.fed
        self._reopen()

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """One forward over the frontier; the first of a round also runs the committed tokens not run yet."""
        runner = self._started()
        if frontier.depth == 0:
            if self._levels:
                # Asked for another tree from the same roots: what was run for the last one is dropped.
                none = torch.zeros_like(runner.lengths)
                runner.keep(none[:, None], none)
                self._levels = []
            if self._fit():
                self._reopen()
                runner = self._started()
        if not self._reaches(frontier.depth):
            tokens = torch.zeros_like(frontier.tokens)[:, :, None]
            return Candidates(tokens, torch.full(tokens.shape, -torch.inf, device=tokens.device))
        device = runner.lengths.device
        ids, level = self._next_level(frontier, device) if frontier.depth else self._first_level(frontier, device)
        output = runner.append(ids, level.depths, level.visible)
        self._levels.append(level)
        logits = output.logits[:, -frontier.tokens.shape[1] :]
        tokens, log_probs, law = self._map.propose(logits, count, self._temperature)
        shown = level.usable[:, -logits.shape[1] :, None].to(logits.device)
        law = torch.where(shown, law, 0.0)
        log_probs = torch.where(shown, log_probs, -torch.inf)
        return Candidates(tokens.to(self._device), log_probs.to(self._device), law.to(self._device))

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Keeps the rows of the committed path and queues what has not been run."""
        runner, levels, self._levels = self._started(), self._levels, []
        answers = [_answers(level) for level in levels[1:]]
        kept = []
        for index, (row, ids, count) in enumerate(zip(self._rows, tokens.tolist(), counts.tolist(), strict=True)):
            committed, run, followed = ids[:count], list[int](), 0
            if levels and committed and not row.full:
                # The last committed token is the next root: it stays out, so that there is a row to draft from.
                path = _follow([rows[index] for rows in answers], committed[:-1])
                width, followed = levels[0].depths.shape[1], len(path)
                run = [*range(width - len(row.waiting), width), *path]
                row.fed += row.waiting
                row.waiting = []
            for place, token in enumerate(committed):
                (row.fed if place < followed else row.waiting).extend(self._map.to_draft(token))
            if row.full:
                row.waiting = row.waiting[-1:]
            kept.append(run)
        if levels:
            width = max(1, *(len(run) for run in kept))
            device = runner.lengths.device
            nodes = torch.tensor([run + [0] * (width - len(run)) for run in kept], device=device)
            runner.keep(nodes, torch.tensor([len(run) for run in kept], device=device))

    def finish(self) -> None:
        """Drops the request's cache; does nothing where no request was started."""
        self._runner, self._levels, self._rows = None, [], []

    def _started(self) -> ModelRunner:
        if self._runner is None:
            raise SpecdecError("ModelDrafter was called outside a request; call start(context) first.")
        return self._runner

    def _first_level(self, frontier: Frontier, device: torch.device) -> tuple[Int[Tensor, "batch rows"], _Level]:
        """Committed tokens not run yet, as one chain per row that ends in the root; shorter chains start later."""
        width = max(len(row.waiting) for row in self._rows)
        counts = torch.tensor([len(row.waiting) for row in self._rows], device=device)
        ids = torch.tensor([[0] * (width - len(row.waiting)) + row.waiting for row in self._rows], device=device)
        place = torch.arange(width, device=device) - (width - counts)[:, None]
        depths, alive = self._in_range(place.clamp_min(0))
        chain = (place[:, None, :] <= place[:, :, None]) & (place >= 0)[:, None, :]
        visible = chain | torch.eye(width, dtype=torch.bool, device=device)
        full = torch.tensor([row.full for row in self._rows], device=device)
        usable = alive & (place >= 0) & frontier.valid.to(device) & ~full[:, None]
        return ids, _Level(frontier, 0, depths, visible, usable)

    def _next_level(self, frontier: Frontier, device: torch.device) -> tuple[Int[Tensor, "batch rows"], _Level]:
        """The frontier itself, each node after its parent's row."""
        last = self._levels[-1]
        nodes = last.frontier.tokens.shape[1]
        shared = self._map.shared_ids(frontier.tokens).to(device)
        parents = frontier.parents.to(device).clamp_min(0)
        width = shared.shape[1]
        depths, alive = self._in_range(last.depths[:, -nodes:].gather(1, parents) + 1)
        before = last.visible[:, -nodes:].gather(1, parents[:, :, None].expand(-1, -1, last.visible.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=device).expand(shared.shape[0], -1, -1)
        usable = alive & (shared >= 0) & frontier.valid.to(device) & last.usable[:, -nodes:].gather(1, parents)
        level = _Level(frontier, last.visible.shape[2], depths, torch.cat([before, own], 2), usable)
        return shared.clamp_min(0), level

    def _in_range(self, depths: Int[Tensor, "batch rows"]) -> tuple[Tensor, Tensor]:
        """Depths that have a position, and whether the wanted one had: rows beyond are run but never used."""
        if self._positions is None:
            return depths, torch.ones_like(depths, dtype=torch.bool)
        room = [[self._positions - 1 - len(row.fed)] for row in self._rows]
        limit = torch.tensor(room, device=depths.device)
        return torch.minimum(depths, limit), depths <= limit

    def _reaches(self, depth: int) -> bool:
        """Whether some row has a position for a node of this depth; if not, nothing needs to be run."""
        longest = self._positions
        return any(
            not row.full and (longest is None or len(row.fed) + len(row.waiting) + depth <= longest)
            for row in self._rows
        )

    def _fit(self) -> bool:
        """Acts on the overflow policy where a root has no position; whether the texts were cut and must run anew."""
        positions = self._positions
        if positions is None or all(row.full or len(row.fed) + len(row.waiting) <= positions for row in self._rows):
            return False
        windowed = self._overflow == "window"
        if not self._warned:
            action = "goes on with a window of recent tokens" if windowed else "stops drafting"
            logger.warning("The draft model has %d positions; it %s for longer texts.", positions, action)
            self._warned = True
        for row in self._rows:
            text = row.fed + row.waiting
            if windowed:
                text = text[-max(2, positions // 2) :]
                row.fed, row.waiting = text[:-1], text[-1:]
            elif len(text) > positions:
                row.full, row.waiting = True, text[-1:]
        return windowed

    def _reopen(self) -> None:
        """Runs the draft model over what every row has fed it."""
        width = max(len(row.fed) for row in self._rows)
        ids = [[0] * (width - len(row.fed)) + row.fed for row in self._rows]
        mask = [[False] * (width - len(row.fed)) + [True] * len(row.fed) for row in self._rows]
        self._runner = self._open(
            self.model, torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)
        )

    def _vocabulary_map(self, target_size: int) -> VocabularyMap:
        """The map for a target of this size; built once, since it reads whole tokenizers."""
        known = self._vocabulary
        if known is not None and known.target_size == target_size:
            return known
        draft_size = int(self.model.get_output_embeddings().weight.shape[0])
        if self._given_vocabulary is not None:
            raise UnsupportedError(
                f"vocabulary= maps to {self._given_vocabulary.target_size} target ids, but the target has "
                f"{target_size}; build the map with target_size={target_size}."
            )
        if self._target_tokenizer is not None:
            known = VocabularyMap.from_tokenizers(
                self._target_tokenizer, self._tokenizer, target_size=target_size, draft_size=draft_size
            )
        else:
            entries = len(self._tokenizer) if self._tokenizer is not None else None
            if entries is None and draft_size != target_size:
                logger.warning(
                    "The draft model has %d ids and the target %d; they are taken to be one tokenizer, padded. "
                    "Pass tokenizer= and target_tokenizer= to be sure.",
                    draft_size,
                    target_size,
                )
            known = VocabularyMap.same_tokenizer(target_size, draft_size, entries)
        self._vocabulary = known
        return known


def _answers(level: _Level) -> list[dict[tuple[int, int], tuple[int, int]]]:
    """Per batch row: for a token and its parent's place in the previous frontier, its own place and pending row."""
    usable = level.usable.to(level.frontier.tokens.device)
    packed = torch.stack([level.frontier.tokens, level.frontier.parents, usable.to(torch.int64)], 1).tolist()
    return [
        {
            (token, parent): (place, level.offset + place)
            for place, (token, parent, run) in enumerate(zip(*row, strict=True))
            if run
        }
        for row in packed
    ]


def _follow(answers: list[dict[tuple[int, int], tuple[int, int]]], tokens: list[int]) -> list[int]:
    """Pending rows of the path that carries `tokens` below the root, as far as it was run."""
    place, path = 0, []
    for level, token in zip(answers, tokens, strict=False):
        if (token, place) not in level:
            break
        place, row = level[token, place]
        path.append(row)
    return path


def _positions(model: Any) -> int | None:
    """Positions that a model was built for; None if its configuration names no number."""
    config = getattr(model, "config", None)
    limit = getattr(config and config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _has_position_table(model: Any) -> bool:
    """Whether some table of the model, beside the word embedding, has about as many rows as the model has positions."""
    positions, words = _positions(model), model.get_input_embeddings()
    if positions is None:
        return False
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    tables = [weight for weight in embeddings if weight.shape != words.weight.shape]
    tables += [buffer for buffer in model.buffers() if buffer.dim() == 2]
    # Some tables begin with rows for padding.
    return any(positions <= table.shape[0] <= positions + 2 for table in tables)
