"""Jobs in cgroups, as Slurm tracks and limits them on production clusters: device limits, memory limits, the freezer.

Cgroup version 2 has no memory controller on hosts that use it in version 1; tests of memory limits are skipped there.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cluster.driver import Cluster, wait_until
from cluster.servers import NODE, ask, frozen, in_place, put_to_sleep, serve, wait_awake
from cluster.sleepers import (
    BY_HAND,
    asleep,
    each_once,
    finish,
    idle_job,
    status,
    steps,
    suspend,
    wait_asleep,
    wait_for_agents,
    wake,
)

pytestmark = [pytest.mark.cluster, pytest.mark.main]

# Prints, for each process of a user, its job as the agent finds it, and the usage of all jobs.
FIND = r"""
import json, os, sys
from slurm_affinode.agent.orphans import uses
from slurm_affinode.base.pidfd import processes
from slurm_affinode.gpu.jobs import JobFinder
finder = JobFinder()
found = []
for process in processes():
    try:
        mine = process.facts().st_uid == int(sys.argv[1])
    except OSError:
        continue
    ref = finder.of(process) if mine else None
    if mine:
        rows = [row.split(":", 2) for row in process.text("cgroup").splitlines()]
        paths = {controller: path for _, names, path in rows for controller in names.split(",")}
        found.append({"pid": process.pid, "job": ref and ref.job_id, "source": ref and ref.source, "paths": paths})
print(json.dumps({"processes": found, "uses": [use.row(job) for job, use in uses(finder).items()]}))
"""
INSIDE = 'exec nsenter --cgroup --target "$(cat /run/slurm-affinode-agent.pid)" "$@"'
"""Script that runs a command in the agent's cgroup namespace; ``docker exec`` uses that of the host."""
ALICE = "2001"
GPUS = r'for gpu in 0 1; do (: <>"/dev/nvidia$gpu") 2>/dev/null && is=open || is=closed; echo "gpu $gpu is $is"; done'


@pytest.fixture(autouse=True)
def cgroups(cluster: Cluster) -> None:
    """Skip the test without cgroups; wait until the agents respond."""
    if "cgroup" not in cluster.exec("login", "scontrol", "show", "config").partition("ProctrackType")[2].split("\n")[0]:
        pytest.skip("the cluster runs without cgroups (CLUSTER_CGROUPS=none)")
    wait_for_agents(cluster)


def reported(cluster: Cluster, node: str) -> dict[str, Any]:
    """Return Alice's processes on a node with their jobs and cgroups, and the usage of all jobs."""
    program = "/opt/slurm-affinode/bin/python"
    text = cluster.shell(node, INSIDE, program, "-c", FIND, ALICE)
    value: dict[str, Any] = json.loads(text)
    return value


def batch_cgroups(cluster: Cluster, node: str) -> list[str]:
    """Return the cgroups of batch steps on a node. With version 2, Slurm may leave those of extern steps behind."""
    return cluster.shell(node, "find /sys/fs/cgroup -type d -name step_batch").split()


def test_processes_are_found_by_cgroup(cluster: Cluster) -> None:
    """Slurm names cgroups by job ID or SLUID. They provide the usage if they count CPU time and memory."""
    before = {node: set(batch_cgroups(cluster, node)) for node in ("c1", "c2")}  # a step that was killed leaves its own
    job = cluster.submit(script=idle_job("--nodelist=c1", BY_HAND, busy=0, idle=60))
    cluster.wait_for_output(job, "step number=1")
    seen = reported(cluster, "c1")
    assert len(seen["processes"]) >= 3  # shepherd, script, workload
    assert {(process["job"], process["source"]) for process in seen["processes"]} == {(int(job), "cgroup")}
    (use,) = seen["uses"]
    assert use["job"] == int(job)
    assert use["cpu_s"] > 0
    assert use["memory_mib"] > 8  # that the workload holds
    assert set(batch_cgroups(cluster, "c1")) - before["c1"]
    cluster.exec("login", "scancel", job, user="alice")
    for node, known in before.items():
        wait_until(
            "the cgroups of its jobs are gone",
            lambda node=node, known=known: set(batch_cgroups(cluster, node)) - known,  # type: ignore[misc]
            lambda left: not left,
        )


def test_restored_job_is_in_cgroups_of_new_attempt(cluster: Cluster) -> None:
    """On another node and in all hierarchies: its memory is charged to them, and ``scancel`` ends the job."""
    job = asleep(cluster, idle_job("--nodelist=c1", BY_HAND, idle=60, more="--host-mib 64"))
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    before = set(batch_cgroups(cluster, "c2"))
    wake(cluster, job)
    cluster.wait_for_output(job, "restored on c2")
    seen = reported(cluster, "c2")
    assert {(process["job"], process["source"]) for process in seen["processes"]} == {(int(job), "cgroup")}
    shepherd, *others = seen["processes"]
    assert others
    assert all(other["paths"] == shepherd["paths"] for other in others)
    place = shepherd["paths"].get("memory")
    if cluster.run(NODE, "test", "-d", "/sys/fs/cgroup/memory").returncode == 0:
        used = int(cluster.exec("c2", "cat", f"/sys/fs/cgroup/memory{place}/memory.usage_in_bytes"))
        assert used >= 64 << 20
    cluster.exec("login", "scancel", job, user="alice")
    cluster.wait_for_state(job, "CANCELLED")
    wait_until("its cgroups are gone", lambda: set(batch_cgroups(cluster, "c2")) - before, lambda left: not left)
    assert reported(cluster, "c2")["processes"] == []


def test_other_gpus_are_closed_to_job(cluster: Cluster) -> None:
    """Device limits apply before a suspension, and after it, when the job has another GPU of its node."""
    script = idle_job("--nodelist=c1", BY_HAND, more=f"& {GPUS}; wait; {GPUS}")
    job = cluster.submit(script=script)
    first = cluster.wait_for_output(job, "step number=2")
    assert re.findall(r"gpu \d is \w+", first) == ["gpu 0 is open", "gpu 1 is closed"]
    suspend(cluster, job)
    wait_asleep(cluster, job)
    blocker = cluster.submit(script=idle_job("--nodelist=c1", busy=0, idle=60))
    cluster.wait_for_output(blocker, "step number=1")
    wake(cluster, job)
    output = finish(cluster, job)
    assert re.findall(r"gpu \d is \w+", output)[2:] == ["gpu 0 is closed", "gpu 1 is open"]
    assert each_once(output)


def test_time_suspended_by_slurm_is_not_idle_time(cluster: Cluster) -> None:
    """After ``scontrol resume``, a full idle window passes before the job is suspended."""
    job = cluster.submit(
        script=idle_job("--nodelist=c1", "--gpu-suspend-idle=8s,when=always,wake=hold", busy=0, idle=120)
    )
    cluster.wait_for_output(job, "step number=1")
    cluster.exec("login", "scontrol", "suspend", job)

    def idle() -> dict[str, Any]:
        rows = status(cluster, job).get("jobs") or [{}]
        value: dict[str, Any] = rows[0].get("idle") or {}
        return value

    seen = wait_until("its use is unknown", idle, lambda item: item.get("verdict") == "unknown")
    assert "scontrol suspend" in seen["why"]
    cluster.shell("login", "sleep 10")
    assert cluster.job(job)["JobState"] == "SUSPENDED"
    assert idle()["progress_s"] == 0
    before = len(steps(cluster.output(job)))
    cluster.exec("login", "scontrol", "resume", job)
    wait_asleep(cluster, job)
    assert len(steps(cluster.output(job))) - before >= 4  # a step may take two seconds on a busy machine
    cluster.exec("login", "scancel", job, user="alice")


def own_cgroups(cluster: Cluster) -> list[str]:
    """Return the cgroups of c1 in which jobs are frozen."""
    return cluster.shell(NODE, "find /sys/fs/cgroup -type d -name slurm-affinode").split()


def test_sleeper_is_frozen_in_its_cgroup(cluster: Cluster) -> None:
    """With version 2, no process gets a signal; a request or ``scontrol resume`` wakes the job, and SIGKILL ends it.

    With version 1, the job is stopped by signals, because a frozen process would survive SIGKILL.
    """
    server = serve(cluster, 8001, memory_mib=200)
    put_to_sleep(cluster, server.job)
    seen = in_place(cluster, server.job)
    assert seen is not None
    if cluster.run(NODE, "test", "-d", "/sys/fs/cgroup/freezer").returncode == 0:
        assert seen["frozen_by"] == "signals"
        assert frozen(cluster, server.job)
        cluster.exec("login", "scancel", server.job, user="alice")
        return
    assert seen["frozen_by"] == own_cgroups(cluster)[0]
    assert frozen(cluster, server.job)
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 2}
    wait_awake(cluster, server.job)
    assert own_cgroups(cluster) == []
    put_to_sleep(cluster, server.job)
    cluster.exec("login", "scontrol", "suspend", server.job)
    cluster.exec("login", "scontrol", "resume", server.job)
    wait_awake(cluster, server.job)
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 3}
    put_to_sleep(cluster, server.job)
    cluster.exec("login", "scancel", "--full", "--signal=KILL", server.job, user="alice")
    cluster.wait_for_state(server.job, "FAILED", "CANCELLED", "COMPLETED")
    wait_until("its cgroup is gone", lambda: own_cgroups(cluster), lambda left: not left)
    assert reported(cluster, NODE)["processes"] == []
