"""Drafters on hybrid targets, end to end: heads of the target's own checkpoint, block drafters, hybrid draft models."""

import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec import drafters, trees
from specdec.drafters import FeatureDrafter, ModelDrafter
from specdec.hf.recurrent import RecurrentLayer
from specdec.protocols import DraftContext, TreeBuilder
from tests import helpers
from tests.drafters.draft_models import Scripted, Twin, assert_never_wrong, like, reference, run
from tests.drafters.feature import mtp_checkpoints as mtp
from tests.drafters.steered import Steered
from tests.hf.hybrid import HYBRID

NEW = 24
TREES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "tree": trees.BestFirst(nodes=12, branch=3, depth=4),
}

# ---------------------------------------------------------------------------------------------------------------- MTP

HEADS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


@cache
def with_head(dialect: str) -> tuple[PreTrainedModel, FeatureDrafter]:
    """A target, and the drafter of the head in its own checkpoint."""
    content = mtp.config(dialect)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content.get("text_config", content)))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    made.set_experts_implementation("eager")
    target: PreTrainedModel = made.double().eval()
    written = mtp.write(Path(mkdtemp()), dialect, target=target.state_dict())
    found = drafters.from_pretrained(written.folder, target)
    assert isinstance(found, FeatureDrafter)
    return target, found


@cache
def answer(dialect: str) -> torch.Tensor:
    return helpers.plain(with_head(dialect)[0], **helpers.batch(helpers.FOUR), max_new_tokens=NEW)


def steered(dialect: str, tree: str) -> tuple[helpers.Run, Steered]:
    target, drafter = with_head(dialect)
    guided = Steered(drafter, answer(dialect), helpers.RAGGED)
    return helpers.speculate(target, guided, TREES[tree], **helpers.batch(helpers.FOUR), max_new_tokens=NEW), guided


@pytest.mark.parametrize("dialect", HEADS)
@pytest.mark.parametrize("tree", TREES)
def test_a_head_for_multi_token_prediction_drafts_for_its_own_target(dialect, tree):
    """Ragged rounds that accept all, some or none, and rounds without drafts."""
    made, _ = steered(dialect, tree)
    helpers.assert_equal(made, answer(dialect))


@pytest.mark.parametrize("dialect", HEADS)
def test_e10_the_head_has_cached_the_committed_text(dialect):
    """What it read of rejected tokens is gone; the target's states are none that it reads."""
    made, guided = steered(dialect, "tree")
    target, fresh = with_head(dialect)
    last = guided.kept["_cache"]
    lengths = last.lengths.tolist()
    assert len(set(lengths)) > 1
    for row, prompt in enumerate(helpers.FOUR):
        text = made.output[row, -NEW - len(prompt) :][None]
        with torch.no_grad():
            states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in fresh.feature_layers], -1)
        tokens = text[:, : lengths[row] + 1]
        fresh.start(DraftContext(tokens, torch.ones_like(tokens, dtype=torch.bool), 97, features=features))
        expected = fresh._started()
        assert expected.lengths.tolist() == [lengths[row]]
        for layer, mine in last.buffers.items():
            for found, wanted in zip(mine, expected.buffers[layer], strict=True):
                kept = found[row, :, : lengths[row]]
                torch.testing.assert_close(kept, wanted[0, :, : lengths[row]], rtol=1e-4, atol=1e-5)


def test_a_head_that_is_not_steered_finds_tokens_by_itself():
    target, drafter = with_head("qwen3_5")
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(target, drafter, trees.BestFirst(nodes=40, branch=8, depth=4), **request)
    assert made.output.tolist() == answer("qwen3_5").tolist()
    assert made.generator.stats.accepted > 0


# ------------------------------------------------------------------------------------------------ hybrid draft models

PAIRS = [
    ("llama", "qwen3_5", "chain"),
    ("qwen3_5", "llama", "tree"),
    ("qwen3_next", "qwen3_5", "chain"),
    ("olmo_hybrid", "qwen3_5_moe", "tree"),
]
"""Target, draft model and tree."""


@pytest.mark.parametrize(("family", "other", "tree"), PAIRS)
def test_a_hybrid_model_drafts_for_another(family, other, tree):
    """Made right and wrong by a schedule: recurrent states on both sides follow the committed text."""
    expected = helpers.text("ragged", NEW, family)
    guided = Steered(ModelDrafter(helpers.model(other)), expected, helpers.RAGGED)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(helpers.model(family), guided, TREES[tree], **request)
    helpers.assert_equal(made, expected)


RUNS = [("chain", "one"), ("tree", "ragged"), ("tree", "one"), ("chain", "ragged")]


@pytest.mark.parametrize(("family", "how"), list(zip(HYBRID, RUNS, strict=True)))
def test_a_drafter_that_runs_the_target_is_never_wrong(family, how):
    target, (tree, prompts) = helpers.model(family), how
    output, rounds = run(target, ModelDrafter(target), TREES[tree], prompts)
    assert output.tolist() == reference(target, prompts)
    assert_never_wrong(rounds)


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
def test_e10_every_round_drafts_what_a_fresh_drafter_would(family):
    """Drafter states that are stale after acceptance: no error, only lost speed. Some rounds draft nothing."""
    target, draft = helpers.model(family), like(family)
    twin = Twin(ModelDrafter(draft), ModelDrafter(draft))
    output, rounds = run(target, twin, TREES["tree"], "ragged", controller=Scripted(8, 0, 3, 0, 0, 12))
    assert output.tolist() == reference(target, "ragged")
    assert twin.compared > 3
    assert any(int(round.tree.width) == 1 for round in rounds[1:])


def test_stale_states_of_a_drafter_are_noticed(monkeypatch):
    """The draft model's state keeps what was drafted and rejected."""
    keep = RecurrentLayer.keep

    def kept(self: RecurrentLayer, nodes: torch.Tensor, counts: torch.Tensor) -> None:
        rows = 0 if self.nodes is None else self.nodes.inputs.shape[1]
        keep(self, torch.arange(rows).expand(len(nodes), -1), torch.full_like(counts, rows))

    target, draft = helpers.model("llama"), helpers.model("qwen3_5")
    monkeypatch.setattr(RecurrentLayer, "keep", kept)
    with pytest.raises(AssertionError):
        run(target, Twin(ModelDrafter(draft), ModelDrafter(draft)), TREES["tree"], "ragged")


def test_a_draft_model_leaves_no_name_of_the_modules_changed():
    """Target and drafter are of one family: two users of the same names, one inside the other's request."""
    target = helpers.model("qwen3_5")
    module = sys.modules[type(target).__module__]
    before = dict(vars(module))
    run(target, ModelDrafter(like("qwen3_5")), TREES["chain"], "one", max_new_tokens=8)
    assert {name for name, value in vars(module).items() if before.get(name) is not value} == set()
