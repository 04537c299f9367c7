"""Limits per user or address: requests per second, log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_OTHER_HOLDERS = object()


class Pace:
    """Rate limit per holder: ``burst`` at once, ``per_s`` in the long run. Not thread-safe."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic, most: int = 1024) -> None:
        """``most``: number of holders with a limit of their own; all others share one."""
        self._each_s = 1 / per_s
        self._ahead_s = burst / per_s
        self._clock = clock
        self._most = most
        self._paid: dict[Hashable, float] = {}
        """Time until which each holder has used its share."""

    def take(self, holder: Hashable) -> bool:
        """Return whether the holder may proceed now, and count it."""
        now = self._clock()
        if holder not in self._paid and len(self._paid) >= self._most:
            self._paid = {who: until for who, until in self._paid.items() if until > now}
            if len(self._paid) >= self._most:
                holder = _OTHER_HOLDERS
        until = max(now, self._paid.get(holder, now)) + self._each_s
        if until > now + self._ahead_s + 1e-9:
            return False
        self._paid[holder] = until
        return True


class Seldom:
    """Limits log lines about a holder to one in ``every_s`` seconds, so that clients cannot flood the log."""

    def __init__(self, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic, most: int = 1024) -> None:
        self._every_s = every_s
        self._clock = clock
        self._most = most
        self._logged: dict[Hashable, float] = {}

    def now(self, holder: Hashable) -> bool:
        """Return whether a line may be logged now."""
        moment = self._clock()
        if moment - self._logged.get(holder, -self._every_s) < self._every_s:
            return False
        if len(self._logged) >= self._most:
            self._logged = {who: when for who, when in self._logged.items() if moment - when < self._every_s}
            if len(self._logged) >= self._most:
                return False
        self._logged[holder] = moment
        return True
