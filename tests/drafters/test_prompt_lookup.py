"""Prompt lookup against scanning: longest match first, then the most recent; and its scores."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import HitRate, PromptLookupDrafter
from specdec.drafters import prompt_lookup as module
from specdec.errors import ShapeError
from specdec.protocols import Drafter
from tests.drafters.lookup_reference import ask, commit, context, lookup_order, occurrences, texts
from tests.trees.random_trees import caught

options = st.fixed_dictionaries({"min_ngram": st.integers(1, 3), "max_ngram": st.integers(3, 9)})
cases = {"text": texts, "options": options, "vocab_size": st.sampled_from([2, 4, 100])}


def scanned(text, path, options, vocab_size):
    found = occurrences(text, shortest=options["min_ngram"], longest=options["max_ngram"])
    return lookup_order(found, path, vocab_size)


def prior_scores(lengths):
    """The documented scale with nothing learned yet."""
    first, later = HitRate(), HitRate(hits=0.5, gain=0.5)
    scores, left = [], 1.0
    for rank, length in enumerate(lengths):
        rate = (later if rank else first).rate(length)
        scores.append(math.log(min(left * rate, math.exp(scores[-1]) if scores else 1.0)))
        left *= 1 - rate
    return scores


def law(drafter_class, text, options, vocab_size):
    drafter = drafter_class(occurrences=1000, **options)
    drafter.start(context(text, vocab_size=vocab_size))
    (answers,) = ask(drafter, [text[-1]], count=4)
    for path, given_proposals in answers.items():
        ranked = scanned(text, path, options, vocab_size)
        assert [token for token, _ in given_proposals] == [*ranked][:4]
        scores = [score for _, score in given_proposals]
        assert scores == pytest.approx(prior_scores([*ranked.values()][:4]), abs=1e-5)


@given(**cases)
def test_proposals_are_those_of_a_scan(text, options, vocab_size):
    law(PromptLookupDrafter, text, options, vocab_size)


class Reranked(PromptLookupDrafter):
    """A mutant: occurrences in another order."""

    def _open(self, tokens, vocab_size):
        row = super()._open(tokens, vocab_size)
        matches = row.log.matches
        row.log.matches = lambda tail: self.distort(matches(tail), row.log)
        return row


class FirstFound(Reranked):
    def distort(self, found, log):
        return dict.fromkeys(found, max(found.values(), default=0))


class LongestOnly(Reranked):
    def distort(self, found, log):
        return {at: length for at, length in found.items() if length == max(found.values())}


class ReachesTheEnd(Reranked):
    """Proposes the text's own last token as what follows its suffix."""

    def distort(self, found, log):
        return found | {log.end - 1: 1}


@pytest.mark.parametrize("mutant", [FirstFound, LongestOnly, ReachesTheEnd])
def test_wrong_orders_are_caught(mutant):
    caught(law, mutant, **cases)


def test_preferring_the_oldest_is_caught(monkeypatch):
    def oldest_first(pairs, **_):
        return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))

    monkeypatch.setattr(module, "sorted", oldest_first, raising=False)
    caught(law, PromptLookupDrafter, **cases)


def test_a_draft_that_stops_where_the_text_ends_is_caught(monkeypatch):
    monkeypatch.setattr(module, "tokens_after", lambda log, at, **_: log.tokens[at - log.base :])
    caught(law, PromptLookupDrafter, **cases)


def first_proposals(text, **options):
    drafter = PromptLookupDrafter(**options)
    drafter.start(context(text))
    (answers,) = ask(drafter, [text[-1]], depth=0)
    return [token for token, _ in answers[()]]


def test_the_longest_match_beats_the_first_and_the_newest():
    text = [1, 2, 3, 50, 9, 3, 60, 8, 2, 3, 70, 1, 2, 3]
    assert first_proposals(text) == [50, 70, 60]


def test_among_equal_matches_the_newest_wins():
    assert first_proposals([1, 2, 50, 1, 2, 60, 7, 1, 2]) == [60, 50]


def test_every_option_has_an_effect():
    text = [1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 1, 2, 3]
    assert first_proposals(text) == [50, 70, 60]
    assert first_proposals(text, max_ngram=2) == [70, 60, 50]
    assert first_proposals(text, min_ngram=3) == [50]
    assert first_proposals(text, occurrences=1) == [70]


@pytest.mark.parametrize("text", [[5], [1, 2, 3, 4], list(range(40))])
def test_no_match_means_no_proposal(text):
    assert first_proposals(text) == []


def test_a_loop_is_continued_as_long_as_one_likes():
    drafter = PromptLookupDrafter()
    drafter.start(context([9, 1, 2, 1, 2]))
    (answers,) = ask(drafter, [2], count=1, depth=20)
    assert max((path for path, offered in answers.items() if offered), key=len) == (1, 2) * 10


def test_scores_follow_what_the_text_did():
    """The same suffix is more trusted where earlier suffixes went on as before than where they did not."""
    last = {}
    for kind, follow in (("copies", lambda _: 30), ("differs", lambda index: 40 + index)):
        drafter = PromptLookupDrafter()
        drafter.start(context([1, 2, 30]))
        for index in range(15):
            commit(drafter, [1, 2, follow(index)])
        commit(drafter, [1, 2])
        (answers,) = ask(drafter, [2], depth=0)
        last[kind] = math.exp(answers[()][0][1])
    assert last["copies"] > 0.7
    assert last["differs"] < 0.3


def test_it_is_a_drafter_without_features():
    assert isinstance(PromptLookupDrafter(), Drafter)
    assert PromptLookupDrafter().feature_layers == ()


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"min_ngram": 4, "max_ngram": 3}, {"occurrences": 0}])
def test_bad_options_are_refused_at_construction(options):
    with pytest.raises(ValueError, match="shortest"):
        PromptLookupDrafter(**options)


def test_negative_prompt_ids_are_refused():
    with pytest.raises(ShapeError, match="negative id"):
        PromptLookupDrafter().start(context([3, -100, 4]))
