"""What happens to every argument of `generate`: the table that the code obeys and the documentation prints.

Every field of `GenerationConfig` and every parameter of `generate` has a row; a test fails when transformers adds
one that has none. A refused argument is refused by name, before any forward pass, when it has a value that would
change the result.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StopStringCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList

from specdec.drafters import BlockModel, FeatureModel
from specdec.errors import UnsupportedError
from specdec.kv import KVCacheConfig
from specdec.ops._checks import number, whole
from specdec.protocols import TreeBuilder


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _more_than_one(value: Any) -> bool:
    return value is not None and value != 1


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its name, whether it is `supported`, `refused` or `inert`, and what a user should know.

    `inert` arguments belong to modes that are refused or to features that need another argument first; on their own
    they change nothing in plain `generate` either. `refused_if` says for which values a refusal is due.
    """

    name: str
    status: Literal["supported", "refused", "inert"]
    note: str
    refused_if: Callable[[Any], bool] = _given


def _supported(names: str, note: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "supported", note) for name in names.split())


def _inert(names: str, note: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "inert", note) for name in names.split())


def _refused(names: str, note: str, refused_if: Callable[[Any], bool] = _given) -> tuple[Argument, ...]:
    return tuple(Argument(name, "refused", note, refused_if) for name in names.split())


ARGUMENTS: tuple[Argument, ...] = (
    *_supported("inputs input_ids attention_mask position_ids token_type_ids", "as in generate; left padding"),
    *_supported("inputs_embeds", "prompt as embeddings; drafters see generated tokens only unless ids are given too"),
    *_supported("generation_config", "as in generate"),
    *_supported("logits_processor prefix_allowed_tokens_fn", "called once per committed token with the true prefix"),
    *_supported("stopping_criteria", "called once per committed token with the true prefix"),
    *_supported("streamer", "one put per token; end() once"),
    *_supported("tokenizer", "for stop_strings; the one given to the generator is the default"),
    *_supported("generator", "a torch.Generator for every draw; not in model.generate"),
    *_supported("num_draft_tokens", "tree budget of this call, 0 switches drafting off; not in model.generate"),
    *_supported("max_length max_new_tokens min_length min_new_tokens max_time", "as in generate, per token"),
    *_supported("stop_strings eos_token_id pad_token_id bos_token_id", "as in generate, per token"),
    *_supported(
        "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff", "applied at each node"
    ),
    *_supported(
        "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values "
        "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias",
        "applied at each node with that node's own prefix",
    ),
    *_supported(
        "watermarking_config guidance_scale negative_prompt_ids negative_prompt_attention_mask",
        "processors with state of their own run once per committed token; only with step-wise verifiers",
    ),
    *_supported("num_return_sequences", "as in generate"),
    *_supported(
        "output_scores output_logits return_dict_in_generate", "one entry per new token, shaped as in generate"
    ),
    *_supported("output_hidden_states output_attentions", "shaped as in generate"),
    *_supported(
        "use_cache",
        "verification always keeps a cache of its own; False means that none is returned, and goes with no states",
    ),
    *_supported(
        "cache past_key_values",
        "a DynamicCache to continue from is copied, not changed; the grown one is returned, None if rows end unevenly",
    ),
    *_supported("prefill_chunk_size", "as in generate"),
    *_refused(
        "cache_implementation cache_config max_cache_len",
        "give cache= to the generator instead; the cache must be able to drop rejected nodes",
        # "hybrid" is what older checkpoints of sliding models ask for; generate drops it.
        lambda value: value not in (None, "dynamic", "hybrid"),
    ),
    *_refused("num_beams", "beam search keeps several hypotheses; use model.generate", _more_than_one),
    *_refused(
        "num_beam_groups constraints force_words_ids",
        "beam search; use model.generate",
        lambda value: value not in (None, 1),
    ),
    *_refused("penalty_alpha dola_layers low_memory", "decoding methods that re-rank with other forwards"),
    *_refused("assistant_model assistant_tokenizer", "give the generator drafter=drafters.ModelDrafter(assistant)"),
    *_refused("prompt_lookup_num_tokens", "give the generator drafter=drafters.PromptLookupDrafter()"),
    *_refused("assistant_early_exit use_mtp speculation_type", "give the generator a drafter instead"),
    *_refused("token_healing", "call model.heal_tokens(input_ids, tokenizer) first and pass its result"),
    *_refused("custom_generate", "the loop is this library's own"),
    *_refused("synced_gpus", "ranks would commit different numbers of tokens per forward"),
    *_refused("is_assistant", "an assistant inside transformers' own assisted decoding"),
    *_refused("continuous_batching_config", "use model.generate_batch"),
    *_inert("early_stopping length_penalty diversity_penalty", "beam search only"),
    *_inert(
        "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
        "target_lookbehind assistant_ensemble_weight max_matching_ngram_size",
        "transformers' own assisted decoding only; see the drafters' arguments",
    ),
    *_inert("compile_config disable_compile", "generate compiles static caches only"),
    *_inert("decoder_start_token_id", "encoder-decoders only"),
    *_inert("trust_remote_code", "only used by custom_generate repositories"),
    *_inert("transformers_version", "bookkeeping"),
)

_MODEL_INPUTS = frozenset(
    [
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "inputs_embeds",
        "cache",
        "use_cache",
        "logits_to_keep",
        "output_hidden_states",
        "output_attentions",
        "labels",
    ]
)
"""Inputs of a model's forward that `generate` may hand on; `labels` it never does."""

_REFUSED = tuple(argument for argument in ARGUMENTS if argument.status == "refused")


PARTS = ("tree", "drafter", "verifier", "controller", "attention", "execution")
"""What belongs to the generator, not to a call."""


def check_call(arguments: dict[str, Any], *configs: GenerationConfig | None, attached: bool = False) -> None:
    """Raises `UnsupportedError` for an argument that cannot be served; the message says what to do.

    Args:
        arguments: what the caller passed by name.
        configs: where other values come from; as in `generate`, the first that is not None counts.
        attached: whether the caller called `model.generate`, and may not know of this library.
    """
    held = [arguments.get(name) for name in ("cache", "past_key_values")]
    misplaced = [name for name in PARTS if arguments.get(name) is not None]
    if misplaced or any(isinstance(each, KVCacheConfig | str) for each in held):
        name = misplaced[0] if misplaced else "cache"
        raise UnsupportedError(f"{name}= is not for generate: give it to SpeculativeGenerator(model, {name}=...).")
    for argument in _REFUSED:
        values = [getattr(config, argument.name, None) for config in configs]
        if argument.name in arguments:
            values = [arguments[argument.name]]
        value = next((value for value in values if value is not None), None)
        if argument.refused_if(value):
            _refuse(argument, value, " (attached to this model; detach() undoes it)" if attached else "")


def check_model_inputs(model_kwargs: dict[str, Any]) -> None:
    """Raises `UnsupportedError` for an input of the model's forward that the verify forwards would not get.

    Models that also read images get an empty dictionary of `mm_encoder_outputs` with a prompt of text alone.
    """
    for name, value in model_kwargs.items():
        if value is not None and value != {} and name not in _MODEL_INPUTS:
            raise UnsupportedError(
                f"{name}= is handed to the model's forward by generate, but not supported by SpeculativeGenerator, "
                f"which serves {', '.join(sorted(_MODEL_INPUTS))}. Use model.generate for this call."
            )


def check_outputs(config: GenerationConfig) -> None:
    """Raises `UnsupportedError` for outputs that plain `generate` shapes by running the whole text again each step."""
    wanted = [name for name in ("output_hidden_states", "output_attentions") if getattr(config, name)]
    if config.return_dict_in_generate and wanted and not config.use_cache:
        raise UnsupportedError(
            f"use_cache=False with {' and '.join(wanted)} asks for the states of the whole text at every step; "
            "leave use_cache=True, which gives those of the new token, or use model.generate."
        )


def _refuse(argument: Argument, value: Any, where: str) -> None:
    shown = repr(value)
    shown = shown if len(shown) < 60 else type(value).__name__
    raise UnsupportedError(f"{argument.name}={shown} is not supported by SpeculativeGenerator{where}: {argument.note}.")


def check_part(name: str, part: Any, protocol: type) -> None:
    """Raises `UnsupportedError` for a part that lacks members of its protocol: a class, a name, another part."""
    if part is None or (isinstance(part, protocol) and not isinstance(part, type)):
        return
    advice = f"an object with the members of specdec.protocols.{protocol.__name__}"
    if isinstance(part, type):
        advice += f"; make one: {part.__name__}(...)"
    elif name == "drafter" and hasattr(part, "forward"):
        kinds = {BlockModel: "BlockDrafter", FeatureModel: "FeatureDrafter"}
        wrapper = next((each for kind, each in kinds.items() if isinstance(part, kind)), "ModelDrafter")
        advice += f"; wrap a draft model: drafters.{wrapper}(model)"
    raise UnsupportedError(f"{name}= got {part if isinstance(part, type) else type(part).__name__}, expected {advice}.")


def with_stop_strings(kwargs: dict[str, Any], own: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Turns stop strings into a criterion here, since transformers does not hand the tokenizer on to us."""
    sources = (kwargs.get("generation_config"), own)
    strings = kwargs.get("stop_strings")
    for source in sources:
        strings = strings if strings is not None else getattr(source, "stop_strings", None)
    if strings is None or tokenizer is None:
        return kwargs
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    # As for all criteria, one of the caller's own stands in for the one made from the argument.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return {**kwargs, "stopping_criteria": criteria, "stop_strings": None}


def tree_budget(tree: TreeBuilder, num_draft_tokens: Any) -> int:
    """Nodes of a call, root excluded; raises `UnsupportedError` for a budget that the tree does not have."""
    nodes = tree.nodes if num_draft_tokens is None else num_draft_tokens
    if not whole(nodes) or int(nodes) > tree.nodes:
        raise UnsupportedError(
            f"num_draft_tokens={num_draft_tokens!r} must be a whole number in 0..{tree.nodes}, the budget of {tree!r}; "
            "give the generator a larger tree for more."
        )
    return int(nodes)


def check_helpers(arguments: dict[str, Any], generator: Any, streamer: Any) -> None:
    """Raises `UnsupportedError` for objects of the caller that are not what a call takes in their place."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UnsupportedError(f"generator must be a torch.Generator or None, got {generator!r}.")
    for name in ("logits_processor", "stopping_criteria"):
        given = arguments.get(name)
        if given is not None and not (isinstance(given, list | tuple) and all(map(callable, given))):
            advice = f"; a single one goes as [{type(given).__name__}(...)]" if callable(given) else ""
            raise UnsupportedError(f"{name} must be a list of callables or None, got {given!r}{advice}.")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise UnsupportedError(f"streamer must have put(ids) and end(), as transformers' have, got {streamer!r}.")


def longest_text(limit: Any) -> int:
    """Tokens with which a row reaches its length limit, prompt included; a part of a token is a whole one.

    Raises:
        UnsupportedError: for what is no number that a text can reach.
    """
    if not number(limit):
        raise UnsupportedError(f"the length limit of a text must be a finite number of tokens, got {limit!r}.")
    return math.ceil(float(limit))


def token_ids(prompt: Tensor) -> Tensor:
    """The ids of a prompt in int64, in which committed tokens are, in plain `generate` too.

    Raises:
        UnsupportedError: for other numbers, which no embedding takes.
    """
    if prompt.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(f"the ids of a prompt must be int64 or int32, got {prompt.dtype}.")
    return prompt.to(torch.int64)
