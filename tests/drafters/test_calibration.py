"""Scores are probabilities: what is proposed with probability x is right about that often.

A controller decides from `exp(score)` how much to draft, so a drafter that is always sure, or sums shares of two
occurrences to 1, would make it verify nodes for nothing. The texts are made: a writer copies from what was written so
far and now and then stops copying, as a model does when it edits, quotes or repeats itself.
"""

import math
import random
from collections import defaultdict

import pytest

from specdec.drafters import PromptLookupDrafter, SuffixDrafter, hit_rate
from tests.drafters.lookup_reference import ask, commit, context

BINS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def write(seed, leave, length=600, vocab=60):
    """Copies from a random earlier place; at each token it leaves that place with probability `leave`."""
    rng = random.Random(seed)
    text = [rng.randrange(vocab) for _ in range(40)]
    source = None
    while len(text) < length:
        if source is None or rng.random() < leave:
            source = rng.randrange(len(text)) if rng.random() < 0.6 else None
        text.append(rng.randrange(vocab) if source is None else text[source])
        source = None if source is None else source + 1
    return text


TEXTS = [write(seed, leave) for seed, leave in enumerate([0.02, 0.05, 0.1, 0.2, 0.4])]


def reliability(make):
    """Per range of estimated path probability: nodes, mean estimate, share of nodes on the path of the text."""
    counted = defaultdict(lambda: [0, 0.0, 0])
    for text in TEXTS:
        drafter = make()
        drafter.start(context(text[:200]))
        for step in range(200, len(text) - 4):
            if step % 4 == 0:
                (answers,) = ask(drafter, [text[step - 1]], count=3, depth=2, foreign=99)
                scores = {(): 0.0}
                for path in sorted(answers, key=len):
                    for token, score in answers[path]:
                        child = (*path, token)
                        scores[child] = scores[path] + score
                        chance = math.exp(scores[child])
                        entry = counted[sum(chance >= edge for edge in BINS)]
                        entry[0] += 1
                        entry[1] += chance
                        entry[2] += tuple(text[step : step + len(child)]) == child
            commit(drafter, [text[step]])
    return {place: (n, total / n, hits / n) for place, (n, total, hits) in counted.items()}


def error(table):
    """Mean distance of estimate and outcome over all nodes."""
    nodes = sum(n for n, _, _ in table.values())
    return sum(n * abs(estimate - outcome) for n, estimate, outcome in table.values()) / nodes


makers = pytest.mark.parametrize("make", [PromptLookupDrafter, SuffixDrafter])


@makers
def test_estimates_are_right_on_the_average_and_in_every_range(make):
    table = reliability(make)
    assert len(table) == len(BINS) - 1, "the texts have to call for small and large estimates"
    assert error(table) < 0.05
    for nodes, estimate, outcome in table.values():
        assert abs(estimate - outcome) < 0.1 + 2 / math.sqrt(nodes)


@makers
@pytest.mark.parametrize("rate", [0.25, 0.97])
def test_a_rate_that_learns_nothing_is_caught(make, rate, monkeypatch):
    monkeypatch.setattr(hit_rate.HitRate, "rate", lambda _self, _length: rate)
    assert error(reliability(make)) > 0.05
