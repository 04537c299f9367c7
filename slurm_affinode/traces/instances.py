"""Instances (pods) of a cluster: states, waits, lives, requests, and the GPUs that they request over time.

A trace is a window: an instance may have begun before it, and may continue after it. Such an instance is counted, and
its unknown wait or life is left out of the distributions; it is never taken as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import counted
from slurm_affinode.model.finding import plain
from slurm_affinode.traces.job_figures import Spread, TimeBin, spread, time_bins
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog, divide, in_parts, with_user_means

INSTANCES: dict[str, pl.DataType] = {
    "group": pl.String(),  # role, or kind of request
    "state": pl.String(),  # as the trace has it, or how the window cuts the life
    "service": pl.String(),  # null: not in the trace
    "created_s": pl.Float64(),  # null: before the trace
    "scheduled_s": pl.Float64(),  # null: before the trace, or not scheduled if it was created within it
    "deleted_s": pl.Float64(),  # end, or last time at which it was seen; null: after the trace
    "ended": pl.Boolean(),  # whether deleted_s is the end
    "cpus": pl.Float64(),
    "memory_gib": pl.Float64(),
    "gpus": pl.Float64(),
}
"""Columns of a trace of instances. Times are seconds from its start."""
_UNUSABLE = {
    "that began before the trace": pl.col("created_s").is_null(),
    "that were not scheduled": pl.col("scheduled_s").is_null(),
    "that had not ended when they were last seen": ~pl.col("ended"),
    "that end before they start, or start before they are created": (pl.col("run_s") < 0) | (pl.col("wait_s") < 0),
}
POINTS = 150
"""Points of the curves over time."""


@dataclass(frozen=True, slots=True)
class InstanceLog:
    """The instances of one trace, and its GPUs."""

    name: str
    instances: pl.DataFrame
    """Schema ``INSTANCES``."""
    capacity: Mapping[str, int]
    """Model -> GPUs; empty: not in the data."""
    gpu_type_constraints: int | None = None
    """Instances that request a GPU of certain models; ``None``: not in the data."""


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """The instances of one role or kind."""

    instances: int
    created_inside: int
    """Instances with a time of creation within the trace."""
    began_before: int
    still_waiting: int
    """Created and not scheduled when they were last seen: their waits are longer than known."""
    still_running: int
    """Scheduled and not ended: their lives are longer than known."""
    waits_known: int
    wait_s: Spread | None
    lives_known: int
    """Instances of which both scheduling and end are in the trace."""
    life_s: Spread | None
    cpus: Spread | None
    memory_gib: Spread | None
    gpus: Spread | None
    gpus_sum: float


@dataclass(frozen=True, slots=True)
class InstanceSummary:
    """Figures of a trace of instances."""

    total: InstanceGroup
    services: int | None
    span_s: float
    """First to last time in the trace."""
    states: Mapping[str, int]
    groups: Mapping[str, InstanceGroup]
    wait_bins: tuple[TimeBin, ...]
    life_bins: tuple[TimeBin, ...]
    capacity: Mapping[str, int] | None
    capacity_gpus: int | None
    peak_gpus: float
    """Largest number of GPUs requested at the same time by scheduled instances, each until it was last seen."""
    peak_is_lower_bound: bool
    """Whether instances were last seen within the trace without having ended."""
    peak_share: float | None
    """``peak_gpus`` of the capacity."""
    gpu_type_constrained_share: float | None
    """Share of the instances with a GPU that request certain models."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        row: dict[str, Any] = plain(self)
        return row


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """The figures, and the curves for the charts."""

    summary: InstanceSummary
    over_time: pl.DataFrame
    """``day``, and for each group the GPUs requested by its scheduled instances."""


def analyse(log: InstanceLog) -> InstanceResult:
    """Return the figures of a trace. Raises ``InputError`` if it has an end before a beginning, or no time at all."""
    rows = log.instances
    wait, life = pl.col("scheduled_s") - pl.col("created_s"), pl.col("deleted_s") - pl.col("scheduled_s")
    rows = rows.with_columns(wait_s=wait, life_s=pl.when(pl.col("ended")).then(life))
    wrong = rows.filter((pl.col("wait_s") < 0) | (pl.col("life_s") < 0)).height
    if wrong:
        raise InputError(
            f"{counted(wrong, 'instance')} with a scheduling time before the creation, or an end before the scheduling",
            where=log.name,
        )
    times = pl.concat([rows[name] for name in ("created_s", "scheduled_s", "deleted_s")]).drop_nulls()
    if times.is_empty():
        raise InputError("no instance has a time", where=log.name)
    ordered: list[float] = times.sort().to_list()
    first, last = ordered[0], ordered[-1]
    names = sorted(rows["group"].unique().to_list())
    curves = {name: _requested_gpus(rows.filter(pl.col("group") == name), first, last) for name in names}
    peak = float(_requested_gpus(rows, first, last)["gpus"].max() or 0.0)  # type: ignore[arg-type]
    capacity = sum(log.capacity.values()) or None
    services = rows["service"].drop_nulls().n_unique()
    summary = InstanceSummary(
        total=_group(rows), services=services or None, span_s=last - first,
        states=dict(rows["state"].value_counts().sort("count", "state", descending=[True, False]).iter_rows()),
        groups={name: _group(rows.filter(pl.col("group") == name)) for name in names},
        wait_bins=time_bins(rows["wait_s"].drop_nulls()), life_bins=time_bins(rows["life_s"].drop_nulls()),
        capacity=dict(log.capacity) or None, capacity_gpus=capacity, peak_gpus=peak,
        peak_is_lower_bound=bool((~rows["ended"] & rows["deleted_s"].is_not_null()).any()),
        peak_share=_ratio(peak, capacity),
        gpu_type_constrained_share=_ratio(log.gpu_type_constraints, int((rows["gpus"] > 0).sum())),
    )  # fmt: skip
    return InstanceResult(summary, _sampled(curves, first, last))


def job_log(log: InstanceLog) -> JobLog:
    """Return the instances with a GPU as jobs of a queue: submitted when created, started when scheduled.

    The service takes the place of the user. An instance that had begun before the trace, or had not ended when it was
    last seen, is left out; its GPU-hours are those within the trace. Raises ``InputError`` if no instance has a GPU.
    """
    with_gpus = log.instances.with_row_index("line", offset=2).filter(pl.col("gpus") > 0)
    if with_gpus.is_empty():
        raise InputError("no instance has a GPU", where=log.name)
    units, parts = in_parts(with_gpus["gpus"])
    times = pl.concat([log.instances[name] for name in ("created_s", "scheduled_s", "deleted_s")]).drop_nulls()
    first, last = times.min(), times.max()
    started = (
        pl.when(pl.col("created_s").is_null()).then(pl.coalesce("scheduled_s", pl.lit(first))).otherwise("scheduled_s")
    )
    rows = with_gpus.with_columns(
        units, pl.col("line").cast(pl.Int64).alias("number"), pl.col("created_s").cast(pl.Int64).alias("submit_s"),
        (pl.col("deleted_s").fill_null(last) - started).fill_null(UNKNOWN).cast(pl.Int64).alias("run_s"),
        (pl.col("scheduled_s") - pl.col("created_s")).fill_null(UNKNOWN).cast(pl.Int64).alias("wait_s"),
        pl.col("service").rank("dense").cast(pl.Int64).fill_null(UNKNOWN).alias("user"),
        pl.lit(UNKNOWN).alias("request_s"),
    )  # fmt: skip
    usable, left_out = divide(rows, _UNUSABLE, log.name, parts)
    usable = with_user_means(usable.with_columns(pl.col("run_s").clip(1)))
    return JobLog(
        log.name, "GPU", usable.select(*JOBS).cast(JOBS), tuple(left_out), sum(log.capacity.values()) or None,  # type: ignore[arg-type]
        jobs_without_units=log.instances.height - with_gpus.height, parts=parts,
    )  # fmt: skip


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _group(rows: pl.DataFrame) -> InstanceGroup:
    created, scheduled = rows["created_s"].is_not_null(), rows["scheduled_s"].is_not_null()
    return InstanceGroup(
        instances=rows.height, created_inside=int(created.sum()), began_before=int((~created).sum()),
        still_waiting=int((created & ~scheduled).sum()),
        still_running=int((~rows["ended"] & (scheduled | ~created)).sum()),
        waits_known=rows.height - rows["wait_s"].null_count(), wait_s=spread(rows["wait_s"]),
        lives_known=rows.height - rows["life_s"].null_count(), life_s=spread(rows["life_s"]),
        cpus=spread(rows["cpus"]), memory_gib=spread(rows["memory_gib"]), gpus=spread(rows["gpus"]),
        gpus_sum=float(rows["gpus"].sum()),
    )  # fmt: skip


def _requested_gpus(rows: pl.DataFrame, first: float, last: float) -> pl.DataFrame:
    """Return ``at`` and the GPUs requested from then on; instances that were there before count from ``first``."""
    ran = rows.filter(pl.col("scheduled_s").is_not_null() | pl.col("created_s").is_null())
    begin = ran.select(at=pl.col("scheduled_s").fill_null(first), gpus=pl.col("gpus"))
    end = ran.select(at=pl.col("deleted_s").fill_null(last), gpus=-pl.col("gpus"))
    changes = pl.concat([begin, end]).group_by("at").agg(pl.col("gpus").sum()).sort("at")
    return changes.with_columns(pl.col("gpus").cum_sum().round(6))


def _sampled(curves: Mapping[str, pl.DataFrame], first: float, last: float) -> pl.DataFrame:
    """Return the curves at equal steps, without the very end, at which every instance that continues is cut off."""
    days = pl.DataFrame({"at": [first + (last - first) * i / POINTS for i in range(POINTS)]})
    frame = days.select(day=(pl.col("at") - first) / 86400)
    for name, curve in curves.items():
        joined = days.join_asof(curve, on="at").select(pl.col("gpus").fill_null(0.0).alias(name))
        frame = frame.hstack(joined)
    return frame
