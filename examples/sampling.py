"""Sampling: every lossless verifier gives the target's law, and they differ in how many tokens a round commits.

`TargetOnly` draws from the target and looks whether the tree holds the token: any tree will do, so it may hold the
drafter's favourites. The other rules need children that were *drawn* from the drafter's law, and weigh the two laws
against each other: `Rejection` token by token, `BlockVerification` and `Traversal` for whole paths. `Typical` is lossy.

The drafter here is the model itself at a higher temperature, so that the two laws differ by a known amount.
"""

import argparse

import torch

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.protocols import TreeBuilder, Verifier
from specdec.testing import demo_model

PROMPT = "Tell me a story about a fox and a lighthouse."
CHAIN, BRANCHES = 4, (2, 2, 1)

PARTS: list[tuple[str, TreeBuilder, Verifier]] = [
    ("best chain", trees.Chain(CHAIN), verify.TargetOnly()),
    ("drawn chain", trees.sampled_chain(CHAIN), verify.TargetOnly()),
    ("drawn chain", trees.sampled_chain(CHAIN), verify.Rejection()),
    ("drawn chain", trees.sampled_chain(CHAIN), verify.BlockVerification()),
    ("best tree", trees.BestFirst(nodes=10, depth=3), verify.TargetOnly()),
    ("drawn tree", trees.Sampled(BRANCHES), verify.TargetOnly()),
    ("drawn tree", trees.Sampled(BRANCHES), verify.TreeRejection()),
    ("drawn tree", trees.Sampled(BRANCHES), verify.Traversal()),
    ("best chain", trees.Chain(CHAIN), verify.Typical()),
]


def main() -> None:
    """Samples with every pair of tree and verifier, and compares the tokens per round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=24, help="of each sample")
    parser.add_argument("--samples", type=int, default=4, help="rows of the batch")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    drafter = drafters.ModelDrafter(model, temperature=1.3)
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    request = {
        **inputs,
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": True,
        "num_return_sequences": arguments.samples,  # rows of one batch, each sampled for itself
    }

    print(f"{'tree':<14}{'nodes':>5}  {'verifier':<20}{'tokens per round':>16}  law")
    for name, tree, verifier in PARTS:
        generator = SpeculativeGenerator(model, drafter=drafter, tree=tree, verifier=verifier)
        # Each rule spends the random numbers in its own way, so the texts differ, but not their law.
        generator.generate(**request, generator=torch.Generator().manual_seed(0))
        law = "the target's" if verifier.lossless else "another"
        tokens = f"{generator.stats.tokens_per_round:.2f}"
        print(f"{name:<14}{tree.nodes:>5}  {type(verifier).__name__:<20}{tokens:>16}  {law}")


if __name__ == "__main__":
    main()
