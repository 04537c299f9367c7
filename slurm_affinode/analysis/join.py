"""Samples x cells: the sums of a block of samples, without hashing and without a search per sample.

Samples lie sorted by (device, time); cells (``segments``) are few. So the boundaries of the cells are searched in the
samples (``places``), and one pass over the samples (``sweep``) sums over the stretch of rows that lies in each cell.
Times of the classes of activity come from runs (stretches of one class without a gap) as differences of two times,
exact in milliseconds. Only the last sample of a cell can reach beyond it: these few are put right by themselves.

Values are 32-bit floats as they are stored, sums over a cell's rows are taken pairwise, all further sums are 64 bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_affinode.analysis import windows
from slurm_affinode.analysis.block import FB, IDLE, POWER, UTIL, Block, Classes, Int32s, Pieces, Scratch
from slurm_affinode.analysis.places import Places, Rows
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.segments import FAR, Allocations, Cells, Floats, Ints
from slurm_affinode.analysis.sweep import Sweep, sweep
from slurm_affinode.analysis.windows import IdleRuns, Windows

TIME_SUMS = 4
"""The first columns of ``SUMS`` are times, one for each class."""
SUMS = ("busy", "low", "idle", "unknown", "util", "util_known", "fb", "fb_known", "fb_idle", "power", "power_known",
        "power_idle")  # fmt: skip
"""Columns of sums: time per class in ms; then value x ms, ms with a value, value x ms while idle."""
_METRICS = ((UTIL, 4, 5, None), (FB, 6, 7, 8), (POWER, 9, 10, 11))


@dataclass(frozen=True, slots=True)
class Folded:
    """What a block adds."""

    cell: Ints
    """Cells that get something; one may occur several times."""
    sums: Floats
    """One row per element of ``cell``, the columns of ``SUMS``."""
    full: Ints
    """The elements of ``cell`` that ``fb_peak`` is of."""
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


def fold(  # noqa: PLR0917
    block: Block,
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    scratch: Scratch,
) -> Folded:
    """Sum the samples of ``block`` over the cells that they count for."""
    rows = Rows.of(block, pieces)
    at = Places.find(block.time, rows, cells)
    swept = sweep(block, rows, at, thresholds, scratch)
    runs = _Runs.of(block.time, swept, at)
    fix = _Corrections.find(block.time, rows, at, swept, cells)
    closed, still_open = windows.find(runs.idle(), rows, at, allocations, cells)
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


def _gaps(time: Ints, rows: Rows, swept: Sweep, cells: Cells) -> Ints:
    """Of each gap, also one behind a piece, the time for which a run that counts held the device."""
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
    def of(cls, time: Ints, swept: Sweep, at: Places) -> _Runs:
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
    def find(cls, time: Ints, rows: Rows, at: Places, swept: Sweep, cells: Cells) -> _Corrections:
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


def _sums(block: Block, swept: Sweep, runs: _Runs, at: Places, fix: _Corrections) -> Floats:
    """``SUMS``, one row per place."""
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
    """value x duration. Where that is taken from the sum of a cell, of a sample that counted for ``weight`` there, its
    product is taken as the sum has it, rounded to 32 bits, and what is left of it added: else the rounding would be
    left, which may be more than what a short cell has."""
    amount: Floats = value * duration
    cut = np.flatnonzero(duration < 0)
    counted = value[cut].astype(np.float32) * weight[cut].astype(np.float32)
    amount[cut] = value[cut] * (weight[cut] + duration[cut]) - counted
    return amount


def _amounts(block: Block, activity: Classes, row: Ints, duration: Ints) -> Floats:
    """What ``duration`` ms of the sample in ``row`` add to each column of ``SUMS``."""
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
