"""Loaded EAGLE-3 drafters compute what an independent, row-by-row reference computes from the same files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import drafters
from specdec.drafters import FeatureDrafter, _buffers
from specdec.drafters.feature import drafter
from tests import helpers
from tests.drafters.feature import eagle_reference
from tests.drafters.feature.common import check_children, start
from tests.drafters.feature.eagle_checkpoints import Written, write

LAYERS = {"num_target_layers": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle 3.1": ("eagle", {"fc_norm": True, "norm_output": True}),
    "specforge": ("specforge", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "specforge, whole vocabulary": ("specforge", {"draft_vocab_size": 97}),
    "deepspec": ("deepspec", {"target_layer_ids": [0, 1], "rms_norm_eps": 1e-5}),
    "speculators": ("speculators", {"norm_before_residual": True, "norm_before_fc": True}),
    "speculators, two layers": ("speculators", {"num_hidden_layers": 2, "attention_bias": True, "norm_output": True}),
    "speculators, qwen3": ("speculators", {"model_type": "qwen3", "norm_before_residual": False}),
    "speculators, window": ("speculators", {"layer_types": ["sliding_attention"], "sliding_window": 3}),
    "speculators, no head": ("speculators", {"without": ("lm_head.weight", "embed_tokens.weight")}),
    "peagle": ("peagle", {}),
    "peagle, window, norms": (
        "peagle",
        {"layer_types": ["sliding_attention"], "sliding_window": 4, "fc_norm": True, "norm_before_residual": True},
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, FeatureDrafter]:
    """A checkpoint of each published format, and what was made of it."""
    dialect, options = VARIANTS[request.param]
    written = write(tmp_path_factory.mktemp("eagle"), dialect, **{**LAYERS, **options})
    found = drafters.from_pretrained(written.folder, helpers.model(), length=4)
    assert isinstance(found, FeatureDrafter)
    return written, found


def reading(written: Written, features: torch.Tensor, tokens: list[int]) -> eagle_reference.Drafted:
    """The reference on one text; a window is that of served drafters, which moves with the row."""
    target = helpers.model()
    embed, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    served = {**written.reference, "window_from": "query", "window_drafted": True}
    return eagle_reference.draft(written.weights, served, features, tokens, **written.matrices(embed, head))


def law_of(written: Written, drafted: eagle_reference.Drafted) -> Callable[[list[int]], tuple[torch.Tensor, Any]]:
    """Target ids and logits after a path."""
    parallel = "mask_hidden" in written.weights
    slots = drafted.slots(4) if parallel else None

    def after(path: list[int]) -> tuple[torch.Tensor, Any]:
        return drafted.target_ids, drafted.logits_after(path) if slots is None else slots[len(path)]

    return after


@settings(max_examples=3)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_laws_along_random_paths(pair: Any, lengths: list[int], seed: int) -> None:
    """Windows, positions, the recurrence, mask rows, reduced vocabularies; in ragged batches, level by level."""
    written, found = pair
    texts = start(found, lengths, seed)
    check_children(found, [law_of(written, reading(written, *text)) for text in texts], seed, levels=4)


@settings(max_examples=2)
@given(seed=st.integers(0, 99), chunk=st.sampled_from([1, 2, 512]))
def test_committed_rows_are_those_of_a_fresh_start(pair: Any, seed: int, chunk: int) -> None:
    """E10: after ragged commits with drafts between them, all is as if the whole text had been the prompt."""
    written, found = pair
    source = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "CHUNK", chunk)
        patch.setattr(_buffers, "STEP", 1)
        texts = start(found, [3, 5], seed)
        for counts in ([2, 1], [0, 3], [1, 0]):
            check_children(found, [law_of(written, reading(written, *text)) for text in texts], seed, levels=2)
            tokens = torch.randint(0, 97, (2, 3), generator=source)
            features = torch.randn(2, 3, texts[0][0].shape[1], generator=source, dtype=torch.float64)
            shown = tokens.masked_fill(torch.arange(3) >= torch.tensor(counts)[:, None], -1)
            found.commit(shown, torch.tensor(counts), features)
            texts = [
                (torch.cat([known, features[row, :count]]), [*text, *tokens[row, :count].tolist()])
                for row, ((known, text), count) in enumerate(zip(texts, counts, strict=True))
            ]
        check_children(found, [law_of(written, reading(written, *text)) for text in texts], seed, levels=3)


@pytest.mark.parametrize("wrong", ["window", "norm_before_residual", "norm_output", "rope"])
def test_the_reference_notices(wrong: str, tmp_path: Path) -> None:
    """A drafter that is wrong in one respect disagrees."""
    options = {"layer_types": ["sliding_attention"], "sliding_window": 3} if wrong == "window" else {}
    written = write(tmp_path, "speculators", **LAYERS, **options)
    found = drafters.from_pretrained(written.folder, helpers.model(), length=4)
    assert isinstance(found, FeatureDrafter)
    settings_ = written.reference
    settings_ |= {
        "window": {"windows": [4]},
        "norm_before_residual": {"norm_before_residual": not settings_["norm_before_residual"]},
        "norm_output": {"norm_output": True},
        "rope": {"rope_theta": 1e3},
    }[wrong]
    texts = start(found, [9], 1)
    with pytest.raises(AssertionError, match="not close"):
        check_children(found, [law_of(written, reading(written, *text)) for text in texts], 1, levels=3)
