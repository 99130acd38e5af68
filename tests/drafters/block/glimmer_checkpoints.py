"""Tiny random drafters of Muse Glimmer, written by transformers, and a target of that family.

The shapes fit the library's tiny models (vocabulary 97, hidden size 48); every size differs from the others.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PreTrainedModel,
)

from tests.drafters.block.checkpoints import HIDDEN, MASK, VOCAB, Written

WINDOW = 5


def model(seed: int = 0, **overrides: Any) -> MuseGlimmerAssistantModel:
    """A random drafter in float64, whose weights are large enough for each of them to matter."""
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "max_position_embeddings": 512,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "block_size": 6,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    made = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**settings, **overrides})).double().eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(made.named_parameters()):
            drawn = torch.randn(weight.shape, generator=source, dtype=torch.float64)
            weight.copy_(1 + 0.2 * drawn if weight.dim() == 1 else 0.4 * drawn)
            assert (weight.dim() == 1) == ("norm" in name)
    return made


def write(folder: Path, *, seed: int = 0, **overrides: Any) -> Written:
    """Write a random drafter as transformers does."""
    made = model(seed, **overrides)
    made.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    layers = tuple(layer + 1 for layer in config["target_layer_ids"])
    return Written(folder, config, load_file(folder / "model.safetensors"), {}, layers)


@cache
def target() -> PreTrainedModel:
    """A tiny Muse Glimmer: a normed embedding, scaled logits with a soft cap, a layer without rotation."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "sliding_window": 8,
        "output_multiplier": 0.4,
        "final_logit_softcapping": 3.0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MuseGlimmerConfig(
        text_config=text,
        vision_config=vision,
        out_hidden_size=64,
        projector_hidden_size=16,
        image_token_id=95,
        video_token_id=94,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = MuseGlimmerForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    return made
