"""Sample blocks: days with several parts, sampling intervals, damaged files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import samples, waste
from slurm_affinode.analysis.result import WasteQuery, WasteResult
from slurm_affinode.analysis.samples import memory_mib, read_index
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.parquet import writer
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, empty

from .conftest import sample_frame

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


def test_memory_of_a_gpu_is_that_of_its_last_day(
    uncompacted: None, history: History, samples: Samples, t0: datetime
) -> None:
    """Days of one and of several parts; a GPU without a value on its last day has none."""
    day = 86400.0
    times = [3600.0 * i for i in range(12)]
    first = samples(times, fb_total_mib=1000) + samples([day + t for t in times], fb_total_mib=81_559)
    other = samples(times, uuid="GPU-1", index=1, fb_total_mib=lambda t: 24_576 if t == times[3] else None)
    none = samples(times, uuid="GPU-2", index=2, fb_total_mib=24_576)
    none += samples([day + t for t in times], uuid="GPU-2", index=2)
    store = history(first + none, other)
    assert sorted(part.day.day for part in store.parts()) == [2, 2, 3]
    index = read_index(store, t0, t0 + timedelta(days=2), max_gap_steps=3.0)
    sizes = dict(zip(index.devices["uuid"], memory_mib(index).tolist(), strict=True))
    assert sizes == {"GPU-0": 81_559, "GPU-1": 24_576, "GPU-2": pytest.approx(float("nan"), nan_ok=True)}


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


def test_sampling_interval_of_single_sample_is_not_that_of_another_cluster(
    history: History, samples: Samples, t0: datetime
) -> None:
    other = [{**row, "cluster": "other"} for row in samples([60.0 * i for i in range(50)], util_pct=0.0)]
    lone = [{**row, "cluster": "other", "uuid": "GPU-9", "index": 9} for row in samples([0.0], util_pct=0.0)]
    index = samples_index(history(samples([20.0 * i for i in range(50)], util_pct=0.0) + other + lone), t0)
    assert sorted(index.devices["step_ms"].to_list()) == [20_000, 60_000, 60_000]


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


def spoil_end(path: Path) -> None:
    """Truncate the file, as a full disk does."""
    path.write_bytes(path.read_bytes()[:-100])


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


@pytest.mark.parametrize("spoil", [spoil_all, spoil_inside, spoil_end, Path.unlink])
def test_error_names_the_damaged_file_among_several(
    history: History, samples: Samples, jobs: Jobs, t0: datetime, spoil: Callable[[Path], None]
) -> None:
    store = history(samples([3600.0 * i for i in range(72)], util_pct=5.0))
    path = store.parts()[1].path
    spoil(path)
    with pytest.raises(UnreachableError, match=rf"^{path}[^\n]*cannot be read: [^\n]+$"):
        analysed(store, jobs({"start": 0, "end": 7200}), t0, hours=72)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_altered_file_gives_figures_or_one_error(
    samples: Samples, jobs: Jobs, t0: datetime, data: st.DataObject
) -> None:
    """Bytes of the samples are altered or missing."""
    with tempfile.TemporaryDirectory() as directory:
        store = SampleStore(Path(directory))
        store.ingest(sample_frame(samples([30.0 * i for i in range(50)], util_pct=lambda t: t % 7)), source="rows")
        path = store.parts()[0].path
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
        try:
            measured = analysed(store, jobs({"start": 0, "end": 3600}), t0).total["gpu_hours_measured"]
            message = f"{path}: measured {measured} of 1 hour"
        except UnreachableError as error:
            measured, message = 0, str(error)
    assert 0 <= measured <= 1
    assert re.fullmatch(rf"{re.escape(str(path))}[^\n]+", message)


def test_progress_is_reported_in_samples(history: History, samples: Samples, jobs: Jobs, t0: datetime) -> None:
    """The last report covers all samples."""
    progress: list[tuple[int, int]] = []
    query = WasteQuery(t0, t0 + timedelta(hours=1))
    store = history(samples([30.0 * i for i in range(50)], util_pct=0.0))
    waste.analyse(
        query, jobs({"start": 0, "end": 3600}), empty(ALLOCATION_GPUS), store, now=query.until,
        advance=lambda done, whole: progress.append((done, whole)),
    )  # fmt: skip
    assert progress[-1] == (50, 50)


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


def test_part_with_missing_samples_is_rejected(history: History, samples: Samples, jobs: Jobs, t0: datetime) -> None:
    """The part need not be the first."""
    store = history(samples([3600.0 * i for i in range(48)], util_pct=5.0))
    path = store.parts()[1].path
    pl.read_parquet(path).head(3).write_parquet(path)
    with pytest.raises(UnreachableError, match="3 samples instead of 24"):
        analysed(store, jobs({"start": 0, "end": 7200}), t0, hours=48)


def samples_index(store: SampleStore, t0: datetime, days: int = 1) -> samples.Index:
    """Return the sample index of ``days`` days."""
    index = samples.read_index(store, t0, t0 + timedelta(days=days), max_gap_steps=3)
    assert index.rows == int(np.sum(index.pieces.end - index.pieces.row))
    return index
