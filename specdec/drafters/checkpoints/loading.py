"""Published drafters as drafters: what is in a checkpoint is understood whole, or refused by name."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.block import BlockDrafter, BlockModel, BlockSpec
from specdec.drafters.checkpoints import block
from specdec.drafters.checkpoints.files import CheckpointFiles, open_checkpoint
from specdec.drafters.checkpoints.keys import Keys, Note
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError

logger = logging.getLogger(__name__)

MAPS = frozenset({"d2t", "t2d"})
"""Tensors that say which target tokens a reduced vocabulary has."""

RENAMED = {
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
"""Names that some publishers give to parameters, and ours."""


HEADS = {
    "conv_kernel_size": ("conv_group_size",),
    "selector_rank": ("selector_top_k",),
    "markov_rank": ("markov_kind", "confidence"),
}
"""Fields that say whether a drafter has a part, and fields that concern it alone."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was understood of a checkpoint.

    Attributes:
        source: folder of the checkpoint.
        dialect: publisher whose format it is.
        spec: the drafter that it describes.
        notes: where each field came from.
        borrowed: what is the target's.
        reduced: whether it drafts from a part of the target's vocabulary.
        unknown: keys of the configuration that are not understood; they have no effect.
    """

    source: Path
    dialect: str
    spec: BlockSpec
    notes: tuple[Note, ...]
    borrowed: tuple[str, ...]
    reduced: bool
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        spec, hidden = self.spec, set[str]()
        for part, names in HEADS.items():
            hidden |= set() if getattr(spec, part) else {part, *names}
        lines = [f"{self.source.name}: {spec.family} in the format of {self.dialect}", "  what it is"]
        shown = [name for name in BlockSpec.__dataclass_fields__ if name not in hidden]
        lines += [f"    {name:24} {getattr(spec, name)}" for name in shown]
        lines.append(f"    {'borrowed':24} {', '.join(self.borrowed) or 'nothing'}")
        for title, assumed in (("assumed, since config.json does not say it", True), ("read from config.json", False)):
            notes = [note for note in self.notes if note.assumed == assumed]
            lines += [f"  {title}"] if notes else []
            lines += [f"    {note.field:24} {note.value!s:16} {note.source}" for note in notes]
        if self.unknown:
            lines.append(f"  not understood, without effect: {', '.join(self.unknown)}")
        return "\n".join(lines)


def inspect(path_or_repo: str | Path, *, revision: str | None = None) -> Inspection:
    """What a published drafter is, without loading it. `print` shows what was read and what was inferred.

    Args:
        path_or_repo: a folder, or a repository of the Hub.
        revision: of the repository.

    Raises:
        UnsupportedError: if it is not understood; the message says what is missing, surplus or contradictory.

    Example:
        >>> from specdec import drafters
        >>> print(drafters.inspect("z-lab/Qwen3-8B-DFlash-b16"))  # doctest: +SKIP
    """
    files = open_checkpoint(path_or_repo, revision=revision)
    found, _ = _understand(files, None)
    return found


def from_pretrained(
    path_or_repo: str | Path,
    target: Any,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    length: int | None = None,
    temperature: float | None = None,
    least_confidence: float | None = None,
    shortlist: Shortlist | None = None,
) -> BlockDrafter:
    """Loads a published drafter for a target.

    Args:
        path_or_repo: a folder, or a repository of the Hub, with `config.json` and safetensors.
        target: the model that the drafter was made for; its embedding and output head are borrowed where the
            checkpoint has none.
        revision: of the repository.
        dtype: of the drafter's weights; None is the target's.
        device: where the drafter runs; None is where the target's embedding is.
        length: most tokens of a block; None drafts as many as the drafter was trained for.
        temperature: of the draft law; None follows the request.
        least_confidence: probability of acceptance below which a confidence head ends a path; None never asks it.
        shortlist: tokens of the target to draft from; None drafts from all that the checkpoint has.

    Raises:
        UnsupportedError: if the checkpoint is not understood whole, or does not fit the target; the message names it.

    Example:
        >>> from specdec import SpeculativeGenerator, drafters, trees
        >>> drafter = drafters.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", target)  # doctest: +SKIP
        >>> generator = SpeculativeGenerator(target, drafter, trees.BestFirst(nodes=31))  # doctest: +SKIP
    """
    if not all(hasattr(target, name) for name in ("config", "get_input_embeddings", "get_output_embeddings")):
        raise UnsupportedError(f"from_pretrained: target= takes a transformers model, got {type(target).__name__}.")
    if dtype is not None and not dtype.is_floating_point:
        raise UnsupportedError(f"from_pretrained: dtype must be a floating-point torch.dtype, got {dtype!r}.")
    files = open_checkpoint(path_or_repo, revision=revision)
    config = target.config.get_text_config()
    found, names = _understand(files, int(config.hidden_size))
    if found.unknown:
        logger.warning("%s: keys not understood, without effect: %s", found.source.name, ", ".join(found.unknown))
    like = target.get_input_embeddings().weight
    _check_target(found, int(config.num_hidden_layers), int(target.get_output_embeddings().weight.shape[0]))
    if shortlist is not None and found.reduced:
        raise UnsupportedError(f"{found.source.name} has a reduced vocabulary already; leave shortlist= out.")
    tensors, maps = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in files.tensors():
        if name in MAPS:
            maps[name] = tensor
        elif not tensor.is_floating_point():
            raise UnsupportedError(f"{found.source.name}: tensor {name!r} is {tensor.dtype}; expected floating point.")
        else:
            tensors[names[name]] = tensor.to(device=device or like.device, dtype=dtype or like.dtype)
    spec, chosen = found.spec, _reduced(maps, found.spec) or shortlist
    if shortlist is not None:
        spec = dataclasses.replace(spec, draft_vocab_size=len(shortlist.ids))
        heads = ("lm_head.weight", "markov_head.markov_w2.weight")  # one row per token that can be drafted
        tensors |= {name: tensors[name][shortlist.ids.to(tensors[name].device)] for name in heads if name in tensors}
    with torch.device("meta"):
        model = BlockModel(spec, chosen)
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False)
    try:
        model.borrow(target)
    except UnsupportedError as error:
        raise UnsupportedError(f"{found.source.name} was not made for this target: {error}") from None
    return BlockDrafter(model, length=length, temperature=temperature, least_confidence=least_confidence)


def _understand(files: CheckpointFiles, feature_size: int | None) -> tuple[Inspection, dict[str, str]]:
    """The specification of a checkpoint, and our name for each of its tensors; all of them are accounted for."""
    dialect = block.dialect_of(files.config)
    try:
        spec, keys = block.read_spec(files.config, files.names, feature_size)
        names = _check_tensors(files, spec)
    except UnsupportedError as error:
        raise UnsupportedError(f"{files.folder}: {error}") from None
    return _inspection(files, dialect, spec, keys), names


def _inspection(files: CheckpointFiles, dialect: str, spec: BlockSpec, keys: Keys) -> Inspection:
    owned = {"embedding": spec.own_embedding, "output head": spec.own_head}
    return Inspection(
        source=files.folder,
        dialect=dialect,
        spec=spec,
        notes=tuple(keys.notes.values()),
        borrowed=tuple(part for part, own in owned.items() if not own),
        reduced=bool(files.names & MAPS),
        unknown=tuple(keys.unknown()),
    )


def _check_tensors(files: CheckpointFiles, spec: BlockSpec) -> dict[str, str]:
    """Our name for each tensor; raises unless all are there, none is left over and all have the right shape."""
    # Which tokens a reduced vocabulary has is not known before tensors are read; their number decides the shapes.
    reduced = spec.draft_vocab_size != spec.vocab_size
    shortlist = Shortlist(torch.arange(spec.draft_vocab_size), spec.vocab_size) if reduced else None
    with torch.device("meta"):
        expected: Mapping[str, Tensor] = BlockModel(spec, shortlist).state_dict()
    names = {name: RENAMED.get(name, name) for name in files.names - MAPS}
    missing, surplus = sorted(set(expected) - set(names.values())), sorted(set(names.values()) - set(expected))
    if missing or surplus:
        parts = [f"tensors that are missing: {_some(missing)}"] if missing else []
        parts += [f"tensors that are not known: {_some(surplus)}"] if surplus else []
        raise UnsupportedError("; ".join(parts) + ".")
    for name, ours in names.items():
        if files.shape(name) != tuple(expected[ours].shape):
            raise UnsupportedError(
                f"tensor {name!r} has shape {list(files.shape(name))}; the configuration says "
                f"{list(expected[ours].shape)}."
            )
    if spec.draft_vocab_size != spec.vocab_size and "d2t" not in files.names:
        raise UnsupportedError(
            f"it drafts from {spec.draft_vocab_size} of {spec.vocab_size} tokens but no tensor 'd2t' says from which."
        )
    return names


def _some(names: list[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _check_target(found: Inspection, layers: int, vocab_size: int) -> None:
    """Raises unless a drafter fits a target."""
    spec = found.spec
    demands = [
        (
            f"it reads hidden state {max(spec.feature_layers)}, the target has states 0 to {layers}",
            max(spec.feature_layers) <= layers,
        ),
        (f"it has {spec.vocab_size} tokens, the target {vocab_size}", spec.vocab_size == vocab_size),
    ]
    wrong = next((text for text, holds in demands if not holds), None)
    if wrong is not None:
        raise UnsupportedError(f"{found.source.name} was not made for this target: {wrong}.")


def _reduced(maps: Mapping[str, Tensor], spec: BlockSpec) -> Shortlist | None:
    """The target's tokens that a checkpoint drafts from: `d2t` holds offsets, `t2d` marks the same tokens."""
    if "d2t" not in maps:
        return None
    offsets = maps["d2t"].to(torch.int64)
    if tuple(offsets.shape) != (spec.draft_vocab_size,):
        raise UnsupportedError(f"d2t has shape {list(offsets.shape)}, the drafter has {spec.draft_vocab_size} tokens.")
    ids = torch.arange(spec.draft_vocab_size) + offsets
    try:
        found = Shortlist(ids, spec.vocab_size)
    except UnsupportedError as error:
        raise UnsupportedError(f"d2t must be offsets that lead to tokens of the target. {error}") from None
    marked = maps.get("t2d")
    if marked is not None and not torch.equal(marked.to(torch.bool).nonzero().squeeze(1), ids.sort().values):
        raise UnsupportedError("t2d marks other target tokens than d2t leads to.")
    return found
