"""The join of samples and cells with array operations, without hashing or a search per sample.

Samples are sorted by (device, time), and cells (``segments``) are few. The boundaries of the cells are searched in the
samples, and one pass sums over the rows of each cell, in tiles that fit into a core's cache. A tile ends where a cell
ends, so no sum is split. The time in each activity class is the length of its stretches without a gap, exact in
milliseconds. Only the last sample of a cell can extend beyond it; these few samples are corrected separately. Idle
windows (stretches of idle time of one GPU within one allocation) are found per block and joined across blocks.

Values are 32-bit floats, as stored. Sums over the rows of a cell are pairwise, and all further sums are 64-bit. Blocks
are processed on two threads.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from slurm_affinode.analysis.block import (
    FB,
    FRACTIONS,
    IDLE,
    PERCENT,
    POWER,
    UNKNOWN,
    UTIL,
    Block,
    BlockColumn,
    Classes,
    Float32s,
    Int32s,
    OutOfOrderError,
    Pieces,
    Scratch,
)
from slurm_affinode.analysis.result import BOUNDS_S, SUMS, TIME_SUMS, Thresholds, Totals
from slurm_affinode.analysis.segments import FAR, Allocations, Cells, Flags, Floats, Ints, ranges


@dataclass(frozen=True, slots=True)
class Rows:
    """The pieces of a block; rows are those of the block."""

    device: Ints
    first: Ints
    last: Ints
    step: Ints
    limit: Floats
    following: Ints
    """Time of the device's next sample after the block or the piece; ``FAR`` if there is none."""
    goes_on: Flags
    """True if that sample follows without a gap."""
    reach: Ints
    """Time up to which the last sample counts."""

    @classmethod
    def of(cls, block: Block, pieces: Pieces) -> Rows:
        """Return the pieces that overlap ``block``, clipped to its rows.

        Raises ``OutOfOrderError`` if the times of the block contradict the pieces.
        """
        behind = block.row + len(block)
        here = slice(
            int(np.searchsorted(pieces.end, block.row, side="right")),
            int(np.searchsorted(pieces.row, behind, side="left")),
        )
        if here.start >= here.stop or pieces.end[here][-1] < behind:
            raise OutOfOrderError(block.row)
        following = pieces.next_time[here]
        if pieces.end[here][-1] > behind:
            following = np.append(following[:-1], block.next_time)
        step, limit = pieces.step[here], pieces.limit[here]
        last = np.minimum(pieces.end[here], behind) - block.row - 1
        last_time = block.time[last]
        first = np.maximum(pieces.row[here] - block.row, 0)
        if (block.time[first] < pieces.first_time[here]).any() or (last_time >= pieces.reach[here]).any():
            raise OutOfOrderError(block.row)
        goes_on = following - last_time <= limit
        return cls(
            device=pieces.device[here],
            first=first,
            last=last,
            step=step,
            limit=limit,
            following=following,
            goes_on=goes_on,
            reach=np.where(goes_on, following, last_time + step),
        )


@dataclass(frozen=True, slots=True)
class Places:
    """One element per piece and cell in which its samples lie or to which they extend, in order."""

    piece: Ints
    cell: Ints
    low: Ints
    """First row of the piece in the cell, or its insertion point if there is none."""
    begins: Flags
    """True for the first element of a piece."""
    full: Ints
    """Elements with rows. Together they cover all rows, in order."""
    start: Ints
    """First row of each element of ``full``."""
    end: Ints
    """Row after the last of each element of ``full``."""

    def __len__(self) -> int:
        return len(self.cell)

    @classmethod
    def find(cls, time: Ints, rows: Rows, cells: Cells) -> Places:
        """Find the cells of the samples."""
        begin = cells.locate(rows.device, time[rows.first])
        count = np.searchsorted(cells.key, cells.keys(rows.device, rows.reach), side="left") - begin
        # A sample that counts for no time extends to no cell, but still lies in one.
        np.maximum(count, 1, out=count)
        cell = ranges(begin, count)
        low = _first_at_or_after(time, cells.start[cell], rows, count)
        begins = np.zeros(len(cell), np.bool_)
        begins[np.cumsum(count) - count] = True
        # The rows of a place end where the next place begins; the first place of a piece begins with the piece.
        high = np.append(low[1:], len(time))
        full = np.flatnonzero(high > low)
        piece = np.repeat(np.arange(len(count), dtype=np.int64), count)
        return cls(piece, cell, low, begins, full, low[full], high[full])


def _first_at_or_after(time: Ints, wanted: Ints, rows: Rows, count: Ints) -> Ints:
    """Return, per element, the first row of its piece with ``time[row] >= wanted``, else the row after the piece.

    ``count``: elements per piece. Samples are almost evenly spaced, so interpolation finds most rows; the others are
    found by bisection.
    """
    begin = time[rows.first]
    per_ms = (rows.last - rows.first) / np.maximum(time[rows.last] - begin, 1)
    first, end = np.repeat(rows.first, count), np.repeat(rows.last + 1, count)
    into = np.maximum(wanted - np.repeat(begin, count), 0) * np.repeat(per_ms, count)
    guess: Ints = first + np.ceil(np.minimum(into, end - first)).astype(np.int64)
    wrong = (guess > first) & (time[guess - 1] >= wanted)
    wrong |= (guess < end) & (time[np.minimum(guess, len(time) - 1)] < wanted)
    searched = np.flatnonzero(wrong)
    if len(searched):
        guess[searched] = _bisect(time, wanted[searched], first[searched], end[searched])
    return guess


def _bisect(time: Ints, wanted: Ints, low: Ints, high: Ints) -> Ints:
    while (searching := low < high).any():
        middle = (low + high) >> 1
        before = searching & (time[np.minimum(middle, len(time) - 1)] < wanted)
        np.copyto(low, middle + 1, where=before)
        np.copyto(high, middle, where=searching & ~before)
    return low


TILE_ROWS = 48 * 1024
SUMMED = (UTIL, FB, POWER)


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums of one metric over the rows of each full place, before the last sample is clipped to the cell."""

    total: Floats
    """Value x ms."""
    idle: Floats
    """Value x ms while idle."""
    missing: Ints
    """Time without a value, ms."""


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Result of the pass over a block."""

    weight: Int32s
    """Time for which each sample counts before it is clipped to its cell, ms."""
    activity: Classes
    changes: Ints
    """Rows at which a place, another activity class, or the stretch after a gap begins; includes row 0."""
    gap_after: Ints
    """Rows followed by a gap, within a piece."""
    gap_until: Ints
    """Times at which these gaps end."""
    gap_piece: Ints
    metrics: Mapping[str, Summed]
    fb_peak: Floats
    """Per full place, MiB; NaN if unknown."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Half-open ranges of rows (``low``, ``high``) and full places (``first``, ``behind``)."""

    low: int
    high: int
    first: int
    behind: int


def sweep(block: Block, rows: Rows, at: Places, thresholds: Thresholds, scratch: Scratch) -> BlockSums:
    """Weigh, classify and sum every sample of ``block``."""
    count = len(block)
    weight, activity = scratch.ints("weight", count), scratch.flags("activity", count).view(np.uint8)
    mark = scratch.flags("mark", count)
    there = {name: block.columns[name] for name in SUMMED if name in block.columns}
    sums = {name: _empty(len(at.full)) for name in there}
    peak = np.full(len(at.full), np.nan)
    gaps: list[tuple[Ints, Ints]] = []
    for tile in _tiles(at.start, count):
        here = slice(tile.low, tile.high)
        gaps.append(_weigh(block.time, rows, tile, weight, block.row))
        size = tile.high - tile.low
        signals = {n: BlockColumn(c.values[here], c.complete) for n, c in block.columns.items() if n not in (FB, POWER)}
        classify(signals, thresholds, scratch, activity[here])
        start = at.start[tile.first : tile.behind] - tile.low
        weight32, idle = scratch.floats("weight32", size), scratch.floats("idle", size)
        np.copyto(weight32, weight[here], casting="unsafe")
        np.copyto(idle, np.equal(activity[here], IDLE, out=scratch.flags("low", size)))
        for name, column in there.items():
            part = BlockColumn(column.values[here], column.complete)
            _sum(part, weight[here], weight32, idle, start, sums[name], tile, scratch)
            if name == FB:
                largest = np.maximum if column.complete else np.fmax
                peak[tile.first : tile.behind] = largest.reduceat(part.values, start)
    gap, piece = (np.concatenate(parts) for parts in zip(*gaps, strict=True))
    gap_until = block.time[np.minimum(gap + 1, count - 1)]
    np.not_equal(activity[1:], activity[:-1], out=mark[1:])
    mark[at.start] = True
    mark[gap + 1] = True
    return BlockSums(weight, activity, np.flatnonzero(mark), gap, gap_until, piece, sums, peak)


def _empty(count: int) -> Summed:
    return Summed(np.zeros(count), np.zeros(count), np.zeros(count, np.int64))


def _tiles(start: Ints, count: int) -> Iterator[_Tile]:
    wanted = np.arange(TILE_ROWS, count, TILE_ROWS)
    cuts = np.unique(np.concatenate([[0], np.searchsorted(start, wanted), [len(start)]]))
    for first, behind in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        high = int(start[behind]) if behind < len(start) else count
        yield _Tile(int(start[first]), high, first, behind)


def _weigh(time: Ints, rows: Rows, tile: _Tile, weight: Int32s, row: int) -> tuple[Ints, Ints]:
    """Compute the weights of a tile; return its rows that are followed by a gap, and their pieces.

    Raises ``OutOfOrderError`` if times do not ascend. ``row``: number of the first row of the block.
    """
    # Within a piece (one day), distances fit into 32 bits, so the low words suffice to compute them (modulo 2^32).
    low = time.view(np.int32)[::2] if sys.byteorder == "little" else time.astype(np.int32)
    high = min(tile.high, len(time) - 1)
    here = weight[tile.low : high]
    np.subtract(low[tile.low + 1 : high + 1], low[tile.low : high], out=here)
    some = slice(*np.searchsorted(rows.last, (tile.low, tile.high)).tolist())
    last = rows.last[some]
    weight[last] = 0
    if len(here) and here.min() < 0:
        raise OutOfOrderError(row)
    gap = piece = np.empty(0, np.int64)
    least = rows.limit.min()
    if len(here) and here.max() > least:
        gap = np.flatnonzero(here > least) + tile.low
        piece = np.searchsorted(rows.last, gap)
        real = weight[gap] > rows.limit[piece]
        gap, piece = gap[real], piece[real]
        weight[gap] = rows.step[piece]
    weight[last] = rows.reach[some] - time[last]
    return gap, piece


def classify(columns: Mapping[str, BlockColumn], thresholds: Thresholds, scratch: Scratch, out: Classes) -> None:
    """Write the activity class of each sample, from the largest of its activity signals, to ``out``."""
    largest = scratch.floats("product", len(out))
    signals_of = {name: _without_noise(name, column, thresholds, scratch) for name, column in columns.items()}
    fraction = _largest([signals_of[name] for name in FRACTIONS if name in signals_of], largest)
    signals = [signals_of[name] for name in PERCENT if name in signals_of]
    if fraction is not None:
        np.multiply(fraction.values, np.float32(100), out=largest)
        signals.append(BlockColumn(largest, fraction.complete))
    activity = _largest(signals, largest)
    if activity is None:
        out[:] = UNKNOWN
        return
    low = scratch.flags("low", len(out))
    np.less_equal(activity.values, np.float32(thresholds.idle_pct), out=out.view(np.bool_))
    np.less_equal(activity.values, np.float32(thresholds.low_pct), out=low)
    # Idle is low too: 0 busy, 1 low, 2 idle.
    np.add(out, low.view(np.uint8), out=out)
    if not activity.complete:
        out[np.isnan(activity.values, out=low)] = UNKNOWN


def _without_noise(name: str, column: BlockColumn, thresholds: Thresholds, scratch: Scratch) -> BlockColumn:
    """Return the values with those at or below the floor of the signal set to 0."""
    floor = thresholds.floor(name)
    if floor <= 0:
        return column
    above = np.greater(column.values, np.float32(floor), out=scratch.flags("low", len(column.values)))
    # Missing values stay NaN.
    values = np.multiply(column.values, above, out=scratch.floats(f"{name} above its floor", len(above)))
    return BlockColumn(values, column.complete)


def _largest(columns: list[BlockColumn], out: Float32s) -> BlockColumn | None:
    if not columns:
        return None
    # One complete column makes the result complete, because fmax ignores NaN.
    ordered = sorted(columns, key=lambda column: not column.complete)
    result = ordered[0]
    for column in ordered[1:]:
        take = np.maximum if column.complete else np.fmax
        result = BlockColumn(take(result.values, column.values, out=out), result.complete)
    return result


def _sum(  # noqa: PLR0917
    column: BlockColumn,
    weight: Int32s,
    weight32: Float32s,
    idle: Float32s,
    start: Ints,
    to: Summed,
    tile: _Tile,
    scratch: Scratch,
) -> None:
    product = scratch.floats("product", len(weight))
    np.multiply(column.values, weight32, out=product)
    if not column.complete:
        # This turns NaN into 0; values are never negative.
        np.fmax(product, 0, out=product)
        missing = np.isnan(column.values, out=scratch.flags("low", len(weight)))
        lost = np.multiply(weight, missing, out=scratch.ints("lost", len(weight)))
        to.missing[tile.first : tile.behind] = np.add.reduceat(lost, start)
    to.total[tile.first : tile.behind] = np.add.reduceat(product, start)
    np.multiply(product, idle, out=product)
    to.idle[tile.first : tile.behind] = np.add.reduceat(product, start)


@dataclass(frozen=True, slots=True)
class Windows:
    """Idle windows, as columns."""

    allocation: Ints
    start: Ints
    end: Ints
    share: Floats
    """Time attributed to the allocation, ms: the length divided among the sharers."""

    def __len__(self) -> int:
        return len(self.allocation)

    def take(self, which: Flags) -> Windows:
        """Return the selected windows."""
        return Windows(self.allocation[which], self.start[which], self.end[which], self.share[which])


@dataclass(frozen=True, slots=True)
class IdleRuns:
    """Stretches of idle rows of one place, as columns, in order."""

    number: Ints
    """Number of the stretch among all stretches of rows; consecutive numbers are adjacent rows."""
    place: Ints
    first: Ints
    last: Ints
    begin: Ints
    """Time of the first sample."""
    until: Ints
    """Time up to which the last sample counts, within its cell or beyond."""


def find(idle: IdleRuns, rows: Rows, at: Places, allocations: Allocations, cells: Cells) -> tuple[Windows, Windows]:
    """Return the idle windows of a block: those that end in it, and those that may continue in another piece or block.

    Adjacent runs of one allocation are one window, even if cells separate them.
    """
    sharers = cells.sharers[at.cell]
    # Places without rows matter too: a window that ends in such a place is shared there.
    shared = bool((sharers > 1).any())
    if shared:
        run, holder = _by_allocation(idle, at, cells, sharers)
    else:
        run = np.flatnonzero(sharers[idle.place])
        # Places without an allocation get an arbitrary one: they have no runs here.
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
    # A sample counts for no time if the sampling interval of its device is unknown.
    some = until > begin
    return windows.take(some & ~open_), windows.take(some & open_)


def _by_allocation(idle: IdleRuns, at: Places, cells: Cells, sharers: Ints) -> tuple[Ints, Ints]:
    """Return each idle run once per allocation that holds it, sorted by allocation."""
    count = sharers[idle.place]
    run = np.repeat(np.arange(len(count)), count)
    holder = cells.owners[ranges(cells.owner_offset[at.cell[idle.place]], count)]
    order = np.argsort(holder, kind="stable")
    return run[order], holder[order]


def stitch(windows: Iterable[Windows]) -> Windows:
    """Join adjacent windows of the same allocation."""
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


def window_bins(length_ms: Ints) -> Ints:
    """Return the histogram bin of each window."""
    found = np.zeros(len(length_ms), np.int64)
    for bound in BOUNDS_S:
        # A few comparisons are faster than a search.
        found += length_ms >= bound * 1000
    return found


_METRICS = ((UTIL, 4, 5, None), (FB, 6, 7, 8), (POWER, 9, 10, 11))


@dataclass(frozen=True, slots=True)
class Folded:
    """Contribution of a block to the totals."""

    cell: Ints
    """Cells with a contribution; a cell may occur several times."""
    sums: Floats
    """One row per element of ``cell`` with the columns of ``SUMS``."""
    full: Ints
    """Elements of ``cell`` to which ``fb_peak`` refers."""
    fb_peak: Floats
    """Largest framebuffer value, MiB; NaN if there is none."""
    shared_cell: Ints
    """Cells in which ``shared_sums`` counts only for some sharers: those that already held the device at
    ``shared_time``, the time of the sample."""
    shared_sums: Floats
    shared_time: Ints
    windows: Windows
    """Closed idle windows."""
    open_windows: Windows
    """Idle windows at the first or last row of a piece, which may continue in another."""
    gap_ms: int
    """Time in gaps while a counted run held the device."""
    gaps: int
    """Number of these gaps."""
    samples: int
    """Rows within the interval of the query."""


def fold(  # noqa: PLR0917
    block: Block,
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    scratch: Scratch,
) -> Folded:
    """Sum the samples of ``block`` over the cells for which they count."""
    rows = Rows.of(block, pieces)
    at = Places.find(block.time, rows, cells)
    swept = sweep(block, rows, at, thresholds, scratch)
    runs = _Runs.of(block.time, swept, at)
    fix = _Corrections.find(block.time, rows, at, swept, cells)
    closed, still_open = find(runs.idle(), rows, at, allocations, cells)
    gaps = _gaps(block.time, rows, swept, cells)
    return Folded(
        cell=at.cell,
        sums=_sums(block, swept, runs, at, fix),
        full=at.full,
        fb_peak=swept.fb_peak,
        shared_cell=at.cell[fix.some_place],
        shared_sums=_amounts(block, swept.activity, fix.some_row, fix.some_duration),
        shared_time=block.time[fix.some_row],
        windows=closed,
        open_windows=still_open,
        gap_ms=int(gaps.sum()),
        gaps=int(np.count_nonzero(gaps)),
        samples=int((at.end - at.start)[cells.inside[at.cell[at.full]]].sum()),
    )


def _gaps(time: Ints, rows: Rows, swept: BlockSums, cells: Cells) -> Ints:
    """Return, for each gap (including those after a piece), the time for which a counted run held the device."""
    behind = ~rows.goes_on & (rows.following < FAR)
    return cells.held_between(
        np.concatenate([rows.device[swept.gap_piece], rows.device[behind]]),
        np.concatenate([time[swept.gap_after] + rows.step[swept.gap_piece], rows.reach[behind]]),
        np.concatenate([swept.gap_until, rows.following[behind]]),
    )


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

    @classmethod
    def of(cls, time: Ints, swept: BlockSums, at: Places) -> _Runs:
        first = swept.changes
        last = np.append(first[1:], len(time)) - 1
        # Every place with rows begins with a run.
        begins = np.append(np.searchsorted(first, at.start), len(first))
        place = np.repeat(at.full, np.diff(begins))
        return cls(first, last, time[first], time[last] + swept.weight[last], swept.activity[first], place)

    def idle(self) -> IdleRuns:
        which = np.flatnonzero(self.activity == IDLE)
        return IdleRuns(
            which, self.place[which], self.first[which], self.last[which], self.begin[which], self.until[which]
        )


@dataclass(frozen=True, slots=True)
class _Corrections:
    """Corrections for samples that extend beyond their cell: time moved from this cell to the following ones.

    A following cell gets the time only if one of its allocations held the device at the time of the sample. If that
    applies to only some of its sharers, the time is recorded separately (``some_*``).
    """

    place: Ints
    row: Ints
    duration: Ints
    """Time of the sample in ``row`` to add at ``place``, ms; negative to subtract."""
    some_place: Ints
    some_row: Ints
    some_duration: Ints

    @classmethod
    def find(cls, time: Ints, rows: Rows, at: Places, swept: BlockSums, cells: Cells) -> _Corrections:
        last = at.end - 1
        over = time[last] + swept.weight[last] - cells.end[at.cell[at.full]]
        beyond = np.flatnonzero(over > 0)
        after = np.flatnonzero(~at.begins & (at.low > rows.first[at.piece]))
        before = at.low[after] - 1
        cell = at.cell[after]
        taken = time[before]
        reach = np.minimum(taken + swept.weight[before], cells.end[cell]) - cells.start[cell]
        reaches = (reach > 0) & (taken >= cells.earliest_start[cell])
        all_of_them = taken >= cells.latest_start[cell]
        everyone, some = np.flatnonzero(reaches & all_of_them), np.flatnonzero(reaches & ~all_of_them)
        return cls(
            place=np.concatenate([at.full[beyond], after[everyone]]),
            row=np.concatenate([last[beyond], before[everyone]]),
            duration=np.concatenate([-over[beyond], reach[everyone]]),
            some_place=after[some],
            some_row=before[some],
            some_duration=reach[some],
        )


def _sums(block: Block, swept: BlockSums, runs: _Runs, at: Places, fix: _Corrections) -> Floats:
    """Return ``SUMS``, one row per place."""
    places = len(at)
    sums = np.zeros((places, len(SUMS)))
    fix_class = swept.activity[fix.row]
    bins = np.concatenate([runs.place * TIME_SUMS + runs.activity, fix.place * TIME_SUMS + fix_class])
    length = np.concatenate([runs.until - runs.begin, fix.duration])
    times = np.bincount(bins, weights=length, minlength=places * TIME_SUMS).reshape(places, TIME_SUMS)
    sums[:, :TIME_SUMS] = times
    in_all = times.sum(axis=1)
    while_idle = fix_class == IDLE
    for name, total, known, idle in _METRICS:
        if (metric := swept.metrics.get(name)) is None:
            continue
        column = block.columns[name]
        value = column.values[fix.row].astype(np.float64)
        sums[:, known] = in_all
        if not column.complete:
            missing = np.isnan(value)
            value[missing] = 0
            sums[at.full, known] -= metric.missing
            sums[:, known] -= np.bincount(fix.place, weights=fix.duration * missing, minlength=places)
        amount = _exact(value, fix.duration, swept.weight[fix.row])
        sums[:, total] = np.bincount(fix.place, weights=amount, minlength=places)
        sums[at.full, total] += metric.total
        if idle is not None:
            amount *= while_idle
            sums[:, idle] = np.bincount(fix.place, weights=amount, minlength=places)
            sums[at.full, idle] += metric.idle
    return sums


def _exact(value: Floats, duration: Ints, weight: Int32s) -> Floats:
    """Return value x duration, exact with respect to the sums of ``sweep``.

    A negative duration corrects a product with ``weight`` that was rounded to 32 bits in the cell's sum. The rounded
    product is subtracted and the product with the remaining time is added; otherwise the rounding error would remain,
    which can exceed the whole sum of a short cell.
    """
    amount: Floats = value * duration
    cut = np.flatnonzero(duration < 0)
    counted = value[cut].astype(np.float32) * weight[cut].astype(np.float32)
    amount[cut] = value[cut] * (weight[cut] + duration[cut]) - counted
    return amount


def _amounts(block: Block, activity: Classes, row: Ints, duration: Ints) -> Floats:
    """Return the contribution of ``duration`` ms of the sample in ``row`` to each column of ``SUMS``."""
    amounts = np.zeros((len(row), len(SUMS)))
    if not len(row):
        return amounts
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


WORKERS = 2
_AHEAD = 2 * WORKERS


class _Sink:
    """Accumulator of the blocks' contributions; thread-safe."""

    def __init__(self, allocations: Allocations, cells: int) -> None:
        self._counted = allocations.counted
        self._lock = threading.Lock()
        self._sums = np.zeros((cells, len(SUMS)))
        self._peak = np.full(cells, np.nan)
        self._partly: list[Folded] = []
        self._open: list[Windows] = []
        self._windows = np.zeros(len(allocations), np.int64)
        self._longest = np.zeros(len(allocations), np.int64)
        self._counts = np.zeros(len(BOUNDS_S) + 1, np.int64)
        self._share = np.zeros(len(BOUNDS_S) + 1)
        self._gap_ms = 0
        self._gaps = 0
        self._samples = 0

    def add(self, folded: Folded) -> None:
        with self._lock:
            # A cell occurs twice only if a device occurs twice in the block, at a change of day.
            full = folded.cell[folded.full]
            if len(np.unique(folded.cell)) == len(folded.cell):
                self._sums[folded.cell] += folded.sums
                self._peak[full] = np.fmax(self._peak[full], folded.fb_peak)
            else:
                np.add.at(self._sums, folded.cell, folded.sums)
                np.fmax.at(self._peak, full, folded.fb_peak)
            if len(folded.shared_cell):
                self._partly.append(folded)
            self._close(folded.windows)
            if len(folded.open_windows):
                self._open.append(folded.open_windows)
            self._gap_ms += folded.gap_ms
            self._gaps += folded.gaps
            self._samples += folded.samples

    def _close(self, closed: Windows) -> None:
        if not len(closed):
            return
        length = closed.end - closed.start
        np.add.at(self._windows, closed.allocation, 1)
        np.maximum.at(self._longest, closed.allocation, length)
        counted = self._counted[closed.allocation]
        bins = window_bins(length[counted])
        size = len(self._counts)
        self._counts += np.bincount(bins, minlength=size)
        self._share += np.bincount(bins, weights=closed.share[counted], minlength=size)

    def finish(self) -> Totals:
        self._close(stitch(self._open))
        partly = self._partly
        return Totals(
            sums=self._sums,
            fb_peak=self._peak,
            partly_cell=np.concatenate([np.empty(0, np.int64), *(f.shared_cell for f in partly)]),
            partly_sums=np.concatenate([np.empty((0, len(SUMS))), *(f.shared_sums for f in partly)]),
            partly_time=np.concatenate([np.empty(0, np.int64), *(f.shared_time for f in partly)]),
            windows=self._windows,
            longest_ms=self._longest,
            window_counts=self._counts,
            window_share_ms=self._share,
            gap_ms=self._gap_ms,
            gaps=self._gaps,
            samples=self._samples,
        )


def run(
    blocks: Iterable[Block],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    *,
    workers: int = WORKERS,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold every block and return the totals. ``advance`` is called with the number of rows of each finished block."""
    sink = _Sink(allocations, len(cells))

    local = threading.local()

    def work(block: Block) -> int:
        if not hasattr(local, "scratch"):
            local.scratch = Scratch()
        sink.add(fold(block, pieces, allocations, cells, thresholds, local.scratch))
        return len(block.time)

    waiting: deque[Future[int]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="join") as pool:
        for block in blocks:
            waiting.append(pool.submit(work, block))
            # Bounded, so that memory does not grow with the number of samples.
            if len(waiting) > _AHEAD:
                _done(waiting.popleft(), advance)
        while waiting:
            _done(waiting.popleft(), advance)
    return sink.finish()


def _done(future: Future[int], advance: Callable[[int], None] | None) -> None:
    rows = future.result()
    if advance is not None:
        advance(rows)
