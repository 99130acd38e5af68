"""Block drafters in device rounds: the same text as plain decoding, and the same drafts as on the host."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec import SpeculativeGenerator, drafters, trees
from specdec.drafters import BlockDrafter
from specdec.errors import UnsupportedError
from specdec.hf import device_block, norms, round_program, skinny
from specdec.hf.device_block import DeviceBlock
from specdec.hf.merged import Projection
from specdec.protocols import DraftContext, TreeBuilder
from tests import helpers
from tests.drafters.block.checkpoints import write
from tests.hf.device_runs import SERVED, Oracle, generator, oracle, serve

NEW = 24
TREES: dict[str, TreeBuilder] = {
    "best first": trees.BestFirst(nodes=10, depth=4),
    "wide": trees.BestFirst(nodes=20),
    "chain": trees.Chain(4),
}


@cache
def drafter_of(family: str, dialect: str) -> BlockDrafter:
    target = helpers.model(family)
    layers = target.config.get_text_config().num_hidden_layers
    found = drafters.from_pretrained(write(Path(mkdtemp()), dialect, num_target_layers=layers).folder, target)
    assert isinstance(found, BlockDrafter)
    return found


def request() -> dict[str, Any]:
    return {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}


@pytest.mark.parametrize("family", SERVED)
def test_greedy_text_is_that_of_plain_generate(family: str) -> None:
    """Each family with one of two drafters, and both with a family of each kind."""
    dialect, tree = (("dflash_nested", "best first"), ("dflash2", "wide"))[SERVED.index(family) % 2]
    run = serve(generator(helpers.model(family), drafter=drafter_of(family, dialect), tree=TREES[tree]), **request())
    assert run.output.tolist() == helpers.text("ragged", NEW, family).tolist()
    assert run.generator.stats.drafted > 40


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dialect", ["dflash_flat", "dflash2", "speculators_dflash", "dspark_rnn", "dspark_gated"])
def test_drafts_are_those_of_the_host(dialect: str, tree: str) -> None:
    """Round by round the same trees: what was committed became context in the same way, windows and all."""
    drafter, target = drafter_of("llama", dialect), helpers.model()
    if drafter.model.markov_head is not None and tree != "chain":
        with pytest.raises(UnsupportedError, match="a Markov head scores all tokens after each other"):
            generator(target, drafter=drafter, tree=TREES[tree]).generate(**request())
        return
    as_on_the_host(drafter, TREES[tree], generator(target, drafter=drafter, tree=TREES[tree]))


@pytest.mark.parametrize("dialect", ["dflash2", "dspark_rnn"])
def test_merged_drafts_are_those_of_the_host(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that takes the place of layers in a compiled drafter, but run step by step."""
    monkeypatch.setattr(skinny, "serves", lambda weight: weight.dim() == 2)
    monkeypatch.setattr(norms, "serves", lambda weight: weight.dim() == 1)
    for module in (device_block, round_program):
        monkeypatch.setattr(module, "fused", lambda function: function)
    drafter, tree = drafter_of("llama", dialect), TREES["chain" if dialect == "dspark_rnn" else "best first"]
    served = generator(helpers.model(), drafter=drafter, tree=tree).compile()
    as_on_the_host(drafter, tree, served)
    twin = served._programs._program.draft._drafts  # type: ignore[union-attr]  # a block draft
    kinds = [type(module) for module in twin.modules()]
    layers = len(drafter.model.layers)
    assert kinds.count(Projection) == 4 * layers
    assert kinds.count(norms.SkinnyNorm) > 2 * layers
    assert nn.Linear not in kinds


def as_on_the_host(drafter: BlockDrafter, tree: TreeBuilder, served: SpeculativeGenerator) -> None:
    """Serves a request and compares each of its rounds with one on the host."""
    there = serve(served, **request())
    here = helpers.speculate(served.model, BlockDrafter(drafter.model), tree, **request())
    assert there.output.tolist() == here.output.tolist()
    compared = 0
    for device, host in zip(there.rounds[1:], here.rounds[1:], strict=True):
        for row in range(len(device.num_committed)):
            if not int(device.num_committed[row]):
                continue
            compared += 1
            assert paths(device.tree, row) == paths(host.tree, row)
            assert int(device.num_accepted[row]) == int(host.num_accepted[row])
    assert compared > 15


def paths(tree: Any, row: int) -> set[tuple[int, ...]]:
    """The drafted paths of a row, however they are numbered."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(tree.num_nodes[row])):
        found[node] = (*found[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    return set(found.values())


def test_a_kept_program_starts_anew() -> None:
    """The second request of a shape finds the buffers of the first, with another text in them."""
    served = generator(helpers.model(), drafter=drafter_of("llama", "dflash2"), tree=TREES["best first"])
    outputs = []
    for prompt in ([5, 6, 7, 8], [9, 8, 7, 6], [5, 6, 7, 8]):
        ids = torch.tensor([prompt])
        outputs.append(serve(served, input_ids=ids, max_new_tokens=NEW))
        assert outputs[-1].output.tolist() == helpers.plain(helpers.model(), input_ids=ids, max_new_tokens=NEW).tolist()
    first, _, third = (run.rounds for run in outputs)
    assert [paths(round.tree, 0) for round in first] == [paths(round.tree, 0) for round in third]


def test_sampling_drafts_at_the_temperature_of_the_request() -> None:
    """Drafts of a colder request are other ones, and a kept program is not taken for them."""
    served = generator(helpers.model(), drafter=drafter_of("llama", "dflash_flat"), tree=trees.BestFirst(nodes=12))
    trees_of = {}
    for temperature in (0.3, 2.0):
        torch.manual_seed(0)
        run = serve(
            served,
            input_ids=torch.tensor([[5, 6, 7]]),
            max_new_tokens=6,
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )
        trees_of[temperature] = paths(run.rounds[1].tree, 0)
        assert served._programs._program.draft.temperature == temperature  # type: ignore[union-attr]  # a block draft
    assert trees_of[0.3] != trees_of[2.0]


@pytest.mark.parametrize(
    ("options", "tree", "message"),
    [
        ({"least_confidence": 0.4}, trees.Chain(3), "least_confidence= of a block drafter has no place on the device"),
        ({}, trees.BestFirst(nodes=8, branch=2), "takes nodes= and depth= only"),
        ({}, trees.Chain(200), "drafts 128 nodes at most, not 200"),
    ],
)
def test_what_has_no_device_form_is_refused(options: dict[str, Any], tree: TreeBuilder, message: str) -> None:
    drafter = BlockDrafter(drafter_of("llama", "dspark_gated").model, **options)
    with pytest.raises(UnsupportedError, match=message):
        SpeculativeGenerator(helpers.model(), drafter, tree, execution="device").generate(**request())


@pytest.mark.parametrize("nodes", [63, 64, 70])
def test_long_chains_of_a_draft_model(nodes: int) -> None:
    """More nodes than a mask has bits in a word."""
    target, prompt = helpers.model(), torch.tensor([[5, 6, 7]])
    drafter = drafters.ModelDrafter(target)
    run = serve(generator(target, drafter=drafter, tree=trees.Chain(nodes)), input_ids=prompt, max_new_tokens=90)
    assert torch.equal(run.output, helpers.plain(target, input_ids=prompt, max_new_tokens=90))
    assert run.generator.stats.target_passes <= 3
    with pytest.raises(UnsupportedError, match="a draft model drafts 128 tokens at most, not 129"):
        generator(target, drafter=drafter, tree=trees.Chain(129)).generate(prompt, max_new_tokens=9)


class Guided(DeviceBlock):
    """Drafts as it does, and hands out the trees of an oracle in place of its own."""

    def follow(self, oracle: Oracle) -> "Guided":
        self.oracle = oracle
        return self

    def __call__(self, tokens: Tensor, lengths: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        super().__call__(tokens, lengths, limits)
        return self.oracle(tokens, lengths, limits)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dialect", ["dflash2", "speculators_dflash"])
def test_e10_the_context_is_that_of_the_committed_text(dialect: str, family: str) -> None:
    """After full, partial and empty blocks in ragged batches, it is what a start on the true states would make."""
    reference, drafter = helpers.text("ragged", NEW, family), drafter_of(family, dialect)
    guide = oracle(reference)
    draft = Guided(drafter, guide.nodes, depth=None, chain=False, temperature=1.0).follow(guide)
    target = helpers.model(family)
    run = serve(generator(target, drafter=drafter, tree=trees.BestFirst(nodes=guide.nodes)), draft, **request())
    helpers.assert_equal(run, reference)
    held, fresh = draft._ready()[0], BlockDrafter(drafter.model)
    lengths = held.lengths.tolist()
    assert max(lengths) > 15
    for row, prompt in enumerate(helpers.FOUR):
        text = run.output[row, -NEW - len(prompt) :][None, : lengths[row] + 1]
        with torch.no_grad():
            states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in drafter.feature_layers], -1)
        fresh.start(DraftContext(text, torch.ones_like(text, dtype=torch.bool), 97, features=features))
        expected = fresh._started()
        for mine, theirs in zip(held.layers, expected.layers, strict=True):
            for found, wanted in zip(mine.buffers, theirs.buffers, strict=True):
                kept = found[row, :, theirs.base : lengths[row]]
                wanted = wanted[0, :, : lengths[row] - theirs.base]
                torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-7)  # models rotate in float32
