"""Models that also see images: requests of text alone are served exactly, images are refused by name."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees
from specdec.errors import UnsupportedError
from specdec.hf import support
from tests import helpers

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
GATED = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SEEN = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {**SEEN, "image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
TOKENS = {"image_token_id": 95, "video_token_id": 94}


def rope(sections: list[int], **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **rest}}


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (SLIDING, PATCHES, {"image_token_index": 95, "mm_tokens_per_image": 4}),
    "Llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **PATCHES}, {"image_token_index": 95}),
    "Qwen2_5_VL": (rope([2, 3, 3]), QWEN, TOKENS),
    "Qwen3VL": (rope([2, 3, 3]), {**QWEN, "deepstack_visual_indexes": [0]}, TOKENS),
    "Qwen3_5": ({**GATED, **rope([1, 1, 0], partial_rotary_factor=0.25)}, QWEN, TOKENS),
    "MuseGlimmer": ({"sliding_window": 8}, SEEN, {**TOKENS, "out_hidden_size": 64, "projector_hidden_size": 16}),
}
"""What differs in the text and in the vision configuration, and what stands beside them."""


def build(family: str) -> PreTrainedModel:
    text, vision, rest = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(text_config={**TEXT, **text}, vision_config=vision, **rest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_is_served_exactly(family: str) -> None:
    model, request = build(family), {**helpers.batch(helpers.FOUR), "max_new_tokens": 24}
    reference = helpers.plain(model, **request)
    made = helpers.speculate(model, helpers.oracle(reference), trees.BestFirst(10, branch=2, depth=4), **request)
    helpers.assert_equal(made, reference)


def test_an_image_is_refused() -> None:
    model = build("Llava")
    ids = torch.tensor([[5, 95, 95, 95, 95, 6]])
    with pytest.raises(UnsupportedError, match=r"mm_encoder_outputs= is handed .* Use model\.generate for this call"):
        SpeculativeGenerator(model).generate(ids, pixel_values=torch.zeros(1, 3, 28, 28).double(), max_new_tokens=4)


def test_masks_from_the_types_of_tokens_are_refused() -> None:
    seen = {"model_type": "siglip_vision_model", **PATCHES}
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"}, vision_config=seen, image_token_index=95, projection_dim=64
    )
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    with pytest.raises(UnsupportedError, match="builds its attention mask from the types of tokens"):
        support.check_model(model)
