"""Values of the wrong kind in a configuration: the error names the key, what came and what is expected."""

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import drafters
from specdec.drafters.checkpoints.keys import COUNT, FLAG, INTEGERS, NUMBER, POSITIVE, SILENT, SIZE, TEXT, TEXTS, Keys
from specdec.errors import UnsupportedError
from tests import helpers
from tests.drafters.block import checkpoints as block
from tests.drafters.block import glimmer_checkpoints as glimmer
from tests.drafters.feature import assistant_checkpoints as assistant
from tests.drafters.feature import eagle_checkpoints as eagle
from tests.drafters.feature import medusa_checkpoints as medusa
from tests.drafters.feature import mtp_checkpoints as mtp

MTP = ("qwen3_next", "qwen3_5", "deepseek_v3")
WRITERS: dict[str, Callable[[Path], Any]] = {
    **{name: partial(block.write, dialect=name) for name in block.DIALECTS},
    **{f"eagle3, {name}": partial(eagle.write, dialect=name, num_target_layers=2) for name in eagle.DIALECTS},
    **{f"assistant, {name}": partial(assistant.write, dialect=name) for name in assistant.DIALECTS},
    **{f"mtp, {name}": partial(mtp.write, dialect=name) for name in MTP},
    "medusa": medusa.write,
    "muse glimmer": glimmer.write,
}
"""Every published format."""

FLAT = {"num_hidden_layers", "layer_types", "sliding_window", "step_loss_decay", "target_model_name_or_path"}
UNREAD = {
    "eagle3": {"embed_requires_grad", "use_aux_hidden_state"},
    "assistant": {
        "attention_k_eq_v",
        "num_global_key_value_heads",
        "num_key_value_heads",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
    },
}
"""Keys that say nothing about what a format computes, whatever their values."""

NAMING = {"model_type", "architectures", "speculators_model_type"}
SAYING = {"hidden_act", "max_position_embeddings"} | NAMING
"""Keys among those that say nothing by themselves, and are read all the same."""


@cache
def target_of(kind: str) -> Any:
    """A target whose layers an MTP head repeats; any other drafter takes the plain one."""
    family, _, dialect = kind.partition(", ")
    if family != "mtp":
        return helpers.model()
    content = mtp.config(dialect)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**content.get("text_config", content)))


def read_keys(kind: str, config: dict[str, Any], place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a configuration the reader of a format looks at a value that is there."""
    family, _, dialect = kind.partition(", ")
    unread = UNREAD.get(family, set()) | (FLAT if dialect in ("eagle", "specforge", "deepspec") else set())
    for key, value in config.items():
        here, inner = (*place, key), place and place[-1]
        if value is None or key in unread or (key in SILENT and key not in SAYING):
            continue
        if family in ("mtp", "medusa") and not {"mtp", "nextn", "medusa"} & set(key.split("_")) and key not in NAMING:
            if key == "text_config":
                yield here
                yield from read_keys(kind, value, here)
            continue
        if inner == "speculators_config" and key != "proposal_methods":
            continue
        if key in ("speculators_version", "base_model_name_or_path", "mask_token") or (place and key in NAMING):
            continue
        if key == "max_position_embeddings" and "original_max_position_embeddings" not in json.dumps(config):
            continue
        if key == "proposal_methods":
            yield here
            yield (*here, 0, "speculative_tokens")
            continue
        yield here
        if isinstance(value, dict):
            yield from read_keys(kind, value, here)


WRONG: dict[type, st.SearchStrategy[Any]] = {
    bool: st.sampled_from(["true", 1, 0.0, [True], {}]),
    int: st.sampled_from([2.5, "48", True, [48], {"is": 48}, -7]),
    float: st.sampled_from(["1e-6", False, [0.5], {}]),
    str: st.sampled_from([5, True, 1.5, ["text"], {}]),
    dict: st.sampled_from([5, "text", True, [{}]]),
}
ELEMENTS: dict[type, st.SearchStrategy[Any]] = {
    int: st.sampled_from([2.5, "1", True, None, [1]]),
    str: st.sampled_from([5, None, True, ["text"]]),
    dict: st.sampled_from([5, "text", None]),
}
NUMBERS = {"factor", "rope_theta", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"}


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(sorted(WRITERS)), data=st.data())
def test_a_value_of_the_wrong_kind_is_named(kind: str, data: st.DataObject) -> None:
    """Each key that a format reads, at each place of its configuration."""
    folder = Path(mkdtemp())
    config = WRITERS[kind](folder).config
    place = data.draw(st.sampled_from(sorted(set(read_keys(kind, config)), key=str)))
    section = config
    for part in place[:-1]:
        section = section[part]
    key, value = place[-1], section[place[-1]]
    if isinstance(value, list) and value and data.draw(st.booleans()):
        value = [*value]
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(ELEMENTS[type(value[0])])
    elif isinstance(value, list):
        value = data.draw(st.sampled_from([3, "1, 2", True, {"0": 1}]))
    else:
        usual = float if key in NUMBERS else type(value)
        value = data.draw(WRONG[usual])
    section[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError) as caught:
        drafters.inspect(folder, target_of(kind))
    message = str(caught.value)
    assert re.search(
        rf"config\.json: '[^']*{key}' must be (a|an|true) .*, got {re.escape(reprlib.repr(value))}\.", message
    )


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (COUNT, [0, 3], [-1, 2.0, True, "3", None, [3]]),
        (SIZE, [1, 3], [0, 2.5, False, "3"]),
        (NUMBER, [0, -1.5, 3], [True, "1", float("nan"), float("inf"), []]),
        (POSITIVE, [1, 0.5], [0, -1.0, True, "1"]),
        (FLAG, [True, False], [0, 1, "true", None]),
        (TEXT, ["", "a"], [1, True, ["a"]]),
        (INTEGERS, [[], [1, -2], (3,)], [3, "12", [1.0], [True], ["1"], {1: 2}]),
        (TEXTS, [[], ["a"]], ["a", [1], {"a": 1}]),
    ],
)
def test_kinds(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(kind.of("key", value) == (tuple(value) if isinstance(value, list) else value) for value in right)
    for value in wrong:
        with pytest.raises(UnsupportedError, match=r"config\.json: 'part\.key' must be"):
            Keys({"part.": {"key": value}, "": {"key": value}}).get("key", kind) if value is not None else kind.of(
                "part.key", value
            )


def test_a_value_that_another_one_hides_is_checked_too() -> None:
    """Two places may hold one key; a mistake in the second would show only where the first is gone."""
    keys = Keys({"inner.": {"size": 3}, "": {"size": "3", "width": 4}})
    with pytest.raises(UnsupportedError, match="'size' must be a whole number, 1 or more, got '3'"):
        keys.get("size", SIZE)
    assert keys.get("length", SIZE, also=("width",)) == 4
    assert keys.notes["length"].source == "width"


def test_files_that_hold_no_object(tmp_path: Path) -> None:
    written = block.write(tmp_path, "dflash_flat")
    (written.folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    with pytest.raises(UnsupportedError, match=r"'weight_map' must name a file for each tensor, got \['model"):
        drafters.inspect(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(UnsupportedError, match=r"config\.json must hold an object of keys and values, got list"):
        drafters.inspect(tmp_path)
