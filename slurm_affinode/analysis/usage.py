"""Usage and waiting times per user, account, partition and so on, of all jobs, from accounting alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import polars as pl

from slurm_affinode.analysis import runs
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm import units

STATES = {"completed": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED", "timeout": "TIMEOUT",
          "oom": "OUT_OF_MEMORY"}  # fmt: skip
ORDERS = {"gpu-hours": "gpu_hours", "core-hours": "core_hours", "jobs": "jobs", "gpus": "gpus_now",
          "cores": "cores_now", "waiting": "waiting"}  # fmt: skip
"""Value of ``--by`` -> column."""
GROUPS = ("user", "account", "partition", "qos", "cluster", "job")


def usage(jobs: pl.DataFrame, pending: pl.DataFrame, query: WasteQuery, now: datetime, *, group: str) -> pl.DataFrame:
    """Return one row per ``group`` (one of ``GROUPS``) from ``JOBS``, with hours clipped to the interval.

    Amounts are sums over the jobs with a known number of GPUs (cores), null if it is known for no job.

    Columns: ``jobs``, ``gpu_jobs`` (with a GPU), ``gpu_hours``, ``core_hours`` (of all jobs), ``cpu_job_core_hours``
    (of jobs without a GPU), ``gpus_now``, ``cores_now``, ``running`` (at the end of the interval), ``waiting``, numbers
    of ended jobs by state, ``partitions``, ``users``.
    """
    selected = runs.prepare(jobs, query, now).filter(pl.col("selected")).with_columns(_shown())
    pending = pending.with_columns(_shown())
    gpus, cores = pl.col("gpus"), pl.col("cpus")
    hours = (pl.col("end_ms") - pl.col("start_ms")) / 3.6e6
    ends = pl.col("end").is_not_null() & (pl.col("end") <= query.until)
    rows = selected.group_by(group).agg(
        pl.len().cast(pl.Int64).alias("jobs"),
        _sum((gpus > 0).cast(pl.Int64)).alias("gpu_jobs"),
        _sum(gpus * hours).alias("gpu_hours"),
        _sum(cores * hours).alias("core_hours"),
        _sum(cores * hours * (gpus == 0)).alias("cpu_job_core_hours"),
        (~ends).sum().cast(pl.Int64).alias("running"),
        _sum(pl.when(ends).then(0).otherwise(gpus)).alias("gpus_now"),
        _sum(pl.when(ends).then(0).otherwise(cores)).alias("cores_now"),
        *((ends & (pl.col("state") == word)).sum().cast(pl.Int64).alias(name) for name, word in STATES.items()),
        pl.col("partition").drop_nulls().unique().sort().str.join(",").alias("partitions"),
        pl.col("user").drop_nulls().unique().sort().str.join(",").alias("users"),
    )
    waits = _selected(pending, query).group_by(group).agg(pl.len().cast(pl.Int64).alias("waiting"))
    joined = rows.join(waits, on=group, how="full", coalesce=True, nulls_equal=True)
    texts = pl.col("partitions", "users").fill_null("")
    amounts = pl.col(*(name for name in rows.columns if rows.schema[name].is_numeric() and name != group))
    none = pl.col("jobs").is_null()  # groups with pending jobs only: no usage
    return joined.with_columns(
        pl.when(none).then(0).otherwise(amounts).name.keep(), texts, pl.col("waiting").fill_null(0)
    )


def _sum(amount: pl.Expr) -> pl.Expr:
    return pl.when(amount.count() > 0).then(amount.sum())


def _shown() -> pl.Expr:
    """Return the column ``job``: the job ID as Slurm displays it, the same for all runs of a requeued job."""
    array, het = pl.col("array_job_id").cast(pl.String), pl.col("het_job_id").cast(pl.String)
    return pl.coalesce(
        pl.when(pl.col("array_task_id").is_not_null()).then(array + "_" + pl.col("array_task_id").cast(pl.String)),
        het + "+" + pl.col("het_offset").fill_null(0).cast(pl.String),
        pl.col("job_id").cast(pl.String),
    ).alias("job")


def _selected(pending: pl.DataFrame, query: WasteQuery) -> pl.DataFrame:
    filters = {"cluster": query.clusters, "account": query.accounts, "user": query.users}
    for name, values in filters.items():
        if values:
            pending = pending.filter(pl.col(name).is_in(list(values)))
    if query.partitions:
        # A pending job may list several partitions.
        named = pl.col("partition").fill_null("").str.split(",").list.set_intersection(list(query.partitions))
        pending = pending.filter(named.list.len() > 0)
    return pending


@dataclass(frozen=True, slots=True)
class Waits:
    """A pending job."""

    id: str
    user: str | None
    account: str | None
    partition: str
    qos: str | None
    gpus: int | None
    """Number of requested GPUs; ``None`` if unknown."""
    cores: int | None
    nodes: int | None
    submitted: datetime | None
    eligible: datetime | None
    reason: str | None
    waited_s: float
    """Time since the job became eligible; 0 if it is not eligible yet."""


def waits_of(pending: pl.DataFrame, query: WasteQuery, now: datetime) -> list[Waits]:
    """Return the pending jobs of accounting (``JOBS``), the longest wait first."""
    return _sorted(
        _stored(row, min(now, query.end_of(row["cluster"]))) for row in _selected(pending, query).iter_rows(named=True)
    )


def _stored(row: dict[str, Any], now: datetime) -> Waits:
    task = row["array_task_id"]
    shown = str(row["job_id"]) if task is None else f"{row['array_job_id']}_{task}"
    if task is None and row["array_spec"]:
        shown = f"{row['array_job_id'] or row['job_id']}_[{row['array_spec']}]"
    gpus = 0 if row["req_gpus"] is None and row["req_tres"] else row["req_gpus"]
    cores, nodes = row["cpus"] or _requested(row, "cpu"), row["nodes"] or _requested(row, "node")
    return Waits(shown, row["user"], row["account"], row["partition"] or "", row["qos"], gpus, cores,
                 nodes, row["submit"], row["eligible"], row["reason"],
                 _waited(row["eligible"], now))  # fmt: skip


def _requested(row: dict[str, Any], name: str) -> int | None:
    amount = units.parse_tres(row["req_tres"] or "").get(name, "")
    return int(amount) if amount.isdecimal() else None


def waits_now(jobs: Iterable[Job], query: WasteQuery, now: datetime) -> list[Waits]:
    """Return the pending jobs of slurmctld, the longest wait first."""
    return _sorted(
        Waits(job.id, job.user, job.account, ",".join(job.partitions), job.qos,
              0 if job.gpus_requested is None else job.gpus_requested.count, job.cpus, job.node_count, job.submit,
              job.eligible, job.reason, _waited(job.eligible or job.submit, now))
        for job in jobs
        if job.pending and _fits(job, query)
    )  # fmt: skip


def _fits(job: Job, query: WasteQuery) -> bool:
    return (
        (not query.users or job.user in query.users)
        and (not query.accounts or job.account in query.accounts)
        and (not query.partitions or bool(set(job.partitions) & set(query.partitions)))
    )


def _waited(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


def _sorted(rows: Iterable[Waits]) -> list[Waits]:
    return sorted(rows, key=lambda row: (-row.waited_s, row.id))
