"""Block drafters of Muse Glimmer, in the format of transformers' `MuseGlimmerAssistantModel`.

The drafter is a DFlash. Its file says nothing about tokens: the embedding is the target's as it is stored, without the
norm or scale of the target's own module, and the output head is the target's, with what the target does to its logits.
"""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.block import BlockModel, BlockSpec
from specdec.drafters.checkpoints.block import drafter
from specdec.drafters.checkpoints.formats import Format, Target, Tensors
from specdec.drafters.checkpoints.keys import COUNT, INTEGERS, NUMBER, SIZE, TEXTS, Keys, Note
from specdec.drafters.checkpoints.layers import decoder_keys, windows_of
from specdec.errors import UnsupportedError

PUBLISHED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""The publisher's names of the tensors that have others here."""

RENAMED = PUBLISHED | {theirs: ours for ours, theirs in PUBLISHED.items()}
"""Both ways at once, so that no two names become one."""


def dialect_of(config: Mapping[str, Any], names: frozenset[str]) -> str:  # noqa: ARG001 - the configuration tells it
    """Name of the published format, or an empty string."""
    return "transformers" if config.get("model_type") == "muse_glimmer_assistant" else ""


def read_spec(config: Mapping[str, Any], names: frozenset[str], target: Target | None) -> tuple[BlockSpec, Keys]:  # noqa: ARG001 - all files have the same tensors
    """The specification of a drafter, and the keys it came from.

    Args:
        config: `config.json`. Keys that transformers would replace by the numbers of the one published model must be
            there.
        names: names of the tensors.
        target: which has the tokens and the output head.
    """
    if target is None:
        raise UnsupportedError("a drafter of this format does not tell how many tokens its target has. Pass target=.")
    keys = Keys({"": dict(config)})
    keys.get("layer_types", TEXTS)
    for name in ("head_dim", "num_key_value_heads"):
        keys.get(name, SIZE)
    common = decoder_keys(keys)
    # A slot sees positions as far away as `sliding_window`, in both directions; a window here is one more.
    windows = tuple(window and window + 1 for window in windows_of(keys))
    for name, value, why in (
        ("windows", windows, "sliding_window and the slot itself"),
        ("output_multiplier", target.output_multiplier, "the target's"),
        ("softcap", target.softcap, "the target's"),
    ):
        keys.notes[name] = Note(name, value, why, assumed=True)
    vocab = keys.get("vocab_size", SIZE, target.vocab_size, why="the target's")
    fields = {
        **common,
        "rms_norm_eps": keys.get("rms_norm_eps", NUMBER),
        "feature_size": common["hidden_size"],
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
    }
    return BlockSpec(
        family="dflash",
        layout="fill_in",
        block_size=keys.get("block_size", SIZE),
        mask_token_id=keys.get("mask_token_id", COUNT),
        feature_layers=tuple(layer + 1 for layer in keys.get("target_layer_ids", INTEGERS)),
        windows=windows,
        causal=(False,) * len(windows),
        output_multiplier=target.output_multiplier,
        softcap=target.softcap,
        **fields,
    ), keys


def pack(tensors: Tensors) -> Tensors:
    """The tensors under our names."""
    return {RENAMED.get(name, name): tensor for name, tensor in tensors.items()}


def published(name: str, names: frozenset[str]) -> str:  # noqa: ARG001 - the names are the same in all files
    """The publisher's name for one of ours."""
    return RENAMED.get(name, name)


FORMAT = Format(
    known="MuseGlimmerAssistantModel",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, _: BlockModel(spec, shortlist),
    drafter=drafter,
    pack=pack,
    published=published,
)
