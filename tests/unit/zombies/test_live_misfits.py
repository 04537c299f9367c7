"""Live findings of jobs with unsuitable requests: from slurmctld, the agents, and the history."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.model.cluster import GpuCount, Job, Node, NodeGpus
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.zombies import explain, live
from slurm_affinode.zombies.find import Assessment, Request, gpu_partitions
from slurm_affinode.zombies.nodes import JobUse, LiveGpu, NodeAnswer, from_agent
from slurm_affinode.zombies.sampling import NodeSampler

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
EMPTY: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Job)), None)


def job(number: int, gpus: int = 1, node: str = "g1", *, cpus: int = 2, mem: str = "8G", **more: Any) -> Job:
    """A job that has run for three hours on one node, with its first GPUs."""
    count = GpuCount(gpus, "a100") if gpus else None
    values = {
        **EMPTY, "job_id": number, "user": "ann", "uid": 1001, "account": "lab", "partitions": ("gpu",),
        "qos": "normal", "state": "RUNNING", "is_held": False, "submit": NOW - timedelta(hours=4),
        "start": NOW - timedelta(hours=3), "nodes": (node,), "node_count": 1, "cpus": cpus, "requeue": True,
        "restarts": 0, "tres_requested": {}, "tres_allocated": {"cpu": str(cpus), "mem": mem},
        "gpus_requested": count, "gpus_allocated": count, "batch": True, "time_limit_s": 86400,
        "node_gpus": (NodeGpus(node, gpus, "a100", tuple(range(gpus))),) if gpus else (), **more,
    }  # fmt: skip
    return Job(**values)


def node(name: str, gpus: int = 4, partition: str = "gpu") -> Node:
    """A node with 32 cores and 256 GiB."""
    count = GpuCount(gpus) if gpus else None
    return Node(name, "MIXED", frozenset(), None, None, None, count, None, (partition,), 32, 8, 256 * 1024, 0, (),
                "24.11")  # fmt: skip


NODES = (node("g1"), node("g2"), node("c1", 0, "cpu"))


class Site:
    """A cluster: jobs, CPU and memory use by node, GPU metrics and accounting."""

    def __init__(self, root: Path) -> None:
        self.config = dataclasses.replace(Config(), store=StoreConfig(state_dir=root))
        self.jobs: list[Job] = []
        self.uses: dict[str, dict[int, JobUse] | None] = {"g1": {}, "g2": {}}

    def history(self, node: str, index: int, util: float, used_mib: float, *, hours: float = 3) -> None:
        """Ingest a sample per minute of a GPU."""
        with closing(SampleStore(self.config.history_dir)) as store:
            rows = pl.DataFrame([
                {"cluster": "c", "node": node, "uuid": f"GPU-{node}-{index}", "index": index,
                 "model": "NVIDIA A100-SXM4-80GB", "time": NOW - timedelta(hours=hours) + timedelta(minutes=minute),
                 "fb_total_mib": 81920.0, "util_pct": util, "fb_used_mib": used_mib}
                for minute in range(int(hours * 60))
            ])  # fmt: skip
            known = [(pl.col(n) if n in rows.columns else pl.lit(None)).cast(t).alias(n) for n, t in SAMPLES.items()]
            store.ingest(rows.select(known), source="test")

    def stored(self, **row: Any) -> None:
        """Store a job in accounting."""
        full = {"cluster": "c", "user": "ann", "account": "lab", "partition": "gpu", **row}
        types = {name: dtype for name, dtype in JOBS.items() if name in full}
        with Repository.open(self.config.db_url) as store:
            store.upsert(conform(pl.DataFrame([full], schema=types), JOBS))

    def find(self, *kinds: str) -> Assessment:
        """Run a live search."""
        site = self

        class Slurm:
            def overview(self) -> tuple[Job, ...]:
                return tuple(site.jobs)

            def nodes(self) -> tuple[Node, ...]:
                return NODES

            def config(self) -> dict[str, str]:
                return {"ClusterName": "c"}

        @contextmanager
        def client() -> Iterator[Any]:
            yield Slurm()

        def ask(name: str) -> NodeAnswer:
            gpus = tuple(
                LiveGpu(name, f"GPU-{name}-{index}", index, index, None, "NVIDIA A100-SXM4-80GB", {"util_pct": 90.0},
                        300.0, 81920.0, processes=())
                for index in range(4)
            )  # fmt: skip
            return NodeAnswer(name, gpus, "agent", uses=site.uses[name])

        return live.find_live(
            self.config, Request(kinds=kinds), slurm=client, ask=ask, now=NOW.timestamp, sleep=lambda _: None
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty cluster."""
    return Site(tmp_path)


def kinds(assessment: Assessment) -> set[tuple[int, str]]:
    return {(finding.job.job_id, finding.kind) for finding in assessment.findings if finding.job}


def test_idle_cores_and_memory_are_found(site: Site) -> None:
    """As measured by the agents; busy cores and unmeasured jobs are not reported."""
    hours3 = 3 * 3600.0
    site.jobs = [job(1, cpus=24), job(2, cpus=24), job(3, cpus=24, node="g2"), job(4, mem="200G"), job(5, mem="200G")]
    site.uses = {
        "g1": {1: JobUse(hours3, 100.0), 2: JobUse(20 * hours3, 100.0), 4: JobUse(0.0, 9 * 1024.0),
               5: JobUse(0.0, 190 * 1024.0)},
        "g2": None,
    }  # fmt: skip
    findings = site.find()
    assert kinds(findings) == {(1, "cpu-cores-per-gpu"), (4, "memory-per-gpu")}
    (item,) = [each for each in findings.findings if each.kind == "cpu-cores-per-gpu"]
    assert (item.source, item.user, item.job and item.job.batch) == ("live", "ann", True)
    assert item.summary == "24 cores for 1 GPU: 24 per GPU, 8 are there for each; 1.0 cores used on average"


def test_fragmentation_and_cpu_only_jobs_are_found(site: Site) -> None:
    """More nodes than necessary, and no GPU in a GPU partition."""
    site.jobs = [
        job(1, 2, nodes=("g1", "g2"), node_count=2, node_gpus=None), job(2, 0), job(3, 0, "c1", partitions=("cpu",)),
        job(4, 2),
    ]  # fmt: skip
    assert kinds(site.find()) == {(1, "fragmentation"), (2, "cpu-only-in-gpu-partition")}


def test_gpu_partitions() -> None:
    """All nodes have GPUs, and there are nodes without GPUs elsewhere."""
    assert gpu_partitions(NODES) == {"gpu"}
    assert gpu_partitions(NODES[:2]) == frozenset()
    assert gpu_partitions([*NODES, node("c2", 0, "gpu")]) == frozenset()


def test_time_limits_of_ended_jobs(site: Site) -> None:
    """slurmctld knows them for minutes, accounting for longer; running jobs may still need their time."""
    over = {"state": "COMPLETED", "time_limit_s": 4 * 86400}
    site.jobs = [
        job(1, end=NOW - timedelta(minutes=3), start=NOW - timedelta(hours=1), nodes=("g1",), **over),
        job(2, time_limit_s=4 * 86400),
    ]
    site.stored(job_id=3, submit=NOW - timedelta(hours=9), start=NOW - timedelta(hours=8), state="COMPLETED",
                end=NOW - timedelta(hours=7), timelimit_s=4 * 86400, gpus=1, nodes=1, node_list="g2")  # fmt: skip
    site.stored(job_id=4, submit=NOW - timedelta(hours=9), start=NOW - timedelta(hours=8), state="RUNNING",
                timelimit_s=4 * 86400, gpus=1, nodes=1, node_list="g2")  # fmt: skip
    assert kinds(site.find("time-limit")) == {(1, "time-limit"), (3, "time-limit")}


def test_low_use_of_gpus_is_found_in_the_history(site: Site) -> None:
    """A small job on a large GPU, and a user with low utilization over the period."""
    site.jobs = [job(1), job(2, 1, "g2", user="bob")]
    site.config = dataclasses.replace(
        site.config,
        zombies=dataclasses.replace(
            site.config.zombies,
            misfits=dataclasses.replace(site.config.zombies.misfits, user_min_gpu_hours=2.0),
        ),
    )
    assert kinds(site.find()) == set()
    site.history("g1", 0, 9.0, 900.0)
    site.history("g2", 0, 92.0, 60_000.0)
    findings = site.find()
    assert {(finding.user, finding.kind, finding.source) for finding in findings.findings} == {
        ("ann", "gpu-too-powerful", "live"), ("ann", "low-efficiency-user", "live"),
    }  # fmt: skip


def test_rules_without_data_are_reported(site: Site) -> None:
    """Without GPU metrics, with old ones, and with an agent that does not report usage."""
    site.jobs = [job(1), job(2, node="g2")]
    site.uses = {"g1": {1: JobUse(3600.0, 100.0)}, "g2": None}
    blind, mute = site.find("low-efficiency-user", "cpu-cores-per-gpu").notes[-2:]
    assert blind == (
        "low-efficiency-user: not searched for: GPU metrics are needed, and none are stored; --prometheus, ingest gpu"
    )
    assert mute.startswith("cpu-cores-per-gpu: unknown of 1 of 2 jobs")
    site.history("g1", 0, 9.0, 900.0, hours=1)
    site.jobs = [job(1)]
    assert not [note for note in site.find().notes if "history" in note]
    assert not [note for note in site.find("time-limit").notes if "low-eff" in note]


def test_missing_accounting_is_reported(site: Site) -> None:
    """Only running jobs are known."""
    site.jobs = [job(1)]
    assert any("ended before the last few minutes" in note for note in site.find("time-limit").notes)
    assert not site.find("squatter").notes[1:]


def test_agent_response_has_usage_of_jobs() -> None:
    """That of an older release does not."""
    answer = from_agent("g1", {"gpus": [], "jobs": [{"job": 7, "cpu_s": 3.5, "memory_mib": 10.0, "by": "cgroup"}]})
    assert answer.uses == {7: JobUse(3.5, 10.0)}
    assert from_agent("g1", {"gpus": []}).uses is None


def test_owner_gets_page_without_database(site: Site) -> None:
    """From the live Slurm and the history; a pending job has no page."""
    jobs = (job(1, user="ann"), job(2, 0, state="PENDING", start=None, nodes=(), node_gpus=None, reason="Resources"))

    class Slurm:
        def overview(self) -> tuple[Job, ...]:
            return jobs

        def config(self) -> dict[str, str]:
            return {"ClusterName": "c"}

        def nodes(self) -> tuple[Node, ...]:
            return NODES

    @contextmanager
    def client() -> Iterator[Any]:
        yield Slurm()

    def ask(name: str) -> NodeAnswer:
        return NodeAnswer(name, problem="no route to host")

    site.history("g1", 0, 0.0, 79_000.0)
    sampler = NodeSampler(ask, NOW.timestamp)
    page = explain.explain_live(site.config, "1", sampler, slurm=client)
    assert [finding.kind for finding in page.findings] == ["squatter"]
    assert (page.user, page.job.id, page.nodes, len(page.gpus)) == ("ann", "1", ("g1",), 1)
    with pytest.raises(explain.NoAttemptError):
        explain.explain_live(site.config, "2", sampler, slurm=client)
    assert not (site.config.state_dir / "affinode.sqlite").exists()
