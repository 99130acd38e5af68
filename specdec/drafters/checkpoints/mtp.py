"""MTP heads, which are published inside their target's own checkpoint.

*Qwen3-Next* and *Qwen3.5*: `mtp.*`, one projection and norms for all layers. *DeepSeek-V3*: decoder layers after the
target's last one, each with a projection and norms, and with copies of the target's embedding and output head.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from specdec.drafters.checkpoints.formats import Format, Target, Tensors, feature_drafter
from specdec.drafters.checkpoints.keys import FLAG, SIZE, Keys, section
from specdec.drafters.feature import MTPModel, MTPSpec
from specdec.drafters.feature.mtp import decoder_of
from specdec.errors import UnsupportedError

QWEN = {
    "mtp.fc.": "projection.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "state_norm.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "layer.",
}
DEEPSEEK = {
    "eh_proj.": "projection.",
    "enorm.": "embedding_norm.",
    "hnorm.": "state_norm.",
    "shared_head.norm.": "norm.",
}
COPIES = {".embed_tokens.weight": "embedding", ".shared_head.head.weight": "output head"}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def dialect_of(config: Mapping[str, Any], names: frozenset[str]) -> str:  # noqa: ARG001 - the names tell it
    """Name of the published format, or an empty string."""
    if "mtp.fc.weight" in names:
        return "Qwen3-Next"
    return "DeepSeek-V3" if any(name.endswith(".eh_proj.weight") for name in names) else ""


def read_spec(config: Mapping[str, Any], names: frozenset[str], target: Target | None) -> tuple[MTPSpec, Keys]:
    """The specification of an MTP head, and the keys it came from; all others are the target's.

    Args:
        config: `config.json`.
        names: names of the tensors.
        target: the model that the head belongs to.
    """
    if target is None:
        raise UnsupportedError("an MTP head is made of layers of its target's kind. Pass target=.")
    inner = section(config, "text_config")
    part, text = ("text_config.", inner) if inner else ("", config)
    keys = Keys({part: {key: text[key] for key in text if "mtp" in key or "nextn" in key or key.startswith("chain_")}})
    qwen = dialect_of(config, names) == "Qwen3-Next"
    count = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    modules = keys.get(count[0 if qwen else 1], SIZE, 1, also=count, why="one module")
    if qwen and modules != 1:
        raise UnsupportedError(f"{count[0]} {modules} is not served: Qwen's heads have one layer.")
    if keys.get("mtp_use_dedicated_embeddings", FLAG, None, why="the target's embedding"):
        raise UnsupportedError("mtp_use_dedicated_embeddings true is not served.")
    shared_norm = keys.get(
        "chain_hidden_post_norm", FLAG, None, also=("mtp_chain_hidden_post_norm",), why="a norm a module"
    )
    if shared_norm is not None:
        raise UnsupportedError("chain_hidden_post_norm (a norm that all modules share, or none) is not served.")
    first = 0 if qwen else target.layers
    return MTPSpec(
        feature_layers=(target.layers,),
        feature_size=target.hidden_size,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        style="qwen" if qwen else "deepseek",
        modules=modules,
        first_layer=first,
        hidden_first=keys.get("mtp_hidden_states_first", FLAG, False, why="the embedding comes first"),
        depth=modules if modules > 1 else 3,
    ), keys


def owns(name: str, names: frozenset[str]) -> bool:
    """Whether a tensor belongs to a head; DeepSeek's modules are named like further layers of the target."""
    layer = LAYER.fullmatch(name)
    return name.startswith("mtp.") or (layer is not None and f"model.layers.{layer[1]}.eh_proj.weight" in names)


def copied(name: str) -> str:
    """Which part of the target a tensor repeats; empty for none."""
    return next((part for end, part in COPIES.items() if name.endswith(end)), "")


def pack(tensors: Tensors) -> Tensors:
    """The tensors under our names; experts that are stored one by one become slices of one tensor."""
    tensors = _join_experts(tensors)
    layers = {name: LAYER.fullmatch(name) for name in tensors}
    first = min((int(layer[1]) for layer in layers.values() if layer), default=0)
    named: Tensors = {}
    for name, tensor in tensors.items():
        layer = layers[name]
        parts, inner = (QWEN, name) if layer is None else (DEEPSEEK, layer[2])
        module = 0 if layer is None else int(layer[1]) - first
        prefix = next((each for each in parts if inner.startswith(each)), None)
        if prefix is not None:
            named[f"modules_.{module}.{parts[prefix]}{inner.removeprefix(prefix)}"] = tensor
        else:
            named[name if layer is None else f"modules_.{module}.layer.{inner}"] = tensor
    return named


def published(name: str, names: frozenset[str]) -> str:
    """The publisher's name for one of ours."""
    ours = re.fullmatch(r"modules_\.(\d+)\.(.+)", name)
    if ours is None:
        return name
    first = min((int(each[1]) for each in map(LAYER.fullmatch, names) if each and owns(each[0], names)), default=None)
    parts = QWEN if first is None else DEEPSEEK
    prefix = next((each for each, our in parts.items() if ours[2].startswith(our)), None)
    inner = ours[2].removeprefix("layer.") if prefix is None else prefix + ours[2].removeprefix(parts[prefix])
    return inner if first is None else f"model.layers.{first + int(ours[1])}.{inner}"


def _join_experts(tensors: Tensors) -> Tensors:
    """Gate and up projections of all experts in one tensor, down projections in another."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    joined: Tensors = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            joined[name] = tensor
        else:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, parts in found.items():
        experts = range(1 + max(expert for expert, _ in parts))
        wanted = [(expert, kind) for expert in experts for kind in ("gate", "up", "down")]
        absent = [f"{prefix}{expert}.{kind}_proj.weight" for expert, kind in wanted if (expert, kind) not in parts]
        if absent:
            raise UnsupportedError(f"tensors that are missing: {', '.join(absent[:6])}.")
        for kind in ("gate", "up", "down"):
            usual = parts[0, kind].shape
            other = next((expert for expert in experts if parts[expert, kind].shape != usual), None)
            if other is not None:
                raise UnsupportedError(
                    f"tensor '{prefix}{other}.{kind}_proj.weight' has shape {list(parts[other, kind].shape)}; that of "
                    f"expert 0 ('{prefix}0.{kind}_proj.weight') has {list(usual)}."
                )
        pairs = [torch.cat([parts[expert, "gate"], parts[expert, "up"]]) for expert in experts]
        joined[f"{prefix}gate_up_proj"] = torch.stack(pairs)
        joined[f"{prefix}down_proj"] = torch.stack([parts[expert, "down"] for expert in experts])
    return joined


FORMAT = Format(
    known="MTP heads (mtp.* or eh_proj tensors) in their target's checkpoint",
    dialect_of=dialect_of,
    read_spec=read_spec,
    build=lambda spec, shortlist, target: MTPModel(spec, decoder_of(target), shortlist),
    drafter=feature_drafter,
    owns=owns,
    copied=copied,
    pack=pack,
    published=published,
)
