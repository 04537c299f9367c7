"""Reader of the job log of the Philly trace as published: ``cluster_job_log``, a JSON array with one object per job.

A job has attempts, each with a start, an end, and the GPUs of each server. Attempts and times may be missing; a job
whose last attempt has no end was still running. Times have no zone. The GPUs of the cluster are read from
``cluster_machine_list`` in the same directory. Format: README of ``msr-fiddle/philly-traces`` (CC-BY-4.0).
"""

from __future__ import annotations

import io
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers.lines import open_binary, reading
from slurm_affinode.traces import csv_columns
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog, divide, with_user_means

FILE = "cluster_job_log"
_MACHINES = ("cluster_machine_list", "cluster_machine_list.csv")
_TRACE = "the Philly trace"
_TIME = "%Y-%m-%d %H:%M:%S"
_SCHEMA: dict[str, pl.DataType] = {
    "status": pl.String(),
    "jobid": pl.String(),
    "user": pl.String(),
    "submitted_time": pl.String(),
    "attempts": pl.List(
        pl.Struct({
            "start_time": pl.String(), "end_time": pl.String(),
            "detail": pl.List(pl.Struct({"ip": pl.String(), "gpus": pl.List(pl.String())})),
        })
    ),
}  # fmt: skip
_STATES = {"Pass": "completed", "Killed": "canceled", "Failed": "failed"}
_REASONS = {
    "without a time of submission": pl.col("submit_s").is_null(),
    "without an attempt: they never ran": pl.col("attempts") == 0,
    "that were still running, or lack their end": pl.col("last_s").is_null(),
    "with an attempt that lacks its start or end": pl.col("gaps") > 0,
    "without GPUs": pl.col("units").is_null() | (pl.col("units") < 1),
    "that end before they start, or start before they are submitted": (pl.col("least_s") < 0) | (pl.col("wait_s") < 0),
}


def is_log(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` can be such a log: a JSON array."""
    return head.lstrip().startswith(b"[")


def read(path: Path) -> JobLog:
    """Read a log. The run time of a job is the sum over its attempts, its size that of its largest attempt.

    Jobs are numbered by their place in the array, from 0. Raises ``InputError`` if the file cannot be read, is cut off,
    or is not the log of this trace.
    """
    where = str(path)
    with reading(where), open_binary(path) as file:
        text = file.read()
    try:
        rows = pl.read_json(io.BytesIO(text), schema=_SCHEMA)
    except (pl.exceptions.PolarsError, OverflowError) as error:
        raise InputError(
            f"is not the JSON array of {_TRACE}, or is cut off", where=where, hint="download it again"
        ) from error
    if rows.is_empty():
        raise InputError("the log is empty: it has no job", where=where)
    if rows["attempts"].null_count() == rows.height or rows["submitted_time"].null_count() == rows.height:
        raise InputError(f"no job has attempts and a submitted_time: not the job log of {_TRACE}", where=where)
    usable, left_out = divide(_jobs(rows), _REASONS, where)
    usable = with_user_means(usable.with_columns(pl.col("run_s").clip(1)))
    final = usable["status"].replace_strict(list(_STATES), list(_STATES.values()), default="other")
    return JobLog(
        where, "GPU", usable.select(*JOBS).cast(JOBS), tuple(left_out), _gpus(path.parent), epoch_s=0,  # type: ignore[arg-type]
        final_states=final.alias("state"),
    )  # fmt: skip


def _jobs(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a row per job: what ``divide`` needs, ``status``, and what tells why a job cannot be used."""
    numbered = rows.with_row_index("number").with_columns(pl.col("attempts").fill_null([]))
    attempts = (
        numbered.select("number", "attempts").filter(pl.col("attempts").list.len() > 0)
        .explode("attempts").unnest("attempts")
        .with_columns(
            _seconds("start_time").alias("start_s"), _seconds("end_time").alias("end_s"),
            pl.col("detail").list.eval(pl.element().struct.field("gpus").list.len()).list.sum().alias("gpus"),
        )
        .with_columns((pl.col("end_s") - pl.col("start_s")).alias("ran_s"))
    )  # fmt: skip
    of_job = attempts.group_by("number", maintain_order=True).agg(
        pl.col("start_s").first().alias("first_s"), pl.col("end_s").last().alias("last_s"),
        pl.col("ran_s").sum().alias("run_s"), pl.col("ran_s").min().alias("least_s"),
        pl.col("ran_s").null_count().alias("gaps"), pl.col("gpus").max().cast(pl.Int64).alias("units"),
    )  # fmt: skip
    submitted = numbered.select(
        "number", "status", pl.col("attempts").list.len(), _seconds("submitted_time").alias("submit_s"),
        pl.col("user").rank("dense").cast(pl.Int64).fill_null(UNKNOWN).alias("user"),
        pl.coalesce("jobid", pl.format("job {}", "number")).alias("line"), pl.lit(UNKNOWN).alias("request_s"),
    )  # fmt: skip
    joined = submitted.join(of_job, on="number", how="left", maintain_order="left")
    return joined.with_columns((pl.col("first_s") - pl.col("submit_s")).alias("wait_s"))


def _seconds(column: str) -> pl.Expr:
    """Return the time in seconds since 1970, as it is; null for one that is missing, which may be the text None."""
    return pl.col(column).str.to_datetime(_TIME, strict=False).dt.epoch("s")


def _gpus(directory: Path) -> int | None:
    """Return the GPUs of the machines; ``None`` without their list."""
    file = csv_columns.inside(directory, *_MACHINES)
    if file is None:
        return None
    machines = csv_columns.read(file, {"number of GPUs": pl.Float64()}, trace=_TRACE)
    return int(machines["number of GPUs"].sum())
