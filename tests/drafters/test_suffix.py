"""Suffix drafting against counting by scanning: shares, choice of the match length, limits, memory."""

import math
from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import HitRate, SuffixDrafter
from specdec.drafters import suffix as module
from specdec.drafters._continuations import Branch, Pool
from specdec.drafters.suffix import sum_of_shares
from specdec.protocols import Drafter
from tests.drafters.lookup_reference import ask, commit, context, counts, occurrences, suffix_choice, texts
from tests.trees.random_trees import caught

options = st.fixed_dictionaries(
    {
        "min_match": st.integers(1, 3),
        "max_match": st.integers(3, 9),
        "factor": st.sampled_from([0.5, 1.0, 2.0, 4.0]),
        "min_prob": st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    }
)
cases = {
    "text": texts,
    "stored": st.lists(texts, max_size=3),
    "options": options,
    "vocab_size": st.sampled_from([2, 4, 100]),
}


def law(drafter_class, text, stored, options, vocab_size):
    drafter = drafter_class(occurrences=1000, **options)
    for other in stored:
        drafter.store.add(other)
    drafter.start(context(text, vocab_size=vocab_size))
    (answers,) = ask(drafter, [text[-1]])

    least = Fraction(str(options["min_prob"]))
    found = occurrences(text, stored, shortest=options["min_match"], longest=options["max_match"])
    length, chosen = suffix_choice(found, vocab_size, options["factor"], least)
    share = {(): Fraction(1)}
    for path in sorted(answers, key=len):
        expected = []
        if len(path) < int(options["factor"] * length):
            seen = counts(chosen, path, vocab_size)
            for token, times in sorted(seen.items(), key=lambda item: -item[1]):
                share[*path, token] = share[path] * times / sum(seen.values())
                if share[*path, token] >= least:
                    chance = times / sum(seen.values()) * HitRate(hits=2.0).rate(length + len(path))
                    expected.append((token, pytest.approx(math.log(chance), abs=1e-5)))
        assert answers[path] == expected[:4]


@given(**cases)
def test_proposals_are_those_of_a_scan(text, stored, options, vocab_size):
    law(SuffixDrafter, text, stored, options, vocab_size)


class Mutant(SuffixDrafter):
    """Opens rows of a class of its own."""

    row = module._Row

    def _open(self, tokens, vocab_size):
        row = super()._open(tokens, vocab_size)
        row.__class__ = self.row
        return row


class NoDepthLimit(Mutant):
    class row(module._Row):
        def _cap(self, length):
            return 100


class ShareOfOneStep(Mutant):
    class row(module._Row):
        def probabilities(self, node):
            known = self._known.rate(node.length) if node.children else 0.0
            local = {token: child.share / node.share for token, child in node.children.items()}
            kept = sorted(((share, token) for token, share in local.items() if share >= self._min_prob), reverse=True)
            return {token: known * share for share, token in kept} if node.depth < self._cap(node.length) else {}


class OwnTextOnly(Mutant):
    def __init__(self, **options):
        super().__init__(**options)
        self.store.add = lambda _tokens: None


@pytest.mark.parametrize("mutant", [NoDepthLimit, ShareOfOneStep, OwnTextOnly])
def test_wrong_drafters_are_caught(mutant):
    caught(law, mutant, **cases)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sum_of_shares", lambda trie, *_: float(trie.length)),  # always the longest match
        ("sum_of_shares", lambda trie, *_: 1.0 / trie.length),  # always the shortest
        ("tokens_after", lambda log, at, **_: log.tokens[at - log.base :]),  # runs out at the end of the text
    ],
)
def test_wrong_parts_are_caught(monkeypatch, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    caught(law, SuffixDrafter, **cases)


def sum_law(sum_of_shares, continuations, most, least):
    pool = Pool()
    for tokens in continuations:
        pool.add(array("i", tokens), 1)
    trie = Branch(pool.continuations, 3, 1)
    every, waiting = [], [trie]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        every += [child.share for child in node.children.values() if child.share >= least - 1e-9]
    assert sum_of_shares(trie, most, least - 1e-9) == pytest.approx(sum(sorted(every, reverse=True)[:most]))


tries = {
    "continuations": st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=8),
    "most": st.integers(0, 12),
    "least": st.sampled_from([0.0, 0.1, 0.26, 0.5]),
}


@given(**tries)
def test_the_sum_of_shares_is_that_of_the_largest_nodes(continuations, most, least):
    sum_law(sum_of_shares, continuations, most, least)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda trie, _most, least: sum_of_shares(trie, 10**6, least),
        lambda trie, most, _least: sum_of_shares(trie, most, 0.0),
        lambda trie, most, _least: float(trie.run(most)),
    ],
)
def test_wrong_sums_are_caught(wrong):
    caught(sum_law, wrong, **tries)


# ------------------------------------------------------------------------------------------------- memory of requests


def request(drafter, prompt, *generated, vocab_size=100):
    """One whole request of one row; what it would propose at its start."""
    drafter.start(context(prompt, vocab_size=vocab_size))
    (answers,) = ask(drafter, [prompt[-1]], count=8)
    for tokens in generated:
        commit(drafter, tokens)
    drafter.finish()
    return answers


def test_an_earlier_request_is_remembered_after_finish_only():
    drafter = SuffixDrafter()
    drafter.start(context([1, 2, 3]))
    commit(drafter, [10, 11, 12])
    assert request(drafter, [1, 2, 3]) == request(SuffixDrafter(), [1, 2, 3])  # the first one never finished
    assert request(drafter, [1, 2, 3], [10, 11, 12])[()] == []
    (first, _), *_ = request(drafter, [1, 2, 3])[()]
    assert first == 10


def test_without_memory_nothing_leaks_between_requests():
    secret = [[7, 8, 9, 10, 11]] * 3
    for drafter, leaks in ((SuffixDrafter(max_requests=0), False), (SuffixDrafter(), True)):
        request(drafter, [1, 2, 3, 7, 8], *secret)
        later, fresh = request(drafter, [5, 7, 8]), request(SuffixDrafter(), [5, 7, 8])
        assert (later != fresh) is leaks
        assert (len(drafter.store) > 0) is leaks


def test_what_was_learned_is_forgotten_at_the_next_start():
    drafter = SuffixDrafter(max_requests=0)
    before = request(drafter, [1, 2, 1, 2, 1], *[[2, 1]] * 20)
    assert request(drafter, [1, 2, 1, 2, 1]) == before


def test_what_is_remembered_is_what_was_generated():
    drafter = SuffixDrafter(max_match=2)
    request(drafter, [1, 2, 3, 4], [5, 6], [7])
    assert drafter.store.log.tokens.tolist() == [3, 4, 5, 6, 7, -1]  # two prompt tokens lead in
    request(drafter, [1, 2, 3, 4])  # nothing generated
    assert len(drafter.store) == 1


def test_every_row_of_a_batch_is_remembered():
    drafter = SuffixDrafter()
    drafter.start(context([1, 2], [3]))
    commit(drafter, [4], [5, 6])
    commit(drafter, [], [7])
    drafter.finish()
    assert drafter.store.log.tokens.tolist() == [1, 2, 4, -1, 3, 5, 6, 7, -1]


def test_a_store_of_a_larger_vocabulary_proposes_no_id_out_of_range():
    drafter = SuffixDrafter()
    request(drafter, [1, 2], [50, 3], [1, 2, 4], vocab_size=100)
    small = request(drafter, [9, 1, 2], vocab_size=10)
    assert [token for token, _ in small[()]] == [4]
    assert all(token < 10 for answers in small.values() for token, _ in answers)
    assert {token for token, _ in request(drafter, [9, 1, 2], vocab_size=100)[()]} == {4, 50}


def test_a_store_that_changes_in_the_middle_of_a_request_is_read_as_it_is():
    drafter = SuffixDrafter(max_requests=1)
    drafter.store.add([1, 2, 3])
    drafter.start(context([1, 2]))
    drafter.store.add([1, 2, 4])
    (answers,) = ask(drafter, [2])
    assert [token for token, _ in answers[()]] == [4]
    drafter.store.clear()
    commit(drafter, [1, 2])
    (answers,) = ask(drafter, [2])
    assert [token for token, _ in answers[()]] == [1]


# ------------------------------------------------------------------------------------------------------------- options


FORK = [1, 2, 7, 1, 2, 8, 1, 2]


@pytest.mark.parametrize(
    ("text", "stored", "changed"),
    [
        ([9, 1, 2, 7, 5, 2, 8, 1, 2], [], {"max_match": 1}),
        (FORK, [], {"min_match": 3}),
        (FORK, [], {"factor": 0.4}),
        (FORK, [], {"min_prob": 0.6}),
        (FORK, [], {"occurrences": 1}),
        ([1, 2], [[1, 2, 3]], {"max_requests": 0}),
        ([1, 2], [[1, 2, 3, 4]], {"max_tokens": 2}),
    ],
)
def test_every_option_has_an_effect(text, stored, changed):
    def answers(**options):
        drafter = SuffixDrafter(**options)
        for other in stored:
            drafter.store.add(other)
        drafter.start(context(text))
        return ask(drafter, [text[-1]], count=8)[0]

    assert answers(**changed) != answers()


@pytest.mark.parametrize(
    "options",
    [{"factor": 0.0}, {"min_prob": 1.5}, {"min_match": 0}, {"max_match": 0}, {"max_requests": -1}, {"max_tokens": 0}],
)
def test_bad_options_are_refused_at_construction(options):
    with pytest.raises(ValueError, match="need"):
        SuffixDrafter(**options)


def test_it_is_a_drafter_without_features():
    assert isinstance(SuffixDrafter(), Drafter)
    assert SuffixDrafter().feature_layers == ()
