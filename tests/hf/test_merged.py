"""A twin with merged projections computes what the model does, and leaves the model alone."""

import contextlib

import pytest
import torch
from torch import nn

from specdec.drafters._layers import MLP
from specdec.hf import merged, norms, skinny
from specdec.hf.merged import Merged, Projection, merged_twin
from specdec.testing import FAMILIES, tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])
COUNTS = {"llama": 10, "qwen2": 10, "gemma3": 20, "gemma4_shared": None, "gpt2": 0, "phi3": 0}
"""Merged projections per family: qwen2's have biases, others none; gpt2 and phi3 come with projections merged."""


@pytest.mark.parametrize("family", COUNTS)
def test_a_twin_gives_the_same_logits(family: str) -> None:
    model = tiny_model(family)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    modules = list(model.modules())
    twin, count = merged_twin(model)
    torch.testing.assert_close(twin(IDS).logits, model(IDS).logits, rtol=0, atol=1e-12)
    assert COUNTS[family] in (None, count)
    assert (twin is model) == (count == 0)
    assert sum(isinstance(module, Projection) for module in twin.modules()) == count
    # The model has the modules and weights that it had.
    assert all(mine is other for mine, other in zip(model.modules(), modules, strict=True))
    after = model.state_dict()
    assert {name: value.data_ptr() for name, value in after.items()} == {name: at for name, (at, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())


def test_what_is_more_than_a_product_is_not_merged() -> None:
    """A hook, an adapter in place of a projection, a forward of its own."""

    class Adapted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = tiny_model("llama")
    plain = merged_twin(model)[1]
    first, second = (layer.mlp for layer in model.model.layers)
    first.up_proj.register_forward_hook(lambda *_: None)
    adapted = Adapted(48, 64, bias=False, dtype=torch.float64)
    second.gate_proj = adapted
    own = model.model.layers[0].self_attn.q_proj
    own.forward = own.forward
    twin, count = merged_twin(model)
    assert count == plain - 2 - 2 - 3
    assert twin.model.layers[1].mlp.gate_proj is adapted
    torch.testing.assert_close(twin(IDS).logits, model(IDS).logits, rtol=0, atol=1e-12)


def test_each_input_has_its_own_product() -> None:
    """Projections that are called with different inputs, out of order, or twice are still their own."""
    torch.manual_seed(0)
    linears = [nn.Linear(4, size, dtype=torch.float64) for size in (3, 2)]
    first, second = Projection(merged := Merged(linears), 0), Projection(merged, 1)
    one, other = torch.randn(2, 5, 4, dtype=torch.float64)
    for projection, linear, given in (
        (first, linears[0], one),
        (second, linears[1], other),
        (second, linears[1], one),
        (first, linears[0], one),
        (first, linears[0], one),
        (second, linears[1], one),
    ):
        torch.testing.assert_close(projection(given), linear(given), rtol=0, atol=1e-12)
    assert merged.given is None, "an input is kept alive"


def _skinny(twin: nn.Module) -> dict[str, int]:
    kinds = [type(module).__name__ for module in twin.modules()]
    return {kind: kinds.count(kind) for kind in ("SkinnyMLP", "SkinnyLinear", "Linear")}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma4_moe", "gpt2"])
def test_products_for_few_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel serves, every product of the twin is made for few rows; more rows go to torch."""
    monkeypatch.setattr(skinny, "serves", lambda weight: weight.dim() == 2)
    model = tiny_model(family)
    twin = merged_twin(model)[0]
    found = _skinny(twin)
    assert found["Linear"] == 0
    assert found["SkinnyMLP"] == (0 if family == "gpt2" else len(model.model.layers))
    for ids in (IDS, IDS.repeat(1, 20)):
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0, atol=1e-12)
    shared = {weight.data_ptr() for weight in model.parameters()}
    heads = [module for module in twin.modules() if isinstance(module, skinny.SkinnyLinear)]
    assert heads[-1].weight.data_ptr() in shared, "the head was copied"


def test_an_mlp_is_told_by_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names do not make an MLP: one that swaps the gate, asks for more, or knows another activation stays as it is."""
    monkeypatch.setattr(skinny, "serves", lambda weight: weight.dim() == 2)

    class Swapped(type(tiny_model("llama").model.layers[0].mlp)):  # type: ignore[misc]  # a base known when it runs
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
            return output

    class Asking(Swapped):
        def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # as it is meant
            return super().forward(x) + more

    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    assert skinny.mlp(mlp) is not None
    for kind in (Swapped, Asking):
        mlp.__class__ = kind
        assert skinny.mlp(mlp) is None
        assert _skinny(merged_twin(model)[0])["SkinnyMLP"] == 1
    drafters = MLP(48, 64).double()
    assert skinny.mlp(drafters) is not None, "it has no module for its activation"
    other = model.model.layers[1].mlp
    other.act_fn = nn.Tanh()
    assert skinny.mlp(other) is None


def _read_by_others(model: nn.Module) -> list[str]:
    """What modules have and what stands for them in a twin does not."""
    twin, missing = merged_twin(model)[0], []
    for path, module in model.named_modules():
        with contextlib.suppress(AttributeError):  # part of what is replaced as a whole
            stand_in = twin.get_submodule(path)
            names = [*vars(module), *(name for name, _ in module.named_parameters(recurse=False))]
            missing += [f"{path}.{name}" for name in names if not hasattr(stand_in, name)]
    return missing


@pytest.mark.parametrize("family", FAMILIES)
def test_code_around_a_module_may_read_what_it_has(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards read `norm.weight.dtype`, `head.out_features` and the like; what stands there has them too."""
    monkeypatch.setattr(skinny, "serves", lambda weight: weight.dim() == 2)
    monkeypatch.setattr(norms, "serves", lambda weight: weight.dim() == 1)
    model = tiny_model(family)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    assert _read_by_others(model) == []
    with torch.no_grad():
        # In float64 but for norms and gates that models compute in float32, whose last bit is 1e-7 of a logit near 10.
        torch.testing.assert_close(merged_twin(model)[0](IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    with monkeypatch.context() as wrong:
        wrong.setattr(merged, "standing_for", lambda _, stand_in: stand_in)
        assert _read_by_others(model), "a stand-in with attributes of its own alone went unnoticed"
