"""The committed tokens of a `generate` call, and everything that plain decoding does once per token.

One function, `TokenLedger.commit`, appends tokens: selection comes before it, stopping, streaming and recording
happen in it. Logits processors run in `law`, with the row's committed tokens as prefix, once per committed token.

Rows of a batch may have committed different numbers of tokens. Processors and criteria of transformers take one
rectangular `input_ids`, so rows of equal length are served together by a call with the whole batch, of which only
those rows are used. That is right for row-wise pure functions, and all of transformers' own are (`ROW_WISE`).
Anything else in a batch (a user's own processor or criterion, one with internal state) puts the ledger in
*lockstep*: every round ends for all rows where it ends for one, and each such function is called exactly once per
token with exactly the batch that plain `generate` would give it.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

from specdec.errors import UnsupportedError
from specdec.hf.records import Records
from specdec.hf.target import ModelTarget, open_model
from specdec.protocols import DraftContext, Target
from specdec.trees import topology
from specdec.types import DraftTree, TargetLaw, TargetOutput

PREFIX_FREE: tuple[type, ...] = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
"""Processors that never look at the prefix: one call serves any set of rows and nodes."""

ROW_WISE: tuple[type, ...] = (
    *PREFIX_FREE,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.WatermarkLogitsProcessor,
)
"""Processors whose answer for a row depends on that row's prefix and scores alone, and that keep no state.

Exactly these types count, since a subclass may look at anything and remember it.
"""

ROW_WISE_CRITERIA: tuple[type, ...] = (
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
    stopping_criteria.EosTokenCriteria,
)
"""Stopping criteria with the same property. As above, exactly these types: a subclass may do anything."""


SPARE = 1024
"""Columns behind the prompt at first: for 32 rows, making room for more took up to 4 ms of a round."""


class TokenLedger:
    """Committed tokens of one `generate` call. Satisfies `specdec.protocols.Ledger`.

    Args:
        input_ids: prompt token ids `[batch, prompt]`; may have no columns (`inputs_embeds`).
        prompt_mask: False on padding of the prompt; None if there is none.
        processors: transformers' `LogitsProcessorList` for this call.
        criteria: transformers' `StoppingCriteriaList` for this call.
        max_length: longest row, prompt included.
        do_sample: whether tokens are drawn.
        temperature: what drafters are told about the request.
        pad_token: id for rows that stopped while others go on.
        records: where scores and states are kept.
        on_token: called with one `[batch]` tensor per complete column, in order (a streamer's `put`).
        attention_columns: for a row and node, the columns of each layer's attention that plain decoding would have.
        generator: source of randomness handed to drafters.
    """

    def __init__(
        self,
        input_ids: Int[Tensor, "batch prompt"],
        *,
        prompt_mask: Bool[Tensor, "batch prompt"] | None,
        processors: Any,
        criteria: Any,
        max_length: int,
        do_sample: bool,
        temperature: float,
        pad_token: int | None,
        records: Records,
        on_token: Callable[[Tensor], None] | None = None,
        attention_columns: Callable[[int, int], tuple[Tensor, ...]] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Checks the combination; nothing has run yet.

        Raises:
            UnsupportedError: if a batch needs a padding id and none is known.
        """
        batch, prompt = input_ids.shape
        self.processors, self.criteria = list(processors), criteria
        self._max_length, self.do_sample, self._temperature = max_length, do_sample, temperature
        self.records, self._on_token, self._generator = records, on_token, generator
        self._stops_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        if batch > 1 and self._stops_rows and pad_token is None:
            raise UnsupportedError("a batch needs a padding id for rows that stop early; set pad_token_id.")
        self._pad = 0 if pad_token is None else pad_token
        self.lockstep = batch > 1 and not self._ragged_is_exact()
        self._prefix_free = _all_of(self.processors, PREFIX_FREE)
        # Without EOS, plain generate lets rows that are done run on until the last one is.
        self._end_together = self.lockstep and not self._stops_rows
        self._shows_scores = records.scores and not _all_of(criteria, ROW_WISE_CRITERIA)
        self._scores: tuple[Tensor, ...] = ()
        self._prompt = prompt
        self._prompt_mask = None if prompt_mask is None else prompt_mask.to(input_ids.device)
        self._ids = input_ids.new_full((batch, prompt + SPARE), self._pad)
        self._ids[:, :prompt] = input_ids
        self._lengths = [prompt] * batch
        self._finished = [False] * batch
        self._streamed = prompt
        self.active = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
        self._at: tuple[TargetOutput, Int[Tensor, " batch"], Tensor, Tensor] | None = None
        self._attention_columns = attention_columns

    def _ragged_is_exact(self) -> bool:
        """Whether every per-token function may be served row by row."""
        if not _all_of(self.processors, ROW_WISE) or not _all_of(self.criteria, ROW_WISE_CRITERIA):
            return False
        # Without EOS all rows of plain generate end at the same length; only a length limit sees to that by itself.
        return self._stops_rows or _all_of(self.criteria, (stopping_criteria.MaxLengthCriteria,))

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens that end a row, in order."""
        ends = [item for item in self.criteria if type(item) is stopping_criteria.EosTokenCriteria]
        return sorted({token for item in ends for token in item.eos_token_id.flatten().tolist()})

    @functools.cached_property
    def _ends(self) -> tuple[frozenset[int], int] | None:
        """Stop tokens and the length limit, if nothing else is to be asked, recorded or told per token.

        Read once, by the first round that is committed whole: stop tokens may lie on a GPU.
        """
        known = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
        if self.lockstep or self.records.wanted or not _all_of(self.criteria, known):
            return None
        limits = [item for item in self.criteria if type(item) is stopping_criteria.MaxLengthCriteria]
        limit = min((math.ceil(item.max_length) for item in limits), default=sys.maxsize)
        for item in limits:
            if (item.max_position_embeddings or sys.maxsize) <= min(limit, item.max_length - 1):
                return None  # it warns on the way
        return frozenset(self.stop_tokens), limit

    def check_verifier(self, stepwise: bool) -> None:
        """Raises `UnsupportedError` if a processor may not be called with prefixes that are never committed."""
        strangers = [type(item).__name__ for item in self.processors if type(item) not in ROW_WISE]
        if not stepwise and strangers:
            raise UnsupportedError(
                f"{', '.join(strangers)} may keep state and must see committed tokens only, but this verifier asks "
                "for the target's law at every node. Use verify.TargetOnly, verify.Rejection or verify.TreeRejection."
            )

    @property
    def roots(self) -> Int[Tensor, " batch"]:
        """Last committed token of each row (the padding id when the prompt has no ids)."""
        last = torch.tensor([max(length - 1, 0) for length in self._lengths], device=self._ids.device)
        return self._ids.gather(1, last[:, None]).squeeze(1)

    @property
    def remaining(self) -> Int[Tensor, " batch"]:
        """Tokens until the length limit; 0 for rows that stopped."""
        left = [
            0 if not running else self._max_length - length
            for running, length in zip(self.active.tolist(), self._lengths, strict=True)
        ]
        return torch.tensor(left, device=self._ids.device)

    def law(self, output: TargetOutput, node: Int[Tensor, " batch"], rows: Bool[Tensor, " batch"]) -> TargetLaw:
        """Processes the logits at `node` under each row's committed tokens."""
        batch = torch.arange(node.shape[0], device=output.logits.device)
        # float32 and a copy, as in plain generate: processors may write in place, and ties must fall the same way.
        logits = output.logits[batch, node.to(output.logits.device)]
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        scores = self._process(logits, self._ids, self._lengths, rows.tolist())
        self._at = (output, node, logits, scores)
        return TargetLaw(scores=scores, greedy=not self.do_sample)

    def laws(self, output: TargetOutput, tree: DraftTree) -> Float[Tensor, "batch nodes vocab"]:
        """Processes the logits of every node, each under its committed tokens and its own path."""
        batch, nodes = tree.tokens.shape
        logits = output.logits.to(dtype=torch.float32, device=self._ids.device)
        if self._prefix_free:
            flat = logits.flatten(0, 1).clone()
            scores = self._call(self._ids[:1].expand(batch * nodes, -1), flat).view(batch, nodes, -1)
        else:
            everyone, columns = [True] * batch, []
            for node in range(nodes):
                ids, lengths = self._with_path(tree, node)
                columns.append(self._process(logits[:, node].clone(), ids, lengths, everyone))
            scores = torch.stack(columns, 1)
        return TargetLaw(scores=scores.flatten(0, 1), greedy=not self.do_sample).probs.view(batch, nodes, -1)

    def _with_path(self, tree: DraftTree, node: int) -> tuple[Int[Tensor, "batch seq"], list[int]]:
        """Each row's committed tokens followed by the tokens on the path to `node`, the root left out."""
        index = torch.full_like(tree.num_nodes, node)
        path = topology.path_to(tree, index)
        tokens = tree.tokens.gather(1, path.clamp_min(0))
        counts = (path >= 0).sum(-1).tolist()
        ids = torch.nn.functional.pad(self._ids, (0, path.shape[1]), value=self._pad)
        for row, count in enumerate(counts):
            ids[row, self._lengths[row] : self._lengths[row] + count] = tokens[row, :count]
        return ids, [length + count for length, count in zip(self._lengths, counts, strict=True)]

    def _process(
        self, logits: Float[Tensor, "batch vocab"], ids: Int[Tensor, "batch seq"], lengths: list[int], rows: list[bool]
    ) -> Float[Tensor, "batch vocab"]:
        """Runs the processors, once per distinct length among `rows`."""
        if not self.processors:
            return logits
        groups = sorted({length for length, wanted in zip(lengths, rows, strict=True) if wanted})
        if self._prefix_free or len(groups) == 1:
            return self._call(ids[:, : groups[-1]].clone(), logits.clone())
        scores = logits.clone()
        for length in groups:
            part = self._call(ids[:, :length].clone(), logits.clone())
            members = [row for row, wanted in enumerate(rows) if wanted and lengths[row] == length]
            scores[members] = part[members]
        return scores

    def _call(self, ids: Int[Tensor, "rows seq"], scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores

    def commit(self, tokens: Int[Tensor, " batch"], rows: Bool[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Appends one token to each of `rows`, then asks every stopping criterion; returns the rows that go on."""
        members = [row for row, wanted in enumerate(rows.tolist()) if wanted]
        values = tokens.tolist()
        columns = [*members]
        if self.lockstep:
            # Rows that stopped get their padding column at the same time, as in plain generate.
            columns = list(range(len(values)))
        self._reserve(max(self._lengths) + 1)
        for row in columns:
            self._ids[row, self._lengths[row]] = values[row] if row in members else self._pad
        if self.records.wanted:
            self._record(members)
        for row in columns:
            self._lengths[row] += 1
        self._stop(columns)
        done = [all(self._finished)] * len(values) if self._end_together else self._finished
        alive = [wanted and not done[row] for row, wanted in enumerate(self.active.tolist())]
        self.active = torch.tensor(alive, device=self.active.device)
        self._stream()
        return rows & self.active

    def extend(self, tokens: list[list[int]], counts: list[int]) -> list[int]:
        """Commits several tokens of each row as `commit` does one after the other, and asks no more than it must.

        It is for a ledger on the CPU, beside which a device runs the next round.

        Args:
            tokens: tokens of each row, at least as many as the largest count.
            counts: how many of them a row takes, unless it stops before.

        Returns:
            How many each row took.
        """
        taken = [0] * len(counts)
        if self._ends is None:
            for step in range(max(counts)):
                rows = self.active & torch.tensor([count > step for count in counts])
                self.commit(torch.tensor([row[step] for row in tokens]), rows)
                taken = [before + took for before, took in zip(taken, rows.tolist(), strict=True)]
            return taken
        (stops, limit), alive = self._ends, self.active.tolist()
        self._reserve(max(self._lengths) + max(counts))
        ids = self._ids.numpy()  # the same memory, written to without torch, which takes longer for few numbers
        for row, (given, count) in enumerate(zip(tokens, counts, strict=True)):
            length = self._lengths[row]
            while alive[row] and taken[row] < count:
                token = given[taken[row]]
                taken[row] += 1
                alive[row] = token not in stops and length + taken[row] < limit
            ids[row, length : length + taken[row]] = given[: taken[row]]
            self._lengths[row] += taken[row]
            self._finished[row] = not alive[row]
        self.active = torch.tensor(alive)
        self._stream()
        return taken

    def _record(self, members: list[int]) -> None:
        if self._at is None:
            raise RuntimeError("commit() needs a law() call before it.")
        output, node, logits, scores = self._at
        for row in members:
            place, index = int(node[row]), self._lengths[row] - self._prompt
            # The first token's attentions are the prompt's, and kept whole.
            columns = self._attention_columns(row, place) if self._attention_columns is not None and index else None
            self.records.add(row, index, place, logits, scores, output, columns)

    def _stop(self, columns: list[int]) -> None:
        """Asks the criteria with each row's exact prefix and marks the rows that are done."""
        if self._shows_scores:
            self._scores += (self.records.score(len(self._scores)),)
        scores = self._scores if self.records.scores else None
        for length in {self._lengths[row] for row in columns}:
            done = self.criteria(self._ids[:, :length].clone(), scores).tolist()
            for row in columns:
                if self._lengths[row] == length and done[row]:
                    self._finished[row] = True

    def _reserve(self, columns: int) -> None:
        if columns > self._ids.shape[1]:
            self._ids = torch.nn.functional.pad(self._ids, (0, columns), value=self._pad)

    def _stream(self) -> None:
        """Hands on every column that is now complete."""
        if self._on_token is None:
            return
        running = [length for length, alive in zip(self._lengths, self.active.tolist(), strict=True) if alive]
        ready = min(running, default=max(self._lengths))
        while self._streamed < ready:
            self._on_token(self._ids[:, self._streamed].clone())
            self._streamed += 1

    def sequences(self) -> Int[Tensor, "batch seq"]:
        """All committed tokens, padded on the right."""
        return self._ids[:, : max(self._lengths)].clone()

    @property
    def temperature(self) -> float:
        """The request's temperature; 0 when it is greedy."""
        return self._temperature if self.do_sample else 0.0

    def draft_context(self, target: Target) -> DraftContext:
        """Committed tokens so far, for a drafter that starts now."""
        ids = self.sequences()
        lengths = torch.tensor(self._lengths, device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        if self._prompt_mask is not None:
            mask[:, : self._prompt] &= self._prompt_mask[:, : self._prompt]
        return DraftContext(
            tokens=ids,
            mask=mask,
            vocab_size=target.vocab_size,
            temperature=self.temperature,
            features=target.take_features(ids.shape[1]) if isinstance(target, ModelTarget) else None,
            open_model=open_model,
            generator=self._generator,
            rows=target.committed_rows if isinstance(target, ModelTarget) else None,
        )


def _all_of(items: Iterable[object], types: tuple[type, ...]) -> bool:
    return all(type(item) in types for item in items)
