"""Samples x cells: the sums of a block of samples, without hashing and without a search per sample.

Samples lie sorted by (device, time); cells (``segments``) are few. So the boundaries of the cells are searched in the
samples, and sums are taken over the stretch of rows that lies in a cell. Times of the classes of activity come from
runs (stretches of one class without a gap) as differences of two times, exact in milliseconds; of the other values
one product and one sum per sample is all that is done. Only the last sample of a cell can reach beyond it: these few
are put right by themselves (``_corrections``).

Values are 32-bit floats as they are stored, sums over a cell's rows are taken pairwise, all further sums are 64 bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.segments import FAR, Allocations, Cells, Flags, Floats, Ints, ranges

Float32s = npt.NDArray[np.float32]
Classes = npt.NDArray[np.uint8]

BUSY, LOW, IDLE, UNKNOWN = 0, 1, 2, 3
"""Classes of activity, as codes."""

PERCENT = ("util_pct",)
FRACTIONS = ("engine_active", "sm_active", "tensor_active", "dram_active")
UTIL, FB, POWER = "util_pct", "fb_used_mib", "power_w"
COLUMNS = ("time", *PERCENT, *FRACTIONS, FB, POWER)
"""What the join reads of a sample."""

TIME_SUMS = 4
"""The first columns of ``SUMS`` are times, one for each class."""
SUMS = ("busy", "low", "idle", "unknown", "util", "util_known", "fb", "fb_known", "fb_idle", "power", "power_known",
        "power_idle")  # fmt: skip
"""Columns of sums: time per class in ms; then value x ms, ms with a value, value x ms while idle."""
_METRICS = ((UTIL, 4, 5, None), (FB, 6, 7, 8), (POWER, 9, 10, 11))

WINDOW_BOUNDS_S = (300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600)
"""Bounds of the histogram of idle windows; a window of exactly a bound belongs above it."""
_WINDOW_BOUNDS_MS = np.array(WINDOW_BOUNDS_S) * 1000


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one metric; NaN where missing. A metric that is missing in the whole block has no column."""

    values: Float32s
    complete: bool
    """Whether no value is missing."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The rows of one device in one part, as columns; in the order of the rows, which they cover without a hole."""

    device: Ints
    row: Ints
    """First row."""
    end: Ints
    """Row behind the last."""
    step: Ints
    """Sampling step, ms."""
    limit: Floats
    """Longest distance of two samples that is no gap, ms."""
    next_time: Ints
    """Time of the device's first sample behind this piece; ``FAR`` where there is none."""
    first_time: Ints
    reach: Ints
    """Time of the last sample plus the longest that it can count."""

    def __len__(self) -> int:
        return len(self.device)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows."""

    row: int
    """Number of the first."""
    time: Ints
    columns: Mapping[str, Column]
    next_time: int
    """Time of the row behind the block, where that belongs to the same piece; else of no meaning."""


class Scratch:
    """Memory for values per sample that is used again block after block; for one thread.

    Memory that is given back to the system and taken again costs more than what is computed in it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[np.generic]] = {}

    def floats(self, name: str, count: int) -> Float32s:
        """An array of ``count`` 32-bit floats, of any content."""
        return self._array(name, count, np.float32)  # type: ignore[return-value]

    def ints(self, name: str, count: int) -> npt.NDArray[np.int32]:
        """An array of ``count`` 32-bit integers, of any content."""
        return self._array(name, count, np.int32)  # type: ignore[return-value]

    def flags(self, name: str, count: int) -> Flags:
        """An array of ``count`` truth values, of any content."""
        return self._array(name, count, np.bool_)  # type: ignore[return-value]

    def _array(self, name: str, count: int, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        held = self._arrays.get(name)
        if held is None or len(held) < count:
            self._arrays[name] = held = np.empty(count, dtype)
        return held[:count]


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of idle time of one allocation, as columns."""

    allocation: Ints
    start: Ints
    end: Ints
    share: Floats
    """The part of its time that the allocation is given, ms."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What a block adds."""

    cell: Ints
    """Cells that get something; one may occur several times."""
    sums: Floats
    """One row per element of ``cell``, the columns of ``SUMS``."""
    fb_peak: Floats
    """Largest framebuffer value, MiB; NaN where there is none."""
    shared_cell: Ints
    """Cells of which only some sharers get the part in ``shared_sums``: those that held the device at
    ``shared_time`` already, when its sample was taken."""
    shared_sums: Floats
    shared_time: Ints
    windows: Windows
    """Closed idle windows."""
    open_windows: Windows
    """Idle windows that touch the first or the last row of a piece: they may go on in another."""
    gap_ms: int
    """Time in gaps while a run that counts held the device."""
    gaps: int
    """Number of these gaps."""
    samples: int
    """Rows within the asked interval."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The pieces of a block, in rows of the block, and the weights of its samples."""

    device: Ints
    first: Ints
    end: Ints
    weight: npt.NDArray[np.int32]
    """How long each sample counts before it is cut to its cell, ms."""
    gap_after: Ints
    """Rows that a gap follows, within a piece."""
    goes_on: Flags
    """Per piece: whether the device's next sample follows without a gap."""
    gaps: Ints
    """Of each gap, the time for which a run that counts held the device, ms."""


def fold(  # noqa: PLR0917
    block: Block,
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    scratch: Scratch,
) -> Folded:
    """Sum the samples of ``block`` over the cells that they count for."""
    time = block.time
    rows = _weigh(block, pieces, cells, scratch)
    at = _Places.find(time, rows, cells)
    activity = classify(block.columns, len(time), thresholds, scratch)
    mark = scratch.flags("mark", len(time))
    np.not_equal(activity[1:], activity[:-1], out=mark[1:])
    mark[rows.gap_after + 1] = True
    mark[at.low[at.full]] = True
    runs = _Runs.between(np.flatnonzero(mark), time, rows.weight, activity, at)
    fix = _Corrections.find(time, rows, at, cells)
    sums, peak = _sums(block, rows.weight, activity, runs, at, fix, scratch)
    closed, still_open = _windows(rows, runs, at, allocations, cells)
    return Folded(
        cell=at.cell,
        sums=sums,
        fb_peak=peak,
        shared_cell=at.cell[fix.some_place],
        shared_sums=_amounts(block, activity, fix.some_row, fix.some_duration),
        shared_time=time[fix.some_row],
        windows=closed,
        open_windows=still_open,
        gap_ms=int(rows.gaps.sum()),
        gaps=int(np.count_nonzero(rows.gaps)),
        samples=int((at.high - at.low)[cells.inside[at.cell]].sum()),
    )


def _weigh(block: Block, pieces: Pieces, cells: Cells, scratch: Scratch) -> _Rows:
    time, count = block.time, len(block.time)
    here = slice(
        int(np.searchsorted(pieces.end, block.row, side="right")),
        int(np.searchsorted(pieces.row, block.row + count, side="left")),
    )
    device, step, limit = pieces.device[here], pieces.step[here], pieces.limit[here]
    first = np.maximum(pieces.row[here] - block.row, 0)
    end = np.minimum(pieces.end[here] - block.row, count)
    following = pieces.next_time[here].copy()
    if pieces.end[here][-1] > block.row + count:
        following[-1] = block.next_time
    weight = scratch.ints("weight", count)
    # Within a piece, that is within a day, distances fit 32 bits; modulo 2^32 they come from the low words alone.
    low = time.view(np.int32)[::2] if sys.byteorder == "little" else time.astype(np.int32)
    np.subtract(low[1:], low[:-1], out=weight[:-1])
    last = end - 1
    weight[last] = 0
    least = limit.min()
    gap = np.flatnonzero(weight > least) if weight.max() > least else np.empty(0, np.int64)
    if len(gap):
        piece = np.searchsorted(end, gap, side="right")
        real = weight[gap] > limit[piece]
        gap, piece = gap[real], piece[real]
    else:
        piece = gap
    last_time = time[last]
    to_next = following - last_time
    goes_on = to_next <= limit
    behind = ~goes_on & (following < FAR)
    gaps = cells.held_between(
        np.concatenate([device[piece], device[behind]]),
        np.concatenate([time[gap] + step[piece], (last_time + step)[behind]]),
        np.concatenate([time[gap] + weight[gap], following[behind]]),
    )
    weight[gap] = step[piece]
    weight[last] = np.where(goes_on, to_next, step)
    return _Rows(device, first, end, weight, gap, goes_on, gaps)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the cells lie in the rows of a block: one element per piece and cell that its samples reach."""

    piece: Ints
    cell: Ints
    low: Ints
    """First row of the piece in the cell; where the cell has none, the row where it would be."""
    high: Ints
    full: Ints
    """Elements that have rows. Their rows are all rows, in order."""

    @classmethod
    def find(cls, time: Ints, rows: _Rows, cells: Cells) -> _Places:
        last = rows.end - 1
        begin = cells.locate(rows.device, time[rows.first])
        reach = cells.keys(rows.device, time[last] + rows.weight[last])
        count = np.maximum(np.searchsorted(cells.key, reach, side="left") - begin, 1)
        piece = np.repeat(np.arange(len(count), dtype=np.int64), count)
        cell = ranges(begin, count)
        low = _first_at_or_after(time, cells.start[cell], rows.first[piece], rows.end[piece])
        high = np.append(low[1:], len(time))
        # Behind the last cell of a piece begins the next piece.
        high[np.cumsum(count) - 1] = rows.end
        return cls(piece, cell, low, high, np.flatnonzero(high > low))


def _first_at_or_after(time: Ints, wanted: Ints, first: Ints, end: Ints) -> Ints:
    """For each element, the first row of ``first <= row < end`` with ``time[row] >= wanted``, else ``end``.

    Samples are almost evenly spaced: the row that this suggests is right for most, the others are searched.
    """
    begin = time[first]
    length = np.maximum(time[end - 1] - begin, 1)
    into = np.clip(wanted - begin, 0, length + 1)
    guess = first + -((into * (first + 1 - end)) // length)
    np.minimum(guess, end, out=guess)
    before_is_earlier = (guess == first) | (time[guess - 1] < wanted)
    this_is_not = (guess == end) | (time[np.minimum(guess, len(time) - 1)] >= wanted)
    wrong = np.flatnonzero(~(before_is_earlier & this_is_not))
    if len(wrong):
        guess[wrong] = _bisect(time, wanted[wrong], first[wrong], end[wrong])
    return guess


def _bisect(time: Ints, wanted: Ints, low: Ints, high: Ints) -> Ints:
    low, high = low.copy(), high.copy()
    while (searching := low < high).any():
        middle = (low + high) >> 1
        before = searching & (time[np.minimum(middle, len(time) - 1)] < wanted)
        np.copyto(low, middle + 1, where=before)
        np.copyto(high, middle, where=searching & ~before)
    return low


def classify(columns: Mapping[str, Column], count: int, thresholds: Thresholds, scratch: Scratch) -> Classes:
    """The class of each sample from the largest of its activity signals."""
    largest = scratch.floats("largest", count)
    fraction = _largest([columns[name] for name in FRACTIONS if name in columns], largest)
    signals = [columns[name] for name in PERCENT if name in columns]
    if fraction is not None:
        np.multiply(fraction.values, np.float32(100), out=largest)
        signals.append(Column(largest, fraction.complete))
    activity = _largest(signals, largest)
    if activity is None:
        return np.full(count, UNKNOWN, np.uint8)
    idle, low = scratch.flags("idle", count), scratch.flags("low", count)
    np.less_equal(activity.values, np.float32(thresholds.idle_pct), out=idle)
    np.less_equal(activity.values, np.float32(thresholds.low_pct), out=low)
    # idle is low too: 0 busy, 1 low, 2 idle.
    classes = np.add(idle.view(np.uint8), low.view(np.uint8), out=low.view(np.uint8))
    if not activity.complete:
        np.isnan(activity.values, out=idle)
        classes[idle] = UNKNOWN
    return classes


def _largest(columns: list[Column], out: Float32s) -> Column | None:
    if not columns:
        return None
    # A complete one makes the result complete; fmax passes over what is missing.
    ordered = sorted(columns, key=lambda column: not column.complete)
    result = ordered[0]
    for column in ordered[1:]:
        take = np.maximum if column.complete else np.fmax
        result = Column(take(result.values, column.values, out=out), result.complete)
    return result


@dataclass(frozen=True, slots=True)
class _Runs:
    """Stretches of rows of one place and class without a gap."""

    first: Ints
    last: Ints
    begin: Ints
    """Time of the first sample."""
    until: Ints
    """Time up to which the last sample counts."""
    activity: Classes
    place: Ints
    """Element of ``_Places``."""

    @classmethod
    def between(cls, first: Ints, time: Ints, weight: npt.NDArray[np.int32], activity: Classes, at: _Places) -> _Runs:
        last = np.append(first[1:], len(time)) - 1
        # Every place with rows begins with a run.
        begins = np.append(np.searchsorted(first, at.low[at.full]), len(first))
        place = np.repeat(at.full, np.diff(begins))
        return cls(first, last, time[first], time[last] + weight[last], activity[first], place)


@dataclass(frozen=True, slots=True)
class _Corrections:
    """What the last sample of a cell counts beyond the cell's end: taken there, given to the cells behind.

    A cell gets it only where an allocation holds it that held the device when the sample was taken. Where that is so
    for some sharers of the cell and not for others, the part is kept apart (``some_*``).
    """

    place: Ints
    row: Ints
    duration: Ints
    """Milliseconds of the sample in ``row`` to add at ``place``; negative where they are taken."""
    some_place: Ints
    some_row: Ints
    some_duration: Ints

    @classmethod
    def find(cls, time: Ints, rows: _Rows, at: _Places, cells: Cells) -> _Corrections:
        start, end = cells.start[at.cell], cells.end[at.cell]
        last = at.high[at.full] - 1
        over = time[last] + rows.weight[last] - end[at.full]
        beyond = over > 0
        after = np.flatnonzero(at.low > rows.first[at.piece])
        before = at.low[after] - 1
        taken = time[before]
        reach = np.minimum(taken + rows.weight[before], end[after]) - start[after]
        cell = at.cell[after]
        reaches = (reach > 0) & (taken >= cells.earliest_start[cell])
        everyone = reaches & (taken >= cells.latest_start[cell])
        some = reaches & ~everyone
        return cls(
            place=np.concatenate([at.full[beyond], after[everyone]]),
            row=np.concatenate([last[beyond], before[everyone]]),
            duration=np.concatenate([-over[beyond], reach[everyone]]),
            some_place=after[some],
            some_row=before[some],
            some_duration=reach[some],
        )


def _sums(  # noqa: PLR0917
    block: Block,
    weight: npt.NDArray[np.int32],
    activity: Classes,
    runs: _Runs,
    at: _Places,
    fix: _Corrections,
    scratch: Scratch,
) -> tuple[Floats, Floats]:
    """``SUMS`` (one row per place), and the peak of the framebuffer."""
    places = len(at.cell)
    start = at.low[at.full]
    sums = np.zeros((places, len(SUMS)))
    idle = np.equal(activity, IDLE, out=scratch.flags("idle", len(activity)))
    fix_idle = idle[fix.row]
    bins = np.concatenate([runs.place * TIME_SUMS + runs.activity, fix.place * TIME_SUMS + activity[fix.row]])
    length = np.concatenate([runs.until - runs.begin, fix.duration])
    times = np.bincount(bins, weights=length, minlength=places * TIME_SUMS).reshape(places, TIME_SUMS)
    sums[:, :TIME_SUMS] = times
    in_all = times.sum(axis=1)
    weight32, idle32 = scratch.floats("weight32", len(weight)), scratch.floats("idle32", len(weight))
    product = scratch.floats("largest", len(weight))
    np.copyto(weight32, weight, casting="unsafe")
    np.copyto(idle32, idle)
    any_idle = bool(idle.any())
    for name, total, known, while_idle in _METRICS:
        column = block.columns.get(name)
        if column is None:
            continue
        np.multiply(column.values, weight32, out=product)
        value = column.values[fix.row].astype(np.float64)
        sums[:, known] = in_all
        if not column.complete:
            np.fmax(product, 0, out=product)
            missing, fix_missing = np.isnan(column.values), np.isnan(value)
            value[fix_missing] = 0
            unknown = np.add.reduceat(weight * missing, start, dtype=np.int64)
            sums[at.full, known] -= unknown
            sums[:, known] -= np.bincount(fix.place, weights=fix.duration * fix_missing, minlength=places)
        value *= fix.duration
        sums[:, total] = np.bincount(fix.place, weights=value, minlength=places)
        sums[at.full, total] += np.add.reduceat(product, start)
        if while_idle is not None and any_idle:
            product *= idle32
            sums[:, while_idle] = np.bincount(fix.place, weights=value * fix_idle, minlength=places)
            sums[at.full, while_idle] += np.add.reduceat(product, start)
    peak = np.full(places, np.nan)
    if (fb := block.columns.get(FB)) is not None:
        peak[at.full] = (np.maximum if fb.complete else np.fmax).reduceat(fb.values, start)
    return sums, peak


def _amounts(block: Block, activity: Classes, row: Ints, duration: Ints) -> Floats:
    """What ``duration`` ms of the sample in ``row`` add to each column of ``SUMS``."""
    amounts = np.zeros((len(row), len(SUMS)))
    classes = activity[row].astype(np.int64)
    amounts[np.arange(len(row)), classes] = duration
    idle = classes == IDLE
    for name, total, known, while_idle in _METRICS:
        if (column := block.columns.get(name)) is None:
            continue
        value = column.values[row].astype(np.float64)
        there = ~np.isnan(value)
        product = np.where(there, value, 0.0) * duration
        amounts[:, total] = product
        amounts[:, known] = there * duration
        if while_idle is not None:
            amounts[:, while_idle] = product * idle
    return amounts


def _windows(rows: _Rows, runs: _Runs, at: _Places, allocations: Allocations, cells: Cells) -> tuple[Windows, Windows]:
    """Idle windows of each allocation, closed and open: neighbouring idle runs are one, however the cells cut them."""
    sharers = cells.sharers[at.cell]
    # Also a place that is only reached counts: the time of a window that ends in it is shared there.
    shared = bool((sharers > 1).any())
    run = np.flatnonzero((runs.activity == IDLE) & (sharers > 0)[runs.place])
    place = runs.place[run]
    if shared:
        count = sharers[place]
        allocation = cells.owners[ranges(cells.owner_offset[at.cell[place]], count)]
        order = np.argsort(allocation, kind="stable")
        run, allocation = np.repeat(run, count)[order], allocation[order]
    else:
        allocation = cells.owners[cells.owner_offset[at.cell[place]]] if len(run) else run
    joined = (run[1:] == run[:-1] + 1) & (allocation[1:] == allocation[:-1])
    joined &= runs.until[run[:-1]] == runs.begin[run[1:]]
    fresh = np.ones(len(run), np.bool_)
    np.logical_not(joined, out=fresh[1:])
    head = np.flatnonzero(fresh)
    holder, first, last = allocation[head], run[head], run[np.append(head[1:], len(run))[: len(head)] - 1]
    begin, until = runs.begin[first], runs.until[last]
    limit = allocations.end[holder]
    # A window at the edge of a piece may go on in another.
    first_piece, last_piece = at.piece[runs.place[first]], at.piece[runs.place[last]]
    open_ = runs.last[last] == rows.end[last_piece] - 1
    open_ &= rows.goes_on[last_piece] & (until < limit)
    open_ |= runs.first[first] == rows.first[first_piece]
    until = np.minimum(until, limit)
    share = (
        cells.shared_time(allocations.device[holder], begin, until) if shared else (until - begin).astype(np.float64)
    )
    # A sample of a device whose step is unknown counts for no time.
    some = until > begin
    return _select(holder, begin, until, share, some & ~open_), _select(holder, begin, until, share, some & open_)


def _select(allocation: Ints, start: Ints, end: Ints, share: Floats, which: Flags) -> Windows:
    return Windows(allocation[which], start[which], end[which], share[which])


def window_bins(length_ms: Ints) -> Ints:
    """The bin of the histogram in which each window falls."""
    return np.searchsorted(_WINDOW_BOUNDS_MS, length_ms, side="right")
