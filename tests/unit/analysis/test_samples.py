"""Sample blocks: days with several parts, sampling intervals, damaged files, the choice of compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest

from slurm_affinode.analysis import samples, waste
from slurm_affinode.analysis.join import kernel, row_groups
from slurm_affinode.analysis.result import WasteQuery, WasteResult
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.parquet import writer
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, empty

History = Callable[..., SampleStore]
Samples = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]


@pytest.fixture
def uncompacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the parts as they were written, as after a crash before compaction."""
    monkeypatch.setattr(writer, "compact_day", lambda *_: 0)


def analysed(history: SampleStore, jobs: pl.DataFrame, t0: datetime, hours: float = 12) -> WasteResult:
    query = WasteQuery(t0, t0 + timedelta(hours=hours))
    return waste.analyse(query, jobs, empty(ALLOCATION_GPUS), history, now=query.until)


def two_sources(samples: Samples) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return utilization from one exporter and framebuffer from another, which covers every second sample."""
    times = [30.0 * i for i in range(240)]
    idle = [{**row, "job": "1"} for row in samples(times, util_pct=lambda t: 0.0 if t < 3600 else 90.0)]
    return idle, samples(times[::2], fb_used_mib=2048.0)


def test_parts_of_a_day_are_merged(
    uncompacted: None, history: History, samples: Samples, jobs: Jobs, t0: datetime
) -> None:
    """A row that is split between two parts is one sample; sums and timelines contain both halves."""
    store = history(*two_sources(samples))
    assert len(store.parts()) == 2
    result = analysed(store, jobs({"start": 0, "end": 7200}), t0)
    assert result.quality.samples == 240
    assert result.total["gpu_hours_idle"] == pytest.approx(1)
    assert result.total["gpu_hours_busy"] == pytest.approx(1)
    assert result.total["mem_gib_h"] == pytest.approx(2 * 2 / 2)
    assert result.timelines["idle"].head(20).to_list() == [1.0] * 20
    assert result.timelines["fb_mean_gib"].head(20).to_list() == [2.0] * 20


def test_compaction_does_not_change_figures(history: History, samples: Samples, jobs: Jobs, t0: datetime) -> None:
    store = history(*two_sources(samples))
    assert len(store.parts()) == 1
    result = analysed(store, jobs({"start": 0, "end": 7200}), t0)
    assert result.quality.samples == 240
    assert result.total["gpu_hours_idle"] == pytest.approx(1)
    assert result.total["mem_gib_h"] == pytest.approx(2)


def test_sampling_interval_of_sparse_day_comes_from_other_days(
    history: History, samples: Samples, t0: datetime
) -> None:
    """A gap is not a sampling interval."""
    rows = samples([*(30.0 * i for i in range(100)), 86400.0, 86400.0 + 36000], util_pct=0.0)
    index = samples_index(history(rows), t0, days=3)
    assert index.pieces.step.tolist() == [30_000, 30_000]
    assert index.pieces.limit.tolist() == [90_000.0, 90_000.0]


def test_sampling_interval_of_single_sample_is_that_of_the_fleet(
    history: History, samples: Samples, t0: datetime
) -> None:
    lone = [{**row, "uuid": "GPU-9", "index": 9} for row in samples([0.0], util_pct=0.0)]
    index = samples_index(history(samples([20.0 * i for i in range(50)], util_pct=0.0) + lone), t0)
    assert sorted(index.devices["step_ms"].to_list()) == [20_000, 20_000]


def test_single_sample_without_interval_counts_for_no_time(
    history: History, samples: Samples, jobs: Jobs, t0: datetime
) -> None:
    """The time that it represents is unknown."""
    row = [{**row, "job": "1"} for row in samples([60.0], util_pct=0.0)]
    total = analysed(history(row), jobs({"start": 0, "end": 3600}), t0).total
    assert (total["gpu_hours_measured"], total["gpu_hours_unknown"]) == (0, 1)


def spoil_all(path: Path) -> None:
    """Replace the file with one that is not Parquet."""
    path.write_bytes(b"PAR1 nonsense")


def spoil_inside(path: Path) -> None:
    """Keep the footer and overwrite the data before it."""
    content = path.read_bytes()
    path.write_bytes(b"PAR1" + b"\xff" * (len(content) // 3) + content[4 + len(content) // 3 :])


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize(
    ("what", "spoil"),
    [("samples", spoil_all), ("samples", spoil_inside), ("samples", Path.unlink), ("devices", spoil_all)],
)
def test_damaged_file_raises_one_error_with_hint(  # noqa: PLR0917
    what: str, spoil: Callable[[Path], None], history: History, samples: Samples, jobs: Jobs, t0: datetime
) -> None:
    store = history(samples([30.0 * i for i in range(50)], util_pct=0.0))
    spoil(getattr(store.parts()[0].files, what))
    with pytest.raises(UnreachableError, match="cannot be read") as caught:
        analysed(store, jobs({"start": 0, "end": 3600}), t0)
    assert caught.value.hint


def test_progress_is_reported_in_samples(history: History, samples: Samples, jobs: Jobs, t0: datetime) -> None:
    """The last report covers all samples."""
    told: list[tuple[int, int]] = []
    query = WasteQuery(t0, t0 + timedelta(hours=1))
    store = history(samples([30.0 * i for i in range(50)], util_pct=0.0))
    waste.analyse(
        query, jobs({"start": 0, "end": 3600}), empty(ALLOCATION_GPUS), store, now=query.until,
        advance=lambda done, whole: told.append((done, whole)),
    )  # fmt: skip
    assert told[-1] == (50, 50)


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("devices", pl.col("rows") + 1),
        ("devices", pl.lit(None, pl.Int64).alias("rows")),
        ("devices", pl.col("rows").cast(pl.Float64)),
        ("devices", -pl.col("step_ms")),
        ("jobs", pl.lit("x").alias("first")),
        ("jobs", pl.lit(None, pl.UInt64).alias("device")),
        ("samples", pl.col("time").dt.cast_time_unit("us")),
        ("samples", pl.col("util_pct").cast(pl.Float64)),
        ("samples", pl.col("time").reverse()),
        ("samples", pl.col("time") - pl.duration(days=30)),
        ("samples", pl.col("time").dt.offset_by("1d")),
        ("samples", pl.lit(None, pl.Datetime("ms", "UTC")).alias("time")),
    ],
)
def test_inconsistent_tables_are_rejected(  # noqa: PLR0917
    history: History, samples: Samples, jobs: Jobs, t0: datetime, table: str, change: pl.Expr
) -> None:
    store = history(two_sources(samples)[0])
    path = getattr(store.parts()[0].files, table)
    pl.read_parquet(path).with_columns(change).write_parquet(path)
    with pytest.raises(UnreachableError, match=rf"^{path.parents[1]}[^\n]*cannot be read: [^\n]+$"):
        analysed(store, jobs({"start": 0, "end": 7200}), t0)


@pytest.mark.usefixtures("either_kernel")
def test_part_with_missing_samples_is_rejected(history: History, samples: Samples, jobs: Jobs, t0: datetime) -> None:
    """The part need not be the first."""
    store = history(samples([3600.0 * i for i in range(48)], util_pct=5.0))
    path = store.parts()[1].path
    pl.read_parquet(path).head(3).write_parquet(path)
    with pytest.raises(UnreachableError, match="3 samples instead of 24"):
        analysed(store, jobs({"start": 0, "end": 7200}), t0, hours=48)


def test_compiled_loops_are_used_for_many_samples() -> None:
    """Loading Numba and machine code pays off only for many samples."""
    assert not kernel.compiled(1_000_000)
    assert kernel.compiled(10**12)


def test_report_of_few_samples_loads_no_compiler(
    monkeypatch: pytest.MonkeyPatch, history: History, samples: Samples, jobs: Jobs, t0: datetime
) -> None:
    """Importing Numba takes longer than such a report."""
    for module in (kernel, row_groups):
        monkeypatch.setattr(module, "machine_code", mock.Mock(side_effect=AssertionError("compiled")))
    result = analysed(history(*two_sources(samples)), jobs({"start": 0, "end": 7200}), t0)
    assert result.total["gpu_hours_idle"] == pytest.approx(1)


def test_few_and_many_samples_give_the_same_report(
    monkeypatch: pytest.MonkeyPatch, history: History, samples: Samples, jobs: Jobs, t0: datetime
) -> None:
    """Compares the whole analysis."""
    store, runs = history(*two_sources(samples)), jobs({"start": 0, "end": 7200})
    few = analysed(store, runs, t0)
    monkeypatch.setattr(kernel, "COMPILED_FROM_ROWS", 0)
    refused = mock.Mock(side_effect=AssertionError("read for the uncompiled loops"))
    monkeypatch.setattr("slurm_affinode.analysis.samples.blocks", refused)
    many = analysed(store, runs, t0)
    assert many.jobs.equals(few.jobs)
    assert many.window_histogram.equals(few.window_histogram)


def samples_index(store: SampleStore, t0: datetime, days: int = 1) -> samples.Index:
    """Return the sample index of ``days`` days."""
    found = samples.read_index(store, t0, t0 + timedelta(days=days), max_gap_steps=3)
    assert found.rows == int(np.sum(found.pieces.end - found.pieces.row))
    return found
