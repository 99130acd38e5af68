"""An EAGLE-3 drafter: written in a published format, inspected, loaded for its target, and drafting trees.

    python examples/feature_drafter.py --target Qwen/Qwen3-4B --drafter deepseek-ai/eagle3_qwen3_4b_ttt7

Such a drafter continues the target's own hidden states, token by token; a level of a tree is one forward of a layer or
two. Without arguments a tiny random target gets a random drafter, which guesses badly: the text is the target's all the
same. Other drafters of this kind (P-EAGLE, MTP heads, Gemma 4 assistants, Medusa) are loaded in the same way.
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
    parser.add_argument("--drafter", help="the drafter that was made for it; for MTP heads, the target's own files")
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

    # Which states are read, which of them a residual keeps, how drafted rows go on: nothing raises when one of these is
    # wrong, so look before you load. Some formats leave it to the target what is read; it is passed along.
    print(drafters.inspect(source, target))
    drafter = drafters.from_pretrained(source, target)

    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(target.device)
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    plain = target.generate(**request)
    # Each level of a tree is one forward of the drafter, however wide: the tree costs no more of them than the chain.
    for tree in (trees.Chain(drafter.length), trees.BestFirst(nodes=31, depth=drafter.length)):
        generator = SpeculativeGenerator(target, drafter, tree)
        same = torch.equal(generator.generate(**request), plain)
        print(f"\n{tree}\n{generator.stats}\nSame tokens as plain greedy decoding: {'yes' if same else 'no'}")


def random_drafter(target: Any, folder: Path) -> Path:
    """An EAGLE-3 drafter of random weights with every fourth token of the target, in the format of speculators."""
    config = target.config
    shortlist = drafters.Shortlist(torch.arange(0, config.vocab_size, 4), config.vocab_size)
    spec = drafters.EagleSpec(
        family="eagle3",
        feature_layers=(0, 1, 2),  # the embedding, and the outputs of the first two layers
        feature_size=config.hidden_size,
        hidden_size=config.hidden_size,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=config.vocab_size,
        draft_vocab_size=len(shortlist.ids),
        windows=(None,),
        rope=drafters.Rope(theta=1e4, dim=16),
        norm_before_residual=True,
        depth=5,
    )
    torch.manual_seed(0)
    drafter = drafters.FeatureDrafter(drafters.Eagle3Model(spec, shortlist))
    return drafters.save_pretrained(drafter, folder, publisher="speculators", verifier=config.name_or_path or None)


if __name__ == "__main__":
    main()
