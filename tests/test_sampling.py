"""Sampling: the same seed gives the same tokens as plain generate, and chance comes from where the caller says.

With a deterministic tree and `TargetOnly` (the default) each committed token is one draw of the target, made exactly
as plain decoding makes it; so at batch 1, and wherever rows advance together, equality holds token for token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.protocols import TreeBuilder
from specdec.testing import greedy, table_model
from tests import helpers, processors

NEW = 20
SHAPES: dict[str, tuple[TreeBuilder, int]] = {
    "chain": (trees.Chain(4), 0),
    "best first": (trees.BestFirst(nodes=14, branch=2, depth=3), 1),
    "fixed": (trees.Fixed([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 1), (0, 0, 0)]), 1),
}


def compare(family: str, shape: str, *, seed: int = 3, prompts: str = "one", **request: Any) -> helpers.Run:
    """Draws twice from one seed; the oracle knows what will be drawn, so drafts are accepted."""
    tree, rank = SHAPES[shape]
    target = helpers.model(family)
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, "do_sample": True, **request}
    torch.manual_seed(seed)
    expected = helpers.plain(target, **request)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    run = helpers.speculate(target, helpers.oracle(expected, rank=rank, in_step=True), tree, **request)
    assert run.output.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), after), "another number of draws"
    return run


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "mixtral"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_seed_gives_the_tokens_of_plain_sampling(family, shape):
    run = compare(family, shape, temperature=0.8, top_k=20, top_p=0.95)
    assert run.kinds == helpers.ALL_KINDS


@pytest.mark.parametrize("warper", processors.WARPERS)
@pytest.mark.parametrize("shape", ["chain", "fixed"])
def test_one_seed_with_every_warper(warper, shape):
    run = compare("llama", shape, **{"top_k": 0, **processors.WARPERS[warper]})
    assert run.kinds == helpers.ALL_KINDS


@pytest.mark.parametrize("name", [*processors.ROW_WISE, *processors.STATEFUL])
def test_one_seed_with_every_processor(name):
    text = helpers.text("one", NEW)[0, -NEW:].tolist()
    tree, rank = SHAPES["fixed"]
    base = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "do_sample": True, "temperature": 1.5}
    make = {**processors.ROW_WISE, **processors.STATEFUL}[name]
    torch.manual_seed(3)
    expected = helpers.plain(helpers.model(), **base, **make(text))
    torch.manual_seed(3)
    run = helpers.speculate(helpers.model(), helpers.oracle(expected, rank=rank), tree, **base, **make(text))
    assert run.output.tolist() == expected.tolist()
    assert run.generator.stats.accepted > 0


def test_one_seed_with_stops_inside_a_block():
    free = compare("llama", "chain").output[0, helpers.START["one"] :].tolist()
    run = compare("llama", "chain", eos_token_id=[free[6], free[13]])
    assert run.output.shape[1] < helpers.START["one"] + NEW


def test_rows_that_advance_together_draw_as_in_plain_sampling():
    run = compare("llama", "chain", prompts="ragged", logits_processor=[processors.Shift()], eos_token_id=[3, 60])
    assert run.generator.stats.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_generator_draws_as_the_global_one_and_leaves_it_alone(shape):
    tree, rank = SHAPES[shape]
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    torch.manual_seed(11)
    expected = helpers.plain(helpers.model(), **request)
    before = torch.get_rng_state()
    drafter = helpers.oracle(expected, rank=rank)
    first, second, other = (
        helpers.speculate(
            helpers.model(), drafter, tree, **request, generator=torch.Generator().manual_seed(seed)
        ).output
        for seed in (11, 11, 12)
    )
    assert first.tolist() == second.tolist() == expected.tolist() != other.tolist()
    assert torch.equal(torch.get_rng_state(), before)


SAMPLED = {
    "rejection": (trees.Sampled(branches=(1, 1, 1)), verify.Rejection()),
    "block": (trees.Sampled(branches=(1, 1, 1)), verify.BlockVerification()),
    "tree rejection": (trees.Sampled(branches=(2, 2)), verify.TreeRejection()),
    "traversal": (trees.Sampled(branches=(2, 2)), verify.Traversal()),
    "default for chains": (trees.Sampled(branches=(1, 1, 1)), None),
    "default for trees": (trees.Sampled(branches=(2, 2)), None),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_every_draw_of_sampled_trees_comes_from_the_generator(name):
    tree, verifier = SAMPLED[name]
    drafter = drafters.ModelDrafter(helpers.model("qwen2"))
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 8, "do_sample": True, "temperature": 1.5}
    before = torch.get_rng_state()
    outputs = [
        helpers.speculate(
            helpers.model(), drafter, tree, verifier=verifier, **request, generator=torch.Generator().manual_seed(seed)
        ).output.tolist()
        for seed in (4, 4, 5)
    ]
    assert outputs[0] == outputs[1] != outputs[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_decoding_draws_nothing(shape):
    tree, rank = SHAPES[shape]
    before = torch.get_rng_state()
    helpers.speculate(
        helpers.model(),
        helpers.oracle(helpers.text("ragged", NEW), rank=rank),
        tree,
        **helpers.batch(helpers.FOUR),
        max_new_tokens=NEW,
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_num_return_sequences_gives_independent_rows():
    request = {**helpers.batch(helpers.FOUR[:2]), "max_new_tokens": 8, "num_return_sequences": 3, "do_sample": True}
    torch.manual_seed(0)
    shape = helpers.plain(helpers.model(), **request).shape
    generator = SpeculativeGenerator(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(3))
    output = generator.generate(**request, pad_token_id=0, temperature=3.0)
    assert output.shape == shape == (6, 9 + 8)
    prompts = request["input_ids"].repeat_interleave(3, 0)
    assert output[:, :9].tolist() == prompts.tolist()
    assert len({tuple(row) for row in output[:, 9:].tolist()}) == 6
    torch.manual_seed(0)
    expected = helpers.plain(helpers.model(), **request)
    torch.manual_seed(0)
    assert generator.generate(**request, pad_token_id=0, num_draft_tokens=0).tolist() == expected.tolist()


# ------------------------------------------------------------------------------------------- extreme temperatures, ties


def steep(logits: list[float], dtype: torch.dtype) -> Any:
    """A model whose logits are these after every token."""
    target = table_model(torch.eye(len(logits)))
    with torch.no_grad():
        target.lm_head.weight.copy_((torch.tensor(logits) / len(logits) ** 0.5)[:, None].expand(-1, len(logits)))
    return target.to(dtype)


VERIFIERS = {
    "target only": (trees.Chain(3), verify.TargetOnly()),
    "rejection": (trees.Sampled(branches=(1, 1)), verify.Rejection()),
    "block": (trees.Sampled(branches=(1, 1)), verify.BlockVerification()),
    "tree rejection": (trees.Sampled(branches=(2, 2)), verify.TreeRejection()),
    "traversal": (trees.Sampled(branches=(2, 2)), verify.Traversal()),
}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6])
@pytest.mark.parametrize("name", VERIFIERS)
def test_a19_tiny_temperatures_choose_the_best_token(name, temperature):
    """Division by a temperature near zero overflowed in half precision, or accepted -1 tokens."""
    tree, verifier = VERIFIERS[name]
    target = steep([80, 79, 3, 3], torch.float16)
    drafter = drafters.ModelDrafter(steep([1.1, 1, 1, 1], torch.float32), temperature=1.0)
    request = {
        "input_ids": torch.tensor([[3]] * 8),
        "max_new_tokens": 12,
        "do_sample": True,
        "temperature": temperature,
    }
    details = {"return_dict_in_generate": True, "output_scores": True}
    run = helpers.speculate(target, drafter, tree, verifier=verifier, **request, **details)
    assert set(run.output.sequences[:, 1:].flatten().tolist()) == {0}
    assert not any(scores.isnan().any() for scores in run.output.scores)
    assert all(int(round.num_accepted.min()) >= 0 for round in run.rounds)
    assert run.generator.stats.accepted > 0


def test_a19_temperature_zero_raises_as_in_transformers():
    """Two conventions for greedy decoding in one call."""
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, "do_sample": True, "temperature": 0.0}
    with pytest.raises(ValueError, match="temperature") as theirs:
        helpers.plain(helpers.model(), **request)
    with pytest.raises(ValueError, match="temperature") as ours:
        helpers.speculate(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(4), **request)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VERIFIERS)
def test_a20_ties_go_to_the_first_token(name, dtype):
    """A tie was broken differently in the draft path and in the plain path."""
    tree, verifier = VERIFIERS[name]
    target = steep([0, 7, 7, 5], dtype)
    drafter = drafters.ModelDrafter(steep([0, 7, 7, 5], torch.float32))
    request = {"input_ids": torch.tensor([[3]]), "max_new_tokens": 8}
    run = helpers.speculate(target, drafter, tree, verifier=verifier, **request)
    assert run.output.tolist() == greedy(target, **request).tolist() == [[3] + [1] * 8]
    assert run.generator.stats.accepted > 0 or name != "target only"


@pytest.mark.parametrize("name", VERIFIERS)
def test_a20_top_k_keeps_all_tied_tokens(name):
    """Top-k with a tie at its edge kept another set than transformers does."""
    tree, verifier = VERIFIERS[name]
    target = steep([0, 7, 7, 5], torch.float32)
    drafter = drafters.ModelDrafter(steep([1, 1, 1, 1], torch.float32))
    request = {"input_ids": torch.tensor([[3]] * 64), "max_new_tokens": 6, "do_sample": True, "top_k": 1}
    torch.manual_seed(0)
    new: Tensor = helpers.speculate(target, drafter, tree, verifier=verifier, **request).output[:, 1:]
    counts = torch.bincount(new.flatten(), minlength=4).tolist()
    assert counts[0] == counts[3] == 0
    assert min(counts[1], counts[2]) > 0.4 * 64 * 6
