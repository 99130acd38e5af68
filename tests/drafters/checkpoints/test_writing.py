"""What is written in a published format loads bit-equal; what the format cannot say is refused."""

import inspect
from pathlib import Path

import pytest
import torch

from specdec import drafters
from specdec.drafters.checkpoints.writing import Publisher
from specdec.errors import UnsupportedError
from tests import helpers
from tests.drafters.block.checkpoints import DIALECTS, write

PUBLISHERS: tuple[Publisher, ...] = ("z-lab", "speculators")
SAYS: dict[str, set[Publisher]] = {
    "dflash_flat": {"z-lab", "speculators"},
    "dflash_nested": {"z-lab"},
    "dflash2": {"z-lab"},
    "speculators_dflash": {"speculators"},
    "speculators_dspark": {"speculators"},
    "speculators_dflash2": {"speculators"},
}
"""Formats that can say what each drafter is; those of DeepSpec own an embedding."""


SERVED = [(dialect, publisher) for dialect, publishers in SAYS.items() for publisher in sorted(publishers)]
REFUSED = [
    (dialect, publisher) for dialect in DIALECTS for publisher in PUBLISHERS if (dialect, publisher) not in SERVED
]


@pytest.mark.parametrize(("dialect", "publisher"), SERVED)
def test_a_round_trip_is_bit_equal(dialect: str, publisher: Publisher, tmp_path: Path) -> None:
    target = helpers.model()
    before = drafters.from_pretrained(write(tmp_path / "a", dialect).folder, target)
    folder = drafters.save_pretrained(before, tmp_path / "b", publisher=publisher, verifier="tiny/llama")
    after = drafters.from_pretrained(folder, target)
    assert after.model.spec == before.model.spec
    assert drafters.inspect(folder).unknown == ()
    mine, theirs = before.model.state_dict(), after.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    kept, found = before.model.shortlist, after.model.shortlist
    assert (kept is None) == (found is None)
    assert kept is None or torch.equal(kept.ids, found.ids)


@pytest.mark.parametrize(("dialect", "publisher"), REFUSED)
def test_what_a_format_cannot_say_is_refused(dialect: str, publisher: Publisher, tmp_path: Path) -> None:
    drafter = drafters.from_pretrained(write(tmp_path / "a", dialect).folder, helpers.model())
    with pytest.raises(UnsupportedError, match=f"the format of {publisher} cannot say "):
        drafters.save_pretrained(drafter, tmp_path / "b", publisher=publisher)
    assert not (tmp_path / "b").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    drafter = drafters.from_pretrained(write(tmp_path, "dflash_flat").folder, helpers.model())
    with pytest.raises(UnsupportedError, match="holds a checkpoint already"):
        drafters.save_pretrained(drafter, tmp_path)
    with pytest.raises(UnsupportedError, match="publisher must be"):
        inspect.unwrap(drafters.save_pretrained)(drafter, tmp_path / "new", publisher="hub")
