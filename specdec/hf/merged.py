"""A twin of a model in which projections of the same input are one matrix product, and products are made for few rows.

A verify pass over few rows reads every weight once and does little else, and a small matrix product reads its weights
at a fraction of the speed of a large one. The queries', keys' and values' projections have the same input, and so have
the gate and the up projection of an MLP, and all projections of a gated delta layer but the last. The twin shares
every module and weight with the model, but for these: their weights are copied into one matrix each. Where its kernel
runs, `ops.skinny_linear` multiplies (see `skinny`). Experts are run by `ops.routed_experts` where it computes the same
(see `experts`), with the weights that they have, and norms of whole states by `ops.rms_norm` (see `norms`). Whatever
stands in for a module has its attributes too. The model itself stays as it is.
"""

import copy
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from specdec.hf import experts, norms, skinny

Groups: TypeAlias = tuple[tuple[str, ...], ...]
StandIn = TypeVar("StandIn", bound=nn.Module)

GROUPS: Groups = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of projections that are called one after the other, in this order, with the same input; longer groups first."""


class Merged:
    """One matrix product for several projections; its result waits for those that come after the first."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        """Copies the weights into one matrix."""
        self.sizes = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias: Any = linears[0].bias
        both = None if bias is None else torch.cat([linear.bias.detach() for linear in linears])
        self.product = skinny.SkinnyLinear(weight, both)
        self.given: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, index: int, given: Tensor) -> Tensor:
        """The result of one of the projections."""
        if self.given is not given:
            self.given = given
            self.parts = self.product(given).split(self.sizes, -1)
        found = self.parts[index]
        if index == len(self.sizes) - 1:
            self.given, self.parts = None, ()
        return found


class Projection(nn.Module):
    """Stands where one of the merged projections stood."""

    def __init__(self, merged: Merged, index: int) -> None:
        """A part of `merged`."""
        super().__init__()
        self.merged, self.index = merged, index

    def forward(self, given: Tensor) -> Tensor:
        """As the projection it stands for."""
        return self.merged.part(self.index, given)


def merged_twin(model: nn.Module, groups: Groups = GROUPS) -> tuple[Any, int]:
    """The twin of a model, and how many projections it merged.

    Only plain `nn.Linear` modules are merged that nothing hooks into and that agree in dtype, device and bias.

    Args:
        model: the model, or a part of one.
        groups: names of projections to merge, as `GROUPS`.

    Example:
        >>> from specdec.hf.merged import merged_twin
        >>> from specdec.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> twin, count = merged_twin(model)
        >>> count, type(model.model.layers[0].mlp.up_proj).__name__, twin.lm_head is model.lm_head
        (10, 'Linear', True)
    """
    replacement = _replacement(model)
    if replacement is not None:
        return standing_for(model, replacement), 2 * isinstance(replacement, skinny.SkinnyMLP)
    children = {name: merged_twin(child, groups) for name, child in model._modules.items() if child is not None}
    found = _group(model, groups)
    if not found and all(twin is model._modules[name] for name, (twin, _) in children.items()):
        return model, 0
    twin, count = copy.copy(model), sum(inner for _, inner in children.values())
    twin._modules = {**model._modules, **{name: child for name, (child, _) in children.items()}}
    for names in found:
        linears: list[Any] = [getattr(model, name) for name in names]
        merged = Merged(linears)
        parts = (standing_for(linear, Projection(merged, index)) for index, linear in enumerate(linears))
        twin._modules.update(zip(names, parts, strict=True))
        count += len(names)
    return twin, count


def standing_for(module: nn.Module, stand_in: StandIn) -> StandIn:
    """Gives a stand-in what the module has and it lacks: code around it may read that, as in `norm.weight.dtype`.

    Example:
        >>> from torch import nn
        >>> from specdec.hf.merged import standing_for
        >>> norm = nn.RMSNorm(8, eps=1e-5)
        >>> other = standing_for(norm, nn.Identity())
        >>> other.weight is norm.weight, other.eps
        (True, 1e-05)
    """
    has = vars(module)
    for name, value in (has | has["_parameters"] | has["_buffers"] | has["_modules"]).items():
        if not hasattr(stand_in, name):
            vars(stand_in)[name] = value  # not registered: the stand-in does not compute with it
    return stand_in


def _replacement(module: nn.Module) -> nn.Module | None:
    """What is made for few rows and stands in the twin for a module as a whole."""
    if not _plain(module) or not all(map(_plain, module.children())):
        return None
    if type(module) is nn.Linear and skinny.serves(module.weight):
        return skinny.SkinnyLinear(module.weight, module.bias)
    return experts.replaced(module) or skinny.mlp(module) or norms.replaced(module)


def _group(module: nn.Module, groups: Groups) -> list[tuple[str, ...]]:
    """Those of the groups that a module has and that can be merged."""
    found: list[tuple[str, ...]] = []
    for names in groups:
        if any(name in group for group in found for name in names):
            continue
        linears: list[Any] = [module._modules.get(name) for name in names]
        if all(type(linear) is nn.Linear and _plain(linear) for linear in linears):
            kinds = {(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in linears}
            if len(kinds) == 1:
                found.append(names)
    return found


def _plain(module: nn.Module) -> bool:
    """Whether a call of a module is what its class says and nothing else."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    real = all(weight.device.type != "meta" for weight in module.parameters(recurse=False))
    return not hooked and not hasattr(module, "parametrizations") and real
