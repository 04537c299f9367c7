"""Limits of what one user or address may ask of the agent: connections at a time, requests per second, log lines."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable

_OTHERS = object()


class Seats:
    """Connections at a time, in all and by holder (a uid, an address). For one thread."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._taken: Counter[Hashable] = Counter()

    def take(self, holder: Hashable, *, reserved: bool = False) -> bool:
        """``False``: no seat is left. ``reserved``: root's own, who is not kept out by what others hold."""
        if not reserved and (self._taken.total() >= self._total or self._taken[holder] >= self._each):
            return False
        self._taken[holder] += 1
        return True

    @property
    def full(self) -> bool:
        """Whether all are taken."""
        return self._taken.total() >= self._total

    def held(self, holder: Hashable) -> int:
        """How many one has."""
        return self._taken[holder]

    def leave(self, holder: Hashable) -> None:
        """Give a seat back."""
        self._taken[holder] -= 1
        if self._taken[holder] <= 0:
            del self._taken[holder]


class Pace:
    """How often something may be done for a holder: ``burst`` times at once, ``per_s`` in the long run."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic, most: int = 1024) -> None:
        """Of more than ``most`` holders at a time the others are as one."""
        self._each_s = 1 / per_s
        self._ahead_s = burst / per_s
        self._clock = clock
        self._most = most
        self._paid: dict[Hashable, float] = {}
        """Until when each has had its share."""
        self._lock = threading.Lock()

    def take(self, holder: Hashable) -> bool:
        """Whether it may be done once more now."""
        with self._lock:
            now = self._clock()
            if holder not in self._paid and len(self._paid) >= self._most:
                self._paid = {who: until for who, until in self._paid.items() if until > now}
                if len(self._paid) >= self._most:
                    holder = _OTHERS
            until = max(now, self._paid.get(holder, now)) + self._each_s
            if until > now + self._ahead_s + 1e-9:
                return False
            self._paid[holder] = until
            return True


class Seldom:
    """Says a thing about a holder at most once in ``every_s`` seconds: a log cannot be filled from outside."""

    def __init__(self, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic, most: int = 1024) -> None:
        self._every_s = every_s
        self._clock = clock
        self._most = most
        self._said: dict[Hashable, float] = {}

    def now(self, holder: Hashable) -> bool:
        """Whether it may be said now."""
        moment = self._clock()
        if moment - self._said.get(holder, -self._every_s) < self._every_s:
            return False
        if len(self._said) >= self._most:
            self._said = {who: when for who, when in self._said.items() if moment - when < self._every_s}
            if len(self._said) >= self._most:
                return False
        self._said[holder] = moment
        return True
