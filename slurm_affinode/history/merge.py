"""The merge rule of samples: one row per (device, time), whatever was read how often and in which order.

Per metric the last value that is not missing, in the order of reading, wins; job ids are united.
"""

from __future__ import annotations

import polars as pl

from slurm_affinode.history.schema import METRICS

SORT = ("device", "time")
SAMPLE_COLUMNS: dict[str, pl.DataType] = {
    "device": pl.UInt64(),
    "time": pl.Datetime("ms", "UTC"),
    **METRICS,
    "job": pl.String(),
}
"""Columns of samples whose identity is held aside."""


def united_jobs(job: pl.Expr) -> pl.Expr:
    """Aggregate a group's ``job`` texts (ids joined by ``,``) to the sorted union; null where none says anything."""
    ids = job.drop_nulls().str.split(",").explode(empty_as_null=False).drop_nulls().unique().sort()
    joined = ids.str.join(",")
    return pl.when(ids.len() > 0).then(joined).otherwise(None)


def merge(frame: pl.DataFrame) -> pl.DataFrame:
    """``frame`` (``SAMPLE_COLUMNS``, rows in the order of reading) sorted by (device, time) with unique keys."""
    ordered = frame.sort(SORT, maintain_order=True)
    same = (pl.col("device") == pl.col("device").shift()) & (pl.col("time") == pl.col("time").shift())
    repeat = ordered.select(same.fill_null(value=False).alias("repeat"))["repeat"]
    if not repeat.any():
        return ordered
    shared = repeat | repeat.shift(-1, fill_value=False)
    return pl.concat([ordered.filter(~shared), _collapsed(ordered.filter(shared))]).sort(SORT)


def _collapsed(frame: pl.DataFrame) -> pl.DataFrame:
    metrics = [pl.col(name).drop_nulls().last() for name in METRICS]
    grouped = frame.group_by(SORT, maintain_order=True).agg(*metrics, united_jobs(pl.col("job")).alias("job"))
    return grouped.select(frame.columns)


def merge_lazy(frame: pl.LazyFrame, described: tuple[str, ...] = ()) -> pl.LazyFrame:
    """The same rule for a lazy frame in the order of reading; the columns ``described`` follow the rule of metrics."""
    values = [pl.col(name).drop_nulls().last() for name in (*described, *METRICS)]
    return frame.group_by(SORT, maintain_order=True).agg(*values, united_jobs(pl.col("job")).alias("job")).sort(SORT)
