"""The checker finds each way to break a law, and none in the drafters of the library."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from specdec import Candidates, drafters
from specdec.errors import LawError, SpecdecError, UnsupportedError
from specdec.hf import open_model
from specdec.protocols import DraftContext
from specdec.testing import OracleDrafter, TableDrafter, check_drafter, tiny_model

EXAMPLES = Path(__file__).parents[3] / "examples"
Bigram: Any = runpy.run_path(str(EXAMPLES / "own_drafter.py"))["BigramDrafter"]

TEXT = torch.tensor([[5, 6, 7, 8, 6, 9, 5, 6, 7], [0, 0, 3, 4, 3, 4, 3, 5, 3], [7, 5] * 4 + [7], [0] * 7 + [11, 12]])
MASK = torch.tensor([[True] * 9, [False] * 2 + [True] * 7, [True] * 9, [False] * 7 + [True] * 2])


def context(rows: int = 4, **options: Any) -> DraftContext:
    return DraftContext(
        tokens=TEXT[:rows].clone(), mask=MASK[:rows].clone(), vocab_size=97, open_model=open_model, **options
    )


def law(seed: int = 0) -> Tensor:
    weights = torch.rand(97, 97, generator=torch.Generator().manual_seed(seed)) ** 4
    return weights / weights.sum(-1, keepdim=True)


class Draws:
    """Proposes tokens at random, from the request's generator."""

    feature_layers = ()

    def start(self, context):
        self.generator = context.generator

    def children(self, frontier, count):
        shape = (*frontier.tokens.shape, count)
        tokens = torch.rand(*frontier.tokens.shape, 97, generator=self.generator).topk(count).indices
        return Candidates(tokens, torch.full(shape, 1 / count).log())

    def commit(self, tokens, counts, features=None):
        pass

    def finish(self):
        pass


LAWFUL = {
    "prompt lookup": drafters.PromptLookupDrafter,
    "suffix": drafters.SuffixDrafter,
    "bigrams of the example": Bigram,
    "table": lambda: TableDrafter(law()),
    "table without its law": lambda: TableDrafter(law(), whole_law=False),
    "silent": lambda: TableDrafter(torch.zeros(97, 97)),
    "lookup and suffix": lambda: drafters.CombinedDrafter(drafters.PromptLookupDrafter(), drafters.SuffixDrafter()),
    "lookup and table": lambda: drafters.CombinedDrafter(drafters.PromptLookupDrafter(), TableDrafter(law())),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("make", LAWFUL.values(), ids=LAWFUL)
def test_lawful_drafters_pass(make, rows):
    check_drafter(make(), context(rows))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_draft_models_pass(family):
    check_drafter(drafters.ModelDrafter(tiny_model(family)), context(temperature=0.7))


def test_a_lookup_with_a_draft_model_passes():
    both = drafters.CombinedDrafter(drafters.PromptLookupDrafter(), drafters.ModelDrafter(tiny_model("llama")))
    check_drafter(both, context(2))


def test_the_oracle_passes_where_its_schedule_is_constant():
    reference = torch.cat([TEXT[:1], torch.arange(20, 40)[None]], 1)
    check_drafter(OracleDrafter(reference, [9]), context(1))


def test_a_drafter_may_draw_from_the_generator_of_the_request():
    check_drafter(Draws(), context(1, generator=torch.Generator()))


def answering(change: Any) -> Any:
    """The bigram drafter with its answers changed."""

    class Mutant(Bigram):
        def children(self, frontier, count):
            return change(super().children(frontier, count), frontier)

    return Mutant


def edit(**changes: Any) -> Any:
    def forge(found: Candidates, _: Any) -> Candidates:
        values = {name: change(found) for name, change in changes.items()}
        for name, value in values.items():
            object.__setattr__(found, name, value)  # past the annotations, which are not checked in use
        return found

    return answering(forge)


def repeated(found: Candidates) -> Tensor:
    """The second proposal is the first one again."""
    return torch.cat([found.tokens[..., :1], found.tokens[..., :1], found.tokens[..., 2:]], -1)


FORM = {
    "returns a tuple": (answering(lambda found, _: (found.tokens, found.log_probs)), "must return Candidates"),
    "ids too large": (edit(tokens=lambda found: found.tokens + 95), "ids must lie in 0..96"),
    "-1 for no proposal": (
        edit(tokens=lambda found: found.tokens.masked_fill(found.log_probs == -torch.inf, -1)),
        "ids must lie in",
    ),
    "worst first": (
        edit(tokens=lambda found: found.tokens.flip(-1), log_probs=lambda found: found.log_probs.flip(-1)),
        "must fall from the best",
    ),
    "a token twice": (
        edit(tokens=repeated, log_probs=lambda found: torch.full_like(found.log_probs, 0.2).log()),
        "must be distinct",
    ),
    "no frontier axis": (
        edit(tokens=lambda found: found.tokens[:, 0], log_probs=lambda found: found.log_probs[:, 0]),
        r"\[4, 1, rank\]",
    ),
    "one node for all": (
        edit(tokens=lambda found: found.tokens[:, :1], log_probs=lambda found: found.log_probs[:, :1]),
        "one list for each frontier node",
    ),
    "tokens and scores of different width": (
        edit(log_probs=lambda found: found.log_probs[..., :-1]),
        "one list for each frontier node",
    ),
    "too many": (
        edit(
            tokens=lambda found: torch.cat([found.tokens, found.tokens], -1),
            log_probs=lambda found: torch.cat([found.log_probs, torch.full_like(found.log_probs, -torch.inf)], -1),
        ),
        "at most 4 proposals",
    ),
    "int32": (edit(tokens=lambda found: found.tokens.int()), "int64"),
    "counts for log-probabilities": (edit(log_probs=lambda found: found.log_probs.exp() * 3), "at most 0"),
    "NaN": (edit(log_probs=lambda found: found.log_probs * torch.nan), "never NaN"),
    "scores that are no probabilities": (edit(log_probs=lambda found: found.log_probs * 0.1), "at most 1"),
    "a law over other tokens": (
        edit(probs=lambda found: torch.full((*found.tokens.shape[:2], 50), 0.02)),
        "over the target's vocabulary",
    ),
    "a law that is none": (
        edit(probs=lambda found: torch.full((*found.tokens.shape[:2], 97), 0.5)),
        "must sum to 1",
    ),
    "another law": (
        edit(probs=lambda found: torch.full((*found.tokens.shape[:2], 97), 1 / 97)),
        "must tell the same law",
    ),
}


@pytest.mark.parametrize(("mutant", "message"), FORM.values(), ids=FORM)
def test_a_malformed_answer_is_found(mutant, message):
    with pytest.raises(LawError, match=message):
        check_drafter(mutant(), context())


class Remembers(Bigram):
    """Goes on counting where the last request ended."""

    def start(self, context):
        before = getattr(self, "followers", None)
        super().start(context)
        for row, followers in enumerate(before or []):
            for token, counts in followers.items():
                self.followers[row % len(self.last)][token].update(counts)


class Random(Bigram):
    """Draws from the global generator."""

    def children(self, frontier, count):
        found = super().children(frontier, count)
        return dataclasses.replace(found, tokens=torch.randint_like(found.tokens, 97))


class Deaf(Bigram):
    """Learns nothing from what is committed."""

    def commit(self, tokens, counts, features=None):
        pass


class Greedy(Bigram):
    """Takes all it is told, also what lies behind the counts."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens.clamp_min(0), torch.full_like(counts, tokens.shape[1]))


class Rough(Bigram):
    """Counts the newest tokens twice."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts)
        if tokens.shape[1] > 1:
            super().commit(tokens, counts)


class BelievesItself(Bigram):
    """Takes its own guesses for committed."""

    def children(self, frontier, count):
        if frontier.depth > 0:
            for row, token in enumerate(frontier.tokens[:, 0].tolist()):
                self._extend(row, [token])
        return super().children(frontier, count)


class Mixes(Bigram):
    """One table for the whole batch."""

    def start(self, context):
        super().start(context)
        for row in range(1, len(self.last)):
            for token, counts in self.followers[row].items():
                self.followers[0][token].update(counts)


class ChangesContext(Bigram):
    def start(self, context):
        super().start(context)
        context.tokens[0, 0] += 1


class ChangesFrontier(Bigram):
    def children(self, frontier, count):
        found = super().children(frontier, count)
        frontier.tokens.zero_()
        return found


class ChangesCommitted(Bigram):
    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts)
        tokens.zero_()


class OnePerRequest(Bigram):
    """Cannot be started again once it was finished."""

    done = False

    def start(self, context):
        if self.done:
            raise RuntimeError("used up")
        super().start(context)

    def finish(self):
        self.done = True


BEHAVIOUR = {
    Remembers: "start.. must forget",
    Random: "may not depend on chance",
    Deaf: r"commit\(\) must extend the text",
    Greedy: "by nothing else",
    Rough: "came one by one",
    BelievesItself: "were drafted, then not",
    Mixes: "rows may not depend on each other",
    ChangesContext: "start changed the tensors",
    ChangesFrontier: "children changed the tensors",
    ChangesCommitted: "commit changed the tensors",
}


@pytest.mark.parametrize(("mutant", "message"), BEHAVIOUR.items(), ids=[kind.__name__ for kind in BEHAVIOUR])
def test_misbehaviour_is_found(mutant, message):
    with pytest.raises(LawError, match=message):
        check_drafter(mutant(), context())


def test_a_drafter_that_cannot_start_again_is_found():
    with pytest.raises(RuntimeError, match="used up"):
        check_drafter(OnePerRequest(), context())


def test_a_missing_member_is_named():
    class Half:
        feature_layers = ()

        def start(self, context):
            pass

    with pytest.raises((LawError, TypeCheckError), match=r"lacks children, commit, finish|drafter"):
        check_drafter(Half(), context())


def test_a_reader_of_features_needs_a_target():
    class Reads(Bigram):
        feature_layers = (1, 2)

    with pytest.raises(UnsupportedError, match=r"layers \(1, 2\)"):
        check_drafter(Reads(), context())


def test_a_broken_law_is_an_assertion_and_an_error_of_the_library():
    assert issubclass(LawError, AssertionError)
    assert issubclass(LawError, SpecdecError)
