"""Several clusters in one database and one sample store: the results are those of each cluster alone.

Both have the same job IDs, submit times, names of nodes and GPU indices; their GPUs are idle at different times.
"""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.pipeline import report
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.zombies import find
from slurm_affinode.zombies import job as jobs_of_owners
from slurm_affinode.zombies.find import Request

START = datetime(2026, 11, 2, tzinfo=UTC)
NOW = START + timedelta(hours=12)
CLUSTERS = ("alpha", "beta")


def config_of(state: Path) -> Config:
    return Config(store=StoreConfig(state_dir=state))


def filled(state: Path, clusters: tuple[str, ...]) -> Config:
    """Write jobs, samples with labels, and a suspension of each cluster."""
    config, jobs, samples = config_of(state), [], []
    for cluster in clusters:
        busy = 40.0 if cluster == "alpha" else 90.0
        for number in range(4):
            begin = START + timedelta(hours=2 * number, minutes=7)
            end = begin + timedelta(hours=1, minutes=40 if cluster == "alpha" else 20)
            jobs.append(
                {"cluster": cluster, "job_id": 7 + number, "submit": START, "eligible": START, "job_name": "train",
                 "user": f"u{number % 2}", "account": "physics", "partition": "gpu", "qos": "normal",
                 "state": "COMPLETED", "start": begin, "end": end, "nodes": 1, "node_list": "n1", "gpus": 1,
                 "timelimit_s": 7200, "cpus": 4}
            )  # fmt: skip
            for minute in range(int((end - begin).total_seconds()) // 60):
                idle = minute > (30 if cluster == "alpha" else 50)
                samples.append(
                    {"cluster": cluster, "node": "n1", "uuid": f"GPU-{cluster}", "index": 0, "model": "A100",
                     "time": begin + timedelta(minutes=minute), "util_pct": 0.0 if idle else busy + number,
                     "fb_used_mib": 1000.0 + number, "fb_total_mib": 81_920.0, "job": str(7 + number)}
                )  # fmt: skip
    with Repository.open(config.db_url) as store:
        store.upsert(conform(pl.DataFrame(jobs), JOBS))
        start_s = int(START.timestamp())
        store.upsert_suspensions([
            LedgerEntry.of(JobKey(cluster, 7, start_s), start_s * 1000 + 600_000 * place)
            for place, cluster in enumerate(CLUSTERS, 1)
            if cluster in clusters
        ])  # fmt: skip
    with closing(SampleStore(config.history_dir)) as history:
        history.ingest(conform(pl.DataFrame(samples), SAMPLES), source="all")
    return config


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Config]:
    """Both clusters, and each alone."""
    return {
        clusters: filled(tmp_path_factory.mktemp("-".join(clusters)), clusters)
        for clusters in (CLUSTERS, *((cluster,) for cluster in CLUSTERS))
    }


def alone(configs: dict[tuple[str, ...], Config]) -> list[Config]:
    return [config for clusters, config in configs.items() if len(clusters) == 1]


def test_report_of_both_is_the_sum_of_each(configs: dict[tuple[str, ...], Config], tmp_path: Path) -> None:
    def made(config: Config, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        options = report.ReportOptions(csv=True)
        written = report.build_report(config, WasteQuery(START, NOW), tmp_path / name, options=options, now=NOW)
        rows = pl.read_csv(tmp_path / name / "jobs.csv").sort("cluster", "job_id").to_dicts()
        return rows, json.loads(written.summary_path.read_text())["total"]

    rows, total = made(configs[CLUSTERS], "both")
    parts = [made(config, str(number)) for number, config in enumerate(alone(configs))]
    assert len(rows) == 8
    assert rows == [row for part, _ in parts for row in part]
    for name in ("gpu_hours_allocated", "gpu_hours_idle", "gpu_hours_busy", "gpu_hours_capacity"):
        assert total[name] == pytest.approx(sum(part[name] for _, part in parts)), name
    assert 0 < parts[0][1]["gpu_hours_idle"] != parts[1][1]["gpu_hours_idle"] > 0


def test_findings_of_both_are_those_of_each(configs: dict[tuple[str, ...], Config]) -> None:
    request = Request(since=START, until=START + timedelta(hours=1, minutes=20), window_s=600)

    def findings_of(config: Config) -> list[dict[str, Any]]:
        return [
            finding.as_json() for finding in find.find(config, request, now=NOW).findings if finding.job is not None
        ]

    both = sorted(findings_of(configs[CLUSTERS]), key=lambda item: item["cluster"])
    assert [item["cluster"] for item in both] == list(CLUSTERS)
    assert both == [item for config in alone(configs) for item in findings_of(config)]


def test_summaries_of_both_are_those_of_each(configs: dict[tuple[str, ...], Config]) -> None:
    """With the suspensions of the job, and not those of the other cluster's job of the same ID."""

    def summaries(config: Config) -> list[dict[str, Any]]:
        with (
            Repository.open(config.db_url, create=False) as store,
            closing(SampleStore(config.history_dir)) as samples,
        ):
            rows = store.jobs(START, NOW)
            made = jobs_of_owners.summaries(config, store, samples, rows, NOW, nodes=(), source="published")
        return sorted((item.as_json() for item in made), key=lambda item: (item["cluster"], item["job"]["id"]))

    both = summaries(configs[CLUSTERS])
    suspended = {(item["cluster"], item["job"]["id"]): len(item["suspensions"]) for item in both if item["suspensions"]}
    assert suspended == {("alpha", "7"): 1, ("beta", "7"): 1}
    assert both == [summary for config in alone(configs) for summary in summaries(config)]
