"""Hours of each GPU of a report: who is idle where. Pure."""

from __future__ import annotations

import polars as pl

from slurm_affinode.analysis.measures import MS_PER_HOUR, model_name
from slurm_affinode.analysis.segments import Flags

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
}


def gpu_hours(shares: pl.DataFrame, about: pl.DataFrame, devices: pl.DataFrame, taking_part: Flags) -> pl.DataFrame:
    """Return ``GPUS``, a row for each GPU that takes part, by cluster, node and number.

    ``shares``: from ``measures.without_suspended``; ``about``: the runs of the report. ``gpu`` is the number on the
    node, for a MIG instance with its ID (``0.7``), or the UUID if there is no number. Busy, low and idle hours are None
    if nothing was measured while the GPU was allocated.
    """
    sums = (
        shares.filter(pl.col("run").is_in(about["run"].implode()))
        .group_by("at")
        .agg(pl.col("held_ms", "busy", "low", "idle").sum() / MS_PER_HOUR)
    )
    label = pl.concat_str(
        pl.coalesce(pl.col("index").cast(pl.String), pl.col("uuid")),
        pl.when(pl.col("mig").is_not_null()).then(pl.concat_str(pl.lit("."), pl.col("mig"))).otherwise(pl.lit("")),
    )
    listed = (
        devices.with_columns(label.alias("gpu"), model_name().alias("gpu_model"), pl.Series("counts", taking_part))
        .with_row_index("at")
        .with_columns(pl.col("at").cast(pl.Int64))
        .filter("counts")
        .select("at", "cluster", "node", "gpu", "gpu_model", "index", "mig")
        .join(sums, on="at", how="left")
        .sort("cluster", "node", "index", "mig", "gpu", nulls_last=True)
    )
    measured = pl.col("busy") + pl.col("low") + pl.col("idle")
    held = pl.max_horizontal("held_ms", measured).fill_null(0.0)
    known = (measured > 0) | (held == 0)
    states = ("busy", "low", "idle")
    return listed.select(
        "cluster", "node", "gpu", "gpu_model", held.alias("gpu_hours_allocated"),
        *(pl.when(known).then(pl.col(name).fill_null(0.0)).alias(f"gpu_hours_{name}") for name in states),
        (held - measured.fill_null(0.0)).alias("gpu_hours_unknown"),
    ).cast(dict(GPUS))  # type: ignore[arg-type]  # fmt: skip
