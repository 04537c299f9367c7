"""A report whose samples are folded by jobs of Slurm: ``--dask slurm``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from cluster.driver import Cluster, wait_until

pytestmark = pytest.mark.cluster

START = datetime(2026, 11, 2, tzinfo=UTC)
DAYS = 20
PERIOD = ("--since", "2026-11-02T00:00Z", "--until", "2026-11-22T00:00Z", "--csv")
CONFIG = """
[dask]
jobs = 3
cores = 1
memory_gib = 0.5
time_limit = "5m"
partition = "{partition}"
"""


@pytest.fixture(scope="module")
def state(cluster: Cluster) -> Iterator[str]:
    """A state directory of alice on the shared file system: made-up jobs and samples of four GPUs for 20 days."""
    directory = cluster.exec("login", "mktemp", "-d", "/shared/dask.XXXX").strip()
    cluster.exec("login", "chown", "alice:", directory)
    lines = ["time,node,uuid,index,model,util_pct,fb_used_mib"]
    times = [(START + timedelta(minutes=5 * i)).isoformat() for i in range(DAYS * 288)]
    lines += [
        f"{time},n{gpu},GPU-{gpu},0,A100,{i // 9 % 3 * 33.3:.1f},{1000 + i % 71}"
        for gpu in range(4) for i, time in enumerate(times)
    ]  # fmt: skip
    jobs = ["JobIDRaw|User|State|Submit|Start|End|NNodes|NodeList|AllocTRES"]
    jobs += [
        f"{10 * day + gpu + 1}|alice|COMPLETED|{at(day, 1)}|{at(day, 1)}|{at(day, 20)}|1|n{gpu}|gres/gpu=1,node=1"
        for gpu in range(4) for day in range(DAYS)
    ]  # fmt: skip
    for kind, name, content in (("gpu", "gpu.csv", lines), ("sacct", "sacct.txt", jobs)):
        cluster.exec("login", "tee", f"{directory}/{name}", user="alice", stdin="\n".join(content) + "\n")
        cluster.exec(
            "login", "slurm-affinode", "ingest", kind, "--state", directory, "--timezone", "UTC",
            f"{directory}/{name}", user="alice",
        )  # fmt: skip
    partition = cluster.exec("login", "sinfo", "--noheader", "--format=%R").split()[0]
    cluster.exec("login", "tee", f"{directory}/config.toml", user="alice", stdin=CONFIG.format(partition=partition))
    yield directory
    cluster.run("login", "rm", "-r", directory)


def at(day: int, hour: int) -> str:
    return (START + timedelta(days=day, hours=hour)).strftime("%Y-%m-%dT%H:%M:%S")


def report(cluster: Cluster, state: str, name: str, *options: str) -> dict[str, object]:
    """Render a report as alice; return its summary without the time of the report."""
    out = f"{state}/{name}"
    command = ("slurm-affinode", "report", "--config", f"{state}/config.toml", "--state", state, *PERIOD)
    cluster.exec("login", *command, "--out", out, *options, user="alice", timeout_s=300)
    summary = json.loads(cluster.exec("login", "cat", f"{out}/summary.json"))
    return {key: value for key, value in summary.items() if key != "generated"}


def workers(cluster: Cluster) -> list[str]:
    """Return the jobs of alice that run as workers."""
    return cluster.exec("login", "squeue", "--noheader", "--user=alice", "--states=RUNNING", "--format=%A").split()


def test_report_of_slurm_jobs_is_that_of_one_machine(cluster: Cluster, state: str) -> None:
    """The workers are jobs, one of which is canceled meanwhile; afterwards none is left."""
    local = report(cluster, state, "local")
    seen: list[list[str]] = []

    def cancel() -> None:
        seen.append(wait_until("a worker runs", lambda: workers(cluster), bool))
        cluster.run("login", "scancel", seen[0][0])

    canceller = threading.Thread(target=cancel)
    canceller.start()
    result = report(cluster, state, "dask", "--dask", "slurm")
    canceller.join()
    assert seen[0]
    assert result == local
    compare = 'cd "$1" && for file in local/*.csv; do cmp "$file" "dask/${file#*/}"; done; ls local'
    assert "jobs.csv" in cluster.shell("login", compare, state)
    wait_until("no worker is left", lambda: workers(cluster), lambda jobs: not jobs)
