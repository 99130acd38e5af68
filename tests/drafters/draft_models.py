"""Shared by the tests of the model drafter: models that often agree, scripted budgets, a fresh start to compare."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees
from specdec.drafters import ModelDrafter
from specdec.hf import open_model
from specdec.protocols import DraftContext, Drafter, TreeBuilder
from specdec.trees import topology
from specdec.types import Candidates, Frontier, Round
from tests import helpers

ONE = [[5, 6, 7, 8]]
FOUR = [[5, 6, 7], [5, 9, 8, 7, 6, 5, 4, 3, 2], list(range(20, 37)), [11]]
PROMPTS = {"one": ONE, "ragged": FOUR}
SHAPES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "best first": trees.BestFirst(nodes=8, branch=3, depth=4),
    "fixed": trees.Fixed([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 1, 0)]),
}


@functools.cache
def like(family: str, noise: float = 0.02, **options: Any) -> PreTrainedModel:
    """A model that often agrees with the tiny model of its family."""
    model = copy.deepcopy(helpers.model(family, **options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.add_(noise * (weight.std() if weight.numel() > 1 else 0) * draw.to(weight.dtype))
    return model


class Scripted(helpers.Recorder):
    """Budgets by script, cycled; 0 drafts nothing."""

    def __init__(self, *budgets: int) -> None:
        super().__init__()
        self._script = budgets

    def budget(self) -> int:
        return self._script[(len(self.rounds) - 1) % len(self._script)]


class Twin:
    """A model drafter whose every answer is compared with that of a drafter that has just begun."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, drafter: ModelDrafter, fresh: ModelDrafter) -> None:
        self._drafter, self._fresh = drafter, fresh
        self.compared = 0

    def start(self, context: DraftContext) -> None:
        self._drafter.start(context)
        self._context = context
        rows = zip(context.tokens.tolist(), context.mask.tolist(), strict=True)
        self._texts = [[token for token, real in zip(*row, strict=True) if real] for row in rows]

    def children(self, frontier: Frontier, count: int) -> Candidates:
        if frontier.depth == 0:
            batch = helpers.batch(self._texts)
            mask = batch["attention_mask"].bool()
            self._fresh.start(dataclasses.replace(self._context, tokens=batch["input_ids"], mask=mask))
        mine, theirs = self._drafter.children(frontier, count), self._fresh.children(frontier, count)
        shown = frontier.valid[:, :, None]
        assert torch.equal(mine.tokens[frontier.valid], theirs.tokens[frontier.valid])
        for one, other in ((mine.log_probs, theirs.log_probs), (mine.probs, theirs.probs)):
            close = torch.isclose(one, other, rtol=1e-4, atol=1e-6) | ~shown
            assert bool(close.all()), f"depth {frontier.depth}: the context is not the committed text"
        self.compared += 1
        return mine

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        self._drafter.commit(tokens, counts, features)
        for text, new, count in zip(self._texts, tokens.tolist(), counts.tolist(), strict=True):
            text += new[:count]

    def finish(self) -> None:
        self._drafter.finish()


def run(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: TreeBuilder,
    prompts: str | Sequence[Sequence[int]],
    *,
    controller: helpers.Recorder | None = None,
    **request: Any,
) -> tuple[Tensor, list[Round]]:
    """Ids and rounds of one call."""
    recorder = controller or helpers.Recorder()
    rows = PROMPTS[prompts] if isinstance(prompts, str) else prompts
    generator = SpeculativeGenerator(target, drafter, tree, controller=recorder)
    defaults = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}
    return generator.generate(**helpers.batch(rows), **{**defaults, **request}), recorder.rounds


def reference(target: PreTrainedModel, prompts: str | Sequence[Sequence[int]], tokens: int = 24, **request: Any) -> Any:
    rows = PROMPTS[prompts] if isinstance(prompts, str) else prompts
    return helpers.plain(target, **helpers.batch(rows), max_new_tokens=tokens, **request).tolist()


def assert_never_wrong(rounds: list[Round]) -> None:
    """No round ended at a node that has children: the drafter's best is what the target takes."""
    drafted = 0
    for round in rounds[1:]:
        for row, (accepted, committed) in enumerate(
            zip(round.num_accepted.tolist(), round.num_committed.tolist(), strict=True)
        ):
            if committed <= accepted:
                continue  # stopped on the way, or before
            last = round.path[row, accepted - 1] if accepted else torch.tensor(0)
            assert int(topology.num_children(round.tree.parents)[row, last]) == 0
            drafted += int(round.tree.num_nodes[row]) > 1
    assert drafted > 0, "nothing was drafted"


def context(rows: Sequence[Sequence[int]], vocab_size: int = 97, temperature: float = 0.0) -> DraftContext:
    batch = helpers.batch(rows)
    return DraftContext(
        tokens=batch["input_ids"],
        mask=batch["attention_mask"].bool(),
        vocab_size=vocab_size,
        temperature=temperature,
        open_model=open_model,
    )


def roots(rows: Sequence[Sequence[int]]) -> Frontier:
    return Frontier.from_root(torch.tensor([row[-1] for row in rows]), valid=torch.ones(len(rows), dtype=torch.bool))
