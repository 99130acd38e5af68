"""Caches that a call returns or is given: continued in both directions, never changed, refused where unknown."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from specdec import drafters, trees
from specdec.errors import UnsupportedError
from specdec.hf.cache import RowCache
from tests import helpers

NEW = 16
START = helpers.START["one"]
CACHED = ["llama", "mistral", "gemma3", "gemma4_shared", "gpt2"]


@pytest.mark.parametrize("family", CACHED)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_the_returned_cache_continues_in_both_directions(family, prompts):
    target, request = helpers.model(family), helpers.batch(helpers.PROMPTS[prompts])
    fresh, start = helpers.text(prompts, 2 * NEW, family), helpers.START[prompts]
    first = helpers.speculate(
        target, helpers.oracle(fresh), trees.Chain(4), **request, max_new_tokens=NEW, return_dict_in_generate=True
    ).output
    assert first.sequences.tolist() == fresh[:, : start + NEW].tolist()
    assert type(first.cache) is DynamicCache
    assert first.cache.get_seq_length() == start + NEW - 1
    mask = torch.cat([request["attention_mask"], torch.ones(len(first.sequences), NEW, dtype=torch.int64)], 1)
    more = {"input_ids": first.sequences, "attention_mask": mask, "max_new_tokens": NEW}
    before = _contents(first.cache)
    run = helpers.speculate(target, helpers.oracle(fresh), trees.Chain(4), **more, cache=first.cache)
    helpers.assert_equal(run, fresh)
    assert _same(_contents(first.cache), before), "the caller's cache was changed"
    assert helpers.plain(target, **more, cache=first.cache).tolist() == fresh.tolist()


@pytest.mark.parametrize("family", CACHED)
def test_a_cache_of_transformers_continues_here(family):
    target, request = helpers.model(family), helpers.batch(helpers.FOUR)
    fresh = helpers.text("ragged", 2 * NEW, family)
    first = helpers.plain(target, **request, max_new_tokens=NEW, return_dict_in_generate=True)
    mask = torch.cat([request["attention_mask"], torch.ones(4, NEW, dtype=torch.int64)], 1)
    more = {"input_ids": first.sequences, "attention_mask": mask, "max_new_tokens": NEW}
    run = helpers.speculate(target, helpers.oracle(fresh), trees.Chain(4), **more, cache=first.cache)
    helpers.assert_equal(run, fresh)
    with pytest.warns(FutureWarning, match="past_key_values"):
        old = helpers.speculate(target, helpers.oracle(fresh), trees.Chain(4), **more, past_key_values=first.cache)
    assert old.output.tolist() == fresh.tolist()


def test_a_cache_with_only_the_new_ids():
    target, request = helpers.model(), helpers.batch(helpers.ONE)
    fresh = helpers.text("one", 2 * NEW)
    first = helpers.plain(target, **request, max_new_tokens=NEW, return_dict_in_generate=True)
    more = {"input_ids": first.sequences[:, -1:], "attention_mask": torch.ones(1, START + NEW, dtype=torch.int64)}
    expected = fresh[:, START + NEW - 1 :]
    run = helpers.speculate(
        target, helpers.oracle(expected), trees.Chain(4), **more, max_new_tokens=NEW, cache=first.cache
    )
    helpers.assert_equal(run, expected)


def test_a_cache_that_was_cut_short_is_continued_from_where_it_ends():
    target, request = helpers.model(), helpers.batch(helpers.ONE)
    fresh = helpers.text("one", 2 * NEW)
    cache = helpers.plain(target, **request, max_new_tokens=NEW, return_dict_in_generate=True).cache
    cache.crop(-5)
    more = {"input_ids": fresh[:, : START + NEW], "max_new_tokens": NEW, "cache": cache}
    helpers.assert_equal(helpers.speculate(target, helpers.oracle(fresh), trees.Chain(4), **more), fresh)


@pytest.mark.parametrize("place", [2, 3])
def test_c11_a_cache_that_ends_in_an_end_token_holds_all_but_that_token(place):
    """Off-by-one rewind when the last cached token is an end token."""
    target, request = helpers.model(), helpers.batch(helpers.ONE)
    end = int(helpers.text("one", NEW)[0, START + place])
    request |= {"max_new_tokens": NEW, "eos_token_id": end, "return_dict_in_generate": True}
    expected = helpers.plain(target, **request).sequences
    first = helpers.speculate(target, helpers.oracle(helpers.text("one", NEW)), trees.Chain(4), **request)
    assert first.output.sequences.tolist() == expected.tolist()
    assert first.output.cache.get_seq_length() == expected.shape[1] - 1 < START + NEW - 1
    more = {"input_ids": expected, "max_new_tokens": NEW}
    fresh = helpers.plain(target, **more)
    run = helpers.speculate(target, helpers.oracle(fresh), trees.Chain(4), **more, cache=first.output.cache)
    helpers.assert_equal(run, fresh)


def test_rows_that_end_unevenly_leave_no_cache():
    new = helpers.text("ragged", NEW)[:, -NEW:]
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW, "eos_token_id": int(new[1, 4])}
    run = helpers.speculate(
        helpers.model(),
        helpers.oracle(helpers.text("ragged", NEW)),
        trees.Chain(4),
        **request,
        return_dict_in_generate=True,
    )
    assert run.output.cache is None


def test_a_foreign_cache_is_refused_before_any_forward():
    cache = RowCache(helpers.model().config)
    cache.layers[0].lazy_initialization(torch.zeros(1, 2, 0, 12), torch.zeros(1, 2, 0, 12))
    cache.layers[0].filled = 3
    with helpers.forwards(helpers.model()) as calls, pytest.raises(UnsupportedError, match="RowLayer"):
        helpers.speculate(
            helpers.model(),
            drafters.PromptLookupDrafter(),
            trees.Chain(2),
            **helpers.batch(helpers.ONE),
            cache=cache,
            max_new_tokens=4,
        )
    assert calls == []


def _contents(cache: DynamicCache) -> list[Tensor]:
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return [tensor.clone() for tensor in tensors if tensor is not None]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
