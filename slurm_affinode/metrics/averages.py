"""Conversion of averages per run and GPU to samples, so that they can be analyzed like sampled metrics.

An average is not a sample. Spread over the run, it gives the correct means, memory-time and energy. About idle time it
gives one fact only: if the average is exactly 0, every moment was 0. For any other average, the idle time within the
run is unknown; the analysis classifies the whole run by its average, so idle hours are a lower bound. ``NOTE`` explains
this to the reader of a report.
"""

from __future__ import annotations

import polars as pl

from slurm_affinode.metrics.identity import with_device
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import IDENTITY, METRICS, SAMPLES, TIME

STEPS_S = (600, 300, 120, 60, 30, 20, 10)
"""Candidate sampling intervals: the largest that fits between any two starts on the GPU is used. All samples of a run
are equal, so the interval only needs to be short compared with the gaps between runs."""

NOTE = (
    "The history has one average per run, not samples. A run counts as idle only where its average is exactly 0: then "
    "every moment was 0. For every other run, idle time within it is unknown and counts by the average as low or busy. "
    "Idle GPU-hours are therefore a lower bound."
)

AVERAGES: dict[str, pl.DataType] = {
    "job_id": pl.Int64(),
    "start": TIME,
    "end": TIME,
    **IDENTITY,
    **{name: dtype for name, dtype in METRICS.items() if name != "xid"},
}
"""One row per run and GPU: the run, the identity of the GPU, and averages over the run (None: unknown)."""

_DEVICE = ("cluster", "node", "uuid", "pci", "index", "mig")
_VALUES = tuple(name for name in METRICS if name != "xid")


def samples(averages: pl.DataFrame) -> pl.DataFrame:
    """Return ``SAMPLES`` with the averages over each run; each run is closed by a sample without values.

    The interval is the same for all runs of a GPU, so that it is inferred correctly from the samples. Runs of zero
    length have no samples. Where runs overlap on a GPU, the average of the one that started later counts.
    """
    runs = averages.filter(pl.col("start") < pl.col("end"))
    if runs.is_empty():
        return pl.DataFrame(schema=SAMPLES)
    return (
        _with_next(runs)
        .with_columns(_times().alias("time"))
        .explode("time")
        .filter(~_is_set_by_next())
        .with_columns(
            pl.when(pl.col("time") < pl.col("end")).then(pl.col(name)).otherwise(None).alias(name) for name in _VALUES
        )
        .sort(*_DEVICE, "start")
        .unique([*_DEVICE, "time"], keep="last", maintain_order=True)
        .select(
            (pl.lit(None) if name in ("xid", "job") else pl.col(name)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        )
    )


def _with_next(runs: pl.DataFrame) -> pl.DataFrame:
    """Add ``next_start`` and ``next_end`` of the next run on the GPU, and ``step_s``."""
    gap_s = (pl.col("next_start") - pl.col("start")).dt.total_milliseconds() / 1000
    return (
        runs.sort(*_DEVICE, "start", "end")
        .with_columns(
            pl.col("start").shift(-1).over(_DEVICE).alias("next_start"),
            pl.col("end").shift(-1).over(_DEVICE).alias("next_end"),
        )
        .with_columns(gap_s.alias("gap_s"))
        .with_columns(
            pl.col("gap_s").filter(pl.col("gap_s") > 0).min().over(_DEVICE).alias("gap_s"),
        )
        .with_columns(_step_s().alias("step_s"))
    )


def _step_s() -> pl.Expr:
    fits = [pl.when(pl.col("gap_s") >= step).then(step) for step in STEPS_S[:-1]]
    alone = pl.when(pl.col("gap_s").is_null()).then(STEPS_S[0])
    return pl.coalesce(alone, *fits, pl.lit(STEPS_S[-1])).cast(pl.Float64)


def _times() -> pl.Expr:
    """Start, start + step, ... up to and including the first time that is not before the end."""
    length_s = (pl.col("end") - pl.col("start")).dt.total_milliseconds() / 1000
    count = (length_s / pl.col("step_s")).ceil().cast(pl.Int64) + 1
    offsets_ms = pl.int_ranges(0, count) * (pl.col("step_s") * 1000).cast(pl.Int64)
    return (pl.col("start").dt.epoch("ms") + offsets_ms).cast(pl.List(pl.Datetime("ms"))).cast(pl.List(TIME))


def _is_set_by_next() -> pl.Expr:
    """Whether the next run determines the value at the time of this sample."""
    closing = pl.col("time") >= pl.col("end")
    from_next = pl.col("time") >= pl.col("next_start")
    return (from_next & (closing | (pl.col("time") < pl.col("next_end")))).fill_null(value=False)


def fill(history: SampleStore, averages: pl.DataFrame) -> None:
    """Write the ``samples`` of the averages, including those without values, to ``history``, which is empty."""
    rows = samples(averages)
    described = with_device(rows.select(*IDENTITY).unique(maintain_order=True))
    keyed = rows.join(described, on=list(IDENTITY), nulls_equal=True).sort("device", "time")
    unique_rows = keyed.unique(["device", "time"], keep="last", maintain_order=True)
    for (day,), part in unique_rows.group_by(pl.col("time").dt.date(), maintain_order=True):
        identities = part.select("device", *IDENTITY).unique(maintain_order=True)
        history.write_day(day, [part.select("device", "time", *METRICS, "job")], identities)


def allocation_gpus(averages: pl.DataFrame) -> pl.DataFrame:
    """Return the GPU of each run: ``cluster``, ``job_id``, ``start``, ``node``, ``gpu`` (UUID, PCI address, index)."""
    return averages.select(
        "cluster",
        "job_id",
        "start",
        "node",
        pl.coalesce("uuid", "pci", pl.col("index").cast(pl.String)).alias("gpu"),
    ).unique(maintain_order=True)
