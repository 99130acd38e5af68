"""Models that something else has wrapped: accelerate dispatched or offloaded them, torch compiled them (log: E8, F8).

Each must give what the bare model gives, as target and as draft model.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees
from specdec.drafters import ModelDrafter
from specdec.errors import UnsupportedError
from specdec.testing import OracleDrafter
from tests import helpers
from tests.hf.texts import ROWS

TREE = trees.Fixed([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
REQUEST: dict[str, Any] = {**helpers.batch(ROWS), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def generate(model: Any, drafter: Any = None, **options: Any) -> list[list[int]]:
    expected = helpers.plain(helpers.model(), **REQUEST)
    drafter = drafter or OracleDrafter(expected, [[3, 0, 1, None], [1, 3], [None, 2, 0], [3, 1]])
    return SpeculativeGenerator(model, drafter, TREE).generate(**{**REQUEST, **options}).tolist()


def expected() -> list[list[int]]:
    return helpers.plain(helpers.model(), **REQUEST).tolist()


def offloaded(kind: str, folder: Path) -> PreTrainedModel:
    """The tiny model with weights that are loaded where and when they are used."""
    model, here = copy.deepcopy(helpers.model()), torch.device("cpu")
    if kind == "cpu":
        return cpu_offload(model, execution_device=here)
    if kind == "disk":
        disk_offload(model, folder, execution_device=here)
        return model
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict(zip(names, {"dispatched": ["cpu", "disk"] * 3, "split": ["disk", "cpu"] * 3}[kind], strict=True))
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["cpu", "disk", "dispatched", "split"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_f8_offloaded_and_dispatched_models_give_the_same_text(kind, role, tmp_path):
    """Buffers made on one fixed device, or on the device of a weight that is elsewhere just now."""
    model = offloaded(kind, tmp_path)
    if role == "target":
        assert generate(model) == expected()
        return
    rounds = [0, 0]
    for index, draft in enumerate((helpers.model(), model)):
        generator = SpeculativeGenerator(helpers.model(), ModelDrafter(draft), TREE)
        assert generator.generate(**REQUEST).tolist() == expected()
        rounds[index] = generator.stats.target_passes
    assert rounds[0] == rounds[1], "the same weights draft the same"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Graphs that torch has compiled. Annotations are not checked meanwhile: the compiler's tensors have no shapes."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def small() -> PreTrainedModel:
    """One layer: tracing it takes seconds."""
    return helpers.model("llama", num_hidden_layers=1)


def compiled(kind: str, graphs: list[str]) -> Any:
    """A compiled model whose backend only counts."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(f"{len(graph.graph.nodes)} nodes, {len(inputs)} inputs")
        return graph.forward

    model = copy.deepcopy(small())
    if kind == "module":
        return torch.compile(model, backend=backend)
    model.forward = torch.compile(model.forward, backend=backend)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["module", "forward"])
def test_e8_a_compiled_model_gives_the_same_text_from_few_graphs(kind, graphs):
    """Compiled state locked to the first prompt, or a new graph in every round."""
    model, found = compiled(kind, graphs), []
    long, short = [[8, 9, 10, 11, 12, 13, 14], [3, 4]], [[21, 22, 23]]
    for rows in (long, short, long):
        request = {**REQUEST, **helpers.batch(rows), "max_new_tokens": 24}
        reference = helpers.plain(small(), **request)
        drafter = OracleDrafter(reference, [[2, 0, 3], [None, 3, 1]][: len(rows)])
        run = helpers.speculate(model, drafter, TREE, **request)
        assert run.output.tolist() == reference.tolist()
        found.append(len(graphs))
    assert 0 < found[0] < found[1] <= 16, "shapes must become symbols after a few rounds"
    assert found[2] == found[1], "the same call again compiles nothing"


@pytest.mark.filterwarnings("ignore")
def test_e8_a_compiled_draft_model_is_run_compiled(graphs):
    assert generate(helpers.model(), ModelDrafter(compiled("module", graphs))) == expected()
    assert 0 < len(graphs) <= 8


def test_a_compiled_model_that_cannot_be_served_is_refused_by_its_own_name():
    """The wrapper's forward takes anything; what counts is the model inside."""

    class Wrapped(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    model = copy.deepcopy(helpers.model())
    model.forward = Wrapped().forward
    with pytest.raises(UnsupportedError, match="the forward of LlamaForCausalLM does not take input_ids"):
        SpeculativeGenerator(torch.compile(model, backend="eager"))


class LowRank(torch.nn.Module):
    """A linear layer with an adapter beside it, as PEFT puts one in place."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(0)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features, generator=generator, dtype=torch.float64))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2, generator=generator, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


def test_a_model_with_adapters_put_in_place_is_served():
    model = copy.deepcopy(helpers.model())
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    reference = helpers.plain(model, **REQUEST)
    assert reference.tolist() != expected()
    drafter = OracleDrafter(reference, [3, 0, 1, None])
    assert SpeculativeGenerator(model, drafter, TREE).generate(**REQUEST).tolist() == reference.tolist()
    assert model.training is False
    assert all(weight.grad is None for weight in model.parameters())
