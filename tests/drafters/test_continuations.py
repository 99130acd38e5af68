"""The trie of continuations against counting, and the shortcuts it takes."""

from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters._continuations import HORIZON, Branch, Pool, tokens_after
from specdec.drafters._ngram_index import NGramIndex
from tests.drafters.lookup_reference import Occurrence, counts, texts
from tests.trees.random_trees import caught

VOCAB = 3  # smaller than the ids in texts


def pool_of(occurrences):
    pool = Pool()
    for tokens in occurrences:
        pool.add(array("i", tokens), 1)
    return pool.continuations


def count_law(build, occurrences):
    """Every node holds the children that scanning finds, in order, with the product of shares."""
    plain = [Occurrence(1, False, tuple(tokens), 0) for tokens in occurrences]
    waiting = [((), build(occurrences), Fraction(1))]
    while waiting:
        path, node, share = waiting.pop()
        seen = counts(plain, path, VOCAB)
        assert [*node.children] == [*seen]
        assert (node.depth, node.length) == (len(path), 1 + len(path))
        for token, times in seen.items():
            below = share * times / sum(seen.values())
            assert node.children[token].share == pytest.approx(float(below))
            if len(path) < 3:
                waiting.append(((*path, token), node.children[token], below))


many = {"occurrences": st.lists(st.lists(st.integers(-1, 3), max_size=4), max_size=8)}


def branch(occurrences):
    return Branch(pool_of(occurrences), VOCAB, 1)


@given(**many)
def test_children_and_shares_are_counts(occurrences):
    count_law(branch, occurrences)


def counts_once(occurrences):
    return branch([tokens for index, tokens in enumerate(occurrences) if tokens not in occurrences[:index]])


def knows_no_limit(occurrences):
    return Branch(pool_of(occurrences), 100, 1)


def newest_last(occurrences):
    return branch(occurrences[::-1])


@pytest.mark.parametrize("mutant", [counts_once, knows_no_limit, newest_last])
def test_wrong_tries_are_caught(mutant):
    caught(count_law, mutant, **many)


@given(most=st.integers(0, 6), prefix=st.lists(st.integers(0, 3), max_size=4), **many)
def test_a_run_is_a_descent_without_choices(most, prefix, occurrences):
    node = branch([prefix + tokens for tokens in occurrences])
    run = node.run(most)
    walk = node
    for _ in range(run):
        (walk,) = walk.children.values()
        assert walk.share == node.share
    skipped = node.skip(run)
    assert {token: child.share for token, child in skipped.children.items()} == {
        token: child.share for token, child in walk.children.items()
    }
    assert (skipped.depth, skipped.length) == (walk.depth, walk.length)
    if occurrences and run < most and len(walk.children) == 1:
        # A run may stop early only where a continuation is over.
        after = [item.tokens[walk.depth :].tolist() for item in walk.continuations]
        assert any(not tokens or not 0 <= tokens[0] < VOCAB for tokens in after)


@given(text=texts, position=st.integers(1, 29))
def test_own_text_goes_round_as_copying_token_by_token_would(text, position):
    log = NGramIndex(shortest=1, longest=8, limit=8)
    log.extend(text)
    position = min(position, len(text) - 1)
    copied = list(text)
    for _ in range(HORIZON):
        copied.append(copied[position + len(copied) - len(text)])
    assert tokens_after(log, position, repeat=True).tolist() == copied[len(text) :][:HORIZON]
    assert tokens_after(log, position, repeat=False).tolist() == text[position:]


def test_what_was_dropped_proposes_nothing():
    log = NGramIndex(shortest=1, longest=8, limit=8)
    for text in ([1, 2, 3], [4, 5]):
        log.extend(text)
        log.separate()
    log.drop(4)
    assert tokens_after(log, 1, repeat=False).tolist() == []
    assert tokens_after(log, 5, repeat=False).tolist() == [5, -1]
