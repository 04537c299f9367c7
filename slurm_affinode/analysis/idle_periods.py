"""All periods in which every GPU of a job was idle, not only the one at its end.

Samples count as in ``idle_windows``. A period ends at a sample above the limit, at one without an activity signal, and
at a gap. A job with an unmeasured GPU has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.analysis import idle_windows
from slurm_affinode.analysis.idle_windows import Pairs
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.analysis.samples import read_by_groups
from slurm_affinode.analysis.segments import ranges
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.base.spread import Spread
from slurm_affinode.metrics.parquet.store import SampleStore

PERIODS: dict[str, pl.DataType] = {"run": pl.Int64(), "begin_ms": pl.Int64(), "end_ms": pl.Int64()}
_WINDOWS: dict[str, pl.DataType] = {"pair": pl.Int64(), "low_ms": pl.Int64(), "high_ms": pl.Int64()}


def find(store: SampleStore, gpus: HeldGpus, limit_pct: float, spread: Spread | None = None) -> pl.DataFrame:
    """Return ``PERIODS`` of the runs of ``gpus``, sorted; at most ``limit_pct`` is idle.

    ``spread``: to other machines, which read the samples.
    """
    steps = gpus.devices.with_row_index("at").select(pl.col("at").cast(pl.Int64), "device", "step_ms", "rows")
    pairs = gpus.pairs.select("run", pl.col("at").cast(pl.Int64), "start_ms", "end_ms").join(steps, on="at")
    # Of a run with an unknown number of GPUs, any of them may be unmeasured.
    measured_windows = (
        gpus.runs.select("run", "gpus")
        .drop_nulls()
        .join(pairs.group_by("run").agg(pl.col("device").n_unique().cast(pl.Int64).alias("measured")), on="run")
    )
    whole = measured_windows.filter((pl.col("measured") >= pl.col("gpus")) & (pl.col("measured") > 0))
    pairs = pairs.join(whole.select("run", "measured"), on="run").sort("run", "at")
    if pairs.is_empty():
        return pl.DataFrame(schema=PERIODS)
    pairs = pairs.with_row_index("pair").with_columns(pl.col("pair").cast(pl.Int64))
    shared = _IdleSamples(gpus.query, limit_pct)
    windows = read_by_groups(_windows, store, pairs, shared, days=gpus.days, until=gpus.query.until, spread=spread)
    pair_windows = pairs.join(windows, on="pair")
    edges = pl.concat([
        pair_windows.select("run", "measured", pl.col("low_ms").alias("ms"), pl.lit(1).alias("change")),
        pair_windows.select("run", "measured", pl.col("high_ms").alias("ms"), pl.lit(-1).alias("change")),
    ])  # fmt: skip
    counts = edges.group_by("run", "measured", "ms").agg(pl.col("change").sum()).sort("run", "ms")
    return (
        counts.with_columns(
            pl.col("change").cum_sum().over("run").alias("idle"), pl.col("ms").shift(-1).over("run").alias("end_ms")
        )
        .filter((pl.col("idle") >= pl.col("measured")) & pl.col("end_ms").is_not_null())
        .select("run", pl.col("ms").alias("begin_ms"), "end_ms")
        .cast(PERIODS)  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class _IdleSamples:
    """Which samples are read, and which of them are idle."""

    query: WasteQuery
    limit_pct: float


def _windows(store: SampleStore, pairs: pl.DataFrame, shared: _IdleSamples) -> pl.DataFrame:
    """Return ``_WINDOWS`` of the rows of ``pairs``."""
    query, numbers = shared.query, pairs["pair"].to_numpy()
    end = pairs["end_ms"].to_numpy()
    keys = Pairs(
        pairs["device"].to_numpy(), pairs["start_ms"].to_numpy(), end, pairs["step_ms"].to_numpy()
    )  # fmt: skip
    windows = [pl.DataFrame(schema=_WINDOWS)]
    for rows, which, low, high in idle_windows.counted_rows(store, keys, query.since, query.until, query.thresholds):
        pair, selected = np.repeat(which, high - low), ranges(low, high - low)
        busiest = np.full(len(selected), np.nan, np.float32)
        with np.errstate(invalid="ignore"):
            for values in rows.signals.values():
                np.fmax(busiest, values[selected], out=busiest)
        until = np.minimum(rows.reach[selected], end[pair])
        idle = busiest <= shared.limit_pct  # NaN is not idle
        span_pairs, begin, finish = idle_windows.idle_spans(pair, rows.ms[selected], until, idle)
        windows.append(
            pl.DataFrame(dict(zip(_WINDOWS, (numbers[span_pairs], begin, finish), strict=True)), schema=_WINDOWS)
        )
    joined = pl.concat(windows).sort("pair", "low_ms")
    # A window that continues on the next day was cut at midnight.
    new = (pl.col("low_ms") != pl.col("high_ms").shift().over("pair")).fill_null(value=True)
    return joined.group_by("pair", new.cum_sum().alias("part")).agg(
        pl.col("low_ms").min(), pl.col("high_ms").max()
    ).select(*_WINDOWS)  # fmt: skip
