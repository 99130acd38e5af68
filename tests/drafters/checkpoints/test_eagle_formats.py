"""EAGLE-3 in five published formats: one specification, with what they do not say told or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import drafters
from specdec.errors import UnsupportedError
from tests import helpers
from tests.drafters.feature.eagle_checkpoints import ABSENT, DIALECTS, write

EXPECTED: dict[str, dict[str, Any]] = {
    "eagle": {"family": "eagle3", "head_dim": 12, "draft_vocab_size": 61, "own_embedding": False, "depth": 7},
    "specforge": {"family": "eagle3", "head_dim": 16, "draft_vocab_size": 61},
    "deepspec": {
        "family": "eagle3",
        "head_norms": True,
        "draft_vocab_size": 97,
        "own_embedding": True,
        "own_head": True,
    },
    "speculators": {"family": "eagle3", "norm_before_residual": True, "own_embedding": True, "depth": 5},
    "peagle": {"family": "peagle", "mask_token_id": 96, "head_norms": True, "norm_before_residual": False},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_format_becomes_one_specification(dialect: str, tmp_path: Path) -> None:
    written = write(tmp_path, dialect, num_target_layers=2)
    found = drafters.inspect(tmp_path)
    assert {name: getattr(found.spec, name) for name in EXPECTED[dialect]} == EXPECTED[dialect]
    assert found.spec.feature_layers == written.feature_layers
    assert found.unknown == ()
    assert all(note.field in str(found) and note.source in str(found) for note in found.notes)
    assert ("mask_token_id" in str(found)) == (dialect == "peagle")


@pytest.mark.parametrize("dialect", ["eagle", "speculators"])
def test_states_that_the_number_of_layers_decides(dialect: str, tmp_path: Path) -> None:
    """SafeAILab's files do not say which states are read; those of speculators may say null."""
    missing = {"eagle_aux_hidden_state_layer_ids": None} if dialect == "speculators" else {}
    write(tmp_path, dialect, **missing)
    with pytest.raises(UnsupportedError, match=r"depends on the number of the target's layers\. Pass target="):
        drafters.inspect(tmp_path)
    assert drafters.inspect(tmp_path, helpers.model(num_hidden_layers=8)).spec.feature_layers == (2, 4, 5)


@pytest.mark.parametrize(("dialect", "expected"), [("specforge", (1, 2, 3)), ("eagle", (0, 1, 2))])
def test_lists_inside_eagle_config(dialect: str, expected: tuple[int, ...], tmp_path: Path) -> None:
    """SpecForge's name the layer whose output is read, others the state before a layer."""
    section = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    options = {"eagle_aux_hidden_state_layer_ids": ABSENT, "eagle_config": section}
    written = write(tmp_path, dialect, num_target_layers=2, **options)
    assert drafters.inspect(tmp_path).spec.feature_layers == expected == written.feature_layers


@pytest.mark.parametrize(
    ("dialect", "section", "overrides", "message"),
    [
        ("speculators", "", {"norm_before_residual": None}, "no 'norm_before_residual'"),
        ("speculators", "", {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ("speculators", "transformer_layer_config", {"mlp_bias": True}, "mlp_bias true"),
        ("speculators", "transformer_layer_config", {"model_type": "gpt2"}, "model_type 'gpt2' is not served"),
        ("speculators", "transformer_layer_config", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("deepspec", "", {"draft_num_hidden_layers": 2}, "draft_num_hidden_layers must be 1"),
        ("peagle", "", {"mask_token_id": 97}, "mask_token_id 97 is no row"),
        ("peagle", "", {"mask_token_id": None}, "no 'mask_token_id'"),
    ],
)
def test_what_is_not_served_is_refused(
    dialect: str, section: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = write(tmp_path, dialect, num_target_layers=2).config
    (config[section] if section else config).update(overrides)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        drafters.inspect(tmp_path)


def test_windows_that_readers_take_in_two_ways(tmp_path: Path) -> None:
    options = {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 3}
    config = write(tmp_path, "speculators", num_target_layers=2, **options).config
    assert drafters.inspect(tmp_path).spec.windows == (3,)
    config["transformer_layer_config"]["use_sliding_window"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="use_sliding_window is false"):
        drafters.inspect(tmp_path)


def test_a_head_that_is_borrowed_is_gathered(tmp_path: Path) -> None:
    """Of a target's head a reduced vocabulary uses its rows; nothing is copied of a whole one."""
    write(tmp_path, "speculators", num_target_layers=2, without=("lm_head.weight", "embed_tokens.weight"))
    found = drafters.inspect(tmp_path)
    assert found.borrowed == ("embedding", "output head")
    loaded = drafters.from_pretrained(tmp_path, helpers.model())
    assert loaded.model.logits(torch.zeros(1, 1, 48, dtype=torch.float64)).shape == (1, 1, 61)


def test_a_shortlist_for_a_whole_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, "deepspec", num_target_layers=2, target_layer_ids=[0, 1])
    shortlist = drafters.Shortlist(torch.arange(0, 97, 3), 97)
    loaded = drafters.from_pretrained(tmp_path, helpers.model(), shortlist=shortlist)
    assert loaded.model.spec.draft_vocab_size == len(shortlist.ids) == 33
    assert torch.equal(
        loaded.model.lm_head.weight,  # type: ignore[union-attr]  # DeepSpec's own
        drafters.from_pretrained(tmp_path, helpers.model()).model.lm_head.weight[shortlist.ids],  # type: ignore[union-attr]  # as above
    )


def test_confidence_is_not_an_option_of_theirs(tmp_path: Path) -> None:
    write(tmp_path, "eagle", num_target_layers=2)
    with pytest.raises(UnsupportedError, match=r"least_confidence=0\.5: eagle3 has no confidence head"):
        drafters.from_pretrained(tmp_path, helpers.model(), least_confidence=0.5)
