"""Jobs with more GPU memory than fits below their memory limit, which the agent raises meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cluster.driver import GPU_NODES, WORKLOADS, Cluster, wait_until
from cluster.servers import BY_HAND as IN_PLACE
from cluster.servers import ask, fault, in_place, put_to_sleep, serve
from cluster.sleepers import (
    BY_HAND,
    LOCAL,
    UNTIL_FINISH,
    asleep,
    configured,
    continue_criu,
    each_once,
    finish,
    hold_criu,
    idle_job,
    kill_agent,
    pausing_criu,
    status,
    suspend,
    wait_asleep,
    wait_for_agents,
    wait_for_held_criu,
    wake,
)

pytestmark = pytest.mark.cluster

NODE = "c1"
LIMIT_MIB, GPU_MIB = 500, 1500
SMALL = (f"--nodelist={NODE}", f"--mem={LIMIT_MIB}M")
SCRIPT = idle_job(more=f"--memory-mib {GPU_MIB}")
ROOT = "/sys/fs/cgroup/memory"

PLACE = f"{ROOT}/slurm*/uid_*/*/step_batch"
"""The cgroup of the batch step of the only job on the node. Slurm 26.05 does not name it by job ID."""
LIMITS = f'for one in {PLACE} {PLACE}/..; do echo $(($(cat "$one/memory.limit_in_bytes") >> 20)); done'
USED = f"echo $(($(cat {PLACE}/../memory.usage_in_bytes) >> 20))"


@pytest.fixture(autouse=True)
def limited(cluster: Cluster) -> None:
    """Skip the test if Slurm does not limit memory by cgroups."""
    conf = cluster.exec(NODE, "cat", "/etc/slurm/cgroup.conf")
    if "ConstrainRAMSpace=yes" not in conf or "cgroup/v1" not in conf:
        pytest.skip("the cluster does not limit memory by cgroups of version 1 (CLUSTER_CGROUPS=v1)")


@pytest.fixture
def paused(cluster: Cluster) -> Iterator[None]:
    """Run agents with a CRIU that can be paused before and after its work."""
    wait_for_agents(cluster)
    with pausing_criu(cluster):
        yield


def limits(cluster: Cluster) -> list[int]:
    """Return the limits of the job's batch step and of the job in MiB."""
    return [int(word) for word in cluster.shell(NODE, LIMITS).split()]


def used(cluster: Cluster) -> int:
    """Return the memory in use in MiB."""
    return int(cluster.shell(NODE, USED))


def records(cluster: Cluster) -> str:
    """Return the names of the records of raised limits on all nodes."""
    return "".join(cluster.run(node, "ls", f"{LOCAL}/memory-limits").stdout for node in GPU_NODES)


def wait_until_lowered(cluster: Cluster, limit_mib: int = LIMIT_MIB, *, timeout_s: float = 60) -> None:
    wait_until(
        "the limit is Slurm's", lambda: limits(cluster), lambda result: result == [limit_mib] * 2, timeout_s=timeout_s
    )
    wait_until("no record is left", lambda: records(cluster), lambda names: names == "")


def test_job_is_suspended_and_restored_beyond_its_limit(cluster: Cluster, paused: None) -> None:
    """The agent raises the limit only during the dump and the restore."""
    job = cluster.submit(BY_HAND, *SMALL, script=SCRIPT)
    cluster.wait_for_output(job, "step number=2")
    assert limits(cluster) == [LIMIT_MIB] * 2
    hold_criu(cluster, NODE, "before", "dump")
    cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")
    wait_for_held_criu(cluster, NODE, "before", "dump")
    assert min(limits(cluster)) >= LIMIT_MIB + GPU_MIB
    continue_criu(cluster, NODE)
    wait_asleep(cluster, job)
    assert records(cluster) == ""
    wake(cluster, job)
    cluster.wait_for_output(job, "restored on")
    wait_until_lowered(cluster)
    assert each_once(finish(cluster, job))


def test_aborted_suspension_restores_the_limit(cluster: Cluster) -> None:
    """The driver fails to move GPU memory: the job continues with Slurm's limit."""
    job = cluster.submit(BY_HAND, *SMALL, script=SCRIPT)
    cluster.wait_for_output(job, "step number=2")
    with fault(cluster, "checkpoint-fails"):
        cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
    assert cluster.job(job)["Restarts"] == "0"
    wait_until_lowered(cluster)
    assert each_once(finish(cluster, job))


def test_killed_agent_leaves_no_raised_limit(cluster: Cluster, paused: None) -> None:
    """The next agent rolls the suspension back and then restores the limit."""
    job = cluster.submit(BY_HAND, *SMALL, script=SCRIPT)
    cluster.wait_for_output(job, "step number=2")
    hold_criu(cluster, NODE, "before", "dump")
    cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")
    wait_for_held_criu(cluster, NODE, "before", "dump")
    kill_agent(cluster, NODE)
    assert min(limits(cluster)) >= LIMIT_MIB + GPU_MIB
    continue_criu(cluster, NODE)
    wait_until_lowered(cluster)
    assert each_once(finish(cluster, job))


def test_agent_killed_during_restore_leaves_no_raised_limit(cluster: Cluster, paused: None) -> None:
    """The next agent restores the job and then the limit of its new attempt."""
    job = asleep(cluster, idle_job(more=f"--memory-mib 100 --host-mib {LIMIT_MIB - 150}"), BY_HAND, *SMALL)
    hold_criu(cluster, NODE, "before", "restore")
    wake(cluster, job)
    wait_for_held_criu(cluster, NODE, "before", "restore")
    assert min(limits(cluster)) > LIMIT_MIB
    kill_agent(cluster, NODE)
    continue_criu(cluster, NODE)
    cluster.wait_for_output(job, "restored on")
    wait_until_lowered(cluster)
    assert each_once(finish(cluster, job))


def test_sleeper_keeps_its_raised_limit(cluster: Cluster) -> None:
    """The limit survives an agent restart; after the wake it is Slurm's again, unless Slurm has changed it."""
    server = serve(cluster, 8001, IN_PLACE, f"--mem={LIMIT_MIB}M", memory_mib=GPU_MIB)
    put_to_sleep(cluster, server.job)
    raised = limits(cluster)
    assert min(raised) >= LIMIT_MIB + GPU_MIB
    kill_agent(cluster, NODE)
    wait_for_agents(cluster)
    seen = in_place(cluster, server.job)
    assert seen is not None
    assert seen["limit_raised_bytes"] >> 20 == raised[0] - LIMIT_MIB
    assert limits(cluster) == raised
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 2}
    wait_until_lowered(cluster)
    put_to_sleep(cluster, server.job)
    cluster.shell(NODE, f"for one in {PLACE} {PLACE}/..; do echo 600M >$one/memory.limit_in_bytes; done")
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 3}
    wait_until("no record is left", lambda: records(cluster), lambda names: names == "")
    assert limits(cluster) == [600] * 2


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"memory_reserve": "1T"}, "the node can spare 0 B ("),
        ({"raise_memory_limit": False}, "does not fit below its memory limit"),
    ],
)
def test_limit_that_cannot_be_raised_is_refused(cluster: Cluster, keys: dict[str, object], text: str) -> None:
    """The suspension is refused if the node cannot spare the memory or the site does not permit it."""
    with configured(cluster, (NODE,), **keys):
        job = cluster.submit(BY_HAND, *SMALL, script=SCRIPT)
        cluster.wait_for_output(job, "step number=2")
        done = wait_until(
            "the agent knows the job",
            lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
            lambda done: "yet" not in done.stderr,
        )
        assert done.returncode == 1
        assert text in done.stderr
        assert "raise --mem" in done.stderr
        assert limits(cluster) == [LIMIT_MIB] * 2
        finish(cluster, job)


# Fills 6 x 64 MiB of device memory when a file exists, checks it when another one exists, and frees it.
DENSE = f"""#!/bin/bash
exec /opt/slurm-affinode/bin/python -c '
import pathlib, sys, time
sys.path.insert(0, "{WORKLOADS}")
import gpu
from gpu import call, driver
gpu.PATTERN_BYTES = 64 << 20
def wait(name):
    while not pathlib.Path("/home/alice", name).exists():
        time.sleep(0.1)
device = gpu.Gpu()
gpu.log("waits")
wait("fill")
held = [device.hold(64 << 20, seed=number) for number in range(6)]
gpu.log("filled")
wait("check")
intact = all(device.intact(one) for one in held)
gpu.log("checked", memory="intact" if intact else "damaged")
for one in held:
    call(driver.cuMemFree, one.address)
wait("end")
'
"""
MOVE = 'for pid in $(pgrep -u alice -f "[g]pu.PATTERN_BYTES"); do echo $pid >"$1/cgroup.procs"; done'


def test_memory_that_moves_is_charged_to_the_raised_limit(cluster: Cluster) -> None:
    """Emulated GPU memory is host memory: it is filled outside the job's cgroup, and counts after its first move.

    After the wake it therefore exceeds Slurm's limit, which is restored once the job has freed it; nothing is killed.
    """
    orders = [f"/home/alice/{name}" for name in ("fill", "check", "end")]
    cluster.shell("login", "rm -f " + " ".join(orders))
    options = ("--partition=gpu", "--gres=gpu:1", f"--nodelist={NODE}", "--mem=300M")
    job = cluster.submit(*options, f"{IN_PLACE},wake=hold", script=DENSE)  # it has no socket, and would wake by itself
    cluster.wait_for_output(job, "waits")
    inside = cluster.shell(NODE, f"ls -d {PLACE}/task_0 2>/dev/null || echo {PLACE}").strip()
    cluster.shell(NODE, MOVE, ROOT)
    cluster.shell("login", f"touch {orders[0]}", user="alice")
    cluster.wait_for_output(job, "filled", timeout_s=120)
    cluster.shell(NODE, MOVE, inside)
    assert used(cluster) < 200
    suspend(cluster, job)
    wait_until("it sleeps", lambda: in_place(cluster, job), lambda seen: seen is not None)
    assert used(cluster) > 6 * 64
    wake(cluster, job)
    wait_until("it is awake", lambda: in_place(cluster, job), lambda seen: seen is None)
    assert min(limits(cluster)) >= 6 * 64
    assert status(cluster, job)["jobs"]
    cluster.shell("login", f"touch {orders[1]}", user="alice")
    cluster.wait_for_output(job, "memory=intact")
    wait_until_lowered(cluster, 300)
    cluster.shell("login", f"touch {orders[2]}", user="alice")
    cluster.wait_for_state(job, "COMPLETED")
    cluster.shell("login", "rm -f " + " ".join(orders))


HOG = f"""#!/bin/bash
{WORKLOADS}/idle_after.py --busy 1 --idle 1 {UNTIL_FINISH} --again 1 --memory-mib {GPU_MIB} &
python3 -c 'import os, time
while not os.path.exists("/home/alice/eat"): time.sleep(0.1)
memory = bytearray(8 << 30)' &
wait %1
"""


def test_process_takes_no_memory_while_the_limit_is_raised(cluster: Cluster, paused: None) -> None:
    """It is stopped until the limit is Slurm's again, so that it cannot keep what GPU memory needs for a while."""
    cluster.shell("login", "rm -f /home/alice/eat")
    job = cluster.submit(BY_HAND, "--partition=gpu", "--gres=gpu:1", *SMALL, script=HOG)
    cluster.wait_for_output(job, "step number=2")
    hold_criu(cluster, NODE, "before", "dump")
    cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")
    wait_for_held_criu(cluster, NODE, "before", "dump")
    cluster.shell("login", "touch /home/alice/eat", user="alice")
    time.sleep(2)  # it looks for the file ten times a second
    resident_kib = cluster.shell(NODE, "ps -o rss= -p $(pgrep -f '[b]ytearray.8 << 30' | head -n 1)")
    assert int(resident_kib) < 100 << 10
    cluster.shell("login", "rm -f /home/alice/eat")
    continue_criu(cluster, NODE)
    wait_asleep(cluster, job)
    assert records(cluster) == ""
    wake(cluster, job)
    assert each_once(finish(cluster, job))
