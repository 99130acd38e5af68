"""On GPUs: target and draft model on different devices, and one model spread over several (field log, F8)."""

import copy

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees
from specdec.drafters import ModelDrafter
from specdec.protocols import TreeBuilder
from tests import helpers
from tests.hf.texts import ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SHAPES: list[TreeBuilder] = [trees.Chain(4), trees.BestFirst(8, branch=3, depth=3), trees.Sampled((6, 1))]


def on(place: str, family: str) -> PreTrainedModel:
    """The tiny model on a device; `split` puts every other layer on the CPU, or on a second GPU if there is one."""
    model = copy.deepcopy(helpers.model(family))
    if place != "split":
        return model.to(place)
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    layers = {f"model.layers.{index}": [0, other][index % 2] for index in range(model.config.num_hidden_layers)}
    rest = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb"], 0)
    return dispatch_model(model, {**layers, **rest, "lm_head": other}, main_device=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("tree", SHAPES, ids=repr)
@pytest.mark.parametrize(
    ("target", "draft"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu"), ("split", "cuda"), ("cuda", "split")]
)
def test_f8_devices_of_target_and_draft_are_independent(family, tree, target, draft):
    """Index and device errors: every buffer must be made on the device of the tensor it indexes."""
    model = on(target, family)
    device = "cpu" if target == "cpu" else "cuda"
    request = {**helpers.batch(ROWS), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    reference = helpers.plain(helpers.model(family), **request)
    request.update({name: request[name].to(device) for name in ("input_ids", "attention_mask")})
    generator = SpeculativeGenerator(model, ModelDrafter(on(draft, family)), tree)
    output = generator.generate(**request)
    assert output.device.type == device
    assert output.tolist() == reference.tolist()
    assert generator.stats.accepted > (0 if tree.sampled else 10)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_on_the_cpu_for_a_model_on_the_gpu(family):
    """Plain generate moves what its forward needs; so must we."""
    request = {**helpers.batch(ROWS), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    reference = helpers.plain(helpers.model(family), **request)
    output = SpeculativeGenerator(on("cuda", family), tree=trees.Chain(3)).generate(**request)
    assert output.tolist() == reference.tolist()
