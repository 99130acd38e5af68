"""A recorder changes nothing that is drafted or said, and remembers where each round began."""

from itertools import pairwise

import pytest
import torch

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.errors import SpecdecError, UnsupportedError
from specdec.evaluate import Recorder, replay
from specdec.protocols import DraftContext, Drafter, TreeBuilder
from specdec.testing import tiny_model
from specdec.types import Candidates, Frontier
from tests import helpers
from tests.drafters.block.test_rounds import drafter_of
from tests.drafters.draft_models import like
from tests.evaluate import runs
from tests.evaluate.runs import Scripted, record

TREE = trees.BestFirst(nodes=6, branch=2)


def model_drafter() -> drafters.ModelDrafter:
    return drafters.ModelDrafter(like("llama", noise=0.3))


def test_it_takes_both_places() -> None:
    recorder = Recorder(model_drafter(), TREE)
    assert isinstance(recorder, Drafter)
    assert isinstance(recorder, TreeBuilder)
    assert (recorder.nodes, recorder.sampled, recorder.chain) == (6, False, False)
    assert Recorder(model_drafter(), trees.Chain(3)).chain
    assert (
        Recorder(drafter_of("llama", "dflash2"), TREE).feature_layers == drafter_of("llama", "dflash2").feature_layers
    )


@pytest.mark.parametrize("also", [(), (trees.Chain(8), trees.BestFirst(nodes=9, temperature=2.0))])
def test_the_run_is_the_one_without_a_recorder(also: tuple[TreeBuilder, ...]) -> None:
    plain = helpers.Recorder()
    generator = SpeculativeGenerator(helpers.model(), model_drafter(), TREE, controller=plain)
    ids = generator.generate(**helpers.batch(helpers.FOUR), max_new_tokens=30, do_sample=False, pad_token_id=0)
    live = record(helpers.model(), model_drafter(), TREE, helpers.FOUR, max_new_tokens=30, options={"also": also})
    assert runs.outcome(live.rounds) == runs.outcome(plain.rounds[1:])
    assert [runs.nodes(round.tree) for round in live.rounds] == [runs.nodes(round.tree) for round in plain.rounds[1:]]
    request = live.recording.requests[0]
    for row, prompt in enumerate(helpers.FOUR):
        assert [token for token in request.texts[row].tolist() if token >= 0] == prompt + ids[row, -30:].tolist()


def test_rounds_begin_where_the_one_before_ended() -> None:
    live = record(helpers.model(), model_drafter(), TREE, helpers.FOUR, controller=Scripted([0, 0, 6, 2, 0]))
    request = live.recording.requests[0]
    for round, seen in zip(request.rounds, live.rounds, strict=True):
        assert request.roots(round).tolist() == seen.tree.tokens[:, 0].tolist()
        assert round.committed.tolist() == seen.num_committed.tolist()
        assert round.budget == seen.budget
        assert bool(round.answers) == (seen.budget > 0)
    for before, after in pairwise(request.rounds):
        assert (before.positions + before.committed).tolist() == after.positions.tolist()
    assert request.rounds[0].positions.tolist() == [len(prompt) + 2 for prompt in helpers.FOUR]
    ends = (request.texts >= 0).sum(-1) - 1
    assert (request.rounds[-1].positions + request.rounds[-1].committed).tolist() == ends.tolist()


def test_answers_are_asked_for_at_least_top_proposals_and_never_more_than_there_are_tokens() -> None:
    for top, asked in ((1, 2), (12, 12), (500, 97)):
        live = record(helpers.model(), model_drafter(), TREE, helpers.ONE, max_new_tokens=8, options={"top": top})
        answers = live.recording.rounds[0].answers
        assert [answer.asked for answer in answers] == [asked] * len(answers)
        assert {answer.candidates.tokens.shape[2] for answer in answers} == {asked}
        assert {answer.candidates.probs for answer in answers} == {None}


def test_a_block_drafter_tells_whether_its_answers_depend_on_the_path() -> None:
    marginal, lattice = drafter_of("llama", "dflash_flat"), drafter_of("llama", "dspark_vanilla")
    assert Recorder(marginal, TREE).marginal
    assert not Recorder(lattice, TREE).marginal
    assert not Recorder(drafters.BlockDrafter(lattice.model, least_confidence=0.1), TREE).marginal
    assert not Recorder(model_drafter(), TREE).marginal
    assert Recorder(model_drafter(), TREE, marginal=True).marginal


def test_requests_are_recorded_one_after_the_other() -> None:
    recorder = Recorder(model_drafter(), TREE)
    first = record(helpers.model(), recorder.drafter, TREE, helpers.FOUR, recorder=recorder)
    second = record(helpers.model(), recorder.drafter, TREE, helpers.ONE, recorder=recorder)
    assert len(recorder.recording.requests) == 2
    assert [round.index for round in replay(recorder.recording, TREE).rounds] == [
        *range(1, len(first.rounds) + 1),
        *range(1, len(second.rounds) + 1),
    ]
    assert runs.outcome(replay(recorder.recording, TREE).rounds) == runs.outcome([*first.rounds, *second.rounds])
    assert repr(recorder.recording) == f"<Recording: 2 requests, {len(first.rounds) + len(second.rounds)} rounds>"
    assert "ModelDrafter" in repr(recorder)


def test_a_request_that_was_left_early_counts_as_far_as_it_went() -> None:
    recorder = Recorder(model_drafter(), TREE)
    rounds = SpeculativeGenerator(helpers.model(), recorder, recorder).rounds(
        **helpers.batch(helpers.ONE), max_new_tokens=40, do_sample=False
    )
    seen = [next(rounds) for _ in range(5)]
    assert recorder.recording.requests == ()
    rounds.close()
    assert len(recorder.recording.rounds) == 4
    assert runs.outcome(replay(recorder.recording, TREE).rounds) == runs.outcome(seen[1:])


def test_a_request_without_drafts_is_not_recorded() -> None:
    live = record(helpers.model(), model_drafter(), TREE, helpers.ONE, num_draft_tokens=0)
    assert live.recording.requests == ()
    assert replay(live.recording, TREE).rounds == ()


def test_nothing_is_read_before_the_request_ends() -> None:
    """Tensors of the meta device have no values: whoever reads one fails."""

    class Blind:
        feature_layers: tuple[int, ...] = ()

        def start(self, context: DraftContext) -> None: ...

        def children(self, frontier: Frontier, count: int) -> Candidates:
            shape = (*frontier.tokens.shape, count)
            return Candidates(torch.zeros(shape, dtype=torch.int64, device="meta"), torch.zeros(shape, device="meta"))

        def commit(self, tokens: torch.Tensor, counts: torch.Tensor, features: torch.Tensor | None = None) -> None: ...

        def finish(self) -> None: ...

    recorder = Recorder(Blind(), TREE, also=[trees.Chain(2)])
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    recorder.start(DraftContext(tokens=ids, mask=ids.bool(), vocab_size=50))
    tree = recorder.grow(recorder, ids[:, 0], ids[:, 0], 6, vocab_size=50)
    recorder.commit(tree.tokens, tree.num_nodes)
    assert recorder.recording.requests == ()


# --------------------------------------------------------------------------------------------------------------- errors


def test_one_place_alone_is_refused() -> None:
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 8, "do_sample": False}
    with pytest.raises(SpecdecError, match="pass it as drafter= and as tree="):
        SpeculativeGenerator(helpers.model(), Recorder(model_drafter(), TREE), TREE).generate(**request)
    with pytest.raises(SpecdecError, match="pass it as drafter= and as tree="):
        SpeculativeGenerator(helpers.model(), model_drafter(), Recorder(model_drafter(), TREE)).generate(**request)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="top is a number of proposals"):
        Recorder(model_drafter(), TREE, top=0)
    for recorder in (
        lambda: Recorder(model_drafter(), trees.Sampled()),
        lambda: Recorder(model_drafter(), TREE, also=[trees.Sampled()]),
    ):
        with pytest.raises(UnsupportedError, match=r"<Sampled: .* draws its trees"):
            recorder()


def test_only_the_target_only_rule_is_recorded() -> None:
    recorder = Recorder(drafters.PromptLookupDrafter(), trees.Chain(3))
    with pytest.raises(UnsupportedError, match=r"recorded under verify\.TargetOnly, not Typical"):
        SpeculativeGenerator(tiny_model("llama"), recorder, recorder, verify.Typical())
    SpeculativeGenerator(tiny_model("llama"), recorder, recorder, verify.TargetOnly())
