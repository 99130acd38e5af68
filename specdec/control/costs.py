"""A measured cost of the target's forward by verify width: made once, given to many requests."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class VerifyCosts:
    """Cost of the target's forward by verify width, as a curve that never falls.

    Attributes:
        widths: measured verify widths (root included), rising from 1.
        costs: cost at each width, in any one unit (seconds, or plain rounds).

    >>> costs = VerifyCosts.from_measurements({1: 0.040, 4: 0.080, 16: 0.128})
    >>> costs.relative(4), round(costs.relative(10), 2)
    (2.0, 2.6)
    """

    widths: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise UnsupportedError(f"widths must rise from 1 (a plain round, the unit), got {self.widths}.")
        if len(self.widths) != len(self.costs):
            raise UnsupportedError(
                f"one cost per width is needed, got {len(self.widths)} widths, {len(self.costs)} costs."
            )
        if not 0 < self.costs[0] <= self.costs[-1] < math.inf or list(self.costs) != sorted(self.costs):
            raise UnsupportedError(f"costs must be positive and never fall, got {self.costs}; use from_measurements.")

    @staticmethod
    def from_measurements(measurements: Mapping[int, float]) -> "VerifyCosts":
        """The curve through `{width: cost}`. A width that measured dearer than a wider one takes the wider one's cost.

        Args:
            measurements: cost by verify width, in any one unit; width 1 must be among them.

        Raises:
            UnsupportedError: if width 1 is missing, or a cost is not a positive number.
        """
        if 1 not in measurements:
            raise UnsupportedError(
                f"the cost of width 1 (a plain round) is the unit; got widths {sorted(measurements)}."
            )
        bad = {width: cost for width, cost in measurements.items() if not 0 < cost < math.inf}
        if bad:
            raise UnsupportedError(f"costs are positive numbers, got {bad}; leave these widths out.")
        widths = sorted(measurements)
        return VerifyCosts(tuple(widths), tuple(never_falling([measurements[width] for width in widths])))

    def relative(self, width: int) -> float:
        """Cost of a pass of this width in plain rounds: linear between measured widths, last slope beyond them."""
        if len(self.widths) == 1:
            return 1.0
        right = min(max(bisect.bisect_left(self.widths, width), 1), len(self.widths) - 1)
        start, end = self.widths[right - 1], self.widths[right]
        slope = (self.costs[right] - self.costs[right - 1]) / (end - start)
        return (self.costs[right - 1] + slope * (width - start)) / self.costs[0]


def never_falling(costs: list[float]) -> list[float]:
    """Lowers each cost to the least one at or after it.

    >>> never_falling([3.0, 1.0, 2.0])
    [1.0, 1.0, 2.0]
    """
    least = math.inf
    lowered = []
    for cost in reversed(costs):
        least = min(least, cost)
        lowered.append(least)
    return lowered[::-1]
