"""GPU benchmark of whole rounds of a hybrid model: random weights in the shape of Qwen3.5-27B, 16 verify rows.

    python examples/benchmarks/hybrid_rounds.py

Of 64 layers 48 hold a recurrent state. Rounds draft a given tree, or a given chain, of the same size: what differs is
how deep the recurrent layers have to solve. Beside them, one verify pass of plain transformers.
"""

import argparse
from typing import Any
from unittest import mock

import report
import torch
from gpu_rounds import bandwidth, eager, replays, rounds
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from specdec import SpeculativeGenerator, trees
from specdec.drafters.on_device import DeviceLookup
from specdec.hf import device_rounds

QWEN35_27B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248_320,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
}
CONTEXT, NODES = 1024, 15


class Given(DeviceLookup):
    """Drafts the same tree in every round; its tokens are of no meaning."""

    def grow(self, parents: list[int]) -> None:
        """The tree from now on, also in rounds that were captured."""
        if not hasattr(self, "parents"):
            object.__setattr__(self, "parents", torch.empty(1, NODES + 1, dtype=torch.int64, device="cuda"))
        self.parents.copy_(torch.tensor([parents]))

    def __call__(self, tokens: Tensor, lengths: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and number of nodes."""
        root = tokens.gather(1, lengths[:, None] - 1)
        drafted = (root + torch.arange(NODES + 1, device=root.device)) % QWEN35_27B["vocab_size"]
        return drafted, self.parents, torch.full_like(lengths, NODES + 1)


def main() -> None:
    """Measures rounds and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without torch.compile")
    parser.add_argument("--layers", type=int, default=QWEN35_27B["num_hidden_layers"], help="of the model, to try out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**{**QWEN35_27B, "num_hidden_layers": arguments.layers})
    with torch.device("cuda"):
        model = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    speed = bandwidth()
    read = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "embed_tokens" not in n)
    figures = {
        "read_bandwidth": report.figure(speed / 1e12, "TB/s", "a sum over 4 GB"),
        "weight_gigabytes": report.figure(read / 1e9, "GB", "read once in a round"),
    }
    figures |= eager("bf16.w16", model, NODES, CONTEXT)
    draft = Given(nodes=NODES)
    tree, chain = [-1, *((node - 1) // 2 for node in range(1, NODES + 1))], list(range(-1, NODES))
    prompt = torch.randint(1000, 100_000, (1, CONTEXT), device="cuda")
    for compiled in (False,) if arguments.plain else (False, True):
        generator = SpeculativeGenerator(model, tree=trees.BestFirst(nodes=NODES), execution="device")
        if compiled:
            generator.compile()
        name = "bf16.w16" if compiled or arguments.plain else "bf16.w16.plain"
        draft.grow(tree)
        with mock.patch.object(device_rounds, "device_form", return_value=draft):
            figures |= rounds(name, generator, prompt, floor=read / speed)
        program: Any = generator._programs._program
        times = {}
        for kind, parents in (("tree", tree), ("chain", chain), ("tree again", tree), ("chain again", chain)):
            draft.grow(parents)
            times[kind] = replays(program, 20)
        ratio = (times["tree"] + times["tree again"]) / (times["chain"] + times["chain again"])
        label = "tree16_over_chain16" if name == "bf16.w16" else "plain.tree16_over_chain16"
        figures[label] = report.figure(ratio, "times", "rounds of a chain of as many nodes, one graph")
        report.write("qwen35-27b-shape", figures, device=torch.cuda.get_device_name())
        del generator, program
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
