"""Alibaba's PAI trace of 2020 (``cluster-trace-gpu-v2020``): GPUs that tasks plan against those that they use.

Tables without headers, whose columns are in separate files (``pai_task_table.header``): CSV, or one member of an
archive (``pai_task_table.tar.gz``). They are read as streams; of the large ones only the columns that are needed are
kept. ``plan_gpu`` and ``gpu_wrk_util`` are percent of a GPU (50: half of one), memory is in GB. Times are seconds,
shifted by a constant; 0 is unknown. A sensor record has averages over the life of an instance.

An average of exactly 0 means that every moment was 0. A larger average does not say how long an instance was idle:
idle time from these records is a lower bound.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.lines import blocks, blocks_from, open_binary, reading
from slurm_affinode.model.finding import plain
from slurm_affinode.traces import csv_columns
from slurm_affinode.traces.job_figures import Spread, spread
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog, divide, in_parts, with_user_means

TABLES = {
    "pai_job_table": ("job_name", "inst_id", "user", "status", "start_time", "end_time"),
    "pai_task_table": (
        "job_name",
        "task_name",
        "inst_num",
        "status",
        "start_time",
        "end_time",
        "plan_cpu",
        "plan_mem",
        "plan_gpu",
        "gpu_type",
    ),
    "pai_sensor_table": (
        "job_name",
        "task_name",
        "worker_name",
        "inst_id",
        "machine",
        "gpu_name",
        "cpu_usage",
        "gpu_wrk_util",
        "avg_mem",
        "max_mem",
        "avg_gpu_wrk_mem",
        "max_gpu_wrk_mem",
        "read",
        "write",
        "read_count",
        "write_count",
    ),
    "pai_machine_spec": ("machine", "gpu_type", "cap_cpu", "cap_mem", "cap_gpu"),
}
"""Tables that are read -> their published columns, used if a header file is missing."""
STATUSES = ("Terminated", "Failed", "Running", "Waiting")
"""Terminated is success."""
BUCKETS = (("exactly 0 %", 0.0), ("up to 1 %", 1.0), ("1-10 %", 10.0), ("10-50 %", 50.0), ("above 50 %", None))
"""Upper bounds of the average utilization."""
_TRACE = "the PAI trace of 2020"
_TEXT, _NUMBER = pl.String(), pl.Float64()
_TYPES: dict[str, dict[str, pl.DataType]] = {
    "pai_job_table": {"job_name": _TEXT, "user": _TEXT, "status": _TEXT, "start_time": _NUMBER},
    "pai_task_table": {
        "job_name": _TEXT,
        "task_name": _TEXT,
        "status": _TEXT,
        "inst_num": _NUMBER,
        "start_time": _NUMBER,
        "end_time": _NUMBER,
        "plan_gpu": _NUMBER,
    },
    "pai_sensor_table": {
        "job_name": _TEXT,
        "task_name": _TEXT,
        "gpu_wrk_util": _NUMBER,
        "avg_gpu_wrk_mem": _NUMBER,
    },
    "pai_machine_spec": {"gpu_type": _TEXT, "cap_gpu": _NUMBER},
}
_ENDINGS = (".csv", ".csv.gz", ".tar.gz", ".tgz")


@dataclass(frozen=True, slots=True)
class PaiTables:
    """The tables of the trace; ``None``: not in the directory. Jobs and tasks are known by hashes of their names."""

    name: str
    jobs: pl.DataFrame | None
    """``job``, ``user``, ``status``, ``start_time``."""
    tasks: pl.DataFrame | None
    """``job``, ``task``, ``status``, ``inst_num``, ``start_time``, ``end_time``, ``plan_gpu``."""
    sensors: pl.DataFrame | None
    """``task``, ``util_pct``, ``memory_gb``: one row per record."""
    machines: pl.DataFrame | None
    """``gpu_type``, ``cap_gpu``."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the tables that are missing."""
        parts = dict(zip(TABLES, (self.jobs, self.tasks, self.sensors, self.machines), strict=True))
        return tuple(name for name, part in parts.items() if part is None)


@dataclass(frozen=True, slots=True)
class UtilizationBucket:
    """The sensor records of a range of average utilization."""

    label: str
    records: int
    share: float
    memory_gb_h: float | None
    """GPU memory x run time of the task; ``None``: the tasks are missing."""


@dataclass(frozen=True, slots=True)
class PlanUse:
    """Planned against used GPUs, of the sensor records whose task has a plan and a run time."""

    records: int
    planned_gpu_hours: float
    used_gpu_hours: float
    over_request: float | None
    """``planned_gpu_hours`` by ``used_gpu_hours``."""
    below_plan_share: float
    """Share of the records that use less than planned."""
    idle_gpu_hours: float
    """Planned GPU-hours of records with an average of exactly 0: a lower bound."""
    idle_share: float
    """``idle_gpu_hours`` of ``planned_gpu_hours``."""
    memory_gb_h: float
    idle_memory_share: float
    """Share of ``memory_gb_h`` in records with an average of exactly 0: a lower bound."""


@dataclass(frozen=True, slots=True)
class PaiSummary:
    """Figures of the trace. ``None``: the table that the figure needs is missing."""

    machines: int | None
    gpu_machines: int | None
    capacity_gpus: int | None
    capacity: Mapping[str, int] | None
    """GPU type -> GPUs."""
    jobs: int | None
    users: int | None
    job_statuses: Mapping[str, int] | None
    gpu_jobs: int | None
    """Jobs with a task that plans a GPU."""
    tasks: int | None
    gpu_tasks: int | None
    tasks_without_times: int | None
    """GPU tasks without a start or an end: waiting, running, or not recorded."""
    requested_gpu_hours: float | None
    """Planned GPUs x instances x run time, of the GPU tasks with both times."""
    waits_known: int | None
    wait_s: Spread | None
    """First start of a task minus submission, of the jobs with a GPU."""
    run_s: Spread | None
    """First start to last end of the GPU tasks of a job."""
    size: Spread | None
    """Planned GPUs of a job."""
    sensor_records: int | None
    util_mean_pct: float | None
    util_median_pct: float | None
    util_zero_share: float | None
    util_below_10_share: float | None
    util_from_50_share: float | None
    buckets: tuple[UtilizationBucket, ...]
    plan_use: PlanUse | None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        row: dict[str, Any] = plain(self)
        return row


def read(directory: Path, names: Collection[str] = tuple(TABLES)) -> PaiTables:
    """Read the tables of ``names`` in a directory or its ``data/``; others count as missing.

    Raises ``InputError`` if it has none of them, or one is damaged, cut off, or not as published.
    """
    if not directory.is_dir():
        raise InputError(
            "is no directory with the tables of the trace",
            where=str(directory),
            hint=f"name the directory that has {', '.join(TABLES)}",
        )
    jobs, tasks, sensors, machines = (_table(directory, name) if name in names else None for name in TABLES)
    if jobs is None and tasks is None and sensors is None and machines is None:
        raise InputError(f"has none of the tables of {_TRACE}", where=str(directory))
    return PaiTables(str(directory), jobs, tasks, sensors, machines)


def _table(directory: Path, name: str) -> pl.DataFrame | None:
    file = _located(directory, name)
    if file is None:
        return None
    frames = []
    for frame in csv_columns.typed(
        _lines(file, name), _columns(file, name), _TYPES[name], where=str(file), trace=_TRACE
    ):
        _check_statuses(frame, file)
        frames.append(_reduced(frame))
    if not any(frame.height for frame in frames):
        raise InputError("is empty: it has no row", where=str(file))
    return pl.concat(frames)


def _located(directory: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}{ending}" for folder in (directory, directory / "data") for ending in _ENDINGS)
    return next((file for file in candidates if file.is_file()), None)


def _columns(file: Path, name: str) -> list[str]:
    """Return the columns of the header file, else the published ones."""
    header = file.parent / f"{name}.header"
    if not header.is_file():
        return list(TABLES[name])
    with reading(str(header)):
        names = [column.strip() for column in header.read_text(encoding="utf-8", errors="replace").strip().split(",")]
    missing = [column for column in _TYPES[name] if column not in names]
    if missing:
        raise InputError(f"has no column {', '.join(missing)}: not the header of {name}", where=str(header))
    return names


def _lines(file: Path, name: str) -> Iterator[Any]:
    """Yield the lines of a table: of the file, or of the member of an archive."""
    where = str(file)
    if not file.name.endswith((".tar.gz", ".tgz")):
        yield from blocks(file, where)
        return
    with reading(where), open_binary(file) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    if member.isfile() and PurePosixPath(member.name).name == f"{name}.csv":
                        content = archive.extractfile(member)
                        assert content is not None  # noqa: S101 - a regular file
                        yield from blocks_from(content.read, where)
                        return
        except tarfile.TarError as error:
            raise InputError(f"is cut off or damaged ({one_line(error)})", where=where) from error
    raise InputError(f"has no {name}.csv", where=where)


def _check_statuses(frame: pl.DataFrame, file: Path) -> None:
    if "status" in frame.columns:
        unknown = frame.filter(~pl.col("status").is_in(STATUSES))
        if unknown.height:
            text = one_line(unknown["status"][0], 40)
            raise InputError(
                f"status {text} is unknown: {', '.join(STATUSES)} are read", where=f"{file}:{unknown['line'][0]}"
            )


def _reduced(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame with hashes instead of long names, unknown times as null, and short numbers."""
    columns: list[pl.Expr] = []
    if "job_name" in frame.columns and "gpu_wrk_util" not in frame.columns:
        columns.append(pl.col("job_name").hash().alias("job"))
    if "task_name" in frame.columns:
        columns.append(pl.concat_str("job_name", pl.lit("/"), "task_name").hash().alias("task"))
    if "gpu_wrk_util" in frame.columns:
        columns += [
            pl.col("gpu_wrk_util").cast(pl.Float32).alias("util_pct"),
            pl.col("avg_gpu_wrk_mem").cast(pl.Float32).alias("memory_gb"),
        ]
    columns += [
        pl.when(pl.col(name) > 0).then(name).alias(name) for name in ("start_time", "end_time") if name in frame.columns
    ]
    columns += [pl.col(name).cast(pl.Categorical) for name in ("status", "user", "gpu_type") if name in frame.columns]
    columns += [pl.col(name) for name in ("inst_num", "plan_gpu", "cap_gpu") if name in frame.columns]
    return frame.select(columns)


def analyse(tables: PaiTables) -> PaiSummary:
    """Return the figures of the tables."""
    return PaiSummary(
        **_capacity(tables.machines),
        **_jobs(tables.jobs),
        **_tasks(tables.tasks, tables.jobs),
        **_sensors(tables.sensors, tables.tasks),
    )


def job_log(tables: PaiTables) -> JobLog:
    """Return the jobs with a GPU: their GPU tasks hold the planned GPUs from the first start to the last end.

    A job with a task that has no start or no end is left out; it was waiting or running. Raises ``InputError`` if the
    table of jobs or of tasks is missing.
    """
    if tables.jobs is None or tables.tasks is None:
        raise InputError("needs pai_job_table and pai_task_table for a simulation", where=tables.name)
    begun = tables.tasks.group_by("job").agg(pl.col("start_time").min().alias("begun"))
    gpu = tables.tasks.filter(pl.col("plan_gpu") > 0).group_by("job").agg(
        (pl.col("plan_gpu") / 100 * pl.col("inst_num").fill_null(1)).sum().alias("gpus"), pl.col("start_time").min(),
        pl.col("end_time").max(), pl.any_horizontal(pl.col("start_time", "end_time").is_null()).any().alias("open"),
    )  # fmt: skip
    jobs = tables.jobs.select("job", "user", pl.col("start_time").alias("submitted"))
    jobs = jobs.unique("job", keep="first", maintain_order=True)
    joined = jobs.with_row_index("line", offset=1).join(gpu, on="job", maintain_order="left").join(
        begun, on="job", maintain_order="left"
    )  # fmt: skip
    units, parts = in_parts(joined["gpus"])
    rows = joined.with_columns(
        units, pl.col("line").cast(pl.Int64).alias("number"),
        pl.col("submitted").fill_null(UNKNOWN).cast(pl.Int64).alias("submit_s"),
        (pl.col("end_time") - pl.col("start_time")).fill_null(UNKNOWN).cast(pl.Int64).alias("run_s"),
        (pl.col("begun") - pl.col("submitted")).fill_null(UNKNOWN).cast(pl.Int64).alias("wait_s"),
        pl.col("user").cast(pl.String).rank("dense").cast(pl.Int64).fill_null(UNKNOWN).alias("user"),
        pl.lit(UNKNOWN).alias("request_s"),
    )  # fmt: skip
    reasons = {
        "without a start or an end of a task: they were waiting or running, or it is missing": pl.col("open"),
        "without a time of submission": pl.col("submit_s") < 0,
        "that end before they start, or start before they are submitted": (pl.col("run_s") < 0)
        | (pl.col("wait_s") < 0),
    }
    usable, left_out = divide(rows, reasons, f"{tables.name}: pai_job_table", parts)
    usable = with_user_means(usable.with_columns(pl.col("run_s").clip(1)))
    capacity = None if tables.machines is None else int(tables.machines["cap_gpu"].sum()) or None
    return JobLog(
        tables.name, "GPU", usable.select(*JOBS).cast(JOBS), tuple(left_out), capacity,  # type: ignore[arg-type]
        jobs_without_units=jobs.height - joined.height, parts=parts,
    )  # fmt: skip


def _capacity(machines: pl.DataFrame | None) -> dict[str, Any]:
    if machines is None:
        return dict.fromkeys(("machines", "gpu_machines", "capacity_gpus", "capacity"))
    with_gpus = machines.filter(pl.col("cap_gpu") > 0)
    types = with_gpus.group_by(pl.col("gpu_type").cast(pl.String)).agg(pl.col("cap_gpu").sum().cast(pl.Int64))
    return {
        "machines": machines.height,
        "gpu_machines": with_gpus.height,
        "capacity_gpus": int(with_gpus["cap_gpu"].sum()),
        "capacity": dict(types.sort("cap_gpu", "gpu_type", descending=[True, False]).iter_rows()),
    }


def _jobs(jobs: pl.DataFrame | None) -> dict[str, Any]:
    if jobs is None:
        return dict.fromkeys(("jobs", "users", "job_statuses"))
    counts = jobs.group_by(pl.col("status").cast(pl.String)).len().drop_nulls()
    return {
        "jobs": jobs.height,
        "users": jobs["user"].drop_nulls().n_unique(),
        "job_statuses": dict(counts.sort("len", "status", descending=[True, False]).iter_rows()),
    }


def _tasks(tasks: pl.DataFrame | None, jobs: pl.DataFrame | None) -> dict[str, Any]:
    names = (
        "gpu_jobs",
        "tasks",
        "gpu_tasks",
        "tasks_without_times",
        "requested_gpu_hours",
        "waits_known",
        "wait_s",
        "run_s",
        "size",
    )
    if tasks is None:
        return dict.fromkeys(names)
    gpu = tasks.filter(pl.col("plan_gpu") > 0).with_columns(
        (pl.col("plan_gpu") / 100 * pl.col("inst_num").fill_null(1)).alias("gpus"),
        (pl.col("end_time") - pl.col("start_time")).alias("run_s"),
    )
    gpu = gpu.with_columns(pl.when(pl.col("run_s") >= 0).then("run_s").alias("run_s"))
    by_job = gpu.group_by("job").agg(
        pl.col("start_time").min(), pl.col("end_time").max(), pl.col("gpus").sum(), pl.col("run_s").null_count()
    )
    complete = by_job.filter(pl.col("run_s") == 0)
    waits = None
    if jobs is not None:
        first = tasks.group_by("job").agg(pl.col("start_time").min()).join(by_job, on="job", how="semi")
        joined = first.join(jobs.select("job", pl.col("start_time").alias("submitted")), on="job").select(
            wait=pl.col("start_time") - pl.col("submitted")
        )
        waits = joined["wait"].filter(joined["wait"] >= 0)
    return {
        "gpu_jobs": by_job.height,
        "tasks": tasks.height,
        "gpu_tasks": gpu.height,
        "tasks_without_times": gpu["run_s"].null_count(),
        "requested_gpu_hours": float((gpu["gpus"] * gpu["run_s"]).sum()) / 3600,
        "waits_known": None if waits is None else len(waits),
        "wait_s": None if waits is None else spread(waits),
        "run_s": spread(complete["end_time"] - complete["start_time"]),
        "size": spread(by_job["gpus"]),
    }


def _sensors(sensors: pl.DataFrame | None, tasks: pl.DataFrame | None) -> dict[str, Any]:
    names = (
        "sensor_records",
        "util_mean_pct",
        "util_median_pct",
        "util_zero_share",
        "util_below_10_share",
        "util_from_50_share",
        "plan_use",
    )
    if sensors is None:
        return {**dict.fromkeys(names), "buckets": ()}
    measured = sensors.filter(pl.col("util_pct").is_not_null())
    util = measured["util_pct"].cast(pl.Float64)
    joined = None if tasks is None else _with_tasks(measured, tasks)
    return {
        "sensor_records": sensors.height,
        "util_mean_pct": _float(util.mean()),
        "util_median_pct": _float(util.median()),
        "util_zero_share": _float((util == 0).mean()),
        "util_below_10_share": _float((util < 10).mean()),
        "util_from_50_share": _float((util >= 50).mean()),
        "buckets": _buckets(measured, joined),
        "plan_use": None if joined is None else _plan_use(joined),
    }


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _with_tasks(sensors: pl.DataFrame, tasks: pl.DataFrame) -> pl.DataFrame:
    """Return the records with ``plan_gpu`` and ``hours`` of their tasks; records without these are left out."""
    planned = tasks.filter((pl.col("plan_gpu") > 0) & (pl.col("end_time") >= pl.col("start_time"))).select(
        "task", "plan_gpu", ((pl.col("end_time") - pl.col("start_time")) / 3600).alias("hours")
    )
    return sensors.join(planned.unique("task"), on="task")


def _plan_use(rows: pl.DataFrame) -> PlanUse | None:
    if rows.is_empty():
        return None
    idle = pl.col("util_pct") == 0
    planned = pl.col("plan_gpu") / 100 * pl.col("hours")
    memory = (pl.col("memory_gb") * pl.col("hours")).fill_null(0.0)
    row = rows.select(
        planned=planned.sum(),
        used=(pl.col("util_pct").cast(pl.Float64) / 100 * pl.col("hours")).sum(),
        below=(pl.col("util_pct") < pl.col("plan_gpu")).mean(),
        idle=planned.filter(idle).sum(),
        memory=memory.sum(),
        idle_memory=memory.filter(idle).sum(),
    ).row(0, named=True)
    return PlanUse(
        records=rows.height,
        planned_gpu_hours=row["planned"],
        used_gpu_hours=row["used"],
        over_request=row["planned"] / row["used"] if row["used"] else None,
        below_plan_share=row["below"],
        idle_gpu_hours=row["idle"],
        idle_share=row["idle"] / row["planned"] if row["planned"] else 0.0,
        memory_gb_h=row["memory"],
        idle_memory_share=row["idle_memory"] / row["memory"] if row["memory"] else 0.0,
    )


def _buckets(sensors: pl.DataFrame, joined: pl.DataFrame | None) -> tuple[UtilizationBucket, ...]:
    buckets, low = [], -1.0
    for label, high in BUCKETS:
        inside = (pl.col("util_pct") > low) & (True if high is None else pl.col("util_pct") <= high)
        records = sensors.filter(inside).height
        memory = (
            None
            if joined is None
            else float(joined.filter(inside).select((pl.col("memory_gb") * pl.col("hours")).sum()).item() or 0.0)
        )
        buckets.append(UtilizationBucket(label, records, records / sensors.height if sensors.height else 0.0, memory))
        low = low if high is None else high
    return tuple(buckets)
