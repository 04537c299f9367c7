"""The join compared with a plain Python implementation that processes each sample on its own."""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import measures, samples
from slurm_affinode.analysis.block import BUSY, COLUMNS, IDLE, LOW, POWER, UNKNOWN, Block, BlockColumn, Pieces
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import BOUNDS_S, SUMS, Thresholds
from slurm_affinode.analysis.segments import FAR, Allocations, build
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.parquet import parts
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES

EPOCH = datetime(2026, 11, 2, tzinfo=UTC)
EPOCH_MS = int(EPOCH.timestamp() * 1000)
STEP = 30_000
DAY_MS = 86_400_000
SPAN = 12 * STEP
THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Sample:
    time: int
    util: float | None = None
    engine: float | None = None
    dram: float | None = None
    fb: float | None = None
    power: float | None = None


@dataclass(frozen=True)
class Held:
    device: int
    run: int
    start: int
    end: int


@dataclass
class Expected:
    """The expected result of one allocation."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peak: float | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)


def activity(sample: Sample) -> int:
    """Return the activity class: the largest available signal compared with the thresholds."""
    signals = []
    if sample.util is not None:
        signals.append(np.float32(sample.util))
    if sample.engine is not None:
        signals.append(np.float32(sample.engine) * np.float32(100))
    if sample.dram is not None:
        noise = np.float32(sample.dram) <= np.float32(0.0005)
        signals.append(np.float32(0) if noise else np.float32(sample.dram) * np.float32(100))
    if not signals:
        return UNKNOWN
    return IDLE if max(signals) <= 0 else LOW if max(signals) <= 5 else BUSY


def reference(
    histories: list[list[Sample]], steps: dict[tuple[int, int], int], held: list[Held], since: int, until: int
) -> tuple[list[Expected], int]:
    """Return the expected sums per allocation, and the time during which sampled devices were not allocated."""
    expected = [Expected() for _ in held]
    free = 0
    for device, history in enumerate(histories):
        on_device = [(number, h) for number, h in enumerate(held) if h.device == device]
        bounds = sorted({since, until, *(h.start for _, h in on_device), *(h.end for _, h in on_device)})
        for position, sample in enumerate(history):
            following = history[position + 1].time if position + 1 < len(history) else None
            if (device, sample.time // DAY_MS) not in steps:
                continue  # of a day outside the interval
            weight = step = steps[device, sample.time // DAY_MS]
            if following is not None and following - sample.time <= 3 * step:
                weight = following - sample.time
            reach = sample.time + weight
            for low, high in itertools.pairwise(bounds):
                duration = min(high, reach) - max(low, sample.time)
                if duration <= 0 or sample.time < since:
                    continue
                holders = [(n, h) for n, h in on_device if h.start <= low and high <= h.end]
                if not holders:
                    free += duration
                for number, h in holders:
                    if h.start <= sample.time:
                        add(expected[number], sample, duration / len(holders))
            for number, h in on_device:
                if h.start <= sample.time < h.end:
                    if sample.fb is not None:
                        expected[number].peak = max(expected[number].peak or 0.0, sample.fb)
                    if activity(sample) == IDLE and weight > 0:
                        extend(expected[number].spans, sample.time, min(reach, h.end))
    return expected, free


def add(to: Expected, sample: Sample, duration: float) -> None:
    code = activity(sample)
    to.sums[SUMS[code]] += duration
    for name, value in (("util", sample.util), ("fb", sample.fb), ("power", sample.power)):
        if value is None:
            continue
        to.sums[name] += value * duration
        to.sums[f"{name}_known"] += duration
        if code == IDLE and name != "util":
            to.sums[f"{name}_idle"] += value * duration


def extend(spans: list[tuple[int, int]], start: int, end: int) -> None:
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((start, end))


def store_of(root: Path, histories: list[list[Sample]]) -> SampleStore:
    rows: list[dict[str, Any]] = [
        {
            "cluster": "c", "node": "n", "uuid": f"GPU-{device}", "index": device,
            "time": EPOCH + timedelta(milliseconds=s.time), "util_pct": s.util, "engine_active": s.engine,
            "dram_active": s.dram, "fb_used_mib": s.fb, "power_w": s.power, "fb_total_mib": 81920.0,
        }
        for device, history in enumerate(histories)
        for s in history
    ]  # fmt: skip
    store = SampleStore(root)
    columns = {n: pl.Series([r.get(n) for r in rows], dtype=t, strict=False) for n, t in SAMPLES.items()}
    store.ingest(pl.DataFrame(columns), source="rows")
    return store


def split(blocks: Iterator[Block], size: int) -> Iterator[Block]:
    """Split the blocks into blocks of at most ``size`` rows."""
    for block in blocks:
        for low in range(0, len(block.time), size):
            high = min(low + size, len(block.time))
            columns = {
                name: type(c)(c.values[low:high], not np.isnan(c.values[low:high]).any())
                for name, c in block.columns.items()
            }
            following = int(block.time[high]) if high < len(block.time) else block.next_time
            yield Block(block.row + low, block.time[low:high], columns, following)


signal = st.one_of(st.none(), st.just(0.0), st.sampled_from([0.0, 1.0, 5.0, 60.0, 100.0]))
noise = st.sampled_from([None, 0.0, 0.000131, 0.0005, 0.000501])
fraction = st.one_of(st.none(), st.sampled_from([0.0, 0.05, 0.0501, 0.9]))
value = st.one_of(st.none(), st.integers(0, 80_000).map(lambda whole: whole / 7), st.sampled_from([1e-4, 3e-2]))


@st.composite
def history(draw: st.DrawFn) -> list[Sample]:
    """Draw samples of one GPU, mostly one interval apart, with jitter, gaps and missing values, also at midnight."""
    time = draw(st.integers(-2 * STEP, 4 * STEP)) + draw(st.sampled_from([0, 86_400_000 - 6 * STEP]))
    result = []
    idle = draw(st.booleans())
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.integers(0, 4)) == 0:
            idle = not idle
        util = 0.0 if idle else draw(signal)
        result.append(Sample(time, util, 0.0 if idle else draw(fraction), draw(noise), draw(value), draw(value)))
        time += draw(st.sampled_from([STEP, STEP, STEP + 7, STEP - 13, 2 * STEP, 3 * STEP, 3 * STEP + 1, 9 * STEP]))
    return result


@st.composite
def allocations(draw: st.DrawFn, devices: int, since: int, until: int) -> list[Held]:
    """Draw runs on devices; runs may overlap on a device."""
    result = []
    for run in range(draw(st.integers(0, 6))):
        start = draw(st.integers(since, until - 1))
        end = draw(st.integers(start + 1, until))
        used = draw(st.lists(st.integers(0, devices - 1), min_size=1, max_size=devices, unique=True))
        result += [Held(device, run, start, end) for device in used]
    return sorted(result, key=lambda h: (h.device, h.start, h.run))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_join_agrees_with_reference_implementation(data: st.DataObject) -> None:
    """Sums, peaks, idle windows and free time agree wherever blocks, days and cells are cut.

    They are the same to the last bit however the rows are divided into blocks, and into ranges.
    """
    histories = data.draw(st.lists(history(), min_size=1, max_size=3))
    first = min(s[0].time for s in histories)
    last = max(s[-1].time for s in histories)
    since = data.draw(st.integers(first - STEP, first + SPAN))
    until = data.draw(st.integers(since + 1, max(last + 2 * STEP, since + 1)))
    held = data.draw(allocations(len(histories), since, until))
    cuts = data.draw(st.lists(st.integers(since, until), max_size=8))
    size = data.draw(st.integers(1, 12))
    with tempfile.TemporaryDirectory() as directory:
        with mock.patch.object(parts, "ROW_GROUP", size):
            store = store_of(Path(directory), histories)
        index = samples.read_index(
            store, EPOCH + timedelta(milliseconds=since), EPOCH + timedelta(milliseconds=until), max_gap_steps=3
        )
        order = [int(uuid.removeprefix("GPU-")) for uuid in index.devices["uuid"]]
        missing = [d for d in range(len(histories)) if d not in order]
        row_of = {device: row for row, device in enumerate(order)}
        kept = [h for h in held if h.device not in missing]
        kept.sort(key=lambda h: (row_of[h.device], h.start, h.run))
        allocated = Allocations.of(
            [row_of[h.device] for h in kept], [h.run for h in kept],
            [EPOCH_MS + h.start for h in kept], [EPOCH_MS + h.end for h in kept],
        )  # fmt: skip
        cells = build(
            allocated,
            taking_part=np.ones(len(order), np.bool_),
            since=EPOCH_MS + since,
            until=EPOCH_MS + until,
            cut_device=np.repeat(np.arange(len(order)), len(cuts)),
            cut_time=np.tile(np.array(cuts, np.int64) + EPOCH_MS, len(order)),
        )
        blocks = split(samples.blocks(index), size)
        chunk = data.draw(st.sampled_from([1, 8, 17, 24]))
        summed = kernel.run(blocks, index.pieces, allocated, cells, THRESHOLDS, chunk=chunk)
        whole = kernel.run(samples.blocks(index), index.pieces, allocated, cells, THRESHOLDS)
        fold_input = kernel.FoldInput(samples.StoredSamples(Path(directory), ()), index.pieces, cells, THRESHOLDS)
        folded = [kernel.fold_range(rows, fold_input) for rows in kernel.ranges_of(index, most_rows=size)]
        store.close()
    added = kernel.total(folded, allocated, cells)
    for name in (item.name for item in fields(summed)):
        for other in (summed, added):
            np.testing.assert_array_equal(getattr(other, name), getattr(whole, name), err_msg=name)
    # The sampling interval of each day has tests of its own.
    pieces = index.pieces
    days = ((pieces.first_time - EPOCH_MS) // DAY_MS).tolist()
    steps = {(order[row], day): step for row, day, step in zip(pieces.device, days, pieces.step.tolist(), strict=True)}
    expected, free = reference(histories, steps, kept, since, until)
    got = measures.per_allocation(summed, cells, allocated)
    for number, expectation in enumerate(expected):
        row = got.row(number, named=True)
        for name in SUMS:
            # A product of a value and a time is rounded to a MiB x ms, or to less.
            rounded = 0.5 * len(histories) * 25 if name.startswith(("util", "fb", "power")) else 1e-3
            assert np.isclose(row[name], expectation.sums[name], rtol=1e-5, atol=rounded), (number, name)
        assert row["fb_peak"] == (None if expectation.peak is None else np.float32(expectation.peak))
        assert row["windows"] == len(expectation.spans)
        assert row["longest_ms"] == max((b - a for a, b in expectation.spans), default=0)
        measured = row["busy"] + row["low"] + row["idle"] + row["unknown"]
        assert measured <= row["held_ms"] + 1e-3
    lengths = np.array([b - a for e in expected for a, b in e.spans], np.int64)
    bins = np.searchsorted(np.array(BOUNDS_S) * 1000, lengths, side="right")
    assert summed.window_counts.tolist() == np.bincount(bins, minlength=7).tolist()
    assert np.isclose(summed.window_share_ms.sum(), sum(e.sums["idle"] for e in expected), atol=1e-3)
    unheld = summed.sums[cells.inside & (cells.sharers == 0), :4].sum()
    assert np.isclose(unheld, free, atol=1e-3)


def test_short_part_of_a_sample_in_a_cell_keeps_precision() -> None:
    """561 W for the first of 30,007 ms: the product for all of them does not fit the 24 bits of a 32-bit float."""
    item, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    times = np.array([65_005, 95_012], np.int64)
    held = Allocations.of(none, none, [35_182], [65_006])
    cells = build(held, taking_part=np.ones(1, np.bool_), since=35_182, until=130_000)
    pieces = Pieces(none, none, item * 2, item * STEP, np.ones(1) * 3 * STEP, item * FAR, times[:1], times[1:] + STEP)
    columns = {POWER: BlockColumn(np.array([561.0, 5.0], np.float32), complete=True)}
    summed = kernel.run([Block(0, times, columns, int(FAR))], pieces, held, cells, THRESHOLDS)
    assert measures.per_allocation(summed, cells, held)["power"].to_list() == [561.0]


@pytest.mark.parametrize("first", [0, 3, 13])
def test_bitmap_of_missing_values_is_read_from_any_bit(first: int) -> None:
    """The columns of a part of a frame share the bitmap of the whole; a chunk has no, some or only missing values."""
    count, chunk = 90, 16
    rng = np.random.default_rng(first)
    time = pl.Series("time", np.arange(count) * STEP, dtype=pl.Datetime("ms", "UTC"))
    lost = np.array([at < 40 or (at >= 64 and rng.random() < 0.3) for at in range(count)])
    columns = {name: rng.choice([0.0, 0.03, 1, 70], count).astype(np.float32) for name in COLUMNS[1:]}
    present = pl.Series(~lost)
    values = [pl.Series(name, numbers).set(~present, None) for name, numbers in columns.items()]
    frame = pl.DataFrame([time, *values])[first:]
    rows = len(frame)
    zero, item = np.zeros(1, np.int64), np.ones(1, np.int64)
    held = Allocations.of(zero, zero, [first * STEP], [count * STEP])
    cells = build(held, taking_part=np.ones(1, np.bool_), since=0, until=count * STEP)
    pieces = Pieces(
        zero, zero, item * rows, item * STEP, np.ones(1) * 3 * STEP, item * FAR, item * first * STEP, item * FAR
    )
    block = samples.block(0, frame, next_time=int(FAR))
    assert all(column.valid is not None for column in block.columns.values())
    for name, column in block.columns.items():
        expected = np.where(lost, np.float32("nan"), columns[name])[first:]
        np.testing.assert_array_equal(column.values, expected)
    filled = {name: BlockColumn(column.values, complete=False) for name, column in block.columns.items()}
    totals = [
        kernel.run([each], pieces, held, cells, THRESHOLDS, chunk=chunk)
        for each in (block, Block(0, block.time, filled, int(FAR)))
    ]
    assert totals[0].sums.any()
    np.testing.assert_array_equal(totals[0].sums, totals[1].sums)
    np.testing.assert_array_equal(totals[0].fb_peak, totals[1].fb_peak)
    assert totals[0].windows.tolist() == totals[1].windows.tolist()


def test_unordered_times_are_reported_as_damage() -> None:
    """The loops rely on the order of the times, also of the first time of the next block."""
    item, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    held = Allocations.of(none, none, none, item)
    cells = build(held, taking_part=np.ones(1, np.bool_), since=0, until=1)
    for times, rows, following in (
        ([1, 3, 2], 3, FAR), ([1, 1, 2], 3, FAR), ([1, 2, 1 << 61], 3, FAR), ([1, 2], 2, FAR), ([1, 2], 3, 2)
    ):  # fmt: skip
        pieces = Pieces(none, none, item * rows, item, np.ones(1), item * FAR, none, item * FAR * 2)
        blocks = [Block(0, np.array(times, np.int64), {}, int(following))]
        if len(times) == rows == 2:
            kernel.run(blocks, pieces, held, cells, Thresholds())
            continue
        with pytest.raises(UnreachableError, match="not in order"):
            kernel.run(blocks, pieces, held, cells, Thresholds())
