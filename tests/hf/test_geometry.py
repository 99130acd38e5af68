"""Positions on several axes: text inside a model that also reads images, and axes that differ from the text's."""

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdec import trees
from specdec.errors import UnsupportedError
from specdec.hf import geometry
from specdec.hf.target import ModelTarget
from tests import helpers
from tests.hf.device_runs import generator, oracle, serve
from tests.hf.hybrid import FLOAT64

NEW = 20
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}


@functools.cache
def multimodal(family: str) -> PreTrainedModel:
    """A tiny model with a vision part, which text does not reach; weights as those of the tiny families."""
    text = helpers.model(family).config.to_dict() | {"rope_parameters": {**ROPE, "mrope_interleaved": True}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
    made.set_experts_implementation("eager")
    found: PreTrainedModel = made.double()
    return found


def run(family: str, prompts: str, **request: Any) -> tuple[helpers.Run, Tensor]:
    target = multimodal(family)
    asked = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, **request}
    reference = helpers.plain(target, **asked)
    tree = trees.Fixed([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)])
    return helpers.speculate(target, helpers.oracle(reference, rank=1), tree, **asked), reference


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_text_in_a_model_that_also_reads_images(family, prompts):
    """Its prompts have positions on four axes that agree."""
    with helpers.forwards(multimodal(family)) as calls:
        made, reference = run(family, prompts)
    helpers.assert_equal(made, reference)
    assert calls[0]["position_ids"].shape[0] == geometry.AXES


def apart(prompts: str, shifts: list[list[int]]) -> Tensor:
    """Positions as behind an image: the other axes stand still for a while, or jump."""
    batch = helpers.batch(helpers.PROMPTS[prompts])
    text = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    half = torch.arange(text.shape[1]) >= text.shape[1] // 2
    axes = torch.tensor(shifts)[:, : len(text), None] * half
    return torch.cat([text[None], text[None] + axes])


SHIFTS = {
    "one": [[-2], [-1], [3]],
    "ragged": [[-2, 0, 5, 0], [-1, 0, 4, 0], [3, 0, 4, 0]],
}
"""Per axis, what is added to the second half of each row."""


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_axes_that_differ_from_the_texts(prompts):
    """Each goes on from where its prompt ends, in each row, as plain generate has it."""
    positions = apart(prompts, SHIFTS[prompts])
    made, reference = run("qwen3_5", prompts, position_ids=positions)
    helpers.assert_equal(made, reference)
    assert reference.tolist() != run("qwen3_5", prompts)[1].tolist(), "the axes make no difference"


def test_every_node_stands_where_plain_decoding_puts_it():
    """The position ids of a tree, axis by axis: those after the prompt, plus the depth."""
    positions = apart("ragged", SHIFTS["ragged"])
    with helpers.forwards(multimodal("qwen3_5")) as calls:
        made, _ = run("qwen3_5", "ragged", position_ids=positions)
    tree_calls = [call["position_ids"] for call in calls[-len(made.rounds) + 1 :]]
    lengths = positions[:, :, -1:] + 1
    for round, found in zip(made.rounds[1:], tree_calls, strict=True):
        depths = trees.topology.ancestor_matrix(round.tree.parents).sum(-1) - 1
        assert torch.equal(found, lengths + depths)
        lengths = lengths + round.num_committed[None, :, None]


@pytest.mark.parametrize("mistake", ["no axes", "axes of the first row"])
def test_wrong_axes_are_noticed(mistake, monkeypatch):
    def wrong(self: geometry.PromptGeometry, text: Tensor) -> Tensor:
        assert self.axes is not None
        return text if mistake == "no axes" else text + self.axes[:, :1, None]

    monkeypatch.setattr(geometry.PromptGeometry, "positions", wrong)
    made, reference = run("qwen3_5", "ragged", position_ids=apart("ragged", SHIFTS["ragged"]))
    assert made.output.tolist() != reference.tolist()


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_a_returned_cache_continues(prompts):
    """Transformers then gives one axis of positions for all."""
    target, request = multimodal("qwen3_5"), helpers.batch(helpers.PROMPTS[prompts])
    reference = helpers.plain(target, **request, max_new_tokens=2 * NEW)
    asked = {**request, "max_new_tokens": NEW, "return_dict_in_generate": True}
    first = helpers.speculate(target, helpers.oracle(reference), trees.Chain(4), **asked).output
    mask = torch.cat([request["attention_mask"], torch.ones(len(reference), NEW, dtype=torch.int64)], 1)
    more = {"input_ids": first.sequences, "attention_mask": mask, "max_new_tokens": NEW}
    with helpers.forwards(target) as calls:
        made = helpers.speculate(target, helpers.oracle(reference), trees.Chain(4), **more, cache=first.cache)
    assert calls[0]["position_ids"].shape[0] == 1
    assert made.output.tolist() == reference.tolist()
    assert helpers.plain(target, **more, cache=first.cache).tolist() == reference.tolist()


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_device_rounds_serve_axes_that_agree_and_refuse_others(prompts):
    target, request = multimodal("qwen3_5"), {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW}
    reference = helpers.plain(target, **request)
    helpers.assert_equal(serve(target, oracle(reference), **request), reference)
    asked = {**request, "position_ids": apart(prompts, SHIFTS[prompts]), "do_sample": False, "pad_token_id": 0}
    with (
        helpers.forwards(multimodal("qwen3_5")) as calls,
        pytest.raises(UnsupportedError, match="several axes that differ"),
    ):
        generator(multimodal("qwen3_5")).generate(**asked)
    assert calls == []


@pytest.mark.parametrize("shape", [(3, 1, 9), (5, 1, 9), (9,), (2, 4, 1, 9)])
def test_positions_of_another_shape_are_refused_before_any_forward(shape):
    asked = {"model_kwargs": {"position_ids": torch.zeros(shape, dtype=torch.int64)}, "cache": FLOAT64}
    with (
        helpers.forwards(multimodal("qwen3_5")) as calls,
        pytest.raises(UnsupportedError, match=r"expected \(batch, seq\)"),
    ):
        ModelTarget(multimodal("qwen3_5"), torch.tensor(helpers.ONE), **asked)
    assert calls == []
