"""`SpeculativeGenerator`: the arguments and results of `model.generate` that are about the call as a whole."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer, pipeline

from specdec import SpeculativeGenerator, control, drafters, trees
from specdec.errors import SpecdecError, UnsupportedError
from specdec.testing import OracleDrafter, tiny_model
from specdec.testing.tokenizer import tiny_tokenizer
from tests import helpers

NEW = 16
START = helpers.START["one"]
PROMPT = torch.tensor(helpers.PROMPTS["one"])


def compare(target: Any, **request: Any) -> helpers.Run:
    """Equal ids, from an oracle that makes every kind of round."""
    request = {"max_new_tokens": NEW, **request}
    expected = helpers.plain(target, **request)
    run = helpers.speculate(target, helpers.oracle(expected), trees.Chain(4), **request)
    helpers.assert_equal(run, expected)
    return run


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_inputs_embeds(family, prompts):
    target = helpers.model(family)
    request = helpers.batch(helpers.PROMPTS[prompts])
    embeds = target.get_input_embeddings()(request.pop("input_ids"))
    run = compare(target, inputs_embeds=embeds, **request)
    assert run.output.shape[1] == NEW


def test_inputs_embeds_beside_ids():
    ids = torch.tensor([helpers.FOUR[1]])
    embeds = helpers.model().get_input_embeddings()(ids)
    compare(helpers.model(), input_ids=ids, inputs_embeds=embeds)


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_token_type_ids(prompts):
    request = helpers.batch(helpers.PROMPTS[prompts])
    types = torch.arange(request["input_ids"].shape[1]).expand_as(request["input_ids"]) % 3 + 30
    run = compare(helpers.model("gpt2"), token_type_ids=types, **request)
    assert run.output.tolist() != helpers.text(prompts, NEW, "gpt2").tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_position_ids_of_the_caller(family):
    request = helpers.batch(helpers.ONE)
    run = compare(helpers.model(family), position_ids=3 * torch.arange(START)[None], **request)
    assert run.output.tolist() != helpers.text("one", NEW, family).tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["holes", "right padding"])
def test_masks_that_are_not_left_padding(family, kind):
    ids = torch.tensor([helpers.ONE[0], helpers.FOUR[1]])
    mask = torch.ones_like(ids)
    if kind == "holes":
        mask[0, [1, 4, 5]] = 0
        mask[1, 3] = 0
    else:
        mask[0, -3:] = 0
    compare(helpers.model(family), input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_prefill_in_chunks(family, size):
    compare(helpers.model(family), prefill_chunk_size=size, **helpers.batch(helpers.FOUR))


def test_without_a_cache_nothing_but_the_returned_cache_differs():
    run = compare(helpers.model(), use_cache=False, **helpers.batch(helpers.FOUR))
    assert run.output.tolist() == helpers.text("ragged", NEW).tolist()
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 3, "return_dict_in_generate": True, "use_cache": False}
    assert helpers.plain(helpers.model(), **request).cache is None
    assert (
        helpers.speculate(helpers.model(), helpers.oracle(run.output[:1]), trees.Chain(2), **request).output.cache
        is None
    )


def test_without_any_prompt_text_starts_at_bos():
    expected = helpers.plain(helpers.model(), max_new_tokens=NEW)
    run = helpers.speculate(helpers.model(), helpers.oracle(expected), trees.Chain(4), max_new_tokens=NEW)
    helpers.assert_equal(run, expected)


def test_the_default_length_warns_as_in_transformers():
    with pytest.warns(UserWarning, match="max_length"):
        expected = helpers.plain(helpers.model(), **helpers.batch(helpers.ONE))
    with pytest.warns(UserWarning, match="max_length"):
        run = helpers.speculate(helpers.model(), helpers.oracle(expected), trees.Chain(4), **helpers.batch(helpers.ONE))
    assert run.output.tolist() == expected.tolist()
    assert expected.shape[1] == START + 20


def test_the_model_s_own_generation_config_counts():
    target = tiny_model("llama", seed=7)
    target.generation_config = GenerationConfig(
        max_new_tokens=NEW, repetition_penalty=1.5, pad_token_id=0, eos_token_id=96
    )
    request = helpers.batch(helpers.FOUR)
    expected = type(target).generate(target, **request)
    output = SpeculativeGenerator(target, helpers.oracle(expected), trees.Chain(4)).generate(**request)
    assert output.tolist() == expected.tolist() != helpers.text("ragged", NEW).tolist()


def test_num_return_sequences_of_greedy_decoding_raises_as_in_transformers():
    request = {**helpers.batch(helpers.ONE), "num_return_sequences": 3, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="num_return_sequences") as theirs:
        helpers.plain(helpers.model(), **request)
    with pytest.raises(ValueError, match="num_return_sequences") as ours:
        helpers.speculate(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(4), **request)
    assert str(ours.value) == str(theirs.value)


def test_one_generator_serves_calls_of_any_size():
    generator = SpeculativeGenerator(helpers.model(), drafters.PromptLookupDrafter(), trees.BestFirst(nodes=6))
    for prompts in ("one", "ragged", "one"):
        output = generator.generate(**helpers.batch(helpers.PROMPTS[prompts]), max_new_tokens=NEW, do_sample=False)
        assert output.tolist() == helpers.text(prompts, NEW).tolist()


# ------------------------------------------------------------------------------------------------------- streamers


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_a_streamer_gets_the_calls_of_plain_generate(prompts):
    new = helpers.text(prompts, NEW)[:, -NEW:]
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, "eos_token_id": int(new[0, 11])}
    theirs, ours = helpers.Tape(), helpers.Tape()
    expected = helpers.plain(helpers.model(), **request, streamer=theirs)
    run = helpers.speculate(helpers.model(), helpers.oracle(expected), trees.Chain(4), **request, streamer=ours)
    assert run.output.tolist() == expected.tolist()
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in theirs.puts]
    assert ours.ends == theirs.ends == 1


def test_tokens_are_streamed_before_the_call_returns():
    tape = helpers.Tape()
    generator = SpeculativeGenerator(helpers.model(), OracleDrafter(helpers.text("one", NEW), [3]), trees.Chain(4))
    seen = [
        len(tape.tokens)
        for _ in generator.rounds(**helpers.batch(helpers.ONE), max_new_tokens=NEW, do_sample=False, streamer=tape)
    ]
    assert seen == [1, 5, 9, 13, 16]


def test_text_streamers_of_transformers(capsys):
    tokenizer, generator = tiny_tokenizer(), SpeculativeGenerator(helpers.model())
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "do_sample": False}
    written = tokenizer.decode(helpers.text("one", NEW)[0, START:])
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True)
    generator.generate(**request, streamer=pieces)
    assert "".join(pieces) == written
    generator.generate(**request, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == written + "\n"
    with pytest.raises(ValueError, match="batch size 1"):
        generator.generate(**helpers.batch(helpers.FOUR), max_new_tokens=2, streamer=TextStreamer(tokenizer))


# ------------------------------------------------------------------------------------------------------ attach, rounds


def test_attach_serves_a_pipeline():
    target, tokenizer = tiny_model("llama", seed=7), tiny_tokenizer()
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu")
    texts, options = ["one two one", "ab"], {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    expected = pipe(texts, **options)
    generator = SpeculativeGenerator(target, drafters.PromptLookupDrafter(), trees.Chain(4))
    with generator.attach():
        assert pipe(texts, **options) == expected
        assert generator.stats.new_tokens == NEW  # of the last text: a pipeline calls once per batch
        assert pipe(texts, batch_size=2, **options) == expected
        assert generator.stats.batch == 2
        chat = [{"role": "user", "content": "hi"}]
        assert len(pipe(chat, **options)[0]["generated_text"]) > 0
    passes = generator.stats.target_passes
    assert pipe(texts, **options) == expected
    assert generator.stats.target_passes == passes
    assert "generate" not in vars(target)


def test_attach_twice_is_refused_and_detach_is_idempotent():
    target = tiny_model("llama")
    one, other = SpeculativeGenerator(target), SpeculativeGenerator(target)
    with one.attach() as entered:
        assert entered is one
        with pytest.raises(UnsupportedError, match="already"):
            other.attach()
        with pytest.raises(UnsupportedError, match=r"num_beams=2.*detach\(\)"):
            target.generate(**helpers.batch(helpers.ONE), num_beams=2)
    one.attach()
    other.detach()
    assert target.generate == one.generate
    one.detach()
    one.detach()
    assert "generate" not in vars(target)


def test_a_generator_made_while_another_is_attached_works():
    target, request = (
        tiny_model("llama", seed=7),
        {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "do_sample": False},
    )
    with SpeculativeGenerator(target).attach():
        inner = SpeculativeGenerator(target, OracleDrafter(helpers.text("one", NEW), [9]), trees.Chain(4))
        assert inner.generate(**request).tolist() == helpers.text("one", NEW).tolist()
    assert inner.generate(**request).tolist() == helpers.text("one", NEW).tolist()


def test_rounds_checks_at_once_and_runs_when_advanced():
    generator = SpeculativeGenerator(helpers.model(), OracleDrafter(helpers.text("one", NEW), [9]), trees.Chain(4))
    with pytest.raises(UnsupportedError, match="num_beams"):
        generator.rounds(**helpers.batch(helpers.ONE), max_new_tokens=NEW, num_beams=2)
    with helpers.forwards(helpers.model()) as calls:
        rounds = generator.rounds(**helpers.batch(helpers.ONE), max_new_tokens=NEW, do_sample=False)
        assert len(calls) == 0
        done = [next(rounds)]
        assert len(calls) == 1
        done += rounds
    committed = [token for round in done for token in round.committed[0, : int(round.num_committed)].tolist()]
    assert committed == helpers.text("one", NEW)[0, START:].tolist()


def test_a_second_request_ends_the_first():
    generator = SpeculativeGenerator(helpers.model(), OracleDrafter(helpers.text("one", NEW), [9]), trees.Chain(4))
    request = {**helpers.batch(helpers.ONE), "do_sample": False}
    first = generator.rounds(**request, max_new_tokens=NEW)
    next(first)
    mine = generator.stats
    next(generator.rounds(**request, max_new_tokens=1))
    with pytest.raises(SpecdecError, match="one request at a time"):
        next(first)
    assert (mine.new_tokens, generator.stats.new_tokens) == (1, 1)


def test_a_closed_request_makes_room_for_the_next():
    generator = SpeculativeGenerator(helpers.model(), OracleDrafter(helpers.text("one", NEW), [9]), trees.Chain(4))
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": NEW, "do_sample": False}
    first = generator.rounds(**request)
    next(first)
    first.close()
    assert generator.generate(**request).tolist() == helpers.text("one", NEW).tolist()


def test_a_generator_shows_its_parts():
    generator = SpeculativeGenerator(helpers.model(), tree=trees.Chain(4), controller=control.Goodput())
    assert repr(generator) == (
        "<SpeculativeGenerator: LlamaForCausalLM, PromptLookupDrafter, Chain(nodes=4), a lossless verifier, Goodput, "
        "attention=model>"
    )


@pytest.mark.parametrize("positional", [False, True])
def test_arguments_by_position_and_in_inference_mode(positional):
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0)
    request = (helpers.batch(helpers.ONE)["input_ids"], config)
    generator = SpeculativeGenerator(helpers.model(), OracleDrafter(helpers.text("one", NEW), [9]), trees.Chain(4))
    with torch.inference_mode():
        output = (
            generator.generate(*request)
            if positional
            else generator.generate(inputs=request[0], generation_config=config)
        )
    assert output.tolist() == helpers.text("one", NEW).tolist()


@pytest.mark.parametrize("execution", ["host", "device"])
def test_a_call_in_inference_mode_leaves_no_trace(execution):
    """Tensors of that mode cannot be changed outside, and a generator keeps buffers for its next request."""
    served = SpeculativeGenerator(helpers.model("llama"), execution=execution)
    request = {"max_new_tokens": NEW, "do_sample": False}
    expected = helpers.plain(helpers.model("llama"), input_ids=PROMPT, **request)
    with torch.inference_mode():
        prompt = PROMPT.clone()
        assert torch.equal(served.generate(prompt, **request), expected)
        rounds = served.rounds(prompt, **request)
        first = next(rounds)
    committed = [first.committed, *(round.committed for round in rounds)]
    assert torch.cat(committed, 1).numel() >= NEW
    assert torch.equal(served.generate(PROMPT, **request), expected)


@pytest.mark.parametrize("execution", ["host", "device"])
def test_a_prompt_of_int32(execution):
    served = SpeculativeGenerator(helpers.model("llama"), execution=execution)
    request = {"max_new_tokens": NEW, "do_sample": False}
    expected = helpers.plain(helpers.model("llama"), input_ids=PROMPT, **request)
    for kind in (torch.int32, torch.int64):
        found = served.generate(PROMPT.to(kind), **request)
        assert found.dtype == torch.int64
        assert torch.equal(found, expected)


def test_gradients_are_off_inside_and_on_between_rounds():
    generator = SpeculativeGenerator(helpers.model(), OracleDrafter(helpers.text("one", NEW), [9]), trees.Chain(4))
    for round in generator.rounds(**helpers.batch(helpers.ONE), max_new_tokens=NEW, do_sample=False):
        assert torch.is_grad_enabled()
        assert not round.tree.scores.requires_grad
        assert not round.tree.scores.is_inference()


# ------------------------------------------------------------------------------------------------------ side effects


def test_nothing_of_the_caller_s_is_changed():
    target = tiny_model("llama", seed=7)
    target.generation_config = GenerationConfig(max_length=60, pad_token_id=0, bos_token_id=1, repetition_penalty=1.1)
    config = GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=3, eos_token_id=[96], stop_strings=["zzz"])
    request = {
        **helpers.batch(helpers.FOUR),
        "generation_config": config,
        "logits_processor": [],
        "stopping_criteria": [],
        "bad_words_ids": [[3], [4, 5]],
        "sequence_bias": [[[7, 8], -2.0]],
    }
    before = {name: copy.deepcopy(value) for name, value in request.items()}
    own, forward = target.generation_config.to_dict(), dict(vars(target.config))
    SpeculativeGenerator(target, tokenizer=tiny_tokenizer()).generate(**request)
    for name, value in request.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, before[name])
        else:
            assert value == before[name], name
    assert config.to_dict() == before["generation_config"].to_dict()
    assert target.generation_config.to_dict() == own
    assert vars(target.config) == forward
    assert target.training is False
