"""Unmet demand: waits against idle GPUs of the same partition, their holders, and the head of line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from slurm_affinode.analysis.result import UnmetDemand, WasteResult

HOUR = 3600
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., Any]
Analysed = Callable[..., WasteResult]


def every(start: int, end: int) -> range:
    return range(start, end, 60)


def demand_of(result: WasteResult) -> UnmetDemand:
    assert result.demand is not None
    return result.demand


def holder(**values: Any) -> dict[str, Any]:
    """A job of bob that holds GPU 0 of n1 for ten hours."""
    return {"job_id": 1, "user": "bob", "partition": "p", "start": 0, "end": 10 * HOUR, "gpus": 1, "node_list": "n1",
            **values}  # fmt: skip


def test_wait_beside_an_idle_gpu_is_unmet(analysed: Analysed, samples: Rows, jobs: Jobs, t0: datetime) -> None:
    """A job waits from hour 2 to 6; the GPU is idle from hour 4 on, so that two of its four hours are unmet."""
    rows = samples(every(0, 10 * HOUR), util_pct=lambda t: 0 if t >= 4 * HOUR else 90, job="1")
    waiting = {"job_id": 2, "partition": "p", "eligible": t0 + timedelta(hours=2), "start": 6 * HOUR,
               "end": 10 * HOUR, "gpus": 1, "node_list": "n2"}  # fmt: skip
    demand = demand_of(analysed(rows, jobs(holder(), waiting), until=10 * HOUR))
    [row] = demand.partitions.iter_rows(named=True)
    assert (row["partition"], row["jobs"]) == ("p", 1)
    assert row["gpu_hours_waited"] == pytest.approx(4.0)
    assert row["gpu_hours_unmet"] == pytest.approx(2.0, abs=0.05)
    assert row["gpu_hours_idle_meanwhile"] == pytest.approx(2.0, abs=0.05)
    assert demand.unmet == pytest.approx(row["gpu_hours_unmet"])
    [model] = demand.models.iter_rows(named=True)
    assert (model["partition"], model["gpu_model"]) == ("p", "NVIDIA A100-SXM4-80GB")
    assert model["gpu_hours_unmet"] == pytest.approx(row["gpu_hours_unmet"])
    [held] = demand.holders.iter_rows(named=True)
    assert (held["job_id"], held["user"]) == (1, "bob")
    assert held["gpu_hours_unmet"] == pytest.approx(row["gpu_hours_unmet"])


def test_demand_is_limited_by_what_is_idle_and_by_what_is_requested(
    analysed: Analysed, samples: Rows, jobs: Jobs, t0: datetime
) -> None:
    """A job that waits for eight GPUs gets at most the idle one; of two idle GPUs, one job needs one."""
    idle = samples(every(0, 4 * HOUR), util_pct=0, job="1")
    large = {"job_id": 2, "partition": "p", "eligible": t0, "start": 2 * HOUR, "end": 4 * HOUR, "gpus": 8,
             "node_list": "n2"}  # fmt: skip
    demand = demand_of(analysed(idle, jobs(holder(end=4 * HOUR), large), until=4 * HOUR))
    assert demand.partitions["gpu_hours_waited"].to_list() == [pytest.approx(16.0)]
    assert demand.unmet == pytest.approx(2.0, abs=0.05)
    two = [*idle, *samples(every(0, 4 * HOUR), util_pct=0, job="1", uuid="GPU-1", index=1)]
    demand = demand_of(analysed(two, jobs(holder(end=4 * HOUR, gpus=2), large | {"gpus": 1}), until=4 * HOUR))
    assert demand.partitions["gpu_hours_idle_meanwhile"].to_list() == [pytest.approx(4.0, abs=0.05)]
    assert demand.unmet == pytest.approx(2.0, abs=0.05)


def test_holder_names_jobs_in_whose_way_it_was(analysed: Analysed, samples: Rows, jobs: Jobs, t0: datetime) -> None:
    """Of jobs of its partition, those that waited while its GPU was idle; the first one waited longest meanwhile."""

    def waiting(job_id: int, eligible: int, start: int, user: str, partition: str = "p") -> dict[str, Any]:
        return {"job_id": job_id, "user": user, "partition": partition, "eligible": t0 + timedelta(hours=eligible),
                "start": start * HOUR, "end": 10 * HOUR, "gpus": 1, "node_list": "n2"}  # fmt: skip

    rows = samples(every(0, 10 * HOUR), util_pct=lambda t: 0 if t >= 4 * HOUR else 90, job="1")
    queue = [waiting(2, 0, 4, "ann"), waiting(3, 3, 6, "cat"), waiting(4, 4, 8, "dan"), waiting(5, 0, 9, "eve", "q")]
    demand = demand_of(analysed(rows, jobs(holder(), *queue), until=10 * HOUR))
    [held] = demand.holders.iter_rows(named=True)
    assert (held["waiting_jobs"], held["waiting_job_id"], held["waiting_user"]) == (2, 4, "dan")
    unmeasured = demand_of(analysed([], jobs(holder(), *queue), until=10 * HOUR))
    assert unmeasured.holders.columns == demand.holders.columns


def test_other_partitions_and_busy_gpus_block_no_job(
    analysed: Analysed, samples: Rows, jobs: Jobs, t0: datetime
) -> None:
    """The idle GPU of another partition does not count, nor does one that computes."""
    waiting = {"job_id": 2, "partition": "q", "eligible": t0, "start": 2 * HOUR, "end": 4 * HOUR, "gpus": 1,
               "node_list": "n2"}  # fmt: skip
    idle = samples(every(0, 4 * HOUR), util_pct=0, job="1")
    demand = demand_of(analysed(idle, jobs(holder(end=4 * HOUR), waiting), until=4 * HOUR))
    assert demand.partitions["partition"].to_list() == ["q"]
    assert (demand.unmet, demand.holders.height) == (0.0, 0)
    busy = samples(every(0, 4 * HOUR), util_pct=90, job="1")
    demand = demand_of(analysed(busy, jobs(holder(end=4 * HOUR), waiting | {"partition": "p"}), until=4 * HOUR))
    assert demand.unmet == 0.0


def test_without_metrics_unmet_hours_are_unknown(analysed: Analysed, jobs: Jobs, t0: datetime) -> None:
    """The waits are known nevertheless."""
    waiting = {"job_id": 2, "partition": "p", "eligible": t0, "start": 2 * HOUR, "end": 4 * HOUR, "gpus": 1}
    demand = demand_of(analysed([], jobs(holder(end=4 * HOUR), waiting), until=4 * HOUR))
    [row] = demand.partitions.iter_rows(named=True)
    assert row["gpu_hours_waited"] == pytest.approx(2.0)
    assert (row["gpu_hours_idle_meanwhile"], row["gpu_hours_unmet"], demand.unmet) == (None, None, None)


def test_demand_is_unknown_without_eligible_times_and_for_single_users(
    analysed: Analysed, samples: Rows, jobs: Jobs, t0: datetime
) -> None:
    """Jobs of all users wait for the same GPUs."""
    assert analysed([], jobs(holder())).demand is None
    rows = samples(every(0, 2 * HOUR), util_pct=0, job="1")
    runs = jobs(holder(eligible=t0 - timedelta(hours=1)))
    assert analysed(rows, runs).demand is not None
    assert analysed(rows, runs, users=("bob",)).demand is None


def test_small_job_behind_a_large_job(analysed: Analysed, jobs: Jobs, t0: datetime) -> None:
    """Job 3 waits three hours behind job 2, which needs more GPUs; then it is the head itself. Partitions are apart."""

    def waiting(job_id: int, eligible: int, start: int, gpus: int, partition: str = "p") -> dict[str, Any]:
        return {"job_id": job_id, "partition": partition, "eligible": t0 + timedelta(hours=eligible),
                "start": start * HOUR, "end": 10 * HOUR, "gpus": gpus}  # fmt: skip

    runs = jobs(
        holder(), waiting(2, 0, 4, 8), waiting(3, 1, 6, 2), waiting(4, 1, 3, 8), waiting(5, 1, 5, 1, "q"),
    )  # fmt: skip
    rows = {row["partition"]: row for row in demand_of(analysed([], runs, until=10 * HOUR)).partitions.to_dicts()}
    assert rows["p"]["jobs"] == 3
    assert rows["p"]["gpu_hours_behind_larger"] == pytest.approx(2 * 3.0)
    assert rows["q"]["gpu_hours_behind_larger"] == 0.0


def test_wait_before_the_interval_is_not_counted(analysed: Analysed, jobs: Jobs, t0: datetime) -> None:
    """Only the part within the interval is."""
    waiting = {"job_id": 2, "partition": "p", "eligible": t0 - timedelta(hours=5), "start": HOUR, "end": 2 * HOUR,
               "gpus": 2}  # fmt: skip
    [hours] = demand_of(analysed([], jobs(waiting))).partitions["gpu_hours_waited"].to_list()
    assert hours == pytest.approx(2.0)
