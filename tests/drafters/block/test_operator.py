"""Compiled block drafters: attention is one operator in a round, and left alone elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from specdec import drafters
from specdec.drafters import _borrowing, _layers, _proposals, rope
from specdec.drafters.block import BlockDrafter, BlockModel, backbone, context, heads, model, operator
from specdec.hf import device_block, fusion, merged, skinny
from specdec.hf.device_block import DeviceBlock
from specdec.protocols import DraftContext
from tests import helpers
from tests.drafters.block.checkpoints import write
from tests.unchecked import unchecked

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
TEXT, ROWS = torch.tensor([[5, 6, 7, 5, 6, 8, 3], [9, 8, 7, 6, 5, 4, 2]]), 3


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, and no checks of annotations in what the compiler sees."""
    unchecked(monkeypatch, backbone, context, heads, model, operator, device_block, merged, skinny)
    unchecked(monkeypatch, _borrowing, _layers, _proposals, rope)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(dialect: str, folder: Path) -> BlockModel:
    found = drafters.from_pretrained(write(folder, dialect).folder, helpers.model())
    assert isinstance(found, BlockDrafter)
    return found.model


def features(drafter: BlockModel, rows: int) -> Tensor:
    source = torch.Generator().manual_seed(rows)
    return torch.randn(len(TEXT), rows, drafter.fc.in_features, generator=source, dtype=torch.float64)


@torch.no_grad()
def drafts(drafter: BlockModel, *, chain: bool, compiled: bool) -> list[tuple[Tensor, ...]]:
    """Trees of three rounds, the first right after the prompt."""
    draft = DeviceBlock(BlockDrafter(drafter), 6, depth=3, chain=chain, temperature=1.0)
    if compiled:
        draft.compile()
    prompt = TEXT[:, :-1]
    mask = torch.ones_like(prompt, dtype=torch.bool)
    draft.prepare(DraftContext(prompt, mask, 97, features=features(drafter, prompt.shape[1])), 64)
    text, lengths, found = torch.nn.functional.pad(TEXT, (0, 20)), torch.full((2,), TEXT.shape[1]), []
    limits, path = torch.full((2,), 6), torch.arange(ROWS).expand(2, -1)
    for counts in ([1, 3], [2, 1], [3, 2]):
        found.append(draft(text, lengths, limits))
        draft.absorb(features(drafter, ROWS), path, torch.tensor(counts))
        lengths = lengths + torch.tensor(counts)
    return found


def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators of ours in the graphs that are compiled from here on."""
    names: list[str] = []

    def keep(module: fx.GraphModule, inputs: list[Any]) -> Any:  # noqa: ARG001 - the compiler's
        names.extend(str(node.target) for node in module.graph.nodes if "specdec" in str(node.target))
        return module.forward

    monkeypatch.setattr(fusion, "lowered", keep)
    return names


@pytest.mark.parametrize("dialect", ["dflash_flat", "dflash2", "speculators_dflash", "dspark_gated"])
def test_in_a_round_the_layers_are_one_graph(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, chain = model_of(dialect, tmp_path), dialect.startswith("dspark")
    expected = drafts(drafter, chain=chain, compiled=False)
    operators = seen(monkeypatch)
    found = drafts(drafter, chain=chain, compiled=True)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))
    assert operators == ["specdec.block_attention"] * len(drafter.stack), "compiled again, or not as an operator"
    assert all("_frequencies" in reason for reason in counters["graph_break"])


def test_an_operator_that_serves_another_block_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant of the test above: all layers attend as the first one does."""
    drafter = model_of("dflash_flat", tmp_path)
    expected = drafts(drafter, chain=False, compiled=False)
    seen(monkeypatch)
    serving = operator.serving
    monkeypatch.setattr(device_block, "serving", lambda attend: serving(lambda _, *given: attend(0, *given)))
    found = drafts(drafter, chain=False, compiled=True)
    assert not all(torch.equal(one[0], other[0]) for one, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_elsewhere_attention_is_left_alone(tmp_path: Path) -> None:
    drafter = model_of("dflash2", tmp_path)
    slots = []
    for run in (drafter.slots, torch.compile(drafter.slots, backend="eager")):
        held = drafter.context(batch=2)
        drafter.extend(held, features(drafter, 5), torch.tensor([5, 3]))
        slots.append(run(torch.tensor([5, 6]), held, 4))
    torch.testing.assert_close(slots[1], slots[0], rtol=0, atol=1e-12)
    assert any("disable" in reason for reason in counters["graph_break"])
