"""Published drafters as drafters: what is in a checkpoint is understood whole, or refused by name."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafters._borrowing import Borrower
from specdec.drafters.block import BlockDrafter
from specdec.drafters.checkpoints import assistant, block, eagle, glimmer, medusa, mtp
from specdec.drafters.checkpoints.files import Checkpoint, open_checkpoint
from specdec.drafters.checkpoints.formats import Format, Target
from specdec.drafters.checkpoints.keys import TEXT, TEXTS, Keys, Kind, Note
from specdec.drafters.feature import FeatureDrafter
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError

logger = logging.getLogger(__name__)

MAPS = frozenset({"d2t", "t2d"})
"""Tensors that say which target tokens a reduced vocabulary has."""

FORMATS: tuple[Format, ...] = (
    block.FORMAT,
    glimmer.FORMAT,
    assistant.FORMAT,
    eagle.FORMAT,
    medusa.FORMAT,
    mtp.FORMAT,
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was understood of a checkpoint.

    Attributes:
        source: folder of the checkpoint, or class of the model.
        dialect: publisher whose format it is.
        spec: the drafter that it describes.
        notes: where each field came from.
        borrowed: what is the target's.
        reduced: whether it drafts from a part of the target's vocabulary.
        unknown: keys of the configuration that are not understood; they have no effect.
    """

    source: str
    dialect: str
    spec: Any
    notes: tuple[Note, ...]
    borrowed: tuple[str, ...]
    reduced: bool
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        spec, hidden = self.spec, set[str]()
        for part, names in PARTS.items():
            hidden |= set() if getattr(spec, part, None) else {part, *names}
        lines = [f"{Path(self.source).name}: {spec.family} in the format of {self.dialect}", "  what it is"]
        shown = [name for name in spec.__dataclass_fields__ if name not in hidden]
        lines += [f"    {name:24} {getattr(spec, name)}" for name in shown]
        lines.append(f"    {'borrowed':24} {', '.join(self.borrowed) or 'nothing'}")
        for title, assumed in (("assumed, since config.json does not say it", True), ("read from config.json", False)):
            notes = [note for note in self.notes if note.assumed == assumed]
            lines += [f"  {title}"] if notes else []
            lines += [f"    {note.field:24} {note.value!s:16} {note.source}" for note in notes]
        if self.unknown:
            lines.append(f"  not understood, without effect: {', '.join(self.unknown)}")
        return "\n".join(lines)


PARTS = {
    "conv_kernel_size": ("conv_group_size",),
    "selector_rank": ("selector_top_k",),
    "markov_rank": ("markov_kind", "confidence"),
    "mask_token_id": (),
}
"""Fields that say whether a drafter has a part, and fields that concern it alone."""


def inspect(path_or_repo: Any, target: Any = None, *, revision: str | None = None) -> Inspection:
    """What a published drafter is, without loading it. `print` shows what was read and what was inferred.

    Args:
        path_or_repo: a folder, a repository of the Hub, or a drafter that transformers has loaded.
        target: the model that it was made for. Some formats say less without: which states of it are read, say.
        revision: of the repository.

    Raises:
        UnsupportedError: if it is not understood; the message says what is missing, surplus or contradictory.

    Example:
        >>> from specdec import drafters
        >>> print(drafters.inspect("z-lab/Qwen3-8B-DFlash-b16"))  # doctest: +SKIP
    """
    files = open_checkpoint(path_or_repo, revision=revision)
    return _understand(files, target).found


def from_pretrained(
    path_or_repo: Any,
    target: Any,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    length: int | None = None,
    temperature: float | None = None,
    least_confidence: float | None = None,
    shortlist: Shortlist | None = None,
) -> BlockDrafter | FeatureDrafter:
    """Loads a published drafter for a target.

    Args:
        path_or_repo: a folder, or a repository of the Hub, with `config.json` and safetensors; or a drafter that
            transformers has loaded (`Gemma4AssistantForCausalLM`, `MuseGlimmerAssistantModel`), whose weights are
            shared where dtype and device are those asked for.
        target: the model that the drafter was made for; its embedding and output head are borrowed where the
            checkpoint has none.
        revision: of the repository.
        dtype: of the drafter's weights; None is the target's.
        device: where the drafter runs; None is where the target's embedding is.
        length: most tokens of a path; None drafts as many as the drafter was trained for.
        temperature: of the draft law; None follows the request.
        least_confidence: probability of acceptance below which a confidence head ends a path; None never asks it.
            For block drafters.
        shortlist: tokens of the target to draft from; None drafts from all that the checkpoint has.

    Raises:
        UnsupportedError: if the checkpoint is not understood whole, or does not fit the target; the message names it.

    Example:
        >>> from specdec import SpeculativeGenerator, drafters, trees
        >>> drafter = drafters.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", target)  # doctest: +SKIP
        >>> generator = SpeculativeGenerator(target, drafter, trees.BestFirst(nodes=31))  # doctest: +SKIP
    """
    asked: Any = dtype
    if asked is not None and not (isinstance(asked, torch.dtype) and asked.is_floating_point):
        raise UnsupportedError(f"from_pretrained: dtype must be a floating-point torch.dtype, got {dtype!r}.")
    if shortlist is not None and not isinstance(shortlist, Shortlist):
        raise UnsupportedError(
            f"from_pretrained: shortlist= takes a drafters.Shortlist, got {type(shortlist).__name__}."
        )
    facts, files = Target.of(target), open_checkpoint(path_or_repo, revision=revision)
    understood = _understand(files, target)
    found, format = understood.found, understood.format
    if found.unknown:
        logger.warning("%s: keys not understood, without effect: %s", Path(found.source).name, ", ".join(found.unknown))
    _check_target(found, facts)
    if shortlist is not None and found.reduced:
        raise UnsupportedError(f"{Path(found.source).name} has a reduced vocabulary already; leave shortlist= out.")
    like, read, maps = target.get_input_embeddings().weight, dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in files.tensors(lambda name: format.owns(name, files.names)):
        part = format.copied(name)
        if name in MAPS:
            maps[name] = tensor
        elif part:
            _check_copy(Path(found.source).name, name, tensor, part, target)
        elif tensor.is_floating_point() == (name in format.integers):
            kind = "whole numbers" if name in format.integers else "floating point"
            raise UnsupportedError(f"{Path(found.source).name}: tensor {name!r} is {tensor.dtype}; expected {kind}.")
        elif name in format.integers:
            read[name] = tensor.to(device=device or like.device, dtype=torch.int64)
        else:
            read[name] = tensor.to(device=device or like.device, dtype=dtype or like.dtype)
    spec, chosen, tensors = found.spec, _reduced(maps, found.spec) or shortlist, format.pack(read)
    if shortlist is not None:
        spec = dataclasses.replace(spec, draft_vocab_size=len(shortlist.ids))
        rows = [name for name in format.heads(spec) if name in tensors]
        tensors |= {name: tensors[name][shortlist.ids.to(tensors[name].device)] for name in rows}
    with torch.device("meta"):
        model = format.build(spec, chosen, target)
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False)
    try:
        if isinstance(model, Borrower):
            model.borrow(target)
    except UnsupportedError as error:
        raise UnsupportedError(f"{Path(found.source).name} was not made for this target: {error}") from None
    options = {"length": length, "temperature": temperature, "least_confidence": least_confidence}
    return format.drafter(model, **options)  # type: ignore[no-any-return]  # one of the two


@dataclass(frozen=True, slots=True)
class _Understood:
    """What was understood, and its format."""

    found: Inspection
    format: Format


NAMING: dict[str, Kind[Any]] = {"model_type": TEXT, "architectures": TEXTS, "speculators_model_type": TEXT}
"""Keys that tell the format."""


def _understand(files: Checkpoint, target: Any) -> _Understood:
    """What a checkpoint is; all of its tensors are accounted for."""
    try:
        format = _format_of(files)
        spec, keys = format.read_spec(files.config, files.names, None if target is None else Target.of(target))
        _check_tensors(files, format, spec, target)
    except UnsupportedError as error:
        raise UnsupportedError(f"{files.name}: {error}") from None
    owned = {"embedding": spec.own_embedding, "output head": spec.own_head}
    found = Inspection(
        source=files.name,
        dialect=format.dialect_of(files.config, files.names),
        spec=spec,
        notes=tuple(keys.notes.values()),
        borrowed=tuple(part for part, own in owned.items() if not own),
        reduced=bool(files.names & MAPS),
        unknown=tuple(keys.unknown()),
    )
    return _Understood(found, format)


def _format_of(files: Checkpoint) -> Format:
    """The format of a checkpoint."""
    keys = Keys({"": files.config})
    for name, kind in NAMING.items():
        keys.get(name, kind, None)
    format = next((each for each in FORMATS if each.dialect_of(files.config, files.names)), None)
    if format is None:
        told = " and ".join(f"{name} {files.config.get(name)!r}" for name in NAMING)
        raise UnsupportedError(
            f"{told} are no drafter known here. Known are {'; '.join(each.known for each in FORMATS)}."
        )
    return format


def _check_tensors(files: Checkpoint, format: Format, spec: Any, target: Any) -> None:
    """Raises unless all tensors are there, none is left over and all have the right shape."""
    # Which tokens a reduced vocabulary has is not known before tensors are read; their number decides the shapes.
    reduced = spec.draft_vocab_size != spec.vocab_size
    shortlist = Shortlist(torch.arange(spec.draft_vocab_size), spec.vocab_size) if reduced else None
    own = [name for name in files.names - MAPS if format.owns(name, files.names) and not format.copied(name)]
    with torch.device("meta"):
        expected: Mapping[str, Tensor] = format.build(spec, shortlist, target).state_dict()
        found = format.pack({name: torch.empty(files.shape(name)) for name in own})
    missing, surplus = (
        sorted(format.published(name, files.names) for name in names)
        for names in (set(expected) - set(found), set(found) - set(expected))
    )
    if missing or surplus:
        parts = [f"tensors that are missing: {_some(missing)}"] if missing else []
        parts += [f"tensors that are not known: {_some(surplus)}"] if surplus else []
        raise UnsupportedError("; ".join(parts) + ".")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise UnsupportedError(
                f"tensor {format.published(name, files.names)!r} has shape {list(tensor.shape)}; the configuration "
                f"says {list(expected[name].shape)}."
            )
    if spec.draft_vocab_size != spec.vocab_size and "d2t" not in files.names:
        raise UnsupportedError(
            f"it drafts from {spec.draft_vocab_size} of {spec.vocab_size} tokens but no tensor 'd2t' says from which."
        )


def _check_copy(source: str, name: str, tensor: Tensor, part: str, target: Any) -> None:
    """Raises if what a checkpoint repeats of the target is something else."""
    module = target.get_input_embeddings() if part == "embedding" else target.get_output_embeddings()
    own = module.weight.detach()
    if tensor.shape != own.shape or not torch.equal(tensor.to(own), own):
        raise UnsupportedError(f"{source}: tensor {name!r} is not the target's {part}, of which it should be a copy.")


def _some(names: list[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _check_target(found: Inspection, target: Target) -> None:
    """Raises unless a drafter fits a target."""
    spec, layers, vocab_size = found.spec, target.layers, target.vocab_size
    demands = [
        (
            f"it reads hidden state {max(spec.feature_layers)}, the target has states 0 to {layers}",
            max(spec.feature_layers) <= layers,
        ),
        (f"it has {spec.vocab_size} tokens, the target {vocab_size}", spec.vocab_size == vocab_size),
    ]
    wrong = next((text for text, holds in demands if not holds), None)
    if wrong is not None:
        raise UnsupportedError(f"{Path(found.source).name} was not made for this target: {wrong}.")


def _reduced(maps: Mapping[str, Tensor], spec: Any) -> Shortlist | None:
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
