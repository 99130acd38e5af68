"""Which tree budget earns most per second, given what recent trees were worth and what passes cost.

A policy that chooses anew in every round earns (mean tokens) / (mean seconds), and the policy that is best by this
ratio is the one that maximises `tokens - rate * seconds` in each round, with `rate` the best ratio itself
(Dinkelbach). So in a round whose drafts look poor less is verified than the round's own ratio would suggest, and in
a good one more.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_FADE = 0.9  # weight of a tree relative to the next one
_CLOSE = 0.02  # relative change of the rate at which it counts as found


def ladder(nodes: int) -> list[int]:
    """The numbers of nodes worth trying: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and `nodes` itself.

    Few sizes mean few measurements, few compiled shapes, and little lost: throughput is flat around its best size.

    >>> ladder(15)
    [0, 1, 2, 3, 4, 6, 8, 12, 15]
    """
    sizes, step = [0], 1
    while sizes[-1] + step < nodes:
        sizes.append(sizes[-1] + step)
        if sizes[-1] >= 4 * step:
            step *= 2
    return [*sizes, nodes] if nodes else sizes


def gains(marginals: Sequence[float], sizes: Sequence[int], *, extend: bool) -> list[float]:
    """Expected accepted tokens by number of nodes verified, from the nodes' values in falling order.

    Args:
        marginals: value of the best node, of the second, ...
        sizes: numbers of nodes asked about, rising from 0.
        extend: whether there would have been more nodes; they are assumed to go on falling at the same pace.

    >>> gains([0.5], [0, 1, 2], extend=True), gains([0.5], [0, 1, 2], extend=False)
    ([0.0, 0.5, 0.75], [0.0, 0.5, 0.5])
    """
    values = list(marginals)
    if extend and values and values[0] > 0:
        pace = (values[-1] / values[0]) ** (1 / (len(values) - 1)) if len(values) > 1 else values[0]
        while len(values) < sizes[-1]:
            values.append(values[-1] * pace)
    totals = list(itertools.accumulate(values, initial=0.0))
    return [totals[min(size, len(values))] for size in sizes]


class Offer(NamedTuple):
    """A tree budget (0 for none) and what a round with it should bring, per row.

    Attributes:
        size: tree budget.
        tokens: committed tokens, bonus included.
        floor: the same in a cautious view.
        seconds: time of the target's pass.
        rate: tokens per second, drafting included.
    """

    size: int
    tokens: float
    floor: float
    seconds: float
    rate: float


class Outlook:
    """Gain curves of the latest trees, and the tree budget that would have earned most on them.

    Args:
        sizes: candidate budgets and numbers of nodes, from `ladder`.
        prunable: whether a round may verify fewer nodes than it drafted.
        trees: how many trees to remember.
    """

    def __init__(self, sizes: Sequence[int], *, prunable: bool, trees: int) -> None:
        self.sizes = sizes
        self._prunable = prunable
        self._curves: deque[tuple[Sequence[float], Sequence[float]]] = deque(maxlen=trees)

    def add(self, curve: Sequence[float], floor: Sequence[float]) -> None:
        """Adds the gain curve of a tree, and the one in a cautious view."""
        self._curves.append((curve, floor))

    def best(
        self, rate: float, draft: Callable[[int], float], verify: Callable[[int], float], *, largest: int
    ) -> Offer:
        """The budget that earns most.

        Args:
            rate: a first guess of the tokens per second; the closer, the better the answer.
            draft: seconds by tree budget.
            verify: seconds by verify width.
            largest: largest budget to consider.
        """
        passes = [verify(size + 1) for size in self.sizes]
        plain = 1.0 / passes[0]
        rate = max(rate, plain)
        drafts = [0.0, *(draft(size) for size in self.sizes[1:] if size <= largest)]
        while True:
            tokens, floors, seconds = self._earnings(rate, passes[: len(drafts)])
            surplus = [t - rate * (s + d) for t, s, d in zip(tokens, seconds, drafts, strict=True)]
            choice = max(range(len(drafts)), key=surplus.__getitem__)
            guess, rate = rate, max(plain, tokens[choice] / (seconds[choice] + drafts[choice]))
            if abs(rate - guess) <= _CLOSE * guess:
                return Offer(self.sizes[choice], tokens[choice], floors[choice], seconds[choice], rate)

    def _earnings(self, rate: float, passes: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
        """Mean tokens, cautious tokens and verify seconds by budget, when each round verifies what is best."""
        tokens, floors, seconds = ([0.0] * len(passes) for _ in range(3))
        total, weight = 0.0, 1.0
        for curve, floor in reversed(self._curves):
            pick = 0
            for size in range(len(passes)):
                if not self._prunable or curve[size] - curve[pick] > rate * (passes[size] - passes[pick]):
                    pick = size
                tokens[size] += weight * (1.0 + curve[pick])
                floors[size] += weight * (1.0 + floor[pick])
                seconds[size] += weight * passes[pick]
            total += weight
            weight *= _FADE
        if not total:
            return [1.0] * len(passes), [1.0] * len(passes), list(passes)
        return [t / total for t in tokens], [f / total for f in floors], [s / total for s in seconds]
