"""What must hold for every drafter that copies from text: the seam, batches, rounds, memory."""

import gc
import itertools
import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import CombinedDrafter, PromptLookupDrafter, SuffixDrafter
from specdec.errors import ShapeError, SpecdecError
from specdec.types import Frontier
from tests.drafters.lookup_reference import ask, calls_of, commit, context, size_of, texts
from tests.trees.random_trees import caught


def combined():
    return CombinedDrafter(PromptLookupDrafter(), SuffixDrafter(max_requests=0))


makers = [PromptLookupDrafter, lambda: SuffixDrafter(max_requests=0), SuffixDrafter, combined]
every = pytest.mark.parametrize("make", makers, ids=["lookup", "suffix", "suffix_store", "combined"])
rounds = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


def run(drafter, text, commits, **options):
    """Answers before each round and after the last one."""
    drafter.start(context(text, **options))
    answers, last = [], text[-1]
    for tokens in [*commits, []]:
        answers += ask(drafter, [last], depth=2)
        if tokens:
            commit(drafter, tokens)
            last = tokens[-1]
    drafter.finish()
    return answers


def tokens_only(answers):
    return {path: [token for token, _ in offered] for path, offered in answers.items()}


# ------------------------------------------------------------------------------------------------------------ batches


def batch_law(make, make_alone, texts_of_rows, rounds_of_rows, order, pad):
    """Each row of a left-padded, ragged batch is what it is alone, in any order of the rows."""
    batch = [texts_of_rows[row % len(texts_of_rows)] for row in order]
    commits = [rounds_of_rows[row % len(texts_of_rows)] for row in order]
    drafter = make()
    drafter.start(context(*batch, pad=pad))
    last = [text[-1] for text in batch]
    together = [[] for _ in batch]
    for step in range(1 + max(map(len, commits))):
        for answers, answer in zip(together, ask(drafter, last, depth=2), strict=True):
            answers.append(answer)
        new = [tokens[step] if step < len(tokens) else [] for tokens in commits]
        commit(drafter, *new)
        last = [tokens[-1] if tokens else before for tokens, before in zip(new, last, strict=True)]
    drafter.finish()
    for text, tokens, answers in zip(batch, commits, together, strict=True):
        alone = run(make_alone(), text, tokens)
        assert answers[: len(alone)] == alone


batches = {
    "texts_of_rows": st.lists(texts, min_size=1, max_size=4),
    "rounds_of_rows": st.lists(rounds, min_size=4, max_size=4),
    "order": st.permutations(range(4)),
    "pad": st.integers(0, 3),
}


@every
@given(**batches)
def test_a_batch_is_a_set_of_independent_requests(make, texts_of_rows, rounds_of_rows, order, pad):
    batch_law(make, make, texts_of_rows, rounds_of_rows, order, pad)


class SeesPadding(PromptLookupDrafter):
    def start(self, given_context):
        everything = torch.ones_like(given_context.mask)
        super().start(type(given_context)(given_context.tokens, everything, given_context.vocab_size))


class OneRateForAll(PromptLookupDrafter):
    def start(self, given_context):
        super().start(given_context)
        for row in self._rows:
            row._first, row._later = self._rows[0]._first, self._rows[0]._later


@pytest.mark.parametrize("mutant", [SeesPadding, OneRateForAll])
def test_rows_that_know_of_each_other_are_caught(mutant):
    caught(batch_law, mutant, PromptLookupDrafter, **batches)


def test_tokens_beyond_the_counts_would_be_noticed_at_the_next_root():
    drafter = PromptLookupDrafter()
    drafter.start(context([1, 2], [3, 4]))
    drafter.commit(torch.tensor([[5, 6], [7, 8]]), torch.tensor([1, 2]))
    ask(drafter, [5, 8])
    with pytest.raises(ShapeError, match="commit every token"):
        ask(drafter, [6, 8])


@every
def test_all_orders_of_four_rows(make):
    prompts = [[1, 2, 3, 1, 2], [5, 1, 5, 1, 5], [4], [2, 3, 2, 4, 2, 3, 2]]
    alone = [run(make(), prompt, [[7, prompt[0]]])[-1] for prompt in prompts]
    for order in itertools.permutations(range(4)):
        drafter = make()
        drafter.start(context(*(prompts[row] for row in order)))
        commit(drafter, *([7, prompts[row][0]] for row in order))
        assert ask(drafter, [prompts[row][0] for row in order], depth=2) == [alone[row] for row in order]


@every
def test_finished_rows_are_not_asked(make):
    drafter = make()
    drafter.start(context([1, 2, 1, 2], [3, 4, 3, 4]))
    commit(drafter, [1], [])
    roots = Frontier.from_root(torch.tensor([1, 99]), valid=torch.tensor([True, False]))
    answer = drafter.children(roots, 3)  # the root of a finished row need not be its last token
    assert answer.tokens[0, 0, 0] == 2
    assert (answer.log_probs[1] == -torch.inf).all()
    assert ((answer.tokens >= 0) & (answer.tokens < 100)).all()


@every
def test_a_row_without_tokens_proposes_nothing_until_it_has_some(make):
    drafter = make()
    drafter.start(context([], [1, 2, 1]))
    roots = Frontier.from_root(torch.tensor([0, 1]), valid=torch.tensor([False, True]))
    answer = drafter.children(roots, 2)
    assert answer.log_probs.isfinite().tolist() == [[[False, False]], [[True, False]]]
    commit(drafter, [5, 6, 5], [2])
    assert [token for token, _ in ask(drafter, [5, 2])[0][()]] == [6]


# ------------------------------------------------------------------------------------------------------------- rounds


@every
@given(text=texts, commits=rounds, cut=st.integers(0, 3))
def test_the_answers_do_not_depend_on_how_tokens_were_grouped(make, text, commits, cut):
    grouping_law(make, text, commits, cut)


def grouping_law(make, text, commits, cut):
    flat = list(itertools.chain.from_iterable(commits))
    one_by_one = run(make(), text, [[token] for token in flat])
    at_once = run(make(), text, [flat[:cut], flat[cut:]] if flat[:cut] and flat[cut:] else [flat])
    assert one_by_one[-1] == at_once[-1]
    assert run(make(), text, commits)[-1] == at_once[-1]


class LearnsOnceARound(PromptLookupDrafter):
    def commit(self, tokens, counts, features=None):
        rows = self._rows
        super().commit(tokens[:, :1], counts.clamp_max(1))
        for row, (count, *new) in zip(rows, torch.cat([counts[:, None], tokens], 1).tolist(), strict=True):
            row.log.extend(new[1:count])


def test_learning_by_rounds_is_caught():
    caught(grouping_law, LearnsOnceARound, text=texts, commits=rounds, cut=st.integers(0, 3))


@every
@given(text=texts, commits=rounds)
def test_a_request_that_starts_late_proposes_the_same_tokens(make, text, commits):
    """Scores may differ, since what came before the start teaches nothing; tokens and their order may not."""
    whole = [*text, *itertools.chain.from_iterable(commits)]
    assert tokens_only(run(make(), text, commits)[-1]).get(()) == tokens_only(run(make(), whole, [])[-1]).get(())


@every
@given(text=texts, commits=rounds, other=texts)
def test_start_forgets_the_request_before(make, text, commits, other):
    used = make()
    used.start(context(other))
    commit(used, other)
    ask(used, [other[-1]])
    assert run(used, text, commits) == run(make(), text, commits)


@every
@given(text=st.lists(st.integers(0, 12), min_size=1, max_size=30), commits=rounds, vocab_size=st.integers(1, 12))
def test_proposals_are_ids_of_the_target(make, text, commits, vocab_size):
    drafter = make()
    if isinstance(drafter, SuffixDrafter):
        drafter.store.add([*text, *range(20), *text])
    for answers in run(drafter, text, commits, vocab_size=vocab_size):
        assert all(0 <= token < vocab_size for offered in answers.values() for token, _ in offered)


@every
@given(text=texts, count=st.integers(1, 6))
def test_count_cuts_the_same_list(make, text, count):
    """How many proposals are wanted may change from call to call."""
    drafter = make()
    drafter.start(context(text))
    (full,) = ask(drafter, [text[-1]], count=6, depth=0)
    (some,) = ask(drafter, [text[-1]], count=count, depth=0)
    assert some[()] == full[()][:count]


@every
def test_asking_changes_nothing_and_nothing_of_the_callers_is_changed(make):
    drafter, given_context = make(), context([1, 2, 3, 1, 2], [4, 4, 4])
    tokens, mask = given_context.tokens.clone(), given_context.mask.clone()
    drafter.start(given_context)
    first = ask(drafter, [2, 4])
    assert ask(drafter, [2, 4]) == first
    new, counts = torch.tensor([[3, 1], [4, -1]]), torch.tensor([2, 1])
    drafter.commit(new, counts)
    assert (given_context.tokens.tolist(), given_context.mask.tolist()) == (tokens.tolist(), mask.tolist())
    assert (new.tolist(), counts.tolist()) == ([[3, 1], [4, -1]], [2, 1])


# ----------------------------------------------------------------------------------------------------- work and memory


@every
def test_the_work_of_a_round_does_not_grow_with_the_text(make):
    work = []
    for size in (300, 6000):
        drafter = make()
        drafter.start(context(([1, 2, 3, 4, 2, 3, 9] * size)[:size]))
        commit(drafter, [1, 2])
        frontier = Frontier.from_root(torch.tensor([2]), torch.tensor([True]))
        tokens, counts = torch.tensor([[3, 4, 2]]), torch.tensor([3])
        work.append(calls_of(lambda: (drafter.children(frontier, 4), drafter.commit(tokens, counts))))  # noqa: B023 - called at once
    assert abs(work[0] - work[1]) <= 0.02 * work[0]


def memory_law(make):
    """The same text takes the same memory, whether it came in 300 rounds or in 3, with drafts or without."""
    rng = random.Random(0)
    text = [rng.randrange(20) for _ in range(400)]

    def size(tokens_a_round, drafting):
        drafter = make()
        drafter.start(context(text[:100]))
        for step in range(100, 400, tokens_a_round):
            if drafting:
                ask(drafter, [text[step - 1]], depth=1)
            commit(drafter, text[step : step + tokens_a_round])
        return size_of(drafter)

    few = size(100, False)
    assert few > 400 * 4
    assert size(1, True) < 1.05 * few
    assert size(1, False) < 1.05 * few


@every
def test_memory_after_300_rounds_depends_on_the_text_only(make):
    memory_law(make)


class KeepsItsAnswers(PromptLookupDrafter):
    def __init__(self):
        super().__init__()
        self.kept = []

    def children(self, frontier, count):
        self.kept.append(self._nodes)
        return super().children(frontier, count)


def test_a_leak_is_caught():
    with pytest.raises(AssertionError):
        memory_law(KeepsItsAnswers)


@every
def test_finish_frees_the_rows(make):
    drafter = make()
    sources = drafter._drafters if isinstance(drafter, CombinedDrafter) else [drafter]
    drafter.start(context([1, 2, 1, 2]))
    ask(drafter, [2])
    rows = [weakref.ref(row) for source in sources for row in source._rows]
    drafter.finish()
    gc.collect()
    assert [row() for row in rows] == [None] * len(rows)
    drafter.finish()  # twice does no harm


# ------------------------------------------------------------------------------------------------------------ refusals


def roots(*tokens):
    return Frontier.from_root(torch.tensor(tokens), torch.ones(len(tokens), dtype=torch.bool))


def level(depth, token=1, parent=0):
    return Frontier(torch.tensor([[token]]), torch.tensor([[parent]]), torch.tensor([[True]]), depth)


@pytest.mark.parametrize("make", makers[:3])
def test_calls_outside_a_request_are_refused(make):
    drafter = make()
    for _ in range(2):
        with pytest.raises(SpecdecError, match=r"children was called outside a request; call start"):
            drafter.children(roots(1), 1)
        with pytest.raises(SpecdecError, match=r"commit was called outside a request; call start"):
            commit(drafter, [1])
        drafter.start(context([1]))
        drafter.finish()


@pytest.mark.parametrize(
    ("frontier", "count", "message"),
    [
        (roots(2), 0, "count >= 1"),
        (roots(2, 2), 1, "has 1 rows"),
        (roots(5), 1, "commit every token"),
        (level(2), 1, "level by level"),
        (Frontier(*(torch.zeros(1, 0, dtype=dtype) for dtype in (torch.long, torch.long, torch.bool)), 0), 1, "a node"),
    ],
)
def test_frontiers_out_of_place_are_refused(frontier, count, message):
    drafter = PromptLookupDrafter()
    drafter.start(context([1, 2, 1, 2]))
    with pytest.raises(ShapeError, match=message):
        drafter.children(frontier, count)


def test_a_parent_outside_the_previous_frontier_is_refused():
    drafter = PromptLookupDrafter()
    drafter.start(context([1, 2, 1, 2]))
    drafter.children(roots(2), 1)
    for parent in (-1, 1):
        with pytest.raises(ShapeError, match="not in the previous frontier"):
            drafter.children(level(1, parent=parent), 1)
    drafter.children(level(1), 1)
    commit(drafter, [1])
    with pytest.raises(ShapeError, match="level by level"):  # a round begins with its roots
        drafter.children(level(1), 1)


@pytest.mark.parametrize(("tokens", "counts"), [([[1, -1]], [2]), ([[1]], [2]), ([[1]], [-1])])
def test_commits_that_are_no_tokens_are_refused(tokens, counts):
    drafter = PromptLookupDrafter()
    drafter.start(context([1, 2]))
    with pytest.raises(ShapeError, match="counts must lie in"):
        drafter.commit(torch.tensor(tokens), torch.tensor(counts))
    with pytest.raises(ShapeError, match="has 1 rows"):
        commit(drafter, [1], [2])
