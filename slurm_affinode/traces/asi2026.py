"""Alibaba's GPU trace of 2026 (``cluster-trace-gpu-v2026``, ASI): GPUs that pods request and use, and executions.

Parquet files: ``asi_opensource_pod_hourly/day=D/hour=H/`` has a row per pod and hour,
``asi_opensource_job_execution_summary/`` one per execution, ``asi_opensource_server_hourly/`` one per server and hour.
Each is read file by file, only the columns that are needed. A row counts for one hour: its ``gpu_request`` are
GPU-hours.

The average utilization of an hour is 0 only if every moment was; idle GPU-hours are a lower bound. The trace has few
pods of the summary before day 109, and states only for the week from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers import parquet_batches
from slurm_affinode.metrics.readers.lines import reading
from slurm_affinode.model.finding import plain
from slurm_affinode.traces.job_figures import Spread, spread

PODS, EXECUTIONS, SERVERS = (
    "asi_opensource_pod_hourly",
    "asi_opensource_job_execution_summary",
    "asi_opensource_server_hourly",
)
JOB_TYPES = ("training", "online_inference", "offline_inference", "dev", "other", "unknown")
PRIORITIES = ("HP", "LP", "Other")
COMPLETE_FROM_DAY = 109
"""First day from which the summary of executions has all pods."""
_TRACE = "the ASI GPU trace of 2026"
_ROWS = 500_000
_DAY = re.compile(r"day=(\d{1,4})$")
_POD_COLUMNS = ("pod_id", "job_type_public", "state_public", "gpu_request", "used_gpu_hours", "avg_gpu_sm_util")
_EXECUTION_COLUMNS = (
    "pod_id",
    "job_type_public",
    "priority_class",
    "gpu_request",
    "duration_hours",
    "schedule_delay_sec",
)
_SERVER_COLUMNS = ("gpu_spec_public", "gpu_count")
_SUMS = ("requested", "used", "idle", "unknown")


@dataclass(frozen=True, slots=True)
class ExecutionGroup:
    """The executions of a type of job."""

    executions: int
    gpu_hours: float
    """Requested GPUs x duration."""
    hours_share: float
    duration_h: Spread | None
    schedule_delay_s: Spread | None
    """Of the executions with a known delay."""


@dataclass(frozen=True, slots=True)
class PodHours:
    """The GPU-hours of pods."""

    requested_gpu_hours: float
    used_gpu_hours: float
    """As the trace attributes them."""
    idle_gpu_hours: float
    """Requested ones of hours with an average utilization of exactly 0: a lower bound."""
    unknown_gpu_hours: float
    """Requested ones of hours without a utilization."""
    idle_share: float | None
    """``idle_gpu_hours`` of the requested ones with a utilization."""


@dataclass(frozen=True, slots=True)
class AsiSummary:
    """Figures of the trace. ``None``: the table that the figure needs is missing."""

    executions: int | None
    total: ExecutionGroup | None
    job_types: Mapping[str, ExecutionGroup] | None
    priorities: Mapping[str, ExecutionGroup] | None
    part_of_a_gpu_share: float | None
    """Share of the executions that request less than a GPU."""
    days: int | None
    """Days with pods."""
    pods: PodHours | None
    pods_by_type: Mapping[str, PodHours] | None
    covered_before: float | None
    """Pods of a day that the summary of executions has, mean over the days before ``COMPLETE_FROM_DAY``."""
    covered_from: float | None
    """The same from that day on."""
    days_with_states: int | None
    """Days on which most pods have a state other than Unknown or Standby."""
    capacity_gpus: float | None
    """Mean over the hours."""
    capacity: Mapping[str, float] | None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        row: dict[str, Any] = plain(self)
        return row


@dataclass(frozen=True, slots=True)
class AsiTrace:
    """The parts of the trace in a directory."""

    directory: Path
    files: Mapping[str, tuple[Path, ...]]
    """Table -> its files, by day and hour; empty: missing."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the tables that are missing."""
        return tuple(name for name, files in self.files.items() if not files)


def find(directory: Path) -> AsiTrace:
    """Return the files of the tables in a directory or its ``data/``. Raises ``InputError`` if there are none."""
    files: dict[str, tuple[Path, ...]] = {}
    for name in (EXECUTIONS, PODS, SERVERS):
        roots = [root for root in (directory / name, directory / "data" / name) if root.is_dir()]
        files[name] = tuple(sorted(roots[0].rglob("*.parquet"), key=_order)) if roots else ()
    if not any(files.values()):
        raise InputError(
            f"has none of the tables of {_TRACE}",
            where=str(directory),
            hint=f"unpack the archives: {PODS}/day=0/hour=00/part-000.parquet",
        )
    return AsiTrace(directory, files)


def _order(path: Path) -> tuple[int, str]:
    return (_day(path) or 0, str(path))


def _day(path: Path) -> int | None:
    match = next((day_match for part in path.parts if (day_match := _DAY.match(part))), None)
    return int(match.group(1)) if match else None


def _frames(path: Path, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    """Yield the columns of a file. Raises ``InputError`` if it is damaged or lacks one."""
    where = str(path)
    try:
        with reading(where), parquet_batches.opened(path, where) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise InputError(f"has no column {', '.join(missing)}: not a table of {_TRACE}", where=where)
            for batch in parquet_batches.batches(file, _ROWS, columns, where):
                yield pl.DataFrame(pl.from_arrow(batch))
    except (pa.ArrowException, pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise InputError(f"is cut off or not a Parquet file: {one_line(error, 200)}", where=where) from error


def _check(frame: pl.DataFrame, column: str, values: Sequence[str], path: Path) -> None:
    unknown = frame.filter(~pl.col(column).is_in(values))
    if unknown.height:
        text = one_line(unknown[column][0], 40)
        raise InputError(f"{column} {text} is unknown: {', '.join(values)} are read", where=str(path))


def analyse(trace: AsiTrace) -> AsiSummary:
    """Return the figures of the tables. Raises ``InputError`` for a damaged file or an unknown value."""
    executions = _executions(trace.files[EXECUTIONS])
    return AsiSummary(
        **_execution_figures(executions),
        **_pod_figures(trace.files[PODS], None if executions is None else executions.select("pod").unique()),
        **_capacity(trace.files[SERVERS]),
    )


def _executions(files: Sequence[Path]) -> pl.DataFrame | None:
    parts = []
    for path in files:
        for frame in _frames(path, _EXECUTION_COLUMNS):
            _check(frame, "job_type_public", JOB_TYPES, path)
            _check(frame, "priority_class", PRIORITIES, path)
            parts.append(
                frame.select(
                    pl.col("pod_id").hash().alias("pod"),
                    pl.col("job_type_public").fill_null("unknown").alias("type"),
                    pl.col("priority_class").fill_null("Other").alias("priority"),
                    *(
                        pl.col(name).cast(pl.Float32)
                        for name in ("gpu_request", "duration_hours", "schedule_delay_sec")
                    ),
                )
            )
    return pl.concat(parts) if parts else None


def _execution_figures(rows: pl.DataFrame | None) -> dict[str, Any]:
    names = ("executions", "total", "job_types", "priorities", "part_of_a_gpu_share")
    if rows is None or rows.is_empty():
        return dict.fromkeys(names)
    hours = _hours(rows)
    return {
        "executions": rows.height,
        "total": _group(rows, hours),
        "job_types": {name: _group(part, hours) for name, part in _parts(rows, "type", JOB_TYPES)},
        "priorities": {name: _group(part, hours) for name, part in _parts(rows, "priority", PRIORITIES)},
        "part_of_a_gpu_share": float((rows["gpu_request"] < 1).sum()) / rows.height,
    }


def _parts(rows: pl.DataFrame, column: str, values: Sequence[str]) -> Iterator[tuple[str, pl.DataFrame]]:
    for value in values:
        part = rows.filter(pl.col(column) == value)
        if part.height:
            yield value, part


def _hours(rows: pl.DataFrame) -> float:
    return float((rows["gpu_request"].cast(pl.Float64) * rows["duration_hours"]).sum())


def _group(rows: pl.DataFrame, whole: float) -> ExecutionGroup:
    hours = _hours(rows)
    delay = rows["schedule_delay_sec"]
    return ExecutionGroup(
        rows.height,
        hours,
        hours / whole if whole else 0.0,
        spread(rows["duration_hours"]),
        spread(delay.filter(delay >= 0)),
    )


def _pod_figures(files: Sequence[Path], known_pods: pl.DataFrame | None) -> dict[str, Any]:
    names = ("days", "pods", "pods_by_type", "covered_before", "covered_from", "days_with_states")
    if not files:
        return dict.fromkeys(names)
    sums: list[pl.DataFrame] = []
    covered: dict[bool, list[float]] = {False: [], True: []}
    with_states, days = 0, 0
    by_day: dict[int, list[Path]] = {}
    for path in files:
        if (day := _day(path)) is None:
            raise InputError("is not in a directory day=D/hour=H", where=str(path))
        by_day.setdefault(day, []).append(path)
    for day, paths in by_day.items():
        pods, states = [], [0, 0]
        for path in paths:
            for frame in _frames(path, _POD_COLUMNS):
                _check(frame, "job_type_public", JOB_TYPES, path)
                gpu = frame.filter(pl.col("gpu_request") > 0)
                sums.append(_pod_sums(gpu))
                pods.append(gpu.select(pl.col("pod_id").hash().alias("pod")).unique())
                states[0] += int((~gpu["state_public"].is_in(["Unknown", "Standby"])).sum())
                states[1] += gpu.height
        unique = pl.concat(pods).unique()
        days += 1
        with_states += 2 * states[0] > states[1]
        if known_pods is not None and unique.height:
            covered[day >= COMPLETE_FROM_DAY].append(
                unique.join(known_pods, on="pod", how="semi").height / unique.height
            )
    whole = pl.concat(sums).group_by("type").agg(pl.col(*_SUMS).sum())
    return {
        "days": days,
        "pods": _pod_hours(whole),
        "days_with_states": with_states,
        "pods_by_type": {name: _pod_hours(part) for name, part in _parts(whole, "type", JOB_TYPES)},
        "covered_before": _mean(covered[False]),
        "covered_from": _mean(covered[True]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _pod_sums(rows: pl.DataFrame) -> pl.DataFrame:
    requested, util = pl.col("gpu_request").cast(pl.Float64), pl.col("avg_gpu_sm_util").cast(pl.Float64).fill_nan(None)
    return rows.group_by(pl.col("job_type_public").fill_null("unknown").alias("type")).agg(
        requested.sum().alias("requested"),
        pl.col("used_gpu_hours").cast(pl.Float64).sum().alias("used"),
        requested.filter(util == 0).sum().alias("idle"),
        requested.filter(util.is_null()).sum().alias("unknown"),
    )


def _pod_hours(rows: pl.DataFrame) -> PodHours:
    requested, used, idle, unknown = (float(rows[name].sum()) for name in _SUMS)
    known_hours = requested - unknown
    return PodHours(requested, used, idle, unknown, idle / known_hours if known_hours > 0 else None)


def _capacity(files: Sequence[Path]) -> dict[str, Any]:
    if not files:
        return {"capacity_gpus": None, "capacity": None}
    parts = [frame for path in files for frame in map(_gpus_by_model, _frames(path, _SERVER_COLUMNS))]
    hours = len({path.parent for path in files})
    models = pl.concat(parts).group_by("model").agg(pl.col("gpus").sum() / hours).sort("gpus", "model", descending=True)
    return {"capacity_gpus": float(models["gpus"].sum()), "capacity": dict(models.iter_rows())}


def _gpus_by_model(frame: pl.DataFrame) -> pl.DataFrame:
    model = pl.col("gpu_spec_public").fill_null("unknown").alias("model")
    return frame.group_by(model).agg(pl.col("gpu_count").cast(pl.Float64).sum().alias("gpus"))
