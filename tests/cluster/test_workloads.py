"""Behavior of the workloads on emulated GPUs, observed through the real NVML bindings."""

from __future__ import annotations

import re

import pytest
from cluster.driver import GPU_NODES, READ_GPUS, WORKLOADS, Cluster, GpuReading, wait_until
from cluster.sleepers import UNTIL_FINISH, end

pytestmark = pytest.mark.cluster

ALL = ["busy", "idle_after", "bursty", "squatter", "leaking"]
ALL += ["out_of_memory", "model_server", "multi_process", "task_array", "data_loader"]
ON_C1 = ("--partition=gpu", "--nodelist=c1")


def workload(name: str, *arguments: str) -> str:
    """Return the command line of a workload."""
    return " ".join(("exec", f"{WORKLOADS}/{name}.py", *arguments))


def reading_of(cluster: Cluster, written: str) -> GpuReading:
    """Return NVML's reading of the GPU that a workload on c1 uses, according to its output."""
    match = re.search(r"gpu=(GPU-\S+)", written)
    assert match is not None, written
    return next(gpu for gpu in cluster.gpus("c1") if gpu.uuid == match[1])


def test_every_gpu_has_its_own_uuid(cluster: Cluster) -> None:
    """Four GPUs have four UUIDs, which do not change when a node restarts."""
    seen = {node: [gpu.uuid for gpu in cluster.gpus(node)] for node in GPU_NODES}
    assert len({uuid for uuids in seen.values() for uuid in uuids}) == 4
    cluster.restart("c2")
    # slurmctld does not notice a restart at once, so the state of the node does not show that its driver is ready.
    wait_until(
        "the driver of c2 is ready",
        lambda: cluster.run("c2", "/opt/slurm-affinode/bin/python", "-c", READ_GPUS).returncode == 0,
    )
    wait_until("c2 serves again", lambda: cluster.nodes()["c2"], lambda state: state == "idle")
    assert [gpu.uuid for gpu in cluster.gpus("c2")] == seen["c2"]


@pytest.mark.parametrize("name", ALL)
def test_workload_has_help(cluster: Cluster, name: str) -> None:
    """Each workload has a help text."""
    printed = cluster.exec("login", f"{WORKLOADS}/{name}.py", "--help", user="alice")
    assert "--memory-mib" in printed


def test_two_jobs_on_a_node_see_different_gpus(cluster: Cluster) -> None:
    """Each job sees one GPU as its device 0, and the GPUs differ."""
    command = (
        "/opt/slurm-affinode/bin/python -c 'import sys; sys.path.append(sys.argv[1]); import gpu; \
print(gpu.call(gpu.driver.cuInit, 0), gpu.call(gpu.driver.cuDeviceGetCount), gpu.Gpu().uuid)' "
        + WORKLOADS
    )
    jobs = [cluster.submit(*ON_C1, "--gres=gpu:1", wrap=f"{command}; sleep 1800") for _ in range(2)]
    written = [cluster.wait_for_output(job, "GPU-").split() for job in jobs]
    assert [words[1] for words in written] == ["1", "1"]
    assert {words[2] for words in written} == {gpu.uuid for gpu in cluster.gpus("c1")}


def test_busy_job_shows_as_utilization(cluster: Cluster) -> None:
    """While the job computes, its GPU is busy and lists its process; afterwards the GPU is empty."""
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("busy", "--seconds=15", "--memory-mib=1000"))
    written = cluster.wait_for_output(job, " busy ")
    reading = wait_until("the GPU is busy", lambda: reading_of(cluster, written), lambda gpu: gpu.utilization_pct > 90)
    assert reading.used_mib >= 1000
    assert f"pid={reading.pids[0]} " in written
    cluster.wait_for_state(job, "COMPLETED")
    assert cluster.output(job).strip().endswith("end memory=intact")
    after = reading_of(cluster, written)
    assert (after.pids, after.used_mib < 1000) == ([], True)


def test_idle_job_computes_idles_and_verifies_memory(cluster: Cluster) -> None:
    """The job is busy, then idle with allocated memory, and finally verifies the memory."""
    arguments = ("--busy=1", "--idle=1", UNTIL_FINISH, "--again=1", "--every=0.5")
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("idle_after", *arguments))
    written = cluster.wait_for_output(job, " step number=3")
    reading = reading_of(cluster, written)
    assert (reading.utilization_pct, len(reading.pids)) == (0, 1)
    end(cluster, job)
    cluster.wait_for_state(job, "COMPLETED")
    assert cluster.output(job).strip().endswith("end memory=intact")


def test_squatter_holds_memory_without_computing(cluster: Cluster) -> None:
    """The squatter holds most of the memory without utilization, and frees it when canceled."""
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("squatter", "--memory-mib=60000"))
    written = cluster.wait_for_output(job, " squatting ")
    reading = reading_of(cluster, written)
    assert reading.used_mib >= 60000
    assert reading.utilization_pct == 0
    cluster.exec("login", "scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    wait_until("the memory is free", lambda: reading_of(cluster, written).used_mib, lambda used: used < 60000)


@pytest.mark.usefixtures("leftovers_stay")
def test_leaking_job_leaves_a_process_on_the_gpu(cluster: Cluster) -> None:
    """The job has completed and its node is idle, but a process of its user still holds GPU memory."""
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("leaking", "--memory-mib=5000"))
    cluster.wait_for_state(job, "COMPLETED")
    cluster.wait_idle()
    written = cluster.output(job)
    reading = reading_of(cluster, written)
    assert f"leftover={reading.pids[0]}" in written
    assert reading.used_mib >= 5000
    assert cluster.exec("c1", "ps", "-o", "user=", "-p", str(reading.pids[0])).strip() == "alice"


def test_job_out_of_device_memory_fails(cluster: Cluster) -> None:
    """The job allocates all memory and fails with status 1."""
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("out_of_memory", "--step-mib=20000", "--compute=0"))
    cluster.wait_for_state(job, "FAILED")
    (run,) = cluster.wait_for_runs(job, "FAILED")
    assert run.exit_code == "1:0"
    assert "error=CUDA_ERROR_OUT_OF_MEMORY" in cluster.output(job)


def test_model_server_answers_over_the_network(cluster: Cluster) -> None:
    """A request from another node makes the GPU compute; the server runs until it is stopped."""
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("model_server", "--port=8123", "--service-ms=50"))
    cluster.wait_for_output(job, " listening port=8123")
    first, second = (
        cluster.exec("login", "curl", "--silent", "--fail", "--data", "{}", "http://c1:8123/predict") for _ in range(2)
    )
    assert '"number": 1' in first
    assert '"number": 2' in second
    assert first.split(",")[0] == second.split(",")[0]
    cluster.exec("login", "curl", "--silent", "--fail", "--data", "", "http://c1:8123/stop")
    cluster.wait_for_state(job, "COMPLETED")


def test_multi_process_job_uses_both_gpus(cluster: Cluster) -> None:
    """The job has two ranks, one per GPU of the node."""
    arguments = ("--processes=2", "--gpus=2", "--busy=10", "--idle=0", "--again=0.1")
    job = cluster.submit(*ON_C1, "--gres=gpu:2", wrap=workload("multi_process", *arguments))
    cluster.wait_for_output(job, " busy rank=1")
    readings = wait_until(
        "both GPUs have a process", lambda: cluster.gpus("c1"), lambda gpus: all(g.pids for g in gpus)
    )
    assert not set(readings[0].pids) & set(readings[1].pids)
    cluster.wait_for_state(job, "COMPLETED")
    assert cluster.output(job).count("end memory=intact") == 2


def test_array_of_workloads_runs_each_task_on_a_gpu(cluster: Cluster) -> None:
    job = cluster.submit(
        "--partition=gpu", "--array=1-3", "--gres=gpu:1", wrap=workload("task_array", "--unit=0.5", "--memory-mib=64")
    )
    cluster.wait_for_runs(job, *["COMPLETED"] * 3)
    assert " busy task=3 seconds=1.5" in cluster.output(f"{job}_3")


def test_bursty_job_alternates_bursts_and_pauses(cluster: Cluster) -> None:
    arguments = ("--burst=0.3", "--pause=0.3", "--count=3")
    job = cluster.submit(*ON_C1, "--gres=gpu:1", wrap=workload("bursty", *arguments))
    cluster.wait_for_state(job, "COMPLETED")
    phases = [line.split()[3] for line in cluster.output(job).splitlines()]
    assert phases == ["start", *["burst", "pause"] * 3, "end"]
