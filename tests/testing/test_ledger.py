import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import DraftTree, TargetOutput
from specdec.errors import ShapeError
from specdec.hf import open_model
from specdec.protocols import Ledger
from specdec.testing import PlainLedger, TableTarget

PROMPT = torch.tensor([[0, 5], [7, 8]])
ALL = torch.tensor([True, True])


def output(*rows: list[float]) -> TargetOutput:
    """Logits of one node per row."""
    return TargetOutput(logits=torch.tensor(rows)[:, None])


def test_it_fits_its_seam():
    assert isinstance(PlainLedger(PROMPT, max_new_tokens=1), Ledger)


def test_tokens_are_committed_row_by_row():
    ledger = PlainLedger(PROMPT, max_new_tokens=3)
    assert ledger.roots.tolist() == [5, 8]
    assert ledger.commit(torch.tensor([1, 2]), ALL).tolist() == [True, True]
    assert ledger.commit(torch.tensor([3, 9]), torch.tensor([True, False])).tolist() == [True, False]
    assert ledger.roots.tolist() == [3, 2]
    assert ledger.remaining.tolist() == [1, 2]
    assert ledger.rows() == [[0, 5, 1, 3], [7, 8, 2]]


def test_a_row_stops_at_its_limit():
    ledger = PlainLedger(PROMPT, max_new_tokens=1)
    assert ledger.commit(torch.tensor([1, 2]), torch.tensor([False, True])).tolist() == [False, False]
    assert ledger.active.tolist() == [True, False]
    assert ledger.remaining.tolist() == [1, 0]
    assert ledger.rows() == [[0, 5], [7, 8, 2]]


def test_a_row_stops_after_any_end_token_and_keeps_it():
    ledger = PlainLedger(PROMPT, max_new_tokens=5, eos_token_ids=[4, 6])
    assert ledger.commit(torch.tensor([6, 1]), ALL).tolist() == [False, True]
    # A token of a row that does not commit ends nothing.
    with pytest.raises(ShapeError, match="only active rows"):
        ledger.commit(torch.tensor([1, 1]), ALL)
    assert ledger.commit(torch.tensor([4, 4]), torch.tensor([False, True])).tolist() == [False, False]
    assert ledger.remaining.tolist() == [0, 0]
    assert ledger.rows() == [[0, 5, 6], [7, 8, 1, 4]]


def test_an_end_token_of_another_row_ends_nothing():
    ledger = PlainLedger(PROMPT, max_new_tokens=5, eos_token_ids=[4])
    ledger.commit(torch.tensor([4, 1]), torch.tensor([False, True]))
    assert ledger.active.tolist() == [True, True]


def test_the_law_is_greedy_or_tempered():
    logits = [[0.0, 1.0], [2.0, 0.0]]
    node = torch.zeros(2, dtype=torch.int64)
    greedy = PlainLedger(PROMPT, max_new_tokens=1, temperature=0.5).law(output(*logits), node, ALL)
    assert greedy.greedy
    assert torch.equal(greedy.scores, torch.tensor(logits))
    drawn = PlainLedger(PROMPT, max_new_tokens=1, do_sample=True, temperature=0.5).law(output(*logits), node, ALL)
    assert not drawn.greedy
    assert torch.allclose(drawn.probs, (torch.tensor(logits) * 2).softmax(-1))


@given(st.booleans(), st.floats(0.25, 4.0))
def test_the_laws_of_a_tree_are_the_laws_of_its_nodes(do_sample, temperature):
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ledger = PlainLedger(PROMPT, max_new_tokens=1, do_sample=do_sample, temperature=temperature)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 1, 2]] * 2), torch.tensor([4, 4]), torch.zeros(2, 4))
    laws = ledger.laws(TargetOutput(logits=logits), tree)
    for node in range(4):
        index = torch.tensor([node, node])
        assert torch.equal(laws[:, node], ledger.law(TargetOutput(logits=logits), index, ALL).probs)


def test_half_precision_logits_are_widened():
    half = TargetOutput(logits=torch.zeros(2, 1, 5, dtype=torch.bfloat16))
    assert PlainLedger(PROMPT, max_new_tokens=1).law(half, torch.tensor([0, 0]), ALL).scores.dtype == torch.float32


def test_a_drafter_is_told_the_text_without_padding():
    mask = torch.tensor([[False, True], [True, True]])
    chance = torch.Generator()
    ledger = PlainLedger(
        PROMPT, max_new_tokens=4, mask=mask, do_sample=True, temperature=0.7, open_model=open_model, generator=chance
    )
    ledger.commit(torch.tensor([1, 2]), ALL)
    ledger.commit(torch.tensor([3, 0]), torch.tensor([True, False]))
    context = ledger.draft_context(TableTarget(torch.eye(9), torch.tensor([[0], [0]])))
    assert context.tokens[0, context.mask[0]].tolist() == [5, 1, 3]
    assert context.tokens[1, context.mask[1]].tolist() == [7, 8, 2]
    assert ledger.rows() == [[5, 1, 3], [7, 8, 2]]
    assert (context.vocab_size, context.temperature) == (9, 0.7)
    assert context.open_model is open_model
    assert context.generator is chance
    greedy = PlainLedger(PROMPT, max_new_tokens=1).draft_context(TableTarget(torch.eye(9), PROMPT))
    assert greedy.temperature == 0.0


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"max_new_tokens": 1, "temperature": 0.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ShapeError, match="got"):
        PlainLedger(PROMPT, **options)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ShapeError, match="at least one token"):
        PlainLedger(PROMPT[:, :0], max_new_tokens=1)


def test_the_prompt_is_left_alone():
    prompt = PROMPT.clone()
    ledger = PlainLedger(prompt, max_new_tokens=2)
    ledger.commit(torch.tensor([1, 2]), ALL)
    assert torch.equal(prompt, PROMPT)
