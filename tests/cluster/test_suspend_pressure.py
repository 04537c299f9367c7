"""Suspensions for a pending job: exactly one job is suspended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import (
    SHARED,
    continue_criu,
    each_once,
    finish,
    hold_criu,
    idle_job,
    pausing_criu,
    status,
    wait_asleep,
    wait_for_agents,
    wake,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

OPTION = "--gpu-suspend-idle=3s,wake=hold"
HELD = "/run/criu-held-before-dump"


@pytest.fixture(scope="module")
def paused(cluster: Cluster) -> Iterator[None]:
    """Run agents with a CRIU that can be paused before its work."""
    wait_for_agents(cluster)
    with pausing_criu(cluster):
        yield


def next_code(cluster: Cluster, job: str) -> str:
    """Return the code of the next action for a job, or of the first reason against one."""
    rows = status(cluster, job).get("jobs", ())
    return str(rows[0]["next"]["code"]) if rows and rows[0]["next"] else ""


def dumps(cluster: Cluster) -> list[str]:
    """Return the nodes on which a dump has begun."""
    return [node for node in ("c1", "c2") if cluster.run(node, "test", "-e", HELD).returncode == 0]


def full_node(cluster: Cluster, node: str) -> str:
    """Fill a node with a busy job and one that idles until ``finish``, one GPU each; return the ID of the idle one."""
    computes = f"{WORKLOADS}/busy.py --seconds 280"
    options = ("--partition=gpu", "--gres=gpu:1", f"--nodelist={node}")
    busy = cluster.submit(*options, wrap=computes, user="bob")
    idle_one = cluster.submit(OPTION, f"--nodelist={node}", script=idle_job())
    for job in (busy, idle_one):
        cluster.wait_for_state(job, "RUNNING")  # a job of another user submitted now finds no free GPU
    return idle_one


def test_one_of_two_idle_jobs_is_suspended(cluster: Cluster, paused: None) -> None:
    """The jobs are on two nodes with an agent each; the status of the job that keeps running gives the reason."""
    jobs = {}
    for node in ("c1", "c2"):
        jobs[node] = full_node(cluster, node)
        hold_criu(cluster, node, "before", "dump")
    for job in jobs.values():
        wait_until("its window is full", lambda job=job: next_code(cluster, job), lambda code: code == "no-pressure")  # type: ignore[misc]
    waiting = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap="sleep 5", user="carol")
    (first,) = wait_until("a dump has begun", lambda: dumps(cluster))
    other = "c2" if first == "c1" else "c1"
    wait_until("the other has no promise", lambda: next_code(cluster, jobs[other]), lambda code: code == "promised")
    text = cluster.exec("login", "slurm-affinode", "status", jobs[other], user="alice")
    assert f"({waiting}) get GPUs of {first}" in text
    continue_criu(cluster, first)
    cluster.wait_for_state(waiting, "COMPLETED")
    assert cluster.runs(waiting)[0].nodes == first
    assert dumps(cluster) == [first]
    wait_asleep(cluster, jobs[first])
    continue_criu(cluster, other)
    assert cluster.job(jobs[other])["Restarts"] == "0"
    wake(cluster, jobs[first])
    assert each_once(finish(cluster, jobs[first], timeout_s=150))
    assert "suspended" not in finish(cluster, jobs[other])


def test_promise_of_aborted_suspension_is_released(cluster: Cluster, paused: None) -> None:
    """The first attempt on each node fails and releases the promise; finally exactly one job is suspended."""
    jobs = {}
    for node in ("c1", "c2"):
        jobs[node] = full_node(cluster, node)
        cluster.exec(node, "gpu-emulatorctl", "fault", "checkpoint-fails", "--count", "1")
    try:
        waiting = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap="sleep 5", user="carol")
        cluster.wait_for_state(waiting, "COMPLETED", timeout_s=120)
    finally:
        for node in jobs:
            cluster.exec(node, "gpu-emulatorctl", "fault", "clear")
    # The job may be running again.
    assert sorted(cluster.job(job)["Restarts"] for job in jobs.values()) == ["0", "1"]
    wait_until(
        "no promise is left",
        lambda: cluster.run("login", "sh", "-c", f"ls {SHARED}/promises").stdout,
        lambda names: waiting not in names,
        timeout_s=90,
    )
