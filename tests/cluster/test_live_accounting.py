"""Report on real jobs from slurmdbd and a live sampler, compared with hours known in advance."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster.driver import GPU_NODES, SCRIPT, WORKLOADS, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.scraped]

STEP_S = 1.0
"""The exporters of the cluster sample every second."""
WINDOW_S = 0.2
"""Time before a sample over which the emulated driver averages, in seconds."""
SPOOL = "/shared/gpu-history"
PRODUCT = "/usr/local/bin/slurm-affinode"

LIST_JOBS = """
import json
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.gpu.sampler import ProcessJobs
driver, finder = NvmlDriver(), JobFinder()
jobs = ProcessJobs(driver, finder)
print(json.dumps([
    {"uuid": device.uuid, "jobs": jobs.jobs_of(device),
     "refs": [(ref.job_id, ref.step, ref.source) for p in driver.processes(device) if (ref := finder.find(p.pid))]}
    for device in driver.devices()
]))
"""


@dataclass(frozen=True, slots=True)
class Known:
    """A job with GPUs that are busy for a known time."""

    job_id: str
    busy_s: float
    """Per GPU."""
    changes: int
    """Number of changes between busy and idle; each is observed with an error of at most one sampling interval."""
    gpus: int = 1


def workload(name: str, *arguments: str) -> str:
    """Return the command line of a workload."""
    return " ".join(("exec", f"{WORKLOADS}/{name}.py", *arguments))


def collect(cluster: Cluster) -> None:
    """Make the exporters close their spool files, and wait until these are converted to Parquet."""
    for node in GPU_NODES:
        opened = cluster.shell(node, f"cd {SPOOL} && ls gpu-{node}-*.csv.part").split()
        cluster.shell(node, "kill -HUP $(cat /run/slurm-affinode-exporter.pid)")
        for name in opened:
            wait_for_file(cluster, f"{SPOOL}/{name.removesuffix('.csv.part')}.parquet")


def wait_for_file(cluster: Cluster, path: str) -> None:
    """Wait until the file is visible on the login node."""
    wait_until(f"{path} is there", lambda: cluster.run("login", "test", "-e", path).returncode == 0)


@pytest.fixture
def state(cluster: Cluster) -> Iterator[str]:
    """A state directory on the login node."""
    path = cluster.exec("login", "mktemp", "--directory").strip()
    yield path
    cluster.run("login", "rm", "-rf", path)


def product(cluster: Cluster, state: str, *arguments: str) -> str:
    """Run slurm-affinode on the login node; return its output."""
    return cluster.exec("login", "env", f"SLURM_AFFINODE_STATE={state}", PRODUCT, *arguments, timeout_s=120)


def submit_known(cluster: Cluster) -> list[Known]:
    """Submit one job of each kind, as different users."""

    def submit(name: str, *arguments: str, node: str, gpus: int = 1, user: str = "alice") -> str:
        options = ("--partition=gpu", f"--nodelist={node}", f"--gres=gpu:{gpus}")
        return cluster.submit(*options, wrap=workload(name, *arguments), user=user)

    idle = submit("idle_after", "--busy=5", "--idle=9.5", "--again=2", "--every=0.5", node="c1")
    squatter = submit("squatter", "--seconds=14", node="c1", user="bob")
    bursty = submit("bursty", "--burst=2", "--pause=3", "--count=3", node="c2", user="carol")
    nothing = cluster.submit("--partition=gpu", "--nodelist=c2", "--gres=gpu:1", wrap="sleep 12", user="bob")
    both = submit("multi_process", "--processes=2", "--gpus=2", "--busy=4", "--idle=5", "--again=1", node="c1", gpus=2)
    return [Known(idle, 7, 2), Known(squatter, 0, 0), Known(bursty, 6, 3), Known(nothing, 0, 0), Known(both, 5, 2, 2)]


def test_known_workloads_yield_known_hours(cluster: Cluster, state: str) -> None:
    """Allocated hours equal those of sacct; idle hours match the workloads to one sampling interval per change."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known = submit_known(cluster)
    runs = {}
    for job in known:
        cluster.wait_for_state(job.job_id, "COMPLETED", timeout_s=90)
        [runs[job.job_id]] = cluster.wait_for_runs(job.job_id, "COMPLETED")
    collect(cluster)

    product(cluster, state, "ingest", "sacct")
    taken = json.loads(product(cluster, state, "ingest", "gpu", "--json", SPOOL))
    again = json.loads(product(cluster, state, "ingest", "gpu", "--json", SPOOL))
    assert (taken["devices"], taken["nodes"], again["new"]) == (4, 2, 0)
    out = f"{state}/report"
    summary = json.loads(product(cluster, state, "report", "--since", since, "--out", out, "--csv", "--json"))
    rows = {row["job_id"]: row for row in csv.DictReader(io.StringIO(cluster.exec("login", "cat", f"{out}/jobs.csv")))}

    assert set(rows) == {job.job_id for job in known}
    allocated_s = 0
    for job in known:
        row, held_s = rows[job.job_id], runs[job.job_id].elapsed_s * job.gpus
        seconds = {name: float(row[f"gpu_hours_{name}"]) * 3600 for name in ("allocated", "unknown", "idle", "low")}
        allocated_s += held_s
        assert seconds["allocated"] == pytest.approx(held_s, abs=1e-6), row
        assert seconds["unknown"] <= 2 * STEP_S * job.gpus, row
        truth_s = held_s - job.busy_s * job.gpus
        # A change occurs between two samples, and the first sample is taken within one interval.
        tolerance_s = (max(1, job.changes) * (STEP_S + WINDOW_S)) * job.gpus
        missing_s = seconds["unknown"] + seconds["low"]
        assert truth_s - missing_s - tolerance_s <= seconds["idle"] <= truth_s + tolerance_s, (truth_s, row)
        assert row["mapping"] == "labels", row
    assert summary["total"]["gpu_hours_allocated"] * 3600 == pytest.approx(allocated_s, abs=0.01)
    assert cluster.exec("login", "head", "--bytes=15", f"{out}/report.html").lower().startswith("<!doctype html")


def test_metrics_name_the_job_that_has_the_gpu(cluster: Cluster) -> None:
    """Metrics read from another node name the job while it runs, and no job afterwards."""
    job = cluster.submit(
        "--partition=gpu", "--nodelist=c2", "--gres=gpu:1", wrap=workload("squatter", "--memory-mib=60000")
    )
    written = cluster.wait_for_output(job, " squatting ")
    match = re.search(r"gpu=(GPU-\S+)", written)
    assert match is not None

    def metrics() -> list[str]:
        text = cluster.exec("login", "curl", "--silent", "--fail", "http://c2:9402/metrics")
        return [line for line in text.splitlines() if line.startswith("DCGM_FI_DEV_FB_USED{") and match[1] in line]

    def shown(lines: list[str]) -> bool:
        return f'hpc_job="{job}"' in lines[0] and float(lines[0].rpartition(" ")[2]) >= 60000

    wait_until("the metrics name the job and show its memory", metrics, shown)
    cluster.exec("login", "scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    wait_until("the metrics name no job", metrics, lambda lines: "hpc_job" not in lines[0])


def test_processes_are_traced_to_their_job(cluster: Cluster) -> None:
    """Without a mapping directory, the exporter uses cgroups, or without those the process tree."""
    cgroups = "proctrack/cgroup" in cluster.exec("login", "scontrol", "show", "config")
    job = cluster.submit("--partition=gpu", "--nodelist=c1", "--gres=gpu:1", wrap=workload("squatter"))
    cluster.wait_for_output(job, " squatting ")
    record = json.loads(cluster.exec("c1", "/opt/slurm-affinode/bin/python", "-c", LIST_JOBS))
    [held] = [gpu for gpu in record if gpu["refs"]]
    assert held["jobs"] == [job]
    assert held["refs"] == [[int(job), "batch", "cgroup" if cgroups else "slurmstepd"]]


@pytest.mark.usefixtures("leftovers_stay")
def test_leftover_process_belongs_to_no_running_job(cluster: Cluster) -> None:
    """The environment of the process names a job that no longer has the GPU."""
    job = cluster.submit("--partition=gpu", "--nodelist=c1", "--gres=gpu:1", wrap=workload("leaking"))
    cluster.wait_for_state(job, "COMPLETED")
    record = json.loads(cluster.exec("c1", "/opt/slurm-affinode/bin/python", "-c", LIST_JOBS))
    [held] = [gpu for gpu in record if gpu["refs"]]
    assert held["jobs"] is None
    assert [(ref[0], ref[2]) for ref in held["refs"]] == [(int(job), "environment")]


def test_samples_survive_power_failure_of_node(cluster: Cluster, state: str) -> None:
    """Samples that the exporter wrote before the failure are available once the node is back."""
    [part] = cluster.shell("c2", f"cd {SPOOL} && ls gpu-c2-*.csv.part").split()
    wait_until("some samples are there", lambda: len(cluster.exec("c2", "cat", f"{SPOOL}/{part}").splitlines()) > 4)
    cluster.kill("c2")
    cluster.start("c2")
    wait_until("c2 serves again", lambda: cluster.nodes()["c2"], lambda node: node == "idle")
    parquet = f"{SPOOL}/{part.removesuffix('.csv.part')}.parquet"
    wait_for_file(cluster, parquet)
    taken = json.loads(product(cluster, state, "ingest", "gpu", "--json", parquet))
    assert taken["samples"] >= 4


@pytest.mark.slow
@pytest.mark.nightly  # the demo takes two minutes; the tests above report on real jobs
def test_cluster_demo_writes_report(cluster: Cluster, tmp_path: Path) -> None:
    """The demo runs jobs of three users, prints one line per stage, and writes the report outside the cluster."""
    environment = {**os.environ, "CLUSTER_NAME": cluster.name, "SLURM_RELEASE": cluster.release}
    done = subprocess.run(
        [SCRIPT.parent / "cluster-demo", tmp_path / "out"], env=environment, capture_output=True, text=True,
        check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/out/report.html" in done.stderr.splitlines()[-1]
    assert "idle" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {row["name"] for row in summary["groups"]["user"]} >= {"alice", "bob", "carol"}
    assert (tmp_path / "out" / "report.html").stat().st_size > 20_000
