"""Codecs inside the cache: rows are those of the codec after any rounds, and drafting changes no token."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import SpeculativeGenerator, drafters, kv, trees
from specdec.errors import ShapeError, UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf.cache import RowCache
from tests import helpers
from tests.hf.dense import config
from tests.kv.codecs import CODECS, Digits

NEW = 24
HEAD_DIM = 16


@pytest.mark.parametrize("name", CODECS)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    plan=st.lists(st.integers(1, 5), max_size=5),
    growth=st.sampled_from([1, 256]),
    seed=st.integers(0, 2**32),
)
def test_e5_rows_are_those_of_the_codec(name: str, chunks: list[int], plan: list[int], growth: int, seed: int) -> None:
    """After appending, keeping paths and growing, each slot decodes to what the codec makes of the row put there."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    codec = CODECS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "GROWTH", growth)
        plain, coded = (
            RowCache(config(head_dim=HEAD_DIM), kv.KVCacheConfig(keys=one, values=one)) for one in (kv.Plain(), codec)
        )

        def forward(rows: int) -> None:
            for mine, other in zip(plain.row_layers, coded.row_layers, strict=True):
                new = torch.randn(2, 1, rows, HEAD_DIM, generator=generator)
                mine.update(new, -new)
                other.update(new, -new)

        for rows in chunks:
            forward(rows)
        for cache in (plain, coded):
            cache.end_prefill(2, torch.device("cpu"))
        for rows in plan:
            paths = [sorted(rng.sample(range(rows), rng.randint(0, rows))) for _ in range(2)]
            width = max(1, *map(len, paths))
            nodes = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
            for cache in (plain, coded):
                cache.begin(rows)
            forward(rows)
            for cache in (plain, coded):
                cache.keep(nodes, torch.tensor([len(path) for path in paths]))
        shortest = int(plain.lengths.min())
        for mine, other in zip(plain.row_layers, coded.row_layers, strict=True):
            for rows, kept, state in zip(
                other.dense(shortest), mine.dense(shortest), (one.state for one in other.stored.values()), strict=True
            ):
                assert torch.equal(rows, codec.decode(codec.encode(kept, state), state, kept.dtype))


@pytest.mark.parametrize("preset", ["INT8", "FP8_INT8", "INT8_INT4", "INT4"])
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("attention", ["model", "reference"])
def test_drafting_changes_no_token(preset: str, prompts: str, family: str, attention: Any) -> None:
    """The oracle's run equals the run without drafts, with the same codec."""
    target = helpers.model(family, head_dim=32)
    options: dict[str, Any] = {"codecs": getattr(kv, preset), "attention": attention}
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW}
    lookup = drafters.PromptLookupDrafter()
    expected = helpers.speculate(target, lookup, trees.Chain(4), **options, **request, num_draft_tokens=0)
    assert expected.kinds == {"empty"}
    run = helpers.speculate(
        target,
        helpers.oracle(expected.output, rank=1),
        trees.BestFirst(nodes=9, branch=3, depth=4),
        **options,
        **request,
    )
    helpers.assert_equal(run, expected.output)


def test_a_coarse_codec_shows() -> None:
    """Else the test above could pass with the codec left out."""
    target = helpers.model("llama", head_dim=32)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    lookup = drafters.PromptLookupDrafter()
    outputs = [
        helpers.speculate(target, lookup, trees.Chain(4), codecs=codecs, **request).output.tolist()
        for codecs in (None, kv.KVCacheConfig(), kv.KVCacheConfig(keys=kv.NVFP4(), values=kv.NVFP4()))
    ]
    assert outputs[0] == outputs[1] == helpers.plain(target, **request).tolist()
    assert outputs[2] != outputs[0]


def test_a_row_of_a_batch_equals_its_own_run() -> None:
    """What a codec learns from a prompt must not depend on its padding."""
    target = helpers.model("llama", head_dim=32)
    lookup, codecs = drafters.PromptLookupDrafter(), kv.INT4
    together = helpers.speculate(
        target, lookup, trees.Chain(4), codecs=codecs, **helpers.batch(helpers.FOUR), max_new_tokens=NEW
    ).output
    for row, prompt in enumerate(helpers.FOUR):
        alone = helpers.speculate(
            target, lookup, trees.Chain(4), codecs=codecs, input_ids=torch.tensor([prompt]), max_new_tokens=NEW
        ).output
        assert together[row, -NEW:].tolist() == alone[0, -NEW:].tolist()


def test_a_layer_type_keeps_its_own_codec() -> None:
    codecs = kv.KVCacheConfig(keys=kv.Int8(), layers={"sliding_attention": kv.KVCacheConfig()})
    cache = RowCache(helpers.model("gemma3").config, codecs)
    kept = {layer.sliding_window is None: layer.stored["keys"].codec for layer in cache.row_layers}
    assert kept == {True: kv.Int8(), False: kv.Plain()}


def test_the_returned_cache_holds_the_decoded_rows() -> None:
    target = helpers.model("llama", head_dim=32)
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 8, "return_dict_in_generate": True}
    first = helpers.speculate(target, drafters.PromptLookupDrafter(), trees.Chain(4), codecs=kv.INT8, **request).output
    plain = helpers.plain(target, **request)
    assert first.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in zip(first.cache.layers, plain.cache.layers, strict=True):
        assert mine.keys.dtype == theirs.keys.dtype
        error = (mine.keys - theirs.keys).abs().max() / theirs.keys.abs().max()
        assert 0 < float(error) < 0.02
    more = {"input_ids": first.sequences, "max_new_tokens": 8}
    run = helpers.speculate(
        target, drafters.PromptLookupDrafter(), trees.Chain(4), codecs=kv.INT8, **more, cache=first.cache
    )
    assert run.output.shape[1] == first.sequences.shape[1] + 8


def test_a_codec_that_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(ShapeError, match=r"rows of 12 numbers .* such as Int4\(group=4\)"):
        SpeculativeGenerator(helpers.model("llama"), cache=kv.INT4)


class Bare(Digits):
    """Forgets the tuple."""

    def encode(self, rows: Tensor, state: tuple[Tensor, ...] = ()) -> Any:
        return rows


def test_a_codec_that_answers_wrongly_is_named() -> None:
    generator = SpeculativeGenerator(helpers.model(), cache=kv.KVCacheConfig(keys=Bare()))
    with pytest.raises(ShapeError, match=r"Bare\.encode must answer with a tuple"):
        generator.generate(**helpers.batch(helpers.ONE), max_new_tokens=2)


def test_what_is_no_configuration_is_refused() -> None:
    check: Any = SpeculativeGenerator.__init__
    while hasattr(check, "__wrapped__"):
        check = check.__wrapped__
    with pytest.raises(UnsupportedError, match=r"takes a kv\.KVCacheConfig"):
        check(object.__new__(SpeculativeGenerator), helpers.model(), cache=kv.Int8())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_shared", "gpt2"])
def test_the_op_reads_codes_as_what_they_stand_for(name: str, family: str) -> None:
    """Rotated queries, scales beside the codes and rotated outputs give what decoding first gives, up to rounding."""
    wide: dict[str, Any] = {"llama": {"head_dim": 16}, "gpt2": {"n_embd": 64, "hidden_size": 64}}
    target = helpers.model(family, **wide.get(family, {}))
    codecs = kv.KVCacheConfig(keys=CODECS[name], values=CODECS[name])
    request = {
        **helpers.batch(helpers.FOUR),
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    reads = [
        helpers.speculate(
            target, drafters.PromptLookupDrafter(), trees.Chain(4), codecs=codecs, attention=attention, **request
        ).output
        for attention in ("model", "reference")
    ]
    assert reads[0].sequences.tolist() == reads[1].sequences.tolist()
    for one, other in zip(reads[0].logits, reads[1].logits, strict=True):
        # Rounding may turn a later row's code by one step; a forgotten rotation or scale changes logits by far more.
        torch.testing.assert_close(one, other, rtol=0, atol=5e-3)
