"""Block drafters in rounds: the text is the target's, and the context is the committed text, whatever was drafted."""

import inspect
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from specdec import drafters, trees, verify
from specdec.drafters import _buffers
from specdec.drafters.block import BlockDrafter
from specdec.errors import ShapeError, SpecdecError, UnsupportedError
from specdec.protocols import DraftContext, TreeBuilder
from specdec.types import Candidates, Frontier
from tests import helpers
from tests.drafters.block.checkpoints import write
from tests.drafters.steered import Steered

NEW = 24
TREES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "best first": trees.BestFirst(nodes=14, branch=3, depth=4),
    "wide": trees.BestFirst(nodes=20, branch=2, temperature=1.5),
}


@cache
def drafter_of(family: str, dialect: str) -> BlockDrafter:
    target = helpers.model(family)
    layers = target.config.get_text_config().num_hidden_layers
    written = write(Path(mkdtemp()), dialect, num_target_layers=layers)
    return drafters.from_pretrained(written.folder, target)


def run(family: str, dialect: str, tree: TreeBuilder) -> tuple[helpers.Run, Steered]:
    reference = helpers.text("ragged", NEW, family)
    steered = Steered(drafter_of(family, dialect), reference, helpers.RAGGED)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    return helpers.speculate(helpers.model(family), steered, tree, **request), steered


@pytest.mark.parametrize("family", helpers.DISTINCT)
def test_greedy_text_is_that_of_plain_generate(family: str) -> None:
    for name, dialect in zip(TREES, ("dflash_nested", "dflash2", "dspark_rnn"), strict=True):
        made, _ = run(family, dialect, TREES[name])
        helpers.assert_equal(made, helpers.text("ragged", NEW, family))


@pytest.mark.parametrize("dialect", ["dflash_flat", "speculators_dspark", "speculators_dflash2", "dspark_gated"])
def test_every_format_drafts(dialect: str) -> None:
    made, _ = run("llama", dialect, TREES["best first"])
    helpers.assert_equal(made, helpers.text("ragged", NEW))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dialect", ["dflash2", "dspark_vanilla"])
def test_e10_the_context_is_that_of_the_committed_text(
    family: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ragged rounds the cached keys and values are those of a fresh start on the target's true features."""
    monkeypatch.setattr(_buffers, "STEP", 2)
    made, steered = run(family, dialect, TREES["best first"])
    last = steered.kept["_context"]
    target, fresh = helpers.model(family), drafter_of(family, dialect)
    lengths = last.lengths.tolist()
    assert len(set(lengths)) > 1
    for row, prompt in enumerate(helpers.FOUR):
        text = made.output[row, -NEW - len(prompt) :][None]
        states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in fresh.feature_layers], -1)
        tokens = text[:, : lengths[row] + 1]
        fresh.start(DraftContext(tokens, torch.ones_like(tokens, dtype=torch.bool), 97, features=features))
        expected = fresh._started()
        assert expected.lengths.tolist() == [lengths[row]]
        for mine, theirs in zip(last.layers, expected.layers, strict=True):
            first = max(mine.base, theirs.base)
            for found, wanted in zip(mine.buffers, theirs.buffers, strict=True):
                kept = found[row, :, first - mine.base : lengths[row] - mine.base]
                torch.testing.assert_close(
                    kept, wanted[0, :, first - theirs.base : lengths[row] - theirs.base], rtol=1e-6, atol=1e-7
                )
                assert kept.shape[1] > 0


@pytest.mark.parametrize("dialect", ["dflash_flat", "dflash2", "dspark_rnn", "speculators_dflash"])
def test_drawn_trees_carry_the_law_they_were_drawn_from(dialect: str) -> None:
    """16 ways for the selector, the reduced vocabulary scattered; rejection needs exactly these numbers."""
    drafter = drafter_of("llama", dialect)
    drafter = BlockDrafter(drafter.model)
    context = DraftContext(
        torch.tensor([[4, 5, 6]]),
        torch.ones(1, 3, dtype=torch.bool),
        97,
        temperature=0.7,
        features=torch.randn(1, 3, drafter.model.fc.in_features, dtype=torch.float64),
    )
    drafter.start(context)
    tree = trees.Sampled((2, 1)).grow(drafter, torch.tensor([6]), torch.tensor([2]), 4, vocab_size=97)
    assert tree.draft_probs is not None
    asked = drafter.children(Frontier.from_root(torch.tensor([6]), torch.tensor([True])), 1)
    torch.testing.assert_close(tree.draft_probs[:, 0], asked.law(97)[:, 0])
    support = int((asked.law(97) > 0).sum())
    assert support == {"dflash2": drafter.model.spec.selector_top_k, "speculators_dflash": 40}.get(dialect, 97)


@pytest.mark.parametrize(
    "verifier", [verify.TreeRejection(), verify.Traversal(), verify.TargetOnly()], ids=lambda rule: type(rule).__name__
)
def test_drafts_of_cold_sampling_are_judged_rightly(verifier: Any) -> None:
    """Where the target's law is all but one-hot, every rule must give the greedy text, however wrong the drafts are.

    That the rules keep any law is proved where the verifiers are, from the laws that trees carry.
    """
    target, prompt = helpers.model(), torch.tensor([[5, 6, 7]])
    tree = trees.BestFirst(8) if isinstance(verifier, verify.TargetOnly) else trees.Sampled((2, 2))
    request = {"input_ids": prompt, "max_new_tokens": 20}
    cold = {"do_sample": True, "temperature": 1e-4, "top_k": 0}
    made = helpers.speculate(target, drafter_of("llama", "dflash2"), tree, verifier=verifier, **cold, **request)
    assert made.output.tolist() == helpers.plain(target, **request).tolist()
    assert made.generator.stats.drafted > 20


@pytest.mark.parametrize("helpless", [True, False])
def test_a_drafter_that_is_never_right_says_so(helpless: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong feature index raises nothing anywhere; acceptance at chance is all there is to see."""
    reference = helpers.text("ragged", NEW)
    schedule = [[0]] if helpless else helpers.RAGGED
    steered = Steered(BlockDrafter(drafter_of("llama", "dflash_flat").model), reference, schedule)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(helpers.model(), steered, trees.Chain(2), **request)
    assert (made.generator.stats.accepted == 0) == helpless
    assert caplog.text.count("no token of") == helpless


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dialect", ["dflash_flat", "dflash2", "dspark_rnn", "speculators_dflash"])
def test_a_drafter_of_another_dtype(dialect: str, dtype: torch.dtype) -> None:
    target = helpers.model()
    folder = write(Path(mkdtemp()), dialect).folder
    drafter = drafters.from_pretrained(folder, target, dtype=dtype)
    assert {value.dtype for value in drafter.model.state_dict().values()} == {dtype}
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(target, drafter, trees.BestFirst(12), **request)
    assert made.output.tolist() == helpers.text("ragged", NEW).tolist()


def test_drawn_trees_of_a_combination() -> None:
    """Sources may give laws of different precision from level to level."""
    both = drafters.CombinedDrafter(drafter_of("llama", "dflash2"), drafters.SuffixDrafter())
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    made = helpers.speculate(helpers.model(), both, trees.Sampled((2, 1, 1)), input_ids=prompt, max_new_tokens=NEW)
    assert made.output.tolist() == helpers.plain(helpers.model(), input_ids=prompt, max_new_tokens=NEW).tolist()


def test_what_cannot_be_drafted_from_is_refused() -> None:
    drafter = drafter_of("llama", "dflash_flat")
    tokens, mask = torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="reads features of layers"):
        drafter.start(DraftContext(tokens, mask, 97))
    with pytest.raises(ShapeError, match="2 states of 48 numbers side by side"):
        drafter.start(DraftContext(tokens, mask, 97, features=torch.zeros(1, 3, 7)))
    with pytest.raises(UnsupportedError, match="length must be a number of tokens, 1 or more, got 0"):
        BlockDrafter(drafter.model, length=0)
    for length in (2.5, "5"):
        with pytest.raises(UnsupportedError, match="length must be a number of tokens"):
            inspect.unwrap(BlockDrafter.__init__)(BlockDrafter(drafter.model), drafter.model, length=length)
    with pytest.raises(UnsupportedError, match="temperature must be above 0"):
        BlockDrafter(drafter.model, temperature=0.0)
    few = drafters.Shortlist(torch.arange(5), 97)
    with pytest.raises(UnsupportedError, match="has 97 of 97 tokens; pass a shortlist of as many, got 5 of 97"):
        drafters.BlockModel(drafter.model.spec, few)
    with pytest.raises(SpecdecError, match="outside a request"):
        BlockDrafter(drafter.model).children(Frontier.from_root(tokens[:, 0], mask[:, 0]), 2)
    for model, least in ((drafter.model, 0.5), (drafter_of("llama", "dspark_rnn").model, 1.5)):
        with pytest.raises(UnsupportedError, match="must be from 0 to 1, of a model with a confidence head"):
            BlockDrafter(model, least_confidence=least)
    own = drafter_of("llama", "dspark_rnn")
    features = torch.zeros(1, 3, own.model.fc.in_features, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="made for 97 tokens, the target has 120"):
        own.start(DraftContext(tokens, mask, 120, features=features))


@pytest.mark.parametrize("least", [0.0, 0.5, 1.0])
def test_unsure_paths_end(least: float) -> None:
    """A node has children exactly where the confidence head is sure enough, and the text is the target's."""
    model = drafter_of("llama", "dspark_gated").model
    asked: list[bool] = []

    class Watched(BlockDrafter):
        def children(self, frontier: Frontier, count: int) -> Candidates:
            found = super().children(frontier, count)
            if frontier.depth < self.length:
                sure = self.confidence(frontier) >= least
                asked.append(torch.equal((found.log_probs[..., 0] > -torch.inf), sure))
                asked.append(torch.equal(found.law(97).sum(-1) > 0, sure))
            return found

    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    watched = Watched(model, least_confidence=least)
    made = helpers.speculate(helpers.model(), watched, TREES["best first"], **request)
    assert made.output.tolist() == helpers.text("ragged", NEW).tolist()
    assert len(asked) > 10
    assert all(asked)
    drafted = made.generator.stats.drafted
    assert (drafted == 0) == (least == 1.0)
    plain = helpers.speculate(helpers.model(), BlockDrafter(model), TREES["best first"], **request)
    assert (drafted == plain.generator.stats.drafted) == (least == 0.0)


def test_beside_another_drafter_in_one_tree() -> None:
    """Features reach the source that asked for them, and its answers are merged with the other's."""
    both = drafters.CombinedDrafter(drafter_of("llama", "dflash2"), drafters.SuffixDrafter())
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(helpers.model(), both, trees.BestFirst(12, branch=3), **request)
    assert made.output.tolist() == helpers.text("ragged", NEW).tolist()
    assert both.feature_layers == (1, 2)
