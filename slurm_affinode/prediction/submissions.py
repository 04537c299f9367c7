"""Submissions with what is known at submission, and what the jobs used: from accounting, or from a public log."""

from __future__ import annotations

import polars as pl

from slurm_affinode.traces.job_log import UNKNOWN, JobLog

SUBMISSIONS: dict[str, pl.DataType] = {
    "number": pl.Int64(),  # of the job
    "submit_s": pl.Int64(),
    "end_s": pl.Int64(),  # null: it has not ended, or did not start
    "user": pl.String(),  # with the cluster, where there are several
    "account": pl.String(),
    "queue": pl.String(),
    "name": pl.String(),  # as shown: the job's name, or the number of the executable
    "job": pl.String(),  # identity of repeated jobs: name without digits, script, directory
    "units": pl.Int64(),  # GPUs, processors of a log; null: unknown
    "request_s": pl.Float64(),
    "request_mem_bytes": pl.Float64(),
    "run_s": pl.Float64(),  # cut at the requested time; null if the job has not ended
    "mem_bytes": pl.Float64(),  # peak of the host memory of the job
    "gpu_mem_bytes": pl.Float64(),  # largest GPU memory of a task, as accounting samples it
    "idle_pct": pl.Float64(),  # share of the run time in which all GPUs were idle, 1 to 100 %: less counts as 1 %
}
"""One row per submission. Null is unknown. Times in seconds from any origin; sizes of the whole job."""

_DIGITS = r"[0-9]+"
_SCRIPT = r"(\S+\.(?:sh|sbatch|slurm|job|py|bash))(?:\s|$)"
_KIB = 1024.0


def conform(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with the columns of ``SUBMISSIONS``, in the order of submission; absent ones are null."""
    columns = (
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SUBMISSIONS.items()
    )
    requests = frame.select(*columns).with_columns(
        pl.when(pl.col(name) > 0).then(name).alias(name) for name in ("request_s", "request_mem_bytes", "run_s")
    )
    requests = requests.with_columns(pl.col("idle_pct").clip(1.0, 100.0))
    cut = pl.min_horizontal("run_s", "request_s")  # null counts as missing
    return requests.with_columns(pl.when(pl.col("run_s").is_not_null()).then(cut).alias("run_s")).sort(
        "submit_s", maintain_order=True
    )


def from_log(log: JobLog) -> pl.DataFrame:
    """Return the jobs of a log. Where it has no waits, a job counts as ended at its submission plus its run time."""
    wait = pl.when(pl.col("wait_s") >= 0).then("wait_s").otherwise(0)
    frame = log.jobs.with_columns(
        (pl.col("submit_s") + wait + pl.col("run_s")).alias("end_s"),
        pl.when(pl.col("user") != UNKNOWN).then(pl.col("user").cast(pl.String)).alias("user"),
    )
    if log.names is not None:
        frame = frame.with_columns(log.names.alias("name"), log.names.alias("job"))
    if log.idle_pct is not None:
        frame = frame.with_columns(log.idle_pct.alias("idle_pct"))
    if log.described is not None:
        frame = pl.concat([frame, log.described], how="horizontal").with_columns(
            (pl.col("memory_kb") * _KIB * pl.col("units")).alias("mem_bytes"),
            (pl.col("requested_kb") * _KIB * pl.col("units")).alias("request_mem_bytes"),
            pl.col("executable").alias("name"), pl.col("executable").alias("job"), pl.col("group").alias("account"),
        )  # fmt: skip
    return conform(frame)


def from_accounting(jobs: pl.DataFrame, peaks: pl.DataFrame, idle: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the runs of ``jobs`` (columns of ``JOBS``) that have started.

    ``peaks``: cluster, job_id, submit, mem_bytes, gpu_mem_bytes of runs with recorded steps. ``idle``: cluster,
    job_id, submit, idle_pct of runs whose GPUs have samples. A job that Slurm had
    suspended ran for its elapsed time. Runs that the user canceled, and those of failed nodes, count like others.
    """
    cluster = pl.col("cluster").fill_null("")
    several = jobs["cluster"].n_unique() > 1

    def of_cluster(name: str) -> pl.Expr:
        return pl.concat_str([cluster, pl.col(name)], separator="/") if several else pl.col(name)

    name = pl.col("job_name").str.replace_all(_DIGITS, "#")
    script = pl.col("submit_line").str.extract(_SCRIPT).str.replace_all(_DIGITS, "#")
    directory = pl.col("work_dir").str.replace_all(_DIGITS, "#")
    frame = jobs.join(peaks, on=["cluster", "job_id", "submit"], how="left", maintain_order="left", nulls_equal=True)
    if idle is not None:
        frame = frame.join(
            idle, on=["cluster", "job_id", "submit"], how="left", maintain_order="left", nulls_equal=True
        )
    begin = pl.coalesce("eligible", "submit")
    frame = frame.with_columns(
        pl.col("job_id").alias("number"), pl.min_horizontal(begin, "start").dt.epoch("s").alias("submit_s"),
        pl.col("end").dt.epoch("s").alias("end_s"), of_cluster("user").alias("user"),
        of_cluster("account").alias("account"), of_cluster("partition").alias("queue"),
        pl.col("job_name").alias("name"),
        pl.concat_str([name, script, directory], separator="\n", ignore_nulls=True).alias("job"),
        pl.col("gpus").alias("units"), pl.col("timelimit_s").alias("request_s"),
        pl.coalesce("req_mem_bytes", "alloc_mem_bytes").alias("request_mem_bytes"),
        pl.when(pl.col("end").is_not_null()).then(
            pl.coalesce(pl.col("elapsed_s"), (pl.col("end") - pl.col("start")).dt.total_seconds())
        ).alias("run_s"),
        pl.coalesce("mem_bytes", pl.col("max_rss_bytes") * pl.col("nodes")).alias("mem_bytes"),
    )  # fmt: skip
    return conform(frame.filter(pl.col("start").is_not_null()))
