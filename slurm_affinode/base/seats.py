"""Limits on concurrent connections, in total and for each user or machine."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

LOOPBACK = "loopback"


def machine_of(address: str) -> str:
    """Return the holder that an address counts as.

    A machine may use the whole /64 network of an IPv6 address, and every local user any loopback address as the source
    of a connection.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if parsed.is_loopback:
        return LOOPBACK
    return str(parsed if parsed.version == 4 else ipaddress.ip_network((parsed, 64), strict=False))


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
        self._seat_counts: Counter[Hashable] = Counter()

    def take(self, holder: Hashable, *, reserved: bool = False) -> bool:
        """Return ``False`` if no seat is left. ``reserved``: for root, exempt from the limits."""
        if not reserved and (self._seat_counts.total() >= self._total or self._seat_counts[holder] >= self._each):
            return False
        self._seat_counts[holder] += 1
        return True

    @property
    def full(self) -> bool:
        """Whether all seats are taken."""
        return self._seat_counts.total() >= self._total

    def to_vacate(self, holder: Hashable, waiting: Iterable[S]) -> S | None:
        """Return the connection whose seat ``holder`` may have if all are taken; ``None``: it has to go without one.

        It is one of the holder with the most seats, the oldest of those in ``waiting``.
        """
        if not self.full:
            return None
        more = [
            connection for connection in waiting if self._seat_counts[connection.holder] > self._seat_counts[holder] + 1
        ]
        return max(
            more, key=lambda connection: (self._seat_counts[connection.holder], -connection.opened), default=None
        )

    def leave(self, holder: Hashable) -> None:
        """Release a seat."""
        self._seat_counts[holder] -= 1
        if self._seat_counts[holder] <= 0:
            del self._seat_counts[holder]
