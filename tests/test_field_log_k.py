"""Field log, classes (k) and (j), what concerns `generate`: streaming, statistics, switches, warnings.

Each test is named after its row of the log.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, control, drafters, trees
from specdec.protocols import DraftContext
from specdec.testing import OracleDrafter
from specdec.types import Candidates, Frontier
from tests import helpers

NEW = 20
START = helpers.START["one"]
SHAPES = {"chain": (trees.Chain(4), 0), "tree": (trees.BestFirst(nodes=14, branch=2, depth=3), 1)}


def run(prompts: str, shape: str = "chain", **request: Any) -> helpers.Run:
    tree, rank = SHAPES[shape]
    drafter = helpers.oracle(helpers.text(prompts, NEW + 4), rank=rank)
    return helpers.speculate(
        helpers.model(), drafter, tree, **helpers.batch(helpers.PROMPTS[prompts]), max_new_tokens=NEW, **request
    )


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_k1_streamed_tokens_are_the_sequences(prompts, shape):
    """A consumer that expected one token at a time lost the rest of each burst, or the tail."""
    eos = int(helpers.text(prompts, NEW)[-1, START + 8])
    tape = helpers.Tape()
    done = run(prompts, shape, streamer=tape, eos_token_id=eos)
    start = helpers.START[prompts]
    assert tape.puts[0].tolist() == helpers.batch(helpers.PROMPTS[prompts])["input_ids"].tolist()
    assert all(put.shape == (len(helpers.PROMPTS[prompts]),) for put in tape.puts[1:])
    assert torch.stack(tape.puts[1:], 1).tolist() == done.output[:, start:].tolist()
    assert tape.ends == 1


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stop", [False, True])
def test_k4_j8_statistics_follow_from_the_rounds(prompts, shape, stop):
    """No acceptance figures per request, or figures of unknown definition: bonus counted or not, tree or chain."""
    new = helpers.text(prompts, NEW)[:, -NEW:]
    done = run(prompts, shape, eos_token_id=[int(new[0, 9]), int(new[-1, 14])] if stop else None)
    stats = done.generator.stats
    assert stats.target_passes == len(done.rounds)
    for row in range(len(helpers.PROMPTS[prompts])):
        counts, took_part = stats.row(row), [r for r in done.rounds if int(r.num_committed[row])]
        assert counts.rounds == len(took_part) == sum(counts.histogram)
        assert counts.drafted == sum(int(r.tree.num_nodes[row]) - 1 for r in took_part)
        assert counts.accepted == sum(int(r.num_accepted[row]) for r in took_part)
        assert counts.accepted == sum(length * times for length, times in enumerate(counts.histogram))
        assert counts.accepted == sum(counts.accepted_by_depth)
        assert counts.new_tokens == counts.rounds + counts.accepted - counts.cut_short
        ended = done.output[row, helpers.START[prompts] :].tolist()
        assert ended[: counts.new_tokens] == new[row, : counts.new_tokens].tolist()
        assert set(ended[counts.new_tokens :]) <= {helpers.PAD}
    assert stats.new_tokens == sum(stats.row(row).new_tokens for row in range(stats.batch))
    assert stats.tokens_per_round == stats.new_tokens / stats.row_rounds
    assert 0 < stats.first_token_seconds < stats.seconds
    assert json.loads(json.dumps(stats.to_dict()))["accepted"] == stats.accepted


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_k5_drafting_can_be_switched_and_sized_per_call(prompts):
    """Drafting was an engine-level option: it could not be turned off or tuned for one request."""
    drafter = OracleDrafter(helpers.text(prompts, NEW), [9])
    generator = SpeculativeGenerator(helpers.model(), drafter, trees.Chain(4))
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, "do_sample": False}
    for budget, calls in ((0, False), (2, True), (None, True), (0, False), (4, True)):
        drafter.calls = 0
        output = generator.generate(**request, num_draft_tokens=budget)
        assert output.tolist() == helpers.text(prompts, NEW).tolist()
        assert (drafter.calls > 0) == calls
        widths = generator.stats.widths
        assert max(widths) == (budget if budget is not None else 4) + 1
        assert generator.stats.drafted > 0 or not calls


def test_k5_without_drafts_a_batch_draws_the_tokens_of_plain_sampling():
    """With drafting off something still differed from the plain path."""
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(5)
    expected = helpers.plain(helpers.model(), **request)
    torch.manual_seed(5)
    generator = SpeculativeGenerator(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(4))
    assert generator.generate(**request, num_draft_tokens=0).tolist() == expected.tolist()


def test_k7_as_many_scores_states_and_weights_as_tokens():
    """A drafter changed how many entries come back, or their shapes (values: tests/hf/test_records.py)."""
    wanted = ["scores", "logits", "hidden_states"]
    request = {f"output_{name}": True for name in wanted}
    expected = helpers.plain(
        helpers.model(), **helpers.batch(helpers.ONE), max_new_tokens=NEW, return_dict_in_generate=True, **request
    )
    ours = run("one", return_dict_in_generate=True, **request).output
    for name in wanted:
        assert len(ours[name]) == len(expected[name]) == NEW
        shapes = [[t.shape for t in entry] for entry in ours[name]]
        assert shapes == [[t.shape for t in entry] for entry in expected[name]]


def test_k8_every_warning_of_the_library_is_known_here():
    """A warning that contradicts what happens: each must have a test that also checks the behaviour.

    The next one is that of the draft model; tests/drafters/{block,feature}/test_rounds.py have that of one that is
    never right, tests/drafters/checkpoints/test_loading.py that of keys that are not understood.
    """
    root = Path(__file__).parents[1] / "specdec"
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"\bwarnings\.warn\(|logg(er|ing)\.warn", path.read_text())
    }
    assert found == {"drafters/_committed.py", "drafters/checkpoints/loading.py", "drafters/draft_model.py"}


def test_k8_a_draft_model_without_positions_says_that_it_stops_and_stops(caplog):
    """The message about the draft model's last position."""
    small = helpers.model("gpt2", max_position_embeddings=START + 6)
    generator = SpeculativeGenerator(helpers.model(), drafters.ModelDrafter(small), trees.Chain(3))
    with caplog.at_level(logging.WARNING):
        output = generator.generate(**helpers.batch(helpers.ONE), max_new_tokens=NEW, do_sample=False)
    assert output.tolist() == helpers.text("one", NEW).tolist()
    assert len([record for record in caplog.records if "stops drafting" in record.message]) == 1
    drafted = generator.stats.widths
    assert drafted[1] > 0 < drafted[4]


def test_j4_every_option_of_the_generator_changes_something():
    """An option was accepted and did nothing."""
    reference = helpers.text("one", NEW)
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "do_sample": False}

    def passes(**options: Any) -> int:
        call = {"num_draft_tokens": options.pop("num_draft_tokens", None)}
        options = {"drafter": OracleDrafter(reference, [9]), "tree": trees.Chain(4), **options}
        generator = SpeculativeGenerator(helpers.model(), **options)
        generator.generate(**request, **call)
        return generator.stats.target_passes

    base = passes()
    assert passes(drafter=OracleDrafter(reference, [0])) > base
    assert passes(tree=trees.Chain(8)) < base
    assert passes(controller=control.Always(1)) > base
    assert passes(num_draft_tokens=2) > base
    wrong = OracleDrafter(reference, [0])
    assert passes(drafter=wrong, verifier=helpers.AcceptEverything()) < passes(drafter=wrong)


def test_j10_the_drafter_starts_after_the_first_token():
    """The drafter's own prefill stood before the first token."""
    tape, started = helpers.Tape(), []

    class Late(OracleDrafter):
        def start(self, context: DraftContext) -> None:
            started.append(len(tape.tokens))
            super().start(context)

    drafter = Late(helpers.text("one", NEW), [9])
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "streamer": tape}
    helpers.speculate(helpers.model(), drafter, trees.Chain(4), **request)
    assert started == [1]


def test_b7_rows_that_ended_are_not_drafted_for():
    """Class (b), but a matter of statistics too: a finished row got drafts, and its figures went on counting."""
    new = helpers.text("ragged", NEW)[:, -NEW:]
    asked: list[list[bool]] = []

    class Listener(OracleDrafter):
        def children(self, frontier: Frontier, count: int) -> Candidates:
            asked.append(frontier.valid.any(-1).tolist())
            return super().children(frontier, count)

    drafter = Listener(helpers.text("ragged", NEW), [9])
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW, "eos_token_id": int(new[2, 0])}
    done = helpers.speculate(helpers.model(), drafter, trees.Chain(4), **request)
    assert done.generator.stats.row(2).new_tokens == 1
    assert not any(valid[2] for valid in asked)
    assert asked


class Chatty:
    """A drafter that would propose ids outside the vocabulary where it has nothing to say."""

    feature_layers: tuple[int, ...] = ()

    def start(self, context: DraftContext) -> None:
        self.vocab = context.vocab_size

    def children(self, frontier: Frontier, count: int) -> Candidates:
        batch, width = frontier.tokens.shape
        tokens = torch.full((batch, width, min(count, 2)), 10**6)
        return Candidates(tokens, torch.full(tokens.shape, -torch.inf))

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        assert int(tokens.max()) < self.vocab

    def finish(self) -> None:
        pass


@pytest.mark.parametrize(
    "tree", [trees.Chain(4), trees.BestFirst(nodes=6), trees.Fixed([(0,), (1,), (0, 0)])], ids=repr
)
def test_b5_an_absent_proposal_is_never_used_as_an_id(tree):
    """Placeholder ids reached an embedding or a gather."""
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    with helpers.forwards(helpers.model()) as calls:
        done = helpers.speculate(helpers.model(), Chatty(), tree, **request)
    assert done.output.tolist() == helpers.text("ragged", NEW).tolist()
    assert all(int(call["input_ids"].min()) >= 0 and int(call["input_ids"].max()) < 97 for call in calls)
