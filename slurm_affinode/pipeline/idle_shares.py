"""Share of the run time of ended jobs in which all of their GPUs were idle, from accounting and stored GPU metrics."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import polars as pl

from slurm_affinode.analysis import idle_periods, squatters
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import report, stored_accounting
from slurm_affinode.slurm.accounting.schema import JOBS
from slurm_affinode.slurm.times import site_zone

SHARES: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "submit": JOBS["submit"],
    "idle_pct": pl.Float64(),
}
_COLUMNS = tuple(name for name in JOBS if name not in {"comment", "admin_comment", "work_dir", "submit_line"})


def collect(
    config: Config, since: datetime, until: datetime, clusters: tuple[str, ...] = (), *, now: datetime | None = None
) -> pl.DataFrame:
    """Return ``SHARES`` of the GPU jobs that started and ended in the interval and whose GPUs all have samples.

    Time without samples counts as not idle. Raises ``AffinodeError``.
    """
    moment = now or datetime.now(UTC)
    query = WasteQuery(since, until, thresholds=report.thresholds(config), zone=site_zone(config.cluster.timezone))
    with contextlib.closing(SampleStore(config.history_dir)) as samples:
        if samples.span() is None:
            return pl.DataFrame(schema=SHARES)
        with Repository.open(config.db_url, create=False) as store:
            jobs = store.jobs(since, until, columns=_COLUMNS, clusters=clusters)
            gpus = store.allocation_gpus(since, until)
            query = stored_accounting.with_known(query, store, moment)
        limit_pct = query.thresholds.idle_pct
        held = squatters.hold(query, jobs, gpus, samples, [limit_pct], moment)
        periods = idle_periods.find(samples, held, limit_pct)
    measured = held.pairs.group_by("run").agg(pl.col("at").n_unique().cast(pl.Int64).alias("devices"))
    idle = periods.group_by("run").agg((pl.col("end_ms") - pl.col("begin_ms")).sum().alias("idle_ms"))
    runs = held.runs.filter(
        (pl.col("gpus") > 0) & pl.col("end").is_not_null() & (pl.col("start") >= since) & (pl.col("end") <= until)
    )
    share = 100.0 * pl.col("idle_ms").fill_null(0) / (pl.col("end") - pl.col("start")).dt.total_milliseconds()
    return (
        runs.filter(pl.col("end") > pl.col("start"))
        .join(measured, on="run")
        .filter(pl.col("devices") >= pl.col("gpus"))
        .join(idle, on="run", how="left")
        .select("cluster", "job_id", "submit", share.clip(0.0, 100.0).alias("idle_pct"))
        .cast(SHARES)  # type: ignore[arg-type]
    )
