"""Measures per run, user, account, partition, QOS, node and GPU model, from sums per cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from slurm_affinode.analysis.prices import PriceTable
from slurm_affinode.analysis.result import MEASURES, RUN_MEASURES, SUMS, Totals
from slurm_affinode.analysis.segments import Allocations, Cells, Flags, Floats, Ints, ranges

MS_PER_HOUR = 3_600_000.0
MIB_PER_GIB = 1024.0

_OWNERS = 4096
"""Number of allocations summed at a time."""
_BY_MAPPING = {"labels": "labels_ms", "recorded": "recorded_ms", "whole-node": "whole_node_ms"}
_NEGLIGIBLE = 1e-6
"""Numbers of GPUs up to this are rounding errors of sums of parts."""
COMPLETE = 0.9
"""Share of the allocated time that has to be measured to say that there was no activity."""
GPUS: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "node": pl.String(),
    "gpu": pl.String(),
    "gpu_model": pl.String(),
    "gpu_hours_allocated": pl.Float64(),
    "gpu_hours_busy": pl.Float64(),
    "gpu_hours_low": pl.Float64(),
    "gpu_hours_idle": pl.Float64(),
    "gpu_hours_unknown": pl.Float64(),
    "job_id": pl.Int64(),
    "submit": pl.Datetime("ms", "UTC"),
}
"""Columns of ``gpu_hours``. The last two name the run with most idle time on the GPU, of several such runs the one that
held it longest; None if no run held it."""
GPU_MEMORY: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "gpu_model": pl.String(),
    "memory_gib": pl.Float64(),
}
"""Columns of ``gpu_memory``."""
_ADDED = ("allocated_ms", *_BY_MAPPING.values(), *SUMS, "windows")


def owner_pairs(cells: Cells) -> tuple[Ints, Ints, Floats]:
    """Return cell, allocation and share (1 / sharers) for each allocation that holds a cell."""
    cell = np.repeat(np.arange(len(cells), dtype=np.int64), cells.sharers)
    return cell, cells.owners, 1.0 / cells.sharers[cell]


def partly_pairs(totals: Totals, cells: Cells, allocations: Allocations) -> tuple[Ints, Ints, Floats]:
    """Return row of ``totals.partly_*``, allocation and share for each sharer entitled to part of such a row."""
    count = cells.sharers[totals.partly_cell]
    row = np.repeat(np.arange(len(count), dtype=np.int64), count)
    owner = cells.owners[ranges(cells.owner_offset[totals.partly_cell], count)]
    gets = allocations.start[owner] <= totals.partly_time[row]
    return row[gets], owner[gets], 1.0 / count[row[gets]]


def per_allocation(totals: Totals, cells: Cells, allocations: Allocations) -> pl.DataFrame:
    """Return one row per allocation, in the same order.

    Columns: ``run``, ``at``, ``from_ms``, ``to_ms``, ``held_ms`` (share of the device's time), the allocation's share
    of ``SUMS``, ``fb_peak`` (MiB; None if unknown), ``windows``, ``longest_ms``.
    """
    count = len(allocations)
    cell, owner, share = owner_pairs(cells)
    row, partly_owner, partly_share = partly_pairs(totals, cells, allocations)
    columns: dict[str, object] = {"run": allocations.run, "at": allocations.device}
    columns |= {"from_ms": allocations.start, "to_ms": allocations.end}
    length = (cells.end - cells.start)[cell]
    columns["held_ms"] = np.bincount(owner, weights=length * share, minlength=count)
    sums, peak = _shares(totals, cell, owner, share, count)
    if len(row):
        for column, partly in zip(sums, totals.partly_sums.T, strict=True):
            np.add(column, np.bincount(partly_owner, weights=partly[row] * partly_share, minlength=count), out=column)
    columns |= dict(zip(SUMS, sums, strict=True))
    columns |= {"fb_peak": peak, "windows": totals.windows, "longest_ms": totals.longest_ms}
    return pl.DataFrame(columns).with_columns(pl.col("fb_peak").fill_nan(None))


def without_suspended(shares: pl.DataFrame, pairs: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return ``shares`` (``per_allocation``) without idle time in which Slurm may have suspended the run.

    ``pairs``: ``Mapped.pairs``; ``runs``: ``run``, ``suspended_s``. Accounting does not have when a run was suspended,
    so as much of the idle time of each of its GPUs (slots) is unknown. Adds ``slot``, ``suspended`` (that time, ms) and
    ``kept_share`` (the fraction of idle time left).
    """
    times = runs.select("run", (pl.col("suspended_s").fill_null(0).clip(0) * 1000.0).alias("most"))
    run_shares = shares.join(times, on="run", how="left", maintain_order="left").with_columns(
        pl.col("most").fill_null(0.0)
    )
    run_shares = run_shares.join(pairs.select("run", "at", "slot"), on=["run", "at"], how="left", maintain_order="left")
    idle = pl.col("idle").sum().over("run", "slot")
    moved = pl.min_horizontal(idle, "most")
    kept_share = pl.when(moved > 0).then(1 - moved / idle).otherwise(1.0)
    # A window has the time of all who share its GPU, its idle time only the share of the run.
    rest = pl.when(kept_share > 0).then(pl.col("longest_ms") - pl.col("most")).otherwise(0)
    longest = rest.clip(0).cast(shares.schema["longest_ms"])
    run_shares = run_shares.with_columns(kept_share.alias("kept_share"))
    return run_shares.with_columns((pl.col("idle") * (1 - pl.col("kept_share"))).alias("suspended")).with_columns(
        pl.col("idle") - pl.col("suspended"),
        *(pl.col(name) * pl.col("kept_share") for name in ("fb_idle", "power_idle")),
        pl.when(pl.col("kept_share") > 0).then("windows").otherwise(0).cast(shares.schema["windows"]).alias("windows"),
        pl.when(pl.col("most") > 0).then(longest).otherwise("longest_ms").alias("longest_ms"),
    ).drop("most")  # fmt: skip


def _shares(totals: Totals, cell: Ints, owner: Ints, share: Floats, count: int) -> tuple[list[Floats], Floats]:
    """Return the shares of ``count`` owners in each of ``SUMS``, and their peaks (NaN if unknown).

    ``cell``, ``owner``, ``share``: from ``owner_pairs``.
    """
    sums, peak = [np.zeros(count) for _ in SUMS], np.full(count, np.nan)
    # Sorted by owner, so that sums follow the memory layout (row by row), in batches that fit into the caches.
    order = np.argsort(owner, kind="stable")
    by = owner[order]
    first = np.flatnonzero(np.append(True, by[1:] != by[:-1])) if len(by) else by
    for low in range(0, len(first), _OWNERS):
        begins = first[low : low + _OWNERS]
        rows = order[begins[0] : first[low + _OWNERS] if low + _OWNERS < len(first) else len(by)]
        shares, peaks = totals.sums.take(cell[rows], axis=0), totals.fb_peak[cell[rows]]
        shares *= share[rows, np.newaxis]
        if len(begins) < len(rows):
            offsets = begins - begins[0]
            shares, peaks = np.add.reduceat(shares, offsets, axis=0), np.fmax.reduceat(peaks, offsets)
        to = by[begins]
        # The owners are almost always consecutive, and a slice is filled twice as fast.
        where = slice(to[0], to[-1] + 1) if to[-1] - to[0] + 1 == len(to) else to
        peak[where] = peaks
        for column, values in zip(sums, shares.T, strict=True):
            column[where] = values
    return sums, peak


def breakdown(  # noqa: PLR0917
    shares: pl.DataFrame,
    pairs: pl.DataFrame,
    runs: pl.DataFrame,
    nodes: pl.DataFrame,
    devices: pl.DataFrame,
    prices: PriceTable,
) -> pl.DataFrame:
    """Return one row per run, node and GPU model, plus rows for GPUs mapped to no device (their number: ``lacking``).

    ``shares``: from ``without_suspended``; ``pairs``: ``Mapped.pairs``; ``runs``: the runs of ``runs.prepare`` covered
    by the report.
    """
    where = devices.with_row_index("at").select(pl.col("at").cast(pl.Int64), "node", model_name().alias("gpu_model"))
    about = runs.select("run", "cluster", "gpus", "gpu_type", (pl.col("end_ms") - pl.col("start_ms")).alias("run_ms"))
    whole = pl.col("gpus").fill_null(0) > 0
    # The devices of one slot are one GPU: each allocation counts for its part.
    length, gpu = pl.col("to_ms") - pl.col("from_ms"), ("run", "slot")
    all_lengths, held_ms = length.sum().over(gpu), pl.col("to_ms").max().over(gpu) - pl.col("from_ms").min().over(gpu)
    per_device = (
        shares.join(about, on="run", how="inner", maintain_order="left")
        .join(where, on="at", how="left", maintain_order="left")
        .join(pairs.select("run", "at", "mapping"), on=["run", "at"], how="left", maintain_order="left")
        .with_columns(
            (length / all_lengths).alias("part"), (pl.col("held_ms") * held_ms / all_lengths).alias("held_ms")
        )
        .with_columns(
            pl.when(whole).then(pl.col("run_ms") * pl.col("part")).otherwise(pl.col("held_ms")).alias("allocated_ms"),
            pl.coalesce("gpu_model", "gpu_type").alias("gpu_model"),
        )
        .with_columns(
            pl.when(pl.col("mapping") == word).then("allocated_ms").otherwise(0.0).alias(name)
            for word, name in _BY_MAPPING.items()
        )
    )
    grouped = per_device.group_by("run", "node", "gpu_model", maintain_order=True).agg(
        pl.col("part").sum().alias("devices"),
        *(pl.col(name).sum() for name in _ADDED),
        pl.col("fb_peak").max(),
        pl.col("longest_ms").max(),
    )
    every = pl.concat([grouped, _unmeasured(grouped, about, nodes, _models_of_nodes(devices))], how="diagonal")
    every = every.with_columns(pl.col(name).fill_null(0) for name in _ADDED)
    return _priced(every, prices)


def model_name() -> pl.Expr:
    """Return the model name used in reports; a MIG instance has a model of its own."""
    instance = pl.concat_str(pl.col("model"), pl.lit(" MIG "), pl.col("mig_profile"))
    return pl.when(pl.col("mig").is_not_null()).then(pl.coalesce(instance, "model")).otherwise(pl.col("model"))


GPU_RUNS: dict[str, pl.DataType] = {"gpu": pl.UInt32(), "run": pl.UInt32()}
"""A run that held a GPU: their rows in ``WasteResult.gpus`` and ``WasteResult.jobs``."""


def gpu_runs(shares: pl.DataFrame, rows: pl.DataFrame, devices: pl.DataFrame, taking_part: Flags) -> pl.DataFrame:
    """Return ``GPU_RUNS``, by GPU and run. ``rows``: the runs in the order of ``WasteResult.jobs``.

    The other parameters are those of ``gpu_hours``.
    """
    places = rows.select("run").with_row_index("place")
    gpus = _gpu_rows(devices, taking_part).select("at").with_row_index("gpu")
    pairs = shares.select("at", "run").unique().join(places, on="run").join(gpus, on="at")
    return pairs.select("gpu", pl.col("place").alias("run")).sort("gpu", "run").cast(dict(GPU_RUNS))  # type: ignore[arg-type]


def _gpu_rows(devices: pl.DataFrame, taking_part: Flags) -> pl.DataFrame:
    """Return the GPUs that take part, by cluster, node and number; ``at``: their rows in ``devices``."""
    label = pl.concat_str(
        pl.coalesce(pl.col("index").cast(pl.String), pl.col("uuid")),
        pl.when(pl.col("mig").is_not_null()).then(pl.concat_str(pl.lit("."), pl.col("mig"))).otherwise(pl.lit("")),
    )
    return (
        devices.with_columns(label.alias("gpu"), model_name().alias("gpu_model"), pl.Series("counts", taking_part))
        .with_row_index("at")
        .with_columns(pl.col("at").cast(pl.Int64))
        .filter("counts")
        .select("at", "cluster", "node", "gpu", "gpu_model", "index", "mig")
        .sort("cluster", "node", "index", "mig", "gpu", nulls_last=True)
    )


def gpu_hours(shares: pl.DataFrame, about: pl.DataFrame, devices: pl.DataFrame, taking_part: Flags) -> pl.DataFrame:
    """Return ``GPUS``, a row for each GPU that takes part, by cluster, node and number.

    ``shares``: from ``without_suspended``; ``about``: the runs of the report. ``gpu`` is the number on the
    node, for a MIG instance with its ID (``0.7``), or the UUID if there is no number. Busy, low and idle hours are None
    if nothing was measured while the GPU was allocated.
    """
    counted = shares.filter(pl.col("run").is_in(about["run"].implode()))
    first = (
        counted.group_by("at", "run")
        .agg(pl.col("idle", "held_ms").sum())
        .sort("idle", "held_ms", "run", descending=[True, True, False])
        .unique("at", keep="first", maintain_order=True)
        .join(about.select("run", "job_id", "submit"), on="run")
        .select("at", "job_id", "submit")
    )
    sums = counted.group_by("at").agg(pl.col("held_ms", "busy", "low", "idle").sum() / MS_PER_HOUR)
    observed_rows = (
        _gpu_rows(devices, taking_part)
        .join(sums, on="at", how="left", maintain_order="left")
        .join(first, on="at", how="left", maintain_order="left")
    )
    measured = pl.col("busy") + pl.col("low") + pl.col("idle")
    held_ms = pl.max_horizontal("held_ms", measured).fill_null(0.0)
    is_known = (measured > 0) | (held_ms == 0)
    states = ("busy", "low", "idle")
    return observed_rows.select(
        "cluster", "node", "gpu", "gpu_model", held_ms.alias("gpu_hours_allocated"),
        *(pl.when(is_known).then(pl.col(name).fill_null(0.0)).alias(f"gpu_hours_{name}") for name in states),
        (held_ms - measured.fill_null(0.0)).alias("gpu_hours_unknown"), "job_id", "submit",
    ).cast(dict(GPUS))  # type: ignore[arg-type]  # fmt: skip


def gpu_memory(devices: pl.DataFrame, memory_mib: Floats, taking_part: Flags) -> pl.DataFrame:
    """Return ``GPU_MEMORY``: the models of the GPUs that take part, with the memory of the smallest GPU of each.

    ``memory_mib``: memory of each device, NaN if unknown. Models without known memory have no row.
    """
    return (
        devices.select("cluster", model_name().alias("gpu_model"), pl.Series("memory_gib", memory_mib / MIB_PER_GIB))
        .filter(pl.Series(taking_part), pl.col("gpu_model").is_not_null(), pl.col("memory_gib").fill_nan(None) > 0)
        .group_by("cluster", "gpu_model")
        .agg(pl.col("memory_gib").min())
        .sort("cluster", "memory_gib", "gpu_model")
        .cast(dict(GPU_MEMORY))  # type: ignore[arg-type]
    )


def _models_of_nodes(devices: pl.DataFrame) -> pl.DataFrame:
    """Return the GPU model of each node with a single model."""
    models = devices.group_by("cluster", "node").agg(model_name().drop_nulls().unique().alias("model"))
    return models.filter(pl.col("model").list.len() == 1).with_columns(pl.col("model").list.first())


def _unmeasured(measured: pl.DataFrame, about: pl.DataFrame, nodes: pl.DataFrame, models: pl.DataFrame) -> pl.DataFrame:
    """Distribute the GPUs of runs that are mapped to no device over the run's nodes.

    Each node is assigned its shortfall from an equal share of the run's GPUs; the shortfalls are scaled to the number
    of GPUs that the run lacks.
    """
    have = measured.group_by("run").agg(pl.col("devices").sum())
    lacking = (
        about.filter(pl.col("gpus").fill_null(0) > 0)
        .join(have, on="run", how="left", maintain_order="left")
        .with_columns((pl.col("gpus") - pl.col("devices").fill_null(0)).alias("lacking"))
        .filter(pl.col("lacking") > _NEGLIGIBLE)
        .join(_joined_models(measured), on="run", how="left", maintain_order="left")
    )
    on_node = measured.group_by("run", "node").agg(pl.col("devices").sum().alias("here"))
    spread = (
        lacking.join(nodes, on="run", how="left", maintain_order="left")
        .join(on_node, on=["run", "node"], how="left", maintain_order="left")
        .with_columns((pl.col("gpus") / pl.len().over("run")).alias("quota"))
        .with_columns((pl.col("quota") - pl.col("here").fill_null(0)).clip(lower_bound=0).alias("short"))
        .filter(pl.col("short") > 0)
        .with_columns((pl.col("lacking") * pl.col("short") / pl.col("short").sum().over("run")).alias("gpus_here"))
        .join(models, on=["cluster", "node"], how="left", maintain_order="left")
    )
    return spread.select(
        "run",
        "node",
        pl.coalesce("model", "gpu_type", "models").alias("gpu_model"),
        pl.col("gpus_here").alias("lacking"),
        (pl.col("gpus_here") * pl.col("run_ms")).alias("allocated_ms"),
    )


def _joined_models(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``run``, ``models``: the names of its GPU models in order, joined; no row if none is known."""
    names = frame.select("run", pl.col("gpu_model").alias("models")).drop_nulls().unique()
    several = pl.struct("run").is_duplicated()
    joined = names.filter(several).sort("run", "models").group_by("run").agg(pl.col("models").str.join("+"))
    return pl.concat([names.filter(~several), joined])


def _priced(every: pl.DataFrame, prices: PriceTable) -> pl.DataFrame:
    models = every["gpu_model"].unique()
    table = pl.DataFrame(
        {"gpu_model": models, "price": [prices.of(model) for model in models]},
        schema={"gpu_model": pl.String(), "price": pl.Float64()},
    )
    return every.join(table, on="gpu_model", how="left", nulls_equal=True, maintain_order="left").with_columns(
        _divide(pl.col("price") * pl.col("allocated_ms"), MS_PER_HOUR).alias("cost"),
        _divide(pl.col("price") * pl.col("idle"), MS_PER_HOUR).alias("idle_cost"),
    )


def _divide(value: pl.Expr, unit: float) -> pl.Expr:
    """Return ``value / unit``, correctly rounded.

    Polars divides a column by a constant by multiplying with the reciprocal: one hour would become 0.9999999999999999.
    """
    return value / (value * 0 + unit)


def aggregate(frame: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """Aggregate rows of ``breakdown`` to ``by``, ``jobs`` (runs) and ``MEASURES``; most idle hours first."""
    sums = [
        pl.col("run").n_unique().cast(pl.Int64).alias("jobs"),
        *(pl.col(name).sum() for name in _ADDED),
        pl.col("fb_peak").max(),
        pl.col("longest_ms").max(),
        # A sum of nulls only is null: no price is known.
        *(pl.when(pl.col(n).count() > 0).then(pl.col(n).sum()).otherwise(None).alias(n) for n in ("cost", "idle_cost")),
    ]
    grouped = frame.group_by(by, maintain_order=True).agg(sums) if by else frame.select(sums)
    return (
        grouped.with_columns((pl.col("busy") + pl.col("low") + pl.col("idle")).alias("measured_ms"))
        .select(*by, "jobs", *(expr.cast(MEASURES[name]).alias(name) for name, expr in _measures().items()))
        .sort(
            "gpu_hours_idle",
            "gpu_hours_allocated",
            *by,
            descending=[True, True, *(False for _ in by)],
            nulls_last=[True, True, *(False for _ in by)],
        )
    )


def _measures() -> Mapping[str, pl.Expr]:
    col = pl.col
    measured = col("measured_ms")

    def hours(ms: pl.Expr) -> pl.Expr:
        return _divide(ms, MS_PER_HOUR)

    def where(weight: pl.Expr, value: pl.Expr) -> pl.Expr:
        return pl.when(weight > 0).then(value).otherwise(None)

    def state(ms: pl.Expr) -> pl.Expr:
        """Return hours in a state; null if time was allocated but nothing was measured."""
        return pl.when((measured > 0) | (col("allocated_ms") == 0)).then(hours(ms)).otherwise(None)

    return {
        "gpu_hours_allocated": hours(pl.max_horizontal("allocated_ms", measured)),
        "gpu_hours_measured": hours(measured),
        "gpu_hours_unknown": hours((col("allocated_ms") - measured).clip(lower_bound=0)),
        "gpu_hours_idle": state(col("idle")),
        "gpu_hours_low": state(col("low")),
        "gpu_hours_busy": state(col("busy")),
        "idle_fraction": where(measured, col("idle") / measured),
        "util_mean_pct": where(col("util_known"), col("util") / col("util_known")),
        "mem_gib_h": where(col("fb_known"), hours(col("fb") / MIB_PER_GIB)),
        "idle_mem_gib_h": where(col("fb_known") * measured, hours(col("fb_idle") / MIB_PER_GIB)),
        "fb_mean_gib": where(col("fb_known"), col("fb") / col("fb_known") / MIB_PER_GIB),
        "fb_peak_gib": col("fb_peak") / MIB_PER_GIB,
        "energy_kwh": where(col("power_known"), _divide(col("power"), MS_PER_HOUR * 1000)),
        "idle_energy_kwh": where(col("power_known") * measured, _divide(col("power_idle"), MS_PER_HOUR * 1000)),
        "idle_windows": where(measured, col("windows")),
        "longest_idle_s": where(measured, _divide(col("longest_ms"), 1000)),
        "cost": col("cost"),
        "idle_cost": where(measured, col("idle_cost")),
        "gpu_hours_by_labels": hours(col("labels_ms")),
        "gpu_hours_by_records": hours(col("recorded_ms")),
        "gpu_hours_by_whole_node": hours(col("whole_node_ms")),
        "gpu_hours_unmapped": hours(
            (col("allocated_ms") - pl.sum_horizontal(*_BY_MAPPING.values())).clip(lower_bound=0)
        ),
    }


def per_run(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``run``, ``gpu_model`` and ``MEASURES`` of each run."""
    return aggregate(frame, ["run"]).join(
        _joined_models(frame).rename({"models": "gpu_model"}), on="run", how="left", maintain_order="left"
    )


def of_runs(shares: pl.DataFrame, about: pl.DataFrame) -> pl.DataFrame:
    """Return ``run`` and ``RUN_MEASURES``.

    ``shares``: from ``without_suspended``; ``about``: the runs of the report. Of windows on each of G GPUs within a
    time T, at least the sum of their lengths less (G - 1) T is common to all of them.
    """
    active, measured = pl.col("busy") + pl.col("low"), pl.col("busy") + pl.col("low") + pl.col("idle")
    mostly = COMPLETE * pl.col("held_ms")
    gpus = (
        shares.group_by("run", "slot", maintain_order=True)
        .agg(pl.col("busy", "low", "idle", "fb_known", "held_ms").sum(), pl.col("longest_ms").max())
        .with_columns(
            (active == 0).alias("unused"),
            (measured >= mostly).alias("complete"),
            (pl.col("fb_known") >= mostly).alias("memory_measured"),
        )
        .group_by("run", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("known"),
            pl.col("complete").all(),
            pl.col("memory_measured").sum().cast(pl.Int64).alias("gpus_memory_measured"),
            pl.col("unused").sum().cast(pl.Int64).alias("gpus_unused"),
            (pl.col("idle").filter("unused").sum() / MS_PER_HOUR).alias("gpu_hours_unused"),
            pl.col("longest_ms").sum(),
        )
    )
    program = pl.col("submit_line").str.extract(r"^\s*(?:\S*/)?(sbatch|salloc|srun)(?:\s|$)")
    every = pl.col("known") == pl.col("gpus")
    together = pl.col("longest_ms") - (pl.col("gpus") - 1) * (pl.col("end_ms") - pl.col("start_ms"))
    return (
        about.select("run", "gpus", "start_ms", "end_ms", "submit_line")
        .join(gpus, on="run", how="left", maintain_order="left")
        .with_columns(
            pl.when(program == "sbatch")
            .then(pl.lit("batch"))
            .when(program.is_not_null())
            .then(pl.lit("interactive"))
            .alias("submission"),
            *(
                pl.when(every & pl.col("complete")).then(name).alias(name)
                for name in ("gpus_unused", "gpu_hours_unused")
            ),
            pl.when(every).then(together.clip(0) / 1000).alias("all_idle_s"),
            pl.col("gpus_memory_measured").fill_null(0),
        )
        .select("run", *(pl.col(name).cast(dtype) for name, dtype in RUN_MEASURES.items()))
    )
