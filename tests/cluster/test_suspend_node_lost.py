"""A node that is lost exactly where a phase begins: the job is never lost and never doubled. Every phase."""

from __future__ import annotations

import pytest
from cluster.caught import BEFORE_IMAGE, IDLE, WITH_IMAGE, catch
from cluster.driver import Cluster, wait_until
from cluster.phases import stopping_at
from cluster.sleepers import finish, steps, wait_asleep, wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """They answer."""
    wait_for_agents(cluster)


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
