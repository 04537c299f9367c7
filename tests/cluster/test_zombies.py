"""``zombies list`` on a live cluster: who holds GPUs and does nothing, who computes, and what belongs to no job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.driver import WORKLOADS, Cluster, ClusterError, wait_until

pytestmark = pytest.mark.cluster

ORPHAN = "setsid nohup env CUDA_VISIBLE_DEVICES=1 {} --memory-mib 2000 --seconds 120 >/dev/null 2>&1 & echo $!"


def listed(cluster: Cluster, *options: str) -> dict[str, Any]:
    """The findings as JSON. The status says whether there are any."""
    words = " ".join(options)
    text = cluster.shell("login", f"slurm-affinode zombies list --json {words}; [ $? -le 1 ]", timeout_s=120)
    return json.loads(text)  # type: ignore[no-any-return]


def of_job(found: dict[str, Any], job: str) -> list[str]:
    """Kinds and variants of a job's findings."""
    return [one["variant"] or one["kind"] for one in found["findings"] if one["subject"].get("id") == job]


@pytest.fixture
def squatter(cluster: Cluster) -> str:
    """A job that fills its GPU and computes nothing."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1",
                         wrap=f"{WORKLOADS}/squatter.py --memory-mib 79000 --seconds 300")  # fmt: skip
    cluster.wait_for_output(job, "squatting")
    return job


def test_who_holds_and_who_computes(cluster: Cluster, squatter: str) -> None:
    """The squatter is found, an allocation without a process too, the busy job is not; what waits is counted."""
    busy = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1", user="bob",
                          wrap=f"{WORKLOADS}/busy.py --seconds 300")  # fmt: skip
    unused = cluster.submit("--partition=gpu", "--gres=gpu:2", "--nodelist=c2", wrap="sleep 300", user="bob")
    for job in (busy, unused):
        cluster.wait_for_state(job, "RUNNING")
    waits = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap="sleep 10", user="carol")
    wait_until("the busy job computes", lambda: cluster.gpus("c1"),
               lambda gpus: any(gpu.utilization_pct > 50 for gpu in gpus))  # fmt: skip
    found = listed(cluster, "--live", "--watch 8s", "--window 5s")
    assert of_job(found, squatter) == ["squatter"]
    assert of_job(found, unused) in (["never-used"], ["idle"])  # as soon as it was looked at
    assert of_job(found, busy) == []
    (one,) = [row for row in found["findings"] if row["subject"].get("id") == squatter]
    assert one["impact"]["examples"] == [waits]
    assert {row["dimension"] for row in one["evidence"] if row["met"]} == {"memory", "compute", "time", "state"}


def test_a_squatter_by_the_history_of_prometheus_and_its_page(cluster: Cluster, squatter: str) -> None:
    """The window comes from what was scraped; afterwards the same from the store, and explained."""
    prometheus = "--prometheus http://prometheus:9090"
    found = wait_until(
        "the squatter is found within its window",
        lambda: listed(cluster, "--live", "--window 10s", "--since 5m", prometheus),
        lambda seen: bool(of_job(seen, squatter)),
    )
    assert of_job(found, squatter) == ["squatter"]
    cluster.exec("login", "slurm-affinode", "ingest", "sacct", "--since", "1h")
    cluster.shell("login", f"slurm-affinode ingest gpu {prometheus} --since 10m")
    assert of_job(listed(cluster, "--window 5s", "--running"), squatter) == ["squatter"]
    page = cluster.shell("login", f"slurm-affinode zombies explain {squatter} --window 5s")
    assert "GPU memory is held and nothing computes" in page
    assert "Time line from" in page


@pytest.fixture
def orphan(cluster: Cluster) -> Iterator[int]:
    """A process on GPU 1 of c1 that no job started."""
    pid = int(cluster.shell("c1", ORPHAN.format(f"{WORKLOADS}/squatter.py"), user="carol"))
    yield pid
    with contextlib.suppress(ClusterError):
        cluster.exec("c1", "kill", "-9", str(pid))


def test_a_process_of_no_job_is_an_orphan(cluster: Cluster, orphan: int) -> None:
    """It names no job, and its user has none on the node."""
    wait_until("the process is on the GPU", lambda: cluster.gpus("c1"), lambda gpus: any(gpu.pids for gpu in gpus))
    (one,) = listed(cluster, "--live", "--kind orphan-process")["findings"]
    assert (one["subject"]["type"], one["user"], one["nodes"]) == ("process", "carol", ["c1"])
    assert one["subject"]["start_ticks"] > 0
