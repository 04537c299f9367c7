"""A site's own history as an anonymized data set: GPU jobs, idle windows of their GPUs, and the queue.

Names are replaced by keyed pseudonyms (HMAC-SHA256), times are rounded and shifted by whole weeks, and a request that
fewer than ``k`` users have made is generalized: first its time limit becomes unknown, then its GPU type, then its
partition; a job whose number of GPUs is still rare is left out. Priorities become quarters of the jobs. The result is a
directory with ``jobs.csv``, ``jobs.swf`` (Standard Workload Format), ``idle_windows.csv``, ``queue.csv``,
``README.md`` and ``manifest.json``.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import counted, one_line
from slurm_affinode.core.pseudonyms import pseudonym
from slurm_affinode.metrics.readers.lines import reading
from slurm_affinode.traces import csv_columns
from slurm_affinode.traces.job_figures import Spread, spread
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog, with_user_means

FORMAT, VERSION = "slurm-affinode-trace", 1
EPOCH_S = 978_307_200
"""Monday 2001-01-01, in UTC: the first submission is shifted into the week that begins then."""
_WEEK_S = 7 * 86_400
QUEUE_STEP_S = 600
RAW: dict[str, pl.DataType] = {
    "run": pl.Int64(),
    "user": pl.String(),
    "account": pl.String(),
    "job_name": pl.String(),
    "partition": pl.String(),
    "gpu_type": pl.String(),
    "gpus": pl.Int64(),
    "timelimit_s": pl.Int64(),
    "state": pl.String(),
    "priority": pl.Int64(),
    "submit_s": pl.Int64(),
    "start_s": pl.Int64(),
    "end_s": pl.Int64(),
    "measured": pl.Boolean(),  # whether all GPUs of the job have samples
}
"""Ended GPU jobs of one cluster. Times are seconds since 1970."""
IDLE: dict[str, pl.DataType] = {"run": pl.Int64(), "begin_s": pl.Int64(), "end_s": pl.Int64()}
"""Periods in which all GPUs of a job were idle. Times are seconds since 1970."""
JOB_COLUMNS: dict[str, pl.DataType] = {
    "job": pl.Int64(),
    "user": pl.String(),
    "account": pl.String(),
    "name": pl.String(),
    "partition": pl.String(),
    "gpu_type": pl.String(),
    "gpus": pl.Int64(),
    "timelimit_s": pl.Int64(),
    "submit_s": pl.Int64(),
    "wait_s": pl.Int64(),
    "run_s": pl.Int64(),
    "state": pl.String(),
    "measured": pl.Int64(),
    "priority_class": pl.Int64(),
}
OPTIONAL = ("priority_class",)
"""Columns of the jobs that data sets of an older release lack."""
_UNKNOWN_ALLOWED = ("timelimit_s", "priority_class")
_POSITIVE = ("job", "gpus", "run_s")
IDLE_COLUMNS: dict[str, pl.DataType] = {"job": pl.Int64(), "begin_s": pl.Int64(), "end_s": pl.Int64()}
QUEUE_COLUMNS: dict[str, pl.DataType] = {
    name: pl.Int64() for name in ("at_s", "waiting_jobs", "waiting_gpus", "running_gpus", "idle_gpus")
}
REQUEST = ("partition", "gpu_type", "gpus", "timelimit_s")
"""Columns of a request, which together could identify a user."""
PRIORITY_CLASSES = 4
"""Quarters of the jobs by their priority: 4 has the highest."""
GENERALIZED = (("timelimit_s", None), ("gpu_type", None), ("partition", "other"))
"""Column and its replacement, in the order of generalization."""
FILES = ("jobs.csv", "jobs.swf", "idle_windows.csv", "queue.csv")
_STATES = {"completed": 1, "canceled": 5}
_SWF_STATUS_FAILED = 0


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How the data set is made anonymous."""

    key: bytes
    """Secret key of the pseudonyms: the same key gives the same pseudonyms."""
    round_s: int = 60
    """Times and durations are multiples of it."""
    least_users: int = 5
    """``k``: each request was made by at least as many users."""


@dataclass(frozen=True, slots=True)
class Suppression:
    """Data omitted to keep rare requests anonymous."""

    generalized: Mapping[str, int]
    """Column -> jobs in which it was replaced."""
    jobs: int
    """Jobs left out."""
    gpu_hours: float
    """Their GPU-hours."""
    gpu_hours_share: float


@dataclass(frozen=True, slots=True)
class SiteTrace:
    """The anonymized tables."""

    name: str
    jobs: pl.DataFrame
    """``JOB_COLUMNS``, by submission. Times are seconds from ``EPOCH_S``."""
    idle: pl.DataFrame
    """``IDLE_COLUMNS``; seconds from the start of the job."""
    queue: pl.DataFrame
    """``QUEUE_COLUMNS``."""
    capacity_gpus: int
    round_s: int
    least_users: int
    suppression: Suppression | None
    """``None``: not known, for a data set that was read."""

    @property
    def interval(self) -> tuple[datetime, datetime]:
        """Return the first submission and the last end, on the shifted calendar."""
        first, last = self.jobs.select(
            pl.col("submit_s").min(), (pl.col("submit_s") + pl.col("wait_s") + pl.col("run_s")).max().alias("end_s")
        ).row(0)
        return datetime.fromtimestamp(EPOCH_S + first, UTC), datetime.fromtimestamp(EPOCH_S + last, UTC)


@dataclass(frozen=True, slots=True)
class IdleFigures:
    """Idle windows and the queue. Jobs without samples of all GPUs are unknown, never idle."""

    measured_jobs: int
    measured_gpu_hours: float
    unknown_gpu_hours: float
    idle_gpu_hours: float
    idle_share: float | None
    """``idle_gpu_hours`` of ``measured_gpu_hours``."""
    waiting_gpus_mean: float
    waiting_time_share: float
    """Share of the time in which a job waits."""
    idle_while_waiting_gpu_hours: float
    """GPUs that are idle in jobs and requested by waiting ones at the same time: the smaller of the two, summed."""


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """The jobs of a class of priorities."""

    jobs: int
    job_share: float
    gpu_hours: float
    hours_share: float
    wait_s: Spread


def anonymized(raw: pl.DataFrame, idle: pl.DataFrame, capacity_gpus: int, options: ExportOptions) -> SiteTrace:
    """Return the data set for jobs (``RAW``) and idle periods (``IDLE``).

    Raises ``InputError`` if there is no job, if there are fewer users than ``least_users``, or if no request is
    common enough.
    """
    users = raw["user"].drop_nulls().n_unique()
    if raw.is_empty() or users < options.least_users:
        raise InputError(
            f"{counted(raw.height, 'GPU job')} of {counted(users, 'user')}: at least {options.least_users} users are "
            "needed, so that a request does not identify one",
            hint="choose an earlier --since, or a smaller --least-users",
        )
    jobs, suppression = _common_requests(_coarse(raw, options), options.least_users)
    if jobs.is_empty():
        raise InputError(f"no request was made by {options.least_users} users", hint="choose a smaller --least-users")
    jobs, unclassed = _with_priority_class(jobs, options.least_users)
    suppression = replace(suppression, generalized={**suppression.generalized, "priority_class": unclassed})
    rows = _pseudonymous(jobs, options.key).sort("submit_s", "order").with_row_index("job", offset=1)
    windows = _windows(rows.with_columns(pl.col("job").cast(pl.Int64)), idle, options.round_s)
    table = rows.select(*JOB_COLUMNS).cast(JOB_COLUMNS)  # type: ignore[arg-type]
    check_requests(table, options.least_users, "the data set")
    return SiteTrace(
        "site",
        table,
        windows,
        queue_of(table, windows),
        capacity_gpus,
        options.round_s,
        options.least_users,
        suppression,
    )


def _coarse(raw: pl.DataFrame, options: ExportOptions) -> pl.DataFrame:
    """Return the jobs with rounded times, from the Monday before the first submission."""
    step = options.round_s
    first = raw["submit_s"].min()
    assert isinstance(first, int)  # noqa: S101 - there is a job
    monday = EPOCH_S + (first - EPOCH_S) // _WEEK_S * _WEEK_S

    def rounded(seconds: pl.Expr) -> pl.Expr:
        return ((seconds + step // 2) // step) * step

    return raw.with_columns(
        ((pl.col("submit_s") - monday) // step * step).alias("submit_s"),
        rounded((pl.col("start_s") - pl.col("submit_s")).clip(0)).alias("wait_s"),
        rounded(pl.col("end_s") - pl.col("start_s")).clip(step).alias("run_s"),
        rounded(pl.col("timelimit_s")).clip(step).alias("timelimit_s"),
        pl.col("start_s").alias("exact_start_s"),
        pl.col("partition").fill_null("other"),
        pl.col("submit_s").alias("exact_submit_s"),
    )


def _common_requests(jobs: pl.DataFrame, least: int) -> tuple[pl.DataFrame, Suppression]:
    """Return the jobs whose requests ``least`` users have made, after generalization."""
    whole = _gpu_hours(jobs)
    generalized: dict[str, int] = {}
    for column, replacement in GENERALIZED:
        rare = _is_rare(jobs, least)
        changes = rare & (jobs[column] != replacement if replacement is not None else jobs[column].is_not_null())
        generalized[column] = int(changes.sum())
        value = pl.lit(replacement, jobs.schema[column])
        jobs = jobs.with_columns(pl.when(rare).then(value).otherwise(pl.col(column)).alias(column))
    rare = _is_rare(jobs, least)
    lost = jobs.filter(rare)
    hours = _gpu_hours(lost)
    return jobs.filter(~rare), Suppression(generalized, lost.height, hours, hours / whole if whole else 0.0)


def _with_priority_class(jobs: pl.DataFrame, least: int) -> tuple[pl.DataFrame, int]:
    """Return the jobs with ``priority_class``, and in how many it was removed.

    Equal priorities have the same class, that of the highest of them. A request has classes if ``least`` users have
    made it with each of them, and with unknown priority if there are such jobs.
    """
    has_priority = pl.col("priority").is_not_null()
    rank = pl.col("priority").rank("max") / has_priority.sum()
    jobs = jobs.with_columns((rank * PRIORITY_CLASSES).ceil().cast(pl.Int64).alias("priority_class"))
    common = (pl.col("user").n_unique().over(*REQUEST, "priority_class") >= least).all().over(REQUEST)
    classed = jobs.with_columns(pl.when(common).then("priority_class").alias("priority_class"))
    return classed, classed["priority_class"].null_count() - jobs["priority_class"].null_count()


def _is_rare(jobs: pl.DataFrame, least: int, *further: str) -> pl.Series:
    return jobs.select(pl.col("user").n_unique().over(*REQUEST, *further) < least).to_series()


def _gpu_hours(jobs: pl.DataFrame) -> float:
    return float((jobs["gpus"] * jobs["run_s"]).sum()) / 3600


def check_requests(jobs: pl.DataFrame, least: int, where: str) -> None:
    """Raise ``InputError`` if a request in a table of jobs was made by fewer than ``least`` users."""
    rare = jobs.filter(_is_rare(jobs, least, *OPTIONAL))
    if rare.height:
        raise InputError(f"has a request that fewer than {least} users have made: job {rare['job'][0]}", where=where)


def _pseudonymous(jobs: pl.DataFrame, key: bytes) -> pl.DataFrame:
    """Return the jobs with pseudonyms, and ``order``, in which jobs of the same coarse time are listed."""
    kinds = {"user": "u", "account": "a"}
    columns = [
        _replaced(jobs[column], {name: pseudonym(key, kind, name) for name in jobs[column].drop_nulls().unique()})
        for column, kind in kinds.items()
    ]
    partitions = {name: pseudonym(key, "p", name) for name in jobs["partition"].unique() if name != "other"}
    pairs = jobs.select(pl.col("user").fill_null(""), pl.col("job_name").fill_null("")).unique().rows()
    named = pl.DataFrame(
        [(user, name, pseudonym(key, "n", user, name)) for user, name in pairs],
        schema={"_user": pl.String(), "_name": pl.String(), "name": pl.String()},
        orient="row",
    )
    ordered = [
        pseudonym(key, "o", str(run), str(submit_s))
        for run, submit_s in jobs.select("run", "exact_submit_s").iter_rows()
    ]
    with_names = jobs.with_columns(
        pl.col("user").fill_null("").alias("_user"),
        pl.col("job_name").fill_null("").alias("_name"),
        pl.Series("order", ordered, pl.String()),
    ).join(named, on=["_user", "_name"], how="left", maintain_order="left")
    return with_names.with_columns(
        *columns, _replaced(jobs["partition"], {**partitions, "other": "other"}), pl.col("measured").cast(pl.Int64)
    )


def _replaced(names: pl.Series, by: Mapping[str, str]) -> pl.Series:
    return names.replace_strict(list(by), list(by.values()), default=None, return_dtype=pl.String).alias(names.name)


def _windows(rows: pl.DataFrame, idle: pl.DataFrame, step: int) -> pl.DataFrame:
    """Return the idle windows of measured jobs, rounded, within the job; those that vanish are left out."""
    joined = idle.join(rows.filter(pl.col("measured") == 1).select("run", "job", "exact_start_s", "run_s"), on="run")

    def offset(name: str) -> pl.Expr:
        seconds = pl.col(name) - pl.col("exact_start_s")
        return (((seconds + step // 2) // step) * step).clip(0, pl.col("run_s")).alias(name)

    return (
        joined.select("job", offset("begin_s"), offset("end_s"))
        .filter(pl.col("begin_s") < pl.col("end_s"))
        .sort("job", "begin_s")
        .cast(IDLE_COLUMNS)  # type: ignore[arg-type]
    )


def queue_of(jobs: pl.DataFrame, idle: pl.DataFrame) -> pl.DataFrame:
    """Return ``QUEUE_COLUMNS`` every ``QUEUE_STEP_S`` from the first submission to the last end."""
    submit = jobs["submit_s"].to_numpy()
    start = submit + jobs["wait_s"].to_numpy()
    end, gpus = start + jobs["run_s"].to_numpy(), jobs["gpus"].to_numpy()
    at_s = np.arange(int(submit.min()), int(end.max()) + 1, QUEUE_STEP_S, dtype=np.int64)
    idle_jobs = idle.join(
        jobs.select("job", "gpus", (pl.col("submit_s") + pl.col("wait_s")).alias("start_s")), on="job"
    )
    begin_idle = (idle_jobs["start_s"] + idle_jobs["begin_s"]).to_numpy()
    end_idle = (idle_jobs["start_s"] + idle_jobs["end_s"]).to_numpy()
    levels = {
        "at_s": at_s,
        "waiting_jobs": _level(submit, start, np.ones_like(gpus), at_s),
        "waiting_gpus": _level(submit, start, gpus, at_s),
        "running_gpus": _level(start, end, gpus, at_s),
        "idle_gpus": _level(begin_idle, end_idle, idle_jobs["gpus"].to_numpy(), at_s),
    }
    return pl.DataFrame(levels, schema=QUEUE_COLUMNS)


_Ints = npt.NDArray[np.int64]


def _level(begin: _Ints, end: _Ints, weight: _Ints, points: _Ints) -> _Ints:
    """Return the sum of the weights of the half-open intervals that contain each time."""

    def until(times: _Ints) -> _Ints:
        order = np.argsort(times, kind="stable")
        sums = np.concatenate(([0], np.cumsum(weight[order])))
        result: _Ints = sums[np.searchsorted(times[order], points, side="right")]
        return result

    return until(begin) - until(end)


def idle_figures(trace: SiteTrace) -> IdleFigures:
    """Return the figures of the idle windows and of the queue."""
    measured = trace.jobs.filter(pl.col("measured") == 1)
    hours = _gpu_hours(measured)
    joined = trace.idle.join(trace.jobs.select("job", "gpus"), on="job")
    idle = float(((joined["end_s"] - joined["begin_s"]) * joined["gpus"]).sum()) / 3600
    waiting = trace.queue["waiting_gpus"]
    both = trace.queue.select(pl.min_horizontal("waiting_gpus", "idle_gpus").sum()).item()
    mean = waiting.mean()
    return IdleFigures(
        measured_jobs=measured.height,
        measured_gpu_hours=hours,
        unknown_gpu_hours=_gpu_hours(trace.jobs) - hours,
        idle_gpu_hours=idle,
        idle_share=idle / hours if hours else None,
        waiting_gpus_mean=float(mean) if isinstance(mean, float) else 0.0,
        waiting_time_share=float((waiting > 0).sum()) / trace.queue.height if trace.queue.height else 0.0,
        idle_while_waiting_gpu_hours=float(both) * QUEUE_STEP_S / 3600,
    )


def priority_classes(trace: SiteTrace) -> dict[str, PriorityClass] | None:
    """Return the figures of each class, the highest first, and of ``unknown``; ``None`` if no job has a class."""
    if not trace.jobs["priority_class"].count():
        return None
    whole = _gpu_hours(trace.jobs)
    classes: dict[str, PriorityClass] = {}
    by_class = trace.jobs.sort("priority_class", descending=True, nulls_last=True)
    for (number,), jobs in by_class.group_by("priority_class", maintain_order=True):
        wait, hours = spread(jobs["wait_s"]), _gpu_hours(jobs)
        assert wait is not None  # noqa: S101 - a group has a job
        classes["unknown" if number is None else str(number)] = PriorityClass(
            jobs.height, jobs.height / trace.jobs.height, hours, hours / whole, wait
        )
    return classes


def files(trace: SiteTrace, readme: str) -> dict[str, bytes]:
    """Return the files of the data set by name, with the manifest of their digests."""
    content = {
        "jobs.csv": _csv(trace.jobs),
        "jobs.swf": _swf(trace),
        "idle_windows.csv": _csv(trace.idle),
        "queue.csv": _csv(trace.queue),
        "README.md": readme.encode(),
    }
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "epoch_s": EPOCH_S,
        "capacity_gpus": trace.capacity_gpus,
        "round_s": trace.round_s,
        "least_users": trace.least_users,
        "queue_step_s": QUEUE_STEP_S,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
    }
    return {**content, "manifest.json": (json.dumps(manifest, indent=2) + "\n").encode()}


def _csv(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_csv(buffer)
    return buffer.getvalue()


def _swf(trace: SiteTrace) -> bytes:
    """Return the jobs in the Standard Workload Format; processors are GPUs, users and others are numbered."""
    jobs = trace.jobs
    numbered = {
        name: jobs[name].rank("dense").cast(pl.Int64).fill_null(UNKNOWN)
        for name in ("user", "account", "name", "partition")
    }
    status = jobs["state"].replace_strict(
        list(_STATES), list(_STATES.values()), default=_SWF_STATUS_FAILED, return_dtype=pl.Int64
    )
    unknown = pl.lit(UNKNOWN)
    columns = jobs.select(
        "job",
        "submit_s",
        "wait_s",
        "run_s",
        "gpus",
        unknown.alias("cpu"),
        unknown.alias("memory"),
        pl.col("gpus").alias("requested"),
        pl.col("timelimit_s").fill_null(UNKNOWN),
        unknown.alias("requested_kb"),
        status.alias("status"),
        numbered["user"].alias("user"),
        numbered["account"].alias("group"),
        numbered["name"].alias("executable"),
        numbered["partition"].alias("queue"),
        unknown.alias("partition"),
        unknown.alias("preceding"),
        unknown.alias("think"),
    )
    lines = columns.select(pl.concat_str(pl.all(), separator=" ")).to_series()
    head = (
        "; Version: 2.2",
        "; Computer: GPU cluster under Slurm, anonymized",
        f"; UnixStartTime: {EPOCH_S}",
        f"; MaxProcs: {trace.capacity_gpus}",
        f"; MaxJobs: {jobs.height}",
        "; Note: processors are GPUs; dates are shifted by whole weeks; times are rounded",
        "",
    )
    return ("\n".join(head) + "\n".join(lines.to_list()) + "\n").encode()


def read(directory: Path) -> SiteTrace:
    """Read a data set.

    Raises ``InputError`` if a file is missing, cut off or changed, the version is unknown, or a request is rarer than
    the manifest says.
    """
    where = str(directory / "manifest.json")
    with reading(where):
        text = (directory / "manifest.json").read_bytes()
    try:
        manifest: Any = json.loads(text)
        version, digests = manifest["version"], dict(manifest["files"])
        capacity, round_s, least = (int(manifest[name]) for name in ("capacity_gpus", "round_s", "least_users"))
        is_known = manifest["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError("is not the manifest of an exported trace", where=where) from None
    if not is_known or version != VERSION:
        raise InputError(
            f"is in version {one_line(version, 20)} of the format, which is unknown",
            where=where,
            hint=f"version {VERSION} of {FORMAT} is read",
        )
    for name in FILES:
        path = directory / name
        with reading(str(path)):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != digests.get(name):
            raise InputError("is cut off or was changed: its digest is not that of the manifest", where=str(path))
    jobs, idle, queue = (
        _read(directory / name, columns)
        for name, columns in (
            ("jobs.csv", JOB_COLUMNS),
            ("idle_windows.csv", IDLE_COLUMNS),
            ("queue.csv", QUEUE_COLUMNS),
        )
    )
    if jobs.is_empty():
        raise InputError("has no job", where=str(directory / "jobs.csv"))
    check_requests(jobs, least, str(directory / "jobs.csv"))
    return SiteTrace(str(directory), jobs, idle, queue, capacity, round_s, least, None)


def _read(path: Path, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
    if len(path.read_bytes().splitlines()) < 2:
        return pl.DataFrame(schema=columns)
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline().strip().split(",")
    types = {
        name: pl.String() if dtype == pl.String() else pl.Float64() for name, dtype in columns.items()
        if name in header or name not in OPTIONAL
    }  # fmt: skip
    rows = csv_columns.read(path, types, trace="an exported trace")
    for name, dtype in types.items():
        if dtype == pl.Float64() and name not in _UNKNOWN_ALLOWED:
            bad = rows.filter(pl.col(name).is_null() | (pl.col(name) < (1 if name in _POSITIVE else 0)))
            if bad.height:
                raise InputError(f"{name} is missing or too small", where=f"{path}:{bad['line'][0]}")
    older = [pl.lit(None).alias(name) for name in columns if name not in types]
    return rows.with_columns(older).select(*columns).cast(dict(columns))  # type: ignore[arg-type]


def job_log(trace: SiteTrace) -> JobLog:
    """Return the jobs of the data set as a log."""
    rows = trace.jobs.with_columns(
        pl.col("job").alias("number"),
        pl.col("gpus").alias("units"),
        pl.col("timelimit_s").fill_null(UNKNOWN).alias("request_s"),
        pl.col("user").rank("dense").cast(pl.Int64).fill_null(UNKNOWN).alias("user"),
    )
    jobs = with_user_means(rows).select(*JOBS).cast(JOBS)  # type: ignore[arg-type]
    idle_s = trace.idle.group_by("job").agg((pl.col("end_s") - pl.col("begin_s")).sum().alias("idle_s"))
    share = 100 * pl.col("idle_s").fill_null(0) / pl.col("run_s")
    idle_pct = (
        trace.jobs.join(idle_s, on="job", how="left", maintain_order="left")
        .select(pl.when(pl.col("measured") == 1).then(share).alias("idle_pct"))
        .to_series()
    )
    return JobLog(
        trace.name, "GPU", jobs, (), trace.capacity_gpus, epoch_s=EPOCH_S, final_states=trace.jobs["state"],
        idle_pct=idle_pct if idle_pct.count() else None, names=trace.jobs["name"],
        priorities=trace.jobs["priority_class"] if trace.jobs["priority_class"].count() else None,
    )  # fmt: skip
