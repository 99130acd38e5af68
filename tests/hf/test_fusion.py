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
