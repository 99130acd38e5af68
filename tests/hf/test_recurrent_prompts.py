"""Prompts of hybrid models: in chunks, behind a given cache, and the caches that a call returns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig

from specdec import trees
from specdec.errors import UnsupportedError
from specdec.hf.cache import RowCache
from specdec.hf.target import ModelTarget
from tests import helpers
from tests.hf.hybrid import (
    EXACT,
    FLOAT64,
    HYBRID,
    PLAIN,
    Hybrid,
    difference,
    exact,
    folded,
    follow,
    logits_after,
    plain_cache,
    recurrent,
)
from tests.hf.texts import ROWS, draft, model


def chunked(family: str, chunk: int) -> float:
    """Largest error of the states behind a prompt in chunks, and of a round after it."""
    with exact():
        config = GenerationConfig(prefill_chunk_size=chunk)
        texts = Hybrid(model(family), ROWS[:3], cache=FLOAT64, generation_config=config)
        return max(texts.state_error(), *follow(texts, chunk, rounds=1, most=4))


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("chunk", [1, 3, 4, 50])
def test_a_prompt_in_chunks_leaves_the_same_states(family, chunk):
    """Also chunks, or a last one, of a single token, which transformers runs another way (17 = 4 * 4 + 1)."""
    assert chunked(family, chunk) <= EXACT
    texts = Hybrid(model(family), ROWS[:3], generation_config=GenerationConfig(prefill_chunk_size=chunk))
    assert texts.state_error() <= PLAIN


def test_a_single_token_that_runs_through_another_layers_state_is_noticed(monkeypatch):
    """Only layers that run several tokens at once say whose turn it is."""
    update = RowCache.update_conv_state

    def served(self: RowCache, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent.serve(layer_idx)
        return update(self, conv_states, layer_idx, state_idx, **kwargs)

    monkeypatch.setattr(RowCache, "get_conv_state", Cache.get_conv_state)
    monkeypatch.setattr(RowCache, "update_conv_state", served)
    assert chunked("qwen3_5", 3) <= EXACT
    assert chunked("qwen3_5", 4) > EXACT


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("new", [1, 2, 6])
def test_a_given_cache_is_continued_and_left_as_it_was(family, new):
    text = ROWS[1] + ROWS[2]
    with exact():
        cache = plain_cache(model(family), text[:-new])
        before = [part.clone() for layer in recurrent(cache) for part in layer]
        kwargs = {"cache": cache, "position_ids": torch.arange(len(text))[None, -new:]}
        target = ModelTarget(model(family), torch.tensor([text[-new:]]), model_kwargs=kwargs, cache=FLOAT64)
        logits, tree = target.prefill().logits, draft(1, [4])
        assert float((logits[:, 0] - logits_after(model(family), [text])).abs().max()) <= EXACT
        expected = recurrent(plain_cache(model(family), text))
        assert difference(folded(target.cache.recurrent), 0, expected) <= EXACT
        for _ in range(2):
            target.verify(tree)
            target.commit(torch.tensor([[0]]), torch.tensor([1]))
        expected = recurrent(plain_cache(model(family), text + [int(tree.tokens[0, 0])] * 2))
        assert difference(folded(target.cache.recurrent), 0, expected) <= EXACT
    assert all(map(torch.equal, before, [part for layer in recurrent(cache) for part in layer]))


def test_the_cache_that_is_returned_holds_folded_states():
    texts = Hybrid(model("qwen3_next"), ROWS[1:2])
    follow(texts, seed=1, rounds=3, most=5)
    found = texts.target.cache.to_dynamic(texts.model.config)
    assert type(found) is DynamicCache
    assert found.get_seq_length() == len(texts.texts[0])
    expected = recurrent(plain_cache(texts.model, texts.texts[0]))
    assert difference(recurrent(found), 0, expected) <= PLAIN
    assert {state.dtype for _, state in recurrent(found)} == {torch.float32}


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_the_returned_cache_continues_in_both_directions(family, prompts):
    new, target, request = 12, helpers.model(family), helpers.batch(helpers.PROMPTS[prompts])
    fresh, start = helpers.text(prompts, 2 * new, family), helpers.START[prompts]
    asked = {**request, "max_new_tokens": new, "return_dict_in_generate": True}
    first = helpers.speculate(target, helpers.oracle(fresh), trees.BestFirst(8, branch=2), **asked).output
    assert first.sequences.tolist() == fresh[:, : start + new].tolist()
    assert first.cache.get_seq_length() == start + new - 1
    mask = torch.cat([request["attention_mask"], torch.ones(len(fresh), new, dtype=torch.int64)], 1)
    more = {"input_ids": first.sequences, "attention_mask": mask, "max_new_tokens": new}
    before = [part.clone() for layer in recurrent(first.cache) for part in layer]
    run = helpers.speculate(target, helpers.oracle(fresh), trees.Chain(4), **more, cache=first.cache)
    assert run.output.tolist() == fresh.tolist()
    after = [part for layer in recurrent(first.cache) for part in layer]
    assert all(map(torch.equal, before, after)), "the caller's cache was changed"
    assert helpers.plain(target, **more, cache=first.cache).tolist() == fresh.tolist()


def test_a_cache_of_another_kind_is_refused_by_name():
    """The cache of a model with other layers, or with fewer, before anything runs."""
    hybrid, llama = helpers.model("qwen3_5"), helpers.model("llama", num_hidden_layers=4)
    cases = [(hybrid, llama, "DynamicLayer where the model has a RecurrentLayer")]
    cases += [(llama, hybrid, "LinearAttentionLayer where the model has a RowLayer")]
    cases += [(llama, helpers.model("llama"), "has 2 layers, the model 4")]
    for target, other, message in cases:
        cache = plain_cache(other, [5, 6, 7])
        with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=message):
            helpers.speculate(
                target,
                helpers.OracleDrafter(torch.tensor([[5, 6, 7, 8]]), [1]),
                trees.Chain(2),
                input_ids=torch.tensor([[5, 6, 7, 8]]),
                cache=cache,
                max_new_tokens=4,
            )
        assert calls == []
