"""The one object that turns target ids into draft ids and back, and laws with them (field log, class d)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafters import VocabularyMap
from specdec.errors import UnsupportedError
from tests.drafters.tokenizers import byte_level
from tests.trees.random_trees import caught


def pairs(seed: int, target_size: int, draft_size: int, shared: int) -> tuple[list[int], list[int]]:
    """Random partners: shared ids of both sides, in any order."""
    rng = torch.Generator().manual_seed(seed)
    count = max(1, min(shared, target_size, draft_size))
    target = torch.randperm(target_size, generator=rng)[:count].tolist()
    return target, torch.randperm(draft_size, generator=rng)[:count].tolist()


CASES = {
    "seed": st.integers(0, 2**32),
    "target_size": st.integers(1, 12),
    "draft_size": st.integers(1, 12),
    "shared": st.integers(1, 12),
    "temperature": st.sampled_from([0.3, 1.0, 2.5]),
    "count": st.integers(1, 15),
}


def law(
    cls: type[VocabularyMap],
    seed: int,
    target_size: int,
    draft_size: int,
    shared: int,
    temperature: float,
    count: int,
) -> None:
    target, draft = pairs(seed, target_size, draft_size, shared)
    known = cls(target, draft, target_size=target_size, draft_size=draft_size)
    logits = 3 * torch.randn(2, 3, draft_size, generator=torch.Generator().manual_seed(seed))
    tokens, log_probs, probs = known.propose(logits, count, temperature)
    assert torch.equal(probs, known.law(logits, temperature))
    assert probs.shape == (2, 3, target_size)
    assert tokens.shape == log_probs.shape == (2, 3, min(count, len(target)))
    for i in range(2):
        for j in range(3):
            weights = {t: math.exp(float(logits[i, j, d]) / temperature) for t, d in zip(target, draft, strict=True)}
            total = sum(weights.values())
            expected = [weights.get(token, 0.0) / total for token in range(target_size)]
            assert probs[i, j].tolist() == pytest.approx(expected, abs=1e-6)
            best = sorted(weights.values(), reverse=True)[:count]
            assert log_probs[i, j].exp().tolist() == pytest.approx([weight / total for weight in best], abs=1e-6)
            assert len(set(tokens[i, j].tolist())) == tokens.shape[2]
            assert probs[i, j, tokens[i, j]].tolist() == pytest.approx(log_probs[i, j].exp().tolist(), abs=1e-6)


@given(**CASES)
def test_d7_laws_convert_with_the_ids(**case):
    """Statistics inside a shortlist: the law must be over the target's ids, zero where the draft has no token."""
    law(VocabularyMap, **case)


class WithoutScatter(VocabularyMap):
    """A wrong map: the law stays in the order of the shortlist."""

    def _scatter(self, shared: Tensor) -> Tensor:
        return torch.nn.functional.pad(shared, (0, self.target_size - shared.shape[-1]))


class WithoutNormalisation(VocabularyMap):
    """A wrong map: probabilities of the whole draft vocabulary, of which a part is dropped."""

    def log_law(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.log_softmax(logits / temperature, -1)[..., self._draft]


class WithoutTemperature(VocabularyMap):
    """A wrong map: drawn at one temperature, reported at another."""

    def log_law(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return super().log_law(logits, 1.0)


class DraftIds(VocabularyMap):
    """A wrong map: proposals leave as draft ids."""

    def propose(self, logits: Tensor, count: int, temperature: float = 1.0) -> Any:
        _, log_probs, probs = super().propose(logits, count, temperature)
        return self._draft[self.log_law(logits, temperature).topk(log_probs.shape[-1]).indices], log_probs, probs


@pytest.mark.parametrize("cls", [WithoutScatter, WithoutNormalisation, WithoutTemperature, DraftIds])
def test_a_wrong_map_is_noticed(cls):
    caught(law, cls, **CASES)


@given(seed=CASES["seed"], target_size=CASES["target_size"], draft_size=CASES["draft_size"], shared=CASES["shared"])
def test_ids_convert_there_and_back(seed, target_size, draft_size, shared):
    target, draft = pairs(seed, target_size, draft_size, shared)
    known = VocabularyMap(target, draft, target_size=target_size, draft_size=draft_size, pieces={0: [3, 4]})
    table = dict(zip(target, draft, strict=True))
    assert known.shared_ids(torch.arange(target_size)).tolist() == [table.get(i, -1) for i in range(target_size)]
    for token in range(target_size):
        assert known.to_draft(token) == ([table[token]] if token in table else [3, 4] if token == 0 else [0])
    assert len(known) == len(target)


@pytest.mark.parametrize(("target_size", "draft_size"), [(104, 97), (97, 104), (97, 97), (90, 90)])
def test_d1_padding_rows_are_never_proposed(target_size, draft_size):
    """Sizes compared instead of tokenizers: padded vocabularies of one tokenizer differ."""
    known = VocabularyMap.same_tokenizer(target_size, draft_size, 90)
    logits = torch.randn(1, 1, draft_size)
    logits[..., 90:] = 50.0
    tokens, _, probs = known.propose(logits, 200)
    assert tokens.shape[-1] == 90
    assert int(tokens.max()) == 89
    assert probs.shape[-1] == target_size
    assert float(probs[..., 90:].sum()) == 0
    assert float(probs.sum()) == pytest.approx(1)


def test_d1_without_a_tokenizer_every_row_of_both_is_shared():
    assert len(VocabularyMap.same_tokenizer(104, 97)) == 97
    assert len(VocabularyMap.same_tokenizer(97, 104)) == 97


def test_d5_a_reduced_vocabulary_needs_a_map():
    """A draft vocabulary of 32 that silently means ids 0 to 31."""
    with pytest.raises(UnsupportedError, match="32 rows of logits for a tokenizer of 90 entries"):
        VocabularyMap.same_tokenizer(104, 32, 90)
    descending = VocabularyMap(range(89, 57, -1), range(32), target_size=104, draft_size=32)
    tokens, _, _ = descending.propose(torch.eye(32)[None] * 9, 1)
    assert tokens[0, :, 0].tolist() == list(range(89, 57, -1))


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ([1, 2, 2], [0, 1, 2], "target ids repeat"),
        ([1, 2, 3], [0, 1, 1], "draft ids repeat"),
        ([1, 2, 8], [0, 1, 2], r"target ids span 1\.\.8, outside 0\.\.7"),
        ([1, 2, 3], [0, 1, 4], r"draft ids span 0\.\.4, outside 0\.\.3"),
        ([-1, 2, 3], [0, 1, 2], r"target ids span -1\.\.3"),
        ([1, 2], [0, 1, 2], "share no tokens"),
        ([], [], "share no tokens"),
    ],
)
def test_d5_a_map_is_one_to_one_and_inside_both_vocabularies(target, draft, message):
    with pytest.raises(UnsupportedError, match=message):
        VocabularyMap(target, draft, target_size=8, draft_size=4)


@pytest.mark.parametrize(("first", "second"), [(300, 400), (400, 300)])
def test_d2_tokens_with_the_same_text_are_shared_and_others_fed_as_their_text(first, second):
    target, draft = byte_level(first, "english"), byte_level(second, "numbers")
    known = VocabularyMap.from_tokenizers(target, draft, target_size=first + 4, draft_size=second + 8)
    assert 257 <= len(known) < min(first, second)
    longer = 0
    for token in range(first):
        fed = known.to_draft(token)
        single = int(known.shared_ids(torch.tensor(token)))
        assert draft.decode(fed) == target.decode([token])
        assert (single >= 0) == (len(fed) == 1)
        longer += len(fed) > 1
    assert longer > 10
    assert known.shared_ids(torch.arange(first, first + 4)).tolist() == [-1] * 4, "padding rows have no text"


class Words:
    """A tokenizer that is a dictionary."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._vocabulary = vocabulary
        self._texts = {index: token for token, index in vocabulary.items()}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocabulary)

    def decode(self, ids: list[int]) -> str:
        return "".join(self._texts[index] for index in ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self._vocabulary[letter] for letter in text if letter in self._vocabulary]


def test_spellings_of_a_space_are_one_text_and_a_second_spelling_is_fed_as_the_first():
    """Two target tokens may mean one draft token; only one of them can be proposed."""
    target = Words({"\u2581a": 0, "\u0120a": 1, "b": 2, "ab": 3, "?": 4, "far": 9})
    draft = Words({"\u0120a": 5, "b": 1, "a": 2, "beyond": 7})
    known = VocabularyMap.from_tokenizers(target, draft, target_size=6, draft_size=6)
    assert known.shared_ids(torch.arange(6)).tolist() == [5, -1, 1, -1, -1, -1]
    assert [known.to_draft(token) for token in range(5)] == [[5], [5], [1], [2, 1], [0]]


def test_tokenizers_that_share_nothing_are_refused():
    with pytest.raises(UnsupportedError, match="share no tokens"):
        VocabularyMap.from_tokenizers(Words({"a": 0}), Words({"b": 0}), target_size=1, draft_size=1)
