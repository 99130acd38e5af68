"""Garbage in every slot that must not be read leaves the output as it is, bit by bit (field log, classes b and e)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import trees
from specdec.hf import masks
from specdec.testing import OracleDrafter
from tests import helpers
from tests.hf.texts import ROWS, model, poisoned

POISONED = ["llama", "gpt2", "mistral", "gemma3", "gemma4_shared", "gpt_oss"]


def spoiled_padding(request: dict[str, Tensor]) -> dict[str, Tensor]:
    """The request with other tokens in its padding."""
    ids = torch.where(request["attention_mask"].bool(), request["input_ids"], 77)
    return {**request, "input_ids": ids}


def recorded(family: str, request: dict[str, Tensor]) -> tuple[Any, ...]:
    """Ids, logits and drafted trees of a call with ragged acceptance."""
    target_model = model(family, "eager" if family == "gpt_oss" else "sdpa")
    reference = helpers.plain(target_model, **helpers.batch(ROWS), max_new_tokens=24)
    run = helpers.speculate(
        target_model,
        OracleDrafter(reference, helpers.RAGGED),
        trees.Fixed([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (1, 0)]),
        **request,
        max_new_tokens=24,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = run.output.sequences[:, request["input_ids"].shape[1] :].tolist()
    return (
        new,
        [step.tolist() for step in run.output.logits],
        [round.tree.tokens.tolist() for round in run.rounds],
        run.kinds,
    )


@pytest.mark.parametrize("family", POISONED)
@pytest.mark.parametrize("value", [1e4, -1e4])
def test_poison_rejected_unwritten_and_forgotten_slots_are_never_read(family, value):
    """Bit-identical output with garbage in every slot past a row's length, before its window, and in its padding."""
    request = helpers.batch(ROWS)
    clean = recorded(family, request)
    assert clean[-1] == helpers.ALL_KINDS
    with poisoned(value):
        assert recorded(family, spoiled_padding(request)) == clean


def test_poison_is_noticed_where_one_slot_too_many_is_seen(monkeypatch):
    clean = recorded("llama", helpers.batch(ROWS))
    build = masks.visible_slots

    def generous(lengths: Tensor, *rest: Any) -> Tensor:
        mask = build(lengths, *rest)
        mask[..., -1] = True
        return mask

    monkeypatch.setattr(masks, "visible_slots", generous)
    with poisoned(1e4):
        assert recorded("llama", helpers.batch(ROWS)) != clean
