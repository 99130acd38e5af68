"""Sums that move into the operators before them: only those that nobody else needs, and only where nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from specdec.hf import fusion, norms, skinny

WEIGHT = torch.randn(6, 6, dtype=torch.float64)
ROWS = torch.randn(2, 3, 6, dtype=torch.float64)


def product(given: Tensor) -> Tensor:
    found: Tensor = torch.ops.specdec.skinny_linear(given, WEIGHT, None, None, torch.zeros(1, dtype=torch.int32), "")
    return found


def normal(given: Tensor) -> Tensor:
    found: Tensor = torch.ops.specdec.rms_norm(given, WEIGHT[0], None, 1e-5)
    return found


def twice(given: Tensor) -> Tensor:
    found = product(given)
    return given + found + found.sin()


def written(given: Tensor) -> Tensor:
    """A product whose input changes before the sum."""
    rows = given.clone()
    found = product(rows)
    rows.mul_(2)
    return given + found + rows


def replaced(given: Tensor) -> Tensor:
    rows = given.clone()
    found = product(rows)
    rows[:, 0] = 0.0
    rows += 1.0
    return given + found + rows


CASES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "behind": (lambda given: given + product(given), 1),
    "before": (lambda given: product(given) + given, 1),
    "a chain": (lambda given: (given + product(given)) + normal(given + product(given)), 3),
    "two products": (lambda given: product(given) + product(given.sin()), 1),
    "needed elsewhere": (twice, 0),
    "an input that changes": (written, 0),
    "an input that is written to": (replaced, 0),
    "a number": (lambda given: product(given) + 1.0, 0),
    "another shape": (lambda given: product(given) + given[:, :1], 0),
    "another dtype": (lambda given: product(given) + given.float(), 0),
    "itself": (lambda given: (lambda found: found + found)(product(given)), 0),
    "a factor": (lambda given: torch.add(product(given), given, alpha=2), 0),
}


def graph(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """What the compiler sees of a function."""
    seen: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: list[Any]) -> Any:  # noqa: ARG001 - the compiler's
        seen.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, dynamic=False, fullgraph=True)(ROWS)
    return seen[0]


@pytest.mark.parametrize("name", CASES)
def test_sums(name: str) -> None:
    skinny.register_operator()
    norms.register_operator()
    function, count = CASES[name]
    module = graph(function)
    assert fusion.add_residuals(module) == count
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    given = [ROWS if "given" in name else WEIGHT for name in inputs]
    assert sum("given" in name for name in inputs) == 1
    found = module(*given)
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(found, function(ROWS), rtol=0, atol=1e-12)
    assert fusion.add_residuals(module) == 0


def router(given: Tensor) -> Tensor:
    """As routers of mixtures do it, with what they go on to do to the best: weights are changed in place."""
    weights, chosen = torch.topk(given.softmax(-1), k=4, dim=-1)
    weights /= weights.sum(-1, keepdim=True)
    return torch.stack((weights.view(-1), chosen.view(-1).to(weights.dtype)))


def wide(given: Tensor) -> Tensor:
    return given.repeat(1, 1, 50).topk(3)[0]


def named(given: Tensor) -> Tensor:
    return torch.topk(given, 2).values


ROUTERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a router": (router, 1),
    "groups": (lambda given: given.topk(2, dim=-1)[0].sum(-1) + torch.topk(given, k=1, sorted=False)[1][..., 0], 2),
    "a dimension by its number": (lambda given: given.topk(2, 2)[1], 1),
    "all": (lambda given: given.topk(6)[0] + given.topk(6)[1], 2),
    "equal numbers": (lambda given: (given > 0).to(given.dtype).topk(2)[0], 1),
    "another dimension": (lambda given: given.topk(2, dim=1)[0], 0),
    "the smallest": (lambda given: given.topk(2, largest=False)[0], 0),
    "a wide row": (wide, 0),
    "by name": (named, 1),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_best_of_a_narrow_row_are_sorted(name: str) -> None:
    function, count = ROUTERS[name]
    module = graph(function)
    assert fusion.sort_narrow(module) == count
    found = module(ROWS)[0]
    assert torch.equal(found, function(ROWS))
    assert found.stride() == function(ROWS).stride()
    left = [node for node in module.graph.nodes if node.target is torch.topk or node.target == "topk"]
    assert bool(left) == (count == 0)
    assert fusion.sort_narrow(module) == 0


def test_of_equal_numbers_the_first_are_kept() -> None:
    module = graph(lambda given: (given * 0).topk(3)[1])
    fusion.sort_narrow(module)
    assert torch.equal(module(ROWS)[0], torch.arange(3).expand(2, 3, 3))
