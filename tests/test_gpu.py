"""On a GPU: the same equality as on the CPU, so that every buffer is made where the tensor it indexes lives."""

import copy

import pytest
import torch

from specdec import drafters, trees
from specdec.testing import FAMILIES
from tests import helpers

pytestmark = pytest.mark.gpu


def on_gpu(family: str) -> torch.nn.Module:
    return copy.deepcopy(helpers.model(family)).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_greedy_tokens_equal_plain_generate(family, prompts):
    model = on_gpu(family)
    request = {name: value.cuda() for name, value in helpers.batch(helpers.PROMPTS[prompts]).items()}
    request["max_new_tokens"] = 24
    reference = helpers.plain(model, **request)
    run = helpers.speculate(model, helpers.oracle(reference), trees.BestFirst(nodes=9, branch=3, depth=4), **request)
    helpers.assert_equal(run, reference)


@pytest.mark.parametrize("drafter", ["lookup", "suffix", "model"])
def test_every_drafter_works_beside_a_target_on_the_gpu(drafter):
    """The draft model stays on the CPU: proposals and context cross devices."""
    made = {
        "lookup": drafters.PromptLookupDrafter(),
        "suffix": drafters.SuffixDrafter(),
        "model": drafters.ModelDrafter(helpers.model("llama")),
    }
    model = on_gpu("llama")
    request = {name: value.cuda() for name, value in helpers.batch(helpers.FOUR).items()}
    request["max_new_tokens"] = 24
    run = helpers.speculate(model, made[drafter], trees.BestFirst(nodes=9, branch=3, depth=4), **request)
    assert torch.equal(run.output, helpers.plain(model, **request))
    assert sum(int(round.num_accepted.sum()) for round in run.rounds) > 0


def test_sampling_takes_the_same_seed_as_plain_generate():
    model = on_gpu("llama")
    request = {"input_ids": torch.tensor(helpers.ONE).cuda(), "max_new_tokens": 24, "do_sample": True}
    torch.manual_seed(3)
    reference = helpers.plain(model, **request)
    torch.manual_seed(3)
    run = helpers.speculate(model, drafters.PromptLookupDrafter(), trees.BestFirst(nodes=7), **request)
    assert torch.equal(run.output, reference)
