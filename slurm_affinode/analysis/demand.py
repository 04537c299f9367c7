"""Unmet demand: GPU-hours that jobs waited for while jobs of the same partition held idle GPUs. Pure.

Accounting has jobs that started, so the waits are those of jobs that started in the interval, from the time at which
they were eligible. The interval is divided into slots of equal length, at most ``SLOTS`` and no shorter than a minute.
In a slot, idle time is spread evenly over the time for which a run held a GPU, up to the next bucket of the report
(``analysis.over_time``) or change of working hours. Unmet are the lesser of

- the GPU-hours that the waiting jobs requested, and
- the idle GPU-hours of the runs in their partition, for the part of the slot in which a job waited.

The hours are divided among the runs that held the idle GPUs in proportion to their idle time. In the way of a waiting
job was each run of its partition that held idle GPUs meanwhile, for at least ``_LEAST_HOURS``. Other reasons for a
wait (CPUs, memory, limits, reservations) are not in accounting: the figures show the obstruction, not the decisions
that the scheduler would have made.

Head of line: the waiting job of a partition that has been eligible for longest. Priorities are not in accounting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.analysis.measures import MS_PER_HOUR, owner_pairs, partly_pairs
from slurm_affinode.analysis.result import SUMS, WAITED_S, Totals, UnmetDemand
from slurm_affinode.analysis.segments import Allocations, Cells, Floats, Ints

SLOTS = 500
_LEAST_MS = 60_000.0
_IDLE = SUMS.index("idle")
_HOLDERS = 10
_LEAST_HOURS = 0.01
_KEY = ("cluster", "partition")
_MODELS = {
    "cluster": pl.String(), "partition": pl.String(), "gpu_model": pl.String(), "gpu_hours_unmet": pl.Float64(),
}  # fmt: skip
_HOLDER = ("cluster", "job_id", "array_job_id", "array_task_id", "user", "partition")
_WAITER = ("job_id", "array_job_id", "array_task_id", "user")


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Idle time of the runs of a report."""

    totals: Totals
    cells: Cells
    allocations: Allocations
    kept_share: Floats
    """Per allocation, the fraction of its idle time that is known (``measures.without_suspended``)."""
    models: pl.Series
    """GPU model of each device; null: unknown."""


@dataclass(frozen=True, slots=True)
class _Slots:
    """Slots of equal length for each partition; all times are relative to the begin of the interval, in ms."""

    groups: int
    count: int
    width: float

    def place(self, group: Ints, time: Floats) -> Ints:
        """Return the position of the slots, group by group, that contain the times."""
        return group * self.count + np.clip(time / self.width, 0, self.count - 1).astype(np.int64)

    def end(self, place: Ints) -> Floats:
        """Return the end of each slot."""
        return np.asarray((place % self.count + 1) * self.width, np.float64)

    def integrals(self, group: Ints, start: Floats, end: Floats, rate: Floats) -> Floats:
        """Return the integral over each slot of the sum of rates that last from ``start`` to ``end``."""
        size = self.groups * self.count
        within, change = np.zeros(size), np.zeros(size)
        for time, amount in ((start, rate), (end, -rate)):
            place = self.place(group, time)
            within += np.bincount(place, weights=amount * (self.end(place) - time), minlength=size)
            change += np.bincount(place, weights=amount, minlength=size)
        steps = change.reshape(self.groups, self.count)
        before = np.cumsum(steps, axis=1) - steps
        sums: Floats = within.reshape(self.groups, self.count) + before * self.width
        np.maximum(sums, 0.0, out=sums)
        return sums

    def between(self, density: Floats, group: Ints, start: Floats, end: Floats) -> Floats:
        """Return the integral of a density, given for each slot, from ``start`` to ``end``."""
        whole = (np.cumsum(density, axis=1) - density).ravel() * self.width
        flat = density.ravel()

        def until(time: Floats) -> Floats:
            place = self.place(group, time)
            partly: Floats = whole[place] + flat[place] * (time - self.end(place) + self.width)
            return partly

        return until(end) - until(start)


def unmet(about: pl.DataFrame, since: int, until: int, idle: IdleTime | None) -> UnmetDemand | None:
    """Return the unmet demand of an interval (ms); ``None`` if no wait is known.

    ``about``: the GPU runs of the report (``runs.prepare``). ``idle``: ``None`` if nothing was measured; then idle and
    unmet hours are unknown.
    """
    starts = about.filter(
        pl.col("eligible").is_not_null() & (pl.col("gpus") > 0) & (pl.col("start").dt.epoch("ms") >= since)
    )
    if starts.is_empty():
        return None
    keys = about.select(*_KEY).unique(maintain_order=True).sort(*_KEY, nulls_last=True).with_row_index("group")
    runs = about.join(keys, on=_KEY, how="left", nulls_equal=True, maintain_order="left")
    waits = _waits(runs, since)
    span = float(until - since)
    count = int(max(1, min(SLOTS, span // _LEAST_MS)))
    slots = _Slots(keys.height, count, span / count)
    group = waits["group"].cast(pl.Int64).to_numpy()
    first, last = waits["begin"].to_numpy(), waits["end"].to_numpy()
    gpus = waits["gpus"].cast(pl.Float64).to_numpy()
    requested = slots.integrals(group, first, last, gpus)
    waiting = np.minimum(slots.integrals(group, first, last, np.ones(len(group))) / slots.width, 1.0)
    behind = _behind_larger(waits, span) * gpus
    per_group = pl.DataFrame(
        {
            "jobs": np.bincount(group, minlength=keys.height),
            "gpu_hours_waited": requested.sum(axis=1) / MS_PER_HOUR,
            "gpu_hours_behind_larger": np.bincount(group, weights=behind, minlength=keys.height) / MS_PER_HOUR,
        }
    )
    partitions = pl.concat([keys.select(*_KEY), per_group], how="horizontal")
    models = pl.DataFrame(schema=_MODELS)
    holders = about.select(*_HOLDER).clear().with_columns(
        pl.lit(None, pl.Float64).alias("gpu_hours_unmet"), pl.lit(None, pl.Int64).alias("waiting_jobs"), *_waiter()
    ).clear()  # fmt: skip
    if idle is None:
        unknown = pl.lit(None, pl.Float64)
        partitions = partitions.with_columns(
            unknown.alias("gpu_hours_idle_meanwhile"), unknown.alias("gpu_hours_unmet")
        )
    else:
        holdings = _IdleHoldings.of(idle, runs, since)
        idle_time = slots.integrals(holdings.group, holdings.start, holdings.end, holdings.rate)
        idle_while_waiting = idle_time * waiting
        lacking = np.minimum(requested, idle_while_waiting)
        share = np.divide(lacking, idle_time, out=np.zeros_like(lacking), where=idle_time > 0)
        hours = holdings.rate * slots.between(share, holdings.group, holdings.start, holdings.end) / MS_PER_HOUR
        partitions = partitions.with_columns(
            pl.Series("gpu_hours_idle_meanwhile", idle_while_waiting.sum(axis=1) / MS_PER_HOUR),
            pl.Series("gpu_hours_unmet", lacking.sum(axis=1) / MS_PER_HOUR),
        )
        models = _unmet_by_model(holdings, hours, keys, idle.models)
        holders = _in_the_way(_holders(holdings, hours, about), holdings, waits, about).select(holders.columns)
    waited = partitions.filter(pl.col("jobs") > 0).sort(
        "gpu_hours_unmet", "gpu_hours_waited", descending=True, nulls_last=True, maintain_order=True
    )
    return UnmetDemand(slots.width / 1000, waited, models, holders)


def _waits(runs: pl.DataFrame, since: int) -> pl.DataFrame:
    """Return the waits of runs that started in the interval: ``begin`` and ``end`` in ms since its begin."""
    start, eligible = pl.col("start").dt.epoch("ms"), pl.col("eligible").dt.epoch("ms")
    waited = (pl.col("gpus") > 0) & (start >= since) & (start - eligible > 1000 * WAITED_S)
    return (
        runs.filter(waited)
        .select(
            "group", "run", "gpus", "job_id",
            (eligible.clip(lower_bound=since) - since).cast(pl.Float64).alias("begin"),
            (start - since).cast(pl.Float64).alias("end"),
        )
        .sort("group", "begin", "job_id", maintain_order=True)
    )  # fmt: skip


def _behind_larger(waits: pl.DataFrame, span: float) -> Floats:
    """Return for each wait the time, ms, for which the head of line requested more GPUs. Sorted by group and begin."""
    if waits.is_empty():
        return np.empty(0)
    heads = waits.with_columns(pl.col("end").cum_max().shift().over("group").fill_null(0.0).alias("taken"))
    origin = waits["group"].cast(pl.Float64).to_numpy() * (span + 1.0)
    begin, end, gpus = (waits[name].cast(pl.Float64).to_numpy() for name in ("begin", "end", "gpus"))
    front = np.maximum(begin, heads["taken"].to_numpy())
    is_head = front < end
    head_start, head_end, head_gpus = (origin + front)[is_head], (origin + end)[is_head], gpus[is_head]
    behind_end = np.minimum(front, end)
    waited = np.zeros(len(begin))
    for size in np.unique(gpus):
        rows = np.flatnonzero((gpus == size) & (behind_end > begin))
        if not len(rows):
            continue
        length = (head_end - head_start) * (head_gpus > size)
        before = np.cumsum(length) - length

        def until(time: Floats, *, length: Floats = length, before: Floats = before) -> Floats:
            place = np.searchsorted(head_start, time, side="right") - 1
            inside: Floats = np.where(
                place < 0, 0.0, before[place] + np.minimum(time - head_start[place], length[place])
            )
            return inside

        waited[rows] = until(origin[rows] + behind_end[rows]) - until(origin[rows] + begin[rows])
    return waited


@dataclass(frozen=True, slots=True)
class _IdleHoldings:
    """Idle time of runs: rates of idle GPUs from ``start`` to ``end`` (ms since the begin of the interval)."""

    group: Ints
    run: Ints
    device: Ints
    start: Floats
    end: Floats
    rate: Floats

    @classmethod
    def of(cls, idle: IdleTime, runs: pl.DataFrame, since: int) -> _IdleHoldings:
        totals, cells, allocations = idle.totals, idle.cells, idle.allocations
        cell, owner, share = owner_pairs(cells)
        row, partly_owner, partly_share = partly_pairs(totals, cells, allocations)
        amount = np.concatenate([totals.sums[cell, _IDLE] * share, totals.partly_sums[row, _IDLE] * partly_share])
        cell, owner = np.concatenate([cell, totals.partly_cell[row]]), np.concatenate([owner, partly_owner])
        some = np.flatnonzero((amount > 0) & allocations.counted[owner])
        cell, owner = cell[some], owner[some]
        start, end = cells.start[cell], cells.end[cell]
        groups = np.full(int(max(runs["run"].max() or 0, allocations.run.max(initial=0))) + 1, -1)
        groups[runs["run"].to_numpy()] = runs["group"].to_numpy()
        run = allocations.run[owner]
        rate = amount[some] * idle.kept_share[owner] / (end - start)
        matched = groups[run] >= 0
        return cls(
            groups[run][matched], run[matched], allocations.device[owner][matched],
            (start - since)[matched].astype(np.float64), (end - since)[matched].astype(np.float64), rate[matched],
        )  # fmt: skip


def _unmet_by_model(holdings: _IdleHoldings, hours: Floats, keys: pl.DataFrame, models: pl.Series) -> pl.DataFrame:
    """Return the unmet hours by partition and GPU model, most hours first."""
    rows = pl.DataFrame({"group": holdings.group, "device": holdings.device, "gpu_hours_unmet": hours})
    summed = rows.group_by("group", "device").agg(pl.col("gpu_hours_unmet").sum())
    named = summed.with_columns(models.gather(summed["device"]).alias("gpu_model"))
    grouped = named.group_by("group", "gpu_model").agg(pl.col("gpu_hours_unmet").sum())
    placed = grouped.join(keys.with_columns(pl.col("group").cast(pl.Int64)), on="group")
    return placed.filter(pl.col("gpu_hours_unmet") >= _LEAST_HOURS).select(
        *_KEY, "gpu_model", "gpu_hours_unmet"
    ).sort("gpu_hours_unmet", *_KEY, "gpu_model", descending=[True, False, False, False], nulls_last=True)  # fmt: skip


def _holders(holdings: _IdleHoldings, hours: Floats, about: pl.DataFrame) -> pl.DataFrame:
    """Return the runs that held most of the idle GPUs that jobs waited for."""
    summed = pl.Series("gpu_hours_unmet", np.bincount(holdings.run, weights=hours, minlength=1))
    most = summed.to_frame().with_row_index("run").with_columns(pl.col("run").cast(pl.Int64))
    first = most.filter(pl.col("gpu_hours_unmet") >= _LEAST_HOURS).sort(
        "gpu_hours_unmet", "run", descending=[True, False]
    ).head(_HOLDERS)  # fmt: skip
    return first.join(about.select("run", *_HOLDER), on="run", maintain_order="left")


def _in_the_way(
    holders: pl.DataFrame, holdings: _IdleHoldings, waits: pl.DataFrame, about: pl.DataFrame
) -> pl.DataFrame:
    """Return holders with ``waiting_jobs``, the number of jobs that each was in the way of, and one of these: the one
    that waited beside most of its idle GPU-hours.
    """
    group = waits["group"].cast(pl.Int64).to_numpy()
    first, last = waits["begin"].to_numpy(), waits["end"].to_numpy()
    counts, waiters = [], []
    for run in holders["run"]:
        some = holdings.run == run
        beside = np.flatnonzero(group == holdings.group[some][0])
        idle = _idle_between(holdings.start[some], holdings.end[some], holdings.rate[some], first[beside], last[beside])
        counts.append(int((idle >= _LEAST_HOURS * MS_PER_HOUR).sum()))
        waiters.append(waits["run"][int(beside[idle.argmax()])] if counts[-1] else None)
    counted = holders.with_columns(pl.Series("waiting_jobs", counts, pl.Int64), pl.Series("waiter", waiters, pl.Int64))
    named = about.select(pl.col("run").cast(pl.Int64).alias("waiter"), *_waiter())
    return counted.join(named, on="waiter", how="left", maintain_order="left")


def _waiter() -> list[pl.Expr]:
    return [pl.col(name).alias(f"waiting_{name}") for name in _WAITER]


def _idle_between(start: Floats, end: Floats, rate: Floats, first: Floats, last: Floats) -> Floats:
    """Return the idle GPU-ms from ``first`` to ``last``, with ``rate`` idle GPUs from ``start`` to ``end``."""
    time = np.concatenate([start, end])
    order = np.argsort(time, kind="stable")
    times, rates = time[order], np.cumsum(np.concatenate([rate, -rate])[order])
    sums = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(times))])
    between: Floats = np.interp(last, times, sums) - np.interp(first, times, sums)
    return between
