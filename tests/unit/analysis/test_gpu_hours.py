"""Hours of each GPU: idle, unknown, and not allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_affinode.analysis.measures import GPU_RUNS, GPUS
from slurm_affinode.analysis.result import WasteResult

HOUR = 3600


def test_hours_of_each_gpu(
    analysed: Callable[..., WasteResult], samples: Callable[..., list[dict[str, Any]]], jobs: Callable[..., Any]
) -> None:
    """One is idle for half of the job, one has no job; their sums are those of the report."""
    times = range(0, 4 * HOUR, 60)
    rows = [
        *samples(times, util_pct=lambda t: 0 if t < 2 * HOUR else 90, job="1"),
        *samples(times, util_pct=0, uuid="GPU-1", index=1),
    ]
    result = analysed(rows, jobs({"job_id": 1, "start": 0, "end": 4 * HOUR, "gpus": 1}), until=4 * HOUR)
    assert result.gpus is not None
    assert result.gpus.schema == GPUS
    held, free = result.gpus.iter_rows(named=True)
    assert (held["node"], held["gpu"], held["gpu_model"]) == ("n1", "0", "NVIDIA A100-SXM4-80GB")
    assert held["gpu_hours_allocated"] == pytest.approx(4.0)
    assert held["gpu_hours_idle"] == pytest.approx(2.0, abs=0.02)
    assert held["gpu_hours_idle"] == pytest.approx(result.total["gpu_hours_idle"])
    assert (free["gpu"], free["gpu_hours_allocated"], free["gpu_hours_idle"]) == ("1", 0.0, 0.0)


def test_runs_of_each_gpu(
    analysed: Callable[..., WasteResult], samples: Callable[..., list[dict[str, Any]]], jobs: Callable[..., Any]
) -> None:
    """Rows of GPUs and of job runs: the second job is idle for longest, so it is the first row; it has both GPUs."""
    rows = [
        *samples(range(0, HOUR, 60), util_pct=90, job="1"),
        *samples(range(HOUR, 4 * HOUR, 60), util_pct=0, job="2"),
        *samples(range(HOUR, 4 * HOUR, 60), util_pct=0, uuid="GPU-1", index=1, job="2"),
        *samples(range(0, 4 * HOUR, 60), util_pct=0, uuid="GPU-2", index=2),
    ]
    runs = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpus": 1}, {"job_id": 2, "start": HOUR, "end": 4 * HOUR, "gpus": 2}
    )
    result = analysed(rows, runs, until=4 * HOUR)
    assert result.jobs["job_id"].to_list() == [2, 1]
    assert result.gpu_runs is not None
    assert result.gpu_runs.schema == GPU_RUNS
    assert result.gpu_runs.rows() == [(0, 0), (0, 1), (1, 0)]


def test_unmeasured_hours_are_unknown(
    analysed: Callable[..., WasteResult], samples: Callable[..., list[dict[str, Any]]], jobs: Callable[..., Any]
) -> None:
    """A GPU without an activity signal is neither idle nor busy."""
    rows = samples(range(0, 2 * HOUR, 60), fb_used_mib=10.0, job="1")
    result = analysed(rows, jobs({"job_id": 1, "start": 0, "end": 2 * HOUR, "gpus": 1}))
    assert result.gpus is not None
    [row] = result.gpus.iter_rows(named=True)
    assert (row["gpu_hours_idle"], row["gpu_hours_busy"]) == (None, None)
    assert row["gpu_hours_unknown"] == pytest.approx(2.0)
