"""What the tests of `generate` share: small models, prompts, a run with its rounds, and the anti-vacuity rule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec import SpeculativeGenerator, control
from specdec.hf.attention import Attention
from specdec.kv import KVCacheConfig
from specdec.protocols import Drafter, TreeBuilder, Verifier
from specdec.testing import FAMILIES, OracleDrafter, tiny_model
from specdec.types import DraftTree, Round, TargetLaw
from specdec.verify import StepRule

PAD = 0
ONE: list[list[int]] = [[70, 71, 20, 3, 77, 12, 9, 30, 44]]
FOUR: list[list[int]] = [[5, 6, 7], [5, 9, 8, 7, 6, 5, 4, 3, 2], list(range(20, 37)), [11]]
"""A ragged batch: 3, 9, 17 and 1 tokens."""
PROMPTS = {"one": ONE, "ragged": FOUR}
START = {name: max(map(len, prompts)) for name, prompts in PROMPTS.items()}
"""Columns of the prompts, where new tokens begin."""

ALIKE = ("qwen3_next", "qwen3_5_moe", "olmo_hybrid")
"""Families whose caches and recurrent layers are those of qwen3_5; greedy parity covers all, the rest the others."""
DISTINCT = [family for family in FAMILIES if family not in ALIKE]

SEEDS = {"qwen2": 4, "olmo2": 4, "gemma3": 0, "gpt_oss": 5}
"""Seeds whose greedy text does not loop after these prompts (7 for the other families)."""

MIXED: list[int | None] = [9, None, 0, 2, 9, 1, None, 9, 0, 1]
"""Right tokens per round: as many as the tree is deep, none, some, and a round without drafts."""
RAGGED: list[list[int | None]] = [MIXED, [0, 9, None, 1, 2], [2, None, 2, 0, 9], [1, 9, 0, None, 3]]


@cache
def model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """A tiny model, made once; tests must leave it as it is."""
    return tiny_model(family, **{"seed": SEEDS.get(family, 7), **options})


def batch(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Left-padded ids and their mask, as keyword arguments of `generate`."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def plain(target: PreTrainedModel, **request: Any) -> Any:
    """What transformers itself returns; greedy unless asked otherwise."""
    return type(target).generate(target, **{"do_sample": False, "pad_token_id": PAD, **request})


@cache
def text(prompts: str, tokens: int, family: str = "llama") -> Tensor:
    """The ids that plain greedy decoding gives when nothing stops it; do not change them."""
    return plain(model(family), **batch(PROMPTS[prompts]), max_new_tokens=tokens)


class Recorder(control.Always):
    """Drafts the full tree in every round and remembers the rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Round] = []

    def observe(self, round: Round) -> None:
        self.rounds.append(round)


@dataclass(frozen=True)
class Run:
    """A finished call of `generate` and the rounds it took."""

    output: Any
    rounds: list[Round]
    generator: SpeculativeGenerator
    kinds: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", kinds(self.rounds))


def speculate(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: TreeBuilder,
    *,
    verifier: Verifier | None = None,
    codecs: KVCacheConfig | None = None,
    attention: Attention = "model",
    **request: Any,
) -> Run:
    """One call of `SpeculativeGenerator.generate`; greedy unless asked otherwise."""
    recorder = Recorder()
    generator = SpeculativeGenerator(target, drafter, tree, verifier, codecs, controller=recorder, attention=attention)
    output = generator.generate(**{"do_sample": False, "pad_token_id": PAD, **request})
    return Run(output, recorder.rounds, generator)


def oracle(reference: Tensor, *, in_step: bool = False, **options: Any) -> OracleDrafter:
    """A drafter that knows `reference` and errs as `MIXED` says, or in a batch as `RAGGED` says for each row.

    `in_step` gives all rows the same schedule, for requests whose rows must advance together.
    """
    rows = reference.shape[0]
    return OracleDrafter(
        reference, MIXED if in_step or rows == 1 else [RAGGED[row % 4] for row in range(rows)], **options
    )


class Tape(BaseStreamer):
    """A streamer that remembers what it got."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert self.ends == 0, "a token after end()"
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1

    @property
    def tokens(self) -> list[list[int]]:
        """Streamed tokens after the prompt, one list a column."""
        return [value.tolist() for value in self.puts[1:]]


@contextmanager
def forwards(target: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    """Keyword arguments of every forward pass of a model while the block runs."""
    seen: list[dict[str, Any]] = []
    handle = target.register_forward_pre_hook(lambda *given: seen.append(given[-1]), with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


class AcceptEverything(StepRule):
    """A wrong verifier: follows the first child whatever the target says."""

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        below = tree.parents == node[:, None]
        child = torch.where(below.any(-1), below.int().argmax(-1), -1)
        drafted = tree.tokens.gather(1, child.clamp_min(0)[:, None]).squeeze(1)
        return torch.where(child >= 0, drafted, law.draw(generator)), child


ALL_KINDS = frozenset({"full", "partial", "zero", "empty"})


def kinds(rounds: Sequence[Round]) -> frozenset[str]:
    """How rows fared in the rounds after the prefill: full, partial or zero acceptance, or nothing drafted."""
    found = set()
    for round in rounds[1:]:
        for row, (nodes, accepted, committed) in enumerate(
            zip(round.tree.num_nodes.tolist(), round.num_accepted.tolist(), round.num_committed.tolist(), strict=True)
        ):
            if committed == 0:
                continue
            depths = [0]
            for parent in round.tree.parents[row, 1:nodes].tolist():
                depths.append(depths[parent] + 1)
            if nodes == 1:
                found.add("empty")
            elif accepted == 0:
                found.add("zero")
            else:
                found.add("full" if accepted == max(depths) else "partial")
    return frozenset(found)


def assert_equal(run: Run, reference: Tensor, *, all_kinds: bool = True) -> None:
    """The same tokens as the reference, and not by avoiding any kind of round (the anti-vacuity rule)."""
    assert run.output.tolist() == reference.tolist()
    if all_kinds:
        assert run.kinds == ALL_KINDS, f"the run had no round of kind {sorted(ALL_KINDS - run.kinds)}"
