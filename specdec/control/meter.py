"""What a pass costs at each size, learnt during the request.

Times are noisy from above: warm-up, allocation and other processes only ever add. So the typical time of a size is the
lower median of its last samples; a lone sample is believed in part (the first pass of a size often pays for start-up,
and the next one will tell); and no size may look dearer than a larger one. Between measured sizes costs follow a given
shape from one to the other; beyond them they follow the shape and half of the trend by which the measurements left it.
"""

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterable

from specdec.control.costs import VerifyCosts, never_falling
from specdec.types import StageTimes

_FLOOR = 1e-9  # seconds; keeps logarithms finite
_MEMORY = 9  # samples kept per size
_BELIEF = 0.7  # how far a lone sample is believed, from what was expected to what it says, on a log scale

_WIDTH_SLOPE = 0.07  # cost of one more node, in plain rounds, before it was measured
_WIDTH_BOUND = 0.5  # power of the width by which costs grow in a cautious view
_WIDTH_STEEPEST = 0.7  # and the power beyond which a lone sample is not believed
_DRAFT_SLOPE = 0.25  # 0 is a drafter that drafts a block at once, 1 one that takes a forward per token
_STARTUP = 0.3  # plain rounds that the first draft counts for at most: it also starts the drafter


class CostMeter:
    """Typical seconds by size (a verify width or a tree budget, from 1 on), from a few samples per size.

    Args:
        shape: expected cost by size up to a factor; positive, never falling.
        steepest: power of the size that no cost exceeds.

    Attributes:
        measured: typical seconds of each measured size, by rising size.

    >>> meter = CostMeter(lambda size: 0.9 + 0.1 * size, steepest=0.7)
    >>> for size, seconds in [(1, 0.9), (1, 0.1), (16, 0.2)]:  # the first sample was warm-up
    ...     meter.add(size, seconds)
    >>> round(meter(1), 3), round(meter(4), 3), round(meter(16), 3)
    (0.1, 0.12, 0.2)
    """

    def __init__(self, shape: Callable[[int], float], *, steepest: float) -> None:
        self._shape = shape
        self._steepest = steepest
        self._samples: dict[int, deque[float]] = {}
        self._sizes: list[int] = []
        self._typical: list[float] = []
        self.measured: dict[int, float] = {}
        self._known: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        """Adds one measurement."""
        self._samples.setdefault(size, deque(maxlen=_MEMORY)).append(max(seconds, _FLOOR))
        self._sizes = sorted(self._samples)
        typical = {s: self.seen(s) for s in self._sizes}
        base = max(self._sizes, key=lambda s: (min(len(self._samples[s]), 2), -s))
        for s in self._sizes:
            if len(self._samples[s]) == 1 and s > base:
                expected = typical[base] * self._shape(s) / self._shape(base)
                believed = min(typical[s], typical[base] * (s / base) ** self._steepest)
                typical[s] = min(believed, expected * math.pow(believed / expected, _BELIEF))
        self._typical = never_falling([typical[s] for s in self._sizes])
        self.measured = dict(zip(self._sizes, self._typical, strict=True))
        self._known = dict(self.measured)

    def seen(self, size: int) -> float:
        """Lower median of the samples of this size: what was seen, whether it is believed or not."""
        samples = sorted(self._samples[size])
        return samples[(len(samples) - 1) // 2]

    def count(self, size: int) -> int:
        """Samples held of this size."""
        return len(self._samples.get(size, ()))

    def __call__(self, size: int) -> float:
        """Typical seconds at this size; never falls with the size. Needs one measurement at least."""
        if size not in self._known:
            self._known[size] = self._estimate(size)
        return self._known[size]

    def _estimate(self, size: int) -> float:
        sizes, typical, shape = self._sizes, self._typical, self._shape
        right = bisect.bisect_left(sizes, size)
        if right == 0:
            return min(typical[0], typical[0] * shape(size) / shape(sizes[0]))
        if right < len(sizes):
            start, end = shape(sizes[right - 1]), shape(sizes[right])
            share = (shape(size) - start) / (end - start) if end > start else 1.0
            return typical[right - 1] + share * (typical[right] - typical[right - 1])
        steps = math.log(sizes[-1] / sizes[0])
        growth = typical[-1] / typical[0] * shape(sizes[0]) / shape(sizes[-1])
        drift = growth ** (0.5 * math.log(size / sizes[-1]) / steps) if steps else 1.0
        return max(typical[-1], typical[-1] * shape(size) / shape(sizes[-1]) * drift)


class RoundCosts:
    """What the parts of a round cost in this request, in seconds: as expected, and in a cautious view.

    Args:
        profile: verify costs that were measured beforehand; then the cautious view of verifying is the expected one.

    >>> costs = RoundCosts(None)
    >>> for _ in range(2):
    ...     costs.add(width=1, budget=0, times=StageTimes(verify=0.040))
    ...     costs.add(width=4, budget=3, times=StageTimes(draft=0.010, verify=0.050))
    >>> costs.plain, costs.verify(4), costs.draft(3), costs.draft_bound(6)
    (0.04, 0.05, 0.01, 0.02)
    """

    def __init__(self, profile: VerifyCosts | None) -> None:
        self._profile = profile
        self._verify = CostMeter(profile.relative if profile else _line(_WIDTH_SLOPE), steepest=_WIDTH_STEEPEST)
        self._draft = CostMeter(_line(_DRAFT_SLOPE), steepest=1.0)
        self._drafts = 0

    def add(self, *, width: int, budget: int, times: StageTimes) -> None:
        """Adds a round: its verify width, its tree budget (0 if it did not draft) and its times."""
        self._verify.add(width, times.verify + times.accept + times.commit)
        if budget:
            self._drafts += 1
            if self._drafts == 2 and max(self._draft.measured.values()) > _STARTUP * self.plain:
                self._draft = CostMeter(_line(_DRAFT_SLOPE), steepest=1.0)
            self._draft.add(budget, times.draft + times.grow)

    @property
    def plain(self) -> float:
        """Seconds of a plain round; inferred from wider ones until one was measured."""
        return self._verify(1)

    @property
    def plain_floor(self) -> float:
        """The same in a cautious view: what drafting has to beat, at least."""
        if self._profile is not None:
            return self.plain
        narrowest = min(self.widths)
        return min(self.plain, self._verify(narrowest) / math.pow(narrowest, _WIDTH_BOUND))

    @property
    def widths(self) -> dict[int, float]:
        """Typical seconds by measured verify width."""
        return self._verify.measured

    @property
    def budgets(self) -> dict[int, float]:
        """Typical seconds by measured tree budget."""
        return self._draft.measured

    def count(self, width: int) -> int:
        """Recent rounds of this verify width."""
        return self._verify.count(width)

    def verify(self, width: int) -> float:
        """Seconds to verify, accept and commit at this width."""
        return self._verify(width)

    def verify_bound(self, width: int) -> float:
        """The same in a cautious view."""
        largest = self._largest(self.widths, width)
        if self._profile is not None or not largest:
            return self._verify(width)
        return max(self._verify(width), self._verify(largest) * math.pow(width / largest, _WIDTH_BOUND))

    def verify_hope(self, width: int) -> float:
        """The same in a hopeful view: as cheap as a pass of half the width, if that one was measured twice."""
        settled = self._largest((w for w in self.widths if self.count(w) > 1), width)
        if self._profile is not None or self.count(width) > 1 or not settled or width > 2 * settled + 2:
            return self._verify(width)
        return self._verify(settled)

    def draft(self, size: int) -> float:
        """Seconds to draft and grow a tree of this budget."""
        seconds = self._draft(size)
        return min(seconds, _STARTUP * self.plain * _line(_DRAFT_SLOPE)(size)) if self._drafts == 1 else seconds

    def draft_bound(self, size: int) -> float:
        """The same in a cautious view: each further node as dear as the ones before."""
        largest = self._largest(self.budgets, size)
        if not largest or self._drafts == 1:
            return self.draft(largest or size) * size / (largest or size)
        return max(self.draft(size), self._draft.seen(largest) * size / largest)

    @staticmethod
    def _largest(sizes: Iterable[int], most: int) -> int:
        return max((size for size in sizes if size <= most), default=0)


def _line(slope: float) -> Callable[[int], float]:
    """The shape of a cost that is 1 at size 1 and grows by `slope` with each further node."""
    return lambda size: 1.0 + slope * (size - 1)
