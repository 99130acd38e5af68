"""Merging sources: one scale, duplicates joined, features handed to those who asked for them."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import CombinedDrafter, PromptLookupDrafter, SuffixDrafter
from specdec.drafters import combined as module
from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import DraftContext, Drafter
from specdec.types import Candidates, Frontier
from tests.drafters.lookup_reference import ask, check_seam, commit, context, proposals
from tests.trees.random_trees import caught

VOCAB = 8
BATCH, WIDTH = 2, 3


class Scripted:
    """A source that says what it is told to say, and remembers what it is told."""

    def __init__(self, laws=(), *, layers=(), with_probs=False):
        self.laws, self.feature_layers, self.with_probs = laws, tuple(layers), with_probs
        self.heard = []

    def start(self, context):
        self.heard.append(("start", context))

    def children(self, frontier, count):
        self.heard.append(("children", frontier, count))
        dense = torch.tensor(self.laws, dtype=torch.float32).view(*frontier.tokens.shape, VOCAB)
        probs, tokens = dense.sort(dim=-1, descending=True, stable=True)
        return Candidates(tokens[..., :count], probs.log()[..., :count], dense if self.with_probs else None)

    def commit(self, tokens, counts, features=None):
        self.heard.append(("commit", tokens, counts, features))

    def finish(self):
        self.heard.append(("finish",))


def nodes(batch=BATCH, width=WIDTH):
    tokens = torch.arange(batch * width).view(batch, width) % VOCAB
    return Frontier(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool), 1)


def node_law(weights):
    total = sum(weights)
    return [0.9 * weight / total if total else 0.0 for weight in weights]


# Few distinct weights, so that ties are common; some nodes without proposals.
laws = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=VOCAB, max_size=VOCAB).map(node_law),
    min_size=BATCH * WIDTH,
    max_size=BATCH * WIDTH,
)
drawn = {"scripts": st.lists(laws, min_size=2, max_size=3), "count": st.integers(1, VOCAB)}


def merged(scripts, node, count):
    """Best estimate per token, scaled down where the sum exceeds 1; earlier sources first among equals."""
    best = {}
    for script in scripts:
        law = script[node]
        offered = sorted(range(VOCAB), key=lambda token, law=law: -law[token])[:count]
        for token in offered:
            if law[token] > 0:
                best[token] = max(best.get(token, 0.0), law[token])
    scale = max(1.0, sum(best.values()))
    return {token: chance / scale for token, chance in best.items()}


def law(merge, scripts, count):
    frontier = nodes()
    answers = [Scripted(script).children(frontier, count) for script in scripts]
    answer = merge(answers, count)
    check_seam(answer, frontier, count)
    for row in range(BATCH):
        for node in range(WIDTH):
            expected = merged(scripts, row * WIDTH + node, count)
            given_proposals = proposals(answer, row, node)
            assert len(given_proposals) == min(count, len(expected))
            for token, score in given_proposals:
                assert math.exp(score) == pytest.approx(expected[token], abs=1e-5)
            cut = sorted(expected.values(), reverse=True)[: len(given_proposals)]
            assert [math.exp(score) for _, score in given_proposals] == pytest.approx(cut, abs=1e-5)


@given(**drawn)
def test_the_merge_is_the_best_estimate_of_each_token(scripts, count):
    law(module._merge, scripts, count)


def keeps_duplicates(answers, count):
    tokens = torch.cat([answer.tokens for answer in answers], -1)
    scores, order = torch.cat([answer.log_probs for answer in answers], -1).sort(dim=-1, descending=True)
    total = scores.logsumexp(-1, keepdim=True).clamp_min(0.0)
    return Candidates(tokens.gather(-1, order)[..., :count], (scores - total)[..., :count])


def does_not_rescale(answers, count):
    scaled = module._merge(answers, 100)
    shift = torch.cat([answer.log_probs for answer in answers], -1).amax(-1, keepdim=True)
    shift = (shift - scaled.log_probs[..., :1]).nan_to_num(0.0)
    return Candidates(scaled.tokens[..., :count], (scaled.log_probs + shift)[..., :count])


def always_fills_up_to_one(answers, count):
    scaled = module._merge(answers, count)
    return Candidates(scaled.tokens, scaled.log_probs.log_softmax(-1).nan_to_num(-torch.inf))


def first_source_wins(answers, _count):
    return answers[0]


def adds_up(answers, count):
    dense = sum(answer.law(VOCAB) for answer in answers) / len(answers)
    probs, tokens = dense.sort(dim=-1, descending=True, stable=True)
    return Candidates(tokens[..., :count], probs.log()[..., :count])


@pytest.mark.parametrize(
    "mutant", [keeps_duplicates, does_not_rescale, always_fills_up_to_one, first_source_wins, adds_up]
)
def test_wrong_merges_are_caught(mutant):
    caught(law, mutant, **drawn)


def test_among_equal_scores_the_earlier_source_ranks_first():
    one = [[0.0, 0.4, 0, 0, 0, 0, 0, 0]]
    other = [[0.4, 0.0, 0, 0, 0, 0, 0, 0]]
    for scripts, order in (((one, other), [1, 0]), ((other, one), [0, 1])):
        answer = CombinedDrafter(*map(Scripted, scripts)).children(nodes(1, 1), 2)
        assert answer.tokens.tolist() == [[order]]


# --------------------------------------------------------------------------------------------------------- whole laws

SPEAKS = [node_law([1, 2, 0, 0, 0, 0, 0, 0])] * (BATCH * WIDTH)
SILENT = [[0.0] * VOCAB] * (BATCH * WIDTH)


@pytest.mark.parametrize(
    ("sources", "whole"),
    [
        ([(SPEAKS, True), (SPEAKS, False)], False),
        ([(SPEAKS, True), (SPEAKS, True)], False),
        ([(SPEAKS, False), (SPEAKS, False)], False),
        ([(SPEAKS, True), (SILENT, False)], True),
        ([(SILENT, False), (SPEAKS, True)], True),
        ([(SPEAKS, False), (SILENT, False)], False),
        ([(SILENT, False), (SILENT, False)], False),
        ([(SPEAKS, True)], True),
    ],
)
def test_a_whole_law_is_given_only_where_one_source_speaks(sources, whole):
    scripted = [Scripted(script, with_probs=with_probs) for script, with_probs in sources]
    answer = CombinedDrafter(*scripted).children(nodes(), 4)
    assert (answer.probs is not None) is whole
    if whole:
        torch.testing.assert_close(answer.probs, torch.tensor(SPEAKS).view(BATCH, WIDTH, VOCAB))
    check_seam(answer, nodes(), 4)


def test_what_stands_on_padding_is_not_speech():
    frontier = nodes()
    frontier = Frontier(frontier.tokens, frontier.parents, torch.tensor([[True, True, False]] * 2), 1)
    noise = [[0.0] * VOCAB, [0.0] * VOCAB, [0.1] * VOCAB] * 2
    answer = CombinedDrafter(Scripted(SPEAKS, with_probs=True), Scripted(noise)).children(frontier, 4)
    assert answer.probs is not None


# ----------------------------------------------------------------------------------------------------------- features


def sliced(layers, *, rows=2):
    """Features in which each layer is marked with its own number, two values wide."""
    return torch.cat([torch.full((BATCH, rows, 2), float(layer)) for layer in layers], -1)


def feature_law(make):
    sources = [Scripted(layers=(3, 1)), Scripted(), Scripted(layers=(1, 7, 1)), Scripted(layers=(7,))]
    drafter = make(*sources)
    assert sorted(drafter.feature_layers) == [1, 3, 7]
    features = sliced(drafter.feature_layers)
    drafter.start(DraftContext(torch.ones(BATCH, 2).long(), torch.ones(BATCH, 2).bool(), VOCAB, features=features))
    drafter.commit(torch.ones(BATCH, 2).long(), torch.ones(BATCH).long(), features)
    for source in sources:
        (_, begun), (_, _, _, committed) = source.heard
        for share in (begun.features, committed):
            if source.feature_layers:
                assert share.tolist() == sliced(source.feature_layers).tolist()
            else:
                assert share is None


def test_every_source_gets_the_features_it_asked_for():
    feature_law(CombinedDrafter)


class HandsOnEverything(CombinedDrafter):
    def _split(self, features):
        return [features] * len(self._drafters)


class InTheOrderOfTheUnion(CombinedDrafter):
    def _split(self, features):
        shares = dict(zip(self.feature_layers, features.chunk(len(self.feature_layers), -1), strict=True))
        return [
            torch.cat([share for layer, share in shares.items() if layer in source.feature_layers] or [features], -1)
            for source in self._drafters
        ]


@pytest.mark.parametrize("mutant", [HandsOnEverything, InTheOrderOfTheUnion])
def test_wrong_splits_are_caught(mutant):
    with pytest.raises(AssertionError):
        feature_law(mutant)


def test_features_that_cannot_be_split_are_refused():
    drafter = CombinedDrafter(Scripted(layers=(1, 2)), Scripted(layers=(3,)))
    with pytest.raises(ShapeError, match="width of 4"):
        drafter.commit(torch.ones(1, 1).long(), torch.ones(1).long(), torch.zeros(1, 1, 4))


def test_without_features_no_source_gets_any():
    source = Scripted(layers=(1,))
    CombinedDrafter(source, Scripted()).commit(torch.ones(1, 1).long(), torch.ones(1).long())
    assert source.heard[0][3] is None


# ------------------------------------------------------------------------------------------------------------- sources


def test_every_source_hears_the_same():
    sources = [Scripted(SPEAKS), Scripted(SILENT), Scripted(SPEAKS)]
    drafter, frontier = CombinedDrafter(*sources), nodes()
    drafter.start(context([1, 2], [3]))
    drafter.children(frontier, 3)
    drafter.finish()
    for source in sources:
        assert [what[0] for what in source.heard] == ["start", "children", "finish"]
        assert source.heard[1][1:] == (frontier, 3)


def test_a_node_of_one_source_is_followed_by_another_that_can():
    """Both know what follows 5; only the second has seen 6 after it, and both know what follows there."""
    drafter = CombinedDrafter(PromptLookupDrafter(), SuffixDrafter())
    drafter._drafters[1].store.add([5, 6, 7, 8])
    drafter.start(context([5, 4, 9, 5]))
    (answers,) = ask(drafter, [5])
    assert {token for token, _ in answers[()]} == {4, 6}
    assert [token for token, _ in answers[6,]] == [7]
    assert [token for token, _ in answers[4,]] == [9]


def test_a_combination_is_a_drafter_and_can_be_combined():
    inner = CombinedDrafter(Scripted(SPEAKS, layers=(2,)), Scripted(SILENT, layers=(4,)))
    outer = CombinedDrafter(inner, Scripted(SPEAKS, layers=(4, 6)))
    assert isinstance(outer, Drafter)
    assert outer.feature_layers == (2, 4, 6)
    check_seam(outer.children(nodes(), 3), nodes(), 3)


def test_lookup_and_suffix_agree_on_one_scale():
    text = [1, 2, 3, 4, 1, 2, 3]
    drafter = CombinedDrafter(PromptLookupDrafter(), SuffixDrafter())
    drafter.start(context(text))
    for _ in range(3):
        (answers,) = ask(drafter, [3])
        assert [token for token, _ in answers[()]] == [4]
        commit(drafter, [4, 1, 2, 3])


def test_what_is_no_drafter_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        CombinedDrafter()
    with pytest.raises(TypeError):  # under test, the annotation is checked first
        CombinedDrafter(PromptLookupDrafter(), 3)
    with pytest.raises(UnsupportedError, match=r"takes drafters .*got <class"):
        inspect.unwrap(CombinedDrafter.__init__)(object.__new__(CombinedDrafter), PromptLookupDrafter)
    with pytest.raises(UnsupportedError, match="Build two"):
        CombinedDrafter(*[PromptLookupDrafter()] * 2)
