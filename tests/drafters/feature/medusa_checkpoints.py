"""Tiny random Medusa heads in the layout of FasterDecoding/Medusa, and what they compute.

Medusa was published as a pickle, `medusa_lm_head.pt`; its training script and TGI use safetensors with the same names,
which is what is written here. The shapes fit the library's tiny models (vocabulary 97, hidden size 48). Weights are
large enough for each of them to matter.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB = 48, 97


@dataclass
class Written:
    """A checkpoint on disk and what is needed to compute with it by other means.

    Args:
        folder: where config.json and medusa_lm_head.safetensors are.
        config: the content of config.json.
        weights: the content of medusa_lm_head.safetensors.
        reference: the settings for `draft`: `heads`, and `blocks` of each.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    reference: dict[str, Any]


def write(
    folder: Path, *, seed: int = 0, heads: int = 3, blocks: int = 1, vocab: int = VOCAB, hidden: int = HIDDEN
) -> Written:
    """Write random heads.

    Args:
        folder: created if need be.
        seed: seed of the weights.
        heads: how many tokens are predicted beside the one after the last.
        blocks: residual blocks of each head. Published code makes one block and names it as often, so files with more
            than one may hold the same tensor several times; here each block is its own.
        vocab: rows of each output matrix.
        hidden: the target's hidden size.
    """
    config = {"base_model_name_or_path": "tiny", "medusa_num_heads": heads, "medusa_num_layers": blocks}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for head in range(heads):
        shapes = {f"{head}.{blocks}.weight": (vocab, hidden)}
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{block}.linear.bias"] = (hidden,)
        for name, shape in shapes.items():
            weights[name] = 0.4 * torch.randn(shape, generator=generator, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})
    return Written(folder, config, weights, {"heads": heads, "blocks": blocks})


def draft(weights: dict[str, Tensor], config: dict[str, Any], hidden: Tensor) -> Tensor:
    """What the heads say, in float64, [heads, V].

    Args:
        weights: the tensors of the checkpoint by their published names.
        config: `heads`, and `blocks` of each.
        hidden: the target's last hidden state, after its final norm, at position n - 1, [d]. The target itself
            predicts the token at n, the anchor, from it; head i predicts the one at n + 1 + i, whatever lies between.
    """
    logits = []
    for head in range(config["heads"]):
        x = hidden.double()
        for block in range(config["blocks"]):
            part = f"{head}.{block}.linear."
            y = weights[part + "weight"].double() @ x + weights[part + "bias"].double()
            x = x + y * torch.sigmoid(y)
        logits.append(weights[f"{head}.{config['blocks']}.weight"].double() @ x)
    return torch.stack(logits)
