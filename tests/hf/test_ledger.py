"""The ledger's own laws: what may be served row by row, and that one committed token is one step of plain decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import LogitsProcessorList, StoppingCriteriaList, logits_process, stopping_criteria

from specdec.errors import UnsupportedError
from specdec.hf import ledger
from specdec.hf.ledger import TokenLedger
from specdec.hf.records import Records
from specdec.testing.tokenizer import tiny_tokenizer
from specdec.types import DraftTree, TargetOutput
from tests.trees.random_trees import caught

ROWS, SEQ, VOCAB = 3, 8, 97
EOS = torch.tensor([3, 4])
PROMPT = torch.tensor([[5, 6, 7, 5], [0, 0, 8, 9], [9, 9, 9, 9]])

PROCESSORS: list[Any] = [
    logits_process.TemperatureLogitsWarper(0.7),
    logits_process.TopKLogitsWarper(5),
    logits_process.TopPLogitsWarper(0.6),
    logits_process.TopHLogitsWarper(0.4),
    logits_process.MinPLogitsWarper(0.1),
    logits_process.TypicalLogitsWarper(0.6),
    logits_process.EpsilonLogitsWarper(0.02),
    logits_process.EtaLogitsWarper(0.02),
    logits_process.LogitNormalization(),
    logits_process.InfNanRemoveLogitsProcessor(),
    logits_process.SuppressTokensLogitsProcessor([7, 8]),
    logits_process.MinLengthLogitsProcessor(SEQ + 1, EOS),
    logits_process.MinNewTokensLengthLogitsProcessor(4, 5, EOS),
    logits_process.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([0, 2, 0])),
    logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.5, PROMPT),
    logits_process.NoRepeatNGramLogitsProcessor(2),
    logits_process.EncoderNoRepeatNGramLogitsProcessor(2, PROMPT),
    logits_process.SequenceBiasLogitsProcessor([[[5, 6], 3.0], [[7], -2.0]]),
    logits_process.NoBadWordsLogitsProcessor([[5, 6], [7]]),
    logits_process.ForcedBOSTokenLogitsProcessor(3),
    logits_process.ForcedEOSTokenLogitsProcessor(SEQ + 1, 3),
    logits_process.ExponentialDecayLengthPenalty((1, 1.5), 3, 4),
    logits_process.SuppressTokensAtBeginLogitsProcessor([7], SEQ),
    logits_process.WatermarkLogitsProcessor(VOCAB, "cpu", bias=2.0),
]
CRITERIA: list[Any] = [
    stopping_criteria.MaxLengthCriteria(SEQ),
    stopping_criteria.MaxTimeCriteria(1e9),
    stopping_criteria.StopStringCriteria(tiny_tokenizer(), ["ab", "c"]),
    stopping_criteria.EosTokenCriteria(EOS),
]

batches = st.tuples(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(0, ROWS - 1), st.booleans())


def sample(seed: int, small: bool) -> tuple[Tensor, Tensor]:
    """Ids (few different ones, so that repetitions occur) and scores."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 12 if small else VOCAB, (ROWS, SEQ), generator=rng)
    ids[:, :4] = PROMPT
    return ids, 3 * torch.randn(ROWS, VOCAB, generator=rng)


def test_every_row_wise_type_is_tried_here():
    assert {type(item) for item in PROCESSORS} == set(ledger.ROW_WISE)
    assert {type(item) for item in CRITERIA} == set(ledger.ROW_WISE_CRITERIA)


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda item: type(item).__name__)
@given(batches)
def test_row_wise_processors_look_at_their_row_alone_and_remember_nothing(processor, drawn):
    seed, other, row, small = drawn
    ids, scores = sample(seed, small)
    strange_ids, strange_scores = sample(other, not small)
    strange_ids[row], strange_scores[row] = ids[row], scores[row]
    first = processor(ids.clone(), scores.clone())
    assert torch.equal(processor(strange_ids, strange_scores.clone())[row], first[row])
    assert torch.equal(processor(ids.clone(), scores.clone()), first)
    if type(processor) in ledger.PREFIX_FREE:
        alone = processor(strange_ids[:1, :2], scores[row : row + 1].clone())
        assert torch.equal(alone[0], first[row])


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda item: type(item).__name__)
@given(batches)
def test_row_wise_criteria_look_at_their_row_alone_and_remember_nothing(criterion, drawn):
    seed, other, row, small = drawn
    ids, _ = sample(seed, small)
    strange, _ = sample(other, not small)
    strange[row] = ids[row]
    first = criterion(ids, None)
    assert bool(criterion(strange, None)[row]) == bool(first[row])
    assert torch.equal(criterion(ids, None), first)


def test_a_processor_with_a_memory_is_noticed():
    processor = logits_process.SynthIDTextWatermarkLogitsProcessor(3, [5, 9, 2], 64, 0, 16, "cpu")
    ids, scores = sample(0, small=True)
    first = processor(ids, scores)
    assert not torch.equal(processor(ids, scores), first)


def make(processors: list[Any], *, rows: int = 2, limit: int = 300, eos: bool = True, **options: Any) -> TokenLedger:
    criteria = [stopping_criteria.MaxLengthCriteria(limit), *options.pop("criteria", [])]
    if eos:
        criteria.append(stopping_criteria.EosTokenCriteria(EOS))
    return TokenLedger(
        PROMPT[:rows],
        prompt_mask=None,
        processors=LogitsProcessorList(processors),
        criteria=StoppingCriteriaList(criteria),
        max_length=limit,
        do_sample=False,
        temperature=1.0,
        pad_token=options.pop("pad_token", 0),
        records=Records(batch=rows),
        **options,
    )


def both(*values: bool) -> Tensor:
    return torch.tensor(values)


def test_rows_advance_alone_and_stop_alone():
    book = make([])
    assert not book.lockstep
    assert book.commit(torch.tensor([10, 11]), both(True, True)).tolist() == [True, True]
    assert book.commit(torch.tensor([12, 3]), both(False, True)).tolist() == [False, False]
    assert book.active.tolist() == [True, False]
    assert book.roots.tolist() == [10, 3]
    assert book.remaining.tolist() == [300 - 5, 0]
    assert book.sequences().tolist() == [[5, 6, 7, 5, 10, 0], [0, 0, 8, 9, 11, 3]]


def test_without_eos_a_row_at_the_limit_waits_for_the_others_without_growing():
    """Plain generate ends all rows at the same length; a row that got there first must not go beyond."""
    book = make([], limit=6, eos=False)
    for rows in (both(True, True), both(True, False)):
        book.commit(torch.tensor([10, 11]), rows)
    assert book.active.tolist() == [False, True]
    assert book.remaining.tolist() == [0, 1]
    book.commit(torch.tensor([10, 11]), both(False, True))
    assert book.active.tolist() == [False, False]
    assert book.sequences().shape == (2, 6)


@pytest.mark.parametrize(
    ("processors", "criteria", "eos", "lockstep"),
    [
        ([], [], True, False),
        ([], [], False, False),
        ([logits_process.TopKLogitsWarper(3)], [], True, False),
        ([lambda ids, scores: scores], [], True, True),  # noqa: ARG005 - transformers' signature
        ([], [CRITERIA[2]], True, False),
        ([], [CRITERIA[2]], False, True),  # rows run on until the last is done
        ([], [CRITERIA[1]], False, True),
        ([], [lambda ids, scores: ids[:, -1] == 9], True, True),  # noqa: ARG005 - transformers' signature
    ],
)
def test_when_rows_must_advance_together(processors, criteria, eos, lockstep):
    assert make(processors, criteria=criteria, eos=eos).lockstep == lockstep
    assert not make(processors, criteria=criteria, eos=eos, rows=1).lockstep


def test_rows_that_stopped_are_padded_in_lockstep():
    book = make([lambda ids, scores: scores])  # noqa: ARG005 - transformers' signature
    book.commit(torch.tensor([3, 11]), both(True, True))
    book.commit(torch.tensor([12, 13]), both(False, True))
    assert book.sequences().tolist() == [[5, 6, 7, 5, 3, 0], [0, 0, 8, 9, 11, 13]]
    assert book.active.tolist() == [False, True]


def test_an_unknown_padding_id_is_needed_only_where_rows_end_alone():
    with pytest.raises(UnsupportedError, match="pad_token_id"):
        make([], pad_token=None)
    make([], pad_token=None, eos=False)
    make([], pad_token=None, rows=1)


@pytest.mark.parametrize("at_once", [False, True])
def test_long_texts_outgrow_the_first_buffer(at_once):
    book, text = make([], rows=1, limit=2 * ledger.SPARE), [10 + token % 50 for token in range(ledger.SPARE + 100)]
    for first in range(0, len(text), 10):
        part = text[first : first + 10]
        if at_once:
            book.extend([part], [len(part)])
        else:
            for token in part:
                book.commit(torch.tensor([token]), both(True))
    assert book.sequences()[0, 4:].tolist() == text


def test_streaming_waits_for_the_slowest_running_row():
    columns: list[list[int]] = []
    book = make([], on_token=lambda column: columns.append(column.tolist()))
    book.commit(torch.tensor([10, 11]), both(True, True))
    book.commit(torch.tensor([12, 0]), both(True, False))
    book.commit(torch.tensor([13, 0]), both(True, False))
    assert columns == [[10, 11]]
    book.commit(torch.tensor([0, 4]), both(False, True))  # row 1 ends: it is padded from here on
    assert columns == [[10, 11], [12, 4], [13, 0]]


@given(st.lists(st.sampled_from(range(len(PROCESSORS))), min_size=1, max_size=3, unique=True), st.integers(0, 2**32))
def test_laws_of_a_tree_are_the_laws_met_on_each_walk_down_it(chosen, seed):
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, -1, -1], [-1, 0, 1, 2, 2]])
    rng = torch.Generator().manual_seed(seed)
    tree = DraftTree(
        tokens=torch.randint(5, 9, (ROWS, 5), generator=rng),
        parents=parents,
        num_nodes=torch.tensor([5, 3, 5]),
        scores=torch.zeros(ROWS, 5),
    )
    output = TargetOutput(logits=3 * torch.randn(ROWS, 5, VOCAB, generator=rng))

    def fresh() -> TokenLedger:
        book = make([PROCESSORS[index] for index in chosen], rows=ROWS)
        book.commit(torch.tensor([9, 9, 9]), both(True, False, True))  # rows of different lengths
        return book

    laws = fresh().laws(output, tree)
    for row in range(ROWS):
        for leaf in range(int(tree.num_nodes[row])):
            path = [leaf]
            while path[0] > 0:
                path.insert(0, int(parents[row, path[0]]))
            book, rows = fresh(), torch.arange(ROWS) == row
            for node in path:
                if node:
                    book.commit(tree.tokens[:, node], rows)
                law = book.law(output, torch.full((ROWS,), node), rows)
            assert torch.equal(law.probs[row], laws[row, leaf])


Spans = list[tuple[list[list[int]], list[int]]]
"""Tokens of each row and how many of them it takes, round by round."""

spans = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(3, 12), min_size=4, max_size=4), min_size=ROWS, max_size=ROWS),
        st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS),
    ),
    max_size=5,
)


def extend_is_commit_by_commit(change: Callable[[TokenLedger], None], rounds: Spans, extra: int, limit: int) -> None:
    streamed: tuple[list[list[int]], list[list[int]]] = ([], [])
    at_once, one_by_one = (
        make([], rows=ROWS, limit=limit, criteria=[[], [CRITERIA[2]], [CRITERIA[1]]][extra], on_token=told.append)
        for told in streamed
    )
    change(at_once)
    for tokens, counts in rounds:
        taken = [0] * ROWS
        for step in range(max(counts)):
            rows = one_by_one.active & torch.tensor([count > step for count in counts])
            one_by_one.commit(torch.tensor([row[step] for row in tokens]), rows)
            taken = [before + took for before, took in zip(taken, rows.tolist(), strict=True)]
        assert at_once.extend(tokens, counts) == taken
        assert torch.equal(at_once.active, one_by_one.active)
        assert torch.equal(at_once.remaining, one_by_one.remaining)
        assert torch.equal(at_once.sequences(), one_by_one.sequences())
        assert [column.tolist() for column in streamed[0]] == [column.tolist() for column in streamed[1]]


@given(spans, st.integers(0, 2), st.sampled_from([5, 8, 300]))
def test_a_round_committed_at_once_is_the_round_token_by_token(rounds, extra, limit):
    extend_is_commit_by_commit(lambda _: None, rounds, extra, limit)


@pytest.mark.parametrize("ends", [(frozenset({3}), 300), (frozenset({3, 4}), 9)], ids=["stop token", "length"])
def test_a_round_committed_beyond_a_stop_is_noticed(ends):
    def forget(book: TokenLedger) -> None:
        book._ends = ends

    caught(extend_is_commit_by_commit, forget, rounds=spans, extra=st.just(0), limit=st.just(8))


def test_who_is_asked_token_by_token():
    """Where a criterion may look at anything, warns on the way, or tokens are recorded."""
    assert make([])._ends == (frozenset({3, 4}), 300)
    assert make([], eos=False, rows=1)._ends == (frozenset(), 300)
    assert make([], criteria=[CRITERIA[1]])._ends is None
    assert make([], criteria=[stopping_criteria.MaxLengthCriteria(20, max_position_embeddings=19)])._ends is None
    assert make([], criteria=[stopping_criteria.MaxLengthCriteria(20, max_position_embeddings=20)])._ends is not None
