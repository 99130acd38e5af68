"""A block drafter (DFlash, DFlash 2, DSpark): inspected, loaded for its target, and drafting trees.

    python examples/block_drafter.py --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16

A block drafter guesses many tokens in one forward, from hidden states that the target computes anyway. Without
arguments a tiny random target gets a random drafter, which guesses badly: the text is the target's all the same.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpeculativeGenerator, drafters, trees
from specdec.testing import demo_model

PROMPT = "How many positive divisors does 196 have? Think step by step."


def main() -> None:
    """Shows what a checkpoint is, and generates with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a model of the Hub, or a folder")
    parser.add_argument("--drafter", help="the drafter that was made for it")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="the tiny random pair, also the default")
    arguments = parser.parse_args()
    if bool(arguments.target) != bool(arguments.drafter):
        parser.error("--target and --drafter belong together")

    if arguments.target and not arguments.tiny:
        target = AutoModelForCausalLM.from_pretrained(arguments.target, device_map="auto", dtype="auto")
        tokenizer, source = AutoTokenizer.from_pretrained(arguments.target), arguments.drafter
    else:
        target, tokenizer = demo_model(tiny=True)
        source = random_drafter(target, Path(tempfile.mkdtemp()) / "drafter")

    # Which slot predicts which token, which hidden states are read, who sees whom: nothing raises when one of these is
    # wrong, so look before you load.
    print(drafters.inspect(source))
    drafter = drafters.from_pretrained(source, target)

    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(target.device)
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    # One forward of the drafter serves any tree: level d asks slot d.
    for tree in (trees.Chain(drafter.length), trees.BestFirst(nodes=31)):
        generator = SpeculativeGenerator(target, drafter, tree)
        same = torch.equal(generator.generate(**request), target.generate(**request))
        print(f"\n{tree}\n{generator.stats}\nSame tokens as plain greedy decoding: {'yes' if same else 'no'}")


def random_drafter(target: Any, folder: Path) -> Path:
    """A drafter of two layers with random weights, written in z-lab's format."""
    config = target.config
    spec = drafters.BlockSpec(
        family="dflash",
        layout="fill_in",
        block_size=6,
        mask_token_id=0,
        feature_layers=(1, 2),
        feature_size=config.hidden_size,
        hidden_size=config.hidden_size,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        windows=(None, None),
        causal=(False, False),
        rope=drafters.Rope(theta=1e4, dim=16),
    )
    torch.manual_seed(0)
    return drafters.save_pretrained(drafters.BlockDrafter(drafters.BlockModel(spec)), folder)


if __name__ == "__main__":
    main()
