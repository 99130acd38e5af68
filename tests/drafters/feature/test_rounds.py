"""Feature drafters in rounds: the text is the target's, and what is cached is the committed text."""

import inspect
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.drafters import FeatureDrafter
from specdec.errors import ShapeError, SpecdecError, UnsupportedError
from specdec.protocols import DraftContext, TreeBuilder, Verifier
from specdec.types import Frontier
from tests import helpers
from tests.drafters.feature.eagle_checkpoints import write
from tests.drafters.steered import Steered

NEW = 24
TREES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "best first": trees.BestFirst(nodes=14, branch=3, depth=4),
    "wide": trees.BestFirst(nodes=20, branch=2, temperature=1.5),
}


@cache
def drafter_of(family: str, dialect: str) -> FeatureDrafter:
    target = helpers.model(family)
    layers = target.config.get_text_config().num_hidden_layers
    ids = {"target_layer_ids": list(range(layers))} if dialect == "deepspec" else {}
    written = write(Path(mkdtemp()), dialect, num_target_layers=2, **ids)
    found = drafters.from_pretrained(written.folder, target)
    assert isinstance(found, FeatureDrafter)
    return found


def run(family: str, drafter: FeatureDrafter, tree: TreeBuilder) -> tuple[helpers.Run, Steered]:
    steered = Steered(drafter, helpers.text("ragged", NEW, family), helpers.RAGGED)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    return helpers.speculate(helpers.model(family), steered, tree, **request), steered


@pytest.mark.parametrize("family", helpers.DISTINCT)
def test_greedy_text_is_that_of_plain_generate(family: str) -> None:
    for name, dialect in zip(TREES, ("eagle", "speculators", "peagle"), strict=True):
        made, _ = run(family, drafter_of(family, dialect), TREES[name])
        helpers.assert_equal(made, helpers.text("ragged", NEW, family))


@pytest.mark.parametrize("dialect", ["specforge", "deepspec"])
def test_every_format_drafts(dialect: str) -> None:
    made, _ = run("llama", drafter_of("llama", dialect), TREES["best first"])
    helpers.assert_equal(made, helpers.text("ragged", NEW))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dialect", ["eagle", "peagle"])
def test_e10_what_is_cached_is_the_committed_text(family: str, dialect: str) -> None:
    """After ragged rounds, keys and values are those of a fresh start on the target's true states."""
    fresh = drafter_of(family, dialect)
    made, steered = run(family, fresh, TREES["best first"])
    last, target = steered.kept["_cache"], helpers.model(family)
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
        for layer, mine in last.buffers.items():
            for found, wanted in zip(mine, expected.buffers[layer], strict=True):
                kept = found[row, :, : lengths[row]]
                torch.testing.assert_close(kept, wanted[0, :, : lengths[row]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "verifier", [verify.TreeRejection(), verify.Traversal(), verify.TargetOnly()], ids=lambda rule: type(rule).__name__
)
def test_drafts_of_cold_sampling_are_judged_rightly(verifier: Verifier) -> None:
    """Where the target's law is all but one-hot, every rule must give the greedy text, however wrong the drafts are."""
    target, prompt = helpers.model(), torch.tensor([[5, 6, 7]])
    tree = trees.BestFirst(8) if isinstance(verifier, verify.TargetOnly) else trees.Sampled((2, 2))
    request = {"input_ids": prompt, "max_new_tokens": 20}
    cold = {"do_sample": True, "temperature": 1e-4, "top_k": 0}
    made = helpers.speculate(target, drafter_of("llama", "eagle"), tree, verifier=verifier, **cold, **request)
    assert made.output.tolist() == helpers.plain(target, **request).tolist()
    assert made.generator.stats.drafted > 20


@pytest.mark.parametrize("dialect", ["speculators", "peagle"])
def test_drawn_trees_carry_the_law_they_were_drawn_from(dialect: str) -> None:
    drafter = drafter_of("llama", dialect)
    features = torch.randn(1, 3, 48 * len(drafter.feature_layers), dtype=torch.float64)
    tokens, mask = torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool)
    drafter.start(DraftContext(tokens, mask, 97, temperature=0.7, features=features))
    tree = trees.Sampled((2, 1)).grow(drafter, torch.tensor([6]), torch.tensor([2]), 4, vocab_size=97)
    assert tree.draft_probs is not None
    asked = drafter.children(Frontier.from_root(torch.tensor([6]), torch.tensor([True])), 1)
    torch.testing.assert_close(tree.draft_probs[:, 0], asked.law(97)[:, 0])
    assert int((asked.law(97) > 0).sum()) == 61, "the reduced vocabulary, scattered"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_drafter_of_another_dtype(dtype: torch.dtype) -> None:
    folder = write(Path(mkdtemp()), "eagle", num_target_layers=2).folder
    drafter = drafters.from_pretrained(folder, helpers.model(), dtype=dtype)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(helpers.model(), drafter, TREES["best first"], **request)
    assert made.output.tolist() == helpers.text("ragged", NEW).tolist()


@pytest.mark.parametrize("helpless", [True, False])
@pytest.mark.parametrize("dialect", ["deepspec", "peagle"])
def test_a_drafter_that_is_never_right_says_so(helpless: bool, dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule = [[0]] if helpless else helpers.RAGGED
    drafter = FeatureDrafter(drafter_of("llama", dialect).model)
    steered = Steered(drafter, helpers.text("ragged", NEW), schedule)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(helpers.model(), steered, trees.Chain(2), **request)
    assert (made.generator.stats.accepted == 0) == helpless
    assert caplog.text.count("no token of") == helpless


def test_beside_another_drafter_in_one_tree() -> None:
    both = drafters.CombinedDrafter(drafter_of("llama", "eagle"), drafters.SuffixDrafter())
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(helpers.model(), both, trees.BestFirst(12, branch=3), **request)
    assert made.output.tolist() == helpers.text("ragged", NEW).tolist()


def test_what_cannot_be_drafted_from_is_refused() -> None:
    drafter = FeatureDrafter(drafter_of("llama", "eagle").model)
    tokens, mask = torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(SpecdecError, match="outside a request"):
        drafter.children(Frontier.from_root(tokens[:, 0], mask[:, 0]), 2)
    with pytest.raises(UnsupportedError, match="reads features of layers"):
        drafter.start(DraftContext(tokens, mask, 97))
    with pytest.raises(UnsupportedError, match="made for 97 tokens, the target has 120"):
        drafter.start(DraftContext(tokens, mask, 120, features=torch.zeros(1, 3, 144)))
    with pytest.raises(ShapeError, match="features of 1 columns for 3 tokens"):
        drafter.start(DraftContext(tokens, mask, 97, features=torch.zeros(1, 1, 144)))
    with pytest.raises(ShapeError, match="3 states of 48 numbers side by side"):
        drafter.start(DraftContext(tokens, mask, 97, features=torch.zeros(1, 3, 7)))
    for length in (0, 2.5, "5"):
        with pytest.raises(UnsupportedError, match="length must be a number of tokens, 1 or more"):
            inspect.unwrap(FeatureDrafter.__init__)(drafter, drafter.model, length=length)
    with pytest.raises(UnsupportedError, match="temperature must be above 0"):
        FeatureDrafter(drafter.model, temperature=0.0)


def test_models_that_are_none() -> None:
    """A path, a specification, a module without the members: told at once, not in the middle of a request."""
    made = inspect.unwrap(FeatureDrafter.__init__)
    drafter = drafter_of("llama", "eagle")
    for wrong in ("some/path", drafter.model.spec, torch.nn.Linear(2, 2)):
        with pytest.raises(
            UnsupportedError, match=r"with the members of drafters\.Recurrent or drafters\.Parallel, got"
        ):
            made(FeatureDrafter(drafter.model), wrong)
    with pytest.raises(UnsupportedError, match="1 or more, got True"):
        made(FeatureDrafter(drafter.model), drafter.model, length=True)
    with pytest.raises(UnsupportedError, match="PEagleModel is made of a specification of peagle, not eagle3"):
        drafters.PEagleModel(drafter.model.spec, drafter.model.shortlist)
    with pytest.raises(UnsupportedError, match="pass a shortlist of as many, got none"):
        drafters.Eagle3Model(drafter.model.spec)
    with pytest.raises(UnsupportedError, match=r"wrap a draft model: drafters\.FeatureDrafter\(model\)"):
        inspect.unwrap(SpeculativeGenerator.__init__)(
            SpeculativeGenerator(helpers.model()), helpers.model(), drafter.model
        )
    with pytest.raises(UnsupportedError, match="ModelDrafter takes a causal language model, got Eagle3Model"):
        drafters.ModelDrafter(drafter.model)
