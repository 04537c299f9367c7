"""Idle periods of jobs: the last one is the trailing window, and all GPUs of a job have to be idle."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import gpu_tracks, idle_periods, squatters
from slurm_affinode.analysis.idle_windows import NEVER
from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, conform, empty

EVENING = datetime(2026, 11, 1, 23, 50, tzinfo=UTC)
"""Ten minutes before the end of a UTC day, so that periods cross midnight."""
MINUTE_MS = 60_000
BEGIN_MS = int(EVENING.timestamp() * 1000)


def store_of(root: Path, gpus: dict[str, list[tuple[int, float | None]]]) -> SampleStore:
    """Return a store with samples (minute, utilization) of GPUs of one node."""
    rows = [
        {"cluster": "c", "node": "n", "uuid": uuid, "time": EVENING + timedelta(minutes=minute), "util_pct": value}
        for uuid, values in gpus.items() for minute, value in values
    ]  # fmt: skip
    store = SampleStore(root)
    columns = {name: pl.Series([row.get(name) for row in rows], dtype=kind) for name, kind in SAMPLES.items()}
    store.ingest(pl.DataFrame(columns), source="test")
    return store


def held_periods(store: SampleStore, *, gpus: int, minutes: int) -> tuple[list[tuple[int, int]], squatters.HeldGpus]:
    """Return the idle periods, in minutes, of a job on the whole node."""
    row = {"cluster": "c", "job_id": 1, "submit": EVENING, "start": EVENING, "gpus": gpus, "node_list": "n",
           "nodes": 1, "end": EVENING + timedelta(minutes=minutes), "state": "COMPLETED"}  # fmt: skip
    jobs = conform(pl.DataFrame([row], schema_overrides={name: JOBS[name] for name in row}), JOBS)
    query = WasteQuery(EVENING, EVENING + timedelta(minutes=minutes))
    held = squatters.hold(query, jobs, empty(ALLOCATION_GPUS), store, [5.0], query.until)
    rows = idle_periods.find(store, held, 5.0).select("begin_ms", "end_ms").rows()
    return [((first - BEGIN_MS) // MINUTE_MS, (last - BEGIN_MS) // MINUTE_MS) for first, last in rows], held


def test_period_needs_all_gpus_and_crosses_midnight(tmp_path: Path) -> None:
    minutes = range(40)
    with closing(store_of(tmp_path, {
        "GPU-a": [(minute, 0.0 if 5 <= minute < 30 else 90.0) for minute in minutes],
        "GPU-b": [(minute, 0.0 if minute < 20 or minute >= 25 else 90.0) for minute in minutes],
    })) as store:  # fmt: skip
        periods, _ = held_periods(store, gpus=2, minutes=40)
    assert periods == [(5, 20), (25, 30)]


def test_gap_and_missing_signal_end_a_period(tmp_path: Path) -> None:
    values = [(minute, None if minute == 10 else 0.0) for minute in range(40) if not 20 <= minute < 27]
    with closing(store_of(tmp_path, {"GPU-a": values})) as store:
        periods, _ = held_periods(store, gpus=1, minutes=40)
    assert periods == [(0, 10), (11, 20), (27, 40)]


def test_job_with_an_unmeasured_gpu_has_no_period(tmp_path: Path) -> None:
    with closing(store_of(tmp_path, {"GPU-a": [(minute, 0.0) for minute in range(40)]})) as store:
        periods, _ = held_periods(store, gpus=2, minutes=40)
    assert periods == []


def test_late_sample_after_midnight_does_not_end_a_period(tmp_path: Path) -> None:
    """A sample counts until the next one, also on the next day."""
    values = [(minute, 0.0) for minute in range(40) if minute not in (10, 11)]
    with closing(store_of(tmp_path, {"GPU-a": values})) as store:
        periods, _ = held_periods(store, gpus=1, minutes=40)
    assert periods == [(0, 40)]


def test_periods_are_the_windows_of_the_job_page(tmp_path: Path) -> None:
    """Both views of a run show the same windows."""
    minutes = range(40)
    with closing(store_of(tmp_path, {
        "GPU-a": [(minute, 0.0 if minute % 13 > 2 else 90.0) for minute in minutes if not 20 <= minute < 27],
    })) as store:  # fmt: skip
        periods, held = held_periods(store, gpus=1, minutes=40)
        (track,) = gpu_tracks.follow(replace(held, query=replace(held.query, thresholds=Thresholds(5.0, 5.0))), store)
    windows = [((low - BEGIN_MS) // MINUTE_MS, (high - BEGIN_MS) // MINUTE_MS) for low, high in track.windows]
    assert periods == windows


@given(st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5]), st.sampled_from([None, 0.0, 0.0, 3.0, 80.0])),
                min_size=12, max_size=40))  # fmt: skip
@settings(max_examples=40)
def test_last_period_is_the_trailing_window(steps: list[tuple[int, float | None]]) -> None:
    at = np.cumsum([gap for gap, _ in steps]).tolist()
    values = [(minute, value) for minute, (_, value) in zip(at, steps, strict=True)]
    with tempfile.TemporaryDirectory() as place, closing(store_of(Path(place), {"GPU-a": values})) as store:
        periods, held = held_periods(store, gpus=1, minutes=at[-1] + 1)
    trailing = held.followed[5.0]
    if held.pairs.height and trailing.since[0] != NEVER:
        last = ((int(trailing.since[0]) - BEGIN_MS) // MINUTE_MS, (int(trailing.until[0]) - BEGIN_MS) // MINUTE_MS)
        assert periods[-1] == last
    elif periods and held.pairs.height:
        assert periods[-1][1] <= at[-1]


def test_run_with_an_unknown_number_of_gpus_has_none(tmp_path: Path) -> None:
    """Others of its GPUs may be busy, and unmeasured."""
    with closing(store_of(tmp_path, {"GPU-a": [(minute, 0.0) for minute in range(40)]})) as store:
        periods, held = held_periods(store, gpus=1, minutes=40)
        unknown = replace(held, runs=held.runs.with_columns(pl.lit(None, pl.Int64).alias("gpus")))
        assert periods == [(0, 40)]
        assert idle_periods.find(store, unknown, 5.0).is_empty()
