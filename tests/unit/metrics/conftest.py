"""Fixtures for GPU metrics: a file reader, frames of samples, a sample store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest

from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.schema import SAMPLES

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)


@dataclass(frozen=True)
class Read:
    """The result of reading a file."""

    format: str
    rows: list[dict[str, Any]]
    """Samples by node, device, MIG instance and time."""
    notes: ReadingNotes


@pytest.fixture
def read() -> Callable[..., Read]:
    """Read one file, with options as keywords. Times without a zone are in UTC unless ``zone`` is given."""

    def _read(
        path: Path,
        *,
        format: str | None = None,
        zone: str = "UTC",
        columns: Mapping[str, str] | None = None,
        **how: Any,
    ) -> Read:
        options = ReadOptions(aliases=aliases.load(columns=columns), zone=ZoneInfo(zone), **how)
        notes = ReadingNotes(path.name)
        kind, frames = inputs.read_file(path, options, notes, format)
        whole = pl.concat([pl.DataFrame(schema=SAMPLES), *frames])
        order = whole.sort("node", "uuid", "index", "mig", "time", nulls_last=False)
        return Read(kind, list(order.iter_rows(named=True)), notes)

    return _read


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    """Return an empty sample store."""
    return SampleStore(tmp_path / "history")


@pytest.fixture
def samples() -> Callable[..., pl.DataFrame]:
    """Return samples of one GPU, by default every 30 seconds from eight o'clock."""

    def _samples(
        values: list[float | None] | None = None, *, start: datetime = EIGHT, step_s: float = 30, **columns: Any
    ) -> pl.DataFrame:
        known = values if values is not None else [0.0]
        times = [start + timedelta(seconds=step_s * number) for number in range(len(known))]
        fixed = {"cluster": "alpha", "node": "gpu01", "uuid": "GPU-1", **columns}
        frame = pl.DataFrame({"time": times, "util_pct": known})
        frame = frame.with_columns(pl.lit(value).alias(name) for name, value in fixed.items())
        return frame.select(
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        )

    return _samples
