"""The same prompt by rounds of the host and by rounds of the device, and what the latter refuse.

    python examples/device_rounds.py --compile

A device round is one program of fixed shape: draft, verify, accept, commit. On a GPU it is captured as a CUDA graph,
which the host only starts. On a CPU the same program runs step by step; there is nothing to gain, but all to see.
"""

import argparse
import time

import torch

from specdec import Round, SpeculativeGenerator, trees, verify
from specdec.errors import UnsupportedError
from specdec.testing import demo_model

PROMPT = "Count from one to ten, three times: one two three four five six seven eight nine ten, one two three"


def main() -> None:
    """Generates by both kinds of rounds, compares, shows a round and a refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="let torch.compile fuse the small operations")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = demo_model(tiny=arguments.tiny)
    model = model.to(device)
    if device == "cuda":
        model = model.to(torch.float32)  # the kernels take no float64, which the tiny model has
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(device)
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}

    # Everything but `execution` is the same. The tree is padded to its budget, so a round always has sixteen rows.
    host = SpeculativeGenerator(model, tree=trees.BestFirst(nodes=15))
    on_device = SpeculativeGenerator(model, tree=trees.BestFirst(nodes=15), execution="device")
    if arguments.compile:
        on_device.compile()
    for generator in (host, on_device):
        generator.generate(**request)  # compiles kernels and captures the graph; a later request only replays it

    texts = [model.generate(**request)]
    for name, generator in (("host", host), ("device", on_device)):
        begin = time.perf_counter()
        texts.append(generator.generate(**request))
        seconds, stats = time.perf_counter() - begin, generator.stats
        print(f"rounds of the {name:8}{seconds:7.3f} s{stats.tokens_per_round:7.2f} tokens per round")
    same = all(torch.equal(text, texts[0]) for text in texts)
    print(f"Same tokens as plain greedy decoding, both: {'yes' if same else 'no'}")

    # What a round did arrives on the host as a record; on a GPU the next round runs meanwhile.
    shown = max(on_device.rounds(**request), key=accepted)
    print("\nOne of the rounds on the device, accepted nodes marked:")
    print(trees.render(shown, decode=lambda token: tokenizer.decode([token])))

    # What a fixed program cannot do is refused, with the reason; execution="auto" would go back to the host.
    refused = SpeculativeGenerator(model, verifier=verify.Typical(), execution="device")
    try:
        refused.generate(**request)
    except UnsupportedError as error:
        print(f"\nRefused: {error}")


def accepted(round: Round) -> int:
    """How many drafted tokens a round of one row kept."""
    return int(round.num_accepted)


if __name__ == "__main__":
    main()
