"""Lose a node at the beginning of each phase: no job is lost or duplicated."""

from __future__ import annotations

import re

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phase_jobs import BEFORE_IMAGE, WITH_IMAGE, every_other, job_at_phase
from cluster.phases import stopping_at
from cluster.sleepers import BY_HAND, each_once, finish, steps, suspend, wait_asleep, wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


@pytest.mark.parametrize(
    "phase",
    [
        *(pytest.param(phase, marks=pytest.mark.nightly) for phase in BEFORE_IMAGE[:-1]),
        BEFORE_IMAGE[-1],
        *every_other([*WITH_IMAGE, "restoring"]),
    ],
)
def test_job_survives_node_loss_at_phase(cluster: Cluster, phase: str) -> None:
    """Without an image the job starts from its beginning; with one it is restored, maybe only when the node is back."""
    before = 1 if phase == "restoring" else 0
    with stopping_at(cluster, phase):
        stopped = job_at_phase(cluster, phase)
        cluster.kill(stopped.node)
        try:
            # If Slurm has not received the requeue request, the requeue would let the job start afresh elsewhere. In
            # the other phases it is faster to wait until Slurm has noticed the loss of the node.
            if phase not in ("dumped", "requeueing"):
                wait_for_requeue(cluster, stopped.job, before)
        finally:
            cluster.start(stopped.node)
        wait_for_agents(cluster)
    wait_for_requeue(cluster, stopped.job, before)
    if phase in WITH_IMAGE and held_or_runs(cluster, stopped.job) == "held":
        # Slurm received the hold request before the loss, or once the node was back.
        wait_asleep(cluster, stopped.job, timeout_s=150)
        wake(cluster, stopped.job)
    output = finish(cluster, stopped.job, timeout_s=150)
    assert each_once(output)
    assert output.count("memory=intact") == 1
    assert (f"suspended on {stopped.node}" in output) == (phase not in BEFORE_IMAGE)


def wait_for_requeue(cluster: Cluster, job: str, before: int) -> None:
    """Wait until Slurm has noticed the loss of the attempt."""
    wait_until("it is requeued", lambda: int(cluster.job(job)["Restarts"]), lambda count: count > before, timeout_s=150)


def held_or_runs(cluster: Cluster, job: str) -> str:
    """Wait until a requeued job runs again or is held."""

    def state() -> str:
        result = cluster.job(job)
        if result["JobState"] in ("RUNNING", "COMPLETED"):
            return "runs"
        return "held" if result["Priority"] == "0" and result["JobState"] == "PENDING" else ""

    return wait_until("it runs again, or is held", state, timeout_s=150)


KEEPER = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1 --nodelist=c1
import mmap, os, time
path = "/dev/shm/kept-" + os.environ["SLURM_JOB_ID"]
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 1 << 20)
memory = mmap.mmap(fd, 1 << 20)
for number in range(1, 1000):
    memory[0] = number % 256
    print("step number=%d time=%.1f" % (number, time.time()), flush=True)
    time.sleep(0.5)
    if memory[0] != number % 256 or os.stat(path).st_ino != os.fstat(fd).st_ino:
        raise SystemExit("it has other contents")
"""


@pytest.mark.parametrize("how", ["requeued", "node down"])
def test_attempt_killed_after_a_restore_is_restored_on_the_same_node(cluster: Cluster, how: str) -> None:
    """The killed attempt has left shared memory with newer contents than the image, which is replaced."""
    job = cluster.submit(BY_HAND, script=KEEPER)
    cluster.wait_for_output(job, "step number=2")
    suspend(cluster, job)
    wait_asleep(cluster, job)
    last = steps(cluster.output(job))[-1]
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    wake(cluster, job)
    times = re.compile(rf"step number={last + 3} time=(\S+)")
    for restarts in (2, 3):
        cluster.wait_for_output(job, f"step number={last + 3} ")
        (before,) = times.findall(cluster.output(job))
        cluster.shell("c2", f"test -f /dev/shm/kept-{job}")
        if how == "requeued":
            cluster.exec("login", "scontrol", "requeue", job)
        else:
            cluster.exec("login", "scontrol", "update", "NodeName=c2", "State=DOWN", "Reason=lost")
        wait_for_requeue(cluster, job, restarts - 1)
        if how == "node down":
            # Refused if its slurmd has responded meanwhile, which returns the node to service.
            cluster.run("login", "scontrol", "update", "NodeName=c2", "State=RESUME")
        wait_until(
            "it is restored again, or is not",
            lambda: cluster.output(job),
            lambda output, before=before: "not restored" in output or times.findall(output) not in ([], [before]),
            timeout_s=150,
        )
        assert "not restored" not in cluster.output(job)
        assert cluster.job(job)["BatchHost"] == "c2"
    cluster.exec("login", "scancel", job, user="alice")
