"""Samples x cells: the sums of a block of samples, without hashing and without a search per sample.

Samples lie sorted by (device, time); cells (``segments``) are few. So the boundaries of the cells are searched in the
samples, and sums are taken over runs: stretches of rows of one device, in one cell, of one class of activity, without
a gap. The time of a run is the difference of two times, exact in milliseconds; of the other values one product and
one sum per sample is all that is done. Only the last sample of a cell can reach beyond it: these few are put right
one by one (``_corrections``).

Values are 32-bit floats as they are stored, sums over a run are taken pairwise, everything beyond a run is 64 bit.
"""

from __future__ import annotations

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
    weight: Ints
    gap_after: Ints
    """Rows that a gap follows, within a piece."""
    goes_on: Flags
    """Per piece: whether the device's next sample follows without a gap."""
    gaps: Ints
    """Of each gap, the time for which a run that counts held the device, ms."""


def fold(block: Block, pieces: Pieces, allocations: Allocations, cells: Cells, thresholds: Thresholds) -> Folded:
    """Sum the samples of ``block`` over the cells that they count for."""
    time = block.time
    rows = _weigh(block, pieces, cells)
    at = _Places.find(time, rows, cells)
    activity = classify(block.columns, len(time), thresholds)
    mark = np.empty(len(time), np.bool_)
    np.not_equal(activity[1:], activity[:-1], out=mark[1:])
    mark[rows.first] = True
    mark[rows.gap_after + 1] = True
    mark[at.low[at.low < len(time)]] = True
    runs = _Runs.between(np.flatnonzero(mark), time, rows.weight, activity, at)
    sums, peak = _sum_runs(block, rows.weight, runs, at)
    shared = _corrections(block, rows, at, activity, cells, sums)
    closed, still_open = _windows(time, rows, runs, at, allocations, cells)
    outside = ~cells.inside[at.cell]
    return Folded(
        cell=at.cell,
        sums=sums,
        fb_peak=peak,
        shared_cell=shared[0],
        shared_sums=shared[1],
        shared_time=shared[2],
        windows=closed,
        open_windows=still_open,
        gap_ms=int(rows.gaps.sum()),
        gaps=int(np.count_nonzero(rows.gaps)),
        samples=len(time) - int((at.high - at.low)[outside].sum()),
    )


def _weigh(block: Block, pieces: Pieces, cells: Cells) -> _Rows:
    """How long each sample counts, before it is cut to its cell."""
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
    weight = np.empty(count, np.int64)
    np.subtract(time[1:], time[:-1], out=weight[:-1])
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
    to_next = following - time[last]
    goes_on = to_next <= limit
    behind = ~goes_on & (following < FAR)
    gaps = cells.held_between(
        np.concatenate([device[piece], device[behind]]),
        np.concatenate([time[gap] + step[piece], (time[last] + step)[behind]]),
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
        final = np.cumsum(count) - 1
        high[final] = rows.end
        return cls(piece, cell, low, high)


def _first_at_or_after(time: Ints, wanted: Ints, first: Ints, end: Ints) -> Ints:
    """For each element, the first row of ``first <= row < end`` with ``time[row] >= wanted``, else ``end``.

    Samples are almost evenly spaced: a bracket around the row that this suggests is tried before the whole range.
    """
    low, high = first.copy(), end.copy()
    begin = time[first]
    length = np.maximum(time[end - 1] - begin, 1)
    into = np.clip(wanted - begin, 0, length)
    guess = first + (into * (end - 1 - first)) // length
    near_low = np.maximum(guess - 1, first)
    near_high = np.minimum(guess + 3, end)
    fits = (near_low == first) | (time[near_low - 1] < wanted)
    fits &= (near_high == end) | (time[np.minimum(near_high, len(time) - 1)] >= wanted)
    low[fits], high[fits] = near_low[fits], near_high[fits]
    while True:
        active = low < high
        if not active.any():
            return low
        middle = (low + high) >> 1
        before = active & (time[np.minimum(middle, len(time) - 1)] < wanted)
        low = np.where(before, middle + 1, low)
        high = np.where(active & ~before, middle, high)


def classify(columns: Mapping[str, Column], count: int, thresholds: Thresholds) -> Classes:
    """The class of each sample from the largest of its activity signals."""
    fractions = [columns[name] for name in FRACTIONS if name in columns]
    percents = [columns[name] for name in PERCENT if name in columns]
    largest = _largest(fractions)
    if largest is not None:
        # A new array, so that no column is changed.
        largest = Column(largest.values * np.float32(100), largest.complete)
    together = [*percents, *([largest] if largest is not None else [])]
    activity = _largest(together)
    if activity is None:
        return np.full(count, UNKNOWN, np.uint8)
    idle = np.less_equal(activity.values, np.float32(thresholds.idle_pct))
    low = np.less_equal(activity.values, np.float32(thresholds.low_pct))
    # idle is low too: 0 busy, 1 low, 2 idle.
    classes = np.add(idle.view(np.uint8), low.view(np.uint8))
    if not activity.complete:
        classes[np.isnan(activity.values)] = UNKNOWN
    return classes


def _largest(columns: list[Column]) -> Column | None:
    if not columns:
        return None
    # Complete ones first: the faster comparison does for them, and one of them makes the result complete.
    ordered = sorted(columns, key=lambda column: not column.complete)
    result = ordered[0]
    for column in ordered[1:]:
        take = np.maximum if column.complete else np.fmax
        result = Column(take(result.values, column.values), result.complete)
    return result


@dataclass(frozen=True, slots=True)
class _Runs:
    """Stretches of rows of one piece, cell and class without a gap."""

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
    def between(cls, first: Ints, time: Ints, weight: Ints, activity: Classes, at: _Places) -> _Runs:
        last = np.append(first[1:], len(time)) - 1
        place = np.searchsorted(at.low, first, side="right") - 1
        return cls(first, last, time[first], time[last] + weight[last], activity[first], place)


def _sum_runs(block: Block, weight: Ints, runs: _Runs, at: _Places) -> tuple[Floats, Floats]:
    places = len(at.cell)
    sums = np.zeros((places, len(SUMS)))
    length = runs.until - runs.begin
    by_class = np.bincount(runs.place * TIME_SUMS + runs.activity, weights=length, minlength=places * TIME_SUMS)
    sums[:, :TIME_SUMS] = by_class.reshape(places, TIME_SUMS)
    idle = runs.activity == IDLE
    weight32 = weight.astype(np.float32)
    for name, total, known, while_idle in _METRICS:
        column = block.columns.get(name)
        if column is None:
            continue
        product = column.values * weight32
        with_value: npt.NDArray[np.generic] = length
        if not column.complete:
            missing = np.isnan(column.values)
            product[missing] = 0
            with_value = np.add.reduceat(np.where(missing, 0, weight), runs.first)
        value = np.add.reduceat(product, runs.first).astype(np.float64)
        sums[:, total] = np.bincount(runs.place, weights=value, minlength=places)
        sums[:, known] = np.bincount(runs.place, weights=with_value, minlength=places)
        if while_idle is not None:
            sums[:, while_idle] = np.bincount(runs.place, weights=value * idle, minlength=places)
    peak = np.full(places, np.nan)
    if (fb := block.columns.get(FB)) is not None:
        largest = (np.maximum if fb.complete else np.fmax).reduceat(fb.values, runs.first)
        np.fmax.at(peak, runs.place, largest.astype(np.float64))
    return sums, peak


def _corrections(  # noqa: PLR0917
    block: Block, rows: _Rows, at: _Places, activity: Classes, cells: Cells, sums: Floats
) -> tuple[Ints, Floats, Ints]:
    """Take from a cell what its last sample counts beyond its end, give it to the cells there.

    A cell gets it only where an allocation holds it that held the device when the sample was taken. Where that is so
    for some sharers of the cell and not for others, the part is returned apart.
    """
    start, end = cells.start[at.cell], cells.end[at.cell]
    full = np.flatnonzero(at.high > at.low)
    last = at.high[full] - 1
    over = block.time[last] + rows.weight[last] - end[full]
    beyond = over > 0
    minus = _amounts(block, activity, last[beyond], -over[beyond])
    np.add.at(sums, full[beyond], minus)

    after = np.flatnonzero(at.low > rows.first[at.piece])
    before = at.low[after] - 1
    taken = block.time[before]
    reach = np.minimum(taken + rows.weight[before], end[after]) - start[after]
    cell = at.cell[after]
    reaches = (reach > 0) & (taken >= cells.earliest_start[cell])
    everyone = reaches & (taken >= cells.latest_start[cell])
    some = reaches & ~everyone
    np.add.at(sums, after[everyone], _amounts(block, activity, before[everyone], reach[everyone]))
    return cell[some], _amounts(block, activity, before[some], reach[some]), taken[some]


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


def _windows(  # noqa: PLR0917
    time: Ints, rows: _Rows, runs: _Runs, at: _Places, allocations: Allocations, cells: Cells
) -> tuple[Windows, Windows]:
    """Idle windows of each allocation: neighbouring idle runs are one, however the cells cut them."""
    idle = np.flatnonzero(runs.activity == IDLE)
    cell = at.cell[runs.place[idle]]
    sharers = cells.sharers[cell]
    # Also a cell that is only reached counts: the time of a window that ends in it is shared there.
    shared = bool((cells.sharers[at.cell] > 1).any())
    run = np.repeat(idle, sharers)
    allocation = cells.owners[ranges(cells.owner_offset[cell], sharers)]
    if shared:
        order = np.argsort(allocation, kind="stable")
        run, allocation = run[order], allocation[order]
    if not len(run):
        nothing = _select(allocation, run, run, np.empty(0), np.empty(0, np.bool_))
        return nothing, nothing
    joined = (run[1:] == run[:-1] + 1) & (allocation[1:] == allocation[:-1])
    joined &= runs.until[run[:-1]] == runs.begin[run[1:]]
    piece = at.piece[runs.place]
    joined &= piece[run[1:]] == piece[run[:-1]]
    head = np.flatnonzero(np.append(True, ~joined))
    tail = np.append(head[1:], len(run)) - 1
    holder = allocation[head]
    begin = runs.begin[run[head]]
    until = np.minimum(runs.until[run[tail]], allocations.end[holder])
    share = (until - begin).astype(np.float64)
    if shared:
        share = cells.shared_time(allocations.device[holder], begin, until)
    first_piece, last_piece = piece[run[head]], piece[run[tail]]
    open_ = runs.first[run[head]] == rows.first[first_piece]
    at_end = runs.last[run[tail]] == rows.end[last_piece] - 1
    open_ |= at_end & rows.goes_on[last_piece] & (runs.until[run[tail]] < allocations.end[holder])
    # A sample of a device whose step is unknown counts for no time.
    some = until > begin
    return _select(holder, begin, until, share, some & ~open_), _select(holder, begin, until, share, some & open_)


def _select(allocation: Ints, start: Ints, end: Ints, share: Floats, which: Flags) -> Windows:
    return Windows(allocation[which], start[which], end[which], share[which])


def window_bins(length_ms: Ints) -> Ints:
    """The bin of the histogram in which each window falls."""
    return np.searchsorted(_WINDOW_BOUNDS_MS, length_ms, side="right")
