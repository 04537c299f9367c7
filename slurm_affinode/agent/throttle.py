"""Limits per user or address: concurrent connections, requests per second, log lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

_OTHERS = object()


class Seated(Protocol):
    """A connection that has a seat."""

    @property
    def holder(self) -> Hashable:
        """The user or address that the seat counts for."""
        ...

    @property
    def opened(self) -> float:
        """When it was accepted."""
        ...


S = TypeVar("S", bound=Seated)


class Seats:
    """Limits concurrent connections, in total and per holder (a UID or an address). Not thread-safe."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._taken: Counter[Hashable] = Counter()

    def take(self, holder: Hashable, *, reserved: bool = False) -> bool:
        """Return ``False`` if no seat is left. ``reserved``: for root, exempt from the limits."""
        if not reserved and (self._taken.total() >= self._total or self._taken[holder] >= self._each):
            return False
        self._taken[holder] += 1
        return True

    @property
    def full(self) -> bool:
        """Whether all seats are taken."""
        return self._taken.total() >= self._total

    def to_vacate(self, holder: Hashable, waiting: Iterable[S]) -> S | None:
        """Return the connection whose seat ``holder`` may have if all are taken; ``None``: it has to go without one.

        It is one of the holder with the most seats, the oldest of those in ``waiting``, which have sent nothing yet.
        """
        if not self.full:
            return None
        more = [one for one in waiting if self._taken[one.holder] > self._taken[holder] + 1]
        return max(more, key=lambda one: (self._taken[one.holder], -one.opened), default=None)

    def leave(self, holder: Hashable) -> None:
        """Release a seat."""
        self._taken[holder] -= 1
        if self._taken[holder] <= 0:
            del self._taken[holder]


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
                holder = _OTHERS
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
        self._said: dict[Hashable, float] = {}

    def now(self, holder: Hashable) -> bool:
        """Return whether a line may be logged now."""
        moment = self._clock()
        if moment - self._said.get(holder, -self._every_s) < self._every_s:
            return False
        if len(self._said) >= self._most:
            self._said = {who: when for who, when in self._said.items() if moment - when < self._every_s}
            if len(self._said) >= self._most:
                return False
        self._said[holder] = moment
        return True
