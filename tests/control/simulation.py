"""A loop without a model: chains that are right where a script says so, passes that take the time a curve says.

Whether the token at a position can be guessed is fixed in advance for each row, so all controllers and all fixed
lengths meet the same text, and a fixed length needs no simulation at all.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import torch

from specdec.protocols import Controller
from specdec.types import DraftTree, Round, StageTimes

NODES = 15
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)

CPU = {1: 1.0, 4: 2.0, 8: 2.4, 16: 3.2}  # plain rounds by verify width, SmolLM2 in float32 on two cores
GPU = {1: 1.0, 4: 1.0, 8: 1.02, 16: 1.05}

RIGHT, WRONG = 7, 8  # token ids; the text is all sevens


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What happens, and what it takes, in plain rounds.

    Attributes:
        right: per row and position, whether the drafter's token for it is right.
        said: per row and position, the probability that the drafter claims.
        draft: cost of drafting by tree budget.
        verify: cost of a pass by verify width.
        noise: spread of measured times; one in a hundred takes five times as long.
        startup: how many times longer the first pass of each kind takes.
    """

    right: Sequence[Sequence[bool]]
    said: Sequence[Sequence[float]]
    draft: Callable[[int], float]
    verify: Callable[[int], float]
    noise: float = 0.0
    startup: float = 1.0


def steady(acceptance: float, *, rows: int, tokens: int, seed: int, said: float | None = None) -> dict[str, object]:
    """A text whose every token is guessed with the same probability."""
    chance = random.Random(seed)
    right = [[chance.random() < acceptance for _ in range(3 * tokens + NODES)] for _ in range(rows)]
    claim = acceptance if said is None else said
    return {"right": right, "said": [[claim] * len(row) for row in right]}


def copied(
    share: float, length: int, *, tokens: int, seed: int, said: tuple[float, float] = (0.3, 0.9)
) -> dict[str, object]:
    """A text of which this share was copied in runs of `length` tokens, and nothing else can be guessed."""
    chance = random.Random(seed)
    right: list[bool] = []
    claims: list[float] = []
    while len(right) < 3 * tokens + NODES:
        gap = chance.randint(1, int(2 * length * (1 - share) / share) + 1)
        right += [chance.random() < 0.03 for _ in range(gap)] + [chance.random() < 0.97 for _ in range(length)]
        claims += [said[0]] * gap + [said[1]] * length
    return {"right": [right], "said": [claims]}


def curve(costs: dict[int, float]) -> Callable[[int], float]:
    """Straight lines between measured costs."""
    widths = sorted(costs)

    def cost(width: int) -> float:
        high = next(w for w in widths if w >= width)
        low = max((w for w in widths if w <= width), default=high)
        share = (width - low) / (high - low) if high > low else 0.0
        return costs[low] + share * (costs[high] - costs[low])

    return cost


def fixed(world: World, nodes: int, tokens: int) -> float:
    """Plain rounds per token and row, times `tokens`, with chains of this length in every round."""
    rows = len(world.right)
    positions, rounds = [0] * rows, 0
    while sum(positions) < tokens * rows:
        rounds += 1
        for row, position in enumerate(positions):
            positions[row] += 1 + run_length(world.right[row], position, nodes)
    spent = rounds * (world.verify(nodes + 1) + (world.draft(nodes) if nodes else 0.0))
    return spent * tokens * rows / sum(positions)


def run_length(right: Sequence[bool], position: int, most: int) -> int:
    length = 0
    while length < most and right[position + length]:
        length += 1
    return length


@dataclasses.dataclass
class Simulation:
    """Runs a controller through a world. `widths` holds the verify width of each round."""

    controller: Controller
    world: World
    sampled: bool = False
    nodes: int = NODES
    seed: int = 0
    widths: list[int] = dataclasses.field(default_factory=list)
    budgets: list[int] = dataclasses.field(default_factory=list)

    def run(self, tokens: int) -> float:
        """Plain rounds until every row has this many tokens on average (as `fixed` counts them)."""
        world, rows = self.world, len(self.world.right)
        chance = random.Random(self.seed)
        seen: set[tuple[str, int]] = set()

        def measured(kind: str, size: int, cost: float) -> float:
            slow = world.startup if (kind, size) not in seen else 1.0
            seen.add((kind, size))
            if world.noise:
                slow *= math.exp(chance.gauss(0.0, world.noise)) * (5.0 if chance.random() < 0.01 else 1.0)
            return 0.04 * cost * slow

        self.controller.start(self.nodes, self.sampled)
        self.controller.observe(prefill(rows))
        positions, spent = [0] * rows, 0.0
        while sum(positions) < tokens * rows:
            budget = self.controller.budget()
            tree = self.controller.prune(self.drafted(positions, budget)) if budget else self.drafted(positions, 0)
            width = tree.width
            accepted = [
                run_length(world.right[row], position, count - 1)
                for row, (position, count) in enumerate(zip(positions, tree.num_nodes.tolist(), strict=True))
            ]
            times = StageTimes(
                draft=measured("draft", budget, world.draft(budget)) if budget else 0.0,
                verify=measured("verify", width, world.verify(width)),
            )
            spent += world.verify(width) + (world.draft(budget) if budget else 0.0)
            self.widths.append(width)
            self.budgets.append(budget)
            self.controller.observe(finished(len(self.widths), tree, accepted, budget, times))
            positions = [position + 1 + count for position, count in zip(positions, accepted, strict=True)]
        return spent * tokens * rows / sum(positions)

    def drafted(self, positions: list[int], budget: int) -> DraftTree:
        """One chain a row."""
        world = self.world
        ahead = [range(position, position + budget) for position in positions]
        tokens = [
            [RIGHT, *(RIGHT if world.right[row][p] else WRONG for p in places)] for row, places in enumerate(ahead)
        ]
        logs = [[0.0, *(math.log(world.said[row][p]) for p in places)] for row, places in enumerate(ahead)]
        rows = len(positions)
        return DraftTree(
            tokens=torch.tensor(tokens),
            parents=torch.arange(-1, budget).repeat(rows, 1),
            num_nodes=torch.full((rows,), budget + 1),
            scores=torch.tensor(logs).cumsum(-1),
        )


def prefill(rows: int) -> Round:
    tree = DraftTree.from_root(torch.full((rows,), RIGHT))
    return finished(0, tree, [0] * rows, 0, StageTimes(verify=1.0))


def finished(index: int, tree: DraftTree, accepted: list[int], budget: int, times: StageTimes) -> Round:
    """The record of a round in which each row accepted the first nodes of its chain."""
    most = max(accepted)
    counts = torch.tensor(accepted)
    places = torch.arange(1, most + 2)
    return Round(
        index=index,
        tree=tree,
        path=torch.where(places <= counts[:, None], places, -1),
        num_accepted=counts,
        committed=torch.where(places <= counts[:, None] + 1, RIGHT, -1),
        num_committed=counts + 1,
        budget=budget,
        times=times,
    )
