"""Agent killed or slurmctld restarted at the beginning of each phase: the job is never lost and never duplicated."""

from __future__ import annotations

import pytest
from cluster.caught import BEFORE_IMAGE, WITH_IMAGE, catch
from cluster.driver import Cluster, wait_until
from cluster.phases import go_on, kill_stopped, stopping_at, wait_settled
from cluster.sleepers import each_once, finish, wait_asleep, wait_for_agents, wait_for_nodes, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUNS = ("RUNNING", "COMPLETING", "COMPLETED")


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def completes(cluster: Cluster, job: str, restarts: int) -> None:
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
    """Before there is an image, the suspension is rolled back; afterwards the job is suspended, or restored again."""
    with stopping_at(cluster, phase):
        caught = catch(cluster, phase)
        kill_stopped(cluster, caught.node)
    wait_settled(cluster)
    if phase in BEFORE_IMAGE:
        assert cluster.job(caught.job)["JobState"] in RUNS
    completes(cluster, caught.job, restarts=0 if phase in BEFORE_IMAGE else 1)


@pytest.mark.parametrize("phase", [*BEFORE_IMAGE, *WITH_IMAGE, "restoring"])
def test_job_survives_slurmctld_restart_at_phase(cluster: Cluster, phase: str) -> None:
    """The job is suspended or restored as usual."""
    with stopping_at(cluster, phase):
        caught = catch(cluster, phase)
        cluster.restart("slurmctld")
        wait_for_nodes(cluster)
        go_on(cluster, caught.node)
        wait_settled(cluster)
    completes(cluster, caught.job, restarts=1)
