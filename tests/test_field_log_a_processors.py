"""Field log, class (a): logits processors at every node with that node's own prefix, and the scores they leave.

A round asks the target for several prefixes at once; each processor must see exactly the prefixes of plain decoding.
"""

import inspect
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor
from transformers.generation import logits_process

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.errors import UnsupportedError
from specdec.hf import ledger
from specdec.testing import OracleDrafter
from tests import helpers, processors

NEW = 20
START = helpers.START["one"]
SHAPES = {"chain": (trees.Chain(4), 0), "tree": (trees.BestFirst(nodes=14, branch=2, depth=3), 1)}
ALL = {**processors.ROW_WISE, **processors.STATEFUL}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def unprocessed(prompts: str) -> Tensor:
    return helpers.text(prompts, NEW)


def arguments(name: str, prompts: str) -> dict[str, Any]:
    """A request with one processor, made anew: some keep state."""
    text = unprocessed(prompts)[0, -NEW:].tolist()
    return {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, **ALL[name](text)}


@cache
def reference(name: str, prompts: str) -> Any:
    return helpers.plain(helpers.model(), **arguments(name, prompts), **DETAILS)


def compare(name: str, prompts: str, shape: str) -> tuple[helpers.Run, Any]:
    """Both runs of a request; equal in tokens, scores and logits up to the end of each row."""
    tree, rank = SHAPES[shape]
    expected = reference(name, prompts)
    drafter = helpers.oracle(expected.sequences, in_step=name in processors.STATEFUL, rank=rank)
    run = helpers.speculate(helpers.model(), drafter, tree, **arguments(name, prompts), **DETAILS)
    assert run.output.sequences.tolist() == expected.sequences.tolist()
    ends = [run.generator.stats.row(row).new_tokens for row in range(expected.sequences.shape[0])]
    for ours, theirs in ((run.output.scores, expected.scores), (run.output.logits, expected.logits)):
        assert len(ours) == len(theirs)
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.shape == other.shape
            rows = [row for row, end in enumerate(ends) if index < end]
            torch.testing.assert_close(mine[rows], other[rows], rtol=0, atol=1e-10)
    return run, expected


HARMLESS = {"remove_invalid_values"}
"""Changes nothing in a healthy model."""


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_a9_processors_act_as_in_plain_generate(name, prompts, shape):
    """Penalties were skipped in the verify pass, or reached its first token only."""
    run, expected = compare(name, prompts, shape)
    if name not in HARMLESS:
        assert expected.sequences.tolist() != unprocessed(prompts).tolist(), "the processor changes nothing"
    # Early EOS leaves too few rounds for all kinds.
    needed = helpers.ALL_KINDS if expected.sequences.shape[1] >= unprocessed(prompts).shape[1] else {"full", "zero"}
    assert run.kinds >= needed


def test_a9_forced_bos_is_the_first_new_token_of_a_one_token_prompt():
    """A rule for the first new token was applied in the first round of drafts."""
    request = {"input_ids": torch.tensor([[11]]), "forced_bos_token_id": 41, "max_new_tokens": NEW}
    expected = helpers.plain(helpers.model(), **request)
    run = helpers.speculate(helpers.model(), helpers.oracle(expected), trees.Chain(4), **request)
    helpers.assert_equal(run, expected)
    assert int(expected[0, 1]) == 41


def test_a9_guidance_with_a_negative_prompt():
    """The unconditional branch of classifier-free guidance keeps a cache: one call too many corrupts it."""
    negative = {"negative_prompt_ids": torch.tensor([[9, 9, 3]]), "guidance_scale": 1.5}
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, **negative}
    expected = helpers.plain(helpers.model(), **request)
    run = helpers.speculate(helpers.model(), helpers.oracle(expected), trees.Chain(4), **request)
    helpers.assert_equal(run, expected)


def test_a9_every_processor_of_transformers_is_in_the_table():
    """A processor that nobody thought of would be skipped silently."""
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    known = set(re.findall(r"(\w+)\(", source)) & set(vars(logits_process))
    covered = {"ForcedBOSTokenLogitsProcessor"}  # has a test of its own: it needs a prompt of one token
    generator = SpeculativeGenerator(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(4))
    requests = [arguments(name, "one") for name in ALL]
    base = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, "do_sample": True}
    requests += [{**base, **warper} for warper in processors.WARPERS.values()]
    for request in requests:
        covered |= {
            type(item).__name__ for item in generator._prepare(request.pop("input_ids"), **request).ledger.processors
        }
    assert known - covered - {"LogitsProcessorList"} == set()


@pytest.mark.parametrize("shape", SHAPES)
def test_a10_a_processor_sees_the_committed_tokens_and_accepted_drafts_only(shape):
    """A processor was shown prefixes with rejected drafts, or each prefix several times."""
    tree, rank = SHAPES[shape]
    reference = unprocessed("one")[0].tolist()
    seen: list[list[list[int]]] = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(input_ids.tolist())
            return scores

    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "logits_processor": [Spy()]}
    run = helpers.speculate(helpers.model(), helpers.oracle(unprocessed("one"), rank=rank), tree, **request)
    helpers.assert_equal(run, unprocessed("one"))
    assert seen == [[reference[: START + count]] for count in range(NEW)]


def test_a10_a_stateful_processor_in_a_batch_sees_the_calls_of_plain_generate():
    """Rows of different lengths made a processor with state see every token several times."""
    theirs, ours = processors.Count(), processors.Count()
    new = unprocessed("ragged")[:, -NEW:]
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW, "eos_token_id": [int(new[0, 0]), int(new[1, 1])]}
    expected = helpers.plain(helpers.model(), **request, logits_processor=[theirs])
    drafter = helpers.oracle(expected)
    run = helpers.speculate(helpers.model(), drafter, trees.Chain(4), **request, logits_processor=[ours])
    assert run.output.tolist() == expected.tolist()
    assert ours.prefixes == theirs.prefixes
    assert run.generator.stats.accepted > 0


def test_a10_a_subclass_of_a_known_processor_is_not_taken_for_it():
    """A subclass with state was served like its pure parent: once for each length in the batch."""

    class Counting(logits_process.TopKLogitsWarper):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return super().__call__(input_ids, scores)

    spy = Counting(5)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW, "logits_processor": [spy]}
    run = helpers.speculate(helpers.model(), helpers.oracle(unprocessed("ragged")), trees.Chain(4), **request)
    assert run.output.tolist() == unprocessed("ragged").tolist()
    assert spy.calls == NEW
    with pytest.raises(UnsupportedError, match="Counting"):
        helpers.speculate(
            helpers.model(),
            helpers.oracle(unprocessed("ragged")),
            trees.Chain(4),
            verifier=verify.BlockVerification(),
            **request,
        )


@pytest.mark.parametrize("name", [*processors.STATEFUL])
def test_a10_a_processor_with_state_and_a_verifier_of_whole_trees_is_refused_by_name(name):
    """A processor with state was asked about nodes that are never committed."""
    request, drafter, target = arguments(name, "one"), helpers.oracle(unprocessed("one")), helpers.model()
    with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=r"keep state.*TargetOnly"):
        helpers.speculate(target, drafter, trees.Chain(4), verifier=verify.BlockVerification(), **request)
    assert calls == []


@pytest.mark.parametrize("name", [name for name in processors.ROW_WISE if not name.startswith("watermark")])
def test_a9_verifiers_of_whole_trees_process_every_node_with_its_own_prefix(name):
    """Processors at the nodes of a tree were given the prefix of the root."""
    expected, request = reference(name, "ragged").sequences, arguments(name, "ragged")
    small = trees.Fixed([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    for tree, verifier in ((small, verify.Traversal()), (trees.Chain(3), verify.BlockVerification())):
        run = helpers.speculate(helpers.model(), helpers.oracle(expected), tree, verifier=verifier, **request)
        assert run.output.tolist() == expected.tolist()
        assert run.generator.stats.accepted > 0


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_a22_scores_and_logits_are_those_of_the_committed_tokens(prompts):
    """Returned log-probabilities were shifted, missing, or those of another row of the verify pass."""
    text = unprocessed(prompts)
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, "repetition_penalty": 1.3, **DETAILS}
    expected = helpers.plain(helpers.model(), **request)
    for tree, rank in SHAPES.values():
        run = helpers.speculate(helpers.model(), helpers.oracle(expected.sequences, rank=rank), tree, **request)
        assert run.kinds == helpers.ALL_KINDS
        torch.testing.assert_close(torch.stack(run.output.scores), torch.stack(expected.scores), rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.stack(run.output.logits), torch.stack(expected.logits), rtol=0, atol=1e-10)
        ours, theirs = (
            helpers.model().compute_transition_scores(out.sequences, out.scores) for out in (run.output, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert expected.sequences.tolist() != text.tolist()


def test_a23_a_grammar_holds_for_drafts_and_for_the_bonus_token():
    """A mask was built once a step: later drafts and the bonus token broke the grammar."""
    prefixes: list[list[int]] = []

    def grammar(row: int, ids: Tensor) -> list[int]:
        prefixes.append(ids.tolist())
        return processors.parity(row, ids)

    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW}
    expected = helpers.plain(helpers.model(), **request, prefix_allowed_tokens_fn=processors.parity)
    # The oracle is right where the schedule says so, and otherwise proposes the next id: of the wrong parity.
    run = helpers.speculate(
        helpers.model(), helpers.oracle(expected), trees.Chain(4), **request, prefix_allowed_tokens_fn=grammar
    )
    helpers.assert_equal(run, expected)
    for place in range(START, expected.shape[1]):
        assert int(expected[0, place]) in processors.parity(0, expected[0, :place])
    assert prefixes == [expected[0, : START + count].tolist() for count in range(NEW)]


def test_processors_applied_once_per_round_are_noticed(monkeypatch):
    """The mutant: all nodes of a round are processed with the prefix of its root."""
    law = ledger.TokenLedger.law
    roots: dict[int, list[int]] = {}

    def stale(self: ledger.TokenLedger, output: Any, node: Tensor, rows: Tensor) -> Any:
        lengths = self._lengths
        self._lengths = roots.setdefault(id(output), list(lengths))
        try:
            return law(self, output, node, rows)
        finally:
            self._lengths = lengths

    monkeypatch.setattr(ledger.TokenLedger, "law", stale)
    for name in ("no_repeat_ngram_size", "repetition_penalty", "prefix_allowed_tokens_fn"):
        expected = reference(name, "one").sequences
        drafter = OracleDrafter(expected, [9])
        run = helpers.speculate(helpers.model(), drafter, trees.Chain(4), **arguments(name, "one"))
        assert run.output.tolist() != expected.tolist()
