"""Rotary embeddings of drafters are those of transformers, form by form."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.checkpoints.layers import read_rope
from specdec.drafters.rope import Rope, rotate
from specdec.errors import UnsupportedError

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_scaled": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
}


def config_of(form: str, **extra: Any) -> LlamaConfig:
    block = {"rope_theta": 5e5, "rope_type": "default", **FORMS[form], **extra}
    return LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256, rope_parameters=block
    )


@pytest.mark.parametrize("form", FORMS)
def test_frequencies_are_those_of_transformers(form: str) -> None:
    config = config_of(form)
    rope = read_rope(Keys({"": config.to_dict()}), 32)
    found, factor = rope.frequencies()
    if form == "default":
        expected, scale = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[FORMS[form]["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("form", ["default", "llama3"])
def test_heads_are_turned_as_in_transformers(form: str) -> None:
    config, heads, positions = config_of(form), torch.randn(2, 3, 5, 32), torch.randint(0, 200, (2, 5))
    tables = read_rope(Keys({"": config.to_dict()}), 32).tables(positions, heads.dtype)
    expected, _ = apply_rotary_pos_emb(heads, heads, *LlamaRotaryEmbedding(config)(heads, positions))
    torch.testing.assert_close(rotate(heads, tables), expected)
    assert not torch.allclose(rotate(heads, tables), heads)


def test_a_part_of_a_head_stays() -> None:
    """A wrong `partial_rotary_factor` ruins acceptance and raises nothing anywhere."""
    rope = read_rope(Keys({"": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}), 32)
    heads = torch.randn(1, 2, 4, 32)
    turned = rotate(heads, rope.tables(torch.tensor([[3, 4, 5, 6]]), heads.dtype))
    assert rope.dim == 8
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    torch.testing.assert_close(
        turned[..., :8], rotate(heads[..., :8], Rope(1e4, 8).tables(torch.tensor([[3, 4, 5, 6]]), heads.dtype))
    )


def test_the_block_of_rope_parameters_wins_over_old_keys() -> None:
    found = read_rope(
        Keys({"": {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}}), 8
    )
    assert found.theta == 7.0
    old = read_rope(Keys({"": {"rope_theta": 2.0, "rope_scaling": {"type": "linear", "factor": 3.0}}}), 8)
    assert (old.kind, dict(old.options)["factor"]) == ("linear", 3.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'rope_theta'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, "'longrope' is not known"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.1}, "must be even"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_rope(Keys({"": config}), 32)
