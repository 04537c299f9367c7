"""Whatever dies exactly where a phase begins: the job is never lost and never doubled. Every phase, every fault."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phases import go_on, kill_stopped, open_journals, stopping_at, wait_for_stop, wait_settled
from cluster.sleepers import (
    BY_HAND,
    asleep,
    finish,
    idle_job,
    steps,
    wait_asleep,
    wait_for_agents,
    wait_for_nodes,
    wake,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IDLE = 12
ATTEMPTS = 5
BEFORE_IMAGE = ("locking", "locked", "parked", "dumping")
RUNS = ("RUNNING", "COMPLETING", "COMPLETED")
WITH_IMAGE = ("dumped", "requeueing", "queued")


@dataclass(frozen=True, slots=True)
class Caught:
    """A job whose agent stands still where a phase begins."""

    job: str
    node: str


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """They answer."""
    wait_for_agents(cluster)


def through(cluster: Cluster, job: str, phase: str) -> bool:
    """Whether a job is restored, or suspended, its image shared; or has ended before it could be."""
    if phase == "restoring":
        return "restored on" in cluster.output(job)
    seen = cluster.job(job)
    return (seen["Restarts"] == "1" or seen["JobState"] == "COMPLETED") and not open_journals(cluster)


def catch(cluster: Cluster, phase: str) -> Caught:
    """A job that is being suspended, or restored; within ``stopping_at``."""
    for _ in range(ATTEMPTS):
        if phase == "restoring":
            job = asleep(cluster, idle_job(idle=IDLE), BY_HAND)
            wait_settled(cluster)
            wake(cluster, job)
        else:
            job = cluster.submit(BY_HAND, script=idle_job(idle=IDLE))
            cluster.wait_for_output(job, "step number=2")
            # It has ended by now where the machine is very busy.
            cluster.run("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")
        node = wait_for_stop(cluster, functools.partial(through, cluster, job, phase))
        if node is not None:
            return Caught(job, node)
        cluster.exec("login", "scancel", job, user="alice")
    raise AssertionError(f"none of {ATTEMPTS} agents was caught where {phase} begins")


def completes(cluster: Cluster, job: str, restarts: int) -> None:
    """It makes each step once, with its memory intact; accounting has so many requeued runs, and one that completed."""
    if restarts and cluster.job(job)["JobState"] not in ("RUNNING", "COMPLETED"):
        wait_asleep(cluster, job)
        wake(cluster, job)
    output = finish(cluster, job, timeout_s=150)
    assert steps(output) == list(range(1, IDLE + 1))
    assert output.count("memory=intact") == 1
    assert cluster.job(job)["Restarts"] == str(restarts)
    runs = cluster.runs(job, duplicates=True)
    assert len(runs) == restarts + 1, runs
    cluster.wait_for_runs(job, "COMPLETED")
    for name in ("c1", "c2"):
        assert cluster.run(name, "pgrep", "-u", "alice", "-f", "idle_after").stdout == ""


@pytest.mark.parametrize("phase", [*BEFORE_IMAGE, *WITH_IMAGE, "restoring"])
def test_agent_killed_where_a_phase_begins(cluster: Cluster, phase: str) -> None:
    """Before there is an image it is taken back and the job runs on; from then on it sleeps, or is restored again."""
    with stopping_at(cluster, phase):
        caught = catch(cluster, phase)
        kill_stopped(cluster, caught.node)
    wait_settled(cluster)
    if phase in BEFORE_IMAGE:
        assert cluster.job(caught.job)["JobState"] in RUNS
    completes(cluster, caught.job, restarts=0 if phase in BEFORE_IMAGE else 1)


@pytest.mark.parametrize("phase", [*BEFORE_IMAGE, *WITH_IMAGE, "restoring"])
def test_slurmctld_restarted_where_a_phase_begins(cluster: Cluster, phase: str) -> None:
    """It is suspended, or restored, as if nothing had been."""
    with stopping_at(cluster, phase):
        caught = catch(cluster, phase)
        cluster.restart("slurmctld")
        wait_for_nodes(cluster)
        go_on(cluster, caught.node)
        wait_settled(cluster)
    completes(cluster, caught.job, restarts=1)


@pytest.mark.parametrize("phase", [*BEFORE_IMAGE, *WITH_IMAGE, "restoring"])
def test_node_lost_where_a_phase_begins(cluster: Cluster, phase: str) -> None:
    """Without an image it starts from its beginning, with one from the image; from its node's when that is back."""
    before = 1 if phase == "restoring" else 0
    with stopping_at(cluster, phase):
        caught = catch(cluster, phase)
        cluster.kill(caught.node)
        try:
            # A requeue that Slurm has not been asked for would let it start elsewhere, from its beginning. Else it
            # is quicker to wait until Slurm has seen that the node is gone.
            if phase not in ("dumped", "requeueing"):
                wait_for_requeue(cluster, caught.job, before)
        finally:
            cluster.start(caught.node)
        wait_for_agents(cluster)
    wait_for_requeue(cluster, caught.job, before)
    if phase in WITH_IMAGE and held_or_runs(cluster, caught.job) == "held":
        # Slurm had been asked to hold it, or was when the node was back.
        wait_asleep(cluster, caught.job, timeout_s=150)
        wake(cluster, caught.job)
    output = finish(cluster, caught.job, timeout_s=150)
    assert steps(output)[-IDLE:] == list(range(1, IDLE + 1))
    assert output.count("memory=intact") == 1
    assert (f"suspended on {caught.node}" in output) == (phase not in BEFORE_IMAGE)


def wait_for_requeue(cluster: Cluster, job: str, before: int) -> None:
    """Waits until Slurm has seen that the run is gone."""
    wait_until("it is requeued", lambda: int(cluster.job(job)["Restarts"]), lambda count: count > before, timeout_s=150)


def held_or_runs(cluster: Cluster, job: str) -> str:
    """Waits until a requeued job runs again, or is held."""

    def look() -> str:
        found = cluster.job(job)
        if found["JobState"] in ("RUNNING", "COMPLETED"):
            return "runs"
        return "held" if found["Priority"] == "0" and found["JobState"] == "PENDING" else ""

    return wait_until("it runs again, or is held", look, timeout_s=150)
