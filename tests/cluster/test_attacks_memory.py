"""Attacks by jobs that use a raised memory limit for themselves."""

from __future__ import annotations

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.phase_jobs import row_of, send_request
from cluster.phases import stopping_at, wait_for_stop, wait_settled
from cluster.servers import fault
from cluster.sleepers import BY_HAND, NOT_CONNECTED, NOT_YET, UNTIL_FINISH, wait_for_agents

from .test_memory_limits import GPU_MIB, LIMIT_MIB, NODE, SMALL, limited, limits, records, used, wait_until_lowered

__all__ = ["limited"]

pytestmark = pytest.mark.cluster

AGAIN = "/home/alice/hoard-again"
GPU = ("--partition=gpu", "--gres=gpu:1")

# Takes all memory up to the limit as soon as it is raised, and spoils the dump: a traced process cannot be dumped.
HOARD = """
import ctypes, os, time
def number(name):
    return int(open(place + "/memory." + name + "_in_bytes").read())
lines = open("/proc/self/cgroup").read().splitlines()
place = "/sys/fs/cgroup/memory" + next(one for one in lines if ":memory:" in one).split(":", 2)[2]
while number("limit") > 1 << 50:
    place = os.path.dirname(place)
held, seen = [], number("limit")
def wait():
    while number("limit") < seen + (1 << 28):
        time.sleep(0.001)
def hoard():
    while (left := number("limit") - number("usage")) > 96 << 20:
        held.append(bytearray(min(left - (64 << 20), 64 << 20)))
    print("hoarded", flush=True)
def traced():
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)
        time.sleep(1000)
    return child
"""
BESIDE = f"""#!/bin/bash
{WORKLOADS}/idle_after.py --busy 1 --idle 1 {UNTIL_FINISH} --again 1 --memory-mib {GPU_MIB} &
python3 -c '{HOARD}
while True:
    wait()
    child = traced()
    hoard()
    while not os.path.exists("{AGAIN}"):
        time.sleep(0.1)
    os.unlink("{AGAIN}")
    os.kill(child, 9)
    os.waitpid(child, 0)
    seen = number("limit")' &
wait %1
"""
INSIDE = f"""#!/bin/bash
exec /opt/slurm-affinode/bin/python -c '{HOARD}
import sys, threading
sys.path.insert(0, "{WORKLOADS}")
import gpu
device = gpu.Gpu()
device.hold({GPU_MIB} << 20)
threading.Thread(target=lambda: (wait(), hoard()), daemon=True).start()
print("waits", flush=True)
time.sleep(1000)
'
"""


def suspend_once(cluster: Cluster, job: str) -> str:
    """Request a suspension as soon as the agent accepts requests for this job; return the error."""
    done = wait_until(
        f"job {job} may be suspended",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
        lambda done: NOT_YET not in done.stderr and NOT_CONNECTED not in done.stderr,
    )
    return done.stderr


def test_limit_is_not_raised_again_and_again(cluster: Cluster) -> None:
    """A process takes the memory of each raise and spoils the dump: the job gets Slurm's limit back.

    The limit is raised once at most, however often a suspension is requested.
    """
    cluster.shell("login", f"rm -f {AGAIN}")
    wait_for_agents(cluster)
    job = cluster.submit(BY_HAND, *GPU, *SMALL, script=BESIDE)
    cluster.wait_for_output(job, "step number=2")
    highest = spoiled = 0
    for _ in range(4):
        suspend_once(cluster, job)
        if cluster.job(job)["JobState"] != "RUNNING":
            break  # it could not spoil the dump
        highest = max(highest, *limits(cluster))
        if cluster.output(job).count("hoarded") > spoiled:
            spoiled += 1
            cluster.shell("login", f"touch {AGAIN}", user="alice")
            wait_until("it lies in wait", lambda: cluster.run("login", "test", "-e", AGAIN).returncode != 0)
    else:
        assert highest < LIMIT_MIB + 2 * GPU_MIB
        wait_until_lowered(cluster, timeout_s=120)
        assert used(cluster) <= LIMIT_MIB
    cluster.exec("login", "scancel", job, user="alice")
    wait_settled(cluster)
    wait_until("no record is left", lambda: records(cluster), lambda names: names == "")


def test_job_that_keeps_memory_of_a_raised_limit_is_out_of_memory(cluster: Cluster) -> None:
    """A thread of the process that uses CUDA takes it, and GPU memory does not move: after a minute, the job is killed.

    Slurm reports it like any other job that exceeds its memory, and its output has the reason.
    """
    wait_for_agents(cluster)
    job = cluster.submit(BY_HAND, *GPU, *SMALL, script=INSIDE)
    cluster.wait_for_output(job, "waits")
    row_of(cluster, job)
    with fault(cluster, "checkpoint-fails"):
        with stopping_at(cluster, "locked", NODE):
            send_request(cluster, "suspend", job)
            assert wait_for_stop(cluster, lambda: False)
            cluster.wait_for_output(job, "hoarded")
        wait_settled(cluster)
    assert used(cluster) > LIMIT_MIB
    assert "its memory limit is still raised by" in suspend_once(cluster, job)
    cluster.wait_for_state(job, "OUT_OF_MEMORY", timeout_s=120)
    assert "out of memory: the job uses" in cluster.output(job)
    wait_until("no record is left", lambda: records(cluster), lambda names: names == "")
