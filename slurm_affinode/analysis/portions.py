"""The part of a result that belongs to one user or account: nothing in it is about others. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import polars as pl

from slurm_affinode.analysis.result import DataQuality, WasteResult

LEAST_USERS = 5
"""Fewest users or accounts of a ranking: in a smaller one, the figures of the others could be concluded."""
_SUMS = (
    "gpu_hours_allocated", "gpu_hours_measured", "gpu_hours_unknown", "gpu_hours_idle", "gpu_hours_low",
    "gpu_hours_busy", "idle_mem_gib_h", "idle_cost",
)  # fmt: skip
_KEY = ("cluster", "job_id", "submit")


@dataclass(frozen=True, slots=True)
class Rank:
    """Place of a user or account among all of them, without names."""

    place: int
    """1: most idle GPU-hours."""
    count: int
    median_share: float | None
    """Median of the idle fractions of the allocated GPU-hours; ``None`` if nothing was measured."""


def portions(result: WasteResult, by: str) -> Iterator[tuple[str, WasteResult]]:
    """Yield name and part of each user or account (``by``: ``user`` or ``account``), most idle GPU-hours first.

    A part has totals, runs, timelines, suspensions, and for an account its users (``groups["user"]``). What concerns
    the whole cluster is absent: capacity, waits, unmet demand, GPUs, data quality, model servers, trend.
    """
    groups = result.groups.get(by)
    if groups is None or result.jobs.is_empty():
        return
    jobs = result.jobs.filter(pl.col(by).is_not_null()).partition_by(by, as_dict=True)
    timelines = _by_owner(result.timelines, result.jobs, by)
    asleep = {} if result.suspensions is None else result.suspensions.partition_by(by, as_dict=True)
    users = _users(result.jobs) if by == "account" else {}
    for row in groups.filter(pl.col("name").is_not_null()).iter_rows(named=True):
        name = row["name"]
        runs = jobs.get((name,))
        if runs is None:
            continue
        total = {key: value for key, value in row.items() if key != "name"}
        total |= {"users": runs["user"].drop_nulls().n_unique(), "unallocated_gpu_hours": None}
        total["gpu_hours_capacity"] = None
        yield name, replace(
            without_runs(result, by, name), total=total, jobs=runs,
            groups={"user": users[(name,)]} if (name,) in users else {},
            timelines=timelines.get((name,), result.timelines.clear()),
            suspensions=None if result.suspensions is None else asleep.get((name,), result.suspensions.clear()),
        )  # fmt: skip


def without_runs(result: WasteResult, by: str, name: str) -> WasteResult:
    """Return the part of a user or account that had no run in the interval."""
    query = replace(result.query, users=(name,)) if by == "user" else replace(result.query, accounts=(name,))
    return replace(
        result, query=query, total={}, jobs=result.jobs.clear(), groups={}, over_time=result.over_time.clear(),
        idle_fraction_histogram=result.idle_fraction_histogram.clear(),
        window_histogram=result.window_histogram.clear(), timelines=result.timelines.clear(),
        quality=DataQuality(result.quality.samples, 0, 0, 0, 0, {}, {}, 0.0), suspensions=None, waits=None, demand=None,
        working_hours=None, gpus=None, gpu_runs=None, trend=None, servers=None,
    )  # fmt: skip


def _by_owner(timelines: pl.DataFrame, jobs: pl.DataFrame, by: str) -> dict[tuple[object, ...], pl.DataFrame]:
    if timelines.is_empty():
        return {}
    owned = timelines.join(jobs.select(*_KEY, by), on=_KEY, how="inner", maintain_order="left")
    parts = owned.partition_by(by, as_dict=True)
    return {name: part.drop(by) for name, part in parts.items()}


def _users(jobs: pl.DataFrame) -> dict[tuple[object, ...], pl.DataFrame]:
    """Return the users of each account with their sums; a sum of unknown figures only is unknown."""
    sums = [pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name) for name in _SUMS]
    frame = jobs.group_by("account", "user", maintain_order=True).agg(pl.len().alias("jobs"), *sums)
    ordered = frame.sort("gpu_hours_idle", "user", descending=[True, False], nulls_last=True)
    return ordered.rename({"user": "name"}).partition_by("account", as_dict=True, include_key=False)


def ranks(groups: pl.DataFrame) -> dict[str, Rank]:
    """Return the place of each name of a grouping by idle GPU-hours; none if it has fewer than ``LEAST_USERS``.

    Names with equal hours share a place. Names without a measurement have none.
    """
    named_groups = groups.filter(pl.col("name").is_not_null(), pl.col("gpu_hours_idle").is_not_null())
    if named_groups.height < LEAST_USERS:
        return {}
    shares = named_groups.filter(pl.col("gpu_hours_allocated") > 0).select(
        pl.col("gpu_hours_idle") / pl.col("gpu_hours_allocated")
    )
    values = shares.to_series().to_list()
    middle = median(values) if values else None
    places = named_groups.select(
        "name", pl.col("gpu_hours_idle").rank("min", descending=True).cast(pl.Int64).alias("place")
    )
    return {name: Rank(place, named_groups.height, middle) for name, place in places.iter_rows()}
