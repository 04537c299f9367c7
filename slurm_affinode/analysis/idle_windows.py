"""The trailing idle window of each GPU of each run, and the activity before it.

One pass over the samples, day by day, whatever the number of runs. Samples and idle windows are counted as in the join
(``docs/metrics.md``): a sample counts until the next sample of its GPU, for one sampling interval before a gap, and not
beyond the end of the run. A window ends at a sample above the limit, at a sample without any activity signal, or at a
gap. Unknown time is not idle.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from itertools import chain

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.analysis.block import Pieces
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.samples import Index, StoredSamples, naming_damage, read_index, store_of_task
from slurm_affinode.analysis.segments import ranges
from slurm_affinode.base.spread import Spread
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.metrics.ahead import ItemSource, read_ahead
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import ACTIVITY, percent

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = -1
UNUSED, USED, UNSEEN = 0, 1, -1
"""Results of ``used_before``."""
UNSEEN_MS = 60_000
"""Time without samples allowed at the start of a run (or the longest gap, if longer): its first sample comes later."""
BATCH_ROWS = 500_000
"""About 40 MB; larger batches are less than a tenth faster."""
FOLD_ROWS = 32_768
"""Rows folded together: their arrays stay in the cache of a core."""
_DAY_MS = 86_400_000
_SHIFT = 44
"""Bits of the time in a sample's key: 557 years in milliseconds."""
_VALUES = ("fb_used_mib", "fb_total_mib", "power_w", "xid")


@dataclass(slots=True)
class Trailing:
    """One element per pair. Times are epoch milliseconds, ``NEVER`` if there is none; NaN is unknown. Sums are value x
    milliseconds for which a sample with that value counts."""

    samples: Ints
    """Number of samples within the run that have an activity signal."""
    rows: Ints
    """Number of samples within the run."""
    newest: Ints
    """Time of the last sample."""
    last: Ints
    """Time of the last sample with an activity signal."""
    first: Ints
    """Time of the first sample with an activity signal."""
    last_active: Ints
    """Time of the last sample above the limit."""
    since: Ints
    """Time of the first sample of the trailing idle window; ``NEVER`` if the last sample is above the limit or has no
    activity signal."""
    until: Ints
    """End of that window."""
    peaks: Floats
    """Largest value of each signal in the window, percent; pairs x signals."""
    peak_all: Floats
    """Largest value of any signal in the whole run, percent."""
    measured_ms: Ints
    """Time of the run for which a sample with an activity signal counts."""
    activity_ms: Floats
    """Sum of the busiest signal over the run."""
    util_ms: Floats
    util_known_ms: Ints
    fb_ms: Floats
    """Sum in the window, MiB x ms."""
    fb_known_ms: Ints
    fb_peak: Floats
    """Peak of the whole run."""
    fb_total: Floats
    power_ms: Floats
    """Sum in the window."""
    power_known_ms: Ints
    xid: Ints
    """Last XID of the run; ``NEVER`` if unknown."""
    reach: Ints
    """Time up to which the last sample counts, unless the run ends before."""

    @classmethod
    def empty(cls, pairs: int) -> Trailing:
        """Return the state of ``pairs`` pairs of a run and a GPU before any sample."""

        def never() -> Ints:
            return np.full(pairs, NEVER, np.int64)

        def none() -> Ints:
            return np.zeros(pairs, np.int64)

        def zero() -> Floats:
            return np.zeros(pairs)

        def unknown() -> Floats:
            return np.full(pairs, np.nan)

        return cls(
            none(), none(), never(), never(), never(), never(), never(), never(),
            np.full((pairs, len(ACTIVITY)), np.nan), unknown(), none(), zero(), zero(), none(), zero(), none(),
            unknown(), unknown(), zero(), none(), never(), never(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pairs:
    """Runs and their GPUs, one row each."""

    device: npt.NDArray[np.uint64]
    """Number of the device in the sample store."""
    start: Ints
    """Start of the run, epoch milliseconds."""
    end: Ints
    """End of the run, or of the interval."""
    step: Ints
    """Sampling interval of the device, milliseconds."""

    def take(self, which: Ints) -> Pairs:
        """Return the selected pairs."""
        return Pairs(self.device[which], self.start[which], self.end[which], self.step[which])


@dataclass(frozen=True, slots=True)
class SampledDays:
    """The part of an index that says when samples count; it can be sent to other machines."""

    days: tuple[date, ...]
    """Days with samples, ascending."""
    device: npt.NDArray[np.uint64]
    """Numbers of the devices of ``pieces`` in the sample store."""
    pieces: Pieces

    @classmethod
    def of(cls, index: Index) -> SampledDays:
        """Return that of an index."""
        days = tuple(sorted({source.day for source in index.sources}))
        return cls(days, index.devices["device"].to_numpy(), index.pieces)


@dataclass(frozen=True, slots=True)
class FollowInput:
    """Parameters that all pairs share."""

    stored: StoredSamples
    since: datetime
    until: datetime
    limits_pct: tuple[float, ...]
    thresholds: Thresholds
    sampled: SampledDays


Followed = tuple[dict[float, Trailing], dict[float, Ints]]
"""Limit in percent -> activity of each pair; limit -> result of ``used_before`` for each pair."""


def follow_all(  # noqa: PLR0917
    store: SampleStore, pairs: Pairs, begins: Ints, shared: FollowInput, groups: Sequence[pl.Series], spread: Spread
) -> Followed:
    """Follow each pair for each limit, and search for use before. ``begins``: starts of the runs, see ``used_before``.

    ``groups`` (``samples.device_groups``): devices that are examined together by a task of ``spread``. Without several
    groups, all pairs are followed here.
    """
    if len(groups) < 2:
        return _follow_group(store, pairs, begins, shared)
    which = [np.flatnonzero(np.isin(pairs.device, devices.to_numpy())) for devices in groups]
    todo = [(pairs.take(rows), begins[rows]) for rows in which]
    count = len(pairs.device)
    trailing_by_limit = {limit: Trailing.empty(count) for limit in shared.limits_pct}
    used = {limit: np.full(count, UNSEEN, np.int64) for limit in shared.limits_pct}
    for rows, (seen_there, used_there) in zip(which, spread(_follow_task, todo, shared), strict=True):
        for limit in shared.limits_pct:
            used[limit][rows] = used_there[limit]
            for field in fields(Trailing):
                getattr(trailing_by_limit[limit], field.name)[rows] = getattr(seen_there[limit], field.name)
    return trailing_by_limit, used


def _follow_task(item: tuple[Pairs, Ints], shared: FollowInput) -> Followed:
    with store_of_task(shared.stored) as store:
        return _follow_group(store, *item, shared)


def _follow_group(store: SampleStore, pairs: Pairs, begins: Ints, shared: FollowInput) -> Followed:
    since, thresholds = shared.since, shared.thresholds
    trailing_by_limit = {
        limit: follow(store, pairs, since, shared.until, limit, thresholds, shared.sampled)
        for limit in shared.limits_pct
    }
    used = {
        limit: used_before(store, pairs, trailing, begins, since, thresholds, limit)
        for limit, trailing in trailing_by_limit.items()
    }
    return trailing_by_limit, used


def follow(  # noqa: PLR0917
    store: SampleStore,
    pairs: Pairs,
    since: datetime,
    until: datetime,
    limit_pct: float,
    thresholds: Thresholds,
    sampled: SampledDays | None = None,
) -> Trailing:
    """Fold the samples of ``[since, until)`` in one pass.

    A GPU above ``limit_pct`` is active. Only the gap and the floors of ``thresholds`` are used. ``sampled``: that of
    the index of this interval, if already read.
    """
    trailing = Trailing.empty(len(pairs.device))
    source = ItemSource(lambda: counted_rows(store, pairs, since, until, thresholds, sampled), cost=0)
    with closing(read_ahead([source], workers=1, budget=0)) as streams:
        for rows, which, low, high in chain.from_iterable(streams):
            filled = np.cumsum(high - low) // FOLD_ROWS
            for some in np.split(np.arange(len(which)), np.flatnonzero(filled[1:] > filled[:-1]) + 1):
                _fold(rows, pairs, trailing, which[some], low[some], high[some], limit_pct)
    return trailing


def counted_rows(  # noqa: PLR0917
    store: SampleStore,
    pairs: Pairs,
    since: datetime,
    until: datetime,
    thresholds: Thresholds,
    sampled: SampledDays | None = None,
) -> Generator[tuple[CountedRows, Ints, Ints, Ints], None, None]:
    """Yield the samples of ``[since, until)`` by day, in batches of devices, with the rows of each pair.

    The arrays are parallel: numbers of pairs in the order of their rows, the first row of each, and the row after its
    last one. Pairs without rows are left out. For ``sampled`` see ``follow``.
    """
    devices = np.unique(pairs.device)
    if not len(devices):
        return
    if sampled is None:
        sampled = SampledDays.of(read_index(store, since, until, max_gap_steps=thresholds.max_gap_steps))
    device_rows = np.searchsorted(devices, pairs.device)
    weights = _Weights.of(sampled, devices)
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    selected = pl.Series("device", devices, dtype=pl.UInt64)
    while day < until:
        if day.date() in sampled.days:
            # Read to the end of the day: a sample counts until the next one, even beyond the interval.
            begin, finish = max(day, since), day + timedelta(days=1)
            for some in _batches(store, selected, begin, finish):
                rows = _read(store, selected, some, begin, finish, weights, thresholds)
                if rows is not None:
                    which, low, high = _pairs_with_rows(rows, pairs, device_rows, begin, until)
                    if len(which):
                        yield rows, which, low, high
        day += timedelta(days=1)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of samples as in the join: its pieces, by device and day."""

    key: Ints
    """``device << _SHIFT | day``, ascending."""
    step: Ints
    limit: Floats
    next_time: Ints

    @classmethod
    def of(cls, sampled: SampledDays, devices: npt.NDArray[np.uint64]) -> _Weights:
        """Build the table. ``devices``: device numbers, ascending; keys contain the position in this array."""
        pieces = sampled.pieces
        number = sampled.device[pieces.device] if len(pieces) else np.empty(0, np.uint64)
        position = np.minimum(np.searchsorted(devices, number), len(devices) - 1)
        chosen = np.flatnonzero(devices[position] == number)
        key = (position[chosen].astype(np.int64) << _SHIFT) + pieces.first_time[chosen] // _DAY_MS
        order = chosen[np.argsort(key)]
        return cls(np.sort(key), pieces.step[order], pieces.limit[order], pieces.next_time[order])

    def reach(self, device: Ints, ms: Ints) -> Ints:
        """Return the time up to which each sample counts. Samples: of one UTC day, sorted by device and time."""
        if not len(ms):
            return ms
        fresh = np.append(True, device[1:] != device[:-1])
        piece = np.searchsorted(self.key, (device[fresh] << _SHIFT) + ms[fresh] // _DAY_MS)
        of = np.cumsum(fresh) - 1
        following = np.append(ms[1:], 0)
        last = np.append(np.flatnonzero(fresh)[1:] - 1, len(ms) - 1)
        following[last] = self.next_time[piece]
        near = following - ms <= self.limit[piece][of]
        reach: Ints = np.where(near, following, ms + self.step[piece][of])
        return reach


def idle_spans(pair: Ints, time: Ints, until: Ints, idle: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """Return pair, begin and end of the idle spans among samples, which are sorted by pair and time.

    ``until``: the end of the time for which each sample counts. A span ends at a sample that is not idle, and at a gap.
    """
    joins = idle[1:] & idle[:-1] & (pair[1:] == pair[:-1]) & (time[1:] == until[:-1])
    first, last = idle & ~np.append(False, joins), idle & ~np.append(joins, False)
    return pair[first], time[first], until[last]


def active_before(
    store: SampleStore, pairs: Pairs, until: datetime, *, limit_pct: float, thresholds: Thresholds, slack_ms: Ints
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return, per pair, whether it exceeded the limit before ``until``, and whether samples cover the time before.

    The time begins with the pair's start. Days are read newest first, and each pair only back to its last activity.
    Gaps of up to ``slack_ms`` (per pair) at the start and end of a day count as covered.
    """
    count = len(pairs.device)
    active, measured = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    finish = until
    while True:
        finish_ms = epoch_ms(finish)
        inactive = np.flatnonzero(~active & (pairs.start < finish_ms))
        if not len(inactive):
            return active, measured
        begin = (finish - timedelta(milliseconds=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        start = np.maximum(pairs.start[inactive], epoch_ms(begin))
        some = Pairs(pairs.device[inactive], start, np.full(len(inactive), finish_ms), pairs.step[inactive])
        day = follow(store, some, begin, finish, limit_pct, thresholds)
        active[inactive] = day.last_active != NEVER
        whole = (day.since != NEVER) & (day.since - start <= slack_ms[inactive])
        measured[inactive] &= whole & (finish_ms - day.last <= slack_ms[inactive] + pairs.step[inactive])
        finish = begin


def used_before(  # noqa: PLR0917
    store: SampleStore, keys: Pairs, trailing: Trailing, begins: Ints, since: datetime, thresholds: Thresholds,
    limit_pct: float,
) -> Ints:  # fmt: skip
    """Return, per pair, whether it exceeded the limit before it became idle: ``USED``, ``UNUSED`` or ``UNSEEN``.

    The time since the run began (``begins``) counts: from ``since`` on by ``trailing``, before it by stored samples.
    """
    slack = np.maximum((keys.step * thresholds.max_gap_steps).astype(np.int64), UNSEEN_MS)
    since_ms = epoch_ms(since)
    still = (trailing.since != NEVER) & (trailing.last_active == NEVER)
    uses = np.where(still & (trailing.since - np.maximum(begins, since_ms) <= slack), UNUSED, UNSEEN)
    older = np.flatnonzero(still & (begins < since_ms))
    if len(older):
        past = Pairs(keys.device[older], begins[older], keys.end[older], keys.step[older])
        active, whole = active_before(
            store, past, since, limit_pct=limit_pct, thresholds=thresholds, slack_ms=slack[older]
        )
        uses[older] = np.where(active, USED, np.where(whole, uses[older], UNSEEN))
    uses[trailing.last_active != NEVER] = USED
    return uses


def _batches(store: SampleStore, selected: pl.Series, begin: datetime, finish: datetime) -> list[slice]:
    """Split the devices into batches of about ``BATCH_ROWS`` samples.

    A day in one file is sorted by device, so a batch reads only part of it. A day in several files is read as a whole,
    once.
    """
    parts = store.parts(begin, finish)
    rows = sum(part.entry.rows for part in parts)
    count = -(-rows // BATCH_ROWS) if all(part.single for part in parts) else 1
    size = max(1, -(-len(selected) // max(1, count)))
    return [slice(first, first + size) for first in range(0, len(selected), size)]


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Samples of some devices, sorted by device and time."""

    device: Ints
    """Position among all devices of the pass."""
    ms: Ints
    reach: Ints
    """Time up to which each sample counts, unless the run ends before."""
    signals: Mapping[int, npt.NDArray[np.float32]]
    """Position in ``ACTIVITY`` -> values, percent; without signals that no row has."""
    fb: Floats
    fb_total: Floats
    power: Floats
    xid: Ints | None
    """``NEVER`` if unknown; ``None`` if no row has one."""


def _read(  # noqa: PLR0917
    store: SampleStore,
    selected: pl.Series,
    some: slice,
    begin: datetime,
    finish: datetime,
    weights: _Weights,
    thresholds: Thresholds,
) -> CountedRows | None:
    """Return the samples of the devices ``selected[some]``; ``None`` if there are none."""
    chosen = selected[some]
    signals = [percent(name, thresholds.floors_pct).cast(pl.Float32).alias(name) for name in ACTIVITY]
    with naming_damage(store, begin, finish):
        frame = (
            store.scan(begin, finish)
            .filter(pl.col("device").is_between(chosen[0], chosen[-1]), pl.col("device").is_in(chosen.implode()))
            .select("device", pl.col("time").dt.epoch("ms").alias("ms"), *signals, *_VALUES)
            .collect()
        )
    if frame.is_empty():
        return None
    device, ms = _positions(selected.to_numpy(), frame["device"].to_numpy()), frame["ms"].to_numpy()
    key = (device << _SHIFT) + ms % _DAY_MS
    if len(key) > 1 and (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        frame, device, ms = frame[order], device[order], ms[order]
    present = [name for name in (*ACTIVITY, *_VALUES) if frame[name].null_count() < frame.height]
    fb, fb_total, power = (
        frame[name].cast(pl.Float64).to_numpy() for name in ("fb_used_mib", "fb_total_mib", "power_w")
    )
    return CountedRows(
        device, ms, weights.reach(device, ms),
        {number: frame[name].to_numpy() for number, name in enumerate(ACTIVITY) if name in present},
        fb, fb_total, power, frame["xid"].cast(pl.Int64).fill_null(NEVER).to_numpy() if "xid" in present else None,
    )  # fmt: skip


def _positions(devices: npt.NDArray[np.uint64], of_rows: npt.NDArray[np.uint64]) -> Ints:
    """Return the position in ``devices`` (ascending) of the device of each row; a device's rows are mostly together."""
    fresh = np.append(True, of_rows[1:] != of_rows[:-1])
    first = np.flatnonzero(fresh)
    position = np.searchsorted(devices, of_rows[first]).astype(np.int64)
    return np.repeat(position, np.diff(first, append=len(of_rows)))


def _pairs_with_rows(
    rows: CountedRows, pairs: Pairs, device_rows: Ints, begin: datetime, until: datetime
) -> tuple[Ints, Ints, Ints]:
    """Return the pairs with samples among ``rows``, and the range of rows of each."""
    zero_ms, span = epoch_ms(begin), int((until - begin).total_seconds() * 1000)
    key = (rows.device << _SHIFT) + (rows.ms - zero_ms)
    low = np.searchsorted(key, (device_rows << _SHIFT) + np.clip(pairs.start - zero_ms, 0, span))
    high = np.searchsorted(key, (device_rows << _SHIFT) + np.clip(pairs.end - zero_ms, 0, span))
    which = np.flatnonzero(high > low)
    which = which[np.argsort(low[which])]  # neighboring rows are read as views
    return which, low[which], high[which]


def _fold(  # noqa: PLR0917 - one pass over the same arrays
    rows: CountedRows, pairs: Pairs, trailing: Trailing, which: Ints, low: Ints, high: Ints, limit_pct: float
) -> None:
    """Fold the rows ``low[i]:high[i]`` of the pairs ``which[i]``."""
    count = high - low
    start = np.cumsum(count) - count
    end = start + count - 1
    adjacent = bool((low[1:] == high[:-1]).all())
    index = slice(low[0], high[-1]) if adjacent else ranges(low, count)
    signals = {number: values[index] for number, values in rows.signals.items()}
    busiest = np.full(end[-1] + 1, np.nan, np.float32)
    with np.errstate(invalid="ignore"):
        for values in signals.values():
            np.fmax(busiest, values, out=busiest)
    time, reach = rows.ms[index], rows.reach[index]
    until = np.minimum(reach, np.repeat(pairs.end[which], count))
    figures = _PairRows(
        which, count, start, end, time, reach, until, until - time, signals, busiest, rows.fb[index], rows.power[index]
    )
    trailing.rows[which] += count
    _keep_max(trailing.fb_peak, which, np.fmax.reduceat(figures.fb, start))
    _keep_max(trailing.fb_total, which, np.fmax.reduceat(rows.fb_total[index], start))
    if rows.xid is not None:
        xid = rows.xid[index]
        xid_rows = np.flatnonzero(xid != NEVER)
        # With repeated indices the last assignment wins: that of the latest sample.
        trailing.xid[np.repeat(which, count)[xid_rows]] = xid[xid_rows]
    _fold_idle(figures, trailing, limit_pct)
    _fold_all(figures, trailing)
    trailing.newest[which], trailing.reach[which] = time[end], reach[end]


@dataclass(frozen=True, slots=True)
class _PairRows:
    """Samples grouped by pair. ``pair``, ``count``, ``start`` and ``end`` have one element per pair, the others one per
    row."""

    pair: Ints
    """Number of the pair."""
    count: Ints
    """Rows of the pair."""
    start: Ints
    """First row of the pair."""
    end: Ints
    """Last row of the pair."""
    time: Ints
    """Epoch milliseconds."""
    reach: Ints
    """Time up to which the sample counts."""
    until: Ints
    """``reach``, but not beyond the end of the run."""
    ms: Ints
    """Time for which the sample counts: ``until - time``."""
    signals: Mapping[int, npt.NDArray[np.float32]]
    """See ``CountedRows``."""
    busiest: npt.NDArray[np.float32]
    """Largest of the signals, percent; NaN if there is none."""
    fb: Floats
    power: Floats


def _fold_idle(rows: _PairRows, trailing: Trailing, limit_pct: float) -> None:
    """Update the trailing idle window and the last activity of each pair."""
    pair, starts = rows.pair, rows.start
    position = np.arange(len(rows.time))
    before = np.append(NEVER, rows.reach[:-1])
    before[starts] = trailing.reach[pair]
    # NaN is not idle.
    broken = ~(rows.busiest <= limit_pct)
    gap = (before != NEVER) & (before != rows.time)
    last_broken = np.maximum.reduceat(np.where(broken, position, NEVER), starts)
    last_gap = np.maximum.reduceat(np.where(gap, position, NEVER), starts)
    anew = (last_broken >= 0) | (last_gap >= 0)
    _reset(trailing, pair[anew])
    begins = np.where(anew, np.maximum(last_broken + 1, last_gap), starts)
    idle = begins <= rows.end
    new = idle & (trailing.since[pair] == NEVER)
    trailing.since[pair[new]] = rows.time[begins[new]]
    trailing.until[pair[idle]] = rows.until[rows.end[idle]]
    tail = position >= np.repeat(begins, rows.count)
    for number, signal in rows.signals.items():
        values = np.where(tail, signal, np.nan)
        trailing.peaks[pair, number] = np.fmax(trailing.peaks[pair, number], np.fmax.reduceat(values, starts))
    _add(trailing.fb_ms, trailing.fb_known_ms, rows, np.where(tail, rows.fb, np.nan))
    _add(trailing.power_ms, trailing.power_known_ms, rows, np.where(tail, rows.power, np.nan))
    last_active = np.maximum.reduceat(np.where(rows.busiest > limit_pct, position, NEVER), starts)
    was = last_active >= 0
    trailing.last_active[pair[was]] = rows.time[last_active[was]]


def _fold_all(rows: _PairRows, trailing: Trailing) -> None:
    """Update the figures that cover the whole run of each pair."""
    pair, starts = rows.pair, rows.start
    if (util := rows.signals.get(ACTIVITY.index("util_pct"))) is not None:
        _add(trailing.util_ms, trailing.util_known_ms, rows, util.astype(np.float64))
    _add(trailing.activity_ms, trailing.measured_ms, rows, rows.busiest.astype(np.float64))
    measured = ~np.isnan(rows.busiest)
    trailing.samples[pair] += np.add.reduceat(measured.astype(np.int64), starts)
    _keep_max(trailing.peak_all, pair, np.fmax.reduceat(rows.busiest, starts))
    position = np.arange(len(measured))
    last = np.maximum.reduceat(np.where(measured, position, NEVER), starts)
    first = np.minimum.reduceat(np.where(measured, position, len(measured)), starts)
    some = last >= 0
    fresh = some & (trailing.first[pair] == NEVER)
    trailing.first[pair[fresh]] = rows.time[first[fresh]]
    trailing.last[pair[some]] = rows.time[last[some]]


def _reset(trailing: Trailing, pair: Ints) -> None:
    trailing.since[pair] = trailing.until[pair] = NEVER
    trailing.peaks[pair] = np.nan
    trailing.fb_ms[pair] = trailing.power_ms[pair] = 0.0
    trailing.fb_known_ms[pair] = trailing.power_known_ms[pair] = 0


def _add(total: Floats, known_ms: Ints, rows: _PairRows, values: Floats) -> None:
    """Add value x time to ``total`` and the time with a value to ``known_ms``."""
    measured = ~np.isnan(values)
    total[rows.pair] += np.add.reduceat(np.where(measured, values, 0.0) * rows.ms, rows.start)
    known_ms[rows.pair] += np.add.reduceat(measured * rows.ms, rows.start)


def _keep_max(into: Floats, pair: Ints, values: Floats) -> None:
    into[pair] = np.fmax(into[pair], values)


def moment(ms: int) -> datetime | None:
    """Convert a time of ``Trailing`` (epoch milliseconds); ``NEVER`` becomes ``None``."""
    return None if ms == NEVER else datetime.fromtimestamp(ms / 1000, UTC)
