"""Failures of agents, slurmctld and nodes during a suspension or restore: no job is lost or duplicated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, docker, wait_until
from cluster.sleepers import (
    BY_HAND,
    SHARED,
    asleep,
    continue_criu,
    each_once,
    finish,
    hold_criu,
    idle_job,
    kill_agent,
    pausing_criu,
    wait_asleep,
    wait_for_agents,
    wait_for_held_criu,
    wait_for_nodes,
    wait_for_phase,
    wake,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUNS_ON = ("RUNNING", "COMPLETING", "COMPLETED")


@pytest.fixture(scope="module")
def paused(cluster: Cluster) -> Iterator[None]:
    """Run agents with a CRIU that can be paused before and after its work."""
    wait_for_agents(cluster)
    with pausing_criu(cluster):
        yield


def begin_to_suspend(cluster: Cluster) -> tuple[str, str]:
    """Start a job and request its suspension; return its ID and node."""
    job = cluster.submit(BY_HAND, script=idle_job())
    cluster.wait_for_output(job, "step number=2")
    return job, cluster.job(job)["BatchHost"]


def request_suspension(cluster: Cluster, job: str) -> None:
    cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")


def assert_completes(cluster: Cluster, job: str) -> None:
    """Assert that the job completes from any state, with each step computed once."""
    if cluster.job(job)["JobState"] not in RUNS_ON:
        wait_asleep(cluster, job)
        wake(cluster, job)
    assert each_once(finish(cluster, job))


@pytest.mark.parametrize("when", ["before", "after"])
def test_job_survives_agent_killed_during_dump(cluster: Cluster, paused: None, when: str) -> None:
    """The dump survives the agent; the next agent waits for it and deletes it, and the job keeps running."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, when, "dump")
    request_suspension(cluster, job)
    wait_for_held_criu(cluster, node, when, "dump")
    kill_agent(cluster, node)
    continue_criu(cluster, node)
    wait_until("its journal is closed", lambda: cluster.run(node, "ls", "/var/lib/slurm-affinode/journal").stdout == "")
    assert cluster.job(job)["JobState"] in RUNS_ON
    assert cluster.job(job)["Restarts"] == "0"
    assert_completes(cluster, job)


def test_job_survives_agent_killed_during_lock(cluster: Cluster, paused: None) -> None:
    """The agent is killed while the lock waits; the job keeps running."""
    job, node = begin_to_suspend(cluster)
    cluster.exec(node, "gpu-emulatorctl", "fault", "lock-timeout")
    try:
        request_suspension(cluster, job)
        wait_for_phase(cluster, node, "locking")
        kill_agent(cluster, node)
    finally:
        cluster.exec(node, "gpu-emulatorctl", "fault", "clear")
    assert_completes(cluster, job)


def test_requeue_is_retried_after_agent_killed(cluster: Cluster, paused: None) -> None:
    """The agent is killed with a complete image while slurmctld is down: the next agent requests the requeue again."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "after", "dump")
    request_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "after", "dump")
    docker("pause", cluster.container("slurmctld"))
    try:
        continue_criu(cluster, node)
        wait_for_phase(cluster, node, "requeueing")
        kill_agent(cluster, node)
    finally:
        docker("unpause", cluster.container("slurmctld"))
    wait_asleep(cluster, job, timeout_s=90)
    assert_completes(cluster, job)


@pytest.mark.parametrize("when", ["before", "after"])
def test_restore_is_repeated_after_agent_killed(cluster: Cluster, paused: None, when: str) -> None:
    """The processes of the first restore are killed; the image is restored again."""
    job = asleep(cluster, idle_job(), BY_HAND)
    for node in ("c1", "c2"):
        hold_criu(cluster, node, when, "restore")
    wake(cluster, job)
    cluster.wait_for_state(job, "RUNNING")
    node = cluster.job(job)["BatchHost"]
    wait_for_held_criu(cluster, node, when, "restore")
    kill_agent(cluster, node)
    for name in ("c1", "c2"):
        continue_criu(cluster, name)
    assert_completes(cluster, job)
    running = cluster.run(node, "pgrep", "-u", "alice", "-f", "idle_after").stdout
    assert running == ""


def test_suspension_survives_slurmctld_restarts(cluster: Cluster, paused: None) -> None:
    """slurmctld recovers its state, and the job resumes."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "before", "dump")
    request_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "before", "dump")
    cluster.restart("slurmctld")
    continue_criu(cluster, node)
    wait_for_nodes(cluster)
    wait_asleep(cluster, job, timeout_s=90)
    cluster.restart("slurmctld")
    wait_for_nodes(cluster)
    assert_completes(cluster, job)


def test_suspended_job_resumes_after_node_loss(cluster: Cluster, paused: None) -> None:
    """The image is on the shared file system: the job resumes on the other node."""
    job = asleep(cluster, idle_job(), BY_HAND)
    node = "c1" if "suspended on c1" in cluster.exec("login", "cat", f"/home/alice/slurm-{job}.out") else "c2"
    cluster.kill(node)
    try:
        assert_completes(cluster, job)
    finally:
        cluster.start(node)
        wait_for_agents(cluster)


def test_job_starts_afresh_after_node_loss_during_dump(cluster: Cluster, paused: None) -> None:
    """Without an image, Slurm requeues the job, and it starts from its beginning."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "before", "dump")
    request_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "before", "dump")
    cluster.kill(node)
    try:
        wait_until("it is requeued", lambda: cluster.job(job)["Restarts"], lambda count: count == "1", timeout_s=90)
        # Slurm ends the steps of a job that starts while its node registers, and does not notice the end of the job.
        cluster.exec("login", "scontrol", "hold", job)
    finally:
        cluster.start(node)
        wait_for_agents(cluster)
    cluster.exec("login", "scontrol", "release", job)
    assert each_once(finish(cluster, job, timeout_s=120))


def test_job_resumes_after_node_loss_during_requeue(cluster: Cluster, paused: None) -> None:
    """The complete image is on the lost node: the job resumes where it stopped once the node is back."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "after", "dump")
    request_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "after", "dump")
    docker("pause", cluster.container("slurmctld"))
    try:
        continue_criu(cluster, node)
        wait_for_phase(cluster, node, "requeueing")
        cluster.kill(node)
    finally:
        docker("unpause", cluster.container("slurmctld"))
    cluster.start(node)
    wait_for_agents(cluster)
    assert_completes(cluster, job)
    assert cluster.run("c1", "sh", "-c", f"ls {SHARED}/claims").returncode == 0


def test_restored_job_is_restored_again_after_node_loss(cluster: Cluster, paused: None) -> None:
    """The node fails after a restore: the job is requeued and restored from the same image again."""
    job = asleep(cluster, idle_job(), BY_HAND)
    wake(cluster, job)
    cluster.wait_for_output(job, "restored on")
    cluster.wait_for_output(job, "step number=4")
    node = cluster.job(job)["BatchHost"]
    cluster.kill(node)
    try:
        wait_until("it is requeued", lambda: cluster.job(job)["Restarts"], lambda count: count == "2", timeout_s=90)
    finally:
        cluster.start(node)
        wait_for_agents(cluster)
    assert each_once(finish(cluster, job, timeout_s=120))
