"""Fixtures: hand-written GPU metrics and accounting records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis import waste
from slurm_affinode.analysis.prices import NO_PRICES, PriceTable
from slurm_affinode.analysis.result import WasteQuery, WasteResult
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS

T0 = datetime(2026, 11, 2, 8, tzinfo=UTC)


@pytest.fixture
def t0() -> datetime:
    """Return the start of the test data, a Monday morning."""
    return T0


@pytest.fixture
def at() -> Callable[[float], datetime]:
    """Convert seconds after ``t0`` to a time."""
    return lambda seconds: T0 + timedelta(seconds=seconds)


def sample_rows(times: Iterable[float], **values: Any) -> list[dict[str, Any]]:
    """Return a sample of one GPU for each of ``times`` (seconds after T0); callable values are called with the time."""
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
    """Return ``sample_rows``."""
    return sample_rows


def sample_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Return a data frame with the ``SAMPLES`` schema; absent columns are null."""
    return pl.DataFrame(
        {name: pl.Series([row.get(name) for row in rows], dtype=dtype, strict=False) for name, dtype in SAMPLES.items()}
    )


@pytest.fixture
def history(tmp_path: Path) -> Callable[..., SampleStore]:
    """Store rows of samples; each list is ingested as its own source."""

    def make(*sources: list[dict[str, Any]]) -> SampleStore:
        store = SampleStore(tmp_path / "history")
        for number, rows in enumerate(sources):
            store.ingest(sample_frame(rows), source=str(number))
        return store

    return make


def job_frame(*jobs: dict[str, Any]) -> pl.DataFrame:
    """Return a data frame with the ``JOBS`` schema; ``submit``, ``start`` and ``end`` may be seconds after T0."""
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
    """Return ``job_frame``."""
    return job_frame


@pytest.fixture
def analysed(tmp_path: Path) -> Callable[..., WasteResult]:
    """Analyze rows of samples and a frame of jobs; times are seconds after T0."""

    def run(
        rows: list[dict[str, Any]],
        jobs: pl.DataFrame,
        *,
        since: float = 0,
        until: float = 7200,
        now: float | None = None,
        recorded: Iterable[dict[str, Any]] = (),
        prices: PriceTable = NO_PRICES,
        ingests: Iterable[Any] = (),
        top_runs: int = 25,
        **query: Any,
    ) -> WasteResult:
        store = SampleStore(tmp_path / "analysed")
        if rows:
            store.ingest(sample_frame(rows), source="rows")
        start, end = T0 + timedelta(seconds=since), T0 + timedelta(seconds=until)
        moment = end if now is None else T0 + timedelta(seconds=now)
        listed = list(recorded)
        gpus = pl.DataFrame(
            {name: pl.Series([row.get(name) for row in listed], dtype=dtype) for name, dtype in ALLOCATION_GPUS.items()}
        )
        waste_query = WasteQuery(start, end, **query)
        return waste.analyse(waste_query, jobs, gpus, store, prices, tuple(ingests), now=moment, top_runs=top_runs)

    return run
