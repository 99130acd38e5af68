"""Whole requests with neural drafters, summed exactly: the law of the text is the target's.

Nothing is sampled. A request is run once for every way that its chance can go (the first token, what is drafted, which
drafts are kept, what comes in their place) from the prefill to the last token, and the chances of equal texts are
added up. Drafts are drawn one by one, in place of the Gumbel form that gives the same draws.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, control, drafters, trees, verify
from specdec.control import confidence
from specdec.drafters import BlockDrafter
from specdec.protocols import Controller, Drafter, TreeBuilder, Verifier
from specdec.testing import tiny_model
from specdec.trees import sampled, topology
from specdec.types import DraftTree
from specdec.verify import exact, rules
from tests.drafters.block import checkpoints as block
from tests.drafters.feature import eagle_checkpoints as eagle
from tests.verify import laws

VOCAB, PROMPT = 3, torch.tensor([[1, 2, 1]])
TEMPERATURE = 1.3
THRESHOLD = 0.1
SHORT = {"vocab_size": VOCAB, "mask_token_id": VOCAB - 1, "draft_vocab_size": 2}
"""Some of the tokens can be drafted, so that what a draft cannot hold must come from the target."""

WRITERS: dict[str, Any] = {
    "DFlash, reduced": partial(block.write, dialect="speculators_dflash", **SHORT),
    "DFlash 2": partial(block.write, dialect="dflash2", vocab_size=VOCAB, mask_token_id=2, selector_top_k=2),
    "DSpark, gated": partial(block.write, dialect="dspark_gated", vocab_size=VOCAB, mask_token_id=2),
    "DSpark, reduced": partial(block.write, dialect="speculators_dspark", **SHORT),
    "EAGLE-3": partial(eagle.write, dialect="deepspec", num_target_layers=2, vocab_size=VOCAB),
    "EAGLE-3, reduced": partial(
        eagle.write, dialect="eagle", num_target_layers=2, vocab_size=VOCAB, draft_vocab_size=2
    ),
    "P-EAGLE": partial(eagle.write, dialect="peagle", num_target_layers=2, **SHORT),
}


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=VOCAB)


@cache
def drafter_of(kind: str, least_confidence: float | None = None) -> Any:
    folder = Path(mkdtemp())
    WRITERS[kind](folder)
    return drafters.from_pretrained(folder, target(), least_confidence=least_confidence)


@pytest.fixture(autouse=True)
def one_by_one() -> Iterator[None]:
    """Draws without replacement that can be enumerated."""

    def draw(law: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        left, drawn = law.clone(), []
        for _ in range(min(count, law.shape[-1])):
            rows = [row if float(row.sum()) > 0 else torch.ones_like(row) for row in left.flatten(0, 1)]
            chosen = torch.stack([torch.multinomial(row[None], 1, generator=generator)[0] for row in rows])
            drawn.append(chosen.view(*law.shape[:-1], 1))
            left = left.scatter(-1, drawn[-1], 0.0)
        return torch.cat(drawn, -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "draw", draw)
        yield


@cache
def plain(tokens: int, top_k: int) -> Tensor:
    """The law of the target's own text."""
    law = torch.ones((VOCAB,) * tokens, dtype=torch.float64)
    for path in itertools.product(range(VOCAB), repeat=tokens):
        text = torch.cat([PROMPT, torch.tensor([path])], 1)
        with torch.no_grad():
            scores = target()(text).logits[0, PROMPT.shape[1] - 1 : -1] / TEMPERATURE
        scores[scores < scores.topk(top_k or VOCAB).values[:, -1:]] = -torch.inf
        law[path] = scores.softmax(-1)[torch.arange(tokens), torch.tensor(path)].prod()
    return law


def error(
    drafter: Drafter,
    tree: TreeBuilder,
    verifier: Verifier,
    tokens: int = 3,
    top_k: int = 0,
    controller: Controller | None = None,
) -> tuple[float, float]:
    """Largest error of the text's law, and the mean number of accepted tokens over all ways."""
    generator = SpeculativeGenerator(target(), drafter, tree, verifier, controller=controller)
    request: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "top_k": top_k, "pad_token_id": 0}
    request["attention_mask"] = torch.ones_like(PROMPT)
    accepted = []

    def text() -> tuple[int, ...]:
        ids = generator.generate(PROMPT, max_new_tokens=tokens, **request)
        accepted.append(generator.stats.accepted)
        return tuple(ids[0, PROMPT.shape[1] :].tolist())

    law = torch.zeros((VOCAB,) * tokens, dtype=torch.float64)
    for path, chance in exact.outcomes(text).items():
        law[path] += chance
    return float((law - plain(tokens, top_k)).abs().max()), sum(accepted) / len(accepted)


CLOSE = 1e-6
"""`generate` takes its laws in float32; a wrong rule errs by 1e-3 and more."""


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "EAGLE-3"])
def test_drawn_chains(kind: str) -> None:
    """A drafted token that is kept or not; then what is left of the request."""
    wrong, accepted = error(drafter_of(kind), trees.sampled_chain(2), verify.Rejection())
    assert wrong < CLOSE
    assert accepted > 0


def test_longer_drawn_chains() -> None:
    """Two drafted tokens, of which none, one or both are kept, and then another draft."""
    wrong, accepted = error(
        drafter_of("EAGLE-3, reduced"), trees.sampled_chain(2), verify.Rejection(), tokens=4, top_k=2
    )
    assert wrong < CLOSE
    assert accepted > 0


@pytest.mark.parametrize(
    ("kind", "verifier"), [("EAGLE-3, reduced", verify.TreeRejection()), ("DSpark, gated", verify.Traversal())]
)
def test_drawn_trees(kind: str, verifier: Verifier) -> None:
    """Two draws without replacement."""
    wrong, accepted = error(drafter_of(kind), trees.Sampled((2,)), verifier)
    assert wrong < CLOSE
    assert accepted > 0


def test_chosen_trees() -> None:
    """Best-first trees are not drawn, and are judged by the target alone."""
    wrong, accepted = error(drafter_of("EAGLE-3"), trees.BestFirst(nodes=4, branch=2, depth=2), verify.TargetOnly())
    assert wrong < CLOSE
    assert accepted > 0


def test_confidence_ends_drawn_chains() -> None:
    """The head reads a slot and the token before it; what it says is known before that slot's own draw."""
    drafter = BlockDrafter(drafter_of("DSpark, gated").model, least_confidence=THRESHOLD)
    grown = set()

    class Wide(trees.Sampled):
        def grow(self, *args: Any, **options: Any) -> DraftTree:
            tree = super().grow(*args, **options)
            grown.add(tree.width)
            return tree

    wrong, accepted = error(drafter, Wide((1, 1)), verify.Rejection(), tokens=4, top_k=2)
    assert wrong < CLOSE
    assert accepted > 0
    assert {2, 3} <= grown, "the head ended every chain alike"


class Watched(control.ConfidenceSchedule):
    """Remembers how many nodes were verified."""

    kept: set[int]

    def prune(self, tree: DraftTree) -> DraftTree:
        pruned = super().prune(tree)
        self.kept = getattr(self, "kept", set()) | {pruned.width}
        return pruned


def scheduled(costs: dict[int, float]) -> Watched:
    measured = control.VerifyCosts.from_measurements(costs)
    return Watched(measured, confidence=drafter_of("DSpark, reduced").confidence)


@pytest.mark.parametrize(
    "verifier", [verify.Rejection(), verify.BlockVerification()], ids=lambda rule: type(rule).__name__
)
def test_a_confidence_schedule_cuts_drawn_chains(verifier: Verifier) -> None:
    """A second node is verified if the head, which reads the first one, finds it likely enough for its price."""
    schedule = scheduled({1: 1.0, 2: 1.3, 3: 1.5008})
    wrong, accepted = error(
        drafter_of("DSpark, reduced"), trees.sampled_chain(2), verifier, tokens=4, top_k=2, controller=schedule
    )
    assert wrong < CLOSE
    assert accepted > 0
    assert {2, 3} <= schedule.kept, "every chain was cut alike"


def test_looking_ahead_is_noticed() -> None:
    """Without the early break a node is verified for the sake of the next one, of which the head knows by this one."""
    schedule = scheduled({1: 1.0, 2: 1.6, 3: 1.69})

    def best_of_all(_: Any, survival: Tensor, costs: Any) -> Tensor:
        rates = survival.cumsum(-1) / torch.tensor([costs.relative(1 + node) for node in range(survival.shape[1])])
        return torch.arange(survival.shape[1]) <= rates.argmax(-1, keepdim=True)

    options: dict[str, Any] = {"tokens": 4, "top_k": 2, "controller": schedule}
    drafter, tree = drafter_of("DSpark, reduced"), trees.sampled_chain(2)
    with laws.wrong(confidence, "admitted", best_of_all):
        wrong, _ = error(drafter, tree, verify.Rejection(), **options)
    assert {1, 3} <= schedule.kept
    assert wrong > 1e-3


class StatesAnotherLaw(trees.Sampled):
    """A14: draws at one temperature, and says that it drew at another."""

    def grow(self, *args: Any, **options: Any) -> DraftTree:
        tree = super().grow(*args, **options)
        if tree.draft_probs is None:
            return tree
        law = tree.draft_probs.sqrt()
        return dataclasses.replace(tree, draft_probs=law / law.sum(-1, keepdim=True).clamp_min(1e-300))


class DropsUnlikely(trees.Sampled):
    """Decides whether a draft is verified from the draft itself: the counterexample of the DSpark paper."""

    def grow(self, *args: Any, **options: Any) -> DraftTree:
        tree = super().grow(*args, **options)
        return topology.prune(tree, (tree.tokens != 0) | (tree.parents < 0))


@pytest.mark.parametrize(
    "tree", [StatesAnotherLaw((1, 1)), DropsUnlikely((1, 1))], ids=lambda tree: type(tree).__name__
)
def test_wrong_builders_are_noticed(tree: TreeBuilder) -> None:
    wrong, accepted = error(drafter_of("DSpark, gated"), tree, verify.Rejection())
    assert wrong > 1e-3
    assert accepted > 0


def test_a_wrong_verifier_is_noticed() -> None:
    """After a rejection the target's law must lose what was rejected."""
    with laws.wrong(rules, "reject", laws.keeps_target):
        wrong, accepted = error(drafter_of("EAGLE-3, reduced"), trees.sampled_chain(2), verify.Rejection())
    assert wrong > 1e-3
    assert accepted > 0
