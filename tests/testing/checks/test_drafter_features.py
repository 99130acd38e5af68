"""The checker hands features to drafters that read them, and finds those that take the wrong ones."""

import dataclasses
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from specdec import drafters
from specdec.drafters import BlockDrafter, FeatureDrafter
from specdec.errors import LawError, ShapeError, UnsupportedError
from specdec.protocols import DraftContext
from specdec.testing import check_drafter
from tests import helpers
from tests.drafters.block import checkpoints as block
from tests.drafters.feature import eagle_checkpoints as eagle
from tests.drafters.feature import medusa_checkpoints as medusa

TEXT = torch.tensor([[5, 6, 7, 8, 6, 9, 5, 6, 7], [0, 0, 3, 4, 3, 4, 3, 5, 3], [7, 5] * 4 + [7], [0] * 7 + [11, 12]])
MASK = torch.tensor([[True] * 9, [False] * 2 + [True] * 7, [True] * 9, [False] * 7 + [True] * 2])


def context(rows: int = 4) -> DraftContext:
    return DraftContext(tokens=TEXT[:rows].clone(), mask=MASK[:rows].clone(), vocab_size=97)


WRITERS: dict[str, Any] = {
    **{
        name: partial(block.write, dialect=name)
        for name in ("dflash_flat", "dflash2", "dspark_rnn", "speculators_dspark")
    },
    **{f"eagle3 {name}": partial(eagle.write, dialect=name, num_target_layers=2) for name in ("eagle", "peagle")},
    "medusa": partial(medusa.write, heads=3),
}


@cache
def model_of(kind: str) -> Any:
    folder = Path(mkdtemp())
    WRITERS[kind](folder)
    return drafters.from_pretrained(folder, helpers.model()).model


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", WRITERS)
def test_lawful_drafters_pass(kind: str, rows: int) -> None:
    model = model_of(kind)
    drafter = FeatureDrafter(model) if "eagle" in kind or kind == "medusa" else BlockDrafter(model)
    check_drafter(drafter, context(rows), target=helpers.model())


def test_features_may_come_from_a_function() -> None:
    """A drafter cannot tell states that were made up; one table for all layers will do."""
    table = torch.randn(97, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drafter = BlockDrafter(model_of("dflash_flat"))
    check_drafter(drafter, context(2), target=lambda ids: table[ids].cumsum(1))


class LooksBack(FeatureDrafter):
    """Pairs a committed token with the state after it."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts, features.roll(-1, 1))


class ReadsPastCounts(FeatureDrafter):
    """Takes all columns, also those that are no row's."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens.clamp_min(0), torch.full_like(counts, tokens.shape[1]), features)


class Deaf(FeatureDrafter):
    """Keeps the context of the prompt."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts, features * 0)


class BelievesItself(FeatureDrafter):
    """Keeps a row that it computed of its own guess."""

    def children(self, frontier, count):
        found = super().children(frontier, count)
        if frontier.depth == 1:
            self._started().keep([1] * len(frontier.tokens))
        return found


class Mixes(BlockDrafter):
    """Shows each row the states of the first one."""

    def start(self, context):
        super().start(dataclasses.replace(context, features=context.features[:1].expand_as(context.features)))

    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts, features[:1].expand_as(features))


class ShiftsBlock(BlockDrafter):
    """The states of a round one row late."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts, features.roll(1, 1))


class SkipsAState(BlockDrafter):
    """Leaves the newest state out."""

    def commit(self, tokens, counts, features=None):
        super().commit(tokens, (counts - 1).clamp_min(0), features)


class ReadsTheRoot(BlockDrafter):
    """Takes the column of the root, which has no state yet."""

    def start(self, context):
        super().start(context)
        self._extend(context.features[:, -1:], torch.ones(context.tokens.shape[0], dtype=torch.int64))


class Scales(BlockDrafter):
    """Changes what it was given."""

    def start(self, context):
        super().start(context)
        context.features.mul_(2)


class ScalesCommitted(BlockDrafter):
    def commit(self, tokens, counts, features=None):
        super().commit(tokens, counts, features)
        features.mul_(2)


MUTANTS = {
    LooksBack: "never NaN|given at first, then committed|came one by one",
    ReadsPastCounts: "never NaN",
    Deaf: "given at first, then committed",
    BelievesItself: "were drafted, then not",
    Mixes: "rows may not depend on each other|given at first, then committed",
    ShiftsBlock: "never NaN|came one by one",
    SkipsAState: "given at first, then committed|came one by one",
    ReadsTheRoot: "never NaN",
    Scales: "start changed the tensors",
    ScalesCommitted: "commit changed the tensors",
}


@pytest.mark.parametrize(("mutant", "message"), MUTANTS.items(), ids=[kind.__name__ for kind in MUTANTS])
def test_misbehaviour_is_found(mutant: Any, message: str) -> None:
    kind = "eagle3 eagle" if issubclass(mutant, FeatureDrafter) else "dflash_flat"
    with pytest.raises(LawError, match=message):
        check_drafter(mutant(model_of(kind)), context(), target=helpers.model())


def test_what_cannot_be_checked_is_told() -> None:
    drafter = BlockDrafter(model_of("dflash_flat"))
    with pytest.raises(UnsupportedError, match=r"layers \(1, 2\): pass target="):
        check_drafter(drafter, context(1))
    short: Any = lambda ids: torch.zeros(1, ids.shape[1] - 1, 96)  # noqa: E731 - a function of one line
    with pytest.raises(ShapeError, match=r"must give features \[1, 9, features\] of 9 ids, got \[1, 8, 96\]"):
        check_drafter(drafter, context(1), target=short)
    nothing: Any = lambda ids: None  # noqa: ARG005, E731 - as above
    with pytest.raises(ShapeError, match="got NoneType"):
        check_drafter(drafter, context(1), target=nothing)
