"""Faults of nodes on a live cluster: memory without a process, stuck jobs, leftovers reported across agent restarts.

Also jobs with shapes that do not fit, found while they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.driver import WORKLOADS, Cluster, docker, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.scraped]

STATE = "/var/lib/zombies"
CONFIG = f"{STATE}/config.toml"
EPILOG = "/etc/slurm/epilog.d/90-record"
FLAG = "/run/epilog-hangs"
ON_C1 = ("--partition=gpu", "--nodelist=c1", "--gres=gpu:1")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}\t'\""
POLICY = """
[[rule]]
kinds = ["completing", "orphan-memory"]
action = "drain"
grace = "0s"
"""


@pytest.fixture(autouse=True)
def settings(cluster: Cluster) -> Iterator[None]:
    """Set up a database for the test, and limits below a quarter of an hour."""
    cluster.shell("login", f"rm -rf {STATE}; mkdir -p {STATE}; cp /etc/slurm-affinode/config.toml {CONFIG}")
    text = '[zombies]\\ncompleting = "2s"\\n[zombies.misfits]\\nmin_run = "2s"\\nuser_min_gpu_hours = 0.0001\\n'
    cluster.shell("login", f"printf '\\n{text}' >> {CONFIG}; cat > {STATE}/policy.toml <<'X'\n{POLICY}\nX")
    yield
    cluster.shell("login", f"rm -rf {STATE}")


def zombies(cluster: Cluster, *words: str) -> dict[str, Any]:
    """Return the JSON output of a command."""
    policy = ("--policy", f"{STATE}/policy.toml") if words[0] == "clean" else ()
    argv = ("slurm-affinode", "zombies", *words, *policy, "--config", CONFIG, "--state", STATE, "--json")
    done = cluster.run("login", *argv)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    return record if isinstance(record, dict) else {"rows": record}


def until_found(cluster: Cluster, kind: str, *words: str) -> dict[str, Any]:
    """Wait for a finding of a kind; return the first one."""
    result = wait_until(
        f"{kind} is found",
        lambda: zombies(cluster, "list", "--live", "--kind", kind, *words)["findings"],
        timeout_s=90,
    )
    item: dict[str, Any] = result[0]
    return item


@pytest.fixture
def external_process(cluster: Cluster) -> Iterator[None]:
    """Run a process that holds memory of GPU 1 of c1 in a PID namespace that is not visible on c1."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process in the files of a container and outside of its processes")
    pid = docker("inspect", "--format={{.State.Pid}}", cluster.container("c1")).strip()
    python = "/opt/slurm-affinode/bin/python"
    program = ("env", "CUDA_VISIBLE_DEVICES=1", python, f"{WORKLOADS}/squatter.py", "--memory-mib", "9000")
    with subprocess.Popen(
        ("nsenter", "--target", pid, "--mount", "--", *program), stdout=subprocess.PIPE, text=True
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            assert any("squatting" in line for line in child.stdout)
            yield
        finally:
            child.kill()
            cluster.run("c1", "gpu-emulatorctl", "fault", "clear")


@pytest.mark.usefixtures("external_process")
def test_memory_without_process_is_found_and_node_drained(cluster: Cluster) -> None:
    """The finding includes the driver's last XID error."""
    cluster.exec("c1", "gpu-emulatorctl", "fault", "xid", "79", "--gpu", "1")
    item = until_found(cluster, "orphan-memory")
    assert (item["subject"]["type"], item["nodes"], item["gpus"][0]["gpu"]) == ("node", ["c1"], "1")
    texts = {row["dimension"]: row["text"] for row in item["evidence"]}
    assert texts["processes"] == "the driver shows no process on it"
    assert texts["xid"] == "XID 79: the GPU has fallen off the bus"
    try:
        done = zombies(cluster, "clean", "--live", "--kind", "orphan-memory", "--yes")
        assert [(row["verb"], row["result"]) for row in done["actions"]] == [("drain", "done")]
        assert cluster.nodes()["c1"].startswith("drain")
    finally:
        cluster.run("login", "scontrol", "update", "nodename=c1", "state=resume")


@pytest.fixture
def hanging(cluster: Cluster) -> Iterator[None]:
    """Make an epilog of c1 hang."""
    script = f"#!/bin/sh\nwhile [ -e {FLAG} ]; do sleep 0.2; done"
    cluster.shell("c1", f"touch {FLAG}; cp -p {EPILOG} /root/epilog; printf '%s\n' '{script}' > {EPILOG}")
    yield
    cluster.shell("c1", f"rm -f {FLAG}; cp -p /root/epilog {EPILOG}")


@pytest.mark.usefixtures("hanging")
def test_job_stuck_in_completing_is_found(cluster: Cluster) -> None:
    """The finding has the duration and the node; once the epilog ends, it disappears."""
    job = cluster.submit(*ON_C1, wrap="true")
    item = until_found(cluster, "completing")
    assert (item["subject"]["id"], item["subject"]["state"], item["nodes"]) == (job, "COMPLETING", ["c1"])
    assert item["window_s"] >= 2
    assert item["held_gpu_hours"] > 0
    cluster.shell("c1", f"rm -f {FLAG}")
    cluster.wait_for_state(job, "COMPLETED")
    assert zombies(cluster, "list", "--live", "--kind", "completing")["findings"] == []


def test_misfits_are_found_while_jobs_run(cluster: Cluster) -> None:
    """The measurements come from the agents; a job with busy cores is not listed."""
    idle = cluster.submit(*ON_C1, "--cpus-per-task=6", "--mem=12000", wrap="exec sleep 300")
    wide = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodes=2", "--mem=1000", wrap="exec sleep 300",
                          user="bob")  # fmt: skip
    alone = cluster.submit("--partition=gpu", "--mem=500", wrap="exec sleep 300", user="carol")
    for job in (idle, wide, alone):
        cluster.wait_for_state(job, "RUNNING")
    misfits = {(idle, "cpu-cores-per-gpu"), (idle, "memory-per-gpu"), (wide, "fragmentation"),
               (alone, "cpu-only-in-gpu-partition")}  # fmt: skip
    wait_until(
        "they are found",  # jobs of other tests may be found as well: recently ended jobs are also checked
        lambda: {
            (finding["subject"]["id"], finding["kind"])
            for finding in zombies(cluster, "list", "--live")["findings"]
            if finding["subject"]["type"] == "job"
        },
        misfits.issubset,
    )
    cluster.shell("login", "scancel --user=alice; scancel --user=bob; scancel --user=carol")
    works = cluster.submit(*ON_C1, "--cpus-per-task=6", wrap="for i in 1 2 3 4 5 6; do yes > /dev/null & done; wait")
    cluster.wait_for_state(works, "RUNNING")
    rows = wait_until(
        "its cores are measured",
        lambda: zombies(cluster, "list", "--live", "--kind", "cpu-cores-per-gpu", "--watch", "3s")["findings"],
        lambda rows: not rows or rows[0]["evidence"][1]["value"] > 0,
    )
    assert all(row["subject"]["id"] != idle for row in rows)


def test_leftovers_are_known_after_agent_restart(cluster: Cluster) -> None:
    """The agent discards its records once the leftovers are in the audit."""
    job = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/leaking.py --memory-mib 3000")
    cluster.wait_for_state(job, "COMPLETED")
    cluster.wait_idle()
    old = cluster.exec("c1", "cat", "/run/slurm-affinode-agent.pid")
    cluster.shell("c1", "kill -KILL $(cat /run/slurm-affinode-agent.pid)")
    wait_until("another agent runs", lambda: cluster.exec("c1", "cat", "/run/slurm-affinode-agent.pid"),
               lambda pid: pid != old)  # fmt: skip
    path = "/var/lib/slurm-affinode/leftovers.jsonl"
    assert f'"job": {job}' in cluster.exec("c1", "cat", path)

    def taken() -> list[tuple[str, str]]:
        zombies(cluster, "clean", "--live", "--yes")
        return [(row["verb"], row["result"]) for row in zombies(cluster, "history", "--job", job)["rows"]]

    assert wait_until("it is in the audit", taken) == [("epilog", "done")]
    assert f'"job": {job}' not in cluster.exec("c1", "cat", path)


def test_owner_sees_findings_about_own_job(cluster: Cluster) -> None:
    """An owner has no access to the database; the findings are based on Slurm and Prometheus."""
    job = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/squatter.py --memory-mib 60000")
    cluster.wait_for_output(job, "squatting")
    words = ("slurm-affinode", "zombies", "explain", job, "--prometheus", "http://prometheus:9090", "--window", "3s")
    wait_until(
        "the page lists the job",
        lambda: cluster.run("login", *words, "--json", user="alice").stdout,
        lambda text: bool(text) and [finding["kind"] for finding in json.loads(text)["findings"]] == ["squatter"],
    )
    assert "GPU memory is held and nothing computes" in cluster.exec("login", *words, user="alice")


def test_hostile_names_are_escaped_on_job_page(cluster: Cluster) -> None:
    """All text from the owner of the job is escaped."""
    job = cluster.submit(*ON_C1, "--job-name", HOSTILE, wrap=f"exec {WORKLOADS}/squatter.py --memory-mib 60000")
    cluster.wait_for_output(job, "squatting")
    prometheus = "http://prometheus:9090"
    for words in (("sacct", "--since", "1h"), ("gpu", "--prometheus", prometheus, "--since", "10m")):
        cluster.exec("login", "slurm-affinode", "ingest", *words, "--state", STATE)
    cluster.exec("login", "slurm-affinode", "zombies", "explain", job, "--html", f"{STATE}/page.html", "--state", STATE)
    page = cluster.exec("login", "cat", f"{STATE}/page.html")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "49" not in page.partition("&lt;script&gt;alert(1)")[2][:120]
    with contextlib.suppress(AssertionError):
        cluster.exec("login", "scancel", job)
