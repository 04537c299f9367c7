"""When requested GPUs become free: by limits and by predictions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from agent_stand_ins import NODE, job
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.analysis.queue_outlook import GpuOutlook, outlooks
from slurm_affinode.model.cluster import GpuCount, Job, Node

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def place(name: str, gpus: int, used: int, **more: Any) -> Node:
    facts = {"partitions": ("gpu",), "gpus": GpuCount(gpus, "a100"), "gpus_used": GpuCount(used, "a100"), **more}
    return replace(NODE, name=name, **facts)


def running(number: int, gpus: int, limit_h: float | None, *, nodes: tuple[str, ...] = ("n1",)) -> Job:
    limit_s = None if limit_h is None else int(limit_h * 3600)
    return job(number, state="RUNNING", start=NOW - HOUR, time_limit_s=limit_s, nodes=nodes, node_gpus=None,
               gpus_allocated=GpuCount(gpus), expected_end=None)  # fmt: skip


def pending(number: int, gpus: int, **more: Any) -> Job:
    facts = {"partitions": ("gpu",), "gpus_requested": GpuCount(gpus), **more}
    return job(number, state="PENDING", start=None, nodes=(), **facts)


def test_gpus_become_free_when_jobs_reach_their_limits() -> None:
    """One of four GPUs is free; a job ends in an hour, another one in five."""
    jobs = [running(1, 1, 2), running(2, 2, 6), pending(3, 1), pending(4, 2), pending(5, 4), pending(6, 5)]
    result = outlooks(jobs, [place("n1", 4, 3)], NOW, None)
    assert result == [
        GpuOutlook(3, 1, NOW, None), GpuOutlook(4, 1, NOW + HOUR, None), GpuOutlook(5, 1, NOW + 5 * HOUR, None),
        GpuOutlook(6, 1, None, None),
    ]  # fmt: skip


def test_job_that_has_outrun_its_prediction_ends_at_its_limit() -> None:
    jobs = [running(1, 1, 2), running(2, 2, 6), pending(3, 4)]
    nodes = [place("n1", 4, 3)]
    early = outlooks(jobs, nodes, NOW, {1: NOW - HOUR / 2, 2: NOW + HOUR / 4})
    assert (early[0].enough_by_limits, early[0].enough_by_predictions) == (NOW + 5 * HOUR, NOW + HOUR)


def test_job_without_a_limit_never_ends_by_limits() -> None:
    jobs = [running(1, 4, None), pending(2, 1)]
    (outlook,) = outlooks(jobs, [place("n1", 4, 4)], NOW, {1: NOW + HOUR})
    assert (outlook.enough_by_limits, outlook.enough_by_predictions) == (None, NOW + HOUR)


def test_nodes_of_other_partitions_and_types_and_drained_ones_do_not_count() -> None:
    nodes = [place("n1", 4, 4), place("n2", 4, 0, partitions=("cpu",)), place("n3", 4, 0, flags=frozenset({"DRAIN"})),
             replace(place("n4", 4, 0), gpus=GpuCount(4, "h100"))]  # fmt: skip
    jobs = [running(1, 4, 3, nodes=("n1", "n2")), pending(2, 2, gpus_requested=GpuCount(2, "a100"))]
    assert outlooks(jobs, nodes, NOW, None) == [GpuOutlook(2, 0, NOW + 2 * HOUR, None)]


@given(
    held=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=6), less=st.integers(1, 8),
    more=st.integers(0, 8),
)  # fmt: skip
def test_job_that_requests_more_never_gets_its_gpus_earlier(held: list[tuple[int, int]], less: int, more: int) -> None:
    jobs = [running(at, gpus, limit) for at, (gpus, limit) in enumerate(held, 10)]
    used = sum(gpus for gpus, _ in held)
    few, many = outlooks([*jobs, pending(1, less), pending(2, less + more)], [place("n1", used + 2, used)], NOW, None)
    assert many.enough_by_limits is None or (
        few.enough_by_limits is not None and few.enough_by_limits <= many.enough_by_limits
    )
