"""A hybrid model, most of whose layers have a recurrent state, verifies trees: what it says, and what a round keeps.

    python examples/hybrid_target.py --target Qwen/Qwen3.5-4B --draft Qwen/Qwen3.5-0.8B

A state cannot be taken back once a draft has been written into it. So no pass writes it: what each node would write is
recorded, and the accepted path is folded in by the next pass. Without arguments a tiny random model is the target, and
the same weights in float32 draft for it: another random model would never guess right.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import Round, SpeculativeGenerator, drafters, trees
from specdec.hf import ModelTarget
from specdec.testing import demo_model, tiny_model

PROMPT = "How many positive divisors does 196 have? Think step by step."
NODES, BRANCH = 7, 2


def main() -> None:
    """Generates, draws a round, and weighs what the recurrent layers keep of a tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a Qwen3-Next, Qwen3.5 or OLMo-Hybrid model of the Hub, or a folder")
    parser.add_argument("--draft", help="a smaller model with its tokens; prompt lookup if it is left out")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--tiny", action="store_true", help="the tiny random pair, also the default")
    arguments = parser.parse_args()

    drafter: drafters.ModelDrafter | drafters.PromptLookupDrafter = drafters.PromptLookupDrafter()
    if arguments.target and not arguments.tiny:
        options = {"device_map": "auto", "dtype": "auto"}
        model = AutoModelForCausalLM.from_pretrained(arguments.target, **options)
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        if arguments.draft:
            drafter = drafters.ModelDrafter(AutoModelForCausalLM.from_pretrained(arguments.draft, **options))
    else:
        model, (_, tokenizer) = tiny_model("qwen3_5"), demo_model(tiny=True)
        drafter = drafters.ModelDrafter(tiny_model("qwen3_5", dtype=torch.float32))
    kinds = model.config.get_text_config(decoder=True).layer_types
    print(f"{kinds.count('linear_attention')} of {len(kinds)} layers have a recurrent state.")

    # Nothing is different from a model of attention layers alone; in batches and in device rounds neither.
    generator = SpeculativeGenerator(model, drafter, trees.BestFirst(nodes=NODES, branch=BRANCH))
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    plain = model.generate(**request)
    same = torch.equal(generator.generate(**request), plain)
    print(f"\n{generator.stats}\nSame tokens as plain greedy decoding: {'yes' if same else 'no'}")

    rounds = list(generator.rounds(**request))
    shown = max(rounds, key=accepted)
    print("\nOne of the rounds, accepted nodes marked:")
    print(trees.render(shown, decode=lambda token: tokenizer.decode([token])))

    weigh(model, inputs.input_ids, shown)


def accepted(round: Round) -> int:
    """How many drafted tokens a round of one row kept."""
    return int(round.num_accepted)


@torch.no_grad()
def weigh(model: torch.nn.Module, prompt: torch.Tensor, round: Round) -> None:
    """Verifies the tree of a round by hand, and tells what the recurrent layers hold before and after.

    A state grows with the square of the size of a head, a record does not: in heads of 128 numbers the gap is wider.
    """
    target = ModelTarget(model, prompt)
    target.prefill()
    layers = target.cache.recurrent.layers
    before = [(layer.state.clone(), layer.history.clone()) for layer in layers]
    snapshot = sum(layer.bytes for layer in layers)
    target.verify(round.tree)
    records = sum(layer.bytes for layer in layers) - snapshot
    untouched = all(
        torch.equal(layer.state, state) and torch.equal(layer.history, history)
        for layer, (state, history) in zip(layers, before, strict=True)
    )
    nodes = round.tree.tokens.shape[1]
    print(f"\nStates after the pass as before it: {'yes' if untouched else 'no'}")
    print(f"All states, and the inputs of the convolutions: {snapshot:,} bytes")
    print(f"Records of a tree of {nodes} nodes:                {records:,} bytes")
    print(f"A snapshot for each node would take:            {nodes * snapshot:,} bytes")


if __name__ == "__main__":
    main()
