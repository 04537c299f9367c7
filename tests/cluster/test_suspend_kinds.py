"""Each reason why a job cannot be suspended: ``status`` shows it, and the job keeps running."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import BY_HAND, UNTIL_FINISH, configured, end, kill_agent, status, wait_for_agents

pytestmark = pytest.mark.cluster

ON_C1 = ("--partition=gpu", "--gres=gpu:1", "--nodelist=c1")
IDLE = f"{WORKLOADS}/idle_after.py --busy 0 --idle 1 {UNTIL_FINISH} --again 0"
UNTIL_END = "until [ -e /home/alice/slurm-$SLURM_JOB_ID-end.out ]; do sleep 0.2; done"
"""A shell command that ends as ``IDLE`` does."""


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def reasons(cluster: Cluster, job: str) -> dict[str, str]:
    """Return the refusals of a suspension in ``status``: code -> text."""
    rows = status(cluster, job).get("jobs", ())
    return {problem["code"]: problem["text"] for row in rows for problem in (row["next"] or {}).get("against", ())}


def wait_for_reason(cluster: Cluster, job: str, code: str) -> str:
    """Wait until ``status`` shows the code; return its text."""
    return wait_until(f"status names {code}", lambda: reasons(cluster, job), lambda result: code in result)[code]


def compatibility(cluster: Cluster, job: str) -> dict[str, Any]:
    """Return the kinds of a job and its refusals by mode, from ``status``."""
    result: dict[str, Any] = status(cluster, job)["jobs"][0]["compatibility"]
    return result


def assert_continues(cluster: Cluster, job: str, code: str) -> str:
    """Assert that the job completes in its first attempt and that all commands give the reason; return its text."""
    printed = wait_for_reason(cluster, job, code)
    text = cluster.exec("login", "slurm-affinode", "status", job, user="alice")
    amounts = re.compile(r"[\d.]+ [KMG]?i?B")  # may have changed meanwhile
    assert amounts.sub("", f"{code}: {printed}") in amounts.sub("", text)
    done = cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
    assert done.returncode == 1, done.stdout
    end(cluster, job)
    cluster.wait_for_state(job, "COMPLETED")
    assert cluster.job(job)["Restarts"] == "0"
    return printed


# --- reasons in the process tree

IO_URING = r"""
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 4, ctypes.create_string_buffer(256))
print("io_uring", ring if ring >= 0 else f"errno {ctypes.get_errno()}", flush=True)
while ring >= 0 and not os.path.exists("slurm-" + os.environ["SLURM_JOB_ID"] + "-end.out"):
    time.sleep(0.2)
"""


def test_io_uring_is_refused(cluster: Cluster) -> None:
    """A process has a ring if the user allows io_uring. Skipped on kernels without io_uring."""
    job = cluster.submit(f"{BY_HAND},io_uring=allow", *ON_C1, script=f"#!/usr/bin/python3\n{IO_URING}")
    output = cluster.wait_for_output(job, "io_uring")
    if "errno" in output:
        pytest.skip(f"this kernel or container forbids io_uring: {output.strip()}")
    assert "uses io_uring" in assert_continues(cluster, job, "io-uring")


def test_setuid_process_is_refused(cluster: Cluster) -> None:
    """A setuid program of carol in alice's job could not be restored unchanged."""
    program = "/usr/local/bin/sleep-as-carol"
    cluster.shell("c1", f"cp /usr/bin/sleep {program}; chown carol {program}; chmod 4755 {program}")
    try:
        job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\n{program} 300 &\n{IDLE}\nkill $!\n")
        assert "changed user ids" in assert_continues(cluster, job, "setuid")
    finally:
        cluster.exec("c1", "rm", "-f", program)


def test_rdma_is_refused(cluster: Cluster) -> None:
    """The job opens an InfiniBand device, here a device node of that name, as there is no adapter."""
    device = "/dev/infiniband/uverbs0"
    cluster.shell("c1", f"mkdir -p /dev/infiniband; [ -e {device} ] || mknod -m 0666 {device} c 1 3")
    try:
        job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\nexec 9<>{device}\n{IDLE}\n")
        assert "uses RDMA" in assert_continues(cluster, job, "rdma")
    finally:
        cluster.exec("c1", "rm", "-rf", "/dev/infiniband")


ENTER = r"""
for pid in $(scontrol listpids "$1" | awk 'NR > 1 { print $1 }'); do
  grep -qP '^NSpid:.*\t\d+\t\d+$' /proc/$pid/status && ! grep -qP '^NSpid:.*\t1$' /proc/$pid/status && break
done
exec </dev/null >/dev/null 2>&1
exec setsid -f nsenter -t $pid -p -m setpriv --reuid alice --regid alice --clear-groups sleep 300
"""


def test_process_outside_script_is_refused(cluster: Cluster) -> None:
    """A process that entered the job's namespaces from outside would not be dumped."""
    job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\n{IDLE}\n")
    cluster.wait_for_output(job, "step number=1")
    cluster.shell("c1", ENTER, job)
    assert "outside of the script" in assert_continues(cluster, job, "left-tree")


# --- limits of node and site


def test_gpu_memory_beyond_host_memory_is_refused(cluster: Cluster) -> None:
    """60000 MiB of GPU memory do not fit into host memory; the refusal contains both sizes."""
    script = f"#!/bin/bash\n{IDLE} --memory-mib 60000\n"
    printed = assert_continues(cluster, cluster.submit(BY_HAND, *ON_C1, script=script), "host-memory")
    assert "59 GiB" in printed
    assert "the node's free memory" in printed


def test_gpu_memory_beyond_memory_limit_is_refused(cluster: Cluster) -> None:
    """The memory would count against the limit, and the kernel would kill the job; the refusal states the size left."""
    script = f"#!/bin/bash\n{IDLE} --memory-mib 1024\n"
    with configured(cluster, ("c1",), raise_memory_limit=False):
        printed = assert_continues(cluster, cluster.submit(BY_HAND, *ON_C1, "--mem=600M", script=script), "host-memory")
    left = re.search(r"which leaves (\d+) MiB: raise --mem", printed)
    assert left is not None
    assert 100 < int(left[1]) < 600


@contextmanager
def over_memory_kill(cluster: Cluster) -> Iterator[None]:
    """Configure slurmctld to kill jobs above their memory limit, and wait until the agent of c1 has read that.

    Slurm does not start if cgroups limit the memory of jobs as well.
    """
    conf, line = "/etc/slurm/slurm.conf", "JobAcctGatherParams=OverMemoryKill"
    limits = (
        'sed -i "s/^ConstrainRAMSpace=.*/ConstrainRAMSpace=$1/" /etc/slurm/cgroup.conf /etc/slurm/cgroups/*/cgroup.conf'
    )

    def known(enforced: bool) -> None:
        # Not `scontrol reconfigure`: with this change, slurmctld 24.11 has been observed to hang in it.
        cluster.restart("slurmctld")
        wait_until(
            "slurmctld has read its configuration",
            lambda: cluster.run("login", "scontrol", "show", "config").stdout,
            lambda text: "JobAcctGatherParams" in text and ("OverMemoryKill" in text) == enforced,
        )
        kill_agent(cluster, "c1")
        wait_for_agents(cluster)

    cluster.shell("slurmctld", 'echo "$1" >>"$2"', line, conf)
    for node in ("slurmctld", "c1"):
        cluster.shell(node, limits, "no")
    try:
        known(True)
        yield
    finally:
        cluster.shell("slurmctld", 'sed -i "/^$1/d" "$2"', line, conf)
        for node in ("slurmctld", "c1"):
            cluster.shell(node, limits, "yes")
        known(False)


def test_gpu_memory_beyond_over_memory_kill_limit_is_refused(cluster: Cluster) -> None:
    """Without cgroups, Slurm would kill the job because GPU memory in host memory exceeds its ``--mem``."""
    with over_memory_kill(cluster):
        script = f"#!/bin/bash\n{IDLE} --memory-mib 1024\n"
        printed = assert_continues(cluster, cluster.submit(BY_HAND, *ON_C1, "--mem=600M", script=script), "host-memory")
    assert "raise --mem" in printed


@contextmanager
def driver(cluster: Cluster, node: str, version: str) -> Iterator[None]:
    """Emulate another driver version on a node while the context lasts; restart its agent and exporter."""

    def make(*more: str) -> None:
        argv = ("--force", "--gpus", "2", "--model", "h100-80g", "--seed", node, "--sample-period-ms", "200", *more)
        cluster.exec(node, "gpu-emulatorctl", "init", *argv)
        kill_agent(cluster, node)
        wait_for_agents(cluster)

    make("--driver-version", version)
    try:
        yield
    finally:
        make()


def test_driver_without_checkpoint_is_refused(cluster: Cluster) -> None:
    """Drivers older than 570 are refused; the refusal contains both versions."""
    with driver(cluster, "c1", "550.54.15"):
        printed = assert_continues(cluster, cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\n{IDLE}\n"), "driver")
    assert "550.54.15" in printed
    assert "570" in printed


def test_full_store_is_refused(cluster: Cluster) -> None:
    """The image would exceed the budget of the store."""
    with configured(cluster, nodes=("c1",), budget="1M"):
        printed = assert_continues(cluster, cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\n{IDLE}\n"), "no-room")
    assert "1 MiB" in printed


# --- kinds of jobs


def test_multi_node_job_is_refused(cluster: Cluster) -> None:
    """This also holds for a request on the node that does not run the script."""
    job = cluster.submit(
        BY_HAND, "--partition=gpu", "--nodes=2", "--gres=gpu:1", "--ntasks-per-node=1", script=f"#!/bin/bash\n{IDLE}\n"
    )
    wait_for_reason(cluster, job, "multi-node")
    for node in ("c1", "c2"):
        assert "multi-node" in cluster.exec(node, "slurm-affinode", "status", job, user="alice")
    assert "2 nodes" in assert_continues(cluster, job, "multi-node")


def test_srun_steps_are_refused(cluster: Cluster) -> None:
    """The job is refused only while the steps run."""
    script = f"#!/bin/bash\nsrun --overlap sh -c '{UNTIL_END}'\necho steps are over\nsleep 120\n"
    job = cluster.submit(BY_HAND, *ON_C1, script=script)
    assert "srun" in wait_for_reason(cluster, job, "srun-steps")
    result = compatibility(cluster, job)
    assert result["kinds"] == ["batch script", "srun in the script"], result
    for mode in ("requeue", "inplace"):
        against = {item["code"]: item["remedy"] for item in result["modes"][mode]["against"]}
        assert "steps=local" in against["srun-steps"]
    end(cluster, job)
    cluster.wait_for_output(job, "steps are over")
    wait_until("status does not name it", lambda: reasons(cluster, job), lambda outcome: "srun-steps" not in outcome)
    wait_until(
        "it can be suspended",
        lambda: compatibility(cluster, job),
        lambda outcome: outcome["modes"]["requeue"]["possible"] and outcome["kinds"] == ["batch script"],
    )
    assert cluster.job(job)["Restarts"] == "0"


def test_heterogeneous_job_is_refused(cluster: Cluster) -> None:
    """The second component has no script of its own; the reason is the same."""
    script = f"#!/bin/bash\n#SBATCH {BY_HAND} --partition=gpu --gres=gpu:1\n#SBATCH hetjob\n#SBATCH --partition=cpu\n"
    job = cluster.submit(script=f"{script}{IDLE}\n")
    cluster.wait_for_state(job, "RUNNING")
    done = cluster.run("login", "slurm-affinode", "status", f"{job}+1", user="alice")
    assert done.returncode == 1
    assert "cannot be suspended: heterogeneous: it is a heterogeneous job" in done.stderr
    assert "heterogeneous" in assert_continues(cluster, job, "heterogeneous")


def interactive(cluster: Cluster, *argv: str) -> subprocess.Popen[str]:
    """Start a command as alice on the login node in the background."""
    return subprocess.Popen(
        ("docker", "exec", "--user=alice", "--workdir=/home/alice", cluster.container("login"), *argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("command", ["salloc", "srun"])
def test_interactive_job_is_refused(cluster: Cluster, command: str) -> None:
    """The commands reject the option; without it, ``status`` gives the reason on both nodes."""
    running = interactive(cluster, command, *ON_C1, f"--job-name={command}-kind", "sh", "-c", UNTIL_END)
    try:
        listing = ("squeue", "--noheader", "--states=RUNNING", "--format=%A", f"--name={command}-kind")
        job = wait_until("it runs", lambda: cluster.exec("login", *listing).strip())
        for node in ("login", "c1"):
            for verb in ("status", "suspend"):
                done = cluster.run(node, "slurm-affinode", verb, job, user="alice")
                assert done.returncode == 1
                assert f"job {job} cannot be suspended: interactive: it is interactive" in done.stderr
                assert "only batch jobs can be suspended" in done.stderr
        refusal = status(cluster, job)["refusal"]
        assert (refusal["code"], refusal["remedy"]) == ("interactive", "submit it with sbatch --gpu-suspend-idle=15m")
        end(cluster, job)
        printed, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 0, printed
    cluster.wait_for_runs(job, "COMPLETED")
