"""What a pass costs at each size: a profile measured beforehand, and a meter that learns during the call.

Times of one size are noisy from above: warm-up, allocation and other processes only ever add. So the meter takes the
lower median of the last samples, and no size may look dearer than a larger one. Between measured sizes it
follows a given shape (a profile, or a straight line) from one to the other; beyond them it follows the shape and half
of the trend by which the measurements left it.
"""

import bisect
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_FLOOR = 1e-9  # seconds; keeps logarithms finite
_MEMORY = 9  # samples kept per size


@dataclass(frozen=True, slots=True)
class VerifyCosts:
    """A measured cost of the target's forward by verify width: immutable, made once, given to many calls.

    Attributes:
        widths: measured verify widths (root included), rising from 1.
        costs: cost at each width in any one unit (seconds, or plain rounds); never falling.

    >>> costs = VerifyCosts.from_measurements({1: 0.040, 4: 0.080, 16: 0.128})
    >>> costs.relative(4), round(costs.relative(10), 2)
    (2.0, 2.6)
    """

    widths: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        """Checks that this is a cost curve."""
        if not self.widths or self.widths[0] != 1 or len(self.widths) != len(self.costs):
            raise ValueError(f"one cost per width, from width 1 on, is needed; got widths {self.widths}.")
        if list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must rise, got {self.widths}; use VerifyCosts.from_measurements.")
        if not self.costs[0] > 0 or list(self.costs) != sorted(self.costs):
            raise ValueError(f"costs must be positive and never fall, got {self.costs}; use from_measurements.")

    @staticmethod
    def from_measurements(measurements: Mapping[int, float]) -> "VerifyCosts":
        """The profile through `{width: cost}`; a width that measured dearer than a wider one takes its cost.

        Args:
            measurements: cost by verify width, in any one unit; width 1 must be among them.

        Raises:
            ValueError: if width 1 is missing, or a cost is not a positive number.
        """
        bad = {width: cost for width, cost in measurements.items() if not 0 < cost < math.inf or width < 1}
        if bad:
            raise ValueError(f"widths start at 1 and costs are positive numbers, got {bad}; leave these out.")
        if 1 not in measurements:
            raise ValueError(f"width 1 (a plain round) is needed as the unit, got widths {sorted(measurements)}.")
        widths = sorted(measurements)
        return VerifyCosts(tuple(widths), tuple(_never_falling([measurements[width] for width in widths])))

    def relative(self, width: int) -> float:
        """Cost of a pass of this width in plain rounds: linear between measured widths, last slope beyond them."""
        if len(self.widths) == 1:
            return 1.0
        right = min(max(bisect.bisect_left(self.widths, width), 1), len(self.widths) - 1)
        low, high = self.widths[right - 1], self.widths[right]
        slope = (self.costs[right] - self.costs[right - 1]) / (high - low)
        return (self.costs[right - 1] + slope * (width - low)) / self.costs[0]


class CostMeter:
    """Typical seconds by size (a verify width or a draft budget, from 1 on), from a few samples per size.

    Args:
        shape: expected cost by size up to a factor, for sizes that were not measured; positive, never falling.
        steepest: power of the size that no cost exceeds; a single sample above it is taken for a start-up effect.

    >>> meter = CostMeter(lambda size: 0.9 + 0.1 * size, steepest=0.7)
    >>> meter.add(1, 0.9), meter.add(1, 0.1), meter.add(16, 0.2)  # the first sample was warm-up
    (None, None, None)
    >>> round(meter(1), 3), round(meter(4), 3), round(meter(16), 3)
    (0.1, 0.12, 0.2)
    """

    def __init__(self, shape: Callable[[int], float], *, steepest: float) -> None:
        self._shape = shape
        self._steepest = steepest
        self._samples: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        """Adds one measurement."""
        self._samples.setdefault(size, deque(maxlen=_MEMORY)).append(max(seconds, _FLOOR))
        self._sizes = sorted(self._samples)
        typical = {s: sorted(samples)[(len(samples) - 1) // 2] for s, samples in self._samples.items()}
        base = max(self._sizes, key=lambda s: (min(len(self._samples[s]), 2), -s))
        for s in self._sizes:
            if len(self._samples[s]) == 1 and s > base:
                typical[s] = min(typical[s], typical[base] * (s / base) ** self._steepest)
        self._typical = _never_falling([typical[s] for s in self._sizes])
        self._trend = [math.log(t / self._shape(s)) for s, t in zip(self._sizes, self._typical, strict=True)]
        self._known = {}

    def count(self, size: int) -> int:
        """Samples held of this size."""
        return len(self._samples.get(size, ()))

    @property
    def measured(self) -> dict[int, float]:
        """Typical seconds of each measured size."""
        return dict(zip(self._sizes, self._typical, strict=True)) if self._samples else {}

    def __call__(self, size: int) -> float:
        """Typical seconds of one pass of this size; never falls with the size. Needs one measurement at least."""
        if size not in self._known:
            self._known[size] = self._estimate(size)
        return self._known[size]

    def _estimate(self, size: int) -> float:
        sizes, trend = self._sizes, self._trend
        right = bisect.bisect_left(sizes, size)
        low = self._typical[right - 1] if right else 0.0
        high = self._typical[right] if right < len(sizes) else math.inf
        if right < len(sizes) and sizes[right] == size:
            return high
        if 0 < right < len(sizes):
            start, end = self._shape(sizes[right - 1]), self._shape(sizes[right])
            return low + (high - low) * ((self._shape(size) - start) / (end - start) if end > start else 0.0)
        drift = 0.0
        if right and len(sizes) > 1:
            drift = (self._trend[-1] - self._trend[0]) / math.log(sizes[-1] / sizes[0]) * math.log(size / sizes[-1])
        level = self._trend[-1] if right else self._trend[0]
        return min(max(self._shape(size) * math.exp(level + 0.5 * drift), low), high)


def _never_falling(costs: list[float]) -> list[float]:
    """Lowers each cost to the least one at or after it."""
    least = math.inf
    lowered = []
    for cost in reversed(costs):
        least = min(least, cost)
        lowered.append(least)
    return lowered[::-1]
