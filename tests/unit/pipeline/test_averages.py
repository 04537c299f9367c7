"""Averages of jobs in the analysis: every hour is counted at the average of its job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import prices
from slurm_affinode.analysis.prices import NO_PRICES, PriceTable
from slurm_affinode.analysis.result import Thresholds, WasteResult
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.metrics.averages import AVERAGES
from slurm_affinode.pipeline.averages import analyse_averages
from slurm_affinode.slurm.accounting.schema import JOBS, conform

T0 = datetime(2026, 3, 1, 20, tzinfo=UTC)
Runs = list[tuple[int, int, float | None]]
"""Gap before the job (s), length (s), average utilization."""


def analysed(runs: Runs, table: PriceTable = NO_PRICES, **more: tuple[str, ...]) -> WasteResult:
    jobs, averages, at = [], [], 0
    for i, (gap, length, util) in enumerate(runs, start=1):
        start, end = (T0 + timedelta(seconds=at + gap + s) for s in (0, length))
        at += gap + length
        run = {"cluster": "c", "job_id": i, "start": start, "end": end}
        jobs.append({**run, "submit": start, "gpus": 1, "node_list": "n1", "nodes": 1})
        averages.append({**run, "node": "n1", "index": 0, "util_pct": util, "fb_used_mib": 1024.0})
    return analyse_averages(
        conform(pl.DataFrame(jobs), JOBS),
        pl.DataFrame(averages, schema=AVERAGES, orient="row"),
        prices=table, thresholds=Thresholds(), now=T0 + timedelta(days=30), **more,
    )  # fmt: skip


def test_example_prices_are_labeled_as_examples() -> None:
    assert "example prices" in analysed([(1, 60, 0.0)], prices.load()).price_note
    assert not analysed([(1, 60, 0.0)]).price_note


@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.integers(10, 40_000), st.sampled_from([0.0, 3.0, 50.0, 100.0])),
        min_size=1, max_size=12,
    )
)  # fmt: skip
@example([(1, 650, 50.0), (10, 590, 0.0)])
@example([(1, 650, 50.0), (10, 650, 0.0), (10, 5, 3.0)])
@example([(1, 12, 50.0)] * 12)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_hour_of_every_job_is_counted(runs: Runs) -> None:
    """Short and long jobs, with short and long gaps, across midnight: no hours are lost or mixed up."""
    result = analysed(runs)
    expected = {"idle": 0.0, "low": 0.0, "busy": 0.0}
    for _, length, util in runs:
        expected["idle" if util == 0 else "low" if (util or 0) <= 5 else "busy"] += length / 3600
    for state, hours in expected.items():
        assert result.total[f"gpu_hours_{state}"] == pytest.approx(hours, abs=1e-6), state
    assert result.total["gpu_hours_unknown"] == pytest.approx(0, abs=1e-6)
    assert result.total["mem_gib_h"] == pytest.approx(sum(length for _, length, _ in runs) / 3600)


def test_missing_averages_are_unknown() -> None:
    """The data quality counts averages instead of samples and has the notes and problems."""
    result = analysed([(0, 3600, None), (60, 3600, 0.0)], notes=("Of a kind.",), problems=("job 7: bad",))
    assert result.total["gpu_hours_unknown"] == pytest.approx(1)
    assert result.total["gpu_hours_idle"] == pytest.approx(1)
    assert result.total["unallocated_gpu_hours"] is None
    assert result.quality.samples == 2
    assert dict(result.quality.steps_s) == {}
    issues = {issue.code: issue for issue in result.quality.issues}
    assert issues["per-run-averages"].count == 2
    assert "lower bound" in issues["per-run-averages"].detail
    assert "Of a kind." in issues["per-run-averages"].detail
    assert issues["bad-records"].examples == ("job 7: bad",)


def test_jobs_without_start_are_an_error() -> None:
    """Averages belong to a time."""
    jobs = conform(pl.DataFrame({"cluster": ["c"], "job_id": [1]}), JOBS)
    with pytest.raises(AffinodeError, match="no job has a start"):
        analyse_averages(jobs, pl.DataFrame(schema=AVERAGES), prices=NO_PRICES, thresholds=Thresholds())
