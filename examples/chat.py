"""A streaming chat whose conversation continues, and whose drafter learns from it.

Tokens are printed as they are committed. A suffix drafter remembers earlier answers across calls, so that text which
comes back (quotations, code, lists) takes fewer forward passes. Type `/quit`, or an empty line, to leave; `--tiny` runs
one scripted turn.
"""

import argparse
from collections.abc import Iterator

from transformers import TextStreamer

from specdec import SpeculativeGenerator, control, drafters, trees
from specdec.testing import demo_model


def typed() -> Iterator[str]:
    """What the user types, line by line."""
    while True:
        try:
            line = input("You: ").strip()
        except EOFError:
            return
        if line in ("", "/quit"):
            return
        yield line


def main() -> None:
    """Answers until the user leaves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="one scripted turn with a tiny random model")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    generator = SpeculativeGenerator(
        model,
        drafter=drafters.SuffixDrafter(),  # one object for the whole chat: it remembers
        tree=trees.BestFirst(nodes=15),
        controller=control.Goodput(),  # drafts only as much as pays on this machine
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    conversation = []
    for line in ["Hello! Who are you?"] if arguments.tiny else typed():
        conversation.append({"role": "user", "content": line})
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        limit = 48 if arguments.tiny else arguments.max_new_tokens
        print("Model: ", end="", flush=True)
        ids = generator.generate(**inputs, max_new_tokens=limit, do_sample=False, streamer=streamer)
        answer = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        conversation.append({"role": "assistant", "content": answer})

        stats = generator.stats
        speed = f"{stats.tokens_per_second:.0f} per second"
        print(f"  [{stats.new_tokens} tokens in {stats.target_passes} forward passes, {speed}]\n")


if __name__ == "__main__":
    main()
