"""What each GPU of each run did until the end: the idle time that reaches to the last sample, and the time before it.

One pass over the samples, day by day, whatever the number of runs. Per pair of run and GPU it keeps when the GPU was
last above the limit, what it held and drew since then, and what it did in all. A sample without any signal of activity
is as none; where samples lie further apart than ``max_gap_steps`` steps, the idle time begins anew: what is unknown is
not idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.analysis.segments import ranges
from slurm_affinode.history.schema import ACTIVITY
from slurm_affinode.history.store import SampleStore

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = -1
UNUSED, USED, UNSEEN = 0, 1, -1
"""Of ``used_before``."""
UNSEEN_MS = 60_000
"""So much of a run may be unseen at its begin, or as much as a gap may be long: its first sample comes later."""
BATCH_ROWS = 4_000_000
"""Some 300 MB."""
_SHIFT = 44
"""Bits for the time in the key of a sample: 557 years of milliseconds."""
_VALUES = (*ACTIVITY, "fb_used_mib", "fb_total_mib", "power_w")


@dataclass(slots=True)
class Trailing:
    """Per pair, by row. Times are epoch milliseconds, ``NEVER`` where there is none; NaN is unknown."""

    samples: Ints
    """Samples within the run that have any signal of activity."""
    rows: Ints
    """Samples within the run."""
    last: Ints
    """The last sample with a signal."""
    first: Ints
    last_active: Ints
    """The last sample above the limit."""
    since: Ints
    """The first sample of the idle time that reaches to ``last``; ``NEVER``: the last sample is above the limit."""
    peaks: Floats
    """Pairs x signals: the largest value of each signal since then, percent."""
    peak_all: Floats
    """The largest value of any signal in the whole run."""
    activity_sum: Floats
    """Sum of the busiest signal over the run's samples."""
    util_sum: Floats
    util_count: Ints
    fb_sum: Floats
    """Since ``since``; MiB."""
    fb_count: Ints
    fb_peak: Floats
    """Of the whole run."""
    fb_total: Floats
    power_sum: Floats
    power_count: Ints
    xid: Ints
    """The last XID of the run; ``NEVER``: not known."""

    @classmethod
    def empty(cls, pairs: int) -> Trailing:
        """For so many pairs of a run and a GPU, none of which has a sample yet."""

        def never() -> Ints:
            return np.full(pairs, NEVER, np.int64)

        def none() -> Ints:
            return np.zeros(pairs, np.int64)

        def zero() -> Floats:
            return np.zeros(pairs)

        def unknown() -> Floats:
            return np.full(pairs, np.nan)

        return cls(
            none(), none(), never(), never(), never(), never(), np.full((pairs, len(ACTIVITY)), np.nan), unknown(),
            zero(), zero(), none(), zero(), none(), unknown(), unknown(), zero(), none(), never(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pairs:
    """Runs and their GPUs, one row each."""

    device: npt.NDArray[np.uint64]
    """The number of the device in the history."""
    start: Ints
    """Begin of the run, epoch milliseconds."""
    end: Ints
    """Its end, or the end of the interval."""
    step: Ints
    """Sampling step of the device, milliseconds."""


def follow(
    store: SampleStore, pairs: Pairs, since: datetime, until: datetime, *, limit_pct: float, max_gap_steps: float = 3.0
) -> Trailing:
    """Go through the samples of ``[since, until)`` once."""
    found = Trailing.empty(len(pairs.device))
    devices = np.unique(pairs.device)
    if not len(devices):
        return found
    at = np.searchsorted(devices, pairs.device)
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    wanted = pl.Series("device", devices, dtype=pl.UInt64)
    have = set(store.days())
    while day < until:
        if day.date() in have:
            begin, finish = max(day, since), min(day + timedelta(days=1), until)
            for some in _batches(store, wanted, begin, finish):
                _day(store, pairs, found, wanted, at, some, begin, finish, limit_pct, max_gap_steps)
        day += timedelta(days=1)
    return found


def active_before(
    store: SampleStore, pairs: Pairs, until: datetime, *, limit_pct: float, max_gap_steps: float, slack_ms: Ints
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether each pair was above the limit between its start and ``until``, and whether all of that time was seen.

    The newest day first, and each pair only as far back as it was last active. Gaps of up to ``slack_ms`` (by pair)
    at the begin and the end of a day count as seen.
    """
    count = len(pairs.device)
    active, seen = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    finish = until
    while True:
        finish_ms = int(finish.timestamp() * 1000)
        left = np.flatnonzero(~active & (pairs.start < finish_ms))
        if not len(left):
            return active, seen
        begin = (finish - timedelta(milliseconds=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        start = np.maximum(pairs.start[left], int(begin.timestamp() * 1000))
        some = Pairs(pairs.device[left], start, np.full(len(left), finish_ms), pairs.step[left])
        day = follow(store, some, begin, finish, limit_pct=limit_pct, max_gap_steps=max_gap_steps)
        active[left] = day.last_active != NEVER
        whole = (day.since != NEVER) & (day.since - start <= slack_ms[left])
        seen[left] &= whole & (finish_ms - day.last <= slack_ms[left] + pairs.step[left])
        finish = begin


def used_before(  # noqa: PLR0917
    store: SampleStore, keys: Pairs, seen: Trailing, begins: Ints, since: datetime, max_gap_steps: float,
    limit_pct: float,
) -> Ints:  # fmt: skip
    """Whether each pair was above the limit before it became idle, since its run began (``begins``), by what was
    followed from ``since`` on and else by what is stored of the time before: ``USED``, ``UNUSED`` or ``UNSEEN``."""
    slack = np.maximum((keys.step * max_gap_steps).astype(np.int64), UNSEEN_MS)
    since_ms = int(since.timestamp() * 1000)
    still = (seen.since != NEVER) & (seen.last_active == NEVER)
    found = np.where(still & (seen.since - np.maximum(begins, since_ms) <= slack), UNUSED, UNSEEN)
    older = np.flatnonzero(still & (begins < since_ms))
    if len(older):
        past = Pairs(keys.device[older], begins[older], keys.end[older], keys.step[older])
        active, whole = active_before(
            store, past, since, limit_pct=limit_pct, max_gap_steps=max_gap_steps, slack_ms=slack[older]
        )
        found[older] = np.where(active, USED, np.where(whole, found[older], UNSEEN))
    found[seen.last_active != NEVER] = USED
    return found


def _batches(store: SampleStore, wanted: pl.Series, begin: datetime, finish: datetime) -> list[slice]:
    """The devices some at a time, so that about ``BATCH_ROWS`` samples are in memory at once.

    A day in one file is in the order of the devices, and a batch reads its part of it; one that still lies in several
    files is read once as a whole.
    """
    parts = store.parts(begin, finish)
    rows = sum(part.entry.rows for part in parts)
    count = -(-rows // BATCH_ROWS) if all(part.single for part in parts) else 1
    size = max(1, -(-len(wanted) // max(1, count)))
    return [slice(first, first + size) for first in range(0, len(wanted), size)]


def _day(  # noqa: PLR0917
    store: SampleStore,
    pairs: Pairs,
    found: Trailing,
    wanted: pl.Series,
    at: Ints,
    some: slice,
    begin: datetime,
    finish: datetime,
    limit_pct: float,
    max_gap_steps: float,
) -> None:
    """Take in the samples of the devices ``wanted[some]``."""
    mine = wanted[some]
    percent = [
        (pl.col(name) if name == "util_pct" else pl.col(name) * 100).cast(pl.Float32).alias(name) for name in ACTIVITY
    ]
    frame = (
        store.scan(begin, finish)
        .filter(pl.col("device").is_between(mine[0], mine[-1]), pl.col("device").is_in(mine.implode()))
        .select("device", pl.col("time").dt.epoch("ms").alias("ms"), *percent, *_VALUES[len(ACTIVITY) :], "xid")
        .collect()
    )
    if frame.is_empty():
        return
    zero_ms = int(begin.timestamp() * 1000)
    device = np.searchsorted(wanted.to_numpy(), frame["device"].to_numpy()).astype(np.int64)
    ms = frame["ms"].to_numpy()
    key = (device << _SHIFT) + (ms - zero_ms)
    if len(key) > 1 and (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        frame, key, ms = frame[order], key[order], ms[order]
    span = int((finish - begin).total_seconds() * 1000)
    low = np.searchsorted(key, (at << _SHIFT) + np.clip(pairs.start - zero_ms, 0, span))
    high = np.searchsorted(key, (at << _SHIFT) + np.clip(pairs.end - zero_ms, 0, span))
    which = np.flatnonzero(high > low)
    if len(which):
        _fold(frame, ms, pairs, found, which, low[which], high[which], limit_pct, max_gap_steps)


def _fold(  # noqa: PLR0917 - one pass over the same arrays
    frame: pl.DataFrame,
    ms: Ints,
    pairs: Pairs,
    found: Trailing,
    which: Ints,
    low: Ints,
    high: Ints,
    limit_pct: float,
    max_gap_steps: float,
) -> None:
    """Take in the rows ``low[i]:high[i]`` of the pairs ``which[i]``."""
    count = high - low
    rows = ranges(low, count)
    pair = np.repeat(np.arange(len(which)), count)
    found.rows[which] += count
    signals = frame.select(ACTIVITY).to_numpy().astype(np.float32)[rows]
    fb = _column(frame, "fb_used_mib")[rows]
    starts = np.concatenate([[0], np.cumsum(count)[:-1]])
    _keep_max(found.fb_peak, which, np.fmax.reduceat(fb, starts))
    _keep_max(found.fb_total, which, np.fmax.reduceat(_column(frame, "fb_total_mib")[rows], starts))
    _xids(frame, rows, pair, found, which)
    with np.errstate(invalid="ignore"):
        busiest = np.fmax.reduce(signals, axis=1)
    known = np.flatnonzero(~np.isnan(busiest))
    if not len(known):
        return
    some, starts = np.unique(pair[known], return_index=True)
    rows = rows[known]
    measured = _Measured(
        which[some], starts, np.append(starts[1:], len(rows)) - 1, ms[rows], signals[known], busiest[known], fb[known],
        _column(frame, "power_w")[rows],
    )  # fmt: skip
    _fold_idle(measured, found, pairs, limit_pct, max_gap_steps)
    _fold_all(measured, found)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Rows with a signal of activity, of one pair after the other."""

    pair: Ints
    """Of each pair its number,"""
    start: Ints
    """its first row,"""
    end: Ints
    """and its last one."""
    time: Ints
    """Of each row, epoch milliseconds."""
    signals: npt.NDArray[np.float32]
    busiest: npt.NDArray[np.float32]
    """The largest of the signals, percent."""
    fb: Floats
    power: Floats


def _fold_idle(rows: _Measured, found: Trailing, pairs: Pairs, limit_pct: float, max_gap_steps: float) -> None:
    """What belongs to the idle time at the end of each pair: behind its last active sample, or behind its last gap."""
    mine, starts = rows.pair, rows.start
    of = np.repeat(np.arange(len(mine)), rows.end - starts + 1)
    position = np.arange(len(rows.time))
    active = rows.busiest > limit_pct
    before = np.empty(len(rows.time), np.int64)
    before[1:] = rows.time[:-1]
    before[starts] = found.last[mine]
    limit_ms = (pairs.step[mine] * max_gap_steps)[of]
    gap = (before != NEVER) & (rows.time - before > np.maximum(limit_ms, 1))
    last_active = np.maximum.reduceat(np.where(active, position, NEVER), starts)
    last_gap = np.maximum.reduceat(np.where(gap, position, NEVER), starts)
    broken = (last_active >= 0) | (last_gap >= 0)
    _reset(found, mine[broken])
    begins = np.where(broken, np.maximum(last_active + 1, last_gap), starts)
    new = (begins <= rows.end) & (found.since[mine] == NEVER)
    found.since[mine[new]] = rows.time[begins[new]]
    tail = position >= begins[of]
    for number in range(len(ACTIVITY)):
        values = np.where(tail, rows.signals[:, number], np.nan)
        found.peaks[mine, number] = np.fmax(found.peaks[mine, number], np.fmax.reduceat(values, starts))
    _add(found.fb_sum, found.fb_count, mine, np.where(tail, rows.fb, np.nan), starts)
    _add(found.power_sum, found.power_count, mine, np.where(tail, rows.power, np.nan), starts)
    was = last_active >= 0
    found.last_active[mine[was]] = rows.time[last_active[was]]


def _fold_all(rows: _Measured, found: Trailing) -> None:
    """What belongs to the whole of each pair."""
    mine, starts = rows.pair, rows.start
    _add(found.util_sum, found.util_count, mine, rows.signals[:, 0].astype(np.float64), starts)
    never = found.first[mine] == NEVER
    found.first[mine[never]] = rows.time[starts[never]]
    found.last[mine] = rows.time[rows.end]
    found.samples[mine] += rows.end - starts + 1
    found.activity_sum[mine] += np.add.reduceat(rows.busiest.astype(np.float64), starts)
    _keep_max(found.peak_all, mine, np.fmax.reduceat(rows.busiest, starts))


def _column(frame: pl.DataFrame, name: str) -> Floats:
    return frame[name].cast(pl.Float64).to_numpy()


def _reset(found: Trailing, mine: Ints) -> None:
    found.since[mine] = NEVER
    found.peaks[mine] = np.nan
    found.fb_sum[mine] = found.power_sum[mine] = 0.0
    found.fb_count[mine] = found.power_count[mine] = 0


def _add(total: Floats, count: Ints, mine: Ints, values: Floats, starts: Ints) -> None:
    known = ~np.isnan(values)
    total[mine] += np.add.reduceat(np.where(known, values, 0.0), starts)
    count[mine] += np.add.reduceat(known.astype(np.int64), starts)


def _keep_max(into: Floats, mine: Ints, values: Floats) -> None:
    into[mine] = np.fmax(into[mine], values)


def _xids(frame: pl.DataFrame, rows: Ints, pair: Ints, found: Trailing, which: Ints) -> None:
    if frame["xid"].null_count() == frame.height:
        return
    xid = frame["xid"].cast(pl.Int64).fill_null(NEVER).to_numpy()[rows]
    known = np.flatnonzero(xid != NEVER)
    # Of equal places the last assignment stays: that of the latest sample.
    found.xid[which[pair[known]]] = xid[known]


def moment(ms: int) -> datetime | None:
    """A time of ``Trailing``, epoch milliseconds; ``NEVER`` is ``None``."""
    return None if ms == NEVER else datetime.fromtimestamp(ms / 1000, UTC)
