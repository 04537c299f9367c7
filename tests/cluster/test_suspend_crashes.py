"""Agents, slurmctld and nodes that fail during a suspension or restore: the job is never lost and never duplicated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, docker, wait_until
from cluster.sleepers import (
    BY_HAND,
    SHARED,
    asleep,
    each_once,
    finish,
    hold_criu,
    idle_job,
    kill_agent,
    let_criu_go,
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
    """Run agents with a criu that can be paused before and after its work."""
    wait_for_agents(cluster)
    with pausing_criu(cluster):
        yield


def begin_to_suspend(cluster: Cluster) -> tuple[str, str]:
    """Start a job to be suspended; return its ID and node."""
    job = cluster.submit(BY_HAND, script=idle_job())
    cluster.wait_for_output(job, "step number=2")
    return job, cluster.job(job)["BatchHost"]


def ask_for_suspension(cluster: Cluster, job: str) -> None:
    cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")


def goes_on(cluster: Cluster, job: str) -> None:
    """Assert that the job completes from any state, with each step computed once."""
    if cluster.job(job)["JobState"] not in RUNS_ON:
        wait_asleep(cluster, job)
        wake(cluster, job)
    assert each_once(finish(cluster, job))


@pytest.mark.parametrize("when", ["before", "after"])
def test_job_survives_agent_killed_during_dump(cluster: Cluster, paused: None, when: str) -> None:
    """The next agent waits for the dump that survived the old agent, and deletes it; the job keeps running."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, when, "dump")
    ask_for_suspension(cluster, job)
    wait_for_held_criu(cluster, node, when, "dump")
    kill_agent(cluster, node)
    let_criu_go(cluster, node)
    wait_until("its journal is closed", lambda: cluster.run(node, "ls", "/var/lib/slurm-affinode/journal").stdout == "")
    assert cluster.job(job)["JobState"] in RUNS_ON
    assert cluster.job(job)["Restarts"] == "0"
    goes_on(cluster, job)


def test_job_survives_agent_killed_during_lock(cluster: Cluster, paused: None) -> None:
    """The lock does not complete, and the agent dies meanwhile; the job keeps running."""
    job, node = begin_to_suspend(cluster)
    cluster.exec(node, "gpu-emulatorctl", "fault", "lock-timeout")
    try:
        ask_for_suspension(cluster, job)
        wait_for_phase(cluster, node, "locking")
        kill_agent(cluster, node)
    finally:
        cluster.exec(node, "gpu-emulatorctl", "fault", "clear")
    goes_on(cluster, job)


def test_requeue_is_retried_after_agent_killed(cluster: Cluster, paused: None) -> None:
    """slurmctld does not respond, the image is complete, the agent dies: the next agent requests the requeue again."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "after", "dump")
    ask_for_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "after", "dump")
    docker("pause", cluster.container("slurmctld"))
    try:
        let_criu_go(cluster, node)
        wait_for_phase(cluster, node, "requeueing")
        kill_agent(cluster, node)
    finally:
        docker("unpause", cluster.container("slurmctld"))
    wait_asleep(cluster, job, timeout_s=90)
    goes_on(cluster, job)


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
        let_criu_go(cluster, name)
    goes_on(cluster, job)
    running = cluster.run(node, "pgrep", "-u", "alice", "-f", "idle_after").stdout
    assert running == ""


def test_suspension_survives_slurmctld_restarts(cluster: Cluster, paused: None) -> None:
    """slurmctld recovers its state, and the job resumes."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "before", "dump")
    ask_for_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "before", "dump")
    cluster.restart("slurmctld")
    let_criu_go(cluster, node)
    wait_for_nodes(cluster)
    wait_asleep(cluster, job, timeout_s=90)
    cluster.restart("slurmctld")
    wait_for_nodes(cluster)
    goes_on(cluster, job)


def test_suspended_job_resumes_after_node_loss(cluster: Cluster, paused: None) -> None:
    """The image is on the shared file system: the job resumes on the other node."""
    job = asleep(cluster, idle_job(), BY_HAND)
    node = "c1" if "suspended on c1" in cluster.exec("login", "cat", f"/home/alice/slurm-{job}.out") else "c2"
    cluster.kill(node)
    try:
        goes_on(cluster, job)
    finally:
        cluster.start(node)
        wait_for_agents(cluster)


def test_job_starts_afresh_after_node_loss_during_dump(cluster: Cluster, paused: None) -> None:
    """There is no image yet: Slurm requeues the job, and it starts from the beginning."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "before", "dump")
    ask_for_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "before", "dump")
    cluster.kill(node)
    try:
        wait_until("it is requeued", lambda: cluster.job(job)["Restarts"], lambda count: count == "1", timeout_s=90)
    finally:
        cluster.start(node)
        wait_for_agents(cluster)
    assert each_once(finish(cluster, job, timeout_s=120))


def test_job_resumes_after_node_loss_during_requeue(cluster: Cluster, paused: None) -> None:
    """The complete image is on the lost node: once the node is back, the job resumes where it stopped."""
    job, node = begin_to_suspend(cluster)
    hold_criu(cluster, node, "after", "dump")
    ask_for_suspension(cluster, job)
    wait_for_held_criu(cluster, node, "after", "dump")
    docker("pause", cluster.container("slurmctld"))
    try:
        let_criu_go(cluster, node)
        wait_for_phase(cluster, node, "requeueing")
        cluster.kill(node)
    finally:
        docker("unpause", cluster.container("slurmctld"))
    cluster.start(node)
    wait_for_agents(cluster)
    goes_on(cluster, job)
    assert cluster.run("c1", "sh", "-c", f"ls {SHARED}/claims").returncode == 0


def test_restored_job_is_restored_again_after_node_loss(cluster: Cluster, paused: None) -> None:
    """The node dies after a restore: the job is requeued and restored from the same image again."""
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
