"""The bounded memory: first in, first out, and what is evicted is freed."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import SuffixStore
from specdec.errors import ShapeError
from tests.drafters.lookup_reference import occurrences, size_of, texts
from tests.trees.random_trees import caught

drawn = {
    "sequences": st.lists(texts, max_size=8),
    "max_requests": st.integers(0, 4),
    "max_tokens": st.integers(1, 60),
    "suffix": texts,
}


def kept_of(sequences, max_requests, max_tokens):
    kept = []
    for sequence in sequences:
        if max_requests:
            kept.append(sequence[-max_tokens:])
        while len(kept) > max_requests or sum(map(len, kept)) > max_tokens:
            del kept[0]
    return kept


def law(store_class, sequences, max_requests, max_tokens, suffix):
    store = store_class(max_requests=max_requests, max_tokens=max_tokens, occurrences=1000)
    for sequence in sequences:
        store.add(sequence)
    kept = kept_of(sequences, max_requests, max_tokens)
    assert len(store) == len(kept)
    assert store.num_tokens == sum(map(len, kept)) <= max_tokens
    assert store.log.tokens.tolist() == [token for sequence in kept for token in (*sequence, -1)]

    fresh = SuffixStore(occurrences=1000)
    for sequence in kept:
        fresh.add(sequence)
    for (_, newest, links), (_, wanted, wanted_links) in zip(store.log._chains, fresh.log._chains, strict=True):
        assert newest.keys() == wanted.keys()
        assert len(links) == len(wanted_links)

    found = occurrences([], kept, shortest=1, longest=32)  # no own text: nothing matches an empty one
    assert found == []
    found = [item for item in occurrences(suffix, kept, shortest=1, longest=32) if not item.own]
    longest = max((item.length for item in found), default=0)
    assert store.continuations(suffix) == Counter(item.token(()) for item in found if item.length == longest)


@given(**drawn)
def test_it_holds_the_newest_sequences_that_fit(sequences, max_requests, max_tokens, suffix):
    law(SuffixStore, sequences, max_requests, max_tokens, suffix)


class KeepsOneMore(SuffixStore):
    def __init__(self, *, max_requests=1000, **options):
        super().__init__(max_requests=max_requests + 1, **options)


class ForgetsOnPaper(SuffixStore):
    """Frees the count but not the tokens."""

    def add(self, tokens):
        self.log.drop = lambda _count: None
        super().add(tokens)


@pytest.mark.parametrize("mutant", [KeepsOneMore, ForgetsOnPaper])
def test_wrong_stores_are_caught(mutant):
    caught(law, mutant, **drawn)


def test_memory_depends_on_the_limits_only():
    def size(number):
        store = SuffixStore(max_requests=20, max_tokens=1000)
        for request in range(number):
            store.add([request * 37 % 5000 + step * step % 101 for step in range(50)])
        assert store.num_tokens == 1000
        return size_of(store)

    assert size(200) < 1.5 * size(20)


def test_of_a_long_sequence_the_end_is_kept():
    store = SuffixStore(max_tokens=3)
    store.add([1, 2, 3, 4, 5])
    assert store.continuations([3]) == {4: 1}
    assert store.continuations([2]) == {}


def test_clear_forgets_everything():
    store = SuffixStore()
    store.add([1, 2, 3])
    store.clear()
    assert (len(store), store.num_tokens, store.continuations([1])) == (0, 0, {})
    store.add([1, 4])
    assert store.continuations([1]) == {4: 1}


def test_an_empty_sequence_is_no_sequence():
    store = SuffixStore()
    store.add([])
    assert len(store) == 0
    assert store.continuations([]) == {}


@pytest.mark.parametrize("tokens", [[-1], [3, -100, 4]])
def test_negative_ids_are_refused(tokens):
    with pytest.raises(ShapeError, match="token ids >= 0"):
        SuffixStore().add(tokens)


@pytest.mark.parametrize("options", [{"max_requests": -1}, {"max_tokens": 0}, {"min_match": 9, "max_match": 8}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="need"):
        SuffixStore(**options)
