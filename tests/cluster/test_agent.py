"""The agent on a live cluster: the status it reports, access rights, and recovery from failures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster.driver import WORKLOADS, Cluster, ClusterError, docker, wait_until

pytestmark = pytest.mark.cluster

CONFIG = "/etc/slurm-affinode/config.toml"
IDLE = f"exec {WORKLOADS}/idle_after.py --busy 2 --idle 600"
PID = "/run/slurm-affinode-agent.pid"

# Sends one line to the agent of a node and prints the answer.
SEND = r"""
import socket, sys
with socket.create_connection((sys.argv[1], 9403), timeout=10) as sock:
    sock.sendall(sys.stdin.buffer.read().strip() + b"\n")
    print(sock.makefile("rb").read().decode())
"""


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond, before and after each test."""
    for node in ("c1", "c2"):
        wait_until(f"the agent of {node} responds", lambda node=node: answers(cluster, node))  # type: ignore[misc]


def answers(cluster: Cluster, node: str) -> bool:
    return cluster.run(node, "slurm-affinode", "status", "--json").returncode == 0


def submit(cluster: Cluster, option: str = "20s", *more: str, script: str = IDLE, user: str = "alice") -> str:
    """Submit a job with one GPU and the option, wait until it runs, and return its ID."""
    job = cluster.submit(
        "--partition=gpu", "--gres=gpu:1", "--nodelist=c1", f"--gpu-suspend-idle={option}", *more,
        wrap=script, user=user,
    )  # fmt: skip
    cluster.wait_for_state(job, "RUNNING")
    return job


def status(cluster: Cluster, job: str, user: str = "alice", node: str = "login") -> dict[str, Any]:
    """Return the job's row of ``status``."""
    row: dict[str, Any] = json.loads(cluster.exec(node, "slurm-affinode", "status", job, "--json", user=user))["jobs"][
        0
    ]
    return row


def watched(cluster: Cluster, job: str, good: Callable[[dict[str, Any]], bool], **where: str) -> dict[str, Any]:
    """Wait until the job's status satisfies ``good``; return it."""

    def read_status() -> dict[str, Any] | None:
        try:
            row = status(cluster, job, **where)
        except ClusterError:
            return None  # its shepherd has not connected yet
        return row if row["idle"] is not None and row["next"] is not None and good(row) else None

    result = wait_until(f"job {job} has the expected status", read_status)
    assert result is not None
    return result


def restart_agent(cluster: Cluster, node: str, signal: str = "KILL") -> None:
    """Restart the agent and wait until it responds."""
    old = cluster.exec(node, "cat", PID).strip()
    cluster.shell(node, f"kill -{signal} {old}")
    wait_until("another agent runs", lambda: cluster.exec(node, "cat", PID).strip(), lambda pid: pid != old)
    wait_until("it answers", lambda: answers(cluster, node))


@pytest.fixture
def configured(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Yield a function that adds a line to [suspend] on c1 and restarts its agent; the test's end undoes this."""
    saved = cluster.exec("c1", "cat", CONFIG)

    def change(line: str) -> None:
        cluster.exec("c1", "tee", CONFIG, stdin=saved.replace("[suspend]\n", f"[suspend]\n{line}\n"))
        restart_agent(cluster, "c1", "TERM")

    yield change
    cluster.exec("c1", "tee", CONFIG, stdin=saved)
    restart_agent(cluster, "c1", "TERM")


def test_status_follows_job_through_idle_window(cluster: Cluster) -> None:
    """The job is busy, then idle until its window is full; status gives the reason why it is not suspended."""
    job = submit(cluster, "6s", script=f"exec {WORKLOADS}/idle_after.py --busy 8 --idle 600")
    busy = watched(cluster, job, lambda row: row["idle"]["verdict"] == "busy")
    assert busy["next"]["code"] == "busy"
    assert any(signal["value"] > signal["limit"] for signal in busy["idle"]["signals"])
    idle = watched(cluster, job, lambda row: row["idle"]["verdict"] == "idle" and row["idle"]["progress_s"] > 0)
    assert idle["idle"]["progress_s"] + idle["idle"]["remaining_s"] == pytest.approx(6, abs=0.2)
    assert idle["memory_held_bytes"] > 0
    assert "utilization" in idle["idle"]["broken_by"]
    full = watched(cluster, job, lambda row: row["idle"]["remaining_s"] == 0 and row["next"]["code"] != "window")
    assert full["next"]["code"] == "no-pressure"
    text = cluster.exec("login", "slurm-affinode", "status", job, user="alice")
    assert "no pending job could use its GPUs" in text
    assert "utilization" in text
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_commands_are_restricted_to_owner_and_administrators(cluster: Cluster) -> None:
    """Munge identifies users on the login node, the kernel those on the job's node; other users get an error."""
    job = submit(cluster)
    watched(cluster, job, lambda row: True)
    for user in ("root", "admin"):
        assert status(cluster, job, user)["user"] == "alice"
        assert job in cluster.exec("login", "slurm-affinode", "status", user=user)
    assert status(cluster, job, "alice", "c1")["node"] == "c1"
    for node in ("login", "c1"):
        for verb in ("status", "suspend", "wake"):
            refused = cluster.run(node, "slurm-affinode", verb, job, user="bob")
            assert refused.returncode == 1
            assert f"job {job} is not yours" in refused.stderr
    assert job not in cluster.exec("login", "slurm-affinode", "status", "--node", "c1", user="bob")
    assert cluster.job(job)["Restarts"] == "0"


def test_impossible_requests_are_refused_with_reason(cluster: Cluster) -> None:
    """For a job without the option, an unknown job, a job that is not suspended, and an agent that does not respond."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1", wrap=IDLE)
    cluster.wait_for_state(job, "RUNNING")
    for node in ("login", "c1"):
        refused = wait_until(
            f"{node} knows that it has no shepherd",
            lambda node=node: cluster.run(node, "slurm-affinode", "suspend", job, user="alice"),  # type: ignore[misc]
            lambda refused: "has just started" not in refused.stderr,
        )
        assert refused.returncode == 1
        assert "submitted without --gpu-suspend-idle" in refused.stderr
    unknown = cluster.run("login", "slurm-affinode", "suspend", "999999", user="alice")
    assert unknown.returncode == 1
    assert "job 999999" in unknown.stderr
    with_option = submit(cluster)
    watched(cluster, with_option, lambda row: True)
    awake = cluster.run("login", "slurm-affinode", "wake", with_option, user="alice")
    assert awake.returncode == 1
    assert "is not suspended" in awake.stderr
    without_agent = cluster.run("login", "slurm-affinode", "status", "--node", "cpu1", user="alice")
    assert without_agent.returncode == 3
    assert "cpu1" in without_agent.stderr


def test_agent_restart_leaves_job_running(cluster: Cluster) -> None:
    """Neither SIGKILL nor SIGTERM of the agent affects the job; its idle window begins again."""
    job = submit(cluster)
    watched(cluster, job, lambda row: row["idle"]["verdict"] == "idle")
    for signal in ("KILL", "TERM"):
        restart_agent(cluster, "c1", signal)
        # The agent queries Slurm for the job's GPUs only after the shepherd has reconnected.
        watched(cluster, job, lambda row: row["idle"]["verdict"] == "idle" and row["gpus"] is not None)
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"


def test_slurmctld_outage_is_survived(cluster: Cluster) -> None:
    """Meanwhile the agent keeps measuring and reporting, and takes no action on unknown state."""
    job = submit(cluster, "3s")
    watched(cluster, job, lambda row: row["idle"]["remaining_s"] == 0)
    # A clean stop: slurmctld does not start again if it is killed before it has saved its state for the first time.
    docker("stop", "--time=10", cluster.container("slurmctld"))
    try:
        row = watched(
            cluster,
            job,
            lambda row: any(refusal["code"] == "queue-unknown" for refusal in row["next"]["against"]),
            node="c1",
        )
        assert row["idle"]["verdict"] == "idle"
    finally:
        cluster.start("slurmctld")
    wait_until("slurmctld answers", lambda: "is UP" in cluster.run("login", "scontrol", "ping").stdout)
    watched(cluster, job, lambda row: row["next"]["code"] == "no-pressure")
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_lost_gpu_is_unknown_not_idle(cluster: Cluster) -> None:
    """The GPU's state is unknown, not idle: the agent leaves the job alone, and status shows the reason."""
    job = submit(cluster, "5s")
    row = watched(cluster, job, lambda row: row["idle"]["remaining_s"] == 0)
    index = row["gpus"][0]["name"].removeprefix("GPU ")
    cluster.exec("c1", "gpu-emulatorctl", "fault", "gpu-lost", "--gpu", index)
    try:
        row = watched(cluster, job, lambda row: row["idle"]["verdict"] == "unknown")
        why = row["idle"]["why"]  # by its last sample, or by the list of the node's GPUs
        assert "lost" in why.lower() or "is no longer a GPU of this node" in why
        assert (row["next"]["act"], row["next"]["code"]) == (False, "unknown")
        assert cluster.job(job)["JobState"] == "RUNNING"
    finally:
        cluster.exec("c1", "gpu-emulatorctl", "fault", "clear")
    watched(cluster, job, lambda row: row["idle"]["verdict"] == "idle")


def test_driver_outage_is_survived(cluster: Cluster) -> None:
    """Without NVML the state is unknown; once NVML is back, the window continues."""
    job = submit(cluster, "60s")
    watched(cluster, job, lambda row: row["idle"]["verdict"] == "idle")
    cluster.exec("c1", "gpu-emulatorctl", "fault", "nvml-lost")
    try:
        watched(cluster, job, lambda row: row["idle"]["verdict"] == "unknown")
    finally:
        cluster.exec("c1", "gpu-emulatorctl", "fault", "clear")
    watched(cluster, job, lambda row: row["idle"]["verdict"] == "idle")
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_dry_run_reports_intended_suspension(cluster: Cluster, configured: Callable[[str], None]) -> None:
    """Pending jobs that cannot use the GPUs do not count; a pending job that can is named in the log and in status."""
    configured("dry_run = true")
    began = time.time()
    job = submit(cluster, "3s")
    cluster.submit("--partition=gpu", "--gres=gpu:2", "--nodelist=c1", "--hold", wrap="true", user="bob")
    cluster.submit("--partition=gpu", "--gres=gpu:2", f"--dependency=afterany:{job}", wrap="true", user="bob")
    watched(cluster, job, lambda row: row["idle"]["remaining_s"] == 0 and row["next"]["code"] == "no-pressure")
    other = cluster.submit("--partition=gpu", "--gres=gpu:2", "--nodelist=c1", wrap="true", user="bob")
    row = watched(cluster, job, lambda row: row["next"]["code"] == "dry-run")
    assert row["next"]["for_jobs"] == [other]
    assert "would be suspended" in row["next"]["text"]
    wait_until(
        "the log contains it",
        lambda: cluster.logs(began)["c1"],
        lambda log: f"1 job waits for its GPUs ({other})" in log,
    )
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"


def test_status_names_rules_of_the_site(cluster: Cluster, configured: Callable[[str], None]) -> None:
    """Status shows the code of each site rule that prevents a suspension."""
    configured('exclude_partitions = ["gpu"]\nusers = {alice = {min_run = "1h"}}')
    job = submit(cluster, "2s,when=always")
    row = watched(cluster, job, lambda row: row["idle"]["remaining_s"] == 0)
    assert {refusal["code"] for refusal in row["next"]["against"]} == {"excluded-partition", "min-run"}


def test_credential_is_valid_once_and_for_one_node(cluster: Cluster) -> None:
    """A replayed request, a request for another node, and one without a credential are rejected."""
    request = json.dumps({"service": "slurm-affinode", "verb": "status", "to": "c1"})
    credential = cluster.exec("login", "munge", stdin=request, user="alice").strip()
    assert cluster.exec("login", "python3", "-c", SEND, "c1", stdin=credential, user="alice").startswith("MUNGE:")
    assert cluster.exec("login", "python3", "-c", SEND, "c1", stdin=credential, user="alice").strip() == ""
    assert cluster.exec("login", "python3", "-c", SEND, "c1", stdin=request, user="alice").strip() == ""
    again = cluster.exec("login", "munge", stdin=request, user="alice").strip()
    answer = cluster.exec("login", "python3", "-c", SEND, "c2", stdin=again, user="alice").strip()
    assert "meant for another node" in cluster.exec("login", "unmunge", stdin=answer, user="alice")
    assert cluster.run("login", "unmunge", stdin=answer, user="bob").returncode != 0


def test_user_cannot_impersonate_shepherd_or_epilog(cluster: Cluster) -> None:
    """Messages of a job's own processes to the sockets are rejected, and the agent keeps running."""
    hello = r"""
import os, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.connect("/run/slurm-affinode/shepherd.sock")
    job = os.environ["SLURM_JOB_ID"]
    sock.send(f"hello\nversion=1\njob={job}\nrestarts=0\nimage=0\nroot=2\noption=".encode())
    print(repr(sock.recv(100)))
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
    sock.connect("/run/slurm-affinode/control.sock")
    sock.send(b'{"service": "slurm-affinode", "verb": "epilog", "job": 1, "uid": 0}\n')
    print(sock.makefile().read())
"""
    job = cluster.submit(
        "--partition=gpu", "--gres=gpu:1", "--nodelist=c1",
        script=f"#!/bin/bash\nunshare --user --map-root-user --pid --fork python3 - <<'END'\n{hello}\nEND\n",
    )  # fmt: skip
    cluster.wait_for_state(job, "COMPLETED", "FAILED")
    printed = cluster.output(job)
    assert "b''" in printed
    assert "not-permitted" in printed
    assert json.loads(cluster.exec("c1", "slurm-affinode", "status", "--json"))["jobs"] == []
