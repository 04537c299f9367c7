"""Timelines: steps, rates of counters that start again, and gaps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from slurm_affinode.engines.diagnosis.timeline import COLUMNS, timeline
from slurm_affinode.engines.schema import SAMPLES

START = datetime(2026, 1, 1, tzinfo=UTC)


def samples(*rows: dict[str, object]) -> pl.DataFrame:
    whole = [{**dict.fromkeys(SAMPLES), "address": "a:1", "engine": "vllm", **row} for row in rows]
    return pl.DataFrame(whole, schema=SAMPLES)


def at(seconds: float, **values: object) -> dict[str, object]:
    return {"time": START + timedelta(seconds=seconds), **values}


def test_rates_are_spread_over_the_time_between_scrapes() -> None:
    rows = samples(at(0, generation_tokens=0.0), at(40, generation_tokens=400.0), at(50, generation_tokens=400.0))
    result = timeline(rows, None, START, START + timedelta(seconds=60), points=6)
    assert result["tokens_per_s"].to_list() == [10.0, 10.0, 10.0, 10.0, 0.0, None]


def test_counter_that_starts_again_counts_from_zero() -> None:
    rows = samples(at(0, generation_tokens=1000.0), at(10, generation_tokens=50.0))
    result = timeline(rows, None, START, START + timedelta(seconds=10), points=1)
    assert result["tokens_per_s"].to_list() == [5.0]


def test_gauges_keep_their_peak_and_gaps_stay_unknown() -> None:
    rows = samples(at(1, kv_usage=0.2, waiting=1.0), at(2, kv_usage=0.9, waiting=0.0), at(25, error="refused"))
    result = timeline(rows, None, START, START + timedelta(seconds=30), points=3)
    assert result["kv_usage"].to_list() == [0.9, None, None]
    assert result["waiting"].to_list() == [1.0, None, None]
    assert result["running"].to_list() == [None, None, None]


def test_gpus_are_averaged_and_their_memory_added() -> None:
    gpus = pl.DataFrame(
        {
            "uuid": ["a", "a", "b"],
            "time": [START, START + timedelta(seconds=1), START],
            "util_pct": [0.0, 100.0, 10.0],
            "fb_used_mib": [1024.0, 1024.0, 2048.0],
        }
    ).with_columns(pl.col("time").cast(pl.Datetime("ms", "UTC")))
    result = timeline(samples(at(0)), gpus, START, START + timedelta(seconds=10), points=1)
    assert (result["gpu_util_pct"][0], result["gpu_memory_gib"][0]) == (30.0, 3.0)


def test_memory_that_is_not_measured_is_unknown() -> None:
    gpus = pl.DataFrame({"uuid": ["a"], "time": [START], "util_pct": [5.0], "fb_used_mib": [None]},
                        schema_overrides={"fb_used_mib": pl.Float64, "time": pl.Datetime("ms", "UTC")})  # fmt: skip
    result = timeline(samples(at(0)), gpus, START, START + timedelta(seconds=10), points=1)
    assert result["gpu_memory_gib"][0] is None


@pytest.mark.parametrize("seconds", [0.5, 1, 59, 86400])
def test_every_length_has_at_most_the_points(seconds: float) -> None:
    result = timeline(samples(at(0)), None, START, START + timedelta(seconds=seconds))
    assert 1 <= result.height <= 240
    assert result.columns == ["time", *COLUMNS]
