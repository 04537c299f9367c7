"""A synthetic cluster with a stored history, and searches in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.core.explanation import Explanation
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.model.finding import Finding
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.zombies import explain, find
from slurm_affinode.zombies.find import Request

END = datetime(2026, 11, 2, 12, tzinfo=UTC)
Values = Callable[[int], dict[str, float | None]]
"""Minute of the job -> metrics."""


class Site:
    """A cluster with some hours of history, a sample per minute."""

    def __init__(self, root: Path) -> None:
        self.config = replace(Config(), store=StoreConfig(state_dir=root))
        self.samples: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []

    def job(
        self, number: int, gpus: Sequence[Values | None], *, hours: float = 4, node: str = "g1", **more: Any
    ) -> None:
        """Add a job that runs until the end; ``None`` is a GPU without samples."""
        start = END - timedelta(hours=hours)
        row = {"cluster": "c", "job_id": number, "submit": start, "start": start, "user": "ann", "account": "lab",
               "partition": "gpu", "state": "RUNNING", "gpus": len(gpus), "nodes": 1, "node_list": node,
               "timelimit_s": int(hours * 3600), "elapsed_s": int(hours * 3600), "gpu_type": "a100",
               **more}  # fmt: skip
        self.jobs.append(row)
        for index, values in enumerate(gpus):
            for minute in range(int(hours * 60) if values is not None else 0):
                assert values is not None
                sample = {"cluster": "c", "node": node, "uuid": f"GPU-{node}-{number}-{index}", "index": index,
                          "model": "NVIDIA A100-SXM4-80GB", "time": start + timedelta(minutes=minute),
                          "fb_total_mib": 81920.0, "job": str(number), **values(minute)}  # fmt: skip
                self.samples.append(sample)

    def waits(self, number: int, since_h: float, **more: Any) -> None:
        """Add a pending job."""
        row = {"cluster": "c", "job_id": number, "submit": END - timedelta(hours=since_h), "state": "PENDING",
               "eligible": END - timedelta(hours=since_h), "partition": "gpu", "req_gpus": 1, **more}  # fmt: skip
        self.jobs.append(row)

    def find(self, **options: Any) -> find.Assessment:
        """Return the findings at the end of the history."""
        self.write()
        return find.find(self.config, Request(**options), now=END)

    def explain(self, job: str) -> Explanation:
        """Return the page of a job."""
        self.write()
        return explain.explain(self.config, job, now=END)

    def write(self) -> None:
        """Write accounting and samples to database and history, as ingests do."""
        types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in self.jobs)}
        frame = pl.DataFrame(self.jobs, schema_overrides=types, infer_schema_length=None)
        with Repository.open(self.config.db_url) as store:
            store.upsert(conform(frame, JOBS))
        if self.samples:
            with closing(SampleStore(self.config.history_dir)) as history:
                rows = pl.DataFrame(self.samples, infer_schema_length=None)
                known = [
                    (pl.col(n) if n in rows.columns else pl.lit(None)).cast(t).alias(n) for n, t in SAMPLES.items()
                ]
                history.ingest(rows.select(known), source="test")


def squats(_: int) -> dict[str, float | None]:
    """Full memory, no activity."""
    return {"util_pct": 0.0, "fb_used_mib": 79_000.0, "power_w": 62.0}


def computes(_: int) -> dict[str, float | None]:
    """A framework that preallocates: 97 % of the memory, 98.6 % utilization."""
    return {"util_pct": 98.6, "fb_used_mib": 0.97 * 81_920, "power_w": 390.0}


def unused(_: int) -> dict[str, float | None]:
    """An idle GPU without a process."""
    return {"util_pct": 0.0, "fb_used_mib": 400.0, "power_w": 55.0}


def unmeasured(_: int) -> dict[str, float | None]:
    """Full memory, activity not measured."""
    return {"util_pct": None, "fb_used_mib": 79_000.0}


def used_once(minute: int) -> dict[str, float | None]:
    """Busy for the first hour."""
    return {"util_pct": 90.0 if minute < 60 else 0.0, "fb_used_mib": 500.0}


def idle_findings(assessment: find.Assessment) -> list[Finding]:
    """Return the findings of kinds for idle jobs."""
    return [finding for finding in assessment.findings if finding.kind in ("squatter", "idle-allocation")]
