"""The GPU jobs of a site, their idle windows and its GPUs, for an anonymized data set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl

from slurm_affinode.analysis import idle_periods, squatters
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import stored_accounting
from slurm_affinode.pipeline.stored_accounting import NoAccountingError
from slurm_affinode.slurm.accounting.schema import JOBS
from slurm_affinode.traces.scheduler_logs import STATES
from slurm_affinode.traces.site_trace import IDLE, RAW

_COLUMNS = tuple(name for name in JOBS if name not in {"comment", "admin_comment", "work_dir", "submit_line"})


@dataclass(frozen=True, slots=True)
class SiteHistory:
    """GPU jobs of one cluster that started and ended in an interval."""

    cluster: str
    jobs: pl.DataFrame
    """Schema ``site_trace.RAW``."""
    idle: pl.DataFrame
    """Schema ``site_trace.IDLE``."""
    capacity_gpus: int
    left_out: dict[str, int]
    """Reason -> jobs."""


def collect(
    config: Config, query: WasteQuery, cluster: str | None, *, now: datetime | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> SiteHistory:  # fmt: skip
    """Read the stored accounting and GPU metrics of the interval. Raises ``AffinodeError``.

    Without ``cluster``, only one cluster may have GPU jobs. A job counts as measured if all its GPUs have samples.
    """
    moment = now or datetime.now(UTC)
    step("reading accounting")
    with Repository.open(config.db_url, create=False) as store:
        jobs = store.jobs(query.since, query.until, columns=_COLUMNS)
        gpus = store.allocation_gpus(query.since, query.until)
        query = stored_accounting.with_known(query, store, moment)
        stored_accounting.check_known(query, jobs, moment)
    limit_pct = query.thresholds.idle_pct
    step("reading GPU metrics")
    with contextlib.closing(SampleStore(config.history_dir)) as samples:
        held_gpus = squatters.hold(query, jobs, gpus, samples, [limit_pct], moment)
        step("searching idle periods")
        periods = idle_periods.find(samples, held_gpus, limit_pct)
    runs = held_gpus.runs.filter(pl.col("gpus").fill_null(1) > 0)
    name = _cluster(runs, cluster)
    runs = runs.filter(pl.col("cluster") == name)
    since_ms, until_ms = epoch_ms(query.since), epoch_ms(query.until)
    reasons = {
        "without a GPU count": pl.col("gpus").is_null(),
        "started before the interval": pl.col("begin_ms") < since_ms,
        "not ended in the interval": pl.col("end").is_null() | (pl.col("finish_ms") > until_ms),
        "without a user": pl.col("user").is_null(),
    }
    prepared = job_runs.prepare(jobs, query, moment).filter(pl.col("cluster") == name, pl.col("gpus").fill_null(1) > 0)
    uncertain = prepared.join(held_gpus.runs, on=["cluster", "job_id", "submit"], how="anti").height
    left_out = {"without a certain start and end": uncertain}
    for reason, test in reasons.items():
        left_out[reason] = runs.filter(test).height
        runs = runs.filter(~test)
    whole = held_gpus.pairs.group_by("run").agg(pl.col("at").n_unique().cast(pl.Int64).alias("devices"))
    submitted = pl.min_horizontal(pl.coalesce("eligible", "submit"), "start")
    rows = runs.join(whole, on="run", how="left").select(
        "run", "user", "account", "job_name", "partition", "gpu_type", "gpus", "timelimit_s",
        pl.col("state").replace_strict(list(STATES), list(STATES.values()), default="failed").alias("state"),
        "priority",
        submitted.dt.epoch("s").alias("submit_s"), pl.col("start").dt.epoch("s").alias("start_s"),
        pl.col("end").dt.epoch("s").alias("end_s"),
        (pl.col("devices").fill_null(0) >= pl.col("gpus")).alias("measured"),
    )  # fmt: skip
    divided = pl.col("at").is_in(held_gpus.divided.cast(pl.UInt32).implode())
    in_cluster = (pl.col("cluster") == name).fill_null(value=True)
    devices = held_gpus.devices.with_row_index("at").filter(~divided, in_cluster).height
    idle = periods.select(
        "run", (pl.col("begin_ms") // 1000).alias("begin_s"), (pl.col("end_ms") // 1000).alias("end_s")
    ).filter(pl.col("run").is_in(rows["run"].implode()))
    return SiteHistory(
        name, rows.cast(RAW), idle.cast(IDLE), max(devices, _most_at_once(rows)),  # type: ignore[arg-type]
        {reason: count for reason, count in left_out.items() if count},
    )  # fmt: skip


def _cluster(runs: pl.DataFrame, cluster: str | None) -> str:
    names = sorted(runs["cluster"].drop_nulls().unique().to_list())
    if cluster is not None:
        if cluster not in names:
            raise InputError(f"cluster {cluster} has no GPU job in the interval", hint=f"there is {', '.join(names)}")
        return cluster
    if not names:
        raise NoAccountingError("no GPU job ran in this interval", hint="choose an earlier --since, or ingest sacct")
    if len(names) > 1:
        raise InputError(f"several clusters have GPU jobs: {', '.join(names)}", hint="choose one with --cluster")
    return str(names[0])


def _most_at_once(jobs: pl.DataFrame) -> int:
    changes = pl.concat([
        jobs.select(at="start_s", gpus=pl.col("gpus")), jobs.select(at="end_s", gpus=-pl.col("gpus"))
    ]).group_by("at").agg(pl.col("gpus").sum()).sort("at")  # fmt: skip
    most = changes["gpus"].cum_sum().max()
    return int(most) if isinstance(most, int) else 0
