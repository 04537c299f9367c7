"""Clean-up of model servers in running jobs: orphaned engines are ended, and idle servers are suspended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.cleaners import ON_C1, STATE, about, history, mails, run, zombies
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.servers import BY_HAND, exporting_engines, in_place, wait_awake
from cluster.sleepers import wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.scraped, pytest.mark.usefixtures("administrator")]

ENGINES = ("--live", "--kind", "orphaned-engine")
RULE = '\n[[rule]]\ndiagnoses = ["orphaned-engine"]\naction = "kill"\nmin_score = 0.9\ngrace = "3s"\n'
IDLE = '\n[[rule]]\ndiagnoses = ["idle"]\naction = "suspend"\nmin_score = 0.5\ngrace = "1s"\n'
METRICS = "curl --silent --fail http://c1:9402/metrics | grep '^slurm_affinode_serving_.*hpc_job=\"'$1'\"' || true"
BESIDE = "import socket; s = socket.create_server(('127.0.0.1', {port})); import time; time.sleep(600)"


@pytest.fixture
def discovery(cluster: Cluster) -> Iterator[None]:
    """Run the exporter with ``--serving``, so that it finds engines in jobs."""
    with exporting_engines(cluster, "2s"):
        yield


def serving(cluster: Cluster) -> tuple[str, dict[str, int]]:
    """Submit a job with a model server and another process on the GPU; return its ID, and PIDs and port in the job."""
    server = f"{WORKLOADS}/engine_server.py --memory-mib 3000"
    script = f"{WORKLOADS}/busy.py --seconds 600 &\n{server} &\nserver=$!\nwait $server\nwait"
    job = cluster.submit(*ON_C1, wrap=script)
    cluster.wait_for_output(job, "listening")
    match = re.search(r"pid=(\d+) listening port=(\d+) engine=(\d+)", cluster.output(job))
    assert match is not None
    server_pid, port, engine = map(int, match.groups())
    return job, {"server": server_pid, "port": port, "engine": engine}


def known(cluster: Cluster) -> None:
    """Wait until the agent has searched for servers twice."""
    cluster.shell("c1", "sleep 7")


def orphaned_engines(cluster: Cluster) -> list[dict[str, Any]]:
    return list(zombies(cluster, "list", *ENGINES)["findings"])


def test_orphaned_engine_is_found_and_ended_by_policy(cluster: Cluster) -> None:
    """A dry run has no effect; the engine is ended, and the rest of the job keeps running."""
    cluster.shell("login", f"cat >> {STATE}/policy.toml <<'X'\n{RULE}\nX")
    job, serves = serving(cluster)
    known(cluster)
    assert orphaned_engines(cluster) == []
    cluster.exec("c1", "kill", "-STOP", str(serves["server"]))
    known(cluster)
    assert orphaned_engines(cluster) == []  # it is late, and has not ended
    cluster.exec("c1", "kill", "-KILL", str(serves["server"]))
    diagnosis = wait_until("the engine is found", lambda: orphaned_engines(cluster), lambda rows: len(rows) == 1)[0]
    assert (diagnosis["kind"], diagnosis["subject"]["pid"], diagnosis["subject"]["job"]["id"]) == (
        "orphaned-engine",
        serves["engine"],
        job,
    )
    assert diagnosis["score"] == 1.0
    assert f"127.0.0.1:{serves['port']}" in diagnosis["evidence"][0]["text"]
    assert "orphaned-engine" in run(cluster, "zombies", "list", *ENGINES).stdout

    planned = wait_until(
        "its end is due",
        lambda: zombies(cluster, "clean", *ENGINES),
        lambda plan: about(plan, job) == [("kill-process", "planned")],
    )
    assert planned["dry_run"]
    assert len([gpu for gpu in cluster.gpus("c1") for _ in gpu.pids]) == 2

    done = zombies(cluster, "clean", *ENGINES, "--yes")
    assert about(done, job) == [("kill-process", "done")]
    wait_until("its memory is free", lambda: sum(len(gpu.pids) for gpu in cluster.gpus("c1")), lambda n: n == 1)
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert history(cluster, job) == [("kill-process", "done")]
    assert ["alice@example.org" in name for name in mails(cluster)] == [True]
    assert orphaned_engines(cluster) == []


def test_restarted_server_protects_processes_of_the_first_one(cluster: Cluster) -> None:
    """The remaining process may belong to the new server, which uses the same port, so it is spared."""
    cluster.shell("login", f"cat >> {STATE}/policy.toml <<'X'\n{RULE}\nX")
    job, serves = serving(cluster)
    known(cluster)
    cluster.exec("c1", "kill", "-KILL", str(serves["server"]))
    wait_until("the engine is found", lambda: orphaned_engines(cluster), lambda rows: len(rows) == 1)
    script = f'setsid --fork python3 -c "{BESIDE.format(port=serves["port"])}" >/dev/null 2>&1'
    cluster.exec("c1", "bash", "-c", script, user="alice")
    try:
        wait_until("it is no longer found", lambda: orphaned_engines(cluster), lambda rows: rows == [])
        assert about(zombies(cluster, "clean", *ENGINES, "--yes"), job) == []
        assert sum(len(gpu.pids) for gpu in cluster.gpus("c1")) == 2
    finally:
        cluster.run("c1", "pkill", "-f", f"127.0.0.1', {serves['port']}")


def test_orphaned_engine_without_a_rule_is_reported_to_its_owner(cluster: Cluster) -> None:
    job, serves = serving(cluster)
    known(cluster)
    cluster.exec("c1", "kill", "-KILL", str(serves["server"]))
    wait_until("the engine is found", lambda: orphaned_engines(cluster), lambda rows: len(rows) == 1)
    done = zombies(cluster, "clean", *ENGINES, "--warn", "--yes")
    assert about(done, job) == [("warn-user", "done")]
    text = cluster.exec("login", "sh", "-c", f"cat {STATE}/mail-alice*")
    assert "inference engine has ended" in " ".join(text.split())
    assert json.dumps(about(zombies(cluster, "clean", *ENGINES, "--warn", "--yes", "--all"), job)).count("spared") == 1
    assert sum(len(gpu.pids) for gpu in cluster.gpus("c1")) == 2


def test_orphaned_engine_is_listed_as_a_model_server(cluster: Cluster, discovery: None) -> None:
    """The listing is based on the metrics of the exporter, and contains the evidence."""

    def engine() -> dict[str, Any]:
        done = run(cluster, "serving", "list", "--live", "--prometheus", "http://prometheus:9090", "--json")
        rows = json.loads(done.stdout)["engines"] if done.stdout else []
        return next((row for row in rows if row["job"] == job), {})

    job, serves = serving(cluster)
    wait_until("the server is listed", engine)
    known(cluster)
    cluster.exec("c1", "kill", "-KILL", str(serves["server"]))
    item = wait_until("its end is listed", engine, lambda result: "orphaned-engine" in result["current"])
    (left,) = [each for each in item["diagnoses"] if each["kind"] == "orphaned-engine"]
    assert left["figures"]["processes"] == 1
    assert left["figures"]["gpu_memory_mib"] > 3000
    words = ("serving", "explain", job, "--live", "--prometheus", "http://prometheus:9090")
    assert "The server is gone, with 1 process of the engine" in run(cluster, *words).stdout


def recording(lines: str) -> str:
    """Return a recording of the last 20 minutes in which each scrape has these lines."""
    now_ms, text = int(time.time() * 1000), ""
    for number in range(40, -1, -1):
        at_ms = now_ms - 30_000 * number
        text += f"# scrape {at_ms} took 0.010s\n" + "".join(f"{line} {at_ms}\n" for line in lines.splitlines())
    return text


def test_idle_server_is_suspended_in_place_by_its_diagnosis(cluster: Cluster, discovery: None) -> None:
    """The server has a share of a GPU. A recording of its metrics provides the time without requests."""
    wait_for_agents(cluster)
    cluster.shell("login", f"cat >> {STATE}/policy.toml <<'X'\n{IDLE}\nX")
    script = f"exec {WORKLOADS}/engine_server.py --memory-mib 300"
    job = cluster.submit("--partition=gpu", "--nodelist=c1", "--gres=shard:6", BY_HAND, wrap=script)
    cluster.wait_for_output(job, "listening")
    metrics = wait_until("its metrics are exported", lambda: cluster.shell("login", METRICS, job), lambda text: text)

    def cleaned(*words: str) -> dict[str, Any]:
        options = ("ingest", "serving", "--state", STATE, "--format", "prometheus", "-")
        cluster.exec("login", "slurm-affinode", *options, stdin=recording(metrics))
        return zombies(cluster, "clean", "--live", "--kind", "model-server", *words)

    wait_until("its suspension is due", cleaned, lambda plan: about(plan, job) == [("suspend", "planned")])
    assert in_place(cluster, job) is None
    # The agent refuses to suspend a job that has just started.
    wait_until("it is suspended", lambda: cleaned("--yes"), lambda done: about(done, job) == [("suspend", "done")])
    wait_until("it sleeps", lambda: in_place(cluster, job), lambda seen: seen is not None)
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert history(cluster, job)[0] == ("suspend", "done")
    assert ["alice@example.org" in name for name in mails(cluster)] == [True]
    assert "suspend" not in dict(about(cleaned("--yes", "--all"), job))
    assert in_place(cluster, job) is not None
    wake(cluster, job)
    wait_awake(cluster, job)
