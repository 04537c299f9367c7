"""The idle time that reaches to the end: the same as a plain loop over the samples finds."""

from __future__ import annotations

import math
import tempfile
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis.trailing import NEVER, Pairs, follow
from slurm_affinode.history.schema import SAMPLES
from slurm_affinode.history.store import SampleStore

NOON = datetime(2026, 11, 1, 23, 50, tzinfo=UTC)
"""Ten minutes before a day ends: windows go over it."""
STEP_MS = 60_000

sample = st.tuples(st.integers(0, 40), st.sampled_from([None, 0.0, 3.0, 80.0]))


def _plain(samples: list[tuple[int, float]], start: int, end: int) -> tuple[int, int, float, int]:
    """Since, last active, peak since then, number of samples."""
    since, active, peak, last, count = NEVER, NEVER, math.nan, NEVER, 0
    for time, value in samples:
        if not start <= time < end:
            continue
        count += 1
        if last != NEVER and time - last > 3 * STEP_MS:
            since, peak = NEVER, math.nan
        if value > 5:
            since, active, peak = NEVER, time, math.nan
        else:
            since = time if since == NEVER else since
            peak = value if math.isnan(peak) else max(peak, value)
        last = time
    return since, active, peak, count


@settings(max_examples=40, deadline=None)
@given(st.lists(sample, min_size=1, max_size=40, unique_by=lambda one: one[0]), st.integers(0, 20), st.integers(1, 41))
def test_as_a_plain_loop(samples: list[tuple[int, float | None]], start: int, length: int) -> None:
    """Gaps, unknown samples, a day's end within the window, a run that is shorter than the history."""
    begin_ms = int(NOON.timestamp() * 1000)
    rows = [
        {"cluster": "c", "node": "n", "uuid": uuid, "time": NOON + timedelta(minutes=minute), "util_pct": value,
         "fb_used_mib": 100.0}
        for uuid in ("GPU-a", "GPU-b") for minute, value in samples
    ]  # fmt: skip
    frame = pl.DataFrame(rows, schema_overrides={"util_pct": pl.Float64}, infer_schema_length=None)
    known = [(pl.col(n) if n in frame.columns else pl.lit(None)).cast(t).alias(n) for n, t in SAMPLES.items()]
    low, high = begin_ms + start * STEP_MS, begin_ms + (start + length) * STEP_MS
    with tempfile.TemporaryDirectory() as root, closing(SampleStore(Path(root))) as store:
        store.ingest(frame.select(known), source="test")
        devices = store.devices()["device"].to_numpy()
        pairs = Pairs(devices, np.array([low, low]), np.array([high, high]), np.array([STEP_MS, STEP_MS]))
        seen = follow(store, pairs, NOON, NOON + timedelta(hours=1), limit_pct=5.0)
    spoken = sorted((begin_ms + minute * STEP_MS, value) for minute, value in samples if value is not None)
    since, active, peak, count = _plain(spoken, low, high)
    for i in range(len(devices)):
        assert (int(seen.since[i]), int(seen.last_active[i]), int(seen.samples[i])) == (since, active, count)
        got = float(seen.peaks[i, 0])
        assert got == peak or (math.isnan(got) and math.isnan(peak))
