"""Live runs with a recorder in them: what a replay is compared with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator
from specdec.evaluate import Recorder, Recording, Replay
from specdec.protocols import Drafter, TreeBuilder
from specdec.testing import table_model
from specdec.trees import topology
from specdec.types import DraftTree, Round
from tests import helpers

EOS = 3


class Scripted(helpers.Recorder):
    """Budgets by script, cycled; 0 drafts nothing. Keeps at most `keep` nodes of a tree."""

    def __init__(self, budgets: Sequence[int], keep: int | None = None) -> None:
        super().__init__()
        self._budgets, self._keep = budgets, keep

    def budget(self) -> int:
        return self._budgets[(len(self.rounds) - 1) % len(self._budgets)]

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree if self._keep is None else topology.best(tree, self._keep)


@dataclass(frozen=True)
class Live:
    """One recorded request, and its rounds from the first drafted one on."""

    recording: Recording
    rounds: list[Round]
    recorder: Recorder
    controller: Any

    @property
    def kinds(self) -> frozenset[str]:
        """As `helpers.kinds`, and `skipped` if some round asked for no drafts."""
        found = helpers.kinds([self.rounds[0], *self.rounds])
        return found | {"skipped"} if any(not round.budget for round in self.rounds) else found


def record(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: TreeBuilder,
    prompts: Sequence[Sequence[int]],
    *,
    controller: Any = None,
    recorder: Recorder | None = None,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    **request: Any,
) -> Live:
    """Runs one request; greedy unless asked otherwise."""
    recorder = recorder or Recorder(drafter, tree, **(options or {}))
    controller = controller or helpers.Recorder()
    generator = SpeculativeGenerator(target, recorder, recorder, controller=controller)
    arguments = {"do_sample": False, "pad_token_id": helpers.PAD, "max_new_tokens": 40, **request}
    before = len(recorder.recording.requests)
    torch.manual_seed(seed)
    generator.generate(**helpers.batch(prompts), **arguments)
    rounds = controller.rounds[1:]
    while rounds and not rounds[0].budget:
        rounds = rounds[1:]
    return Live(Recording(recorder.recording.requests[before:]), rounds, recorder, controller)


def outcome(rounds: Iterable[Round]) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """What rounds accepted and committed, row by row."""
    found = []
    for round in rounds:
        tokens = zip(round.committed.tolist(), round.num_committed.tolist(), strict=True)
        found.append(
            (round.num_accepted.tolist(), round.num_committed.tolist(), [row[:count] for row, count in tokens])
        )
    return found


def nodes(tree: DraftTree) -> list[list[tuple[int, int]]]:
    """Tokens and parents of the nodes in use."""
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True)
    return [list(zip(tokens[:count], parents[:count], strict=True)) for tokens, parents, count in rows]


def assert_same(replay: Replay, live: Live) -> None:
    """The same trees with the same scores, the same accepted counts and tokens: in every round and row."""
    assert outcome(replay.rounds) == outcome(live.rounds)
    assert [nodes(round.tree) for round in replay.rounds] == [nodes(round.tree) for round in live.rounds]
    for replayed, round in zip(replay.rounds, live.rounds, strict=True):
        assert torch.equal(replayed.tree.scores, round.tree.scores)
        # Where each row may commit one token only, nothing can be drafted, whatever the budget.
        assert replayed.budget == round.budget or (replayed.budget == 0 and int(round.num_committed.max()) == 1)


@cache
def talker(noise: float = 0.0) -> PreTrainedModel:
    """A target over 7 tokens whose samples repeat themselves in part; with noise, a model that resembles it."""
    generator = torch.Generator().manual_seed(1)
    scores, other = torch.randn(2, 7, 7, generator=generator, dtype=torch.float64)
    scores[:, EOS] -= 1.5
    return table_model(torch.softmax(2.0 * scores + noise * other, -1))


def walked(texts: Iterable[Sequence[int]], trees: Iterable[DraftTree]) -> list[list[int]]:
    """Accepted nodes of trees by the tokens that came after their roots, told independently of the library."""
    found = []
    for ahead, tree in zip(texts, trees, strict=True):
        counts = []
        for tokens, row in zip(ahead, nodes(tree), strict=True):
            node, accepted = 0, 0
            for token in tokens:
                below = [child for child, (held, parent) in enumerate(row) if parent == node and held == token]
                if not below:
                    break
                node, accepted = below[0], accepted + 1
            counts.append(accepted)
        found.append(counts)
    return found
