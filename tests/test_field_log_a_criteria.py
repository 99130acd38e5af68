"""Field log, class (a): stopping criteria of the caller's own are asked once per committed token, as in plain generate.

The measure is always the log of calls that plain generate makes: the same prefixes, in the same order, as often.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import stopping_criteria

from specdec import trees
from specdec.hf.ledger import TokenLedger
from specdec.testing.tokenizer import tiny_tokenizer
from tests import helpers

START = helpers.START["one"]
SHAPES = {"chain": (trees.Chain(4), 0), "tree": (trees.BestFirst(nodes=14, branch=2, depth=3), 1)}


class Listener(StoppingCriteria):
    """Remembers every call; stops the rows that `rule` names, given the number of the call and the ids."""

    def __init__(self, rule: Callable[[int, Tensor], Tensor] | None = None) -> None:
        self.prefixes: list[list[list[int]]] = []
        self.scores: list[tuple[Tensor, ...] | None] = []
        self.rule = rule

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.prefixes.append(input_ids.tolist())
        self.scores.append(scores)
        if self.rule is None:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)
        return self.rule(len(self.prefixes), input_ids)


def after(*calls: int) -> Callable[[int, Tensor], Tensor]:
    """Stops row r from call number `calls[r]` on: a criterion that counts."""
    return lambda call, ids: torch.tensor([call >= calls[row] for row in range(ids.shape[0])])


def compare(
    make: Callable[[], StoppingCriteria],
    *,
    prompts: str = "one",
    shape: str = "chain",
    all_kinds: bool = True,
    **request: Any,
) -> tuple[Any, Any]:
    """Runs both ways, each with a criterion of its own; returns the two after comparing tokens and calls."""
    tree, rank = SHAPES[shape]
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": 24, **request}
    unstopped = helpers.text(prompts, 24)
    theirs, ours = make(), make()
    expected = helpers.plain(helpers.model(), **request, stopping_criteria=[theirs])
    drafter = helpers.oracle(unstopped, in_step=True, rank=rank)
    run = helpers.speculate(helpers.model(), drafter, tree, **request, stopping_criteria=[ours])
    if isinstance(expected, dict):
        assert run.output.sequences.tolist() == expected.sequences.tolist()
    else:
        assert run.output.tolist() == expected.tolist()
    assert getattr(ours, "prefixes", None) == getattr(theirs, "prefixes", None)
    if all_kinds:
        assert run.kinds == helpers.ALL_KINDS
    return theirs, ours


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a7_a_criterion_is_asked_once_per_token_with_the_exact_prefix(prompts, shape):
    """Criteria were asked once per block, so those that look at the last token missed it."""
    theirs, _ = compare(Listener, prompts=prompts, shape=shape)
    assert len(theirs.prefixes) == 24


@pytest.mark.parametrize("stop", [1, 2, 3, 7, 13])
@pytest.mark.parametrize("shape", SHAPES)
def test_a7_a_counting_criterion_stops_at_its_count(stop, shape):
    """A criterion with a count of its own counted blocks."""
    theirs, _ = compare(lambda: Listener(after(stop)), shape=shape, all_kinds=False)
    assert len(theirs.prefixes) == stop


@pytest.mark.parametrize("eos", [None, 96])
def test_a7_rows_of_a_batch_stop_as_in_plain_generate(eos):
    """With an EOS token rows end alone and are padded; without one they run on until the last is done."""
    compare(lambda: Listener(after(3, 14, 7, 19)), prompts="ragged", eos_token_id=eos, all_kinds=False)


def test_a7_a_criterion_sees_padding_after_rows_that_met_eos():
    """Rows that had ended were shown with stale or drafted tokens."""
    new = helpers.text("ragged", 24)[:, -24:]
    compare(Listener, prompts="ragged", eos_token_id=[int(new[0, 4]), int(new[2, 1])], all_kinds=False)


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_a7_a_criterion_that_reads_scores_gets_those_of_the_committed_tokens(prompts):
    """Scores were None, missing, or those of drafted tokens, inside a block."""
    details = {"return_dict_in_generate": True, "output_scores": True}
    theirs, ours = compare(Listener, prompts=prompts, **details)
    for expected, given in zip(theirs.scores, ours.scores, strict=True):
        assert len(given) == len(expected)
        assert torch.equal(given[-1], expected[-1])

    class Unsure(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return scores[-1].softmax(-1).max(-1).values < 0.2

    compare(Unsure, prompts=prompts, all_kinds=False, **details)


def test_a7_without_output_scores_a_criterion_gets_none():
    """Something else than None told a criterion that scores had been asked for."""
    theirs, ours = compare(Listener)
    assert ours.scores == theirs.scores == [None] * 24


def test_a7_a_subclass_of_a_known_criterion_is_not_taken_for_it():
    """A subclass with a state of its own was served like its row-wise parent: once per row and length."""

    class CountingEos(EosTokenCriteria):
        def __init__(self) -> None:
            super().__init__(96)
            self.prefixes: list[list[list[int]]] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.prefixes.append(input_ids.tolist())
            return super().__call__(input_ids, scores, **kwargs) | (len(self.prefixes) >= 9)

    compare(CountingEos, prompts="ragged", all_kinds=False)


def test_a7_the_caller_s_own_limit_replaces_that_of_the_config():
    """Of two limits the wrong one bounded the block."""
    for limit in (11, 17, 35):
        compare(lambda limit=limit: MaxLengthCriteria(limit), max_new_tokens=16, all_kinds=False)


def test_a7_the_caller_s_own_stop_strings_replace_those_of_the_argument():
    """Both the caller's criterion and the one made from the argument stopped the text."""
    tokenizer = tiny_tokenizer()
    written = tokenizer.decode(helpers.text("one", 24)[0, START:])
    late, early = written[9:11], written[2:4]
    own = StopStringCriteria(tokenizer, late)
    compare(lambda: own, stop_strings=early, tokenizer=tokenizer, all_kinds=False)


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_max_time_is_checked_after_every_token(monkeypatch, prompts):
    """A time limit inside a block was seen at its end. The clock here ticks once per look."""

    class Clock:
        def __init__(self) -> None:
            self.ticks = 0

        def time(self) -> float:
            self.ticks += 1
            return float(self.ticks)

    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": 24}
    unstopped = helpers.text(prompts, 24)
    monkeypatch.setattr(stopping_criteria, "time", Clock())
    expected = helpers.plain(helpers.model(), **request, max_time=9.5)
    monkeypatch.setattr(stopping_criteria, "time", Clock())
    drafter = helpers.oracle(unstopped, in_step=True)
    run = helpers.speculate(helpers.model(), drafter, trees.Chain(4), **request, max_time=9.5)
    assert run.output.tolist() == expected.tolist()
    assert expected.shape[1] == request["input_ids"].shape[1] + 10


def test_criteria_asked_too_rarely_are_noticed(monkeypatch):
    """The mutant: criteria are asked after every third token."""
    stop = TokenLedger._stop

    def seldom(self: TokenLedger, columns: list[int]) -> None:
        if max(self._lengths) % 3 == 0:
            stop(self, columns)

    monkeypatch.setattr(TokenLedger, "_stop", seldom)
    with pytest.raises(AssertionError):
        compare(Listener)
    with pytest.raises(AssertionError):
        compare(lambda: Listener(after(7)), all_kinds=False)
