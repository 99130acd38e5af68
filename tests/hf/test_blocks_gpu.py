"""Block drafters compiled in half precision on a GPU, where kernels for few rows take the place of their layers.

pytest -m gpu tests/hf/test_blocks_gpu.py
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters import BlockDrafter, BlockModel, BlockSpec, Rope, _borrowing, _layers, _proposals, rope
from specdec.drafters.block import backbone, context, heads, operator
from specdec.drafters.block import model as model_module
from specdec.hf import device_block, fusion, merged, norms, skinny
from specdec.hf.device_block import DeviceBlock
from specdec.protocols import DraftContext
from tests.unchecked import unchecked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]
DEVICE = "cuda"
LENGTH, NODES, ROWS, VOCAB = 40, 8, 6, 1000
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"family": "dflash"},
    "dflash2": {"family": "dflash2", "conv_kernel_size": 2, "conv_group_size": 64, "selector_rank": 16},
}


def model_of(kind: str, dtype: torch.dtype) -> BlockModel:
    """Wide enough for all kernels, and with norms that scale."""
    spec = BlockSpec(
        layout="fill_in",
        block_size=8,
        mask_token_id=0,
        feature_layers=(1, 2),
        feature_size=512,
        hidden_size=512,
        intermediate_size=704,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        windows=(32, None),
        causal=(True, False),
        rope=Rope(1e4, 64),
        own_embedding=True,
        own_head=True,
        **KINDS[kind],
    )
    torch.manual_seed(0)
    model = BlockModel(spec).requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.add_(0.2 * torch.randn_like(weight))
        elif weight.dim() == 2:
            weight.copy_(torch.randn_like(weight) * weight.shape[1] ** -0.5)
    return model.to(DEVICE, dtype)


class Round:
    """A draft behind a prompt and one round whose features it has absorbed."""

    def __init__(self, model: BlockModel, batch: int, *, compiled: bool = False) -> None:
        """Runs nothing."""
        torch.manual_seed(1)
        self.draft = DeviceBlock(BlockDrafter(model), NODES, depth=None, chain=False, temperature=1.0)
        if compiled:
            self.draft.compile()
        self.slots = fusion.compiled(self.draft._drafts.slots) if compiled else model.slots
        self.text = torch.randint(1, VOCAB, (batch, LENGTH + ROWS), device=DEVICE)
        self.features = torch.randn(batch, LENGTH + ROWS, 1024, device=DEVICE).to(model.norm.weight)
        self.counts = torch.arange(batch, device=DEVICE) + 2
        self.path = torch.arange(ROWS, device=DEVICE).expand(batch, -1)

    def __call__(self) -> tuple[Tensor, ...]:
        """What the slots of the next block give, the context behind them, and the tree."""
        draft, prompt = self.draft, self.text[:, :LENGTH]
        ones = torch.ones_like(prompt, dtype=torch.bool)
        draft.prepare(DraftContext(prompt, ones, VOCAB, features=self.features[:, :LENGTH]), 4 * LENGTH)
        draft.absorb(self.features[:, LENGTH:], self.path, self.counts)
        held, _ = draft._ready()
        # Every row has committed two at least; what lies behind is no part of its text.
        keys = [buffer[:, :, : LENGTH + 2] for layer in held.layers for buffer in layer.buffers]
        with torch.no_grad(), draft._attending(held):
            slots = self.slots(self.text[:, LENGTH], held, draft.model.spec.rows(draft.length))
        return slots, *keys

    def grown(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tree behind the committed text."""
        with torch.no_grad():
            return self.draft(self.text, LENGTH + self.counts, torch.full_like(self.counts, NODES))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_drafter_is_as_near_to_float64_as_the_drafter(
    kind: str, dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other modules stand in for its layers and round elsewhere; a tree drafted in a graph is as one drafted before."""
    unchecked(monkeypatch, backbone, context, heads, model_module, operator, device_block, merged, norms, skinny)
    unchecked(monkeypatch, _borrowing, _layers, _proposals, rope)
    torch._dynamo.reset()
    model = model_of(kind, dtype)
    own, exact = (Round(each, batch) for each in (model, copy.deepcopy(model).double()))
    compiled = Round(model, batch, compiled=True)
    kinds = [type(module) for module in compiled.draft._drafts.modules()]
    layers = len(model.layers)
    assert kinds.count(skinny.SkinnyMLP) == layers
    assert kinds.count(norms.SkinnyNorm) == 2 * layers + 2
    for found, theirs, wanted in zip(compiled(), own(), exact(), strict=True):
        error, usual = ((each.double() - wanted).norm() / wanted.norm() for each in (found, theirs))
        assert usual < 0.1, "rounding hides everything"
        assert error < 1.5 * usual  # both round as often, only elsewhere; half as much again is for chance
    expected = compiled.grown()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled.grown()
    for part in captured:
        part.zero_()
    graph.replay()
    assert all(map(torch.equal, captured, expected))
    assert int(expected[2].min()) == NODES + 1
