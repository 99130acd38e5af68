"""What the tests of device rounds share: an oracle that drafts in place of the lookup, a request with its rounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees
from specdec.drafters.on_device import DeviceLookup
from specdec.hf import device_rounds
from specdec.testing import FAMILIES
from specdec.trees import topology
from specdec.types import Round
from tests import helpers

NODES = 8
REFUSED = {
    "gemma4_shared": "layers that share keys and values with another layer are not served",
    "kimi_linear": "the model makes keys and values of what its cache holds",
}
SERVED = [family for family in FAMILIES if family not in REFUSED]


@dataclass(frozen=True, slots=True, eq=False)
class Oracle(DeviceLookup):
    """Knows what plain decoding gives and errs on schedule, as `OracleDrafter` does; it reads the device.

    Every right token but those on the last level has a wrong sibling before it, so accepted paths do not lie in order.

    Args:
        reference: the text of each row, padding included.
        schedules: right tokens in each round, by row; None drafts nothing.
        calls: lengths of the rows at each round so far.
    """

    reference: tuple[tuple[int, ...], ...] = ()
    schedules: tuple[Sequence[int | None], ...] = ()
    calls: tuple[list[list[int]]] = ([],)

    def __call__(self, tokens: Tensor, lengths: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drafted = []
        for row, length in enumerate(lengths.tolist()):
            schedule = self.schedules[row]
            right = schedule[len(self.calls[0]) % len(schedule)]
            drafted.append(self._row(row, length, right, int(limits[row])))
            drafted[-1][0][0] = int(tokens[row, length - 1])
        self.calls[0].append(lengths.tolist())
        pad = [(row + [0] * (self.nodes + 1), above + [-1] * (self.nodes + 1)) for row, above in drafted]
        width = slice(self.nodes + 1)
        return (
            torch.tensor([row[width] for row, _ in pad]),
            torch.tensor([above[width] for _, above in pad]),
            torch.tensor([len(row) for row, _ in drafted]),
        )

    def _row(self, row: int, length: int, right: int | None, limit: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a row."""
        tokens, parents, parent, depth = [0], [-1], 0, 0
        while right is not None and depth < limit and len(tokens) < self.nodes:
            place = length + depth
            answer = self.reference[row][place] if place < len(self.reference[row]) else 0
            follows = [(answer + 1) % 97, answer] if depth < right else [(answer + 1) % 97, (answer + 2) % 97]
            tokens, parents = tokens + follows, parents + [parent] * 2
            parent, depth = len(tokens) - 1, depth + 1
        return tokens, parents


def oracle(reference: Tensor, schedules: Sequence[Sequence[int | None]] | None = None, nodes: int = NODES) -> Oracle:
    """An oracle with the schedules of `helpers`, or others."""
    rows = reference.shape[0]
    if schedules is None:
        schedules = [helpers.MIXED] if rows == 1 else [helpers.RAGGED[row % 4] for row in range(rows)]
    return Oracle(
        nodes=nodes,
        reference=tuple(tuple(row) for row in reference.tolist()),
        schedules=tuple(schedules),
        calls=([],),
    )


@contextmanager
def drafting(draft: DeviceLookup | None) -> Iterator[None]:
    """Lets device rounds draft by something else than the device form of their drafter."""
    with pytest.MonkeyPatch.context() as patch:
        if draft is not None:
            patch.setattr(device_rounds, "device_form", lambda *_: draft)
        yield


def generator(target: PreTrainedModel, **parts: Any) -> SpeculativeGenerator:
    """Serves by device rounds."""
    return SpeculativeGenerator(target, **{"tree": trees.BestFirst(nodes=NODES), "execution": "device", **parts})


def serve(
    served: SpeculativeGenerator | PreTrainedModel, draft: DeviceLookup | None = None, **request: Any
) -> helpers.Run:
    """One request and its rounds; greedy unless asked otherwise. Checks what holds for the rounds of every request."""
    made = served if isinstance(served, SpeculativeGenerator) else generator(served)
    with drafting(draft):
        prepared = made._prepare(
            request.pop("inputs", None), **{"do_sample": False, "pad_token_id": helpers.PAD, **request}
        )
        assert prepared.obstacle == ""
        rounds = list(made._run(prepared))
    output = prepared.result()
    check_rounds(rounds, prepared.prompt, output)
    return helpers.Run(output, rounds, made)


def deepest(round: Round) -> Tensor:
    """Depth of the deepest node of each row."""
    return topology.depths(round.tree.parents).masked_fill(~round.tree.valid, 0).amax(-1)


def check_rounds(rounds: list[Round], prompt: Tensor, output: Tensor) -> None:
    """Trees, paths and tokens of the records fit together and add up to the text."""
    texts = prompt.tolist()
    for index, round in enumerate(rounds):
        assert round.index == index
        topology.check(round.tree)
        assert torch.isinf(round.tree.scores).equal(~round.tree.valid)
        assert round.path.shape == round.committed.shape
        assert round.num_accepted.tolist() == (round.path >= 0).sum(-1).tolist()
        tokens, parents = round.tree.tokens.tolist(), round.tree.parents.tolist()
        for row, count in enumerate(round.num_committed.tolist()):
            committed, path = round.committed[row, :count].tolist(), round.path[row].tolist()
            accepted = int(round.num_accepted[row])
            assert round.committed[row, count:].tolist() == [-1] * (len(path) - count)
            assert accepted <= count <= accepted + 1
            assert count or round.tree.num_nodes[row] == 1, "a tree for a row that stopped"
            assert path == path[:accepted] + [-1] * (len(path) - accepted)
            assert [tokens[row][node] for node in path[:accepted]] == committed[:accepted]
            assert [parents[row][node] for node in path[:accepted]] == [0, *path][:accepted]
            if count and texts[row]:
                assert tokens[row][0] == texts[row][-1]
            texts[row] += committed
    assert sum(int(round.num_committed.sum()) for round in rounds) > 0
    for text, row in zip(texts, output.tolist(), strict=True):
        assert row == text + [helpers.PAD] * (len(row) - len(text))
