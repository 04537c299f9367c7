"""All periods in which every GPU of a job was idle, not only the one at its end.

Samples count as in ``idle_windows``: until the next sample of the GPU, for one sampling interval before a gap. A period
ends at a sample above the limit, at one without an activity signal, and at a gap. A job with an unmeasured GPU
has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl

from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.samples import naming_damage, read_by_groups
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.base.spread import Spread
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import ACTIVITY, percent

PERIODS: dict[str, pl.DataType] = {"run": pl.Int64(), "begin_ms": pl.Int64(), "end_ms": pl.Int64()}
_WINDOWS: dict[str, pl.DataType] = {"device": pl.UInt64(), "low_ms": pl.Int64(), "high_ms": pl.Int64()}


def find(store: SampleStore, held: HeldGpus, limit_pct: float, spread: Spread | None = None) -> pl.DataFrame:
    """Return ``PERIODS`` of the runs of ``held``, sorted; at most ``limit_pct`` is idle.

    ``spread``: to other machines, which read the samples.
    """
    steps = held.devices.with_row_index("at").select(pl.col("at").cast(pl.Int64), "device", "step_ms", "rows")
    pairs = held.pairs.select("run", pl.col("at").cast(pl.Int64), "start_ms", "end_ms").join(steps, on="at")
    # Of a run with an unknown number of GPUs, any of them may be unmeasured.
    known = (
        held.runs.select("run", "gpus")
        .drop_nulls()
        .join(pairs.group_by("run").agg(pl.col("device").n_unique().cast(pl.Int64).alias("measured")), on="run")
    )
    whole = known.filter((pl.col("measured") >= pl.col("gpus")) & (pl.col("measured") > 0))
    pairs = pairs.join(whole.select("run", "measured"), on="run")
    if pairs.is_empty():
        return pl.DataFrame(schema=PERIODS)
    query = held.query
    given = _SampleRange(query.since, query.until, limit_pct, query.thresholds)
    steps = pairs.select("device", "step_ms", "rows").unique("device")
    windows = read_by_groups(_windows, store, steps, given, days=held.days, spread=spread)
    met = pairs.join(windows, on="device").select(
        "run", "measured", pl.max_horizontal("start_ms", "low_ms").alias("low_ms"),
        pl.min_horizontal("end_ms", "high_ms").alias("high_ms"),
    ).filter(pl.col("low_ms") < pl.col("high_ms"))  # fmt: skip
    edges = pl.concat([
        met.select("run", "measured", pl.col("low_ms").alias("ms"), pl.lit(1).alias("change")),
        met.select("run", "measured", pl.col("high_ms").alias("ms"), pl.lit(-1).alias("change")),
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
class _SampleRange:
    """Samples that are read, and thresholds."""

    since: datetime
    until: datetime
    limit_pct: float
    thresholds: Thresholds


def _windows(store: SampleStore, steps: pl.DataFrame, given: _SampleRange) -> pl.DataFrame:
    """Return ``_WINDOWS`` of the devices of ``steps``."""
    steps, thresholds = steps.select("device", "step_ms"), given.thresholds
    since, until = given.since, given.until
    signals = [percent(name, thresholds.floors_pct) for name in ACTIVITY]
    found = [pl.DataFrame(schema=_WINDOWS)]
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    while day < until:
        begin, finish = max(day, since), min(day + timedelta(days=1), until)
        with naming_damage(store, begin, finish):
            rows = (
                store.scan(begin, finish)
                .filter(pl.col("device").is_in(steps["device"].implode()))
                .select("device", pl.col("time").dt.epoch("ms").alias("ms"), pl.max_horizontal(signals).alias("pct"))
                .collect()
            )
        if rows.height:
            found.append(_of_day(rows.join(steps, on="device").sort("device", "ms"), given.limit_pct, thresholds))
        day += timedelta(days=1)
    joined = pl.concat(found).sort("device", "low_ms")
    # A window that continues on the next day was cut at midnight.
    new = (pl.col("low_ms") > pl.col("high_ms").shift().over("device")).fill_null(value=True)
    return joined.group_by("device", new.cum_sum().alias("part")).agg(
        pl.col("low_ms").min(), pl.col("high_ms").max()
    ).select(*_WINDOWS)  # fmt: skip


def _of_day(rows: pl.DataFrame, limit_pct: float, thresholds: Thresholds) -> pl.DataFrame:
    gap = pl.col("ms").shift(-1).over("device") - pl.col("ms")
    near = (gap <= pl.col("step_ms") * thresholds.max_gap_steps).fill_null(value=False)
    idle = (pl.col("pct") <= limit_pct).fill_null(value=False)
    rows = rows.with_columns(
        idle.alias("idle"),
        pl.when(near).then(pl.col("ms") + gap).otherwise(pl.col("ms") + pl.col("step_ms")).alias("reach"),
    )
    joins = pl.col("idle").shift().over("device") & (pl.col("reach").shift().over("device") >= pl.col("ms"))
    new = ~joins.fill_null(value=False)
    return (
        rows.with_columns((new | ~pl.col("idle")).cum_sum().alias("part"))
        .filter("idle")
        .group_by("device", "part")
        .agg(pl.col("ms").min().alias("low_ms"), pl.col("reach").max().cast(pl.Int64).alias("high_ms"))
        .select(*_WINDOWS)
    )
