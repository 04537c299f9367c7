"""From runs and their GPUs to allocations: the intervals on devices that the join works with."""

from __future__ import annotations

import numpy as np
import polars as pl

from slurm_affinode.analysis.mapping import Mapped
from slurm_affinode.analysis.result import MAPPINGS
from slurm_affinode.analysis.segments import Allocations, Flags


def gpu_runs(runs: pl.DataFrame, mapped: Mapped) -> pl.DataFrame:
    """The runs (``runs.prepare``) that had a GPU by accounting, labels or records, with how it was found.

    Adds ``mapping`` (a word of ``MAPPINGS``; of several, that of the weakest evidence) and ``devices`` (GPUs that are
    known).
    """
    ways = mapped.pairs.group_by("run").agg(
        pl.col("mapping").cast(pl.Enum(MAPPINGS)).max().cast(pl.String), pl.len().cast(pl.Int64).alias("devices")
    )
    return (
        runs.join(ways, on="run", how="left", maintain_order="left")
        .filter((pl.col("gpus").fill_null(0) > 0) | pl.col("mapping").is_not_null())
        .with_columns(pl.col("mapping").fill_null("unknown"), pl.col("devices").fill_null(0))
    )


def intervals(runs: pl.DataFrame, mapped: Mapped) -> Allocations:
    """One allocation per run and GPU, sorted by (device, start)."""
    frame = mapped.pairs.join(runs.select("run", "start_ms", "end_ms", "wanted"), on="run").sort(
        "at", "start_ms", "run"
    )
    return Allocations.of(
        frame["at"].to_numpy(),
        frame["run"].to_numpy(),
        frame["start_ms"].to_numpy(),
        frame["end_ms"].to_numpy(),
        frame["wanted"].to_numpy(),
    )


def taking_part(devices: pl.DataFrame, mapped: Mapped, allocations: Allocations, clusters: tuple[str, ...]) -> Flags:
    """Which devices the report counts: not those of other clusters, and not the parents of MIG instances, unless a run
    held one before it was divided."""
    flags = np.ones(len(devices), np.bool_)
    if clusters:
        flags &= np.array([name is None or name in clusters for name in devices["cluster"].to_list()], np.bool_)
    flags[mapped.left_out.to_numpy()] = False
    flags[allocations.device] = True
    return flags
