"""Gated delta layers inside an unmodified model: their convolution and their rule run over a tree, the rest is theirs.

The layers of transformers call the convolution and the rule by names of their own module. While a forward of ours runs,
these names stand for functions that ask the forward's context first, and call the originals where it has no answer, as
for every other forward. What the functions need to know about the tree travels as a keyword argument of the forward.

Whether a layer does go by these names, and by nothing else, is tested on the layer itself before it is used.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.hf import compat
from specdec.hf.recurrent import RecurrentCache, RecurrentStates
from specdec.trees import topology

CONTEXT = "specdec_recurrent"
CONVOLUTION = "causal_conv1d_fn"
RULES = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
"""Names of the rule for several tokens and for one: of Gated DeltaNet, and of Kimi Delta Attention."""

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest error of a tree's outputs beside those of single steps, relative to the largest; 1e-3 in wider dtypes."""


class Context(Protocol):
    """What a forward brings for the layers that it runs; None stands for "as without it"."""

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor | None:
        """The convolution of `[batch, channels, rows]`."""

    def rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The rule's outputs `[batch, rows, heads, value_dim]`, and what the layer shall hand to its cache."""


def gated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The gated delta layers of a model, in order."""
    return [
        layer
        for layer in model.modules()
        if hasattr(layer, "conv1d") and hasattr(layer, "layer_idx") and _names(_module(layer))
    ]


def modules_of(layers: list[torch.nn.Module]) -> tuple[ModuleType, ...]:
    """The Python modules whose names the layers go by."""
    return tuple({id(module): module for module in map(_module, layers)}.values())


def _module(layer: torch.nn.Module) -> ModuleType:
    return sys.modules[type(layer).__module__]


def _names(module: ModuleType) -> tuple[str, ...]:
    """The names that the layers of a module go by; none if it has no such layers."""
    rules = next((names for names in RULES if all(hasattr(module, name) for name in names)), None)
    return (CONVOLUTION, *rules) if rules is not None and hasattr(module, CONVOLUTION) else ()


_lock = threading.Lock()
_users: dict[str, int] = {}
_originals: dict[str, dict[str, Callable[..., Any]]] = {}


@contextmanager
def running(modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """Lets functions of ours stand for those of the modules; the last of several users puts them back."""
    with _lock:
        for module in modules:
            if _users.get(module.__name__, 0) == 0:
                _put_in(module)
            _users[module.__name__] = _users.get(module.__name__, 0) + 1
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _users[module.__name__] -= 1
                if _users[module.__name__] == 0:
                    for name, original in _originals[module.__name__].items():
                        setattr(module, name, original)


_stand_ins: dict[str, dict[str, Callable[..., Any]]] = {}


def _put_in(module: ModuleType) -> None:
    """Stand-ins are kept while the originals stay the same, since compiled forwards are bound to them."""
    found = {name: getattr(module, name) for name in _names(module)}
    if _originals.get(module.__name__) != found:
        _originals[module.__name__] = found
        _stand_ins[module.__name__] = {
            name: _convolution(original) if name == CONVOLUTION else _rule(original) for name, original in found.items()
        }
    for name, function in _stand_ins[module.__name__].items():
        setattr(module, name, function)


def _convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Any:
        context: Context | None = kwargs.pop(CONTEXT, None)
        found = None if context is None else context.convolve(x, weight, bias, activation)
        return original(x, weight, bias, activation=activation, **kwargs) if found is None else found

    return convolve


def _rule(original: Callable[..., Any]) -> Callable[..., Any]:
    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        context: Context | None = kwargs.pop(CONTEXT, None)
        found = None
        if context is not None and kwargs.get("use_qk_l2norm_in_kernel"):
            found = context.rule(query, key, value, g, beta)
        return original(query, key, value, g=g, beta=beta, **kwargs) if found is None else found

    return rule


_tested: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def check_kinds(model: torch.nn.Module, kinds: list[str]) -> None:
    """Raises `UnsupportedError` if a layer of type `linear_attention` is no gated delta layer; runs nothing.

    Args:
        model: the model.
        kinds: types of its layers.
    """
    wanted = kinds.count("linear_attention")
    found = len(gated_layers(model)) if wanted else 0
    if found != wanted:
        raise UnsupportedError(
            f"{type(model).__name__} has {wanted} layers of type linear_attention, of which {found} are gated delta "
            "layers as in Qwen3-Next, Qwen3.5, OLMo-Hybrid and Kimi-Linear; the state of the others cannot be rewound "
            "after a rejected draft. Use model.generate for this model."
        )
    if wanted and wanted == len(kinds):
        raise UnsupportedError(
            f"{type(model).__name__} has layers of type linear_attention only, and no attention that knows how long a "
            "text is. Use model.generate for this model."
        )


def tested_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The gated delta layers of a model, after the first of them was tested.

    Raises:
        UnsupportedError: if it does not do what it should.
    """
    layers = gated_layers(model)
    if layers and layers[0] not in _tested:
        self_test(layers[0])
        _tested.add(layers[0])
    return layers


@torch.no_grad()
def self_test(layer: Any) -> None:
    """Runs a tree of four nodes through a layer, and its paths token by token as `generate` would.

    Raises:
        UnsupportedError: if outputs or states differ, or if the layer's forward was replaced by another kernel.
    """
    weight: Tensor = layer.conv1d.weight
    if weight.device.type == "meta":  # offloaded: there is nothing to test with before the weights are brought
        return
    name, size = type(layer).__name__, int(layer.hidden_size)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 7, size, generator=draw).to(weight.device, weight.dtype)
    prompt, nodes = hidden[:, :3], hidden[:, 3:]
    parents, paths = torch.tensor([[-1, 0, 0, 1]], device=weight.device), ([0, 1, 3], [0, 2])
    visible = topology.reach(parents)
    states = RecurrentStates({layer.layer_idx: None})
    before: list[Any] = [compat.DummyLayer()] * layer.layer_idx
    cache = RecurrentCache(layers=[*before, states.layers[0]])
    cache.recurrent = states
    with running((_module(layer),)):
        layer(prompt, cache=cache, **{CONTEXT: states})
        states.end_prefill()
        states.begin(visible)
        found = layer(nodes, cache=cache, **{CONTEXT: states})
    if not states.ran:
        names = ", ".join(_names(_module(layer)))
        raise UnsupportedError(
            f"the forward of {name} does not call {names} of its module: another kernel has taken its place, which a "
            "tree cannot pass through. Load the model without it (use_kernels=False), or use model.generate."
        )
    states.keep(torch.tensor([paths[0]], device=weight.device), torch.tensor([3], device=weight.device))
    states.fold()
    tolerance = TOLERANCE.get(weight.dtype, 1e-3)
    for path in paths:
        single = compat.LinearAttentionLayer()
        steps = compat.Cache(layers=[*before, single])
        layer(prompt, cache=steps)
        for node in path:
            expected = layer(nodes[:, node : node + 1], cache=steps)
        _compare(name, "output", found[:, path[-1]], expected[:, 0], tolerance)
        if path == paths[0]:
            mine = states.layers[0]
            for kind in ("conv_states", "recurrent_states"):
                _compare(name, kind, getattr(mine, kind)[0], getattr(single, kind)[0], tolerance)


def _compare(name: str, what: str, found: Any, expected: Any, tolerance: float) -> None:
    worst = float((found.float() - expected.float()).abs().max())
    if not worst <= tolerance * max(1e-3, float(expected.abs().max())):
        raise UnsupportedError(
            f"{name} does not compute the gated delta rule that this version knows: the {what} behind a small tree "
            f"differs from that of single steps by {worst:.2g}. Use model.generate for this model."
        )
