"""The index against scanning: which occurrences are found, how long they match, what is freed."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters._ngram_index import NGramIndex
from tests.drafters.lookup_reference import calls_of, matching, texts
from tests.trees.random_trees import caught

settings = st.fixed_dictionaries(
    {"shortest": st.integers(1, 4), "longest": st.integers(4, 12), "limit": st.sampled_from([1, 2, 5, 100])}
)


def scan(sequences, tail, *, shortest, longest, limit, sizes=(2, 4, 8)):
    """For each n-gram size, from the largest on and until there are enough: the newest `limit` occurrences."""
    log = [token for sequence in sequences for token in (*sequence, -1)]
    ends = [index for index, token in enumerate(log) if token == -1]
    found = {}
    for size in sorted({shortest, *(size for size in sizes if shortest < size <= longest)}, reverse=True):
        if len(found) >= limit or size > len(tail):
            continue
        places = []
        for position in range(1, len(log)):
            start = max((end + 1 for end in ends if end < position), default=0)
            length = matching(tail, log[start:position], longest)
            if log[position] != -1 and length >= size:
                places.append((position, length))
        found |= dict(places[-limit:])
    return found


def law(index_class, sequences, tail, options):
    stored = index_class(**options)
    for sequence in sequences:
        stored.extend(sequence)
        stored.separate()
    assert stored.matches(array("i", tail)) == scan(sequences, tail, **options)
    own = index_class(**options)
    own.extend(tail)
    assert own.matches(own.tokens) == scan([tail], tail, **options)


drawn = {"sequences": st.lists(texts, max_size=4), "tail": texts, "options": settings}


@given(**drawn)
def test_matches_are_those_found_by_scanning(sequences, tail, options):
    law(NGramIndex, sequences, tail, options)


class OldestFirst(NGramIndex):
    def append(self, token):
        super().append(token)
        for _, newest, links in self._chains:
            for key, position in [*newest.items()]:
                if position == self.end - 1 and links[position - self.base] >= 0:
                    newest[key] = links[position - self.base]


class AcrossSeparators(NGramIndex):
    def separate(self):
        start = self._start
        super().separate()
        self._start = start


class CountsOneTooMany(NGramIndex):
    def matches(self, tail):
        return {position: length + 1 for position, length in super().matches(tail).items()}


class SmallestSizeOnly(NGramIndex):
    def __init__(self, **options):
        super().__init__(**options)
        del self._chains[1:]


class NeverStops(NGramIndex):
    def __init__(self, **options):
        super().__init__(**{**options, "longest": 1000})


@pytest.mark.parametrize("mutant", [OldestFirst, CountsOneTooMany, SmallestSizeOnly, NeverStops])
def test_wrong_indexes_are_caught(mutant):
    caught(law, mutant, **drawn)


@given(sequences=st.lists(texts, min_size=2, max_size=6), dropped=st.integers(1, 5), options=settings, tail=texts)
def test_dropping_leaves_what_an_index_of_the_rest_holds(sequences, dropped, options, tail):
    dropping(NGramIndex, sequences, dropped, options, tail)


def dropping(index_class, sequences, dropped, options, tail):
    rest = sequences[min(dropped, len(sequences) - 1) :]
    log, fresh = index_class(**options), NGramIndex(**options)
    for sequence in sequences:
        log.extend(sequence)
        log.separate()
    for sequence in rest:
        fresh.extend(sequence)
        fresh.separate()
    log.drop(len(log.tokens) - len(fresh.tokens))
    assert log.tokens == fresh.tokens
    assert log.end == sum(len(sequence) + 1 for sequence in sequences)
    assert {at - log.base: n for at, n in log.matches(array("i", tail)).items()} == fresh.matches(array("i", tail))
    for (_, newest, links), (_, fresh_newest, fresh_links) in zip(log._chains, fresh._chains, strict=True):
        assert newest.keys() == fresh_newest.keys()
        assert len(links) == len(fresh_links)


class ForgetsNoKeys(NGramIndex):
    def drop(self, count):
        kept = [dict(newest) for _, newest, _ in self._chains]
        super().drop(count)
        for (_, newest, _), old in zip(self._chains, kept, strict=True):
            newest |= old


@pytest.mark.parametrize("mutant", [AcrossSeparators, ForgetsNoKeys])
def test_leaking_indexes_are_caught(mutant):
    caught(
        dropping,
        mutant,
        sequences=st.lists(texts, min_size=2, max_size=6),
        dropped=st.integers(1, 5),
        options=settings,
        tail=texts,
    )


@pytest.mark.parametrize("loop", [[1], [1, 2, 3], [*range(50), *range(40)]])
def test_work_does_not_grow_with_the_log(loop):
    work = []
    for size in (400, 8000):
        log = NGramIndex(shortest=1, longest=16, limit=8)
        log.extend((loop * size)[:size])
        work.append(calls_of(lambda log=log: (log.append(7), log.append(1), log.matches(log.tokens))))
    assert work[0] == work[1]


def test_longest_match_beyond_the_newest_occurrences_is_found_by_a_longer_ngram():
    rare, common = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [0, 9, 0] * 50
    log = NGramIndex(shortest=1, longest=16, limit=4)
    log.extend([*rare, 42, *common, *rare])
    assert log.matches(log.tokens)[len(rare)] == len(rare)


@pytest.mark.parametrize("options", [(0, 4, 1), (5, 4, 1), (1, 4, 0)])
def test_bad_options_are_refused(options):
    shortest, longest, limit = options
    with pytest.raises(ValueError, match="shortest"):
        NGramIndex(shortest=shortest, longest=longest, limit=limit)
