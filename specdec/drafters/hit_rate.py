"""How often a match of a given length continues as it did before: learned while a request runs.

A lookup drafter has no model, so its only honest score for "the text goes on as it did last time" is the share of
earlier positions of *this* request at which that was true. Longer matches are right more often, hence decayed counts
of hits and trials for each range of match lengths, a prior that gives longer matches more hits, and limits of 0.01
and 0.97. The form is that of the lookup chain in NInfer, which scores a node at depth d by d * log(rate). Here a node
at depth d below a match of length m is scored with the rate of length m + d: that is the length of its own match once
the path to it is accepted, so the product along a path is the probability that the path is accepted.
"""

from bisect import bisect_right

from specdec.errors import UnsupportedError

_RANGES = (1, 2, 3, 4, 5, 7, 9, 13, 17)
_LOWEST, _HIGHEST = 0.01, 0.97
_MOST_EXTRA_HITS = 48.0


class HitRate:
    """Decayed share of hits by match length, with a prior.

    Args:
        hits: prior hits of a match of one token.
        misses: prior misses.
        gain: prior hits that each further matching token adds, up to 48 in all.
        decay: factor on the counts of a range whenever it learns; the memory is about `1 / (1 - decay)` trials.

    Raises:
        UnsupportedError: for counts that are not positive, or a decay outside (0, 1].

    Example:
        >>> rate = HitRate()
        >>> rate.rate(1), rate.rate(3)
        (0.25, 0.625)
        >>> for _ in range(12):
        ...     rate.learn(1, True)
        >>> rate.rate(1) > 0.7, rate.rate(3)
        (True, 0.625)
    """

    def __init__(self, *, hits: float = 1.0, misses: float = 3.0, gain: float = 2.0, decay: float = 0.98) -> None:
        if hits <= 0 or misses <= 0 or gain < 0 or not 0 < decay <= 1:
            raise UnsupportedError(
                f"HitRate needs hits > 0, misses > 0, gain >= 0 and 0 < decay <= 1, got hits={hits}, "
                f"misses={misses}, gain={gain}, decay={decay}."
            )
        self._prior_hits, self._prior_misses, self._gain, self._decay = hits, misses, gain, decay
        self._hits = [0.0] * len(_RANGES)
        self._trials = [0.0] * len(_RANGES)

    def rate(self, length: int) -> float:
        """Estimated probability that a match of `length >= 1` tokens is a hit, in 0.01..0.97."""
        place = bisect_right(_RANGES, length) - 1
        prior = self._prior_hits + min(_MOST_EXTRA_HITS, self._gain * (length - 1))
        share = (self._hits[place] + prior) / (self._trials[place] + prior + self._prior_misses)
        return min(_HIGHEST, max(_LOWEST, share))

    def learn(self, length: int, hit: bool) -> None:
        """Records whether a match of `length >= 1` tokens was a hit."""
        place = bisect_right(_RANGES, length) - 1
        self._hits[place] = self._hits[place] * self._decay + hit
        self._trials[place] = self._trials[place] * self._decay + 1.0
