"""Timelines of devices, cut into disjoint cells with a constant set of allocations.

All times are UTC epoch milliseconds. The cells of a device cover all time: one before the interval of the query, one
after it, and in between one per period in which the set of allocations does not change, with further cuts if requested
(report buckets, slots of a timeline).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FAR = 1 << 60
"""Later than any time."""


@dataclass(frozen=True, slots=True)
class Allocations:
    """Allocations of devices to job runs, as columns. Their intervals are half-open, not empty, and inside the interval
    of the query; those of one run on one device do not overlap."""

    device: Ints
    """Row of the device table."""
    run: Ints
    """Row of the table of runs."""
    start: Ints
    end: Ints
    counted: Flags
    """True if the report covers the run. Other runs matter only because they share devices with these."""

    def __len__(self) -> int:
        return len(self.device)

    @classmethod
    def of(
        cls,
        device: npt.ArrayLike,
        run: npt.ArrayLike,
        start: npt.ArrayLike,
        end: npt.ArrayLike,
        counted: npt.ArrayLike | None = None,
    ) -> Allocations:
        """Build from array-likes of integers (``counted``: booleans; by default every run counts)."""
        of, by, begin, until = (np.asarray(values, dtype=np.int64) for values in (device, run, start, end))
        flags = np.ones(len(of), np.bool_) if counted is None else np.asarray(counted, dtype=np.bool_)
        return cls(of, by, begin, until, flags)

    def take(self, which: Ints | Flags) -> Allocations:
        """Return the selected allocations."""
        return Allocations(self.device[which], self.run[which], self.start[which], self.end[which], self.counted[which])


@dataclass(frozen=True, slots=True)
class Cells:
    """Sorted by (device, start). The first cell of a device starts at ``-FAR``, the last ends at ``FAR``."""

    since: int
    until: int
    device: Ints
    start: Ints
    end: Ints
    inside: Flags
    """True if the cell lies in the interval of the query, on a participating device."""
    sharers: Ints
    """Number of allocations that hold the cell."""
    owner_offset: Ints
    """``owners[owner_offset[c]:owner_offset[c + 1]]`` are the allocations that hold cell ``c``."""
    owners: Ints
    earliest_start: Ints
    """Earliest start of its allocations; ``since`` if it has none; ``FAR`` outside the interval."""
    latest_start: Ints
    is_held: Flags
    """True if a counted run holds the cell."""

    def __len__(self) -> int:
        return len(self.start)


def build(
    allocations: Allocations,
    *,
    taking_part: Flags,
    since: int,
    until: int,
    cut_device: Ints | None = None,
    cut_time: Ints | None = None,
) -> Cells:
    """Cut the timelines of ``len(taking_part)`` devices.

    Devices that do not participate have a single cell, outside the interval and without allocations. ``cut_device`` and
    ``cut_time``: further cuts.
    """
    devices = np.arange(len(taking_part), dtype=np.int64)
    active = devices[taking_part]
    times = [
        (allocations.device, allocations.start),
        (allocations.device, allocations.end),
        (devices, np.full(len(devices), since - 1)),
        (active, np.full(len(active), since)),
        (active, np.full(len(active), until)),
    ]
    if cut_device is not None and cut_time is not None:
        within = (cut_time > since) & (cut_time < until) & taking_part[cut_device]
        times.append((cut_device[within], cut_time[within]))
    span = until - since + 3
    key, cell = _cut(np.concatenate([d * span + (t - (since - 1)) for d, t in times]))
    device, offset = np.divmod(key, span)
    start = offset + (since - 1)
    first = offset == 0
    start[first] = -FAR
    end = np.append(start[1:], -FAR)
    end[end == -FAR] = FAR
    inside = ~first & (start < until) & taking_part[device]
    count = len(allocations)
    owner_offset, owners = _owners(cell[:count], cell[count : 2 * count], len(key))
    sharers = np.diff(owner_offset)
    earliest, latest = _owner_starts(allocations, owner_offset, owners, inside, since)
    counted_pairs = np.zeros(len(key), np.bool_)
    counted_pairs[np.repeat(np.arange(len(key)), sharers)[allocations.counted[owners]]] = True
    return Cells(
        since=since,
        until=until,
        device=device,
        start=start,
        end=end,
        inside=inside,
        sharers=sharers,
        owner_offset=owner_offset,
        owners=owners,
        earliest_start=earliest,
        latest_start=latest,
        is_held=counted_pairs,
    )


def ranges(first: Ints, count: Ints) -> Ints:
    """Return the concatenated ranges ``first[i], first[i] + 1, ...``, with ``count[i]`` elements each."""
    total = int(count.sum())
    skipped = np.cumsum(count) - count
    numbers: Ints = np.arange(total, dtype=np.int64) + np.repeat(first - skipped, count)
    return numbers


def _cut(keys: Ints) -> tuple[Ints, Ints]:
    """Return the sorted unique keys (one per cell), and the number of the cell of each element of ``keys``."""
    # The keys are mostly sorted, device by device; a stable sort exploits that and is six times as fast.
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    new = np.ones(len(keys), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    number = np.empty(len(keys), np.int64)
    number[order] = np.cumsum(new) - 1
    return ascending[new], number


def _owners(first: Ints, stop: Ints, cells: int) -> tuple[Ints, Ints]:
    """Return ``owner_offset`` and ``owners`` of ``Cells``. Allocation ``i`` holds the cells ``first[i]:stop[i]``."""
    count = stop - first
    cell = ranges(first, count)
    owner = np.repeat(np.arange(len(first), dtype=np.int64), count)
    if np.any(cell[1:] < cell[:-1]):
        owner = owner[np.argsort(cell, kind="stable")]
    offset = np.zeros(cells + 1, np.int64)
    np.cumsum(np.bincount(cell, minlength=cells), out=offset[1:])
    return offset, owner


def _owner_starts(allocations: Allocations, offset: Ints, owners: Ints, inside: Flags, since: int) -> tuple[Ints, Ints]:
    earliest = np.where(inside, since, FAR)
    latest = earliest.copy()
    occupied_rows = np.flatnonzero(np.diff(offset))
    if len(occupied_rows):
        starts = allocations.start[owners]
        shared = len(occupied_rows) < len(owners)
        earliest[occupied_rows] = np.minimum.reduceat(starts, offset[occupied_rows]) if shared else starts
        latest[occupied_rows] = np.maximum.reduceat(starts, offset[occupied_rows]) if shared else starts
    return earliest, latest
