"""Every logits processor that transformers can put into a `generate` call, as arguments of that call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig

Arguments = Callable[[list[int]], dict[str, Any]]
"""Arguments of `generate`, given the tokens that it writes without them (so that a rule bites at once)."""


def parity(_: int, ids: Tensor) -> list[int]:
    """Even ids at even lengths, odd ids at odd lengths; a rule that switches on in the text: no 40s after a 4x."""
    allowed = range(ids.shape[0] % 2, 97, 2)
    seen = any(40 <= token < 50 for token in ids[-3:].tolist())
    return [token for token in allowed if not (seen and 40 <= token < 50)]


class Shift(LogitsProcessor):
    """A caller's own processor without state: what it adds depends on the last two tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[1])
        return scores + 3 * torch.sin(tokens * input_ids[:, -2:].sum(-1, keepdim=True))


class Count(LogitsProcessor):
    """A caller's own processor with state: every third call forbids what it liked best the call before."""

    def __init__(self) -> None:
        self.calls = 0
        self.best: Tensor | None = None
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        self.prefixes.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, self.calls % 97] += 2.0 * self.calls
        if self.best is not None and self.calls % 3 == 0:
            scores.scatter_(1, self.best[:, None], -torch.inf)
        self.best = scores.argmax(-1)
        return scores


ROW_WISE: dict[str, Arguments] = {
    "repetition_penalty": lambda _: {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": lambda _: {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": lambda _: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda _: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[3]], [text[0], text[1]]]},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[2]], -9.0], [[text[0], 41], 30.0], [[41, 42], 30.0]]},
    "min_length": lambda text: {"min_length": 24, "eos_token_id": [text[1], text[6]]},
    "min_new_tokens": lambda text: {"min_new_tokens": 9, "eos_token_id": [text[1], text[6], text[12]]},
    "forced_eos_token_id": lambda _: {"forced_eos_token_id": 41},
    "exponential_decay": lambda _: {"exponential_decay_length_penalty": (9, 1.15), "eos_token_id": 41},
    "suppress_tokens": lambda text: {"suppress_tokens": text[2:5]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": text[:1]},
    "remove_invalid_values": lambda _: {"remove_invalid_values": True},
    "renormalize_logits": lambda _: {"renormalize_logits": True, "repetition_penalty": 1.2},
    "watermark": lambda _: {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "watermark_selfhash": lambda _: {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
}
"""Pure functions of a row's prefix and scores."""

STATEFUL: dict[str, Arguments] = {
    "guidance_scale": lambda _: {"guidance_scale": 1.5},
    "prefix_allowed_tokens_fn": lambda _: {"prefix_allowed_tokens_fn": parity},
    "watermark_synthid": lambda _: {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            ngram_len=3, keys=[5, 9, 22, 3], skip_first_ngram_calls=True
        )
    },
    "user": lambda _: {"logits_processor": [Shift()]},
    "user_with_state": lambda _: {"logits_processor": [Count()]},
}
"""Processors that may remember earlier calls: rows of a batch advance together."""

WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "several": {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "renormalize_logits": True},
}
"""Applied only when tokens are drawn."""
