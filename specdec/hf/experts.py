"""Experts of a compiled round: `ops.routed_experts` in place of a module that computes the same.

Transformers sorts rows by expert, gathers them, multiplies them in groups, and scatters the results: a dozen kernels,
and products that are made for many rows. A verify pass has few.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from specdec import ops
from specdec.hf.skinny import GATES

OPERATOR = "specdec::routed_experts"
MOST_ROWS = 64
"""Rows up to which the op runs; more are left to the module. On an H200 `grouped_mm` is faster at 128."""

FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""How transformers says that experts are what the op computes."""


class RoutedExperts(nn.Module):
    """Stands where the experts of a layer stood, and shares their weights."""

    def __init__(self, experts: nn.Module, activation: ops.GateActivation) -> None:
        """Copies nothing."""
        super().__init__()
        register_operator()
        self.experts, self.activation = experts, activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the experts it stands for."""
        theirs: Any = self.experts
        if hidden_states.shape[0] > MOST_ROWS:
            many: Tensor = theirs(hidden_states, top_k_index, top_k_weights)
            return many
        weights = theirs.gate_up_proj, theirs.down_proj
        few: Tensor = torch.ops.specdec.routed_experts(
            hidden_states, top_k_index, top_k_weights, *weights, self.activation
        )
        return few


def replaced(module: nn.Module) -> RoutedExperts | None:
    """What can stand for a module of experts, or None if it is no such module or computes something else.

    Served are experts that transformers dispatches to `grouped_mm` or `batched_mm`, as long as they have gate and up
    projection in one matrix, no biases, the usual gate, an activation that the op knows, and no hooks; on a GPU, where
    its kernel runs.

    Example:
        >>> from specdec.hf.experts import replaced
        >>> from specdec.testing import tiny_model
        >>> model = tiny_model("qwen3_moe")
        >>> model.set_experts_implementation("grouped_mm")
        >>> mlp = model.model.layers[0].mlp
        >>> replaced(mlp.experts), replaced(mlp)
        (RoutedExperts(
          (experts): Qwen3MoeExperts(
            (act_fn): SiLUActivation()
          )
        ), None)
    """
    experts: Any = module
    kind: Any = type(module)
    theirs = getattr(kind.forward, "__globals__", None) is vars(moe)
    if not theirs or any(getattr(module, name, None) != FLAGS[name] for name in FLAGS):
        return None
    run = moe.ALL_EXPERTS_FUNCTIONS.get(experts.config._experts_implementation, None)
    usual = run in (moe.grouped_mm_experts_forward, moe.batched_mm_experts_forward)
    hooked = module._forward_hooks or module._forward_pre_hooks or {"forward", "_apply_gate"} & vars(module).keys()
    activation = GATES.get(type(experts.act_fn))
    if not usual or hooked or kind._apply_gate is not moe._default_apply_gate or activation is None:
        return None
    weights = dict(module.named_parameters())
    if weights.keys() != {"gate_up_proj", "down_proj"} or not all(map(_plain, weights.values())):
        return None
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    kinds = {(weight.dtype, weight.device) for weight in weights.values()}
    fits = gate_up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])
    served = down.device.type != "cuda" or ops.available("routed_experts", down.device)[0]
    return RoutedExperts(module, activation) if len(kinds) == 1 and fits and served else None


def _plain(weight: Tensor) -> bool:
    """Whether a weight is numbers, and nothing that stands for them."""
    usual = type(weight) is nn.Parameter and weight.dim() == 3 and weight.device.type != "meta"
    return usual and weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes the op an operator that `torch.compile` leaves alone."""

    def experts(
        hidden: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: ops.GateActivation
    ) -> Tensor:
        return ops.routed_experts(hidden, chosen, weights, gate_up, down, activation=activation)

    def like_rows(hidden: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001 - the operator's
        return hidden.new_empty(hidden.shape)

    schema = "(Tensor hidden, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, str activation) -> Tensor"
    torch.library.custom_op(OPERATOR, experts, mutates_args=(), schema=schema).register_fake(like_rows)
