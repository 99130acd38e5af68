"""Shortlists: which tokens they have, and that drafting from one is drafting from the full law, restricted."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import SpeculativeGenerator, drafters, trees
from specdec.errors import ShapeError, UnsupportedError
from specdec.protocols import DraftContext
from specdec.types import Frontier
from tests import helpers
from tests.drafters.block.checkpoints import write


@given(st.lists(st.integers(0, 5), min_size=4, max_size=40), st.data())
def test_the_most_frequent_tokens_and_the_pinned_ones(numbers: list[int], data: st.DataObject) -> None:
    counts = torch.tensor(numbers)
    size = data.draw(st.integers(1, len(numbers)))
    pinned = data.draw(st.sets(st.integers(0, len(numbers) - 1), max_size=size))
    found = drafters.Shortlist.from_counts(counts, size, pinned=pinned)
    ids = found.ids.tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == size
    assert pinned <= set(ids)
    ranked = sorted(set(range(len(numbers))) - pinned, key=lambda token: (-numbers[token], token))
    assert set(ids) - pinned == set(ranked[: size - len(pinned)])
    if sum(numbers):
        assert found.coverage(counts) == pytest.approx(sum(numbers[token] for token in ids) / sum(numbers))
    assert counts.tolist() == numbers


def test_what_is_no_list_is_refused() -> None:
    for ids in ([], [1, 1], [-1, 2], [2, 9]):
        with pytest.raises(UnsupportedError, match="expected distinct ids from 0 to 8"):
            drafters.Shortlist(torch.tensor(ids, dtype=torch.int64), 9)
    for size, pinned in ((5, []), (1, [0, 1])):
        with pytest.raises(ShapeError, match=r"must be from \d \(pinned\) to 4"):
            drafters.Shortlist.from_counts(torch.ones(4, dtype=torch.int64), size, pinned=pinned)


SHORT = drafters.Shortlist(torch.arange(3, 97, 3), 97)


def law(drafter: drafters.BlockDrafter, path: list[int]) -> torch.Tensor:
    """The drafter's law after a path of tokens."""
    features = torch.randn(1, 6, drafter.model.fc.in_features, generator=torch.Generator().manual_seed(0))
    tokens = torch.full((1, 6), path[0])
    drafter.start(DraftContext(tokens, torch.ones_like(tokens, dtype=torch.bool), 97, features=features.double()))
    for depth, token in enumerate(path):
        asked = Frontier(torch.tensor([[token]]), torch.tensor([[0]]), torch.tensor([[True]]), depth)
        found = drafter.children(asked, 5)
    return found.law(97)[0, 0]


@pytest.mark.parametrize("dialect", ["dflash_flat", "dspark_vanilla", "dspark_rnn", "speculators_dspark"])
def test_the_law_is_the_full_one_restricted(dialect: str, tmp_path: Path) -> None:
    """Own heads, borrowed ones, and the Markov head's rows are cut alike."""
    target, folder = helpers.model(), write(tmp_path, dialect).folder
    if dialect == "speculators_dspark":
        with pytest.raises(UnsupportedError, match="has a reduced vocabulary already"):
            drafters.from_pretrained(folder, target, shortlist=SHORT)
        return
    whole = drafters.from_pretrained(folder, target)
    short = drafters.from_pretrained(folder, target, shortlist=SHORT)
    assert short.model.spec.draft_vocab_size == len(SHORT.ids)
    for path in ([7], [7, 9], [7, 9, 4]):
        full, cut = law(whole, path), law(short, path)
        expected = torch.zeros_like(full)
        expected[SHORT.ids] = full[SHORT.ids] / full[SHORT.ids].sum()
        torch.testing.assert_close(cut, expected, rtol=1e-10, atol=1e-12)


def test_the_selector_chooses_among_the_list(tmp_path: Path) -> None:
    """Its candidates are the best of the list, with the edges of their own tokens; all tokens change nothing."""
    target, folder = helpers.model(), write(tmp_path, "dflash2").folder
    whole = drafters.from_pretrained(folder, target)
    everything = drafters.from_pretrained(folder, target, shortlist=drafters.Shortlist(torch.arange(97), 97))
    short = drafters.from_pretrained(folder, target, shortlist=SHORT)
    for path in ([7], [7, 9]):
        torch.testing.assert_close(law(everything, path), law(whole, path))
        found = law(short, path)
        assert set(found.nonzero().squeeze(1).tolist()) <= set(SHORT.ids.tolist())
        assert int((found > 0).sum()) == short.model.spec.selector_top_k
    model, previous = short.model, torch.tensor([[9]])
    hidden, logits = torch.randn(1, 48, dtype=torch.float64), torch.randn(1, len(SHORT.ids), dtype=torch.float64)
    dense = torch.full((1, 97), -torch.inf, dtype=torch.float64)
    dense[:, SHORT.ids] = logits
    ids, scores, _ = model.scores(hidden, logits, previous)
    wanted_ids, wanted, _ = whole.model.scores(hidden, dense, previous)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(scores, wanted)


@pytest.mark.parametrize("dialect", ["dflash_flat", "dflash2", "dspark_gated"])
def test_the_text_is_the_targets(dialect: str, tmp_path: Path) -> None:
    target = helpers.model()
    drafter = drafters.from_pretrained(write(tmp_path, dialect).folder, target, shortlist=SHORT)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 16}
    made = helpers.speculate(target, drafter, trees.BestFirst(20), **request)
    assert made.output.tolist() == helpers.text("ragged", 16).tolist()
    drafted = torch.cat([round.tree.tokens[:, 1:][round.tree.valid[:, 1:]] for round in made.rounds])
    assert len(drafted) > 50
    assert set(drafted.tolist()) <= set(SHORT.ids.tolist())


@pytest.mark.parametrize("execution", ["host", "device"])
def test_misses_are_counted(execution: str, tmp_path: Path) -> None:
    """Every committed token that the list does not have, in each row, whichever rounds are run."""
    target = helpers.model()
    drafter = drafters.from_pretrained(write(tmp_path, "dflash2").folder, target, shortlist=SHORT)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    generator = SpeculativeGenerator(target, drafter, trees.BestFirst(12), execution=execution)
    new = generator.generate(**request)[:, request["input_ids"].shape[1] :].tolist()
    expected = [sum(token not in SHORT.ids.tolist() for token in row) for row in new]
    stats = generator.stats
    assert [stats.row(row).shortlist_misses for row in range(len(new))] == expected
    assert stats.shortlist_misses == stats.to_dict()["shortlist_misses"] == sum(expected) > 0
    assert sum(expected) < stats.new_tokens
    assert f"{sum(expected)} of {stats.new_tokens} tokens" in str(stats)


def test_each_miss_ends_its_round(tmp_path: Path) -> None:
    """A token that cannot be drafted can only be a bonus token."""
    target = helpers.model()
    drafter = drafters.from_pretrained(write(tmp_path, "dflash2").folder, target, shortlist=SHORT)
    made = helpers.speculate(
        target, drafter, trees.BestFirst(20), input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=24
    )
    listed = set(SHORT.ids.tolist())
    bonus = [int(round.committed[0, int(round.num_committed[0]) - 1]) for round in made.rounds]
    assert sum(token not in listed for token in bonus) == made.generator.stats.shortlist_misses > 0


def test_lists_of_several_sources(tmp_path: Path) -> None:
    """What one source misses another may propose; a source without a list proposes anything."""
    target, folder = helpers.model(), write(tmp_path, "dflash_flat").folder
    other = drafters.Shortlist(torch.arange(1, 97, 2), 97)
    ours, theirs, whole = (
        drafters.from_pretrained(folder, target, **options)
        for options in ({"shortlist": SHORT}, {"shortlist": other}, {})
    )
    assert (ours.shortlist, whole.shortlist) == (SHORT, None)
    both = drafters.CombinedDrafter(ours, theirs).shortlist
    assert both is not None
    assert set(both.ids.tolist()) == set(SHORT.ids.tolist()) | set(other.ids.tolist())
    assert drafters.CombinedDrafter(ours, drafters.PromptLookupDrafter()).shortlist is None
    assert drafters.CombinedDrafter(ours, whole).shortlist is None
