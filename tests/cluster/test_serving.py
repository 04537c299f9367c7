"""Live diagnosis of a real llama.cpp server in a job: an overload, and an engine whose server was killed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.cleaners import ON_C1, zombies
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.servers import exporting_engines
from cluster.sleepers import wait_for_agents

pytestmark = [pytest.mark.cluster, pytest.mark.scraped, pytest.mark.slow, pytest.mark.timeout(600, func_only=True)]

MAKE_MODEL = Path(__file__).resolve().parents[3] / "shared" / "tools" / "tiny-engines" / "make_gguf.py"
MODEL = "/home/alice/serving.gguf"
PORT = 8322
URL = f"http://c1:{PORT}"
PROMETHEUS = "http://prometheus:9090"
WITHIN_S = 120.0
"""Maximum time from the overload to its diagnosis, in seconds."""


@pytest.fixture(autouse=True)
def programs(cluster: Cluster) -> None:
    """Skip the test if llama.cpp or its model is missing; wait until the agents respond."""
    if cluster.release != "24.11":
        pytest.skip("only the image with Slurm 24.11 has llama.cpp")
    if not MAKE_MODEL.is_file():
        pytest.skip(f"{MAKE_MODEL} does not exist")
    wait_for_agents(cluster)


@pytest.fixture
def discovery(cluster: Cluster) -> Iterator[None]:
    """Run the exporter with ``--serving``, so that it finds engines in jobs."""
    with exporting_engines(cluster, "5s"):
        yield


def listed(cluster: Cluster, job: str) -> dict[str, Any]:
    """Return the engine of the job in a live list; empty if there is none."""
    words = ("serving", "list", "--live", "--prometheus", PROMETHEUS, "--json")
    done = cluster.run("login", "slurm-affinode", *words)
    if done.returncode == 2:
        assert "has no samples of engines" in done.stderr or "has no metric of an engine" in done.stderr, done.stderr
        return {}
    engines = [engine for engine in json.loads(done.stdout)["engines"] if engine["job"] == job]
    assert len(engines) <= 1
    return engines[0] if engines else {}


@pytest.mark.usefixtures("discovery", "administrator")
def test_overload_is_diagnosed_live_and_the_engine_is_found_without_its_server(cluster: Cluster) -> None:
    cluster.exec("login", "/opt/programs/bin/python", "-", MODEL, user="alice", stdin=MAKE_MODEL.read_text())
    server = f"{WORKLOADS}/llama_server.py {MODEL} --port {PORT} --context 8192 --memory-mib 512 --engine-process"
    job = cluster.submit(*ON_C1, wrap=f"{server} &\nwait $!\nsleep 600")
    output = cluster.wait_for_output(job, " listening ")
    (pid,) = re.findall(r"pid=(\d+) listening", output)
    (engine,) = map(int, re.findall(r" engine=(\d+)", output))
    # Scrapes fail until the model is loaded.
    calm = wait_until(
        "the server is healthy", lambda: listed(cluster, job), lambda item: item.get("current") == ["healthy"]
    )  # fmt: skip
    assert (calm["key"]["engine"], calm["key"]["node"], calm["user"]) == ("llamacpp", "c1", "alice")
    assert len(calm["gpus"]) == 1

    load = cluster.submit("--partition=cpu", wrap=f"exec {WORKLOADS}/request_load.py {URL}")
    began = float(re.findall(r"([\d.]+) pid=\d+ overload", cluster.wait_for_output(load, " overload "))[0])
    ill = wait_until(
        "the overload is diagnosed",
        lambda: listed(cluster, job),
        lambda item: "queue-unstable" in item.get("current", ()),
        timeout_s=WITHIN_S,
    )
    assert time.time() - began < WITHIN_S
    *_, overload = [
        diagnosis for diagnosis in ill["diagnoses"] if diagnosis["kind"] == "queue-unstable"
    ]  # one may be queued while the rate is measured
    unknown = {item["dimension"] for item in overload["evidence"] if item["unknown"]}
    assert "queue" not in unknown
    assert "limit" not in unknown  # the batch: llama.cpp exports no KV usage
    assert "tokens" in unknown
    words = ("serving", "explain", job, "--live", "--prometheus", PROMETHEUS)
    assert "the queue grew by" in cluster.exec("login", "slurm-affinode", *words)
    cluster.exec("login", "scancel", load)

    orphans = ("list", "--live", "--kind", "orphaned-engine")
    assert zombies(cluster, *orphans)["findings"] == []
    cluster.exec("c1", "kill", "-KILL", pid)
    (entry,) = wait_until("the engine is found", lambda: zombies(cluster, *orphans)["findings"])
    assert (entry["subject"]["pid"], entry["subject"]["job"]["id"]) == (engine, job)
    assert f":{PORT}" in entry["evidence"][0]["text"]
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert any(engine in gpu.pids for gpu in cluster.gpus("c1"))
