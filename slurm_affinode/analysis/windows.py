"""Idle windows: stretches of idle time of one GPU within one allocation, found in blocks and joined across them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from slurm_affinode.analysis.places import Places, Rows
from slurm_affinode.analysis.segments import Allocations, Cells, Flags, Floats, Ints, ranges

BOUNDS_S = (300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600)
"""Bounds of the histogram of idle windows; a window of exactly a bound belongs above it."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Idle windows, as columns."""

    allocation: Ints
    start: Ints
    end: Ints
    share: Floats
    """The part of its time that the allocation is given, ms."""

    def __len__(self) -> int:
        return len(self.allocation)

    def take(self, which: Flags) -> Windows:
        """Some of them."""
        return Windows(self.allocation[which], self.start[which], self.end[which], self.share[which])


@dataclass(frozen=True, slots=True)
class IdleRuns:
    """Stretches of idle rows of one place, as columns, in order."""

    number: Ints
    """Consecutive numbers are consecutive stretches of rows."""
    place: Ints
    first: Ints
    last: Ints
    begin: Ints
    """Time of the first sample."""
    until: Ints
    """Time up to which the last sample counts, in its cell or beyond."""


def find(idle: IdleRuns, rows: Rows, at: Places, allocations: Allocations, cells: Cells) -> tuple[Windows, Windows]:
    """The windows in a block: those that ended in it, and those that may go on in another piece or block.

    Neighbouring runs are one window, however the cells cut them.
    """
    sharers = cells.sharers[at.cell]
    # Also a place that is only reached counts: the time of a window that ends in it is shared there.
    shared = bool((sharers > 1).any())
    if shared:
        run, holder = _by_allocation(idle, at, cells, sharers)
    else:
        run = np.flatnonzero(sharers[idle.place])
        # Of a place that nobody holds, any allocation will do: it has no run here.
        owner = cells.owners[np.minimum(cells.owner_offset[at.cell], len(cells.owners) - 1)] if len(run) else at.cell
        holder = owner[idle.place[run]]
    fresh = np.ones(len(run), np.bool_)
    near = np.flatnonzero(idle.number[run[1:]] == idle.number[run[:-1]] + 1)
    joined = (holder[near] == holder[near + 1]) & (idle.until[run[near]] == idle.begin[run[near + 1]])
    fresh[near[joined] + 1] = False
    head = np.flatnonzero(fresh)
    first, last = run[head], run[np.append(head[1:], len(run)) - 1] if len(run) else run
    holder = holder[head]
    begin, until, limit = idle.begin[first], idle.until[last], allocations.end[holder]
    open_ = np.isin(idle.first[first], rows.first)
    open_ |= np.isin(idle.last[last], rows.last[rows.goes_on]) & (until < limit)
    until = np.minimum(until, limit)
    lasting = (
        cells.shared_time(allocations.device[holder], begin, until) if shared else (until - begin).astype(np.float64)
    )
    windows = Windows(holder, begin, until, lasting)
    # A sample of a device whose step is unknown counts for no time.
    some = until > begin
    return windows.take(some & ~open_), windows.take(some & open_)


def _by_allocation(idle: IdleRuns, at: Places, cells: Cells, sharers: Ints) -> tuple[Ints, Ints]:
    """Each idle run once for each of its holders, by holder."""
    count = sharers[idle.place]
    run = np.repeat(np.arange(len(count)), count)
    holder = cells.owners[ranges(cells.owner_offset[at.cell[idle.place]], count)]
    order = np.argsort(holder, kind="stable")
    return run[order], holder[order]


def stitch(windows: Iterable[Windows]) -> Windows:
    """Join windows of one allocation of which one begins where the other ends."""
    listed = list(windows)
    if not listed:
        nothing = np.empty(0, np.int64)
        return Windows(nothing, nothing, nothing, np.empty(0))
    allocation = np.concatenate([w.allocation for w in listed])
    start = np.concatenate([w.start for w in listed])
    end = np.concatenate([w.end for w in listed])
    share = np.concatenate([w.share for w in listed])
    order = np.lexsort((start, allocation))
    allocation, start, end, share = allocation[order], start[order], end[order], share[order]
    fresh = np.append(True, (allocation[1:] != allocation[:-1]) | (start[1:] != end[:-1]))
    head = np.flatnonzero(fresh)
    tail = np.append(head[1:], len(start)) - 1
    return Windows(allocation[head], start[head], end[tail], np.add.reduceat(share, head))


def bins(length_ms: Ints) -> Ints:
    """The bin of the histogram in which each window falls."""
    found = np.zeros(len(length_ms), np.int64)
    for bound in BOUNDS_S:
        # A handful of comparisons is quicker than a search.
        found += length_ms >= bound * 1000
    return found
