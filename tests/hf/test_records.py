"""Scores, logits, hidden states, attentions: one entry per new token, valued and shaped as by plain generate."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import trees
from specdec.hf import records
from specdec.testing import tiny_model
from tests import helpers

NEW = 16
DICT = {"return_dict_in_generate": True}
STATES = {**DICT, "output_scores": True, "output_logits": True, "output_hidden_states": True}
WEIGHTS = {**DICT, "output_attentions": True}
TOLERANCE = {"attentions": 1e-4}
"""Eager attention takes its softmax in float32; everything else is exact up to the order of sums in float64."""
SHAPES = {"chain": (trees.Chain(4), 0), "tree": (trees.BestFirst(nodes=14, branch=2, depth=3), 1)}
CASES = [
    ("states", "llama"),
    ("states", "gpt2"),
    ("states", "gemma3"),
    ("states", "gemma4_shared"),
    ("weights", "llama"),
    ("weights", "mistral"),
    ("weights", "gemma3"),
    ("weights", "gpt_oss"),
]


@cache
def eager(family: str) -> PreTrainedModel:
    """Only eager attention gives weights. In float64 its mask overflows that softmax, also in plain generate."""
    target = tiny_model(family, seed=helpers.SEEDS.get(family, 7), dtype=torch.float32)
    target.set_attn_implementation("eager")
    return target


MODELS: dict[str, Callable[[str], PreTrainedModel]] = {"states": helpers.model, "weights": eager}
WANTED: dict[str, dict[str, Any]] = {"states": STATES, "weights": WEIGHTS}


@cache
def reference(what: str, family: str, prompts: str, eos: tuple[int, ...] = ()) -> Any:
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, "eos_token_id": list(eos) or None}
    return helpers.plain(MODELS[what](family), **request, **WANTED[what])


def run(what: str, family: str, prompts: str, shape: str, eos: tuple[int, ...] = ()) -> helpers.Run:
    tree, rank = SHAPES[shape]
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, "eos_token_id": list(eos) or None}
    drafter = helpers.oracle(reference(what, family, prompts, eos).sequences, rank=rank)
    return helpers.speculate(MODELS[what](family), drafter, tree, **request, **WANTED[what])


def compare(done: helpers.Run, expected: Any) -> None:
    """All fields that plain generate gives, for every row up to its own end."""
    assert type(done.output) is type(expected)
    # Rows of different lengths do not fit into a DynamicCache, so none is returned then.
    assert set(expected.keys()) - set(done.output.keys()) <= {"cache"}
    assert set(done.output.keys()) <= set(expected.keys())
    assert done.output.sequences.tolist() == expected.sequences.tolist()
    stats = done.generator.stats
    ends = [stats.row(row).new_tokens for row in range(stats.batch)]
    for name in set(expected.keys()) & {"scores", "logits", "hidden_states", "attentions"}:
        assert len(done.output[name]) == len(expected[name]) == max(ends)
        for index, (ours, theirs) in enumerate(zip(done.output[name], expected[name], strict=True)):
            rows = [row for row, end in enumerate(ends) if index < end]
            for mine, other in zip(_layers(ours), _layers(theirs), strict=True):
                assert mine.shape == other.shape
                torch.testing.assert_close(mine[rows], other[rows], rtol=0, atol=TOLERANCE.get(name, 1e-10))


def _layers(entry: Any) -> tuple[Tensor, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


@pytest.mark.parametrize(("what", "family"), CASES)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_field_equals_plain_generate(what, family, prompts, shape):
    done = run(what, family, prompts, shape)
    assert done.kinds == helpers.ALL_KINDS
    compare(done, reference(what, family, prompts))


@pytest.mark.parametrize("what", WANTED)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_end_early_are_equal_up_to_their_end(what, family):
    new = reference(what, family, "ragged").sequences[:, -NEW:]
    eos = (int(new[0, 3]), int(new[2, 7]))
    done = run(what, family, "ragged", "tree", eos)
    compare(done, reference(what, family, "ragged", eos))
    assert len({done.generator.stats.row(row).new_tokens for row in range(4)}) > 1


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"])
def test_what_is_not_asked_for_is_none(name):
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 5, "return_dict_in_generate": True, name: True}
    expected = helpers.plain(eager("llama"), **request)
    done = helpers.speculate(eager("llama"), helpers.oracle(expected.sequences), trees.Chain(4), **request)
    assert list(done.output.keys()) == list(expected.keys())


def test_an_attention_function_without_weights_gives_none_as_in_transformers():
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 5, **WEIGHTS}
    expected = helpers.plain(helpers.model(), **request)
    done = helpers.speculate(helpers.model(), helpers.oracle(expected.sequences), trees.Chain(4), **request)
    assert done.output.attentions == expected.attentions == ((),) * 5


def test_without_a_dict_the_output_is_a_tensor():
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 5, "output_scores": True}
    expected = helpers.plain(eager("llama"), **request)
    done = helpers.speculate(eager("llama"), helpers.oracle(expected), trees.Chain(4), **request)
    assert done.output.tolist() == expected.tolist()


@pytest.mark.parametrize("what", WANTED)
def test_chunked_prefill_gives_the_states_of_the_last_chunk(what):
    target = MODELS[what]("llama")
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 5, "prefill_chunk_size": 7, **WANTED[what]}
    expected = helpers.plain(target, **request)
    compare(helpers.speculate(target, helpers.oracle(expected.sequences), trees.Chain(4), **request), expected)


@pytest.mark.parametrize("what", WANTED)
def test_records_of_the_wrong_node_are_noticed(monkeypatch, what):
    """The mutant: every state is taken from the root of its round."""
    add = records.Records.add

    def at_root(self, row, index, node, *rest):
        add(self, row, index, 0 * node, *rest)

    monkeypatch.setattr(records.Records, "add", at_root)
    with pytest.raises(AssertionError):
        compare(run(what, "llama", "one", "chain"), reference(what, "llama", "one"))
