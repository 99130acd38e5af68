"""The law of text that is drawn in device rounds, by chi-square, and what a seed promises.

The target is a table model, so the joint law of the first tokens is known exactly; drafts are looked up in a prompt in
which every token has been followed by several others. Seeds are fixed: a test either holds or does not.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import logits_process

from specdec import drafters, trees, verify
from specdec.hf import cache as cache_module
from specdec.hf import device_rounds
from specdec.protocols import TreeBuilder
from specdec.testing import table_model
from tests import helpers
from tests.hf.device_runs import generator, serve
from tests.test_sampling_laws import TARGET, VOCAB, WARPERS, pvalue

TOKENS, RUNS = 4, 1500
PROMPT = [0, 1, 3, 0, 2, 2, 0, 0, 1, 2, 1, 0, 3, 2, 0]
TREES: dict[str, TreeBuilder] = {"chain": trees.Chain(3), "tree": trees.BestFirst(nodes=7)}
Choose = Callable[[Tensor], Tensor]


@cache
def target() -> PreTrainedModel:
    return table_model(TARGET)


def joint(warpers: Sequence[logits_process.LogitsProcessor]) -> Tensor:
    """Exact probability of every text of `TOKENS` tokens after the prompt."""
    ids, scores = torch.arange(VOCAB)[:, None], TARGET.log()
    for warper in warpers:
        scores = warper(ids, scores)
    law = scores.double().softmax(-1)
    probs = law[PROMPT[-1]]
    for _ in range(TOKENS - 1):
        probs = (probs.view(-1, VOCAB)[:, :, None] * law).flatten()
    return probs


def draw(tree: TreeBuilder, seed: int = 0, **options: Any) -> Tensor:
    """Counts of the texts drawn in `RUNS` rows of a batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "GROWTH", 8)  # thousands of rows in short buffers
        run = serve(
            generator(target(), drafter=drafters.SuffixDrafter(), tree=tree),
            input_ids=torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            num_return_sequences=RUNS,
            max_new_tokens=TOKENS,
            do_sample=True,
            generator=torch.Generator().manual_seed(seed),
            **{"top_k": 0, **options},
        )
    new = run.output[:, len(PROMPT) :]
    assert run.generator.stats.accepted > RUNS // 5, "drafts are never accepted"
    assert {"full", "partial"} <= run.kinds
    assert "zero" in run.kinds or options, "narrow laws may reject no tree whole"
    return torch.bincount((new * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(-1), minlength=VOCAB**TOKENS)


@pytest.mark.parametrize(
    ("tree", "warper"), [("chain", "plain"), ("chain", "top-k"), *(("tree", warper) for warper in WARPERS)]
)
def test_the_text_has_the_target_s_law(tree: str, warper: str) -> None:
    options, processors = WARPERS[warper]
    assert pvalue(draw(TREES[tree], **options), joint(processors)) > 1e-3


def _one_wait_for_all_nodes(scores: Tensor, waits: Tensor) -> Tensor:
    """The draws at the nodes of a row depend on each other."""
    return scores.softmax(-1) / waits[:, :1]


def _uniform_waits(scores: Tensor, waits: Tensor) -> Tensor:
    return scores.softmax(-1) / (1 - (-waits).exp())


def _likely_drafts_are_believed(scores: Tensor, waits: Tensor) -> Tensor:
    """The first node's choice is the most likely one now and then."""
    probs = scores.softmax(-1)
    best = torch.nn.functional.one_hot(probs.argmax(-1), VOCAB)
    return torch.where((waits[..., :1] < 0.2) & (best > 0), torch.inf, probs / waits)


def _flatter(scores: Tensor, waits: Tensor) -> Tensor:
    return (scores / 1.8).softmax(-1) / waits


WRONG = [_one_wait_for_all_nodes, _uniform_waits, _likely_drafts_are_believed, _flatter]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_draw_is_noticed(wrong: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def chooser(*_: Any, generator: torch.Generator | None, **__: Any) -> Choose:
        def choose(logits: Tensor) -> Tensor:
            waits = torch.empty_like(logits).exponential_(generator=generator)
            return wrong(logits, waits).argmax(-1)

        return choose

    monkeypatch.setattr(device_rounds, "chooser", chooser)
    assert pvalue(draw(TREES["tree"]), joint([])) < 1e-9


def test_warpers_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = device_rounds.chooser
    monkeypatch.setattr(device_rounds, "chooser", lambda _, **rest: chooser([], **rest))
    options, processors = WARPERS["top-p"]
    assert pvalue(draw(TREES["tree"], **options), joint(processors)) < 1e-9


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_a_seed_gives_one_text(prompts: str) -> None:
    """With torch's generator and with one's own, in a new program and in a kept one."""
    served = generator(helpers.model())
    asked = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": 9, "do_sample": True, "top_k": 8}

    def drawn(seed: int, own: bool) -> list[list[int]]:
        torch.manual_seed(seed)
        source = torch.Generator().manual_seed(seed) if own else None
        return serve(served, generator=source, **asked).output.tolist()

    texts = [drawn(seed, own) for own in (False, True) for seed in (3, 4, 3)]
    assert texts[0] == texts[2] == texts[3] == texts[5]
    assert texts[1] == texts[4] != texts[0]


def test_the_draw_is_the_race_that_its_law_says() -> None:
    """The largest of probability over an exponential variable: exact for the law, whatever the batch."""
    law = TARGET[:1].expand(20000, -1).log()[:, None]
    choose = device_rounds.chooser([], greedy=False, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(choose(law).flatten(), minlength=VOCAB)
    assert pvalue(counts, TARGET[0]) > 1e-3
    assert pvalue(counts, TARGET[1]) < 1e-9


def test_a_greedy_request_takes_no_randomness() -> None:
    state = torch.get_rng_state()
    serve(generator(helpers.model()), **helpers.batch(helpers.ONE), max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_verifies_by_target_only() -> None:
    """Lossless for every tree: no law of the drafts enters."""
    made = generator(helpers.model(), verifier=verify.TargetOnly())
    asked = {**helpers.batch(helpers.ONE), "max_new_tokens": 16, "do_sample": True, "top_k": 1}
    assert serve(made, **asked).output.tolist() == helpers.text("one", 16).tolist()
