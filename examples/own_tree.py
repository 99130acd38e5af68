"""A tree builder of your own: the best chain, with the runner-up of every step beside it as a safety net.

    root ── best ── best ── best
        └─ second └─ second └─ second

The chain pays when the drafter is right several times in a row; a runner-up pays where it was nearly right. The
drafter is asked once a level about one node. With a tree this shape a builder needs no search, only index algebra.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import DraftTree, Frontier, SpeculativeGenerator, drafters, trees
from specdec.protocols import Drafter
from specdec.testing import check_builder, demo_model

PROMPT = "List the numbers from one to twenty, and then once more."


@dataclass(frozen=True)
class SafetyNet:
    """A chain of best tokens, each with a runner-up beside it."""

    nodes: int  # most nodes drafted in a round, root excluded
    sampled = False  # nothing is drawn: the tree is a function of the drafter's answers
    chain = False  # nodes have siblings

    def grow(
        self,
        drafter: Drafter,
        root: Tensor,
        limits: Tensor,
        budget: int,
        *,
        vocab_size: int,  # needed by builders that draw
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """Grows the tree of one round, for all rows of the batch at once."""
        levels = min(-(-budget // 2), int(limits.max()))  # two nodes a level; limits: deepest node of each row
        tree = DraftTree.from_root(root)
        tokens, parents, scores = [tree.tokens], [tree.parents], [tree.scores]
        frontier = Frontier.from_root(root, valid=limits > 0)
        tip, tip_score = 0, tree.scores
        for depth in range(1, levels + 1):
            found = drafter.children(frontier, 2)
            pair, log_probs = found.tokens[:, 0], found.log_probs[:, 0]
            if pair.shape[1] < 2:
                break  # a drafter may have fewer proposals than it was asked for
            # A score is the log-probability of the whole path. Where there is no node, it is -inf.
            paths = (tip_score + log_probs).masked_fill(~frontier.valid, -torch.inf)
            tokens.append(pair)
            parents.append(torch.full_like(pair, tip))
            scores.append(paths)
            # The next frontier is the better child; its parent is node 0 of the frontier above.
            tip, tip_score = 2 * depth - 1, paths[:, :1]
            alive = (tip_score > -torch.inf) & (limits > depth)[:, None]
            frontier = Frontier(pair[:, :1], torch.zeros_like(pair[:, :1]), alive, depth)
        width = 1 + 2 * (len(tokens) - 1)
        full = DraftTree(
            tokens=torch.cat(tokens, 1),
            parents=torch.cat(parents, 1),
            num_nodes=torch.full_like(root, width),
            scores=torch.cat(scores, 1),
        )
        # Drop what does not exist, then what the budget does not allow (an odd budget drops one node).
        return trees.topology.best(trees.topology.prune(full, full.scores > -torch.inf), budget)


def main() -> None:
    """Checks the builder, generates with it, draws the round that accepted most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    # Does it keep the laws of a tree builder? This raises and says what is wrong if not.
    check_builder(SafetyNet(nodes=8))

    model, tokenizer = demo_model(tiny=arguments.tiny)
    generator = SpeculativeGenerator(model, drafter=drafters.PromptLookupDrafter(), tree=SafetyNet(nodes=8))
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    rounds = list(generator.rounds(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False))
    best = max(rounds, key=lambda round: (int(round.num_accepted), round.tree.width))
    print(f"Round {best.index}, accepted nodes marked with *:\n")
    print(trees.render(best, decode=lambda token: tokenizer.decode([token])))
    print(f"\n{generator.stats}")


if __name__ == "__main__":
    main()
