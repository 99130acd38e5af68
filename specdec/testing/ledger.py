"""The committed tokens of a loop that does without transformers' `generate`: lengths, end tokens, greedy or sampled.

`specdec.hf.ledger` does everything that `generate` can do, per token. This is the same seam with nothing but the
essentials, for decoding loops of your own and for tests of parts: it fits any `Target`.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.protocols import DraftContext, ModelRunner, Target
from specdec.types import DraftTree, TargetLaw, TargetOutput

OpenModel = Callable[[object, Int[Tensor, "batch prompt"], Bool[Tensor, "batch prompt"]], ModelRunner]


class PlainLedger:
    """Committed tokens of one request. Satisfies `specdec.protocols.Ledger`.

    Args:
        prompt: token ids, padded on the left if rows differ in length.
        max_new_tokens: tokens a row may commit.
        mask: False on padding; None if there is none.
        eos_token_ids: a row stops after any of these.
        do_sample: draws tokens instead of taking the most likely one.
        temperature: divides the logits when tokens are drawn.
        open_model: lets a drafter run a model of its own (`specdec.hf.open_model` for models of transformers).
        generator: source of randomness handed to drafters.

    Attributes:
        active: rows that still generate.
        lockstep: False: rows may commit different numbers of tokens.

    Raises:
        ShapeError: for an empty prompt, or options out of range.

    Example:
        >>> import torch
        >>> from specdec import control, rounds, trees, verify
        >>> from specdec.testing import PlainLedger, TableDrafter, TableTarget
        >>> table = torch.eye(5).roll(1, dims=1)  # 0 1 2 3 4 0 1 ...
        >>> prompt = torch.tensor([[1], [4]])
        >>> ledger = PlainLedger(prompt, max_new_tokens=6, eos_token_ids=[3])
        >>> for round in rounds.rounds(TableTarget(table, prompt), TableDrafter(table), trees.Chain(3),
        ...                            verify.TargetOnly(), ledger, control.Always()):
        ...     print(round.num_committed.tolist())
        [1, 1]
        [1, 3]
        >>> ledger.rows()
        [[1, 2, 3], [4, 0, 1, 2, 3]]
    """

    lockstep: bool = False

    def __init__(
        self,
        prompt: Int[Tensor, "batch prompt"],
        *,
        max_new_tokens: int,
        mask: Bool[Tensor, "batch prompt"] | None = None,
        eos_token_ids: Sequence[int] = (),
        do_sample: bool = False,
        temperature: float = 1.0,
        open_model: OpenModel | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if prompt.ndim != 2 or prompt.shape[1] == 0:
            raise ShapeError(f"prompt must be [batch, prompt] with at least one token a row, got {list(prompt.shape)}.")
        if max_new_tokens < 1 or not temperature > 0:
            raise ShapeError(f"need max_new_tokens >= 1 and temperature > 0, got {max_new_tokens} and {temperature}.")
        batch, width = prompt.shape
        self._ids = torch.nn.functional.pad(prompt, (0, max_new_tokens))
        self._real = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask
        self._lengths = torch.full((batch,), width, dtype=torch.int64, device=prompt.device)
        self._eos = torch.tensor(list(eos_token_ids), dtype=prompt.dtype, device=prompt.device)
        self._do_sample, self._temperature = do_sample, temperature
        self._open_model, self._generator = open_model, generator
        self.active = torch.ones(batch, dtype=torch.bool, device=prompt.device)

    @property
    def roots(self) -> Int[Tensor, " batch"]:
        """Last committed token of each row."""
        return self._ids.gather(1, self._lengths[:, None] - 1).squeeze(1)

    @property
    def remaining(self) -> Int[Tensor, " batch"]:
        """Tokens a row may still commit; 0 for rows that stopped."""
        return torch.where(self.active, self._ids.shape[1] - self._lengths, 0)

    def law(self, output: TargetOutput, node: Int[Tensor, " batch"], rows: Bool[Tensor, " batch"]) -> TargetLaw:
        """The law at `node`: the logits, divided by the temperature when tokens are drawn."""
        batch = torch.arange(rows.shape[0], device=node.device)
        return self._law(output.logits[batch, node])

    def laws(self, output: TargetOutput, tree: DraftTree) -> Float[Tensor, "batch nodes vocab"]:
        """Target probabilities at every node."""
        return self._law(output.logits.flatten(0, 1)).probs.view(*tree.tokens.shape, -1)

    def _law(self, logits: Float[Tensor, "rows vocab"]) -> TargetLaw:
        wide = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
        return TargetLaw(scores=wide / self._temperature if self._do_sample else wide, greedy=not self._do_sample)

    def commit(self, tokens: Int[Tensor, " batch"], rows: Bool[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Appends one token to each of `rows`; returns the rows that go on.

        Raises:
            ShapeError: if one of `rows` has stopped.
        """
        if bool((rows & ~self.active).any()):
            raise ShapeError(f"only active rows can commit; active {self.active.tolist()}, got rows {rows.tolist()}.")
        place = self._lengths.clamp_max(self._ids.shape[1] - 1)[:, None]
        kept = torch.where(rows[:, None], tokens[:, None], self._ids.gather(1, place))
        self._ids = self._ids.scatter(1, place, kept)
        self._lengths = self._lengths + rows
        ended = torch.isin(tokens, self._eos) | (self._lengths == self._ids.shape[1])
        self.active = self.active & ~(rows & ended)
        return rows & self.active

    def rows(self) -> list[list[int]]:
        """Each row's token ids, prompt included, padding and what lies behind the end left out."""
        context = self._text()
        return [ids[real].tolist() for ids, real in zip(*context, strict=True)]

    def draft_context(self, target: Target) -> DraftContext:
        """What a drafter needs to know to start now."""
        tokens, mask = self._text()
        return DraftContext(
            tokens=tokens,
            mask=mask,
            vocab_size=target.vocab_size,
            temperature=self._temperature if self._do_sample else 0.0,
            open_model=self._open_model,
            generator=self._generator,
        )

    def _text(self) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """All ids so far, and which of them count."""
        width = int(self._lengths.max())
        inside = torch.arange(width, device=self._ids.device) < self._lengths[:, None]
        real = torch.nn.functional.pad(self._real, (0, max(0, width - self._real.shape[1])), value=True)
        return self._ids[:, :width], inside & real
