"""Metrics of an engine and of its GPUs on one time axis, for charts."""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from slurm_affinode.engines.schema import COUNTERS

POINTS = 240
"""Most points of a chart."""
_RATES = {
    "generation_tokens": "tokens_per_s",
    "prompt_tokens": "prompt_tokens_per_s",
    "preemptions": "preemptions_per_s",
    "finished": "finished_per_s",
}
_GAUGES = {
    "kv_usage": pl.col("kv_usage").max(),
    "waiting": pl.col("waiting").max(),
    "running": pl.col("running").mean(),
}
COLUMNS = ("kv_usage", "waiting", "running", *_RATES.values(), "gpu_util_pct", "gpu_memory_gib")
"""Columns of a timeline. KV usage is 0-1, GPU memory is the sum over the engine's GPUs, GPU utilization their mean."""


def timeline(
    samples: pl.DataFrame, gpus: pl.DataFrame | None, since: datetime, until: datetime, points: int = POINTS
) -> pl.DataFrame:
    """Return ``time`` (the start of a step of equal length) and ``COLUMNS``; null is unknown.

    ``samples``: one engine, schema of engine samples; ``gpus``: samples of its GPUs. KV usage and waiting requests are
    maxima of the step. A value holds until the next sample, for at most 2.5 sampling intervals. Rates are means between
    the scrapes that lie in the step or around it: a counter that falls has started again, and counts from 0.
    """
    step_us = max(1_000_000, -(-round((until - since).total_seconds() * 1e6) // points // 1_000_000) * 1_000_000)
    count = -(-round((until - since).total_seconds() * 1e6) // step_us)
    axis = pl.DataFrame({"slot": range(count)}, schema={"slot": pl.Int64})
    slot = (((pl.col("time") - pl.lit(since)).dt.total_microseconds()) // step_us).alias("slot")
    valid_samples = samples.filter(pl.col("error").is_null()).sort("time")
    gauges = valid_samples.group_by(slot).agg(expression.alias(name) for name, expression in _GAUGES.items())
    table = _fill_forward(axis, gauges, _reach(valid_samples["time"], step_us))
    for name, rate in _RATES.items():
        table = table.with_columns(_rates(valid_samples, name, since, step_us, count).alias(rate))
    if gpus is not None and gpus.height:
        each = [
            _fill_forward(axis, gpu.group_by(slot).agg(pl.col("util_pct").mean(), pl.col("fb_used_mib").mean() / 1024),
                  _reach(gpu["time"], step_us))
            for gpu in gpus.partition_by("uuid")
        ]  # fmt: skip
        both = (
            pl.concat(each)
            .group_by("slot")
            .agg(
                pl.col("util_pct").mean().alias("gpu_util_pct"),
                # A sum over some of the GPUs would look like memory that was released.
                pl.when(pl.col("fb_used_mib").count() == len(each))
                .then(pl.col("fb_used_mib").sum())
                .alias("gpu_memory_gib"),
            )
        )
        table = table.join(both, on="slot", how="left")
    missing = [pl.lit(None, pl.Float64).alias(name) for name in COLUMNS if name not in table.columns]
    times = [since + timedelta(microseconds=step_us * index) for index in range(count)]
    return table.sort("slot").with_columns(*missing, pl.Series("time", times)).select("time", *COLUMNS)


_REACH = 2.5
"""Sampling intervals for which a value holds until the next sample."""


def _reach(times: pl.Series, step_us: int) -> int:
    """Return the number of steps after a sample for which its value holds."""
    interval = times.sort().diff().dt.total_microseconds().median()
    return 0 if not isinstance(interval, int | float) else int(_REACH * interval / step_us)


def _fill_forward(axis: pl.DataFrame, values: pl.DataFrame, reach: int) -> pl.DataFrame:
    """Return the values on the axis; steps without a sample have the last value, for at most ``reach`` steps."""
    joined = axis.join(values, on="slot", how="left", maintain_order="left")
    return joined.with_columns(pl.exclude("slot").forward_fill(limit=reach)) if reach else joined


def _rates(valid_samples: pl.DataFrame, name: str, since: datetime, step_us: int, count: int) -> pl.Series:
    """Return the rate of a counter in each step, spread evenly between scrapes."""
    if name not in COUNTERS:
        raise ValueError(f"{name} is no counter")
    rows = valid_samples.filter(pl.col(name).is_not_null()).select(
        ((pl.col("time") - pl.lit(since)).dt.total_microseconds() / step_us).alias("at"), pl.col(name)
    )
    places, values = rows["at"].to_list(), rows[name].to_list()
    amount, covered = [0.0] * count, [0.0] * count
    for index in range(1, len(places)):
        begin, end = places[index - 1], places[index]
        rise = values[index] - values[index - 1] if values[index] >= values[index - 1] else values[index]
        if end <= begin:
            continue
        for slot in range(max(0, int(begin)), min(count - 1, int(end)) + 1):
            share = min(end, slot + 1.0) - max(begin, float(slot))
            if share > 0:
                amount[slot] += rise * share / (end - begin)
                covered[slot] += share
    seconds = step_us / 1e6
    return pl.Series(
        [total / (part * seconds) if part > 0 else None for total, part in zip(amount, covered, strict=True)],
        dtype=pl.Float64,
    )
