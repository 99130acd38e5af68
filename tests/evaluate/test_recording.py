"""A recording survives its file, and recordings add up."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec import drafters, trees
from specdec.errors import UnsupportedError
from specdec.evaluate import Answer, RecordedRequest, RecordedRound, Recording, replay
from specdec.types import Candidates, Frontier
from tests import helpers
from tests.drafters.block.test_rounds import drafter_of
from tests.evaluate import runs
from tests.evaluate.runs import Live, Scripted, record

TREE = trees.BestFirst(nodes=9, temperature=1.5)


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same down to the types of their tensors."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    if is_dataclass(one):
        return all(equal(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    return type(one) is type(other) and one == other


def lives() -> list[Live]:
    """float64 block answers, float32 lookup answers; batches of four and one; rounds without drafts."""
    block = record(helpers.model(), drafter_of("llama", "dflash_flat"), TREE, helpers.FOUR)
    lookup = record(runs.talker(), drafters.PromptLookupDrafter(), TREE, [[5, 6, 5, 6]],
                    controller=Scripted([9, 0, 4]), do_sample=True)  # fmt: skip
    return [block, lookup]


def test_a_file_holds_everything(tmp_path: Path) -> None:
    first, second = (live.recording for live in lives())
    both = first + second
    assert {answer.candidates.log_probs.dtype for round in both.rounds for answer in round.answers} == {
        torch.float64,
        torch.float32,
    }
    both.save(tmp_path / "both.safetensors")
    loaded = Recording.load(str(tmp_path / "both.safetensors"))
    assert equal(loaded, both)
    assert runs.outcome(replay(loaded, TREE).rounds) == runs.outcome(replay(both, TREE).rounds)
    assert not equal(loaded, second + first)
    changed = Recording(loaded.requests)
    changed.requests[0].rounds[0].answers[0].candidates.log_probs[0, 0, 0] -= 1e-6
    assert not equal(changed, both)


def test_recordings_add_up() -> None:
    first, second = (live.recording for live in lives())
    both = first + second
    assert both.rounds == first.rounds + second.rounds
    assert runs.outcome(replay(both, TREE).rounds) == [
        *runs.outcome(replay(first, TREE).rounds),
        *runs.outcome(replay(second, TREE).rounds),
    ]
    counts = [count for round in both.rounds for count in round.committed.tolist() if count]
    assert both.tokens_per_round == sum(counts) / len(counts)
    assert Recording().tokens_per_round == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_precision_and_missing_proposals_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([[[-0.1, -1 / 3, -torch.inf]]], dtype=dtype)
    root = torch.tensor([2**31 - 1])
    answer = Answer(Frontier.from_root(root, root > 0), Candidates(torch.tensor([[[7, 8, 0]]]), log_probs), asked=3)
    none = torch.zeros(1, dtype=torch.int64)
    request = RecordedRequest(
        texts=torch.tensor([[2**31 - 1, 7, 8]]),
        rounds=(RecordedRound(none, none + 2, none + 2, 1, (answer, answer)), RecordedRound(none, none, none, 0, ())),
        nodes=4,
        vocab_size=9,
        marginal=True,
    )
    Recording((request,)).save(tmp_path / "one.safetensors")
    assert equal(Recording.load(tmp_path / "one.safetensors"), Recording((request,)))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"other\.safetensors is not a recording of version 1.*pt"):
        Recording.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(UnsupportedError, match=r"other\.safetensors cannot be read"):
        Recording.load(path)


def test_what_comes_after_a_root_ends_with_the_text() -> None:
    none = torch.tensor([0, 0])
    request = RecordedRequest(torch.tensor([[5, 6, 7, 8], [9, 4, -1, -1]]), (), nodes=4, vocab_size=10, marginal=False)
    round = RecordedRound(torch.tensor([1, 1]), none, none, 0, ())
    assert request.roots(round).tolist() == [6, 4]
    assert request.ahead(round, 3).tolist() == [[7, 8, -1], [-1, -1, -1]]
