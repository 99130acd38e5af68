"""Tiny random models of the supported families, and a model whose next-token law is a table.

A tiny model has a vocabulary of 97, four query and two key/value heads and spread-out logits (weights times three),
so that greedy text does not loop and a wrong position or mask shows at once. Same seed, same weights.
"""

from typing import Any, cast

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import UnsupportedError

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "num_hidden_layers": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA4 = {
    **_SLIDING,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_global_key_value_heads": 1,
}

_GATED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 12}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 12, **_EXPERTS}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 64, "num_key_value_heads": None},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 8}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SLIDING, "head_dim": 16}),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA4),
    "gemma4_moe": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**_GEMMA4, "enable_moe_block": True, "top_k_experts": 2, "num_experts": 4, "moe_intermediate_size": 32},
    ),
    "gemma4_shared": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**_GEMMA4, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_SLIDING, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_GATED, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GATED),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_GATED, **_SHARED_EXPERT}),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _GATED),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": _GATED["layer_types"],
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""Configuration class, model class and what differs from the common shape, per family name."""


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A random model of a supported family, in evaluation mode on the CPU.

    Args:
        family: a key of `FAMILIES`.
        seed: seed of the weights; the global generator is left as it was.
        dtype: float64 makes greedy comparisons exact.
        **overrides: configuration fields that differ.

    Example:
        >>> from specdec.testing import tiny_model
        >>> tiny_model("gemma3").config.sliding_window
        8
    """
    if family not in FAMILIES:
        raise UnsupportedError(f"unknown family {family!r}; choose one of {', '.join(FAMILIES)}.")
    config_name, model_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_COMMON, **extra, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model = model.to(dtype)
    return cast(PreTrainedModel, model)


def table_model(probs: Float[Tensor, "vocab vocab"]) -> PreTrainedModel:
    """A llama whose next-token law after token i is exactly `probs[i]`, whatever came before.

    Attention and MLP contribute nothing; the embedding is the identity and the head holds log-probabilities.

    Example:
        >>> import torch
        >>> from specdec.testing import table_model
        >>> probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 4)
        >>> logits = table_model(probs)(torch.tensor([[3]])).logits
        >>> [round(value, 6) for value in logits.softmax(-1)[0, 0].tolist()]
        [0.5, 0.5, 0.0, 0.0]
    """
    vocab = probs.shape[0]
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": vocab,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model: Any = tiny_model("llama", num_hidden_layers=1, head_dim=4, rms_norm_eps=0.0, bos_token_id=0, **shape)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.lm_head.weight.copy_(probs.double().clamp_min(1e-300).log().T / vocab**0.5)
    return cast(PreTrainedModel, model)


def greedy(model: PreTrainedModel, **arguments: Any) -> Tensor:
    """Plain greedy `model.generate`: the reference of every equality test."""
    plain: Any = type(model)
    return cast(Tensor, plain.generate(model, do_sample=False, **arguments))
