"""The job runs of an interval, and their nodes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import polars as pl

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.times import epoch_ms, named
from slurm_affinode.slurm import hostlist
from slurm_affinode.slurm.accounting.schema import JOB_KEY, JOBS, conform

FAR_FUTURE_MS = 1 << 60
FRESH_S = 900.0
"""Accounting is reported as old if it ends earlier than this before the end of the interval."""


def prepare(jobs: pl.DataFrame, query: WasteQuery, now: datetime) -> pl.DataFrame:
    """Return the runs that overlap the interval of the query, numbered by ``run``.

    ``begin_ms``, ``finish_ms``: the whole run, unclipped (``FAR_FUTURE_MS`` for a running job). ``start_ms``,
    ``end_ms``: clipped to the interval, half-open, not empty; a running job ends where accounting of its cluster ends,
    or now. ``selected``: whether the run passes the filters.
    """
    since, until = epoch_ms(query.since), epoch_ms(query.until)
    frame = conform(jobs, JOBS).filter(pl.col("start").is_not_null()).unique(JOB_KEY, keep="last", maintain_order=True)
    begin = pl.col("start").dt.epoch("ms")
    known_until_ms = {cluster: epoch_ms(moment) for cluster, moment in query.known_until.items()}
    latest = pl.col("cluster").replace_strict(known_until_ms, default=None, return_dtype=pl.Int64)
    finish = pl.coalesce(pl.col("end").dt.epoch("ms"), pl.min_horizontal(latest, pl.lit(max(epoch_ms(now), 0))))
    return (
        frame.with_columns(
            begin.alias("begin_ms"),
            pl.col("end").dt.epoch("ms").fill_null(FAR_FUTURE_MS).alias("finish_ms"),
            begin.clip(lower_bound=since).alias("start_ms"),
            finish.clip(upper_bound=until).alias("end_ms"),
            _selected(query).alias("selected"),
        )
        .filter(pl.col("start_ms") < pl.col("end_ms"))
        .sort("cluster", "start", "job_id", "submit", nulls_last=True)
        .with_row_index("run")
        .with_columns(pl.col("run").cast(pl.Int64))
    )


RUNAWAY_S = 86_400
"""A running job is doubtful if it exceeds its time limit by this and by the limit itself: longer than
Slurm's ``OverTimeLimit`` and ``KillWait`` usually are."""


def credible(runs: pl.DataFrame) -> pl.DataFrame:
    """Return ``runs`` (``prepare``) for as long as accounting is credible.

    A job that still runs long after its time limit has been lost by Slurm (``sacctmgr show runawayjobs``): what it held
    after the limit is unknown.
    """
    limit_ms = pl.col("timelimit_s") * 1000
    # Time in which Slurm had suspended the job does not count; accounting's elapsed time is without it.
    ran_ms = pl.coalesce(pl.col("elapsed_s") * 1000, pl.col("end_ms") - pl.col("begin_ms"))
    lost = (pl.col("end").is_null() & (ran_ms > limit_ms + pl.max_horizontal(limit_ms, RUNAWAY_S * 1000))).fill_null(
        value=False
    )
    limited_end = pl.min_horizontal("end_ms", pl.col("begin_ms") + limit_ms)
    return runs.with_columns(
        pl.when(lost).then(limited_end).otherwise("end_ms").alias("end_ms"),
        pl.when(lost).then(limited_end).otherwise("finish_ms").alias("finish_ms"),
    ).filter(pl.col("start_ms") < pl.col("end_ms"))


def certain(runs: pl.DataFrame) -> pl.DataFrame:
    """Return ``runs`` (``prepare``) for as long as each is known to have run.

    A run whose start and end are local times in a repeated hour may have been later (``time_doubt_s``).
    """
    doubt_ms = pl.col("time_doubt_s").fill_null(0) * 1000
    later = pl.max_horizontal("start_ms", pl.col("begin_ms") + doubt_ms)
    return (
        credible(runs)
        .with_columns(pl.when(doubt_ms > 0).then(later).otherwise("start_ms").alias("start_ms"))
        .filter(pl.col("start_ms") < pl.col("end_ms"))
    )


def uncertain(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the ``runs`` (``prepare``) of which the time is open, for as long as they may have run."""
    doubt_ms = pl.col("time_doubt_s").fill_null(0) * 1000
    return runs.filter(doubt_ms > 0).with_columns(pl.col("end_ms") + doubt_ms, pl.col("finish_ms") + doubt_ms)


def lost_time(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs with time that is not credible, with its start as ``lost_ms``; they end at ``end_ms``."""
    ends = credible(runs).select("run", pl.col("end_ms").alias("lost_ms"))
    joined = runs.join(ends, on="run", how="left", maintain_order="left")
    return joined.with_columns(pl.col("lost_ms").fill_null(pl.col("start_ms"))).filter(
        pl.col("lost_ms") < pl.col("end_ms")
    )


def behind(query: WasteQuery, clusters: Iterable[str | None], now: datetime) -> dict[str, datetime]:
    """Return the clusters with old accounting, and its end. Checks those of the query, by default ``clusters``."""
    end = min(query.until, now)
    named = {*query.clusters} or {name for name in clusters if name}
    ends = {name: query.known_until[name] for name in sorted(named) if name in query.known_until}
    return {name: moment for name, moment in ends.items() if (end - moment).total_seconds() > FRESH_S}


def caution(query: WasteQuery, jobs: pl.DataFrame, now: datetime) -> str:
    """Return a note if accounting ends before the interval, else ``""``. ``jobs``: jobs of the interval."""
    latest = behind(query, jobs["cluster"].unique(), now)
    if not latest:
        return ""
    where = [f"{named(moment, query.zone)}{f' ({name})' if len(latest) > 1 else ''}" for name, moment in latest.items()]
    rest = "jobs are counted until then, and later jobs are missing"
    return f"accounting is known up to {', '.join(where)}: {rest}"


def _selected(query: WasteQuery) -> pl.Expr:
    conditions = [
        pl.col(name).is_in(list(values)).fill_null(value=False) for name, values in query.filters.items() if values
    ]
    return pl.all_horizontal(conditions) if conditions else pl.lit(value=True)


def nodes_of(runs: pl.DataFrame) -> pl.DataFrame:
    """Return ``run``, ``node``: one row per node of each run; none if the node list is unknown or invalid."""
    lists = runs["node_list"].drop_nulls().unique()
    names = pl.DataFrame(
        {"node_list": lists, "node": [_expand(text) for text in lists]},
        schema={"node_list": pl.String(), "node": pl.List(pl.String())},
    )
    return (
        runs.select("run", "node_list")
        .join(names, on="node_list", how="inner", maintain_order="left")
        .explode("node", empty_as_null=False)
        .select("run", "node")
    )


def _expand(text: str) -> list[str]:
    try:
        # Samples have short node names.
        return [name.split(".", 1)[0] for name in hostlist.expand(text)]
    except ValueError:
        return []
