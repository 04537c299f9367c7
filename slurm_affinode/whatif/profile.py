"""Free units over time, by estimated run times and reservations."""

from __future__ import annotations

from bisect import bisect_right


class Profile:
    """Free units from each breakpoint to the next; the last one holds forever."""

    def __init__(self, now: int, units: int) -> None:
        self._times = [now]
        self._free = [units]

    def advance(self, now: int) -> None:
        """Forget what was before ``now``."""
        past = bisect_right(self._times, now) - 1
        if past > 0:
            del self._times[:past], self._free[:past]
        self._times[0] = max(self._times[0], now)

    def add(self, start: int, end: int, units: int) -> None:
        """Add ``units`` (negative: subtract) from ``start``, at or after the first breakpoint, to ``end``."""
        if start >= end:
            return
        first, last = self._breakpoint(start), self._breakpoint(end)
        for at in range(first, last):
            self._free[at] += units
        for at in (last, first):  # equal neighbors would let the profile grow with each job
            if 0 < at < len(self._free) and self._free[at] == self._free[at - 1]:
                del self._times[at], self._free[at]

    def earliest(self, units: int, span: int) -> int:
        """Return the earliest time from which ``units`` are free for ``span``."""
        times, free = self._times, self._free
        start = -1
        for at, time in enumerate(times):
            if free[at] < units:
                start = -1
                continue
            if start < 0:
                start = time
            if at + 1 == len(times) or times[at + 1] - start >= span:
                return start
        raise ValueError(f"{units} units are never free")

    def _breakpoint(self, time: int) -> int:
        """Return the place of a breakpoint at ``time``, which is inserted if there is none."""
        at = bisect_right(self._times, time) - 1
        if self._times[at] == time:
            return at
        self._times.insert(at + 1, time)
        self._free.insert(at + 1, self._free[at])
        return at + 1
