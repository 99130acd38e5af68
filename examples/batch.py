"""A batch of prompts of different lengths, padded on the left, with statistics for each row.

Rows accept different numbers of tokens in the same round, and each goes on from where it is: a batch takes as many
forward passes as its slowest row, not as the sum of its rows.
"""

import argparse

import torch

from specdec import SpeculativeGenerator, drafters, trees
from specdec.testing import demo_model

PROMPTS = [
    "Write a short poem about a cat and a hat.",
    "Write a Python function that adds two numbers, and one that subtracts two numbers.",
    "Correct the spelling: 'The quik brown fox jumps ovr the lazy dog. The quik brown fox sleeps.'",
    "What is the capital of France?",
]


def main() -> None:
    """Generates for all prompts at once, compares with plain greedy decoding, reports row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    tokenizer.padding_side = "left"  # new tokens must follow the last token of every prompt
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    # The attention mask is part of `inputs`: it says which tokens are padding.
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}

    generator = SpeculativeGenerator(model, drafter=drafters.PromptLookupDrafter(), tree=trees.BestFirst(nodes=8))
    ids = generator.generate(**request)
    if not torch.equal(ids, model.generate(**request)):
        raise SystemExit("The output differs from plain greedy decoding: please report this.")

    stats, width = generator.stats, inputs.input_ids.shape[1]
    for index, (prompt, answer) in enumerate(zip(PROMPTS, ids[:, width:], strict=True)):
        row = stats.row(index)
        print(f"{prompt}\n  {tokenizer.decode(answer, skip_special_tokens=True)!r}")
        print(f"  {row.new_tokens} tokens in {row.rounds} rounds: {row.tokens_per_round:.2f} tokens per round\n")
    passes = f"{stats.target_passes} forward passes instead of {stats.plain_passes}"
    print(f"Same tokens as plain greedy decoding, in {passes}.")


if __name__ == "__main__":
    main()
