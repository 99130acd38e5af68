"""A decoding loop of your own, from parts, without `SpeculativeGenerator` and without transformers' `generate`.

First by hand, so that nothing is hidden: draft, verify, accept, commit, for one row and greedy decoding. Then the loop
of the library, `specdec.rounds.rounds`, with a ledger that keeps the committed tokens: it also does batches,
sampling, end tokens and length limits. Both must give the same tokens.
"""

import argparse

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import control, drafters, trees, verify
from specdec.hf import ModelTarget
from specdec.protocols import DraftContext
from specdec.rounds import rounds
from specdec.testing import PlainLedger, demo_model

PROMPT = "Count: one two three, one two three, one two"


def by_hand(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int, ends: list[int]) -> list[int]:
    """Greedy decoding of one prompt `[1, seq]`, one round after another."""
    target, drafter = ModelTarget(model, prompt), drafters.PromptLookupDrafter()
    builder, verifier = trees.BestFirst(nodes=8), verify.TargetOnly()

    # The prompt runs once. Its last logits give the first token: the root of the first tree.
    root = target.prefill().logits[:, -1].argmax(-1)
    new = [int(root)]
    text = torch.cat([prompt, root[:, None]], 1)
    drafter.start(DraftContext(tokens=text, mask=torch.ones_like(text, dtype=torch.bool), vocab_size=target.vocab_size))

    while len(new) < max_new_tokens and new[-1] not in ends:
        # Draft: not deeper than what may still be committed, one place being the bonus token's.
        limits = torch.tensor([max_new_tokens - len(new) - 1])
        tree = builder.grow(drafter, root, limits, builder.nodes, vocab_size=target.vocab_size)
        # Verify: one forward pass over all nodes. Greedy decoding is a law that is certain of the best token.
        logits = target.verify(tree).logits
        probs = torch.nn.functional.one_hot(logits.argmax(-1), target.vocab_size).float()
        # Accept: the nodes the target agrees with, and the bonus token, its own choice after the last of them.
        verdict = verifier(tree, probs)
        accepted = verdict.path[0, : int(verdict.num_accepted)]
        # Commit: the cache keeps the rows of the root and of the accepted nodes. The bonus token has not been run
        # yet; it is the next root.
        target.commit(torch.cat([torch.tensor([0]), accepted])[None], verdict.num_accepted + 1)
        committed = torch.cat([tree.tokens[0, accepted], verdict.bonus])
        drafter.commit(committed[None], verdict.num_accepted + 1)
        root = verdict.bonus
        for token in committed.tolist():
            new.append(token)
            if token in ends:
                break  # an end token may come anywhere in a round; what follows it was never said
    drafter.finish()
    return new


def by_rounds(
    model: PreTrainedModel, prompt: Tensor, max_new_tokens: int, ends: list[int]
) -> tuple[list[int], list[int]]:
    """The same with the library's loop; also returns how many tokens each round committed."""
    ledger = PlainLedger(prompt, max_new_tokens=max_new_tokens, eos_token_ids=ends)
    loop = rounds(
        ModelTarget(model, prompt),
        drafters.PromptLookupDrafter(),
        trees.BestFirst(nodes=8),
        verify.TargetOnly(),
        ledger,
        control.Always(),  # or control.Goodput(), which drafts only as much as pays
    )
    # The loop is an iterator: stop, look or draw between two rounds as you like.
    counts = [int(round.num_committed) for round in loop]
    return ledger.rows()[0][prompt.shape[1] :], counts


@torch.no_grad()
def main() -> None:
    """Runs both loops and plain decoding, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    limit, end = arguments.max_new_tokens, model.generation_config.eos_token_id
    ends = [] if end is None else [end]

    plain = model.generate(prompt, max_new_tokens=limit, do_sample=False)[0, prompt.shape[1] :].tolist()
    hand = by_hand(model, prompt, limit, ends)
    new, counts = by_rounds(model, prompt, limit, ends)
    if not hand == new == plain:
        raise SystemExit("A loop differs from plain greedy decoding: please report this.")

    print(f"{PROMPT} ...{tokenizer.decode(new)}\n")
    print("Both loops give the tokens of plain greedy decoding.")
    print(f"Tokens committed in each round: {' '.join(map(str, counts))} ({len(new)} in {len(counts)} forward passes)")


if __name__ == "__main__":
    main()
