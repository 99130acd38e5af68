"""Greedy output equals plain `model.generate`, token for token: every family, chains and trees, batches.

The oracle makes every run contain full, partial and zero acceptance and rounds without drafts. The mutants at the end
show that these runs notice a wrong mask, position, window or cache.
"""

import itertools

import pytest
import torch
from torch import Tensor

from specdec import trees
from specdec.hf import masks
from specdec.hf.cache import RowCache
from specdec.hf.target import ModelTarget
from specdec.protocols import TreeBuilder
from specdec.testing import FAMILIES
from specdec.verify import StepRule
from tests import helpers

NEW_TOKENS = 24

BUSHY = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)]
SHAPES: dict[str, tuple[TreeBuilder, int]] = {
    "chain": (trees.Chain(4), 0),
    "best first": (trees.BestFirst(nodes=9, branch=3, depth=4), 0),
    "best first, right token second": (trees.BestFirst(nodes=14, branch=2, depth=3), 1),
    "fixed": (trees.Fixed(BUSHY), 0),
    "fixed, right token second": (trees.Fixed(BUSHY), 1),
}
"""Tree and rank of the right token among its siblings."""


def reference(family: str, prompts: str) -> Tensor:
    return helpers.text(prompts, NEW_TOKENS, family)


def run(family: str, prompts: str, shape: str, verifier: StepRule | None = None) -> helpers.Run:
    tree, rank = SHAPES[shape]
    return helpers.speculate(
        helpers.model(family),
        helpers.oracle(reference(family, prompts), rank=rank),
        tree,
        verifier=verifier,
        **helpers.batch(helpers.PROMPTS[prompts]),
        max_new_tokens=NEW_TOKENS,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_equal_plain_generate(family, prompts, shape):
    helpers.assert_equal(run(family, prompts, shape), reference(family, prompts))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_the_references_do_not_loop(family, prompts):
    """In a loop a wrong prefix would still give the right token."""
    for row in reference(family, prompts)[:, -16:].tolist():
        assert len(set(itertools.pairwise(row))) > 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_row_of_a_batch_equals_its_own_run(family):
    together = run(family, "ragged", "fixed").output
    for row, prompt in enumerate(helpers.FOUR):
        alone = helpers.plain(helpers.model(family), input_ids=torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)
        assert together[row, -NEW_TOKENS:].tolist() == alone[0, -NEW_TOKENS:].tolist()


def test_a_batch_takes_as_many_passes_as_its_slowest_row():
    passes = len(run("llama", "ragged", "chain").rounds)
    alone = []
    for row, prompt in enumerate(helpers.FOUR):
        tokens = reference("llama", "ragged")[row : row + 1, -NEW_TOKENS - len(prompt) :]
        drafter = helpers.OracleDrafter(tokens, helpers.RAGGED[row])
        request = {"input_ids": torch.tensor([prompt]), "max_new_tokens": NEW_TOKENS}
        alone.append(len(helpers.speculate(helpers.model(), drafter, trees.Chain(4), **request).rounds))
    assert passes == max(alone)


def _positions_by_row(patch: pytest.MonkeyPatch) -> None:
    append = ModelTarget.append

    def shifted(self: ModelTarget, tokens: Tensor, depths: Tensor, visible: Tensor) -> object:
        return append(self, tokens, torch.arange(tokens.shape[1]).expand_as(depths), visible)

    patch.setattr(ModelTarget, "append", shifted)


def _siblings_visible(patch: pytest.MonkeyPatch) -> None:
    append = ModelTarget.append

    def causal(self: ModelTarget, tokens: Tensor, depths: Tensor, visible: Tensor) -> object:
        return append(self, tokens, depths, torch.ones_like(visible).tril())

    patch.setattr(ModelTarget, "append", causal)


def _padding_visible(patch: pytest.MonkeyPatch) -> None:
    visible_slots = masks.visible_slots

    def unpadded(lengths, depths, pending, visible, prompt, *rest):  # noqa: ARG001 - the mistake
        return visible_slots(lengths, depths, pending, visible, None, *rest)

    patch.setattr(masks, "visible_slots", unpadded)


def _no_windows(patch: pytest.MonkeyPatch) -> None:
    visible_slots = masks.visible_slots

    def wide(lengths, depths, pending, visible, prompt, window, first, end):  # noqa: ARG001 - the mistake
        return visible_slots(lengths, depths, pending, visible, prompt, None, first, end)

    patch.setattr(masks, "visible_slots", wide)


def _nothing_moves(patch: pytest.MonkeyPatch) -> None:
    keep = RowCache.keep

    def in_place(self: RowCache, nodes: Tensor, counts: Tensor) -> None:
        keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts)

    patch.setattr(RowCache, "keep", in_place)


MUTANTS = {
    "positions by row, not by depth": (_positions_by_row, "llama"),
    "siblings see each other": (_siblings_visible, "llama"),
    "padding is visible": (_padding_visible, "llama"),
    "windows are ignored": (_no_windows, "gemma3"),
    "the accepted path is not moved": (_nothing_moves, "llama"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_target_is_noticed(monkeypatch, name):
    mutate, family = MUTANTS[name]
    expected = reference(family, "ragged").tolist()
    mutate(monkeypatch)
    assert run(family, "ragged", "fixed, right token second").output.tolist() != expected


def test_a_wrong_verifier_is_noticed():
    output = run("llama", "one", "chain", helpers.AcceptEverything()).output
    assert output.tolist() != reference("llama", "one").tolist()


def test_a_vacuous_run_is_noticed():
    tokens = reference("llama", "one")
    drafter = helpers.OracleDrafter(tokens, [9])
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW_TOKENS}
    perfect = helpers.speculate(helpers.model(), drafter, trees.Chain(4), **request)
    with pytest.raises(AssertionError, match="empty"):
        helpers.assert_equal(perfect, tokens)
