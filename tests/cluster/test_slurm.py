"""The cluster's Slurm behaves like that of a site: accounting, arrays, requeue, QOS, preemption, hooks."""

from __future__ import annotations

import pytest
from cluster.driver import COMPUTE_NODES, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.main]

HALF_HOUR = "sleep 1800"


def test_every_node_is_idle_and_has_its_gpus(cluster: Cluster) -> None:
    """Two nodes have two GPUs each, one node has none, and all are in service."""
    assert cluster.nodes() == dict.fromkeys(COMPUTE_NODES, "idle")
    gres = cluster.exec("login", "sinfo", "--Node", "--noheader", "--format=%N %G", "--partition=gpu,cpu")
    assert sorted(gres.splitlines()) == ["c1 gpu:h100:2,shard:h100:60", "c2 gpu:h100:2,shard:h100:60", "cpu1 (null)"]


def test_slurm_release_is_the_requested_one(cluster: Cluster) -> None:
    """Commands and daemons belong to the Slurm release of this test run."""
    assert f" {cluster.release}." in cluster.exec("login", "sinfo", "--version")
    assert f"= {cluster.release}." in cluster.shell("login", "scontrol show config | grep SLURM_VERSION")


def test_job_runs_as_its_user_and_is_accounted_with_its_gpus(cluster: Cluster) -> None:
    """Accounting has the GPUs both typed and untyped, the job's user and account, and its exit status."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:2", wrap='id -un; echo "gpus $CUDA_VISIBLE_DEVICES"; exit 3')
    cluster.wait_for_state(job, "FAILED")
    (run,) = cluster.wait_for_runs(job, "FAILED")
    assert cluster.output(job).split() == ["alice", "gpus", "0,1"]
    assert (run.user, run.account, run.exit_code) == ("alice", "vision", "3:0")
    assert (run.tres["gres/gpu"], run.tres["gres/gpu:h100"]) == ("2", "2")


def test_array_has_a_record_for_every_task(cluster: Cluster) -> None:
    """Four tasks use four GPUs, at most two at a time."""
    job = cluster.submit("--array=1-4%2", "--partition=gpu", "--gres=gpu:1", wrap='echo "task $SLURM_ARRAY_TASK_ID"')
    runs = cluster.wait_for_runs(job, *["COMPLETED"] * 4)
    assert sorted(run.job_id for run in runs) == [f"{job}_{task}" for task in range(1, 5)]
    assert {run.tres["gres/gpu"] for run in runs} == {"1"}
    assert cluster.output(f"{job}_3") == "task 3\n"


def test_requeued_job_keeps_its_id_and_both_attempts_are_accounted(cluster: Cluster) -> None:
    """``sacct --duplicates`` lists the attempts before and after the requeue under one job ID."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap="[ $SLURM_RESTART_COUNT ] || sleep 1800; echo again")
    cluster.wait_for_state(job, "RUNNING")
    cluster.exec("login", "scontrol", "requeue", job, user="alice")
    cluster.wait_for_state(job, "PENDING")
    cluster.wait_for_state(job, "COMPLETED")
    runs = cluster.wait_for_runs(job, "REQUEUED", "COMPLETED", duplicates=True)
    assert {run.job_id for run in runs} == {job}
    assert {run.state: run.restarts for run in runs} == {"REQUEUED": 0, "COMPLETED": 1}
    assert [run.state for run in cluster.runs(job)] == ["COMPLETED"]
    assert cluster.output(job).endswith("again\n")


def test_requeue_frees_the_gpus_for_a_waiting_job(cluster: Cluster) -> None:
    """A job that is requeued and held lets another job start on its GPUs."""
    holders = [cluster.submit("--partition=gpu", "--gres=gpu:2", wrap=HALF_HOUR) for _ in range(2)]
    for holder in holders:
        cluster.wait_for_state(holder, "RUNNING")
    waiting = cluster.submit("--partition=gpu", "--gres=gpu:2", wrap=HALF_HOUR, user="bob")
    assert cluster.job(waiting)["JobState"] == "PENDING"
    node = cluster.job(holders[0])["NodeList"]
    cluster.exec("login", "scontrol", "requeuehold", holders[0])
    cluster.wait_for_state(waiting, "RUNNING")
    assert cluster.job(waiting)["NodeList"] == node


def test_accounts_decide_who_may_submit(cluster: Cluster) -> None:
    """Users can submit only under the accounts that list them."""
    job = cluster.submit("--account=language", wrap="true", user="alice")
    (run,) = cluster.wait_for_runs(job, "COMPLETED")
    assert run.account == "language"
    refused = cluster.run("login", "sbatch", "--account=vision", "--wrap=true", user="bob")
    assert refused.returncode != 0
    assert "Invalid account" in refused.stderr


def test_qos_limits_the_gpus_of_a_user(cluster: Cluster) -> None:
    """Carol's QOS allows her one GPU at a time; other users are not affected."""
    first = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap=HALF_HOUR, user="carol")
    cluster.wait_for_state(first, "RUNNING")
    second = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap=HALF_HOUR, user="carol")
    reason = wait_until(
        "the second job waits for its QOS",
        lambda: cluster.job(second)["Reason"],
        lambda reason: reason.startswith("QOSMax"),
    )
    assert "GRES" in reason.upper()
    other = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap=HALF_HOUR, user="bob")
    cluster.wait_for_state(other, "RUNNING")


def test_preemptible_job_is_requeued_when_its_gpus_are_needed(cluster: Cluster) -> None:
    """A job in gpu-preempt is preempted by one in gpu and restarts after it."""
    low = [cluster.submit("--partition=gpu-preempt", "--gres=gpu:2", wrap=HALF_HOUR) for _ in range(2)]
    for job in low:
        cluster.wait_for_state(job, "RUNNING")
    high = cluster.submit("--partition=gpu", "--gres=gpu:2", wrap="hostname", user="bob")
    cluster.wait_for_state(high, "COMPLETED")
    restarted = [job for job in low if cluster.job(job)["Restarts"] == "1"]
    assert len(restarted) == 1
    cluster.wait_for_state(restarted[0], "RUNNING")


def test_prolog_and_epilog_run_and_map_gpus_to_the_job(cluster: Cluster) -> None:
    """While the job runs, dcgm-exporter's mapping assigns its GPUs to it; afterwards no longer."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:2", "--nodelist=c2", wrap=HALF_HOUR)
    cluster.wait_for_state(job, "RUNNING")

    # Slurm reports the job as running while the prolog still runs.
    def mapped() -> list[str]:
        return cluster.run("c2", "cat", "/run/dcgm-job-mapping/0", "/run/dcgm-job-mapping/1").stdout.split()

    wait_until("the job is mapped", mapped, lambda jobs: jobs == [job, job])
    cluster.exec("login", "scancel", job, user="alice")
    cluster.wait_idle()
    assert cluster.shell("c2", "ls /run/dcgm-job-mapping") == ""
    for kind in ("prolog", "epilog"):
        assert f" {kind} job={job} uid=2001 gpus=0,1 " in cluster.exec("c2", "cat", f"/var/log/slurm/{kind}.log")


def test_sampled_memory_of_a_step_is_accounted(cluster: Cluster) -> None:
    """JobAcctGather measures the memory of a user's process, which requires access to processes of other users."""
    script = "#!/bin/bash\nexec python3 -c 'import time; held = bytes([1]) * 200_000_000; time.sleep(5)'\n"
    job = cluster.submit("--partition=cpu", script=script)
    cluster.wait_for_state(job, "COMPLETED")
    options = ("--noheader", "--parsable2", "--units=M", "--format=MaxRSS", f"--jobs={job}.batch")
    text = wait_until("accounting has the step's memory", lambda: cluster.exec("login", "sacct", *options).strip())
    assert float(text.removesuffix("M")) > 150
