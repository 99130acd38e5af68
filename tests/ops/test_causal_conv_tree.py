"""The convolution along paths against windows that are put together by walking."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import ops
from specdec.errors import ShapeError, UnsupportedError
from tests.ops.hybrid_problems import conv_windows
from tests.trees.random_trees import caught, random_tree

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
kernel = pytest.mark.skipif(not ops.available("causal_conv_tree", "cpu")[0], reason="triton is not installed")
Change = Callable[[dict[str, Any]], dict[str, Any]]

CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "sizes": st.lists(st.one_of(st.integers(1, 9), st.integers(1, 70)), min_size=1, max_size=3),
    "style": st.sampled_from(["any", "deep", "chain", "star"]),
    "channels": st.sampled_from([1, 5, 130]),
    "taps": st.integers(1, 4),
    "spare": st.integers(0, 1),
    "kept": st.sampled_from([None, 0, 1, 5]),
    "bias": st.booleans(),
    "activation": st.sampled_from(["silu", None]),
}


def law(
    change: Change,
    impl: ops.Impl,
    tolerance: float,
    seed: int,
    sizes: list[int],
    style: str,
    channels: int,
    taps: int,
    spare: int,
    kept: int | None,
    bias: bool,
    activation: str | None,
    dtype: torch.dtype = torch.float64,
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    tree = random_tree(seed, sizes, style)
    batch, nodes = tree.tokens.shape
    visible, _ = ops.tree_layout(tree.parents, tree.num_nodes)
    call: dict[str, Any] = {
        "inputs": normal(batch, nodes, channels),
        "weight": normal(channels, taps),
        "history": normal(batch, channels, taps - 1 + spare),
        "ancestors": visible,
        "bias": normal(channels) if bias else None,
        "activation": activation,
    }
    histories = call["history"].clone()
    if kept is not None:
        call |= {"path": normal(batch, kept, channels), "counts": torch.randint(0, kept + 1, (batch,), generator=draw)}
        lines = [
            torch.cat([past.T, path[:count]])[int(count) :].T
            for past, path, count in zip(histories, call["path"], call["counts"].tolist(), strict=True)
        ]
        histories = torch.stack(lines)
    out = torch.full_like(call["inputs"], torch.nan)
    output = ops.causal_conv_tree(**change({**call, "out": out}), impl=impl)
    assert torch.equal(call["history"], histories), "the history is what came last"
    assert torch.equal(out, call["inputs"])
    for row, size in enumerate(sizes):
        windows = conv_windows(call["inputs"][row, :size], histories[row], tree.parents[row, :size].tolist(), taps)
        expected = torch.einsum("ntc,ct->nc", windows.double(), call["weight"].double())
        if bias:
            expected = expected + call["bias"].double()
        if activation:
            expected = expected * expected.sigmoid()
        worst = float((output[row, :size].double() - expected).abs().max())
        assert worst <= tolerance * max(1.0, float(expected.abs().max())), f"off by {worst}"


@given(**CASES)
def test_the_reference_is_the_walk(**inputs: Any) -> None:
    law(lambda call: call, "reference", 1e-14, **inputs)


@kernel
@given(**CASES)
def test_the_kernel_is_the_walk(**inputs: Any) -> None:
    law(lambda call: call, "triton", 1e-6, **inputs, dtype=torch.float32)


WRONG: dict[str, Change] = {
    "rows before, not ancestors": lambda call: {
        **call,
        "ancestors": ops.tree_layout(
            torch.arange(-1, call["inputs"].shape[1] - 1).expand(call["inputs"].shape[:2]),
            torch.full((call["inputs"].shape[0],), call["inputs"].shape[1]),
        )[0],
    },
    "the root unseen": lambda call: {**call, "ancestors": call["ancestors"] & ~1},
    "taps backwards": lambda call: {**call, "weight": call["weight"].flip(1)},
    "no history": lambda call: {**call, "history": torch.zeros_like(call["history"])},
    "history backwards": lambda call: {**call, "history": call["history"].flip(2)},
    "no bias": lambda call: {**call, "bias": None},
    "no activation": lambda call: {**call, "activation": None},
    "nothing kept": lambda call: {**call, "path": None, "counts": None},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_caught(name: str) -> None:
    caught(law, WRONG[name], "reference", 1e-6, **CASES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.zeros(5, 4)}, r"weight must be \[2, 1 or more taps\]"),
        ({"history": torch.zeros(1, 2, 2)}, r"history must be \[1, 2, 3 or more"),
        ({"ancestors": torch.zeros(1, 3, 1)}, "must be int64"),
        ({"path": torch.zeros(1, 1, 2)}, "come together"),
        ({"path": torch.zeros(1, 1, 3), "counts": torch.tensor([1])}, r"path must be \[1, kept, 2\]"),
        ({"out": torch.zeros(1, 2, 2)}, r"out must be \[1, 3, 2\]"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], said: str) -> None:
    call = {
        "inputs": torch.zeros(1, 3, 2),
        "weight": torch.zeros(2, 4),
        "history": torch.zeros(1, 2, 3),
        "ancestors": torch.ones(1, 3, 1, dtype=torch.int64),
    }
    with pytest.raises(ShapeError, match=said):
        inspect.unwrap(ops.causal_conv_tree)(**{**call, **change})


def test_other_activations_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'silu', 'swish' or None, got 'gelu'"):
        inspect.unwrap(ops.causal_conv_tree)(
            torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 0), torch.ones(1, 1, 1).long(), activation="gelu"
        )


@pytest.mark.parametrize(
    ("path", "counts", "said"),
    [
        (torch.zeros(1, 2, 3), torch.tensor([1]), r"conv_fold: path must be \[1, kept, 2\]"),
        (torch.zeros(1, 2, 2), torch.tensor([1, 2]), r"conv_fold: counts must be int64 \[1\]"),
        (torch.zeros(1, 2, 2), torch.tensor([1.0]), r"conv_fold: counts must be int64 \[1\]"),
    ],
)
def test_paths_that_do_not_fit(path: torch.Tensor, counts: torch.Tensor, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        inspect.unwrap(ops.conv_fold)(torch.zeros(1, 2, 3), path, counts)
