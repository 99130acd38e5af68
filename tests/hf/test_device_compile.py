"""Device rounds of compiled models: attention is one operator to the compiler, and nothing breaks the graph."""

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from transformers import AttentionInterface

from specdec.errors import SpecdecError
from specdec.hf import (
    attention,
    experts,
    fixed_cache,
    fixed_states,
    fusion,
    merged,
    norms,
    recurrent,
    round_context,
    skinny,
)
from specdec.hf.fixed_cache import FixedCache
from specdec.hf.round_program import AHEAD
from specdec.hf.target import ModelTarget
from specdec.testing import tiny_model
from tests import helpers
from tests.hf.device_runs import generator, oracle, serve
from tests.unchecked import unchecked

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
NEW = 24
SUMS = {"llama": 2, "gemma3": 0, "qwen3_5": 2, "gemma4_moe": 0, "qwen3_moe": 1}
"""Sums of a layer that a product in front of them takes over; Gemma's stand behind norms, experts are another op."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, and no checks of annotations in what the compiler sees."""
    unchecked(monkeypatch, experts, fixed_cache, fixed_states, merged, norms, recurrent, round_context, skinny)
    unchecked(monkeypatch, attention)
    monkeypatch.setattr(fusion, "lowered", lambda module, inputs: module.forward)  # noqa: ARG005 - Inductor's
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, inspect.unwrap(attention.attend))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def request(prompts: str) -> dict[str, Any]:
    return {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW}


@pytest.mark.parametrize(("family", "prompts"), [("llama", "ragged"), ("gemma3", "one"), ("qwen3_5", "ragged")])
def test_a_model_that_was_compiled(family: str, prompts: str) -> None:
    target = tiny_model(family, seed=helpers.SEEDS.get(family, 7))
    compiled: Any = torch.compile(target, backend="eager", dynamic=False)
    reference = helpers.text(prompts, NEW, family)
    served = generator(compiled)
    helpers.assert_equal(serve(served, oracle(reference), **request(prompts)), reference)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    helpers.assert_equal(serve(served, **request(prompts)), reference, all_kinds=False)
    assert counters["stats"]["unique_graphs"] == 1, "the next request was compiled again"


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("family", "prompts"),
    [("llama", "ragged"), ("gemma3", "one"), ("qwen3_5", "ragged"), ("gemma4_moe", "one"), ("qwen3_moe", "ragged")],
)
def test_a_generator_that_compiles(family: str, prompts: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections are merged, experts run by an op: sums in another order, so only the tokens are the same."""
    monkeypatch.setattr(skinny, "serves", lambda weight: few and weight.dim() == 2)
    monkeypatch.setattr(norms, "serves", lambda weight: few and weight.dim() == 1)
    joined: list[int] = []
    add = inspect.unwrap(fusion.add_residuals)
    monkeypatch.setattr(fusion, "add_residuals", lambda module: joined.append(add(module)))
    target = tiny_model(family, seed=helpers.SEEDS.get(family, 7))
    if family.endswith("moe"):
        target.set_experts_implementation("batched_mm")
    reference = helpers.text(prompts, NEW, family)
    served = generator(target)
    assert served.compile() is served
    helpers.assert_equal(serve(served, oracle(reference), **request(prompts)), reference)
    assert sum(joined) == (SUMS[family] * len(target.model.layers) if few else 0)
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    assert served.model is target
    assert helpers.plain(target, **request(prompts)).tolist() == reference.tolist()


class Promised(fx.Interpreter):
    """Runs a graph; what an operator of ours returns must lie in memory as its fake said, or Inductor's code raises."""

    seen: ClassVar[set[str]] = set()

    def run_node(self, node: fx.Node) -> Any:
        found = super().run_node(node)
        if "specdec" in str(node.target):
            assert found.stride() == node.meta["example_value"].stride(), node
            Promised.seen.add(str(node.target).split(".")[1])
        return found


@pytest.mark.parametrize(("family", "prompts"), [("qwen3_5", "ragged"), ("qwen3_moe", "one")])
def test_what_operators_return_lies_as_the_compiler_was_told(
    family: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "lowered", lambda module, inputs: Promised(module).run)  # noqa: ARG005 - Inductor's
    monkeypatch.setattr(skinny, "serves", lambda weight: weight.dim() == 2)
    monkeypatch.setattr(Promised, "seen", set())
    target = tiny_model(family, seed=helpers.SEEDS.get(family, 7))
    if family.endswith("moe"):
        target.set_experts_implementation("batched_mm")
    serve(generator(target).compile(), **request(prompts))
    own = {"device_convolution", "device_rule"} if family == "qwen3_5" else {"routed_experts"}
    assert Promised.seen >= {"device_attention", "skinny_linear"} | own


def test_weights_that_change_under_a_compiled_generator() -> None:
    """Merged projections are copies of the weights."""
    target = tiny_model("llama", seed=7)
    served = generator(target).compile()
    before = serve(served, **request("one")).output.tolist()
    with torch.no_grad():
        target.model.layers[0].self_attn.q_proj.weight.mul_(-3)
    after = helpers.plain(target, **request("one")).tolist()
    assert serve(served, **request("one")).output.tolist() == after != before


def test_no_more_rounds_are_launched_than_have_a_place_for_their_record() -> None:
    served = generator(helpers.model())
    rounds = served.rounds(**request("one"), do_sample=False)
    for _ in range(2):
        next(rounds)
    program: Any = served._programs._program
    while program.pending < AHEAD:
        program.launch()
    with pytest.raises(SpecdecError, match=f"{AHEAD} rounds are on their way"):
        program.launch()


def test_attention_without_a_tree_is_an_error() -> None:
    target = ModelTarget(helpers.model(), torch.tensor(helpers.ONE))
    target.prefill()
    context = round_context.RoundContext(
        FixedCache(target.cache, width=4, capacity=64, starts=None), helpers.model(), "reference"
    )
    rows = torch.zeros(1, 4, 4, 12)
    with pytest.raises(SpecdecError, match="before it has a tree"):
        context.attend(0, rows, rows[:, :2], rows[:, :2], None, None, None)
