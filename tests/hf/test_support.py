"""What is refused, by name, before any forward pass; and a survey of every causal model class of transformers."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import SpeculativeGenerator, drafters, trees
from specdec.errors import UnsupportedError
from specdec.hf import support
from specdec.hf.target import ModelTarget
from specdec.testing import FAMILIES, OracleDrafter, tiny_model
from tests import helpers

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
BART = {
    "vocab_size": 97,
    "d_model": 16,
    "decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_ffn_dim": 16,
    "encoder_ffn_dim": 16,
    "decoder_attention_heads": 2,
    "encoder_attention_heads": 2,
}
GPT = {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
FALCON = {key: TINY[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}


def build(config: str, model: str, **options: Any) -> PreTrainedModel:
    """A model without weights: whatever looks at it reads its configuration only."""
    with torch.device("meta"):
        return getattr(transformers, model)(getattr(transformers, config)(**options))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_5 without attention": (
        lambda: build("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **TINY, layer_types=["linear_attention"] * 4),
        "linear_attention only",
    ),
    "mamba": (
        lambda: build("MambaConfig", "MambaForCausalLM", vocab_size=97, hidden_size=16, num_hidden_layers=2),
        "linear_attention",
    ),
    "mamba2": (
        lambda: build(
            "Mamba2Config", "Mamba2ForCausalLM", vocab_size=97, hidden_size=32, num_heads=4, head_dim=16, n_groups=1
        ),
        "linear_attention",
    ),
    "recurrent_gemma": (
        lambda: build("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", **TINY, head_dim=12, lru_width=48),
        "linear_attention",
    ),
    "falcon_h1": (lambda: build("FalconH1Config", "FalconH1ForCausalLM", **TINY), "hybrid"),
    "lfm2": (
        lambda: build("Lfm2Config", "Lfm2ForCausalLM", **TINY, layer_types=["conv", "full_attention"] * 2),
        "conv",
    ),
    "llama4": (
        lambda: build("Llama4TextConfig", "Llama4ForCausalLM", **TINY, num_local_experts=2, attention_chunk_size=8),
        "chunked_attention",
    ),
    "t5": (
        lambda: build(
            "T5Config", "T5ForConditionalGeneration", vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1
        ),
        "T5ForConditionalGeneration is an encoder-decoder",
    ),
    "bart": (lambda: build("BartConfig", "BartForConditionalGeneration", **BART), "is an encoder-decoder"),
    "bart decoder": (lambda: build("BartConfig", "BartForCausalLM", **BART), "does not take position_ids"),
    "bloom": (
        lambda: build("BloomConfig", "BloomForCausalLM", vocab_size=97, hidden_size=16, n_layer=1, n_head=2),
        "does not take position_ids",
    ),
    "falcon with ALiBi": (lambda: build("FalconConfig", "FalconForCausalLM", **FALCON, alibi=True), "ALiBi"),
    "gpt_neo with local layers": (
        lambda: build(
            "GPTNeoConfig",
            "GPTNeoForCausalLM",
            vocab_size=97,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
        ),
        "local attention that counts cache slots",
    ),
    "xlm": (
        lambda: build("XLMConfig", "XLMWithLMHeadModel", vocab_size=97, emb_dim=16, n_layers=1, n_heads=2),
        "builds its attention mask from lengths",
    ),
    "no head": (lambda: build("LlamaConfig", "LlamaModel", **TINY), "language-modelling head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_verify_trees_are_refused_by_name(name):
    """Class c: what cannot rewind raises at construction. Models without weights show that nothing runs before."""
    make, reason = REFUSED[name]
    model = make()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    for use in (
        lambda: support.check_model(model),
        lambda: SpeculativeGenerator(model),
        lambda: ModelTarget(model, torch.tensor([[5, 6]])),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            use()


def test_what_is_no_language_model_is_refused():
    with pytest.raises(UnsupportedError, match=r"expected a transformers model.* got Linear"):
        support.check_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["mamba2", "t5", "xlm"])
def test_a_draft_model_that_cannot_verify_trees_is_refused_before_it_runs(name):
    """The same rule for the second model."""
    make, reason = REFUSED[name]
    model = make()
    generator = SpeculativeGenerator(helpers.model(), drafters.ModelDrafter(model), trees.Chain(2))
    with pytest.raises(UnsupportedError, match=reason):
        generator.generate(**helpers.batch(helpers.ONE), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_attention_that_cannot_take_a_mask_is_refused_by_name(name):
    model = tiny_model("llama")
    model.config._attn_implementation_internal = name
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    with pytest.raises(UnsupportedError, match=rf"{name.replace('|', '.')}.*set_attn_implementation\('sdpa'\)"):
        SpeculativeGenerator(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass(family):
    support.check_model(helpers.model(family))


def test_gpt_neo_without_local_layers_is_served():
    options = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}
    support.check_model(build("GPTNeoConfig", "GPTNeoForCausalLM", vocab_size=97, **options))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize("prompts", ["one", "ragged"])
def test_rotary_embeddings_that_change_with_the_length_are_refused_where_they_would_change(prompts):
    """One deep node would change the frequencies of its ancestors, and one row of a batch those of the others."""
    rows = {"one": [[5, 6, 7, 8, 9, 10]], "ragged": [[5, 6, 7, 8, 9, 10], [7, 8]]}[prompts]
    rope = {"max_position_embeddings": 64, "rope_parameters": LONGROPE}
    model = tiny_model("llama", **rope)
    generator = SpeculativeGenerator(model, OracleDrafter(torch.zeros(len(rows), 1, dtype=torch.int64), [2]))
    with pytest.raises(UnsupportedError, match=r"'longrope'.*at most 11 new tokens"):
        generator.generate(**helpers.batch(rows), max_new_tokens=12, do_sample=False, pad_token_id=0)
    # Up to the boundary, and wholly beyond it, frequencies stay as they are.
    long = [list(range(20, 20 + 17 + len(row))) for row in rows]
    for texts, tokens in ((rows, 11), (long, 16)):
        reference = helpers.plain(model, **helpers.batch(texts), max_new_tokens=tokens)
        run = helpers.speculate(
            model, helpers.oracle(reference), trees.Chain(3), **helpers.batch(texts), max_new_tokens=tokens
        )
        helpers.assert_equal(run, reference, all_kinds=False)
    dynamic = tiny_model("llama", max_position_embeddings=16, rope_parameters=DYNAMIC)
    with pytest.raises(UnsupportedError, match=r"'dynamic'.*at most 11 new tokens"):
        SpeculativeGenerator(dynamic).generate(**helpers.batch(rows), max_new_tokens=12, pad_token_id=0)


def test_rotary_embeddings_are_found_per_layer_type():
    config = tiny_model("gemma3").config
    config.rope_parameters = {"sliding_attention": {"rope_type": "default"}, "full_attention": dict(LONGROPE)}
    with pytest.raises(UnsupportedError, match="at most 7 new tokens"):
        support.check_rope(config, 10, 17)
    support.check_rope(config, 10, 16)
    support.check_rope(config, 17, 400)
    support.check_rope(config, 10, None)


def test_limits_that_a_configuration_does_not_name_are_none():
    assert support.position_limit(helpers.model("gpt2").config) == 512
    unlimited = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(decoder=decoder))
    assert support.position_limit(unlimited) is None


# ------------------------------------------------------------------------------------------------------- the survey

_OVERRIDES: dict[str, Any] = {
    **TINY,
    **GPT,
    **BART,
    **dict.fromkeys(["n_embd", "d_model", "dim", "word_embed_proj_dim"], 48),
    **dict.fromkeys(["n_layer", "num_layers"], 4),
    **dict.fromkeys(["n_head", "num_heads"], 4),
    **dict.fromkeys(["n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"], 64),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **{"n_positions": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "d_kv": 16},
    **{"sliding_window": 8, "attention_chunk_size": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
_HEADS = ("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
_BIDIRECTIONAL = ("bert", "electra", "ernie", "data2vec", "big_bird", "xmod")
_ROUNDED = {"granite_swa", "granitemoe_swa"}  # attention in float32 and logits that are nearly equal


def small(name: str) -> PreTrainedModel | None:
    """A tiny random model of a type, if the usual options are enough to make one."""
    make = transformers.CONFIG_MAPPING[name]
    try:
        default = make()
        options = {key: value for key, value in _OVERRIDES.items() if hasattr(default, key)}
    except Exception:
        return None
    if any(part in name for part in _BIDIRECTIONAL):
        options["is_decoder"] = True
    headless = {key: value for key, value in options.items() if key not in _HEADS}
    kinds = getattr(default, "layer_types", None)
    for variant in (options, headless, {**headless, "num_key_value_heads": 4}):
        for types in ({}, {"layer_types": list(kinds)[:4]}) if kinds else ({},):
            try:
                config = make(**variant, **types)
                with torch.device("meta"):
                    size = sum(item.numel() for item in AutoModelForCausalLM.from_config(config).parameters())
                if size > 2e7:
                    return None
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config).eval()
                with contextlib.suppress(Exception):
                    model.set_experts_implementation("eager")
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() > 1:
                            parameter.mul_(3.0)
                return model.double()
            except Exception:
                continue
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_causal_model_of_transformers_is_served_exactly_or_refused():
    """Close the kind: no model class is served wrongly, whatever its attention does with masks and positions."""
    served, refused, unmade = [], [], []
    rows = [list(range(20, 32)), list(range(40, 48))]
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = small(name)
        if model is None:
            unmade.append(name)
            continue
        try:
            support.check_model(model)
        except UnsupportedError:
            refused.append(name)
            continue
        request = {**helpers.batch(rows), "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
        try:
            reference = helpers.plain(model, **request)
        except Exception:
            unmade.append(name)
            continue
        run = helpers.speculate(model, helpers.oracle(reference), trees.BestFirst(10, branch=2, depth=5), **request)
        if name not in _ROUNDED:
            assert run.output.tolist() == reference.tolist(), name
            served.append(name)
    assert len(served) > 90, served
    assert len(refused) > 30, refused
    assert len(unmade) < 70, unmade


def test_the_request_of_a_bare_target_has_no_length():
    """A target without a request (a drafter's model) has no text to outgrow anything."""
    model = tiny_model("llama", max_position_embeddings=64, rope_parameters=LONGROPE)
    ModelTarget(model, torch.tensor([[5, 6]]))
    with pytest.raises(UnsupportedError, match="longrope"):
        ModelTarget(model, torch.tensor([[5, 6]]), generation_config=GenerationConfig(max_length=40))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {}, ""),
        ("gemma3", {}, ""),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type 'dynamic'"),
        ("mixtral", {}, "set_experts_implementation"),
    ],
)
def test_what_no_graph_can_hold_is_known_beforehand(family: str, changes: dict[str, Any], message: str) -> None:
    model = tiny_model(family, **changes)
    found = support.capture_obstacle(model.config)
    assert (message in found) if message else found == ""
    if family == "mixtral":
        model.set_experts_implementation("grouped_mm")
        assert support.capture_obstacle(model.config) == ""
