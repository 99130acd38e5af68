"""Medusa heads as safetensors, with the names of their authors' code: `{head}.{block}.linear`, `{head}.{blocks}`."""

from collections.abc import Mapping
from typing import Any

from specdec.drafters.checkpoints.formats import Format, Target, Tensors, feature_drafter
from specdec.drafters.checkpoints.keys import SIZE, Keys, Note
from specdec.drafters.feature import MedusaModel, MedusaSpec
from specdec.errors import UnsupportedError


def dialect_of(config: Mapping[str, Any], names: frozenset[str]) -> str:  # noqa: ARG001 - the names say nothing more
    """Name of the published format, or an empty string."""
    return "Medusa" if "medusa_num_heads" in config else ""


def read_spec(config: Mapping[str, Any], names: frozenset[str], target: Target | None) -> tuple[MedusaSpec, Keys]:
    """The specification of Medusa heads, and the keys it came from.

    Args:
        config: `config.json`; the number of heads that it tells may be wrong, and is counted instead.
        names: names of the tensors.
        target: whose sizes the heads have.
    """
    if target is None:
        raise UnsupportedError(
            "the files of Medusa heads do not tell their sizes, which are the target's. Pass target=."
        )
    keys = Keys({"": dict(config)})
    keys.take("base_model_name_or_path")
    keys.get("medusa_num_heads", SIZE)
    heads = len({name.split(".")[0] for name in names})
    keys.notes["medusa_num_heads"] = Note("heads", heads, "counted: the tensors")
    return MedusaSpec(
        feature_layers=(target.layers,),
        feature_size=target.hidden_size,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        heads=heads,
        blocks=keys.get("medusa_num_layers", SIZE),
    ), keys


def pack(tensors: Tensors) -> Tensors:
    """The tensors under our names."""
    return {f"heads.{name}": tensor for name, tensor in tensors.items()}


FORMAT = Format(
    known="Medusa heads (medusa_num_heads)",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, _: MedusaModel(spec, shortlist),
    drafter=feature_drafter,
    pack=pack,
    published=lambda name, _: name.removeprefix("heads."),
    heads=lambda spec: tuple(f"heads.{head}.{spec.blocks}.weight" for head in range(spec.heads)),
)
