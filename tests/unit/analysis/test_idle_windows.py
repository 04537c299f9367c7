"""The trailing idle window: equal to the last idle window of the join, whatever samples are missing before it."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import idle_windows, samples
from slurm_affinode.analysis.idle_windows import NEVER, Pairs, follow
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import SUMS, Thresholds
from slurm_affinode.analysis.samples import Index
from slurm_affinode.analysis.segments import Allocations, build
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES

EVENING = datetime(2026, 11, 1, 23, 50, tzinfo=UTC)
"""Ten minutes before the end of a UTC day, so that windows cross midnight."""
BEGIN_MS = int(EVENING.timestamp() * 1000)
STEP_MS = 60_000
LIMIT_PCT = 5.0

apart = st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.9, 1.1, 2.0, 3.0, 3.02, 8.0])
"""Distance from the previous sample in sampling intervals; more than three are a gap."""
util = st.sampled_from([None, 0.0, 0.0, 0.0, 3.0, 80.0])
dram = st.sampled_from([None, 0.0, 0.0004, 0.7])
memory = st.sampled_from([None, 100.0, 4000.0])


def store_of(root: Path, rows: list[tuple[int, float | None, float | None, float | None]]) -> SampleStore:
    """Return a sample store of two GPUs with the same samples."""
    made = [
        {"cluster": "c", "node": "n", "uuid": uuid, "time": EVENING + timedelta(milliseconds=ms), "util_pct": value,
         "dram_active": share, "fb_used_mib": held,
         "fb_total_mib": 81920.0}
        for uuid in ("GPU-a", "GPU-b") for ms, value, share, held in rows
    ]  # fmt: skip
    store = SampleStore(root)
    columns = {name: pl.Series([row.get(name) for row in made], dtype=kind) for name, kind in SAMPLES.items()}
    store.ingest(pl.DataFrame(columns), source="test")
    return store


def joined(index: Index, low: int, high: int, rules: Thresholds) -> tuple[tuple[int, int] | None, dict[str, float]]:
    """Return the last idle window that the join finds on the first GPU, and its sums."""
    allocations = Allocations.of([0], [0], [low], [high])
    taking_part = np.arange(len(index.devices)) == 0
    cells = build(allocations, taking_part=taking_part, since=BEGIN_MS, until=BEGIN_MS + 10_000_000)
    with mock.patch.object(kernel, "_totals", wraps=kernel._totals) as summing:
        totals = kernel.run_all(index, allocations, cells, rules)
    sums = totals.sums.copy()
    np.add.at(sums, totals.partly_cell, totals.partly_sums)
    windows = summing.call_args.args[1]
    last = int(windows.begin[0]), int(windows.end[0])
    held = dict(zip(SUMS, sums[cells.is_held].sum(axis=0).tolist(), strict=True))
    return (last if last[0] < last[1] else None), held


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(apart, util, dram, memory), min_size=1, max_size=40),
    st.integers(-1, 20),
    st.integers(1, 45),
    st.integers(0, STEP_MS - 1),
)
def test_trailing_window_equals_last_idle_window_of_join(
    drawn: list[tuple[float, float | None, float | None, float | None]], start: int, length: int, odd_ms: int
) -> None:
    """Covers zeros, activity, missing values, noise, gaps, windows across midnight and runs within the samples."""
    rules = Thresholds(idle_pct=LIMIT_PCT, low_pct=LIMIT_PCT)
    times = np.cumsum([0, *(round(item[0] * STEP_MS) for item in drawn[1:])]).tolist()
    rows = [(ms, *item[1:]) for ms, item in zip(times, drawn, strict=True)]
    low = max(BEGIN_MS, BEGIN_MS + start * STEP_MS + odd_ms)
    high = low + length * STEP_MS
    until = EVENING + timedelta(milliseconds=high - BEGIN_MS)
    with tempfile.TemporaryDirectory() as root, closing(store_of(Path(root), rows)) as store:
        index = samples.read_index(store, EVENING, until, max_gap_steps=rules.max_gap_steps)
        device = index.devices["device"].to_numpy()
        ends = np.full(len(device), high)
        pairs = Pairs(device, np.full(len(device), low), ends, index.devices["step_ms"].to_numpy())
        seen = follow(store, pairs, EVENING, until, LIMIT_PCT, rules)
        result, sums = joined(index, low, high, rules)
        since = int(seen.since[0])
        window = joined(index, since, high, rules)[1] if since != NEVER else None
    within = [ms for ms in (BEGIN_MS + time for time in times) if low <= ms < high]
    expected = None
    if result is not None and within and result[0] <= within[-1] < result[1]:
        expected = result
    got = None if since == NEVER or seen.until[0] == since else (since, int(seen.until[0]))
    assert got == expected
    assert seen.measured_ms[0] == sums["busy"] + sums["low"] + sums["idle"]
    if window is not None:
        assert window["idle"] == seen.until[0] - since
        assert np.isclose(seen.fb_ms[0], window["fb_idle"])
        assert seen.fb_known_ms[0] == window["fb_known"]
    for values in (seen.since, seen.until, seen.last_active, seen.samples):
        assert (values == values[0]).all()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(apart, util, dram, memory), min_size=5, max_size=40),
    st.lists(st.tuples(st.integers(0, 1), st.integers(-2, 20), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_pairs_do_not_affect_each_other(
    drawn: list[tuple[float, float | None, float | None, float | None]],
    runs: list[tuple[int, int, int]],
    rows_together: int,
) -> None:
    """Pairs in any order, also of the same GPU at the same time, folded together or in parts, are as each one alone."""
    rules = Thresholds()
    times = np.cumsum([0, *(round(item[0] * STEP_MS) for item in drawn[1:])]).tolist()
    rows = [(ms, *item[1:]) for ms, item in zip(times, drawn, strict=True)]
    until = EVENING + timedelta(minutes=60)
    with tempfile.TemporaryDirectory() as root, closing(store_of(Path(root), rows)) as store:
        known = store.devices(EVENING, until)["device"].to_numpy()
        low = np.array([BEGIN_MS + start * STEP_MS for _, start, _ in runs], np.int64)
        pairs = Pairs(
            known[[number for number, _, _ in runs]],
            low,
            low + np.array([length * STEP_MS for _, _, length in runs]),
            np.full(len(runs), STEP_MS),
        )
        with mock.patch.object(idle_windows, "FOLD_ROWS", rows_together):
            together = follow(store, pairs, EVENING, until, LIMIT_PCT, rules)
        for place in range(len(runs)):
            only = slice(place, place + 1)
            entry = Pairs(pairs.device[only], pairs.start[only], pairs.end[only], pairs.step[only])
            alone = follow(store, entry, EVENING, until, LIMIT_PCT, rules)
            for name in (field.name for field in dataclasses.fields(alone)):
                np.testing.assert_array_equal(getattr(together, name)[only], getattr(alone, name), err_msg=name)
