"""A draft model together with a lookup, in one tree: each proposes what it knows.

The draft model runs once per level of the tree; the lookup costs next to nothing and is right where text repeats.
`CombinedDrafter` asks both about every node and merges their answers on one scale, equal tokens into one node.

A draft model pays when it is many times smaller than the target, say SmolLM2-135M for SmolLM2-1.7B. Only one model
comes with this demo, so its draft is a copy of itself in bfloat16: that saves passes of the target, but no time.
"""

import argparse
import copy

import torch

from specdec import SpeculativeGenerator, drafters, trees
from specdec.protocols import Drafter
from specdec.testing import demo_model

PROMPT = "Say twice: a rolling stone gathers no moss."


def main() -> None:
    """Generates with the lookup, with the draft model and with both, and compares the passes of the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    # With two real models: AutoModelForCausalLM.from_pretrained(...). If their tokenizers differ, give both to
    # ModelDrafter(draft, tokenizer=..., target_tokenizer=...).
    draft = copy.deepcopy(model).to(torch.bfloat16)
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    expected = model.generate(**request)

    sources: dict[str, Drafter] = {
        "lookup": drafters.PromptLookupDrafter(),
        "draft model": drafters.ModelDrafter(draft),
        "both": drafters.CombinedDrafter(drafters.PromptLookupDrafter(), drafters.ModelDrafter(draft)),
    }
    # An autoregressive drafter runs once a level, so the depth of its trees is worth a limit.
    tree = trees.BestFirst(nodes=10, branch=3, depth=4)
    print("drafter       passes of the target   tokens per round")
    for name, drafter in sources.items():
        generator = SpeculativeGenerator(model, drafter=drafter, tree=tree)
        if not torch.equal(generator.generate(**request), expected):
            raise SystemExit("The output differs from plain greedy decoding: please report this.")
        stats = generator.stats
        print(f"{name:<14}{stats.target_passes:>3} instead of {stats.plain_passes:<8}{stats.tokens_per_round:.2f}")

    rounds = list(generator.rounds(**request))  # the same loop, opened
    best = max(rounds, key=lambda round: (int(round.num_accepted), round.tree.width))
    print("\nA round of both, accepted nodes marked with *:\n")
    print(trees.render(best, decode=lambda token: tokenizer.decode([token])))


if __name__ == "__main__":
    main()
