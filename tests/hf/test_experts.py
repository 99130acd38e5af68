"""Experts of a twin compute what the model's own do, with the same weights, and others are left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import moe

from specdec import ops
from specdec.hf import experts
from specdec.hf.experts import RoutedExperts, replaced
from specdec.hf.merged import merged_twin
from specdec.testing import tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 5, 6, 5, 7]])
LAYERS = {"mixtral": 2, "qwen3_moe": 2, "gemma4_moe": 4, "qwen3_next": 4, "kimi_linear": 3, "gpt_oss": 0, "llama": 0}
"""Layers whose experts are replaced; those of gpt_oss have biases and lie transposed."""


def model_of(family: str, implementation: str = "batched_mm") -> Any:
    model: Any = tiny_model(family, seed=7)
    if hasattr(model.config, "num_experts_per_tok") or hasattr(model.config, "top_k_experts"):
        model.set_experts_implementation(implementation)
    return model


def count(twin: nn.Module) -> int:
    return sum(isinstance(module, RoutedExperts) for module in twin.modules())


@pytest.mark.parametrize("family", LAYERS)
def test_a_twin_gives_the_same_logits(family: str) -> None:
    model = model_of(family)
    modules, weights = list(model.modules()), {parameter.data_ptr() for parameter in model.parameters()}
    twin = merged_twin(model)[0]
    assert count(twin) == LAYERS[family]
    torch.testing.assert_close(twin(IDS).logits, model(IDS).logits, rtol=0, atol=1e-12)
    assert {parameter.data_ptr() for parameter in twin.parameters()} <= weights, "weights were copied"
    assert all(mine is other for mine, other in zip(model.modules(), modules, strict=True))


def layer_of(implementation: str = "batched_mm") -> Any:
    return model_of("qwen3_moe", implementation).model.layers[0].mlp.experts


def routed(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 48).double(), torch.randint(0, 4, (rows, 2)), torch.rand(rows, 2).double()


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_moe"])
def test_it_is_the_op_that_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one is noticed."""
    model = model_of(family)
    twin, expected = merged_twin(model)[0], model(IDS).logits
    right = ops.routed_experts
    other = {"silu": "gelu_tanh", "gelu_tanh": "silu"}

    def wrong(*call: Any, activation: Any) -> torch.Tensor:
        return right(*call, activation=other[activation])

    monkeypatch.setattr(ops, "routed_experts", wrong)
    assert not torch.allclose(twin(IDS).logits, expected, rtol=0, atol=1e-3)


def test_many_rows_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    stand_in: Any = replaced(layer)
    monkeypatch.setattr(experts, "MOST_ROWS", 8)
    called: list[int] = []
    right = ops.routed_experts
    monkeypatch.setattr(
        ops, "routed_experts", lambda *call, **more: called.append(len(call[0])) or right(*call, **more)
    )
    for rows in (7, 8, 9):
        torch.testing.assert_close(stand_in(*routed(rows)), layer(*routed(rows)), rtol=0, atol=1e-12)
    assert called == [7, 8]


def owned(layer: Any) -> None:
    layer.forward = layer.forward


def subclassed(layer: Any) -> None:
    class Doubled(type(layer)):  # type: ignore[misc]  # a base known when it runs
        def forward(self, *given: Any) -> Any:
            return 2 * super().forward(*given)

    layer.__class__ = Doubled


def gated(layer: Any) -> None:
    class Clamped(type(layer)):  # type: ignore[misc]  # a base known when it runs
        def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
            return moe._default_apply_gate(self, both.clamp(-1, 1))

    layer.__class__ = Clamped


OTHERS: dict[str, Callable[[Any], object]] = {
    "a hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "a forward of its own": owned,
    "a subclass with another forward": subclassed,
    "a subclass with another gate": gated,
    "another activation": lambda layer: setattr(layer, "act_fn", nn.ReLU()),
    "experts on several devices": lambda layer: setattr(layer, "_is_expert_parallel", True),
    "biases": lambda layer: setattr(layer, "has_bias", True),
    "one by one": lambda layer: setattr(layer.config, "_experts_implementation", "eager"),
    "another implementation": lambda layer: setattr(layer.config, "_experts_implementation", "sonicmoe"),
    "weights not loaded": lambda layer: layer.to("meta"),
    "weights of two dtypes": lambda layer: setattr(layer, "down_proj", nn.Parameter(layer.down_proj.float())),
    "codes in place of weights": lambda layer: setattr(
        layer, "down_proj", nn.Parameter(layer.down_proj.to(torch.int8), requires_grad=False)
    ),
    "a part of the weights": lambda layer: setattr(layer, "down_proj", nn.Parameter(layer.down_proj[:, :3])),
    "an adapter": lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_stays(name: str) -> None:
    layer = layer_of()
    assert replaced(layer) is not None
    OTHERS[name](layer)
    assert replaced(layer) is None


def test_a_function_of_ones_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever registers another function under a name of transformers' wants it to run."""
    layer = layer_of("grouped_mm")
    assert replaced(layer) is not None
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", lambda *_: None)
    assert replaced(layer) is None


def test_the_operator_is_one_to_the_compiler() -> None:
    """Its shapes, its strides, and that it changes nothing."""
    replaced(layer_of())
    hidden, chosen, weights = routed(3)
    layer = layer_of()
    call = (hidden, chosen, weights, layer.gate_up_proj.detach(), layer.down_proj.detach(), "silu")
    torch.library.opcheck(torch.ops.specdec.routed_experts.default, call, test_utils=("test_schema", "test_faketensor"))
