"""Beside z-lab's own package, where it is installed: the same outputs and the same greedy path.

It is no requirement of the tests; `tests/drafters/block/reference.py` is the independent check that always runs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import drafters
from tests import helpers
from tests.drafters.block.checkpoints import write

published: Any = pytest.importorskip("dflash.model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dialect", ["dflash_flat", "dflash_nested", "dflash2"])
def test_outputs_and_greedy_path(dialect: str, tmp_path: Path) -> None:
    target = helpers.model()
    written = write(tmp_path, dialect)
    ours = drafters.from_pretrained(written.folder, target)
    kind = published.DFlash2DraftModel if dialect == "dflash2" else published.DFlashDraftModel
    theirs = kind.from_pretrained(written.folder, dtype=torch.float64).eval()
    features, anchor, rows = torch.randn(1, 9, ours.model.fc.in_features, dtype=torch.float64), torch.tensor([11]), 6
    tokens = torch.full((1, rows), ours.model.spec.mask_token_id)
    tokens[:, 0] = anchor
    context = ours.model.context()
    with torch.no_grad():
        ours.model.extend(context, features, torch.tensor([9]))
        hidden = ours.model.slots(anchor, context, rows)
        expected = theirs(
            position_ids=torch.arange(9 + rows)[None],
            noise_embedding=target.get_input_embeddings()(tokens),
            target_hidden=features,
        )[:, 1:]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)  # theirs turns heads in float32
    if dialect != "dflash2":
        return
    path, _, _ = theirs.propose(expected, anchor, target.get_output_embeddings(), 0.0)
    previous, found = anchor[:, None], []
    for slot in range(rows - 1):
        ids, scores = ours.model.candidate_selector(hidden[:, slot], ours.model.logits(hidden)[:, slot], previous)
        previous = ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        found.append(previous)
    assert torch.equal(torch.cat(found, 1), path)
