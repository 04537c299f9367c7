"""Jobs that load data with worker processes while their main process holds GPU memory, as PyTorch's DataLoader does."""

from __future__ import annotations

import re

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    UNTIL_FINISH,
    configured,
    each_once,
    finish,
    status,
    steps,
    suspend,
    wait_asleep,
    wait_for_agents,
    wake,
)

pytestmark = pytest.mark.cluster

PLUGIN = "/usr/local/libexec/slurm-affinode-criu"
DEVICES = "ls -l /proc/$1/fd 2>/dev/null | grep -o '/dev/nvidia.*' | sort; grep -o '/dev/nvidia.*' /proc/$1/maps"
"""Script that prints the device files that a process has open or mapped."""
FAILING_CRIU = r"""#!/bin/bash
/usr/local/sbin/criu "$@" || exit
for word in "$@"; do [ "$word" != dump ] || exit 1; done
"""
"""A CRIU wrapper that exits with an error after a successful dump."""


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def loader(cluster: Cluster, method: str = "fork", before: str = "") -> str:
    """Submit a job with two workers; return its ID when it has loaded the first batches."""
    command = f"{WORKLOADS}/data_loader.py --method {method} --steps 1 {UNTIL_FINISH} --every 0.5"
    script = f"#!/bin/bash\n#SBATCH --partition=gpu --gres=gpu:1 --nodelist=c1\n{before}\n{command}\n"
    job = cluster.submit(BY_HAND, script=script)
    cluster.wait_for_output(job, "step number=2")
    return job


def workers(cluster: Cluster, job: str) -> list[str]:
    """Return the PIDs on c1 of the workers of a job, which are the children of the process that holds its GPU."""
    (gpu,) = [gpu for gpu in cluster.gpus("c1") if gpu.uuid in cluster.output(job)]
    (parent,) = gpu.pids
    return cluster.shell("c1", f"cat /proc/{parent}/task/{parent}/children").split()


def devices(cluster: Cluster, pid: str) -> list[str]:
    """Return the device files that a process on c1 has open or mapped."""
    return cluster.run("c1", "bash", "-c", DEVICES, "test", pid).stdout.split()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_data_loader_resumes_on_another_node(cluster: Cluster, method: str) -> None:
    """The same worker processes continue to load and exit with status 0, also after a second suspension."""
    job = loader(cluster, method)
    if method == "fork":
        assert all("/dev/nvidia0" in devices(cluster, pid) for pid in workers(cluster, job))
    nodes = ("c2", "c1") if method == "fork" else ("c2",)
    for times, node in enumerate(nodes, 1):
        suspend(cluster, job)
        wait_asleep(cluster, job)
        cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={node}", user="alice")
        wake(cluster, job)
        wait_until(
            f"it is restored on {node}",
            lambda: cluster.output(job).count("slurm-affinode: restored"),
            lambda count, times=times: count == times,
        )
        done = steps(cluster.output(job))[-1]
        cluster.wait_for_output(job, f"step number={done + 2}")
        assert cluster.job(job)["BatchHost"] == node
        assert cluster.job(job)["Restarts"] == str(times)
    output = finish(cluster, job)
    assert "exited codes=0,0" in output
    assert each_once(output)
    assert len(re.findall(r"workers pids=", output)) == 1


def test_aborted_suspension_leaves_workers_unchanged(cluster: Cluster) -> None:
    """The workers keep their device files and continue."""
    path = "/usr/local/sbin/criu-failing"
    cluster.exec("c1", "sh", "-c", f"cat >{path} && chmod 0755 {path}", stdin=FAILING_CRIU)
    with configured(cluster, ("c1",), criu=path):
        job = loader(cluster)
        before = {pid: devices(cluster, pid) for pid in workers(cluster, job)}
        assert all(before.values())
        done = wait_until(
            "the agent suspends the job, and CRIU fails",
            lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
            lambda done: "suspended yet" not in done.stderr,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "CRIU could not dump it" in done.stdout + done.stderr
    after = steps(cluster.output(job))[-1]
    cluster.wait_for_output(job, f"step number={after + 2}")
    assert {pid: devices(cluster, pid) for pid in workers(cluster, job)} == before
    output = finish(cluster, job)
    assert "exited codes=0,0" in output
    assert cluster.job(job)["Restarts"] == "0"


def test_worker_that_opens_a_device_itself_is_refused(cluster: Cluster) -> None:
    """An example is a monitor that the job starts beside its workers."""
    monitor = "python3 -c 'import os, time; os.open(\"/dev/nvidia0\", os.O_RDWR); time.sleep(60)' &"
    job = loader(cluster, before=monitor)
    printed = refusal(cluster, job)
    assert "python3" in printed
    assert "neither it nor its parent uses CUDA" in printed
    cluster.exec("login", "scancel", job, user="alice")


def test_forked_worker_is_refused_without_plugin(cluster: Cluster) -> None:
    """The reason names the plugin and how to install it."""
    cluster.exec("c1", "mv", PLUGIN, f"{PLUGIN}.away")
    try:
        job = loader(cluster)
        printed = refusal(cluster, job)
        assert f"{PLUGIN}/device_files.so cannot be used: No such file or directory" in printed
        assert "make -C spank install" in printed
    finally:
        cluster.exec("c1", "mv", f"{PLUGIN}.away", PLUGIN)
    suspend(cluster, job)
    cluster.exec("login", "scancel", job, user="alice")


def refusal(cluster: Cluster, job: str) -> str:
    """Return the text of the refusal ``gpu-file`` of a job."""

    def texts() -> list[str]:
        rows = status(cluster, job).get("jobs", ())
        result = [item for row in rows for item in (row["next"] or {}).get("against", ())]
        return [problem["text"] for problem in result if problem["code"] == "gpu-file"]

    return str(wait_until("status names the refusal", texts)[0])
