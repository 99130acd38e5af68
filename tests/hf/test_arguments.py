"""The table of arguments is complete, and what it refuses is refused by name before any forward pass."""

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, GPT2Config, GPT2LMHeadModel

from specdec import SpeculativeGenerator, drafters, kv, trees
from specdec.errors import UnsupportedError
from specdec.hf.arguments import ARGUMENTS, Argument, check_call
from specdec.testing.tokenizer import tiny_tokenizer
from tests import helpers

ROWS = {argument.name: argument for argument in ARGUMENTS}
OURS = {"generator", "num_draft_tokens"}
INPUTS = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "cache", "past_key_values"}
POPPED = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}
"""Names that `generate` takes out of its `**kwargs`."""


def parameters() -> set[str]:
    """Every name that transformers' `generate` knows."""
    named = inspect.signature(GenerationMixin.generate).parameters
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return ({*named} - {"self", "kwargs"}) | fields | INPUTS | POPPED


def missing(names: set[str]) -> set[str]:
    return names - set(ROWS)


def test_every_parameter_of_generate_has_one_row():
    assert missing(parameters()) == set()
    assert set(ROWS) - parameters() == OURS
    assert len(ROWS) == len(ARGUMENTS)


def test_an_argument_without_a_row_is_noticed():
    assert missing(parameters() | {"temperature_of_tea"}) == {"temperature_of_tea"}


def test_the_names_that_generate_pops_are_those_in_the_table():
    source = inspect.getsource(GenerationMixin.generate) + inspect.getsource(
        GenerationMixin._extract_generation_mode_kwargs
    )
    for name in POPPED:
        assert f'kwargs.pop("{name}"' in source
    assert len(re.findall(r'(?<!_)kwargs\.pop\("', source)) == len(POPPED)


def test_signatures_agree():
    theirs = [*inspect.signature(GenerationMixin.generate).parameters.values()][1:]
    ours = {item.name: item for item in inspect.signature(SpeculativeGenerator.generate).parameters.values()}
    names = [name for name in ours if name != "self"]
    assert names[: len(theirs) - 1] == [item.name for item in theirs[:-1]]
    assert set(names) - {item.name for item in theirs} == OURS
    for item in theirs:
        assert ours[item.name].kind == item.kind
        assert ours[item.name].default == item.default


VALUES: dict[str, Any] = {
    "cache_implementation": "static",
    "cache_config": {"nbits": 4},
    "max_cache_len": 64,
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "assistant_tokenizer": tiny_tokenizer(),
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "speculation_type": "dflash",
    "custom_generate": "someone/something",
}
"""Values that would change the result; True for the other rows."""
REFUSED = [argument for argument in ARGUMENTS if argument.status == "refused"]


def value_of(argument: Argument) -> Any:
    if argument.name == "assistant_model":
        return helpers.model()
    return VALUES.get(argument.name, True)


@pytest.mark.parametrize("argument", REFUSED, ids=lambda argument: argument.name)
def test_a_refused_argument_is_refused_by_name(argument):
    target = helpers.model()
    generator = SpeculativeGenerator(target, drafters.PromptLookupDrafter(), trees.Chain(4), tokenizer=tiny_tokenizer())
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4}
    with helpers.forwards(target) as calls:
        with pytest.raises(UnsupportedError, match=f"^{argument.name}=.*not supported by SpeculativeGenerator: \\S+"):
            generator.generate(**request, **{argument.name: value_of(argument)})
        with pytest.raises(UnsupportedError, match=f"^{argument.name}="):
            generator.rounds(**request, **{argument.name: value_of(argument)})
    assert calls == []


FIELDS = [argument for argument in REFUSED if hasattr(GenerationConfig(), argument.name)]


@pytest.mark.parametrize("argument", FIELDS, ids=lambda argument: argument.name)
@pytest.mark.parametrize("place", ["argument", "model"])
def test_a_refused_field_of_a_config_is_refused_by_name(argument, place):
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    setattr(config, argument.name, value_of(argument))
    target = helpers.model("llama", seed=1)
    own, request = target.generation_config, helpers.batch(helpers.ONE)
    if place == "model":
        target.generation_config = config
    else:
        request["generation_config"] = config
    try:
        with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=f"^{argument.name}="):
            SpeculativeGenerator(target).generate(**request)
    finally:
        target.generation_config = own
    assert calls == []


@pytest.mark.parametrize("argument", FIELDS, ids=lambda argument: argument.name)
def test_default_values_of_refused_arguments_are_served(argument):
    for config in (GenerationConfig(), GenerationConfig(**GenerationConfig()._get_default_generation_params())):
        check_call({argument.name: getattr(config, argument.name)})


def test_the_caller_s_value_goes_before_a_config_s():
    check_call({"num_beams": 1}, GenerationConfig(num_beams=4))
    check_call({}, GenerationConfig(num_beams=1), GenerationConfig(num_beams=4))
    with pytest.raises(UnsupportedError, match="num_beams=4"):
        check_call({}, GenerationConfig(), GenerationConfig(num_beams=4))


INERT: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.9,
    "assistant_ensemble_weight": 0.5,
    "num_assistant_tokens": 7,
    "transformers_version": "5.0.0",
    "decoder_start_token_id": 3,
    "trust_remote_code": True,
    "disable_compile": True,
    "compile_config": None,
}


@pytest.mark.parametrize("argument", [row for row in ARGUMENTS if row.status == "inert"], ids=lambda row: row.name)
def test_an_inert_argument_changes_nothing_here_or_there(argument):
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 6, argument.name: INERT.get(argument.name, 2)}
    assert helpers.plain(helpers.model(), **request).tolist() == helpers.text("one", 6).tolist()
    run = helpers.speculate(helpers.model(), helpers.oracle(helpers.text("one", 6)), trees.Chain(4), **request)
    assert run.output.tolist() == helpers.text("one", 6).tolist()


def test_a_misspelt_argument_raises_as_in_transformers():
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, "tempreature": 0.5}
    with pytest.raises(ValueError, match="tempreature") as theirs:
        helpers.plain(helpers.model(), **request)
    with pytest.raises(ValueError, match="tempreature") as ours:
        helpers.speculate(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(4), **request)
    assert str(ours.value) == str(theirs.value)


def test_inputs_of_the_model_that_a_verify_forward_would_not_get_are_refused_by_name():
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=97, add_cross_attention=True, pad_token_id=0)
    target = GPT2LMHeadModel(config).eval()
    with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=r"^encoder_hidden_states="):
        SpeculativeGenerator(target).generate(
            **helpers.batch(helpers.ONE), encoder_hidden_states=torch.randn(1, 3, 16), max_new_tokens=4
        )
    assert calls == []


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_states_without_a_cache_are_refused_by_name(name):
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, "return_dict_in_generate": True, "use_cache": False}
    whole = helpers.plain(helpers.model(), **request, output_hidden_states=True).hidden_states
    assert whole[2][0].shape[1] == helpers.START["one"] + 2  # what the refusal is about
    with helpers.forwards(helpers.model()) as calls, pytest.raises(UnsupportedError, match=f"use_cache=False.*{name}"):
        helpers.speculate(helpers.model(), drafters.PromptLookupDrafter(), trees.Chain(4), **request, **{name: True})
    assert calls == []


@pytest.mark.parametrize("count", [-1, 5])
def test_a_draft_budget_outside_the_tree_s_is_refused(count):
    with pytest.raises(UnsupportedError, match=rf"num_draft_tokens={count} must be a whole number in 0\.\.4"):
        SpeculativeGenerator(helpers.model(), tree=trees.Chain(4)).generate(
            **helpers.batch(helpers.ONE), max_new_tokens=4, num_draft_tokens=count
        )


def test_every_row_says_what_happens():
    for argument in ARGUMENTS:
        assert len(argument.note) > 8
        assert argument.status in ("supported", "refused", "inert")


@pytest.mark.parametrize(
    ("name", "value"), [("cache", kv.INT8), ("past_key_values", kv.INT8), ("cache", "int8"), ("tree", trees.Chain(2))]
)
def test_what_belongs_to_the_generator_is_sent_there(name: str, value: Any) -> None:
    """`generate` would fail somewhere inside transformers."""
    generator = SpeculativeGenerator(helpers.model())
    shown = "tree" if name == "tree" else "cache"
    with pytest.raises(UnsupportedError, match=rf"{shown}= is not for generate: give it to SpeculativeGenerator"):
        generator.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, **{name: value})
