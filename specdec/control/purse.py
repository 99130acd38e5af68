"""What trying may cost: the guarantee that a call stays close to plain decoding.

Drafting may be believed to pay and not pay, and finding out costs time. The purse holds what may be lost: a small
credit that grows with the tokens committed, plus what drafting has won. A round is affordable if its loss, in a
cautious view, is covered. Foreseen tokens count only as far as earlier foresight came true.
"""

from collections import Counter

from specdec.control.meter import RoundCosts

_CREDIT = 1.0  # plain rounds that a call may lose at once
_WINNINGS = 12.0  # plain rounds' worth of past winnings that count
_SMALL = 0.02  # plain rounds that one round may always lose
_LUCK = 8.0  # accepted tokens that may be missing by chance
_WEIGHT = 3.0  # accepted tokens foreseen in one round that count for the truth of foresight
_FADE = 0.95  # memory of that, per drafted round


class Purse:
    """Books the rounds that drafted against plain decoding. Amounts are plain rounds, tokens are means over the rows.

    What rounds took is not booked, only what they were: they are paid at the latest known costs, so a first
    measurement that was mostly start-up does not weigh on the whole request.

    Args:
        costs: what rounds cost in this request.
        max_loss: plain rounds that may be lost per committed token, in the long run.

    >>> from specdec.types import StageTimes
    >>> costs = RoundCosts(None)
    >>> for _ in range(2):
    ...     costs.add(width=1, budget=0, times=StageTimes(verify=0.040))
    ...     costs.add(width=4, budget=3, times=StageTimes(draft=0.004, verify=0.048))
    >>> purse = Purse(costs, max_loss=0.01)
    >>> purse.affords(0.080, foreseen=0.0), purse.affords(0.084, foreseen=0.0)
    (True, False)
    >>> purse.book(budget=3, width=4, tokens=4.0, foreseen=3.0)
    >>> round(purse.balance, 2), purse.affords(0.084, foreseen=0.0)
    (3.74, True)
    """

    def __init__(self, costs: RoundCosts, *, max_loss: float) -> None:
        self._costs = costs
        self._max_loss = max_loss
        self._credit = _CREDIT
        self._tokens = 0.0
        self._rounds: Counter[tuple[int, int]] = Counter()
        self._foreseen = self._accepted = 0.0
        self.won = 0.0

    def book(self, *, budget: int, width: int, tokens: float, foreseen: float) -> None:
        """Books a round.

        Args:
            budget: its tree budget; 0 if it did not draft.
            width: its verify width.
            tokens: tokens committed.
            foreseen: accepted tokens that were expected.
        """
        self._credit += self._max_loss * tokens
        if budget:
            self._rounds[budget, width] += 1
            self._tokens += tokens
            weight = _WEIGHT / max(foreseen, _WEIGHT)
            self._foreseen = _FADE * self._foreseen + weight * foreseen
            self._accepted = _FADE * self._accepted + weight * (tokens - 1)
        spent = sum(
            count * (self._costs.draft(size) + self._costs.verify(rows)) for (size, rows), count in self._rounds.items()
        )
        self.won = self._tokens - spent / self._costs.plain_floor
        if self.won > _WINNINGS:
            self._tokens -= self.won - _WINNINGS
            self.won = _WINNINGS

    @property
    def balance(self) -> float:
        """Plain rounds that may still be lost; negative when more was lost than allowed."""
        return self._credit + self.won

    def affords(self, seconds: float, *, foreseen: float) -> bool:
        """Whether a round of this length may be tried, when it should bring this many accepted tokens."""
        trust = min(1.0, (self._accepted + _LUCK) / max(self._foreseen, _LUCK))
        cost = seconds / self._costs.plain_floor - 1.0
        spare = self.balance if cost <= _CREDIT else 0.5 * self.balance
        return cost - trust * foreseen <= max(_SMALL, spare) and self.balance > -self._credit
