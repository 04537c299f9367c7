"""Each GPU of each run over its whole time: time in each state, idle windows, and the activity of equal slots.

Samples count as in the join and in ``idle_windows`` (``docs/metrics.md``). Times are epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.analysis import idle_windows
from slurm_affinode.analysis.idle_windows import CountedRows, Pairs
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import ACTIVITY

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SLOTS = 60
"""Slots of a run, fewer if it is so short that some would be without a sample."""
SHORTEST_MS = 60_000
"""Shorter idle windows are not kept; they still count as idle time."""


@dataclass(slots=True)
class GpuTrack:
    """One GPU of one run. Sums are value x milliseconds."""

    start: int
    end: int
    slots: int
    busy_ms: int = 0
    low_ms: int = 0
    idle_ms: int = 0
    util_ms: float = 0.0
    util_known_ms: int = 0
    fb_peak_mib: float | None = None
    fb_total_mib: float | None = None
    longest_ms: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Idle windows of at least ``SHORTEST_MS``, in order."""
    activity_ms: Floats = field(default_factory=lambda: np.empty(0))
    """Per slot: the busiest signal, percent x ms."""
    known_ms: Floats = field(default_factory=lambda: np.empty(0))
    """Per slot: time with an activity signal."""
    _open: tuple[int, int] | None = None
    """The idle window at the end of the samples so far."""

    def __post_init__(self) -> None:
        self.activity_ms, self.known_ms = np.zeros(self.slots), np.zeros(self.slots)

    @property
    def measured_ms(self) -> int:
        """Time with an activity signal."""
        return self.busy_ms + self.low_ms + self.idle_ms

    @property
    def activity_pct(self) -> tuple[float | None, ...]:
        """Mean activity of each slot; ``None``: not measured."""
        return tuple(
            None if total <= 0 else round(float(value / total), 1)
            for value, total in zip(self.activity_ms, self.known_ms, strict=True)
        )

    def add(self, rows: TrackRows, thresholds: Thresholds) -> None:
        """Add samples that follow those added before."""
        length = rows.until - rows.time
        measured = ~np.isnan(rows.busiest)
        idle = rows.busiest <= thresholds.idle_pct  # NaN is not idle
        low = ~idle & (rows.busiest <= thresholds.low_pct)
        idle_ms, low_ms = int(length[idle].sum()), int(length[low].sum())
        self.idle_ms += idle_ms
        self.low_ms += low_ms
        self.busy_ms += int(length[measured].sum()) - idle_ms - low_ms
        has_util = ~np.isnan(rows.util)
        self.util_ms += float((rows.util[has_util] * length[has_util]).sum())
        self.util_known_ms += int(length[has_util].sum())
        self.fb_peak_mib = _largest(self.fb_peak_mib, rows.fb)
        self.fb_total_mib = _largest(self.fb_total_mib, rows.fb_total)
        edges = self.start + (self.end - self.start) * np.arange(self.slots + 1) / self.slots
        self.activity_ms += _by_slot(edges, rows, np.where(measured, rows.busiest, 0.0))
        self.known_ms += _by_slot(edges, rows, measured.astype(np.float64))
        self._windows(rows, idle)

    def close(self) -> None:
        """End the idle window that is open. Call it once, after the last samples."""
        if self._open is not None:
            self._keep(self._open)
            self._open = None

    def _windows(self, rows: TrackRows, idle: npt.NDArray[np.bool_]) -> None:
        _, begins, ends = idle_windows.idle_spans(np.zeros_like(rows.time), rows.time, rows.until, idle)
        windows = list(zip(begins.tolist(), ends.tolist(), strict=True))
        if self._open is not None:
            if windows and windows[0][0] == self._open[1]:
                windows[0] = (self._open[0], windows[0][1])
            else:
                windows.insert(0, self._open)
        self._open = windows.pop() if windows and idle[-1] else None
        for window in windows:
            self._keep(window)

    def _keep(self, window: tuple[int, int]) -> None:
        length = window[1] - window[0]
        self.longest_ms = max(self.longest_ms, length)
        if length >= SHORTEST_MS:
            self.windows.append(window)


@dataclass(frozen=True, slots=True)
class TrackRows:
    """Samples of one GPU within one run, in order; NaN is unknown."""

    time: Ints
    until: Ints
    """End of the time for which each sample counts."""
    busiest: Floats
    """The largest activity signal, percent."""
    util: Floats
    fb: Floats
    """GPU memory in use, MiB."""
    fb_total: Floats


def _largest(maximum: float | None, values: Floats) -> float | None:
    some = values[~np.isnan(values)]
    if not len(some):
        return maximum
    return max(float(some.max()), maximum or 0.0)


def _by_slot(edges: Floats, rows: TrackRows, values: Floats) -> Floats:
    """Return the integral of ``values`` over each slot; a sample may reach over several of them."""
    sums = np.cumsum(values * (rows.until - rows.time))
    edges_ms = np.column_stack([rows.time, rows.until]).ravel().astype(np.float64)
    total = np.column_stack([np.append(0.0, sums[:-1]), sums]).ravel()
    return np.diff(np.interp(edges, edges_ms, total))


def slot_count(start_ms: int, end_ms: int, step_ms: int) -> int:
    """Return the number of slots of a run whose GPUs are sampled about every ``step_ms``."""
    return max(1, min(SLOTS, (end_ms - start_ms) // max(1000, round(1.5 * step_ms))))


def follow(gpus: HeldGpus, store: SampleStore) -> list[GpuTrack]:
    """Return the track of each pair of ``held.pairs``, in one pass over the samples."""
    devices = gpus.devices["device"].to_numpy()[gpus.pairs["at"].to_numpy()]
    start, end = gpus.pairs["start_ms"].to_numpy(), gpus.pairs["end_ms"].to_numpy()
    pairs = Pairs(devices, start, end, gpus.steps_ms)
    # The GPUs of a run are shown one above the other, so they have the same slots.
    steps = dict(
        gpus.pairs.with_columns(pl.Series("step", gpus.steps_ms)).group_by("run").agg(pl.col("step").max()).iter_rows()
    )
    runs = gpus.pairs["run"].to_list()
    tracks = [
        GpuTrack(int(begin), int(finish), slot_count(int(begin), int(finish), int(steps[run])))
        for run, begin, finish in zip(runs, start, end, strict=True)
    ]
    query = gpus.query
    thresholds = query.thresholds
    for rows, which, low, high in idle_windows.counted_rows(store, pairs, query.since, query.until, thresholds):
        columns = _columns(rows)
        for pair, first, last in zip(which.tolist(), low.tolist(), high.tolist(), strict=True):
            until = np.minimum(rows.reach[first:last], end[pair])
            tracks[pair].add(
                TrackRows(rows.ms[first:last], until, *(column[first:last] for column in columns)), thresholds
            )
    for track in tracks:
        track.close()
    return tracks


def _columns(rows: CountedRows) -> tuple[Floats, Floats, Floats, Floats]:
    busiest = np.full(len(rows.ms), np.nan)
    for values in rows.signals.values():
        busiest = np.fmax(busiest, values)
    util = rows.signals.get(ACTIVITY.index("util_pct"))
    unknown = np.full(len(rows.ms), np.nan)
    return busiest, unknown if util is None else util.astype(np.float64), rows.fb, rows.fb_total


def together(windows: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the times that are in a window of each of the lists, which are in order."""
    if not windows:
        return []
    common = list(windows[0])
    for window in windows[1:]:
        overlaps, i, j = [], 0, 0
        while i < len(common) and j < len(window):
            low, high = max(common[i][0], window[j][0]), min(common[i][1], window[j][1])
            if low < high:
                overlaps.append((low, high))
            if common[i][1] < window[j][1]:
                i += 1
            else:
                j += 1
        common = overlaps
    return common
