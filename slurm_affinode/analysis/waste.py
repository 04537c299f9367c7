"""The analysis: job runs, GPU history and prices of an interval become a ``WasteResult``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl

from slurm_affinode.analysis import allocations as allocating
from slurm_affinode.analysis import capacity, kernel, mapping, measures, overtime, quality, samples, segments, totals
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.prices import NO_PRICES, PriceTable
from slurm_affinode.analysis.quality import Ingest
from slurm_affinode.analysis.result import GROUPINGS, JOB_COLUMNS, MEASURES, WasteQuery, WasteResult
from slurm_affinode.history.store import SampleStore

_DECADE = timedelta(days=3653)

TOP_RUNS = 25
"""Runs that get a timeline."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """Everything between the inputs and the result."""

    runs: pl.DataFrame
    """All runs that overlap the interval, of whatever user."""
    nodes: pl.DataFrame
    index: samples.Index
    devices: pl.DataFrame
    """Those of ``index``, with the name that accounting gives their cluster (``mapping.one_cluster``)."""
    mapped: mapping.Mapped
    gpu_runs: pl.DataFrame
    allocations: segments.Allocations
    buckets: overtime.Buckets
    cells: segments.Cells
    totals: totals.Totals


def analyse(  # noqa: PLR0917 - what goes in, in the order of the rules
    query: WasteQuery,
    jobs: pl.DataFrame,
    allocation_gpus: pl.DataFrame,
    history: SampleStore,
    prices: PriceTable = NO_PRICES,
    ingests: Sequence[Ingest] = (),
    *,
    now: datetime,
    top_runs: int = TOP_RUNS,
    advance: Callable[[int, int], None] | None = None,
) -> WasteResult:
    """Say where the GPU-hours of ``query``'s interval went.

    ``jobs`` (schema ``JOBS``): every run that overlaps the interval, **not** only those that pass the query's filters,
    which are applied here: a GPU that a run shares with another user's is shared also in the report of one user.
    ``allocation_gpus`` (schema ``ALLOCATION_GPUS``): recorded GPU ids. ``ingests``: the journal, for data quality.
    ``now``: where the time of running jobs ends. ``advance`` is told samples done and samples in all.

    The rules are those of ``docs/metrics.md``. Raises ``UnreachableError`` where the history cannot be read.
    """
    joined = _join(query, jobs, allocation_gpus, history, now, advance)
    about = joined.gpu_runs.filter(pl.col("wanted"))
    shares = measures.per_allocation(joined.totals, joined.cells, joined.allocations)
    parts = measures.breakdown(shares, joined.mapped.pairs, about, joined.nodes, joined.devices, prices)
    rows = _jobs(about, parts)
    chosen = _most_idle(about, rows, top_runs)
    total = _total(query, joined, about, parts)
    return WasteResult(
        query=query,
        generated=now,
        currency=prices.currency,
        total=total,
        jobs=rows.select(*JOB_COLUMNS, *MEASURES),
        groups=_groups(about, parts),
        over_time=overtime.over_time(joined.buckets, joined.totals, joined.cells, joined.allocations, about),
        bucket_s=joined.buckets.width_s,
        idle_fraction_histogram=overtime.idle_fraction_histogram(rows),
        window_histogram=overtime.window_histogram(joined.totals, known=total["gpu_hours_idle"] is not None),
        timelines=_timelines(query, joined, chosen),
        quality=quality.describe(
            quality.Evidence(
                runs=joined.runs.filter(pl.col("wanted")),
                about=about,
                rows=rows,
                nodes=joined.nodes,
                devices=joined.devices,
                index=joined.index,
                mapped=joined.mapped,
                allocations=joined.allocations,
                cells=joined.cells,
                totals=joined.totals,
                query=query,
                shares=shares,
                prices=prices,
                ingests=tuple(ingests),
            )
        ),
        prices={model: prices.of(model) for model in sorted(parts["gpu_model"].drop_nulls().unique().to_list())},
        price_note=prices.note,
        accounting_note=job_runs.caution(query, jobs, now),
    )


def _join(  # noqa: PLR0917
    query: WasteQuery,
    jobs: pl.DataFrame,
    allocation_gpus: pl.DataFrame,
    history: SampleStore,
    now: datetime,
    advance: Callable[[int, int], None] | None,
) -> _Joined:
    index = samples.read_index(history, query.since, query.until, max_gap_steps=query.thresholds.max_gap_steps)
    runs = job_runs.prepare(jobs, query, now)
    nodes = job_runs.nodes_of(runs)
    devices, mapped = mapping.of_index(index, runs, nodes, allocation_gpus)
    allocations = allocating.intervals(runs, mapped)
    part = allocating.taking_part(devices, mapped, allocations, query.clusters)
    buckets = _buckets(query, runs)
    active = np.flatnonzero(part)
    cells = segments.build(
        allocations,
        taking_part=part,
        since=job_runs.epoch_ms(query.since),
        until=job_runs.epoch_ms(query.until),
        cut_device=np.repeat(active, buckets.count),
        cut_time=np.tile(buckets.starts, len(active)),
    )
    done = 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        if advance is not None:
            advance(done, index.rows)

    summed = kernel.run_all(index, allocations, cells, query.thresholds, report)
    gpu_runs = allocating.gpu_runs(runs, mapped)
    return _Joined(runs, nodes, index, devices, mapped, gpu_runs, allocations, buckets, cells, summed)


def _buckets(query: WasteQuery, runs: pl.DataFrame) -> overtime.Buckets:
    """Buckets of the interval. Decades are asked for to get everything: theirs reach as far as runs do."""
    since, until = query.since, query.until
    if until - since > _DECADE and not runs.is_empty():
        first, last = runs.select(pl.col("start_ms").min(), pl.col("end_ms").max()).row(0)
        since, until = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (first, last))
    return overtime.Buckets.of(since, until, query.zone)


def _jobs(about: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    found = measures.per_run(parts)
    rows = found.join(about.drop("gpu_type"), on="run", how="inner", maintain_order="left")
    return rows.sort(
        "gpu_hours_idle", "gpu_hours_allocated", "cluster", "job_id", "submit",
        descending=[True, True, False, False, False], nulls_last=True,
    )  # fmt: skip


def _groups(about: pl.DataFrame, parts: pl.DataFrame) -> Mapping[str, pl.DataFrame]:
    of_runs = ("user", "account", "partition", "qos", "cluster")
    known = parts.join(about.select("run", *of_runs), on="run", how="left", maintain_order="left")
    return {by: measures.aggregate(known, [by]).rename({by: "name"}) for by in GROUPINGS}


def _total(
    query: WasteQuery, joined: _Joined, about: pl.DataFrame, parts: pl.DataFrame
) -> Mapping[str, float | int | None]:
    total: dict[str, float | int | None] = measures.aggregate(parts).row(0, named=True)
    total["users"] = about["user"].drop_nulls().n_unique()
    # Of the time that nobody is known to hold, no user or partition has a part.
    partial = bool(query.partitions or query.accounts or query.users)
    known = bool(joined.index.rows) and not partial
    free = _not_allocated_h(query, joined, about, parts) if known else None
    allocated = total["gpu_hours_allocated"]
    total["unallocated_gpu_hours"] = free
    total["gpu_hours_capacity"] = None if free is None else free + (allocated or 0.0)
    return total


def _not_allocated_h(query: WasteQuery, joined: _Joined, about: pl.DataFrame, parts: pl.DataFrame) -> float:
    lacking = (
        parts.drop_nulls("lacking")
        .select("run", "node", pl.col("lacking").alias("gpus"))
        .join(about.select("run", "cluster", "start_ms", "end_ms"), on="run", how="inner")
    )
    gaps = query.thresholds.max_gap_steps
    return capacity.not_allocated_ms(joined.cells, joined.devices, lacking, max_gap_steps=gaps) / measures.MS_PER_HOUR


def _most_idle(about: pl.DataFrame, rows: pl.DataFrame, count: int) -> pl.DataFrame:
    idle = rows.filter(pl.col("gpu_hours_idle") > 0).head(count)
    return idle.select("run").join(about, on="run", how="inner", maintain_order="left")


def _timelines(query: WasteQuery, joined: _Joined, chosen: pl.DataFrame) -> pl.DataFrame:
    if chosen.is_empty():
        return pl.DataFrame(schema=overtime.TIMELINE)
    pieces = joined.index.pieces
    slots = overtime.slots_of(chosen, joined.allocations, joined.cells, pieces, len(joined.index.devices))
    blocks = samples.blocks_of(joined.index, slots.pieces)
    return overtime.timelines(slots, blocks, pieces, query.thresholds, chosen)
