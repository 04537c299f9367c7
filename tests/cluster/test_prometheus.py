"""A real Prometheus scrapes the nodes: its samples of a job equal those of the exporters, and can be reported."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from cluster.driver import WORKLOADS, Cluster, docker, wait_until

from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.prometheus import importer
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.queries import Question
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers.common import ReadOptions

pytestmark = [pytest.mark.cluster, pytest.mark.scraped]

WITHIN = "http://prometheus:9090"
SECONDS = 8
SLACK = timedelta(seconds=3)
"""A scrape returns the exporter's last sweep, which is about a second old, or slightly more on a busy machine."""


@pytest.fixture
def url(cluster: Cluster) -> str:
    """Return the URL of the server for this machine once it scrapes both nodes."""
    network = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = docker("inspect", "--format", network, cluster.container("prometheus")).strip()
    client = Client(Server(f"http://{address}:9090"))

    def scraped() -> list[str]:
        return [item["metric"]["instance"] for item in client.instant("up == 1", _now_ms())]

    wait_until("Prometheus scrapes both nodes", scraped, lambda nodes: sorted(nodes) == ["c1:9402", "c2:9402"])
    return f"http://{address}:9090"


@pytest.fixture
def state(cluster: Cluster) -> Iterator[str]:
    """A state directory on the login node."""
    directory = cluster.exec("login", "mktemp", "-d").strip()
    yield directory
    cluster.run("login", "rm", "-r", directory)


def _now_ms() -> int:
    return round(time.time() * 1000)


def busy_job(cluster: Cluster, url: str) -> tuple[str, datetime, datetime]:
    """Run a job that keeps a GPU busy; return its ID, start, and end, once Prometheus has scraped the nodes again."""
    began = datetime.now(UTC)
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap=f"{WORKLOADS}/busy.py --seconds {SECONDS}")
    cluster.wait_for_state(job, "COMPLETED")
    ended = datetime.now(UTC)
    client = Client(Server(url))

    def newest() -> float:
        series = client.instant("min(timestamp(DCGM_FI_DEV_GPU_UTIL))", _now_ms())
        return float(series[0]["value"][1]) if series else 0.0

    wait_until("Prometheus has scraped since", newest, lambda last: last > ended.timestamp())
    return job, began, datetime.now(UTC)


def measured(cluster: Cluster) -> pl.DataFrame:
    """Return the samples that the exporters wrote to files."""
    text = cluster.shell("login", "cat /shared/gpu-history/gpu-c[12]-*.csv*")
    header, *lines = text.splitlines()
    rows = "\n".join([header, *(line for line in lines if line != header)])
    frame = pl.read_csv(io.StringIO(rows), infer_schema=False)
    return frame.select(
        "uuid",
        pl.col("time").str.to_datetime(time_unit="ms", time_zone="UTC"),
        pl.col("util_pct", "fb_used_mib").cast(pl.Float32),
        "job",
    )


def test_scraped_samples_equal_those_of_exporters(cluster: Cluster, url: str, tmp_path: Path) -> None:
    """Each sample equals one that the exporter took shortly before, and the samples span the job."""
    job, began, ended = busy_job(cluster, url)
    with_history = SampleStore(tmp_path / "history")
    question = Question(round(began.timestamp() * 1000), round(ended.timestamp() * 1000))
    outcome = importer.ingest(with_history, Client(Server(url)), question, ReadOptions(aliases=aliases.load()))
    assert outcome.failure is None
    assert (outcome.summary.devices, outcome.summary.nodes) == (4, 2)
    assert outcome.summary.steps_s[0][0] == pytest.approx(1, abs=0.2)
    scraped = with_history.scan().collect()
    of_job = scraped.filter(pl.col("job") == job)
    assert of_job["uuid"].n_unique() == 1
    span = of_job.select(pl.col("time").max() - pl.col("time").min()).item()
    # A loaded machine starts and ends the job late.
    assert timedelta(seconds=SECONDS - 3) < span < timedelta(seconds=SECONDS + 20)
    assert of_job["util_pct"].max() == 100
    exporter_samples = measured(cluster).filter(pl.col("uuid").is_in(scraped["uuid"].unique().implode()))
    pairs = scraped.select("uuid", "time", "util_pct", "fb_used_mib").join(exporter_samples, on="uuid", suffix="_own")
    age = pl.col("time") - pl.col("time_own")
    same = (pl.col("util_pct") == pl.col("util_pct_own")) & (pl.col("fb_used_mib") == pl.col("fb_used_mib_own"))
    explained = (
        pairs.filter(age.is_between(timedelta(milliseconds=-50), SLACK)).group_by("uuid", "time").agg(same.any())
    )
    assert len(explained) == len(scraped)
    assert explained.filter(~pl.col("util_pct")).is_empty()


def test_commands_read_prometheus(cluster: Cluster, url: str, state: str) -> None:
    """``ingest gpu``, twice, a report straight from the server, and ``doctor`` on the login node."""
    job, _, _ = busy_job(cluster, url)
    affinode = ("slurm-affinode",)
    ingest = (*affinode, "ingest", "gpu", "--state", state, "--prometheus", WITHIN, "--json")
    first = json.loads(cluster.exec("login", *ingest, "--since", "2m"))
    assert first["new"] == first["samples"] > 4 * SECONDS
    assert first["devices"] == 4
    again = json.loads(cluster.exec("login", *ingest, "--since", "1m", "--match", 'Hostname="c1"'))
    assert again["devices"] == 2
    cluster.wait_for_runs(job, "COMPLETED")
    cluster.exec("login", *affinode, "ingest", "sacct", "--state", f"{state}/other", "--since", "1h")
    report = (*affinode, "report", "--state", f"{state}/other", "--since", "10m", "--out", f"{state}/report")
    summary = json.loads(cluster.exec("login", *report, "--prometheus", WITHIN, "--json"))
    assert summary["total"]["gpu_hours_measured"] > 0
    assert cluster.run("login", "test", "-e", f"{state}/other/history").returncode == 1
    config = f'[prometheus]\nurl = "{WITHIN}"\n'
    cluster.exec("login", "tee", f"{state}/config.toml", stdin=config)
    doctor = cluster.run("login", *affinode, "doctor", "--config", f"{state}/config.toml", "--state", state, "--json")
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert checks["Prometheus"]["status"] == "ok"


def test_unreachable_server_is_reported_in_one_line(cluster: Cluster, state: str) -> None:
    """The command exits with status 3 and prints no traceback."""
    done = cluster.run("login", "slurm-affinode", "ingest", "gpu", "--state", state, "--prometheus", "http://c1:9")
    assert done.returncode == 3
    assert "http://c1:9: cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
