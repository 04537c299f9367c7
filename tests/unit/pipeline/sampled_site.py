"""A site of one cluster with jobs and GPU samples of three days, its report, and commands in this process."""

from __future__ import annotations

import filecmp
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config
from slurm_affinode.cli.main import main
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.pipeline import report
from slurm_affinode.slurm.accounting.schema import JOBS, conform

START = datetime(2026, 11, 2, tzinfo=UTC)
DAYS = 3
NOW = START + timedelta(days=DAYS)
QUERY = WasteQuery(START, NOW)


def add_jobs(config: Config, gpus: int) -> None:
    """Store a job of five hours each six hours on each GPU."""
    jobs = [
        {"cluster": "alpha", "job_id": 100 * gpu + k, "submit": START, "job_name": "train", "user": f"u{k % 3}",
         "account": "physics", "partition": "gpu", "qos": "normal", "state": "COMPLETED",
         "start": START + timedelta(hours=6 * k, minutes=7), "end": START + timedelta(hours=6 * k + 5, seconds=17),
         "nodes": 1, "node_list": f"n{gpu}", "gpus": 1}
        for gpu in range(gpus) for k in range(4 * DAYS)
    ]  # fmt: skip
    with Repository.open(config.db_url) as store:
        store.upsert(conform(pl.DataFrame(jobs), JOBS))


def samples_of(gpus: range, step: int = 1, late_s: int = 0) -> pl.DataFrame:
    """Return samples of every ``step`` minutes, ``late_s`` seconds after the minute, with idle times."""
    return conform(pl.DataFrame([
        {"cluster": "alpha", "node": f"n{gpu}", "uuid": f"GPU-{gpu}", "index": 0, "model": "NVIDIA A100-SXM4-80GB",
         "time": START + timedelta(minutes=i, seconds=late_s),
         "util_pct": 0.0 if i // 50 % 3 else 100 / (3 + gpu + i % 11), "fb_used_mib": 1024 / (1 + gpu) + i % 977,
         "power_w": 55.7 + i % 13 / 7, "fb_total_mib": 81920.0}
        for gpu in gpus for i in range(0, DAYS * 1440, step)
    ]), SAMPLES)  # fmt: skip


def written(config: Config, out: Path, **more: Any) -> Path:
    """Write a report with its tables, and return its directory."""
    report.build_report(config, QUERY, out, options=report.ReportOptions(csv=True), now=NOW, **more)
    return out


def assert_same(first: Path, other: Path) -> None:
    """All files of two reports are equal."""
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(first, other, names, shallow=False) == (names, [], [])


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run a command, and return its exit status."""
    monkeypatch.setattr("sys.argv", ["slurm-affinode", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
