"""Users whose jobs together did little with what they had over a period."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import polars as pl

from slurm_affinode.model.finding import Evidence, Finding, JobRef
from slurm_affinode.zombieconfig import MisfitConfig

Row = dict[str, Any]


def met(  # noqa: PLR0917
    dimension: str, value: float | str, unit: str, threshold: str, weight: float, text: str
) -> Evidence:
    """A dimension that speaks for a finding."""
    return Evidence(dimension, value, unit, threshold, weight, text, met=True)


def gpu_users(rows: pl.DataFrame, config: MisfitConfig, until: datetime) -> Iterator[Finding]:
    """Users whose measured GPU time was little used, among those with the most GPU-hours."""
    gpu_h = (pl.col("gpus") * (pl.col("end_ms") - pl.col("start_ms")) / 3.6e6).sum()
    of_gpus = rows.filter(pl.col("gpus").fill_null(0) > 0)
    for row, whole in _largest(of_gpus, gpu_h, config, at_least=config.user_min_gpu_hours):
        if not row["measured_gpu_s"]:
            continue
        measured_h = row["measured_gpu_s"] / 3600
        mean = row["activity_pct_s"] / row["measured_gpu_s"]
        if mean > config.user_efficiency_pct:
            continue
        share = f", {row['hours'] / whole:.0%} of all" if whole else ""
        yield _of_user("low-efficiency-user", row, until, (
            met("compute", mean, "%", f"at most {config.user_efficiency_pct:g} %", 0.6,
                 f"mean activity {mean:.0f} % in {measured_h:.0f} measured GPU-hours"),
            met("time", row["hours"], "GPU-hours", f"at least {config.user_min_gpu_hours:g}", 0.4,
                 f"{row['hours']:.0f} GPU-hours in {_jobs(row)}{share}"),
        ), "See slurm-affinode report --user for the jobs that weigh most.")  # fmt: skip


def cpu_users(rows: pl.DataFrame, config: MisfitConfig, until: datetime) -> Iterator[Finding]:
    """Users whose CPU cores were little used, by jobs without GPUs that have ended."""
    ended = rows.filter((pl.col("gpus").fill_null(0) == 0) & ~pl.col("running") & pl.col("total_cpu_s").is_not_null())
    hours = (pl.col("cpus") * pl.col("ran_s") / 3600).sum()
    for row, _ in _largest(ended, hours, config, at_least=config.cpu_user_min_core_hours):
        mean = 100 * row["cpu_s"] / 3600 / row["hours"] if row["hours"] else 100.0
        if mean > config.cpu_efficiency_pct:
            continue
        yield _of_user("low-cpu-efficiency-user", row, until, (
            met("cpu", mean, "%", f"at most {config.cpu_efficiency_pct:g} %", 0.6,
                 f"{mean:.0f} % of the core time used"),
            met("time", row["hours"], "core-hours", f"at least {config.cpu_user_min_core_hours:g}", 0.4,
                 f"{row['hours']:.0f} core-hours in {_jobs(row)}"),
        ), "Fewer cores, or a program that uses them.")  # fmt: skip


def _jobs(row: Row) -> str:
    return "1 job" if row["jobs"] == 1 else f"{row['jobs']} jobs"


def _largest(
    rows: pl.DataFrame, hours: pl.Expr, config: MisfitConfig, *, at_least: float
) -> Iterator[tuple[Row, float]]:
    """The users with the most ``hours``, each with what all users had: who had too little of it is left out."""
    per = (
        rows.group_by("cluster", "user")
        .agg(
            hours.alias("hours"), pl.len().alias("jobs"), pl.col("measured_gpu_s").sum(),
            pl.col("activity_pct_s").sum(), pl.col("total_cpu_s").sum().alias("cpu_s"),
            pl.col("account").drop_nulls().mode().sort().first(), pl.col("start").min().alias("first"),
            pl.col("job_id").first(), pl.col("submit").first(),
        )
        .sort("hours", "user", descending=[True, False])
    )  # fmt: skip
    whole = float(per["hours"].sum() or 0)
    for row in per.head(config.user_top).iter_rows(named=True):
        if row["hours"] >= max(at_least, config.user_min_share * whole):
            yield row, whole


def _of_user(kind: str, row: Row, until: datetime, evidence: tuple[Evidence, ...], advice: str) -> Finding:
    return Finding(
        kind=kind, cluster=row["cluster"], subject=JobRef(row["job_id"], str(row["job_id"]), row["submit"]),
        user=row["user"], account=row["account"], partition=None, qos=None, nodes=(), gpus=(), since=row["first"],
        window_s=(until - row["first"]).total_seconds(), score=1.0, evidence=evidence, held_gpu_hours=None,
        held_gib_hours=None, impact=None, source="history", observed_at=until, advice=advice,
    )  # fmt: skip
