"""Programs of users that the option, a suspension or a restore must not harm."""

from __future__ import annotations

import pytest
from cluster.driver import Cluster
from cluster.sleepers import BY_HAND, end, suspend, wait_asleep, wait_for_agents, wake
from cluster.spank import OPTION, outcome
from cluster.test_suspend_kinds import ON_C1

pytestmark = pytest.mark.cluster

START_S = 120


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def move(cluster: Cluster, job: str, node: str) -> None:
    """Suspend a job, and resume it on a node."""
    suspend(cluster, job)
    wait_asleep(cluster, job)
    cluster.exec("login", "scontrol", "update", f"jobid={job}", f"reqnodelist={node}")
    wake(cluster, job)
    cluster.wait_for_state(job, "RUNNING")


# --- PIDs


def test_mpirun_starts_beside_another_job_and_after_a_lost_one(cluster: Cluster) -> None:
    """Open MPI names its session directory after host, PID and user, and a killed job leaves it behind."""
    cluster.shell("c1", "rm -rf /tmp/prterun.*")
    mpirun = "mpirun -n 2 --bind-to none sh -c 'echo rank of $1; sleep $2' -"
    options = ("--partition=gpu", "--ntasks=2", "--nodelist=c1", OPTION)
    first = cluster.submit(*options, wrap=f"{mpirun} first 300; echo ended with $?")
    cluster.wait_for_output(first, "rank of first", timeout_s=START_S)
    second = cluster.submit(*options, wrap=f"{mpirun} second 0; echo ended with $?")
    assert outcome(cluster, second).state == "COMPLETED"
    cluster.exec("login", "scancel", "--signal=KILL", "--full", first, user="alice")
    outcome(cluster, first)
    assert cluster.shell("c1", "ls -d /tmp/prterun.*") != ""
    third = cluster.submit(*options, wrap=f"{mpirun} third 0; echo ended with $?")
    assert outcome(cluster, third).state == "COMPLETED"
    cluster.shell("c1", "rm -rf /tmp/prterun.*")
    for job in (second, third):
        assert "ended with 0" in cluster.output(job), cluster.output(job)


def test_jobs_and_attempts_have_different_pids(cluster: Cluster) -> None:
    """Neither a further job nor a further attempt repeats the PIDs of an earlier one."""
    script = (
        "#!/bin/bash\necho pid $$\n"
        "if [ ${SLURM_RESTART_COUNT:-0} = 0 ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi\n"
    )
    jobs = [cluster.submit("--partition=gpu", OPTION, "--open-mode=append", script=script) for _ in range(2)]
    found = []
    for job in jobs:
        cluster.wait_for_runs(job, "REQUEUED", "COMPLETED", duplicates=True)
        found += [int(line.split()[1]) for line in cluster.output(job).splitlines() if line.startswith("pid ")]
    assert len(set(found)) == len(found) == 4, found
    assert min(found) > 1000


def test_job_near_the_highest_pid_moves(cluster: Cluster) -> None:
    """The PIDs of CRIU and of further processes are those that the job does not use."""
    script = """#!/usr/bin/python3
import os, pathlib, subprocess, time
home, job = pathlib.Path.home(), os.environ["SLURM_JOB_ID"]
print("started", flush=True)
while not (home / f"slurm-{job}-go.out").exists():
    time.sleep(0.1)
held = [subprocess.Popen(["sleep", "1000"]) for _ in range(20)]
print("high", held[0].pid, "low", held[-1].pid, flush=True)
while not (home / f"slurm-{job}-end.out").exists():
    time.sleep(0.1)
subprocess.run(["true"], check=True)
assert all(child.poll() is None for child in held)
print("all are there", flush=True)
for child in held: child.kill()
"""
    job = cluster.submit(BY_HAND, *ON_C1, script=script)
    cluster.wait_for_output(job, "started", timeout_s=START_S)
    # Tens of thousands of processes would have the same effect.
    near = "top=$(cat /proc/sys/kernel/pid_max); for pid in $(pgrep -u alice); do "
    near += 'nsenter -t $pid -p -m sh -c "echo $((top - 10)) >/proc/sys/kernel/ns_last_pid"; done; echo $top'
    top = int(cluster.shell("c1", near).split()[-1])
    cluster.exec("login", "touch", f"/home/alice/slurm-{job}-go.out", user="alice")
    cluster.wait_for_output(job, "high")
    _, high, _, low = cluster.output(job).split("started")[1].split()[:4]
    assert int(high) > top - 10 > int(low)
    move(cluster, job, "c2")
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert "all are there" in cluster.output(job)
