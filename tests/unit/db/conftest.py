"""Accounting frames for the tests of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest

from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, STEPS, conform

T0 = datetime(2026, 11, 1, tzinfo=UTC)
EARLY, LATE = T0 - timedelta(days=3650), T0 + timedelta(days=3650)

Frame = Callable[..., pl.DataFrame]


def _frame(schema: dict[str, pl.DataType], rows: list[dict[str, Any]]) -> pl.DataFrame:
    names = {name for row in rows for name in row}
    data = {name: [row.get(name) for row in rows] for name in schema if name in names}
    frame = pl.DataFrame(data, schema={name: schema[name] for name in data})
    return conform(frame, schema)


@pytest.fixture
def jobs() -> Frame:
    """Return a function that makes a ``JOBS`` frame from dicts, with defaults for key and name."""

    def make(*rows: dict[str, Any]) -> pl.DataFrame:
        return _frame(JOBS, [{"cluster": "c1", "job_id": 1, "submit": T0, "job_name": "train"} | row for row in rows])

    return make


@pytest.fixture
def steps() -> Frame:
    """Return a function that makes a ``STEPS`` frame from dicts."""

    def make(*rows: dict[str, Any]) -> pl.DataFrame:
        return _frame(STEPS, [{"cluster": "c1", "job_id": 1, "submit": T0, "step_id": "batch"} | row for row in rows])

    return make


@pytest.fixture
def gpus() -> Frame:
    """Return a function that makes an ``ALLOCATION_GPUS`` frame from dicts."""

    def make(*rows: dict[str, Any]) -> pl.DataFrame:
        base = {"cluster": "c1", "job_id": 1, "start": T0, "node": "n1", "gpu": "GPU-a"}
        return _frame(ALLOCATION_GPUS, [base | row for row in rows])

    return make


@pytest.fixture
def repository(store_url: str) -> Iterator[Repository]:
    """Return an open, empty repository on each database."""
    with Repository.open(store_url) as opened:
        yield opened


@pytest.fixture
def all_jobs(repository: Repository) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads every started attempt as a dict, sorted by key."""
    return lambda: repository.jobs(EARLY, LATE).sort("cluster", "job_id", "submit").to_dicts()
