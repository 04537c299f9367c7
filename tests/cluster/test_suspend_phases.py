"""Kill the agent or restart slurmctld at the beginning of each phase: no job is lost or duplicated."""

from __future__ import annotations

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phase_jobs import BEFORE_IMAGE, WITH_IMAGE, every_other, job_at_phase
from cluster.phases import continue_agent, kill_stopped, stopping_at, wait_settled
from cluster.sleepers import each_once, finish, wait_asleep, wait_for_agents, wait_for_nodes, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUNS = ("RUNNING", "COMPLETING", "COMPLETED")


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def assert_completes(cluster: Cluster, job: str, restarts: int) -> None:
    """Assert that the job computes each step once, with intact memory, and that accounting has this many requeues."""
    if restarts and cluster.job(job)["JobState"] not in ("RUNNING", "COMPLETED"):
        wait_asleep(cluster, job)
        wake(cluster, job)
    output = finish(cluster, job, timeout_s=150)
    assert each_once(output)
    assert output.count("memory=intact") == 1
    assert cluster.job(job)["Restarts"] == str(restarts)
    cluster.wait_for_runs(job, "COMPLETED")
    wait_until(
        "accounting has all attempts",
        lambda: cluster.runs(job, duplicates=True),
        lambda runs: len(runs) == restarts + 1,
    )
    for name in ("c1", "c2"):
        assert cluster.run(name, "pgrep", "-u", "alice", "-f", "idle_after").stdout == ""


@pytest.mark.parametrize("phase", [*BEFORE_IMAGE, *WITH_IMAGE, "restoring"])
def test_job_survives_agent_killed_at_phase(cluster: Cluster, phase: str) -> None:
    """Without an image, the suspension is rolled back; with one, the job is suspended, or restored again."""
    with stopping_at(cluster, phase):
        stopped = job_at_phase(cluster, phase)
        kill_stopped(cluster, stopped.node)
    wait_settled(cluster)
    if phase in BEFORE_IMAGE:
        assert cluster.job(stopped.job)["JobState"] in RUNS
    assert_completes(cluster, stopped.job, restarts=0 if phase in BEFORE_IMAGE else 1)


@pytest.mark.parametrize("phase", every_other([*BEFORE_IMAGE, *WITH_IMAGE, "restoring"]))
def test_job_survives_slurmctld_restart_at_phase(cluster: Cluster, phase: str) -> None:
    """The job is suspended or restored as usual."""
    with stopping_at(cluster, phase):
        stopped = job_at_phase(cluster, phase)
        cluster.restart("slurmctld")
        wait_for_nodes(cluster)
        continue_agent(cluster, stopped.node)
        wait_settled(cluster)
    assert_completes(cluster, stopped.job, restarts=1)
