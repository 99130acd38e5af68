"""GPU benchmark of one block draft: a DFlash 2 drafter of five layers, 5,120 wide, with its head and its tree.

    python examples/benchmarks/draft_cost.py

The draft is what a device round captures: the states of what was committed become context, one forward of the block,
logits, candidates, the tree. It is set against reading the drafter's weights once at the read bandwidth of the same
run. Before it is timed, captured and uncaptured drafts are compared, and the tree with the reference's.
"""

import argparse
from typing import Any

import report
import torch
from gpu_rounds import bandwidth
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from verify_attention import seconds

from specdec import ops
from specdec.drafters import BlockDrafter, BlockModel, BlockSpec, Rope
from specdec.hf.device_block import DeviceBlock
from specdec.protocols import DraftContext

CONTEXT, VOCAB, NODES = 1024, 151_936, 16


def main() -> None:
    """Measures the draft and the tree alone, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autotune", action="store_true", help="also choose matrix products by measuring them")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    speed = bandwidth()
    figures: dict[str, Any] = {"read_bandwidth": report.figure(speed / 1e12, "TB/s", "a sum over 4 GB")}
    figures["grow_tree.n16.us"] = report.figure(1e6 * tree_seconds(), "us", "15 x 16 candidates, one row")
    model = drafter_model()
    weights = sum(
        weight.numel() * weight.element_size()
        for name, weight in model.named_parameters()
        if "embed_tokens" not in name and "codebook" not in name  # of these a few rows are read
    )
    floor = weights / speed
    figures["dflash2_5x5120.floor_us"] = report.figure(1e6 * floor, "us", f"{weights / 1e9:.2f} GB once")
    ways: dict[str, dict[str, Any] | None] = {"plain": None, "compiled": {}}
    if arguments.autotune:
        ways["autotuned"] = {"mode": "max-autotune-no-cudagraphs"}
    best = float("inf")
    for name, options in ways.items():
        draft = Draft(model, options)
        draft.check()
        taken = seconds(lambda _, draft=draft: draft(), turns=4)
        print(f"{name:10} {1e6 * taken:.0f} us, {taken / floor:.3f} of the floor", flush=True)
        figures[f"dflash2_5x5120.{name}.us"] = report.figure(1e6 * taken, "us", "one draft, captured")
        best = min(best, taken)
        kernels(draft)
    figures["dflash2_5x5120.over_stream_floor"] = report.figure(best / floor, "times", "reading the weights once")
    report.write("draft-cost", figures, device=torch.cuda.get_device_name())


def tree_seconds() -> float:
    """Time of growing 16 nodes from 15 levels of 16 candidates."""
    tokens = torch.rand(1, 15, 1000, device="cuda").argsort(-1)[..., :16].contiguous()
    scores = torch.randn(1, 15, 16, 16, device="cuda").log_softmax(-1)
    root = torch.zeros(1, dtype=torch.int64, device="cuda")
    found = ops.grow_tree(tokens, scores, root, nodes=NODES, impl="triton")
    wanted = ops.grow_tree(tokens, scores, root, nodes=NODES, impl="reference")
    assert all(map(torch.equal, found, wanted))
    return seconds(lambda _: ops.grow_tree(tokens, scores, root, nodes=NODES, impl="triton"))


def drafter_model() -> BlockModel:
    """Random weights in the shape of a drafter for a 27B target."""
    spec = BlockSpec(
        family="dflash2",
        layout="fill_in",
        block_size=16,
        mask_token_id=0,
        feature_layers=(1, 16, 31, 46, 61),
        feature_size=5120,
        hidden_size=5120,
        intermediate_size=17_408,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        windows=(2048, 2048, 2048, 2048, None),
        causal=(True, True, True, True, False),
        rope=Rope(1e7, 128),
        own_embedding=True,
        own_head=True,
        conv_kernel_size=2,
        selector_rank=256,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = BlockModel(spec)
    torch.set_default_dtype(torch.float32)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.requires_grad_(False)


class Draft:
    """A device draft with what a round hands it, on a text that does not grow.

    Args:
        model: the drafter.
        options: of `torch.compile`; None runs the model as it is.
    """

    def __init__(self, model: BlockModel, options: dict[str, Any] | None) -> None:
        """Fills the context."""
        width = NODES + 1
        tokens = torch.randint(1, VOCAB, (1, CONTEXT), device="cuda")
        size = len(model.spec.feature_layers) * model.spec.feature_size
        features = torch.randn(1, CONTEXT, size, device="cuda", dtype=torch.bfloat16)
        self.draft = DeviceBlock(BlockDrafter(model), NODES, depth=None, chain=False, temperature=1.0)
        self.draft.prepare(DraftContext(tokens, torch.ones_like(tokens).bool(), VOCAB, features=features), 2 * CONTEXT)
        if options is not None:
            self.draft.compile(**options)
        self.text = torch.nn.functional.pad(tokens, (0, CONTEXT))
        self.lengths = torch.full((1,), CONTEXT, device="cuda")
        self.limits = torch.full((1,), 64, device="cuda")
        self.features = torch.randn(1, width, size, device="cuda", dtype=torch.bfloat16)
        self.path = torch.arange(width, device="cuda")[None]
        self.counts = torch.full((1,), 4, device="cuda")

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        """A draft, and what the end of its round adds to the context."""
        tree = self.draft(self.text, self.lengths, self.limits)
        self.draft.absorb(self.features, self.path, self.counts)
        return tree

    def check(self) -> None:
        """A captured draft is the uncaptured one."""
        plain = self()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            captured = self()
        for part in captured:
            part.zero_()
        self.graph.replay()
        assert all(map(torch.equal, plain, captured))


def kernels(draft: Draft) -> None:
    """Prints where the time of a captured draft goes; a kernel that is set up early counts from then on."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        draft.graph.replay()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    print(f"    kernels {total:.0f} us in {sum(event.count for event in events)} launches")
    for event in events[:14]:
        print(f"    {event.device_time_total:8.1f} us {event.count:4} {event.key[:90]}")


if __name__ == "__main__":
    main()
