"""The model drafter: its bookkeeping and its law (field log, classes a, b, c, e).

The strongest check of the bookkeeping: a drafter that runs the target itself must never be wrong, whatever trees are
asked for and whatever rounds came before. `Twin` adds that, before every round, its answers equal those of a drafter
that was started on the committed text just now.
"""

import dataclasses

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from specdec import trees
from specdec.drafters import CombinedDrafter, ModelDrafter, PromptLookupDrafter, VocabularyMap
from specdec.errors import SpecdecError, UnsupportedError
from specdec.protocols import Drafter
from specdec.testing import OracleDrafter, check_drafter, table_model
from specdec.types import Candidates, Frontier
from tests import helpers
from tests.drafters.draft_models import (
    PROMPTS,
    SHAPES,
    Scripted,
    Twin,
    assert_never_wrong,
    context,
    like,
    reference,
    roots,
    run,
)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_drafter_that_runs_the_target_is_never_wrong(family, prompts, shape):
    target = helpers.model(family)
    output, rounds = run(target, ModelDrafter(target), SHAPES[shape], prompts, eos_token_id=[38, 61])
    assert output.tolist() == reference(target, prompts, eos_token_id=[38, 61])
    assert_never_wrong(rounds)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("branches", [(1, 1, 1), (3, 2, 1)])
def test_sampled_drafts_of_the_target_itself_are_always_accepted(prompts, branches):
    target = helpers.model()
    _, rounds = run(
        target,
        ModelDrafter(target),
        trees.Sampled(branches),
        prompts,
        do_sample=True,
        top_k=0,
        temperature=0.8,
        generator=torch.Generator().manual_seed(3),
    )
    assert_never_wrong(rounds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("script", [(4, 0), (0, 0, 0, 4), (1, 0, 8, 2, 0, 0, 3)], ids=str)
def test_c2_rounds_without_drafts_in_between_change_nothing(shape, script):
    """A round with no draft after an accepted one read the wrong slot."""
    target = helpers.model()
    output, rounds = run(
        target, ModelDrafter(target), SHAPES[shape], "ragged", controller=Scripted(*script), max_new_tokens=32
    )
    assert output.tolist() == reference(target, "ragged", 32)
    assert_never_wrong(rounds)
    assert any(int(round.tree.width) == 1 for round in rounds[1:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
@pytest.mark.parametrize("shape", SHAPES)
def test_e10_every_round_drafts_what_a_fresh_drafter_would(family, shape):
    """Drafter context that is stale after acceptance, or its own guesses: no error, only lost speed."""
    target, draft = helpers.model(family), like(family)
    twin = Twin(ModelDrafter(draft), ModelDrafter(draft))
    output, rounds = run(
        target, twin, SHAPES[shape], "ragged", controller=Scripted(4, 4, 0, 2, 8, 0, 0, 4), max_new_tokens=40
    )
    assert output.tolist() == reference(target, "ragged", 40)
    assert {"partial", "empty"} < helpers.kinds(rounds)
    assert twin.compared > 10


def test_e10_a_sampled_tree_under_a_temperature_drafts_what_a_fresh_drafter_would():
    target, draft = helpers.model(), like("llama")
    twin = Twin(ModelDrafter(draft), ModelDrafter(draft))
    _, rounds = run(
        target,
        twin,
        trees.Sampled((3, 2, 1)),
        "ragged",
        do_sample=True,
        temperature=0.7,
        generator=torch.Generator().manual_seed(1),
    )
    assert {"partial", "zero"} <= helpers.kinds(rounds)


class Forgetful(ModelDrafter):
    """A wrong drafter: of the tokens it has not run it keeps the last one."""

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        super().commit(tokens, counts, features)
        for row in self._rows:
            row.waiting = row.waiting[-1:]


class Stubborn(ModelDrafter):
    """A wrong drafter: it keeps what it has run, whether it was accepted or not."""

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        runner = self._started()
        width = sum(level.usable.shape[1] for level in self._levels)
        keep = runner.keep
        everything = torch.arange(width).expand(tokens.shape[0], -1)
        runner.keep = lambda *_: keep(everything, torch.full_like(counts, width))  # type: ignore[method-assign]  # a wrong one
        super().commit(tokens, counts, features)


@pytest.mark.parametrize("mutant", [Forgetful, Stubborn])
def test_e10_a_stale_context_is_noticed(mutant):
    draft = helpers.model() if mutant is Forgetful else like("llama")
    twin = Twin(mutant(draft), ModelDrafter(draft))
    with pytest.raises(AssertionError):
        run(helpers.model(), twin, trees.Chain(3), "ragged")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_drafter_keeps_the_laws_of_its_seam(family):
    """Answers follow from the committed tokens and the path alone: not from requests, rows, or an earlier ask."""
    rows = [[5, 6, 7, 5, 6, 9, 5, 6], [8, 9, 8, 9, 8], [4, 4]]
    check_drafter(ModelDrafter(helpers.model(family)), context(rows))
    check_drafter(CombinedDrafter(PromptLookupDrafter(), ModelDrafter(helpers.model(family))), context(rows))


def test_the_controller_may_start_the_drafter_late():
    """A drafter that begins in the middle of a request knows all that was committed before."""
    target = helpers.model()
    output, rounds = run(
        target, ModelDrafter(target), trees.Chain(4), "ragged", controller=Scripted(*[0] * 9, *[4] * 9)
    )
    assert output.tolist() == reference(target, "ragged")
    assert_never_wrong(rounds)


@pytest.mark.parametrize("sources", ["lookup first", "model first", "two models"])
@pytest.mark.parametrize("shape", SHAPES)
def test_combined_with_other_sources_in_one_tree_it_stays_lossless(sources, shape):
    """Nodes that another source proposed are run like its own; their rows are kept when they are accepted."""
    target = helpers.model("gemma3")
    rows = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 9, 9, 9]]
    parts: dict[str, tuple[Drafter, ...]] = {
        "lookup first": (PromptLookupDrafter(), ModelDrafter(like("gemma3"))),
        "model first": (ModelDrafter(like("gemma3")), PromptLookupDrafter()),
        "two models": (ModelDrafter(like("gemma3")), ModelDrafter(like("gemma3", noise=0.5))),
    }
    output, rounds = run(target, CombinedDrafter(*parts[sources]), SHAPES[shape], rows)
    assert output.tolist() == reference(target, rows)
    assert {"partial"} < helpers.kinds(rounds)


def test_combined_with_a_perfect_source_it_is_never_wrong():
    """The oracle's nodes are accepted; the model has run them, and its own next proposals show it."""
    target = helpers.model()
    known = torch.tensor(reference(target, "ragged"))
    twin = Twin(ModelDrafter(target), ModelDrafter(target))
    both = CombinedDrafter(OracleDrafter(known, [2, 0, 1]), twin)
    output, rounds = run(target, both, trees.BestFirst(nodes=9, branch=3, depth=4), "ragged")
    assert output.tolist() == known.tolist()
    assert helpers.kinds(rounds) >= {"partial", "zero"}
    assert twin.compared > 10


def test_b7_a_row_that_stopped_is_not_asked_about():
    """Finished rows: the drafter is told, drafts nothing for them and widens no tree for them."""
    target = helpers.model()
    first = reference(target, "ragged")[1][17]
    asked: list[tuple[list[bool], list[bool]]] = []

    class Watched(ModelDrafter):
        def children(self, frontier: Frontier, count: int) -> Candidates:
            answer = super().children(frontier, count)
            asked.append((frontier.valid.any(-1).tolist(), (answer.log_probs > -torch.inf).flatten(1).any(-1).tolist()))
            return answer

    output, rounds = run(target, Watched(target), trees.Chain(3), "ragged", eos_token_id=[first])
    assert output[1, 17:].tolist() == [first] + [0] * (output.shape[1] - 18)
    assert asked
    for valid, answered in asked:
        assert not valid[1]
        assert not answered[1]
    assert all(int(round.tree.num_nodes[1]) == 1 for round in rounds)


def test_outside_a_request_it_says_so_and_finishing_twice_is_harmless():
    drafter = ModelDrafter(helpers.model())
    drafter.finish()
    with pytest.raises(SpecdecError, match=r"call start\(context\) first"):
        drafter.children(roots([[5, 6]]), 1)
    drafter.start(context([[5, 6]]))
    drafter.finish()
    drafter.finish()
    with pytest.raises(UnsupportedError, match="open_model"):
        drafter.start(dataclasses.replace(context([[5]]), open_model=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_tokenizer": object()}, "pass both or neither"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"overflow": "wrap"}, "'stop', 'window'"),
        ({"tokenizer": object(), "vocabulary": VocabularyMap([0], [0], target_size=97, draft_size=97)}, "pass one"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    # Under tests, jaxtyping looks at the annotation first.
    with pytest.raises((UnsupportedError, TypeCheckError), match=message):
        ModelDrafter(helpers.model(), **options)


@pytest.mark.parametrize("requested", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("own", [None, 0.5])
def test_a14_the_returned_law_is_the_softmax_of_the_draft_logits(requested, own):
    """Raw logits returned, processed ones drawn from: the law must be the one that draws follow."""
    draft, rows = like("llama"), [[5, 6, 7], [8, 9, 10, 11, 12]]
    drafter = ModelDrafter(draft, temperature=own)
    drafter.start(context(rows, temperature=requested))
    answer = drafter.children(roots(rows), 5)
    temperature = own or requested or 1.0
    with torch.no_grad():
        logits = [draft(torch.tensor([row])).logits[0, -1].float() for row in rows]
    for row, expected in enumerate(logits):
        law = torch.softmax(expected / temperature, -1)
        assert torch.allclose(answer.probs[row, 0], law, rtol=1e-4, atol=1e-7)
        assert torch.equal(answer.probs[row, 0, answer.tokens[row, 0]].log(), answer.log_probs[row, 0].exp().log())
        assert answer.tokens[row, 0].tolist() == expected.topk(5).indices.tolist()


def test_a14_draws_follow_the_returned_law():
    """20,000 draws from one fixed state against the returned law: total variation below .02."""
    probs = torch.tensor([[0.4, 0.35, 0.15, 0.1]] * 4)
    draft = table_model(probs.flip(1))
    drafter = ModelDrafter(draft)
    rows = [[1]] * 2_000
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(10):
        drafter.start(context(rows, vocab_size=4, temperature=0.6))
        tree = trees.Sampled((1,)).grow(
            drafter,
            torch.ones(2_000, dtype=torch.int64),
            torch.ones(2_000, dtype=torch.int64),
            1,
            vocab_size=4,
            generator=generator,
        )
        counts += torch.bincount(tree.tokens[:, 1], minlength=4)
        law = tree.draft_probs[0, 0]
    assert float((counts / counts.sum() - law).abs().sum() / 2) < 0.02
    assert torch.allclose(law, (probs.flip(1)[0].log() / 0.6).softmax(-1), atol=1e-6)
