"""A drafter of your own, in thirty lines, takes its place in `SpeculativeGenerator`.

It proposes the tokens that most often followed the last one in this request's own text: bigram counts, learned from
the prompt and from every committed token. However bad its guesses are, the output stays that of plain greedy decoding;
they only decide how many forward passes it takes.
"""

import argparse
import math
from collections import Counter, defaultdict

import torch
from torch import Tensor

from specdec import Candidates, Frontier, SpeculativeGenerator, trees
from specdec.protocols import DraftContext
from specdec.testing import check_drafter, demo_model

PROMPT = "Write a short poem about a cat and a hat."


class BigramDrafter:
    """Which tokens followed this one before, and how often? Each row of a batch counts for itself."""

    feature_layers = ()  # reads text alone, no hidden states of the target

    def start(self, context: DraftContext) -> None:
        """Counts the prompt."""
        texts = [ids[real].tolist() for ids, real in zip(context.tokens, context.mask, strict=True)]
        self.last = [text[0] for text in texts]
        self.followers: list[defaultdict[int, Counter[int]]] = [defaultdict(Counter) for _ in texts]
        for row, text in enumerate(texts):
            self._extend(row, text[1:])

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The most frequent followers of every frontier node, best first."""
        tokens = torch.zeros(*frontier.tokens.shape, count, dtype=torch.int64)
        log_probs = torch.full(tokens.shape, -torch.inf)  # -inf: no proposal in this place
        for row, nodes in enumerate(frontier.tokens.tolist()):
            for node, token in enumerate(nodes):
                followers = self.followers[row][token]
                for rank, (follower, seen) in enumerate(followers.most_common(count)):
                    tokens[row, node, rank] = follower
                    log_probs[row, node, rank] = math.log(seen / followers.total())
        return Candidates(tokens.to(frontier.tokens.device), log_probs.to(frontier.tokens.device))

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        """Counts what was committed, and nothing that was only drafted."""
        for row, (ids, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            self._extend(row, ids[:count])

    def finish(self) -> None:
        """Nothing is kept for the next request."""

    def _extend(self, row: int, tokens: list[int]) -> None:
        for token in tokens:
            self.followers[row][self.last[row]][token] += 1
            self.last[row] = token


def main() -> None:
    """Checks the drafter, generates with it, compares with plain greedy decoding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    # Does it keep the laws of a drafter? This raises and says what is wrong if not.
    context = DraftContext(
        tokens=inputs.input_ids, mask=inputs.attention_mask.bool(), vocab_size=model.config.vocab_size
    )
    check_drafter(BigramDrafter(), context)

    generator = SpeculativeGenerator(model, drafter=BigramDrafter(), tree=trees.BestFirst(nodes=8))
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    ids = generator.generate(**request)
    expected = model.generate(**request)
    if not torch.equal(ids, expected):
        raise SystemExit("The output differs from plain greedy decoding: please report this.")

    print(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    print(f"\nSame tokens as plain greedy decoding: yes\n\n{generator.stats}")


if __name__ == "__main__":
    main()
