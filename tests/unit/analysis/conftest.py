"""Histories and accounting records written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.history.schema import SAMPLES
from slurm_affinode.history.store import SampleStore
from slurm_affinode.slurm.schema import JOBS

T0 = datetime(2026, 11, 2, 8, tzinfo=UTC)


@pytest.fixture
def t0() -> datetime:
    """A Monday morning."""
    return T0


@pytest.fixture
def at() -> Callable[[float], datetime]:
    """Seconds after ``t0``."""
    return lambda seconds: T0 + timedelta(seconds=seconds)


def sample_rows(times: Iterable[float], **values: Any) -> list[dict[str, Any]]:
    """One sample of a GPU at each of ``times`` (seconds after T0); callables are asked with the time."""
    base: dict[str, Any] = {"cluster": "c", "node": "n1", "uuid": "GPU-0", "index": 0, "model": "NVIDIA A100-SXM4-80GB"}
    return [
        {
            **base,
            "time": T0 + timedelta(seconds=t),
            **{k: v(t) if callable(v) else v for k, v in values.items()},
        }
        for t in times
    ]


@pytest.fixture
def samples() -> Callable[..., list[dict[str, Any]]]:
    """``sample_rows``."""
    return sample_rows


def sample_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A frame of ``SAMPLES``; absent columns are missing."""
    return pl.DataFrame(
        {name: pl.Series([row.get(name) for row in rows], dtype=dtype, strict=False) for name, dtype in SAMPLES.items()}
    )


@pytest.fixture
def history(tmp_path: Path) -> Callable[..., SampleStore]:
    """A history of the given rows; several lists are several sources."""

    def make(*sources: list[dict[str, Any]]) -> SampleStore:
        store = SampleStore(tmp_path / "history")
        for number, rows in enumerate(sources):
            store.ingest(sample_frame(rows), source=str(number))
        return store

    return make


def job_frame(*jobs: dict[str, Any]) -> pl.DataFrame:
    """A frame of ``JOBS``; ``start`` and ``end`` may be seconds after T0."""
    base = {
        "cluster": "c", "job_id": 1, "submit": T0, "job_name": "train", "user": "ann", "account": "phys",
        "partition": "gpu", "qos": "normal", "state": "COMPLETED", "nodes": 1, "node_list": "n1", "gpus": 1,
        "gpu_type": "a100",
    }  # fmt: skip
    rows = [{**base, **job} for job in jobs]
    for row in rows:
        for name in ("submit", "start", "end"):
            if isinstance(row.get(name), int | float):
                row[name] = T0 + timedelta(seconds=row[name])
    return pl.DataFrame(
        {name: pl.Series([row.get(name) for row in rows], dtype=dtype, strict=False) for name, dtype in JOBS.items()}
    )


@pytest.fixture
def jobs() -> Callable[..., pl.DataFrame]:
    """``job_frame``."""
    return job_frame
