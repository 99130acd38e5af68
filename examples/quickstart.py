"""SmolLM2-135M-Instruct answers a prompt through specdec, token for token as plain greedy decoding would.

Then it shows where the speed came from: forward passes of the model, tokens per round, time by stage, one round drawn.
`--tiny` runs the same on a tiny random model, without the demo extra.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, TextStreamer

from specdec import Round, SpeculativeGenerator, control, drafters, trees
from specdec.testing import tiny_model
from specdec.testing.smollm2 import load_smollm2
from specdec.testing.tokenizer import tiny_tokenizer

PROMPT = """Summarize this text.

A language model writes one token at a time, and each token takes a forward pass that reads every weight of the model \
from memory. Reading the weights takes most of the time, so checking sixteen tokens in one pass costs little more than \
producing one. Speculative decoding uses this: a fast drafter guesses how the text may go on, the model checks all \
guesses in one pass, and the longest part that the model would have written itself is kept. The text is the same as \
without drafts, only the number of passes is smaller. A drafter may be a small model, or simply a search for the last \
few words in the text so far, since summaries, corrections and code repeat much of what they were given."""


def main() -> None:
    """Answers, compares with plain greedy decoding, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    if arguments.tiny:
        model, tokenizer = tiny_model("llama", max_position_embeddings=4096), tiny_tokenizer()
    else:
        model, tokenizer = load_smollm2()
    generator = SpeculativeGenerator(
        model,
        drafter=drafters.PromptLookupDrafter(),
        tree=trees.BestFirst(nodes=15),
        tokenizer=tokenizer,
        controller=control.Goodput(),  # drafts no more than pays on this machine
    )
    messages = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}

    print(f"Prompt: {arguments.prompt}\n\nAnswer:")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with measured(model) as fast:
        ids = generator.generate(**request, streamer=streamer)
    with measured(model) as plain:
        expected = model.generate(**request)

    stats = generator.stats
    print(f"\nSame tokens as plain greedy decoding: {'yes' if torch.equal(ids, expected) else 'no'}")
    print(f"Forward passes of the model: {plain.passes} plain, {fast.passes} speculative")
    print(f"Seconds: {plain.seconds:.1f} plain, {fast.seconds:.1f} speculative")
    print(f"Tokens per round: {stats.tokens_per_round:.2f}\n\nWhere they went:\n{stats}\n")
    print("One of the rounds, accepted nodes marked:")
    shown = max(generator.rounds(**request), key=interest)
    print(trees.render(shown, decode=lambda token: tokenizer.decode([token])))


def interest(round: Round) -> tuple[bool, int]:
    """Ranks rounds for showing one: accepted in part rather than whole, then by how much was accepted."""
    accepted = int(round.num_accepted)
    return accepted < round.tree.width - 1, accepted


class Measurement:
    """Forward passes and seconds of what ran inside `measured`."""

    passes = 0
    seconds = 0.0


@contextmanager
def measured(model: PreTrainedModel) -> Iterator[Measurement]:
    """Counts the model's forward passes from outside, the same way for both decoders."""
    measurement = Measurement()

    def count(*_: object) -> None:
        measurement.passes += 1

    hook = model.register_forward_hook(count)
    begin = time.perf_counter()
    yield measurement
    measurement.seconds = time.perf_counter() - begin
    hook.remove()


if __name__ == "__main__":
    main()
