"""Readers of the job logs of Helios (SenseTime, 2020) and Acme (Shanghai AI Lab, 2023), CSV with a header.

Helios has ``cluster_log.csv`` and ``cluster_gpu_number.csv`` (GPUs by day) in a directory per cluster; Acme has
``trace_seren.csv`` and ``trace_kalos.csv``. Both have jobs without GPUs, which are counted and not analyzed, jobs that
never started, and the final state. Times of Helios have no zone; those of Acme have offsets.

The run time is end minus start. The column ``duration`` is documented as the same, and is not in Kalos: there it begins
with the submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.traces import csv_columns
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog, divide, with_user_means

HELIOS_CLUSTERS = ("Venus", "Earth", "Saturn", "Uranus")
ACME_CLUSTERS = ("Seren", "Kalos")
_HELIOS_FILE, _HELIOS_GPUS = "cluster_log.csv", "cluster_gpu_number.csv"
_HELIOS, _ACME = "the Helios trace", "the Acme trace"
_TEXTS = ("user", "state", "submit_time", "start_time", "end_time")
_TYPES = {**dict.fromkeys(_TEXTS, pl.String()), "gpu_num": pl.Float64(), "duration": pl.Float64()}
STATES = {
    "COMPLETED": "completed", "CANCELLED": "canceled", "FAILED": "failed", "TIMEOUT": "failed", "NODE_FAIL": "failed",
}  # fmt: skip
"""Final states, as the papers group them."""
_TIME = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)?$"
_SHANGHAI = ("+08:00",)
_REASONS = {
    "without a start: they never ran": pl.col("start_s").is_null(),
    "without an end: they were still running, or their end is missing": pl.col("end_s").is_null(),
    "that end before they start, or start before they are submitted": (pl.col("run_s") < 0) | (pl.col("wait_s") < 0),
}


@dataclass(frozen=True, slots=True)
class _Format:
    trace: str
    clusters: tuple[str, ...]


def read_helios(path: Path) -> JobLog:
    """Read the log of one cluster: ``cluster_log.csv``, or its directory.

    The GPUs of the cluster are read from ``cluster_gpu_number.csv`` in the same directory. Raises ``InputError`` if it
    is not the file of this trace, or the directory has several clusters.
    """
    if path.is_dir() and csv_columns.inside(path, _HELIOS_FILE) is None:
        clusters = sorted(part.name for part in path.iterdir() if part.is_dir() and part.name in HELIOS_CLUSTERS)
        if clusters:
            raise InputError(f"has the clusters {', '.join(clusters)}", where=str(path),
                             hint=f"name the directory of one of them: {path / clusters[0]}")  # fmt: skip
    file = csv_columns.located(path, _HELIOS_FILE, trace=_HELIOS)
    return _read(file, _Format(_HELIOS, HELIOS_CLUSTERS), _helios_gpus(file.parent))


def read_acme(path: Path) -> JobLog:
    """Read the log of one cluster: ``trace_seren.csv`` or ``trace_kalos.csv``.

    Raises ``InputError`` if it is a directory, or not a file of this trace.
    """
    if path.is_dir():
        raise InputError("is a directory", where=str(path), hint="name the file of a cluster, such as trace_seren.csv")
    return _read(path, _Format(_ACME, ACME_CLUSTERS), None)


def _read(file: Path, format: _Format, capacity: int | None) -> JobLog:
    where = str(file)
    rows = csv_columns.read(file, _TYPES, trace=format.trace)
    states = rows["state"].unique().sort().to_list()
    unknown = [state for state in states if state is None]
    if unknown:
        line = rows.filter(pl.col("state").is_null())["line"][0]
        raise InputError("has no state", where=f"{where}:{line}")
    offsets = _offsets(rows, where)
    whole = rows.with_columns(*(_seconds(f"{name}_time").alias(f"{name}_s") for name in ("submit", "start", "end")))
    for name in ("submit", "start", "end"):
        bad = whole.filter(pl.col(f"{name}_time").is_not_null() & pl.col(f"{name}_s").is_null())
        if bad.height:
            text = one_line(bad[f"{name}_time"][0], 40)
            raise InputError(f"{name}_time is not a time: {text}", where=f"{where}:{bad['line'][0]}")
    if whole["submit_s"].null_count():
        line = whole.filter(pl.col("submit_s").is_null())["line"][0]
        raise InputError("has no submit_time", where=f"{where}:{line}")
    with_gpus = whole.filter(pl.col("gpu_num") > 0)
    prepared = with_gpus.with_columns(
        pl.col("gpu_num").ceil().cast(pl.Int64).alias("units"),
        (pl.col("end_s") - pl.col("start_s")).alias("run_s"),
        (pl.col("start_s") - pl.col("submit_s")).alias("wait_s"),
        pl.col("user").rank("dense").cast(pl.Int64).fill_null(UNKNOWN).alias("user"),
        pl.lit(UNKNOWN).alias("request_s"),
        pl.col("line").alias("number"),
    )
    usable, left_out = divide(prepared, _REASONS, where)
    # A job of less than a second ran for one.
    usable = with_user_means(usable.with_columns(pl.col("run_s").clip(1)))
    final = usable["state"].replace_strict(list(STATES), list(STATES.values()), default="other")
    return JobLog(
        where, "GPU", usable.select(*JOBS).cast(JOBS), tuple(left_out), capacity, epoch_s=0, zone=_zone(offsets),  # type: ignore[arg-type]
        cluster=_cluster(file, format.clusters), jobs_without_units=whole.height - with_gpus.height,
        final_states=final.alias("state"), recorded_run_s=usable["duration"],
    )  # fmt: skip


def _seconds(column: str) -> pl.Expr:
    """Return the time in seconds since 1970, in UTC if it has an offset, else as it is."""
    parts = pl.col(column).str.extract_groups(_TIME)
    naive = parts.struct.field("1").str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s")
    offset = parts.struct.field("2")
    minutes = offset.str.slice(1, 2).cast(pl.Int64, strict=False) * 60 + offset.str.slice(4, 2).cast(
        pl.Int64, strict=False
    )
    signed = pl.when(offset.str.starts_with("-")).then(-minutes).otherwise(minutes).fill_null(0)
    return naive - signed * 60


def _offsets(rows: pl.DataFrame, where: str) -> list[str | None]:
    """Return the offsets of the times. Raises ``InputError`` if some have one and others have none."""
    times = rows.select(pl.col("submit_time").str.extract(_TIME, 2).alias("offset"), "line")
    offsets: list[str | None] = times["offset"].unique().to_list()
    if None in offsets and len(offsets) > 1:
        line = times.filter(pl.col("offset").is_null())["line"][0]
        raise InputError("has a time without an offset, and others have one", where=f"{where}:{line}")
    return offsets


def _zone(offsets: list[str | None]) -> tzinfo | None:
    """Return the zone of the submissions: Shanghai, if all have its offset; UTC for other offsets; None without any."""
    if None in offsets:
        return None
    return ZoneInfo("Asia/Shanghai") if tuple(offsets) == _SHANGHAI else UTC


def _cluster(file: Path, clusters: tuple[str, ...]) -> str | None:
    """Return the cluster that the name of the directory or file says."""
    names = f"{file.absolute().parent.name} {file.name}".lower()
    present = [cluster for cluster in clusters if cluster.lower() in names]
    return present[0] if len(present) == 1 else None


def _helios_gpus(directory: Path) -> int | None:
    """Return the largest number of GPUs on a day; None without the file."""
    file = csv_columns.inside(directory, _HELIOS_GPUS)
    if file is None:
        return None
    days = csv_columns.read(file, {"date": pl.String(), "total": pl.Float64()}, trace=_HELIOS)
    most = days["total"].max()
    return int(most) if isinstance(most, float) else None
