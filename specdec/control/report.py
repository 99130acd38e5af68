"""What a goodput controller chose in a request, and what it knew when it did: to be printed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GoodputSummary:
    """Choices and measurements of one request.

    Attributes:
        budgets: rounds by tree budget.
        widths: rounds by verify width.
        verify_seconds: typical seconds to verify, accept and commit, by measured verify width.
        draft_seconds: typical seconds to draft and grow, by measured tree budget.
        acceptance: by range of the drafter's probability: outcomes seen (older ones fade), share accepted.
        speedup: tokens per second of the best policy known, relative to plain decoding.

    >>> print(GoodputSummary(budgets={0: 2, 15: 8}, widths={1: 2, 5: 8}, verify_seconds={1: 0.040, 5: 0.060},
    ...     draft_seconds={15: 0.001}, acceptance={"0.80-0.90": (31.0, 0.71)}, speedup=1.62))
    tree budget     0: 2   15: 8
    verify width    1: 2   5: 8
    verify cost     1: 1.00   5: 1.50   in plain rounds of 40.0 ms
    draft cost      15: 0.03
    accepted        0.80-0.90: 71 %   by what the drafter said
    speed-up        1.62 expected
    """

    budgets: dict[int, int]
    widths: dict[int, int]
    verify_seconds: dict[int, float]
    draft_seconds: dict[int, float]
    acceptance: dict[str, tuple[float, float]]
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "budgets": _text_keys(self.budgets),
            "widths": _text_keys(self.widths),
            "verify_seconds": _text_keys(self.verify_seconds),
            "draft_seconds": _text_keys(self.draft_seconds),
            "acceptance": {
                said: {"outcomes": outcomes, "accepted": share} for said, (outcomes, share) in self.acceptance.items()
            },
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        lines = [("tree budget", _pairs(self.budgets.items())), ("verify width", _pairs(self.widths.items()))]
        if self.verify_seconds:
            unit = next(iter(self.verify_seconds.values()))
            costs = _pairs((size, f"{seconds / unit:.2f}") for size, seconds in self.verify_seconds.items())
            drafts = _pairs((size, f"{seconds / unit:.2f}") for size, seconds in self.draft_seconds.items())
            lines += [("verify cost", f"{costs}   in plain rounds of {unit * 1e3:.1f} ms"), ("draft cost", drafts)]
        if self.acceptance:
            shares = _pairs((said, f"{share:.0%}".replace("%", " %")) for said, (_, share) in self.acceptance.items())
            lines.append(("accepted", f"{shares}   by what the drafter said"))
        expected = f"{self.speedup:.2f} expected" if self.speedup > 1 else "none expected: plain rounds are fastest"
        lines.append(("speed-up", expected))
        return "\n".join(f"{name:<16}{text}" for name, text in lines if text)


def _pairs(items: Iterable[tuple[Any, Any]]) -> str:
    return "   ".join(f"{key}: {value}" for key, value in items)


def _text_keys(values: dict[int, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in sorted(values.items())}
