"""What is written in a published format loads bit-equal; what the format cannot say is refused."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specdec import drafters
from specdec.drafters import BlockDrafter, Eagle3Model, EagleSpec, FeatureDrafter, Rope
from specdec.drafters.checkpoints.writing import Publisher
from specdec.errors import UnsupportedError
from tests import helpers
from tests.drafters.block.checkpoints import DIALECTS, write
from tests.drafters.feature import eagle_checkpoints, medusa_checkpoints

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


def check_equal(before: BlockDrafter | FeatureDrafter, folder: Path) -> None:
    """What is in a folder is the same drafter, and nothing of its configuration is overlooked."""
    after = drafters.from_pretrained(folder, helpers.model())
    assert after.model.spec == before.model.spec
    assert drafters.inspect(folder).unknown == ()
    assert isinstance(before.model, torch.nn.Module)
    assert isinstance(after.model, torch.nn.Module)
    mine, theirs = before.model.state_dict(), after.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    kept, found = before.model.shortlist, after.model.shortlist
    assert (kept is None) == (found is None)
    assert kept is None or found is None or torch.equal(kept.ids, found.ids)


@pytest.mark.parametrize(("dialect", "publisher"), SERVED)
def test_a_round_trip_is_bit_equal(dialect: str, publisher: Publisher, tmp_path: Path) -> None:
    before = drafters.from_pretrained(write(tmp_path / "a", dialect).folder, helpers.model())
    folder = drafters.save_pretrained(before, tmp_path / "b", publisher=publisher, verifier="tiny/llama")
    check_equal(before, folder)


@pytest.mark.parametrize(("dialect", "publisher"), REFUSED)
def test_what_a_format_cannot_say_is_refused(dialect: str, publisher: Publisher, tmp_path: Path) -> None:
    drafter = drafters.from_pretrained(write(tmp_path / "a", dialect).folder, helpers.model())
    with pytest.raises(UnsupportedError, match=f"the format of {publisher} cannot say "):
        drafters.save_pretrained(drafter, tmp_path / "b", publisher=publisher)
    assert not (tmp_path / "b").exists()


YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 3}
EAGLE: dict[str, tuple[str, dict[str, Any]]] = {
    **{dialect: (dialect, {}) for dialect in eagle_checkpoints.DIALECTS},
    "eagle 3.1": ("eagle", {"fc_norm": True, "norm_output": True}),
    "eagle, own width": ("eagle", {"hidden_size": 32, "target_hidden_size": 48}),
    "specforge, llama3": ("specforge", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "specforge, linear": ("specforge", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "specforge, whole vocabulary": ("specforge", {"draft_vocab_size": 97}),
    "deepspec, yarn": ("deepspec", {"rope_parameters": YARN}),
    "speculators, one norm": ("speculators", {"norm_before_fc": True}),
    "speculators, two layers": ("speculators", {"num_hidden_layers": 2, "attention_bias": True}),
    "speculators, qwen3, window": ("speculators", {"model_type": "qwen3", **SLIDING}),
    "speculators, window": ("speculators", SLIDING),
    "speculators, borrowed": ("speculators", {"without": ("lm_head.weight", "embed_tokens.weight")}),
}
"""EAGLE-3 and P-EAGLE drafters; the format of speculators says all of them."""


def eagle_of(folder: Path, name: str, **options: Any) -> FeatureDrafter:
    """A drafter of this name."""
    dialect, overrides = EAGLE[name]
    layers = {"target_layer_ids": [0, 1]} if dialect == "deepspec" else {}
    written = eagle_checkpoints.write(folder, dialect, num_target_layers=2, **layers, **overrides)
    found = drafters.from_pretrained(written.folder, helpers.model(), **options)
    assert isinstance(found, FeatureDrafter)
    return found


@pytest.mark.parametrize("name", EAGLE)
def test_a_round_trip_of_eagle_is_bit_equal(name: str, tmp_path: Path) -> None:
    before = eagle_of(tmp_path / "a", name)
    folder = drafters.save_pretrained(before, tmp_path / "b", publisher="speculators", verifier="tiny/llama")
    check_equal(before, folder)
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert isinstance(config["rope_parameters"].get("original_max_position_embeddings", 1), int)
    with pytest.raises(UnsupportedError, match=r"the format of z-lab cannot say family '(eagle3|peagle)'"):
        drafters.save_pretrained(before, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_shortlist_becomes_a_reduced_vocabulary(tmp_path: Path) -> None:
    before = eagle_of(tmp_path / "a", "deepspec", shortlist=drafters.Shortlist(torch.arange(0, 97, 3), 97))
    check_equal(before, drafters.save_pretrained(before, tmp_path / "b", publisher="speculators"))
    mixed = eagle_of(tmp_path / "c", "deepspec", shortlist=drafters.Shortlist(torch.tensor([5, 3, 9]), 97))
    with pytest.raises(UnsupportedError, match="cannot say a shortlist whose ids do not rise"):
        drafters.save_pretrained(mixed, tmp_path / "d", publisher="speculators")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("speculators", {"rope": Rope(1e4, 8)}, "what its readers refuse: partial_rotary_factor below 1"),
        ("speculators", {"windows": (3, 5)}, r"windows \(3, 5\)"),
    ],
)
def test_what_cannot_be_said_of_eagle(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = eagle_of(tmp_path / "a", name).model
    assert isinstance(model.spec, EagleSpec)
    changed = Eagle3Model(dataclasses.replace(model.spec, **changes), model.shortlist)
    with pytest.raises(UnsupportedError, match=f"the format of speculators cannot say {message}"):
        drafters.save_pretrained(FeatureDrafter(changed), tmp_path / "b", publisher="speculators")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["dspark", "speculators, window", "speculators, qwen3, window"])
def test_transformers_reads_the_window_that_was_meant(name: str, tmp_path: Path) -> None:
    """Its configuration of Qwen3 forgets a window unless it is told to use it."""
    if name == "dspark":
        written = write(tmp_path / "a", "speculators_dspark", layer_types=["sliding_attention"] * 2, sliding_window=5)
        before: Any = drafters.from_pretrained(written.folder, helpers.model())
    else:
        before = eagle_of(tmp_path / "a", name)
    folder = drafters.save_pretrained(before, tmp_path / "b", publisher="speculators")
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    read = AutoConfig.for_model(**config)
    assert [read.sliding_window] * len(read.layer_types) == list(before.model.spec.windows)


def test_drafters_that_are_not_written(tmp_path: Path) -> None:
    medusa_checkpoints.write(tmp_path / "a")
    medusa, save = drafters.from_pretrained(tmp_path / "a", helpers.model()), inspect.unwrap(drafters.save_pretrained)
    with pytest.raises(UnsupportedError, match=r"takes a BlockDrafter, or a FeatureDrafter of .* of family 'medusa'"):
        save(medusa, tmp_path / "b", publisher="speculators")
    with pytest.raises(UnsupportedError, match="got SuffixDrafter"):
        save(drafters.SuffixDrafter(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    drafter = drafters.from_pretrained(write(tmp_path, "dflash_flat").folder, helpers.model())
    with pytest.raises(UnsupportedError, match="holds a checkpoint already"):
        drafters.save_pretrained(drafter, tmp_path)
    with pytest.raises(UnsupportedError, match="publisher must be"):
        inspect.unwrap(drafters.save_pretrained)(drafter, tmp_path / "new", publisher="hub")
