"""``zombies list`` on a live cluster: jobs with idle GPUs, busy jobs, and processes without a job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.driver import WORKLOADS, Cluster, ClusterError, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.scraped]

ORPHAN = "setsid nohup env CUDA_VISIBLE_DEVICES=1 {} --memory-mib 2000 --seconds 120 >/dev/null 2>&1 & echo $!"


def listed(cluster: Cluster, *options: str) -> dict[str, Any]:
    """Return the output of ``zombies list --json``."""
    words = " ".join(options)
    text = cluster.shell("login", f"slurm-affinode zombies list --json {words}; [ $? -le 1 ]", timeout_s=120)
    return json.loads(text)  # type: ignore[no-any-return]


def of_job(assessment: dict[str, Any], job: str) -> list[str]:
    """Return the variants, or else kinds, of a job's findings."""
    return [
        finding["variant"] or finding["kind"]
        for finding in assessment["findings"]
        if finding["subject"].get("id") == job
    ]


@pytest.fixture
def squatter(cluster: Cluster) -> str:
    """Submit a job that fills its GPU memory without computing; return its ID."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1",
                         wrap=f"{WORKLOADS}/squatter.py --memory-mib 79000 --seconds 300")  # fmt: skip
    cluster.wait_for_output(job, "squatting")
    return job


def test_idle_holders_are_found_and_busy_jobs_are_not(cluster: Cluster, squatter: str) -> None:
    """A squatter and an allocation without a process are listed, a busy job is not; pending jobs are counted."""
    busy = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1", user="bob",
                          wrap=f"{WORKLOADS}/busy.py --seconds 300")  # fmt: skip
    unused = cluster.submit("--partition=gpu", "--gres=gpu:2", "--nodelist=c2", wrap="sleep 300", user="bob")
    for job in (busy, unused):
        cluster.wait_for_state(job, "RUNNING")
    waits = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap="sleep 10", user="carol")
    wait_until("the busy job computes", lambda: cluster.gpus("c1"),
               lambda gpus: any(gpu.utilization_pct > 50 for gpu in gpus))  # fmt: skip
    result = listed(cluster, "--live", "--watch 8s", "--window 5s")
    assert of_job(result, squatter) == ["squatter"]
    assert of_job(result, unused) in (
        ["never-used"],
        ["idle"],
    )  # the variant depends on whether its GPUs have been sampled yet
    assert of_job(result, busy) == []
    (item,) = [row for row in result["findings"] if row["subject"].get("id") == squatter]
    assert item["impact"]["examples"] == [waits]
    assert {row["dimension"] for row in item["evidence"] if row["met"]} == {"memory", "compute", "time", "state"}


def test_squatter_is_found_in_prometheus_samples_and_explained(cluster: Cluster, squatter: str) -> None:
    """The idle window is based on scraped samples; ``list`` and ``explain`` agree after ingestion."""
    prometheus = "--prometheus http://prometheus:9090"
    result = wait_until(
        "the squatter is found within its window",
        lambda: listed(cluster, "--live", "--window 10s", "--since 5m", prometheus),
        lambda seen: bool(of_job(seen, squatter)),
    )
    assert of_job(result, squatter) == ["squatter"]
    cluster.exec("login", "slurm-affinode", "ingest", "sacct", "--since", "1h")
    cluster.shell("login", f"slurm-affinode ingest gpu {prometheus} --since 10m")
    assert of_job(listed(cluster, "--window 5s", "--running"), squatter) == ["squatter"]
    page = cluster.shell("login", f"slurm-affinode zombies explain {squatter} --window 5s")
    assert "GPU memory is held and nothing computes" in page
    assert "Time line from" in page


@pytest.fixture
def orphan(cluster: Cluster) -> Iterator[int]:
    """Start a process on GPU 1 of c1 outside any job; yield its PID."""
    pid = int(cluster.shell("c1", ORPHAN.format(f"{WORKLOADS}/squatter.py"), user="carol"))
    yield pid
    with contextlib.suppress(ClusterError):
        cluster.exec("c1", "kill", "-9", str(pid))


def test_process_outside_jobs_is_orphan(cluster: Cluster, orphan: int) -> None:
    """The finding names no job, and its user has none on the node."""
    wait_until("the process is on the GPU", lambda: cluster.gpus("c1"), lambda gpus: any(gpu.pids for gpu in gpus))
    (finding,) = listed(cluster, "--live", "--kind orphan-process")["findings"]
    assert (finding["subject"]["type"], finding["user"], finding["nodes"]) == ("process", "carol", ["c1"])
    assert finding["subject"]["start_ticks"] > 0
