"""A limit of a rate: a bucket that fills with tokens."""

from __future__ import annotations


class TokenBucket:
    """So many bytes per second in the mean, and a burst of so many at once. Who asks brings the time, and waits."""

    def __init__(self, rate: float, burst: float) -> None:
        """``rate``: bytes per second, ``burst``: bytes; both above 0."""
        self._rate, self._burst = rate, burst
        self._left = burst
        self._at_s: float | None = None

    def take(self, count: int, now_s: float) -> float:
        """Take ``count`` bytes; the seconds to wait before they may be used. What is taken is taken: debts are kept."""
        if self._at_s is not None:
            self._left = min(self._burst, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        self._left -= count
        return max(0.0, -self._left / self._rate)
