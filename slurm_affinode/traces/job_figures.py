"""Figures of a log of jobs: sizes, run times, waits, requested times and arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any

import polars as pl

from slurm_affinode.model.finding import plain
from slurm_affinode.traces.job_log import UNKNOWN, JobLog, LeftOut

SIZES = {"GPU": (1, 4, 8), "processor": (1, 4, 16, 64, 256, 1024)}
"""Largest size of each class of jobs, by the unit of the log; the last class is open."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a number. Percentiles interpolate linearly between neighbors."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class TimeBin:
    """The jobs, or instances, whose time is in a range."""

    label: str
    share: float
    hours_share: float | None = None
    """Share of the unit-hours."""


@dataclass(frozen=True, slots=True)
class SizeClass:
    """The jobs of a range of sizes."""

    jobs: int
    job_share: float
    unit_hours: float
    hours_share: float
    run_median_s: float
    wait_mean_s: float | None
    """``None``: the log has no wait of these jobs."""
    wait_median_s: float | None


@dataclass(frozen=True, slots=True)
class FinalState:
    """The jobs that ended in a state."""

    jobs: int
    job_share: float
    unit_hours: float
    hours_share: float


@dataclass(frozen=True, slots=True)
class RequestedTime:
    """Requested against used time, of the jobs with a requested time."""

    jobs: int
    requested_unit_hours: float
    used_unit_hours: float
    over_request: float
    """``requested_unit_hours`` by ``used_unit_hours``."""
    used_share_median: float
    """Run time by requested time, median over the jobs."""
    jobs_beyond: int
    """Jobs that ran longer than they had requested."""


@dataclass(frozen=True, slots=True)
class JobArrivals:
    """Submissions by local weekday and hour."""

    zone: str | None
    """``None``: the log names no zone, and its times are taken as they are."""
    weekday: Mapping[str, int]
    """``Mon`` to ``Sun`` -> jobs."""
    hour: Mapping[str, int]
    """``00`` to ``23`` -> jobs."""
    busiest_hour_share: float
    """Share of the jobs in the hour of the day with most of them; 1/24 if they arrive evenly."""


@dataclass(frozen=True, slots=True)
class JobLogSummary:
    """Figures of one log. ``None``: the log does not have what the figure needs."""

    unit: str
    jobs: int
    """Jobs with a size and a run time; the figures are about these."""
    left_out: tuple[LeftOut, ...]
    users: int | None
    """Users, or virtual clusters."""
    capacity: int | None
    since: datetime | None
    span_s: int
    """First to last submission."""
    unit_hours: float
    run_s: Spread
    size: Spread
    """Units of a job."""
    size_classes: Mapping[str, SizeClass]
    waits_known: int
    wait_s: Spread | None
    requested: RequestedTime | None
    arrivals: JobArrivals | None
    run_bins: tuple[TimeBin, ...]
    wait_bins: tuple[TimeBin, ...]
    cluster: str | None
    jobs_without_units: int | None
    final_states: Mapping[str, FinalState] | None
    recorded_run_mean_s: float | None
    """Mean of the run times by the column of the log, where that is not end minus start."""
    recorded_runs_differ: int | None
    """Jobs of which that column is more than a second away from end minus start."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        row: dict[str, Any] = plain(self)
        return row


def spread(values: pl.Series) -> Spread | None:
    """Return the distribution of the known values; ``None`` without any."""
    values_f64 = values.drop_nulls().cast(pl.Float64)
    if values_f64.is_empty():
        return None
    figures = values_f64.to_frame("v").select(
        pl.col("v").mean().alias("mean"), pl.col("v").median().alias("median"),
        *(pl.col("v").quantile(q, "linear").alias(f"p{q * 100:.0f}") for q in (0.9, 0.99)),
        pl.col("v").max().alias("max"),
    )  # fmt: skip
    return Spread(**figures.row(0, named=True))


BINS_S = {"under 1 min": 60, "1-10 min": 600, "10-60 min": 3600, "1-4 h": 4 * 3600, "4-24 h": 86400, "1-7 d": 7 * 86400,
          "over 7 d": None}  # fmt: skip
"""Upper bound of each range of times."""


def time_bins(seconds: pl.Series, hours: pl.Series | None = None) -> tuple[TimeBin, ...]:
    """Return the shares of the rows, and of ``hours``, by ranges of a time; empty without rows."""
    if seconds.is_empty():
        return ()
    rows = pl.DataFrame({"at": seconds.cast(pl.Float64), "hours": hours if hours is not None else 0.0})
    whole = float(rows["hours"].sum())
    bins, low = [], -1.0
    for label, high in BINS_S.items():
        part = rows.filter((pl.col("at") >= low) & (True if high is None else pl.col("at") < high))
        bins.append(TimeBin(label, part.height / rows.height, float(part["hours"].sum()) / whole if whole else None))
        low = high or low
    return tuple(bins)


def analyse(log: JobLog) -> JobLogSummary:
    """Return the figures of a log that has at least one usable job (see ``job_log.check_complete``)."""
    jobs = log.jobs.with_columns((pl.col("units") * pl.col("run_s") / 3600).alias("hours"))
    run, size = spread(jobs["run_s"]), spread(jobs["units"])
    assert run is not None and size is not None  # noqa: PT018, S101 - there is a job
    waits = jobs["wait_s"].filter(jobs["wait_s"] != UNKNOWN)
    users = jobs["user"].filter(jobs["user"] != UNKNOWN).n_unique()
    submitted = jobs["submit_s"].sort()
    first, last = int(submitted[0]), int(submitted[-1])
    return JobLogSummary(
        unit=log.unit, jobs=jobs.height, left_out=log.left_out, users=users or None, capacity=log.capacity,
        since=None if log.epoch_s is None else datetime.fromtimestamp(log.epoch_s + first, UTC),
        span_s=last - first, unit_hours=float(jobs["hours"].sum()), run_s=run, size=size,
        size_classes=_size_classes(jobs, SIZES[log.unit]), waits_known=len(waits), wait_s=spread(waits),
        requested=_requested(jobs), arrivals=_arrivals(jobs["submit_s"], log.epoch_s, log.zone),
        run_bins=time_bins(jobs["run_s"], jobs["hours"]),
        wait_bins=time_bins(waits), cluster=log.cluster, jobs_without_units=log.jobs_without_units,
        final_states=_final_states(jobs, log.final_states), **_recorded_runs(jobs, log.recorded_run_s),
    )  # fmt: skip


def _size_classes(jobs: pl.DataFrame, bounds: tuple[int, ...]) -> dict[str, SizeClass]:
    """Return the classes from the smallest to the largest one with a job."""
    classes: dict[str, SizeClass] = {}
    whole = float(jobs["hours"].sum())
    for low, high in zip((0, *bounds), (*bounds, None), strict=True):
        part = jobs.filter((pl.col("units") > low) & (True if high is None else pl.col("units") <= high))
        label = f"above-{low}" if high is None else f"{low + 1}-{high}" if high > low + 1 else f"{high}"
        hours = float(part["hours"].sum())
        if part.height:
            waits = spread(part["wait_s"].filter(part["wait_s"] != UNKNOWN))
            classes[label] = SizeClass(
                jobs=part.height, job_share=part.height / jobs.height, unit_hours=hours, hours_share=hours / whole,
                run_median_s=float(part["run_s"].median()),  # type: ignore[arg-type]
                wait_mean_s=None if waits is None else waits.mean,
                wait_median_s=None if waits is None else waits.median,
            )  # fmt: skip
    return classes


def _final_states(jobs: pl.DataFrame, states: pl.Series | None) -> dict[str, FinalState] | None:
    if states is None:
        return None
    whole = float(jobs["hours"].sum())
    groups = (
        jobs.select(states.alias("state"), "hours").group_by("state").agg(pl.len().alias("jobs"), pl.col("hours").sum())
    )
    return {
        state: FinalState(jobs=count, job_share=count / jobs.height, unit_hours=hours, hours_share=hours / whole)
        for state, hours, count in groups.sort("jobs", "state", descending=[True, False])
        .select("state", "hours", "jobs").iter_rows()
    }  # fmt: skip


def _recorded_runs(jobs: pl.DataFrame, recorded: pl.Series | None) -> dict[str, Any]:
    if recorded is None:
        return {"recorded_run_mean_s": None, "recorded_runs_differ": None}
    differ = (recorded - jobs["run_s"]).abs() > 1
    mean = recorded.mean()
    return {
        "recorded_run_mean_s": float(mean) if isinstance(mean, float) else None,
        "recorded_runs_differ": int(differ.sum()),
    }


def _requested(jobs: pl.DataFrame) -> RequestedTime | None:
    some = jobs.filter(pl.col("request_s") != UNKNOWN)
    if some.is_empty():
        return None
    requested, used = float((some["units"] * some["request_s"]).sum()) / 3600, float(some["hours"].sum())
    return RequestedTime(
        jobs=some.height, requested_unit_hours=requested, used_unit_hours=used, over_request=requested / used,
        used_share_median=float((some["run_s"] / some["request_s"]).median()),  # type: ignore[arg-type]
        jobs_beyond=int((some["run_s"] > some["request_s"]).sum()),
    )  # fmt: skip


def _arrivals(submit_s: pl.Series, epoch_s: int | None, zone: tzinfo | None) -> JobArrivals | None:
    if epoch_s is None:
        return None
    moment = pl.from_epoch(pl.col("at") + epoch_s, "s").dt.replace_time_zone("UTC")
    local = pl.DataFrame({"at": submit_s}).select(moment.dt.convert_time_zone(str(zone or UTC))).to_series()
    by_day: dict[int, int] = dict(local.dt.weekday().value_counts().iter_rows())
    by_hour: dict[int, int] = dict(local.dt.hour().value_counts().iter_rows())
    return JobArrivals(
        zone=None if zone is None else str(zone),
        weekday={name: by_day.get(day, 0) for day, name in enumerate(WEEKDAYS, start=1)},
        hour={f"{hour:02}": by_hour.get(hour, 0) for hour in range(24)},
        busiest_hour_share=max(by_hour.values()) / len(submit_s),
    )  # fmt: skip
