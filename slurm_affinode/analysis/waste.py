"""The waste analysis: runs, GPU samples and prices of an interval in, a ``WasteResult`` out.

Runs are mapped to allocations (intervals on devices) and joined with the samples. The result is compared with capacity,
the time for which GPUs are known to have existed (rule ``capacity`` in ``docs/metrics.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl

from slurm_affinode.analysis import (
    data_quality,
    demand,
    mapping,
    measures,
    over_time,
    result,
    samples,
    segments,
    slots,
    working_hours,
)
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.data_quality import Ingest
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.mapping import Mapped
from slurm_affinode.analysis.prices import NO_PRICES, PriceTable
from slurm_affinode.analysis.result import (
    GROUPINGS,
    JOB_COLUMNS,
    MAPPINGS,
    MEASURES,
    RUN_MEASURES,
    WAITED_S,
    StartedWaits,
    UnmetDemand,
    WasteQuery,
    WasteResult,
)
from slurm_affinode.analysis.segments import Allocations, Flags, Floats, Ints
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.metrics.parquet.store import SampleStore


def find_gpu_runs(runs: pl.DataFrame, mapped: Mapped) -> pl.DataFrame:
    """Return the runs (``runs.prepare``) that had a GPU by accounting, labels or records.

    Adds ``mapping`` (one of ``MAPPINGS``; the weakest evidence if there are several) and ``devices`` (known GPUs).
    """
    ways = mapped.pairs.group_by("run").agg(
        pl.col("mapping").cast(pl.Enum(MAPPINGS)).max().cast(pl.String),
        pl.col("slot").n_unique().cast(pl.Int64).alias("devices"),
    )
    return (
        runs.join(ways, on="run", how="left", maintain_order="left")
        .filter((pl.col("gpus").fill_null(0) > 0) | pl.col("mapping").is_not_null())
        .with_columns(pl.col("mapping").fill_null("unknown"), pl.col("devices").fill_null(0))
    )


def intervals(runs: pl.DataFrame, mapped: Mapped) -> Allocations:
    """Return the allocations of runs and devices, sorted by (device, start).

    A run has one on each of its devices; several or none if the device does not always count.
    """
    frame = slots.clipped(
        mapped.pairs.join(runs.select("run", "start_ms", "end_ms", "selected"), on="run"), mapped.counted
    ).sort("at", "start_ms", "run")
    return Allocations.of(
        frame["at"].to_numpy(),
        frame["run"].to_numpy(),
        frame["start_ms"].to_numpy(),
        frame["end_ms"].to_numpy(),
        frame["selected"].to_numpy(),
    )


def taking_part(devices: pl.DataFrame, mapped: Mapped, allocations: Allocations, clusters: tuple[str, ...]) -> Flags:
    """Return which devices the report counts.

    Excluded are devices of other clusters, and parents of MIG instances unless a run held the parent before it was
    divided.
    """
    flags = np.ones(len(devices), np.bool_)
    flags[mapped.left_out.to_numpy()] = False
    flags[allocations.device] = True
    if clusters:
        flags &= np.array([name is None or name in clusters for name in devices["cluster"].to_list()], np.bool_)
    return flags


_NEGLIGIBLE = 1e-6
"""Numbers of GPUs up to this are rounding errors of sums of fractions."""

Spans = tuple[Ints, Ints, Ints, Floats]
"""Columns: place, start and end (ms), number of GPUs (negative: in use)."""


def not_allocated_ms(existing: pl.DataFrame, allocated_slots: pl.DataFrame, lacking: pl.DataFrame) -> float:
    """Return the GPU time, ms, of GPUs that are known to have existed while no run held them.

    ``existing``: from ``_device_spans``. ``allocated_slots``: ``slot``, ``start_ms``, ``end_ms`` of runs. ``lacking``:
    GPUs of runs that are mapped to no device: ``cluster``, ``node`` (None: unknown), ``gpus``, ``start_ms``,
    ``end_ms``. They are assumed to be free GPUs of that node, or of the cluster, as far as there are any.
    """
    free = _remaining(_spans(slots.united(existing), 1.0), _spans(slots.united(allocated_slots), -1.0))
    if lacking.is_empty():
        return float((free[2] - free[1]).sum())
    # The devices of a slot are on one node.
    places = pl.DataFrame({"slot": free[0]}, schema={"slot": pl.Int64()}).join(
        existing.unique("slot", keep="first"), on="slot", how="left", maintain_order="left"
    )
    both = pl.concat([places.select("cluster", "node"), lacking.select("cluster", "node")])
    node, cluster = (
        both.select(pl.struct(by).rank("dense").cast(pl.Int64)).to_series().to_numpy()
        for by in (["cluster", "node"], ["cluster"])
    )
    of_run = np.arange(places.height, both.height)
    placed = lacking["node"].is_not_null().to_numpy()
    lacking_spans = tuple(lacking[name].to_numpy() for name in ("start_ms", "end_ms"))
    gpus = -lacking["gpus"].to_numpy().astype(np.float64)
    unallocated = _remaining(
        (node[: places.height], *free[1:]),
        (node[of_run][placed], lacking_spans[0][placed], lacking_spans[1][placed], gpus[placed]),
    )
    if not placed.all():
        cluster_of = np.zeros(int(node.max()) + 1, np.int64)
        cluster_of[node] = cluster
        unallocated = _remaining(
            (cluster_of[unallocated[0]], *unallocated[1:]),
            (cluster[of_run][~placed], lacking_spans[0][~placed], lacking_spans[1][~placed], gpus[~placed]),
        )
    return float(((unallocated[2] - unallocated[1]) * unallocated[3]).sum())


def _spans(frame: pl.DataFrame, gpus: float) -> Spans:
    place, start, end = (frame[name].to_numpy() for name in ("slot", "start_ms", "end_ms"))
    return place, start, end, np.full(len(place), gpus)


def _device_spans(joined: _Joined, max_gap_steps: float) -> pl.DataFrame:
    """Return ``slot``, ``cluster``, ``node``, ``start_ms``, ``end_ms``: when each device is known to have existed.

    A device exists from its first to its last sample, and up to a limit of the interval less than a gap away.
    """
    since, until = joined.cells.since, joined.cells.until
    first, last = (pl.col(name).dt.epoch("ms") for name in ("first", "last"))
    sampled_to, near = last + pl.col("step_ms"), (pl.col("step_ms") * max_gap_steps).ceil().cast(pl.Int64)
    spans = joined.devices.with_columns(joined.mapped.slot_of, pl.Series("counts", joined.taking_part)).select(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("at"),
        "slot",
        "cluster",
        "node",
        "counts",
        pl.when(first - since <= near).then(since).otherwise(first).clip(since).alias("start_ms"),
        pl.when(until - sampled_to <= near).then(until).otherwise(sampled_to).clip(upper_bound=until).alias("end_ms"),
    )
    spans = spans.filter("counts", pl.col("start_ms") < pl.col("end_ms"))
    return slots.clipped(spans, joined.mapped.counted)


def _remaining(free: Spans, taken_spans: Spans) -> Spans:
    """Return the periods in which ``free`` exceeds ``taken_spans``, and the difference."""
    place, start, end, gpus = (np.concatenate([a, b]) for a, b in zip(free, taken_spans, strict=True))
    places, time, change = np.concatenate([place, place]), np.concatenate([start, end]), np.concatenate([gpus, -gpus])
    order = np.lexsort((time, places))
    places, time, net = places[order], time[order], np.cumsum(change[order])
    keep = (places[1:] == places[:-1]) & (time[1:] > time[:-1]) & (net[:-1] > _NEGLIGIBLE)
    return places[:-1][keep], time[:-1][keep], time[1:][keep], net[:-1][keep]


_DECADE = timedelta(days=3653)

Fold = Callable[[samples.Index, Allocations, segments.Cells, result.Thresholds, Callable[[int], None]], result.Totals]
"""``kernel.run_all``, or a function that gives the same totals."""

TOP_RUNS = 25
"""Runs that get a timeline."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """Intermediate results of the analysis."""

    runs: pl.DataFrame
    """All runs that overlap the interval, of all users."""
    nodes: pl.DataFrame
    index: samples.Index
    devices: pl.DataFrame
    """Devices of ``index``, with accounting's name of their cluster (``mapping.with_slurm_cluster``)."""
    mapped: mapping.Mapped
    gpu_runs: pl.DataFrame
    allocations: segments.Allocations
    taking_part: Flags
    """The devices that the report counts."""
    buckets: over_time.Buckets
    working: tuple[Ints, list[bool]] | None
    """``working_hours.edges``; ``None``: hours are not divided by working hours."""
    cells: segments.Cells
    totals: result.Totals


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
    fold: Fold = kernel.run_all,
) -> WasteResult:
    """Compute where the GPU-hours of the query's interval went, by the rules of ``docs/metrics.md``.

    ``jobs`` (schema ``JOBS``): every run that overlaps the interval, **not** only those that pass the query's filters.
    The filters are applied here, because a GPU shared with another user's run is also shared in the report of one user.
    ``allocation_gpus`` (schema ``ALLOCATION_GPUS``): recorded GPU IDs. ``ingests``: the ingest journal, for data
    quality. ``now``: end of running jobs. ``advance`` is called with the samples done and their total. ``fold`` may use
    other machines.

    Raises ``UnreachableError`` if the samples cannot be read.
    """
    joined = _join(query, jobs, allocation_gpus, history, now, advance, fold)
    about = joined.gpu_runs.filter(pl.col("selected"))
    shares = measures.per_allocation(joined.totals, joined.cells, joined.allocations)
    shares = measures.without_suspended(shares, joined.mapped.pairs, joined.runs)
    kept_share = shares["kept_share"].to_numpy()
    parts = measures.breakdown(shares, joined.mapped.pairs, about, joined.nodes, joined.devices, prices)
    rows = _jobs(about, parts).join(measures.of_runs(shares, about), on="run", how="left", maintain_order="left")
    chosen = _most_idle(about, rows, top_runs)
    total = _total(query, joined, about, parts)
    return WasteResult(
        query=query,
        generated=now,
        currency=prices.currency,
        total=total,
        jobs=rows.select(*JOB_COLUMNS, *MEASURES, *RUN_MEASURES),
        groups=_groups(about, parts),
        over_time=over_time.over_time(
            joined.buckets, joined.totals, joined.cells, joined.allocations, about, kept_share
        ),
        bucket_s=joined.buckets.width_s,
        idle_fraction_histogram=over_time.idle_fraction_histogram(rows),
        window_histogram=over_time.window_histogram(joined.totals, is_known=total["gpu_hours_idle"] is not None),
        timelines=_timelines(query, joined, chosen, kept_share),
        quality=data_quality.describe(
            data_quality.Coverage(
                runs=joined.runs.filter(pl.col("selected")),
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
        waits=_waits(query, about),
        working_hours=_working_hours(joined, about, kept_share),
        gpus=measures.gpu_hours(shares, about, joined.devices, joined.taking_part),
        gpu_runs=measures.gpu_runs(shares, rows, joined.devices, joined.taking_part),
        gpu_memory=measures.gpu_memory(joined.devices, samples.memory_mib(joined.index), joined.taking_part),
        demand=_demand(query, joined, about, kept_share, is_known=total["gpu_hours_idle"] is not None),
    )


def _demand(
    query: WasteQuery, joined: _Joined, about: pl.DataFrame, kept_share: Floats, *, is_known: bool
) -> UnmetDemand | None:
    if query.users or query.accounts:  # jobs of all users wait for the same GPUs
        return None
    models = joined.devices.select(measures.model_name().alias("model")).to_series()
    idle = demand.IdleTime(joined.totals, joined.cells, joined.allocations, kept_share, models)
    return demand.unmet(about, epoch_ms(query.since), epoch_ms(query.until), idle if is_known else None)


def _working_hours(joined: _Joined, about: pl.DataFrame, kept_share: Floats) -> pl.DataFrame | None:
    if joined.working is None:
        return None
    times, inside = joined.working
    parts = over_time.Buckets(0, times)  # of several lengths
    hours = over_time.over_time(parts, joined.totals, joined.cells, joined.allocations, about, kept_share)
    return working_hours.divided(hours, times, inside)


def _waits(query: WasteQuery, about: pl.DataFrame) -> StartedWaits | None:
    """Return the waits of the runs that started in the interval; ``about``: GPU runs that pass the filters."""
    measured_runs = about.filter(
        pl.col("start").is_between(query.since, query.until, closed="left") & pl.col("eligible").is_not_null()
    ).select("gpus", ((pl.col("start") - pl.col("eligible")).dt.total_milliseconds() / 1000).clip(0).alias("wait_s"))
    if measured_runs.is_empty():
        return None
    waited = measured_runs.filter(pl.col("wait_s") > WAITED_S)
    hours = (measured_runs["gpus"] * measured_runs["wait_s"]).sum() / 3600
    wait = pl.col("wait_s")
    median, longest = waited.select(wait.median().alias("median"), wait.max().alias("longest")).fill_null(0.0).row(0)
    return StartedWaits(measured_runs.height, waited.height, float(hours), median, longest)


def _join(  # noqa: PLR0917
    query: WasteQuery,
    jobs: pl.DataFrame,
    allocation_gpus: pl.DataFrame,
    history: SampleStore,
    now: datetime,
    advance: Callable[[int, int], None] | None,
    fold: Fold,
) -> _Joined:
    index = samples.read_index(history, query.since, query.until, max_gap_steps=query.thresholds.max_gap_steps)
    runs = job_runs.prepare(jobs, query, now)
    nodes = job_runs.nodes_of(runs)
    devices, mapped = mapping.of_index(index, job_runs.certain(runs), nodes, allocation_gpus, job_runs.uncertain(runs))
    allocations = intervals(job_runs.certain(runs), mapped)
    part = taking_part(devices, mapped, allocations, query.clusters)
    allocations = allocations.take(part[allocations.device])
    buckets = _buckets(query, runs)
    working = None
    if query.working is not None:
        working = working_hours.edges(query.working, query.since, query.until, query.zone)
    cuts = buckets.starts if working is None else np.union1d(buckets.starts, working[0][:-1])
    active = np.flatnonzero(part)
    cells = segments.build(
        allocations,
        taking_part=part,
        since=epoch_ms(query.since),
        until=epoch_ms(query.until),
        cut_device=np.repeat(active, len(cuts)),
        cut_time=np.tile(cuts, len(active)),
    )
    finished = 0

    def report(rows: int) -> None:
        nonlocal finished
        finished += rows
        if advance is not None:
            advance(finished, index.rows)

    summed = fold(index, allocations, cells, query.thresholds, report)
    gpu_runs = find_gpu_runs(runs, mapped)
    return _Joined(runs, nodes, index, devices, mapped, gpu_runs, allocations, part, buckets, working, cells, summed)


def _buckets(query: WasteQuery, runs: pl.DataFrame) -> over_time.Buckets:
    """Return the buckets of the interval. If it exceeds a decade ("everything"), they cover only the time with runs."""
    since, until = query.since, query.until
    if until - since > _DECADE and not runs.is_empty():
        first, last = runs.select(pl.col("start_ms").min(), pl.col("end_ms").max()).row(0)
        since, until = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (first, last))
    return over_time.Buckets.of(since, until, query.zone)


def _jobs(about: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    measured = measures.per_run(parts)
    rows = measured.join(about.drop("gpu_type"), on="run", how="inner", maintain_order="left")
    return rows.sort(
        "gpu_hours_idle", "gpu_hours_allocated", "cluster", "job_id", "submit",
        descending=[True, True, False, False, False], nulls_last=True,
    )  # fmt: skip


def _groups(about: pl.DataFrame, parts: pl.DataFrame) -> Mapping[str, pl.DataFrame]:
    of_runs = ("user", "account", "partition", "qos", "cluster")
    described_parts = parts.join(about.select("run", *of_runs), on="run", how="left", maintain_order="left")
    return {by: measures.aggregate(described_parts, [by]).rename({by: "name"}) for by in GROUPINGS}


def _total(
    query: WasteQuery, joined: _Joined, about: pl.DataFrame, parts: pl.DataFrame
) -> Mapping[str, float | int | None]:
    total: dict[str, float | int | None] = measures.aggregate(parts).row(0, named=True)
    total["users"] = about["user"].drop_nulls().n_unique()
    # Unallocated time belongs to no user, account or partition.
    partial = bool(query.partitions or query.accounts or query.users)
    existing = _device_spans(joined, query.thresholds.max_gap_steps)
    free = None if partial or existing.is_empty() else _not_allocated_h(joined, existing, about, parts)
    allocated = total["gpu_hours_allocated"]
    total["unallocated_gpu_hours"] = free
    total["gpu_hours_capacity"] = None if free is None else free + (allocated or 0.0)
    return total


def _not_allocated_h(joined: _Joined, existing: pl.DataFrame, about: pl.DataFrame, parts: pl.DataFrame) -> float:
    lacking = (
        parts.drop_nulls("lacking")
        .select("run", "node", pl.col("lacking").alias("gpus"))
        .join(about.select("run", "cluster", "start_ms", "end_ms"), on="run", how="inner")
    )
    # What a lost job held before is assumed to be held, by it or by others, as far as others are not known to hold it.
    lost = (
        parts.filter(pl.col("devices") > 0)
        .select("run", "node", pl.col("devices").alias("gpus"))
        .join(
            job_runs.lost_time(about).select("run", "cluster", pl.col("lost_ms").alias("start_ms"), "end_ms"), on="run"
        )
    )
    lacking = pl.concat([lacking, lost.select(lacking.columns)], how="vertical_relaxed")
    times = job_runs.certain(joined.runs).select("run", "start_ms", "end_ms")
    # A run that holds one device of a slot holds the slot.
    pair_spans = joined.mapped.pairs.join(times, on="run")
    return not_allocated_ms(existing, pair_spans, lacking) / measures.MS_PER_HOUR


def _most_idle(about: pl.DataFrame, rows: pl.DataFrame, count: int) -> pl.DataFrame:
    idle = rows.filter(pl.col("gpu_hours_idle") > 0).head(count)
    return idle.select("run").join(about, on="run", how="inner", maintain_order="left")


def _timelines(query: WasteQuery, joined: _Joined, chosen: pl.DataFrame, kept_share: Floats) -> pl.DataFrame:
    if chosen.is_empty():
        return pl.DataFrame(schema=over_time.TIMELINE)
    pieces = joined.index.pieces
    slots = over_time.slots_of(chosen, joined.allocations, joined.cells, pieces, len(joined.index.devices), kept_share)
    blocks = samples.blocks_of(joined.index, slots.pieces)
    return over_time.timelines(slots, blocks, pieces, query.thresholds, chosen)
