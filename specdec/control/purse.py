"""What trying may cost: the guarantee that a call stays close to plain decoding.

Drafting may be believed to pay and not pay, and finding out costs time. The purse holds what may be lost: a small
credit that grows with the tokens committed, plus what drafting has won. A round is affordable if its loss, in a
cautious view, is covered. Foreseen tokens count only as far as earlier foresight came true.
"""

_CREDIT = 1.0  # plain rounds that a call may lose at once
_WINNINGS = 12.0  # plain rounds' worth of past winnings that count
_SMALL = 0.05  # plain rounds that one round may always lose
_LUCK = 8.0  # accepted tokens that may be missing by chance
_WEIGHT = 3.0  # accepted tokens foreseen in one round that count for the truth of foresight
_FADE = 0.95  # memory of that, per drafted round


class Purse:
    """Books the rounds that drafted against plain decoding. Tokens are means over the rows.

    Args:
        max_loss: plain rounds that may be lost per committed token, in the long run.

    Attributes:
        plain: seconds of a plain round; what was booked earlier is always seen in terms of its latest value.

    >>> purse = Purse(max_loss=0.01)
    >>> purse.plain = 0.040
    >>> purse.affords(0.080, foreseen=0.0), purse.affords(0.084, foreseen=0.0)
    (True, False)
    >>> purse.book(0.050, tokens=4.0, foreseen=3.0)
    >>> purse.balance, purse.affords(0.084, foreseen=0.0)
    (3.75, True)
    """

    def __init__(self, max_loss: float) -> None:
        self.plain = 1.0
        self._max_loss = max_loss
        self._credit = _CREDIT
        self._seconds = self._tokens = 0.0
        self._foreseen = self._accepted = 0.0

    def earn(self, tokens: float) -> None:
        """Lets the credit grow with the tokens of a round."""
        self._credit += self._max_loss * tokens

    def book(self, seconds: float, *, tokens: float, foreseen: float) -> None:
        """Books a round that drafted.

        Args:
            seconds: what it took.
            tokens: tokens committed.
            foreseen: accepted tokens that were expected.
        """
        self._seconds += seconds
        self._tokens += tokens
        self._tokens -= max(0.0, self.won - _WINNINGS)
        weight = _WEIGHT / max(foreseen, _WEIGHT)
        self._foreseen = _FADE * self._foreseen + weight * foreseen
        self._accepted = _FADE * self._accepted + weight * (tokens - 1)

    @property
    def won(self) -> float:
        """Plain rounds that drafting has saved, up to the winnings that count; negative when it lost time."""
        return self._tokens - self._seconds / self.plain

    @property
    def balance(self) -> float:
        """Plain rounds that may still be lost; negative when more was lost than allowed."""
        return self._credit + self.won

    def affords(self, seconds: float, *, foreseen: float) -> bool:
        """Whether a round of this length may be tried, when it should bring this many accepted tokens."""
        trust = min(1.0, (self._accepted + _LUCK) / max(self._foreseen, _LUCK))
        loss = seconds / self.plain - 1.0 - trust * foreseen
        spare = self.balance if seconds <= 2.0 * self.plain else 0.5 * self.balance
        return loss <= max(_SMALL, spare) and self.balance > -self._credit
