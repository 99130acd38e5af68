"""Checkpoints are understood whole or refused by name: no tensor or key is overlooked, invented or mistyped."""

import json
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec import SpeculativeGenerator, drafters, trees
from specdec.drafters.checkpoints import files
from specdec.drafters.checkpoints.keys import SILENT
from specdec.errors import UnsupportedError
from tests import helpers
from tests.drafters.block import glimmer_checkpoints as glimmer
from tests.drafters.block.checkpoints import ABSENT, DIALECTS, write
from tests.drafters.feature import eagle_checkpoints as eagle

WRITERS: dict[str, Callable[[Path], Any]] = {
    **{dialect: partial(write, dialect=dialect) for dialect in DIALECTS},
    **{f"eagle3, {name}": partial(eagle.write, dialect=name, num_target_layers=2) for name in eagle.DIALECTS},
    "muse glimmer": glimmer.write,
}
"""Every published format."""

_FLAT = {"num_hidden_layers", "sliding_window", "layer_types"}
NOT_READ: dict[str, set[str]] = {
    "eagle3, eagle": _FLAT,
    "eagle3, specforge": _FLAT,
    "eagle3, deepspec": _FLAT | {"step_loss_decay", "target_model_name_or_path"},
    "eagle3, speculators": {"embed_requires_grad"},
    "eagle3, peagle": {"embed_requires_grad"},
}
"""Keys that are known to say nothing about what is computed, whatever their values."""

EXPECTED: dict[str, dict[str, Any]] = {
    "dflash_flat": {"family": "dflash", "layout": "fill_in", "causal": (False, False), "windows": (None, None)},
    "dflash_nested": {"family": "dflash", "layout": "fill_in", "window_from": "query"},
    "dflash2": {"family": "dflash2", "layout": "fill_in", "causal": (False,) * 5, "softcap": 20.0},
    "dspark_vanilla": {"family": "dspark", "layout": "anchor_first", "markov_kind": "vanilla", "own_head": True},
    "dspark_gated": {"markov_kind": "gated", "confidence": "hidden_token", "own_embedding": True},
    "dspark_rnn": {"markov_kind": "rnn", "block_size": 7},
    "dspark_dflash": {"family": "dspark", "layout": "anchor_first", "markov_rank": 0, "confidence": None},
    "speculators_dflash": {"family": "dflash", "layout": "fill_in", "draft_vocab_size": 40, "window_from": "anchor"},
    "speculators_dspark": {"family": "dspark", "layout": "anchor_first", "draft_vocab_size": 40},
    "speculators_dflash2": {"family": "dflash2", "layout": "fill_in", "draft_vocab_size": 97},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_format_becomes_one_specification(dialect: str, tmp_path: Path) -> None:
    """Feature indices, slot layout and causality are what silently ruins acceptance; none is taken from a name."""
    written = write(tmp_path / dialect, dialect)
    found = drafters.inspect(written.folder)
    spec = found.spec
    assert {name: getattr(spec, name) for name in EXPECTED[dialect]} == EXPECTED[dialect]
    assert spec.feature_layers == written.feature_layers
    for name in ("layout", "windows", "causal", "mask_token_id", "softcap", "output_multiplier", "window_from"):
        wanted = written.reference.get(name, getattr(spec, name))
        assert getattr(spec, name) == (tuple(wanted) if isinstance(wanted, list) else wanted), name
    assert found.unknown == ()
    shown = str(found)
    assert spec.family in shown
    assert all(note.field in shown and note.source in shown for note in found.notes)
    assert ("markov_kind" in shown) == (spec.markov_rank > 0)


def test_the_published_list_of_tensors(tmp_path: Path) -> None:
    """DFlash 2 of five layers has 81 tensors."""
    written = write(tmp_path, "dflash2")
    assert len(written.weights) == 81
    assert len(drafters.from_pretrained(written.folder, helpers.model()).model.state_dict()) == 81


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(WRITERS)), data=st.data())
def test_a_wrong_tensor_is_named(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    """Removed, renamed, reshaped, added: whatever happens to one tensor, the error says which."""
    folder = tmp_path / str(data.draw(st.uuids()))
    written = WRITERS[kind](folder)
    name = data.draw(st.sampled_from(sorted(set(written.weights) - {"t2d"})))
    change = data.draw(st.sampled_from(["remove", "rename", "reshape", "add"]))
    weights, named = dict(written.weights), name
    if change in ("remove", "rename"):
        tensor = weights.pop(name)
    if change == "rename":
        weights[name.replace("weight", "wait") + "_"] = tensor
    if change == "reshape":
        weights[name] = torch.cat([weights[name], weights[name][:1]])
    if change == "add":
        named = f"{name}.extra"
        weights[named] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors")
    if change != "add" and name in ("embed_tokens.weight", "lm_head.weight") and change != "reshape":
        return  # then it is borrowed, which inspect() tells
    with pytest.raises(UnsupportedError, match=named.split(".")[-1] if name == "d2t" else named.replace(".", r"\.")):
        drafters.from_pretrained(folder, helpers.model())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(WRITERS)), data=st.data())
def test_a_mistyped_or_unknown_key_is_named(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    folder, target = tmp_path / str(data.draw(st.uuids())), helpers.model()
    written = WRITERS[kind](folder)
    inner = [written.config[name] for name in ("dflash_config", "transformer_layer_config") if name in written.config]
    sections = [written.config, *inner]
    section = data.draw(st.sampled_from(sections))
    unread = NOT_READ.get(kind, set())
    key = data.draw(st.sampled_from(sorted(set(section) - SILENT - SECTIONS - SELECTING - unread)))
    if data.draw(st.booleans()):
        section[f"{key}_"] = section[key]
        (folder / "config.json").write_text(json.dumps(written.config))
        assert any(f"{key}_" in unknown for unknown in drafters.inspect(folder, target).unknown)
        return
    section[key] = {"not": "this"}
    (folder / "config.json").write_text(json.dumps(written.config))
    with pytest.raises(UnsupportedError, match=key):
        drafters.inspect(folder, target)


SECTIONS = {"dflash_config", "transformer_layer_config", "speculators_config"}
SELECTING = {"speculators_model_type", "speculators_version", "rope_parameters", "rope_scaling", "mask_token"}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("key", ["mask_token_id", "hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_missing_key_is_named(dialect: str, key: str, tmp_path: Path) -> None:
    written = write(tmp_path, dialect)
    for section in (written.config, *(written.config.get(name, {}) for name in SECTIONS)):
        section.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    with pytest.raises(UnsupportedError, match=key):
        drafters.inspect(tmp_path)


def test_slots_are_counted_where_the_layout_is_not_said(tmp_path: Path) -> None:
    """Older files of speculators leave `sample_from_anchor` out; how many tokens they draft tells it."""
    written = write(tmp_path, "speculators_dspark", sample_from_anchor=ABSENT, markov_head_type="vanilla")
    method = written.config["speculators_config"]["proposal_methods"][0]
    for drafted, layout in (
        (written.config["block_size"] - 1, "fill_in"),
        (written.config["block_size"], "anchor_first"),
    ):
        method["speculative_tokens"] = drafted
        (tmp_path / "config.json").write_text(json.dumps(written.config))
        assert drafters.inspect(tmp_path).spec.layout == layout


@pytest.mark.parametrize(
    ("dialect", "overrides", "message"),
    [
        ("dflash_flat", {"mask_token_id": 97}, "mask_token_id 97 is no row of an embedding of 97"),
        ("dflash_flat", {"layer_types": ["full_attention", "linear_attention"]}, "full or sliding"),
        ("dflash_flat", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("dflash_nested", {"projector_type": "domino"}, "projector_type 'domino'"),
        ("dflash_flat", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not known"),
        ("speculators_dspark", {"sample_from_anchor": False, "markov_head_type": "rnn"}, "rnn Markov head needs"),
        ("dflash_flat", {"block_size": 1}, "leaves no slot"),
        ("dflash_nested", {"is_neox_style": False}, "is_neox_style false"),
        ("dflash_nested", {"has_own_lm_head": True}, "tensors that are missing: lm_head.weight"),
    ],
)
def test_what_is_not_served_is_refused(dialect: str, overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    written = write(tmp_path, dialect)
    for key, value in overrides.items():
        section = next(
            (written.config[name] for name in SECTIONS if key in written.config.get(name, {})), written.config
        )
        section[key] = value
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    with pytest.raises(UnsupportedError, match=message):
        drafters.inspect(tmp_path)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    target = helpers.model()
    with pytest.raises(UnsupportedError, match="reads hidden state 7, the target has states 0 to 2"):
        drafters.from_pretrained(write(tmp_path / "a", "dflash_flat", target_layer_ids=[1, 6]).folder, target)
    with pytest.raises(UnsupportedError, match="it has 120 tokens, the target 97"):
        drafters.from_pretrained(write(tmp_path / "b", "dflash_flat", vocab_size=120).folder, target)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="neither a folder nor a repository"):
        drafters.inspect(tmp_path / "nowhere")
    with pytest.raises(UnsupportedError, match=r"no config\.json"):
        drafters.inspect(tmp_path)
    written = write(tmp_path / "x", "dflash_flat")
    (written.folder / "model.safetensors").rename(written.folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"lacks safetensors files; pytorch_model\.bin can run code"):
        drafters.inspect(written.folder)
    (written.folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedError, match="is not JSON"):
        drafters.inspect(written.folder)
    (written.folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    (written.folder / "pytorch_model.bin").rename(written.folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"\['BertModel'\].*are no drafter known here"):
        drafters.inspect(written.folder)


def test_shards(tmp_path: Path) -> None:
    """Weights in several files, by an index; a missing shard is named."""
    written = write(tmp_path, "dflash2")
    names = sorted(written.weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: written.weights[name] for name in members}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = drafters.from_pretrained(tmp_path, helpers.model()).model.state_dict()
    assert all(torch.equal(loaded[name], written.weights[name].double()) for name in names)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=r"lacks b\.safetensors"):
        drafters.inspect(tmp_path)


def test_a_reduced_vocabulary_must_make_sense(tmp_path: Path) -> None:
    written = write(tmp_path, "speculators_dflash")
    for change, message in (
        ({"d2t": torch.zeros(40, dtype=torch.int64) + 90}, "d2t must be offsets that lead to tokens of the target"),
        ({"t2d": ~written.weights["t2d"]}, "t2d marks other target tokens"),
    ):
        save_file({**written.weights, **change}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedError, match=message):
            drafters.from_pretrained(tmp_path, helpers.model())


def test_unknown_keys_are_warned_about_and_nothing_of_the_target_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = helpers.model()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    drafters.from_pretrained(write(tmp_path, "dflash_flat", conv_gruop_size=4).folder, target)
    assert "keys not understood, without effect" in caplog.text
    assert "conv_gruop_size" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_pair_is_loaded_in_one_call(tmp_path: Path) -> None:
    target = helpers.model()
    target.save_pretrained(tmp_path / "target")
    written = write(tmp_path / "drafter", "dflash2")
    generator = SpeculativeGenerator.from_pretrained(
        tmp_path / "target",
        written.folder,
        target_options={"dtype": torch.float64},
        drafter_options={"length": 4},
        tree=trees.Chain(3),
    )
    assert repr(generator.drafter) == "<BlockDrafter: dflash2, 5 layers, drafts 4 tokens>"
    assert generator.model.dtype == torch.float64
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    ids = generator.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(ids, helpers.plain(target, input_ids=prompt, max_new_tokens=9))
    assert generator.stats.drafted > 0


def test_a_misspelt_key_gets_a_suggestion(tmp_path: Path) -> None:
    written = write(tmp_path, "speculators_dspark")
    written.config["sample_from_anchors"] = written.config.pop("sample_from_anchor")
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    found = drafters.inspect(tmp_path)
    assert found.unknown == ("sample_from_anchors (is sample_from_anchor meant?)",)
    assert [note.field for note in found.notes if note.assumed and note.field == "sample_from_anchor"]
    assert str(found).index("assumed") < str(found).index("sample_from_anchor ") < str(found).index("read from config")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "Qwen/Qwen3-8B"}, "takes a transformers model, got str"),
        ({"dtype": torch.int8}, "must be a floating-point torch.dtype, got torch.int8"),
        ({"path_or_repo": "owner/nothing"}, "no folder 'owner/nothing' here"),
    ],
)
def test_wrong_arguments_are_told(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(files, "snapshot_download", offline)
    given = {"path_or_repo": write(tmp_path, "dflash_flat").folder, "target": helpers.model(), **options}
    with pytest.raises(UnsupportedError, match=message):
        unwrap(drafters.from_pretrained)(given.pop("path_or_repo"), given.pop("target"), **given)


def test_weights_that_are_none(tmp_path: Path) -> None:
    written = write(tmp_path, "dflash_flat")
    save_file(
        {**written.weights, "fc.weight": written.weights["fc.weight"].to(torch.int8)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UnsupportedError, match=r"'fc.weight' is torch.int8; expected floating point"):
        drafters.from_pretrained(tmp_path, helpers.model())
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UnsupportedError, match=r"model.safetensors cannot be read"):
        drafters.inspect(tmp_path)
