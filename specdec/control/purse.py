"""What trying may cost: the guarantee that a call stays close to plain decoding.

Drafting may be believed to pay and not pay, and finding out costs time. The purse holds what may be lost: a small
credit that grows with the tokens committed, plus what drafting has won lately. A round is affordable if its loss, in
a cautious view, is covered. The view is cautious about drafts: foreseen tokens count only as far as enough outcomes
were seen, and as far as earlier foresight came true.
"""

_CREDIT = 1.0  # plain rounds that a call may lose at once
_WINNINGS = 12.0  # plain rounds' worth of past winnings that count
_SMALL = 0.05  # plain rounds that may always be lost in one round
_LUCK = 8.0  # accepted tokens that may be missing by chance
_WEIGHT = 3.0  # accepted tokens foreseen in one round that count for its truth
_FADE = 0.95  # memory of that, per drafted round


class Purse:
    """Books the rounds that drafted against plain decoding. All amounts are in plain rounds.

    Args:
        max_loss: plain rounds that may be lost per committed token, in the long run.

    >>> purse = Purse(max_loss=0.01)
    >>> purse.affords(1.0, foreseen=3.0), purse.affords(1.1, foreseen=3.0)
    (True, False)
    >>> purse.book(cost=1.2, tokens=4.0, foreseen=3.0)
    >>> round(purse.balance, 2), purse.affords(5.0, foreseen=3.0)
    (3.8, True)
    """

    def __init__(self, max_loss: float) -> None:
        self._max_loss = max_loss
        self._won = 0.0
        self._credit = _CREDIT
        self._foreseen = self._accepted = 0.0

    def earn(self, tokens: float) -> None:
        """Lets the credit grow with the tokens (mean over rows) of a round."""
        self._credit += self._max_loss * tokens

    def book(self, *, cost: float, tokens: float, foreseen: float) -> None:
        """Books a round that drafted.

        Args:
            cost: what it took, in plain rounds.
            tokens: tokens committed, mean over rows.
            foreseen: accepted tokens that were expected, mean over rows.
        """
        self._won = min(self._won + tokens - cost, _WINNINGS)
        weight = min(1.0, _WEIGHT / max(foreseen, _WEIGHT))
        self._foreseen = _FADE * self._foreseen + weight * foreseen
        self._accepted = _FADE * self._accepted + weight * (tokens - 1)

    @property
    def balance(self) -> float:
        """What may still be lost; negative when more was lost than allowed."""
        return self._credit + self._won

    @property
    def lost(self) -> float:
        """What drafting has lost so far; negative when it won (older winnings are forgotten)."""
        return -self._won

    def affords(self, cost: float, *, foreseen: float) -> bool:
        """Whether a round may spend `cost` plain rounds beyond its first, for `foreseen` accepted tokens."""
        trust = min(1.0, (self._accepted + _LUCK) / max(self._foreseen, _LUCK))
        spare = self.balance if cost <= _CREDIT else 0.5 * self.balance
        return cost - trust * foreseen <= max(_SMALL, spare) and self.balance > -self._credit
