"""Samples of one engine as arrays: validity, processes, and changes of its counters.

Counters are only compared within one process of the engine. A counter that falls although the process is the same is
not a restart: clocks disagree, or two processes answer behind one address. Its change is unknown then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from slurm_affinode.engines.metric_table import ORPHANED
from slurm_affinode.engines.schema import BUCKETS, COUNTERS, METRICS, SAMPLES
from slurm_affinode.model.serving import EngineKey

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

PROGRESS = ("generation_tokens", "prompt_tokens", "finished", "decode_s", "prefill_s")
"""Counters that grow when requests make progress."""
_RESTART = ("generation_tokens", "prompt_tokens", "finished", "ttft_count", "e2e_count", "cpu_s")
"""Counters that show a restart of an engine whose start time is unknown."""
_GAP_STEPS, _GAP_S = 20, 60.0
"""A longer gap (both limits) separates episodes. Loaded servers take seconds to respond: short gaps do not."""
_DISORDER = 0.1
"""Share of intervals with falling counters above which the samples are not those of one process."""


_WHOLE_MS = 1e-6
"""Milliseconds from a whole number up to which a duration counts as rounded, as in recordings."""
_STARTED, _NUMBERED = "started ", "process "
"""Begin the rank of a process that responds in turn with others: its start time, or its number if that is unknown."""
_MOST_PROCESSES = 8
"""Processes that respond in turn and are distinguished by their counters."""


def moment(seconds: float) -> datetime:
    """Return seconds since the epoch as an aware time."""
    return datetime.fromtimestamp(round(float(seconds), 3), UTC)


class EngineSeries:
    """Samples of one engine in order of time. Arrays have an entry for each successful scrape; NaN is unknown."""

    def __init__(self, key: EngineKey, samples: pl.DataFrame) -> None:
        """Take samples with the columns of ``SAMPLES``; missing columns are unknown. Raises ``ValueError`` if empty."""
        if samples.is_empty():
            raise ValueError("an engine without samples has no diagnoses")
        self.key = key
        self.samples = samples
        """As given."""
        stamps = samples["time"].to_physical().to_numpy()
        if not (stamps[1:] > stamps[:-1]).all():
            samples = samples.sort("time", maintain_order=True).unique("time", keep="last", maintain_order=True)
            stamps = samples["time"].to_physical().to_numpy()
        repeated = _repeated(samples)
        if repeated is not None:
            samples, stamps = samples.filter(pl.Series(~repeated)), stamps[~repeated]
        self.all_times: Floats = stamps.astype(np.float64) / 1000
        """Time of each scrape, failed ones included, in seconds since the epoch."""
        errors = samples["error"] if "error" in samples.columns else None
        none = errors is None or errors.null_count() == len(errors)
        self.errors: list[str | None] = [None] * len(stamps) if errors is None or none else errors.to_list()
        """Why each scrape failed, among all."""
        self.failed: Bools = np.array([error is not None for error in self.errors], np.bool_)
        steps = np.diff(self.all_times)
        self.step_s = float(np.median(steps)) if len(steps) else 0.0
        """Scrape interval: the median time between scrapes; 0 with a single sample."""
        self.reached: Integers = np.flatnonzero(~self.failed)
        """Positions of the successful scrapes among all."""
        self._rows = samples.filter(pl.Series(~self.failed)) if self.failed.any() else samples
        self._last = {name: _last(samples, name) for name in ("job", "user", "gpus")}
        self.histograms = [name for name in ("prompt_lengths", "generation_lengths") if name in samples.columns]
        self.orphaned = _orphaned(samples)
        """Time (seconds since the epoch), processes and GPU memory (MiB) where these are left without their server."""
        self._values: dict[str, Floats] = {}
        self._changes: dict[str, Floats] = {}
        self._known_changes: dict[str, Bools] = {}

    @property
    def job(self) -> str | None:
        """The last known job ID."""
        return self._last["job"]

    @property
    def user(self) -> str | None:
        """The last known user."""
        return self._last["user"]

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the engine's GPUs, as far as known."""
        return tuple(uuid for uuid in (self._last["gpus"] or "").split(",") if uuid)

    @cached_property
    def time(self) -> Floats:
        """Time of each successful scrape, in seconds since the epoch."""
        return self.all_times[self.reached]

    def __len__(self) -> int:
        return len(self.reached)

    def value(self, name: str) -> Floats:
        """Return a metric; NaN where it is unknown."""
        if name not in self._values:
            column = np.full(len(self), np.nan)
            if name in self._rows.columns and METRICS[name] in (pl.Float64(), pl.Boolean()):
                values = self._rows[name]
                if values.null_count() < len(values):
                    column = (values.cast(pl.Float64) if values.dtype != pl.Float64 else values).to_numpy()
            self._values[name] = np.where(np.isfinite(column), column, np.nan)
        return self._values[name]

    def is_exported(self, name: str) -> bool:
        """Return whether the metric was ever exported."""
        return bool(np.isfinite(self.value(name)).any())

    def buckets(self, name: str, position: int) -> list[dict[str, float]] | None:
        """Return a histogram at one sample."""
        if name not in self.histograms:
            return None
        row: list[dict[str, float]] | None = self._rows[name][position : position + 1].to_list()[0]
        return row

    @cached_property
    def interval(self) -> Floats:
        """Seconds since the previous successful scrape; NaN for the first one."""
        return np.concatenate([[np.nan], np.diff(self.time)]) if len(self) else np.empty(0)

    @cached_property
    def restarts(self) -> Bools:
        """Whether another process answered than at the previous scrape."""
        start = self.value("start_time")
        before = np.concatenate([[np.nan], start[:-1]]) if len(self) else start
        finite = np.isfinite(start) & np.isfinite(before)
        moved = finite & (np.abs(start - before) > 1)
        counts = [self.value(name) for name in _RESTART if self.is_exported(name)]
        if counts:
            table = np.vstack(counts)
            earlier = np.concatenate([np.full((len(counts), 1), np.nan), table[:, :-1]], axis=1)
            fell = (table < earlier).sum(axis=0)
            comparable = (np.isfinite(table) & np.isfinite(earlier) & (earlier > 0)).sum(axis=0)
            moved |= ~finite & (comparable > 0) & (fell * 2 > comparable)
        return moved

    @cached_property
    def disordered(self) -> bool:
        """Whether counters rise and fall: two processes behind one address, or samples with wrong times."""
        fell = np.zeros(len(self), np.bool_)
        for name in _RESTART:
            value = self.value(name)
            fell[1:] |= value[1:] < value[:-1]
        return int(fell.sum()) >= 5 and float(fell.mean()) > _DISORDER

    def change(self, name: str) -> Floats:
        """Return the growth of a counter since the previous scrape; NaN after a restart, and where it fell."""
        if name not in self._changes:
            value = self.value(name)
            grown = np.full(len(value), np.nan)
            if len(value):
                grown[1:] = value[1:] - value[:-1]
                grown[self.restarts] = np.nan
                if name in COUNTERS:
                    grown[grown < 0] = np.nan
            if self.disordered and name in COUNTERS:
                grown[:] = np.nan
            self._changes[name] = grown
        return self._changes[name]

    @cached_property
    def progress(self) -> Floats:
        """1 where a request made progress since the previous scrape, 0 where none did, NaN where that is unknown."""
        progressing = np.full(len(self), np.nan)
        for name in PROGRESS:
            grown = self.change(name)
            progressing = np.fmax(progressing, np.where(np.isfinite(grown), (grown > 0).astype(np.float64), np.nan))
        return progressing

    @cached_property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Ranges (first, past the last) of successful scrapes without restart and without a long gap."""
        if not len(self):
            return ()
        cut = np.flatnonzero(self.restarts | (self.interval > self.longest_gap_s))
        edges = [0, *cut.tolist(), len(self)]
        return tuple((a, b) for a, b in itertools.pairwise(edges) if b > a)

    @property
    def longest_gap_s(self) -> float:
        """Time without successful scrapes up to which an episode is one."""
        return max(_GAP_STEPS * self.step_s, _GAP_S)

    def _known_change(self, name: str) -> Bools:
        """Return where the growth of a counter is known."""
        if name not in self._known_changes:
            self._known_changes[name] = np.isfinite(self.change(name))
        return self._known_changes[name]

    def sum_of(self, name: str, first: int, last: int) -> float | None:
        """Return the growth of a counter from sample ``first`` to sample ``last``; ``None`` if it is unknown."""
        part = slice(first + 1, last + 1)
        grown = self.change(name)[part][self._known_change(name)[part]]
        return float(np.add.reduce(grown)) if len(grown) else None

    def rate_of(self, name: str, first: int, last: int) -> float | None:
        """Return the growth per second, over the intervals in which it is known."""
        part = slice(first + 1, last + 1)
        finite = self._known_change(name)[part]
        grown, length = self.change(name)[part][finite], np.add.reduce(self.interval[part][finite])
        return float(np.add.reduce(grown) / length) if len(grown) and length > 0 else None

    def ratio_of(self, amount: str, count: str, first: int, last: int) -> float | None:
        """Return the growth of one counter by that of another: a mean over events; ``None`` without an event."""
        part = slice(first + 1, last + 1)
        finite = self._known_change(amount)[part] & self._known_change(count)[part]
        events = float(np.add.reduce(self.change(count)[part][finite]))
        return float(np.add.reduce(self.change(amount)[part][finite])) / events if events > 0 else None

    def mean_of(self, name: str, first: int, last: int) -> float | None:
        """Return the mean of a gauge over the samples."""
        part = self.value(name)[first : last + 1]
        finite = part[np.isfinite(part)]
        return float(finite.mean()) if len(finite) else None

    def peak_of(self, name: str, first: int, last: int) -> float | None:
        """Return the maximum of a gauge."""
        part = self.value(name)[first : last + 1]
        finite = part[np.isfinite(part)]
        return float(np.maximum.reduce(finite)) if len(finite) else None


def _repeated(samples: pl.DataFrame) -> Bools | None:
    """Return which samples repeat the scrape before them, or ``None``.

    An exporter on a node is scraped more often than it scrapes an engine. Its values, the duration of the scrape among
    them, are then the same; as samples they would look like a queue that grows in steps. Only durations below whole
    milliseconds tell scrapes apart.
    """
    if "scrape_s" not in samples.columns:
        return None
    took = samples["scrape_s"].cast(pl.Float64).to_numpy()
    same = np.concatenate([[False], took[1:] == took[:-1]])
    if not same.any():
        return None
    same &= np.abs(took * 1000 - np.round(took * 1000)) > _WHOLE_MS
    return same if same.any() else None


def _orphaned(samples: pl.DataFrame) -> list[tuple[float, float, float | None]]:
    if not {*ORPHANED} <= {*samples.columns} or samples[ORPHANED[0]].null_count() == len(samples):
        return []
    rows = samples.filter(pl.col(ORPHANED[0]) > 0)
    return [
        (time.timestamp(), count, held_bytes) for time, count, held_bytes in rows.select("time", *ORPHANED).iter_rows()
    ]


def _last(samples: pl.DataFrame, name: str) -> str | None:
    if name not in samples.columns:
        return None
    column = samples[name]
    if column.null_count() == len(column):
        return None
    return str(column[-1] if column[-1] is not None else column.drop_nulls()[-1])


def streams(key: EngineKey, samples: pl.DataFrame) -> Iterator[EngineSeries]:
    """Yield the series of the engine, one for each process if several processes answer in turn at one address.

    Each has its own counters. Failed scrapes belong to all of them. The rank of such a process is its start time, or a
    number if that is unknown.
    """
    whole = EngineSeries(key, samples)
    for rank, part in _in_turn(whole):
        yield whole if rank is None else EngineSeries(replace(key, rank=rank), part)


def _in_turn(whole: EngineSeries) -> Iterator[tuple[str | None, pl.DataFrame]]:
    """Yield rank and samples of each process that responds in turn with others. Rank ``None``: there is only one."""
    samples, start = whole.samples, whole.value("start_time")
    starts = np.round(start[np.isfinite(start)])
    changes, distinct = int((np.abs(np.diff(starts)) > 1).sum()), np.unique(starts)
    if changes > len(distinct) >= 2:
        rounded = pl.col("start_time").round()
        for started in distinct.tolist():
            yield (
                f"{_STARTED}{moment(started):%Y-%m-%dT%H:%M:%SZ}",
                samples.filter(rounded.is_null() | (rounded == started)),
            )
        return
    numbers = None if len(starts) else _by_counters(whole)
    if numbers is None:
        yield None, samples
        return
    times = pl.Series((whole.time * 1000).round()).cast(pl.Int64).cast(samples["time"].dtype)
    for number in range(1, int(numbers.max()) + 2):
        of_others = times.filter(pl.Series(numbers != number - 1))
        yield f"{_NUMBERED}{number}", samples.filter(~pl.col("time").is_in(of_others.implode()))


def _by_counters(series: EngineSeries) -> Integers | None:
    """Return the number of the process, from 0, that each successful scrape reached, by its counters, which never fall.

    ``None``: there is one process, or they cannot be separated. A scrape is of the process whose counters have grown
    least since. Before the counters fall for the first time, those of two processes look like a jump of one.
    """
    restart_values = [series.value(name) for name in _RESTART if series.is_exported(name)]
    if not series.disordered or not restart_values:
        return None
    counts = np.log1p(np.vstack(restart_values).T)
    chains: list[list[int]] = []
    for place, now in enumerate(counts):
        fitting = [chain for chain in chains if not (now < counts[chain[-1]]).any()]
        if fitting:
            min(fitting, key=lambda chain: float(np.nansum(now - counts[chain[-1]]))).append(place)
            continue
        if len(chains) == _MOST_PROCESSES:
            return None
        before = [_jump(counts, chain, now) for chain in chains]
        which = next((index for index, cut in enumerate(before) if cut), None)
        chains.append([place])
        if which is not None:
            chains[-1], chains[which] = [*chains[which][: before[which]], place], chains[which][before[which] :]
    numbers = np.empty(len(counts), np.int64)
    for number, places in enumerate(sorted(chains)):
        numbers[places] = number
    return numbers if np.count_nonzero(np.diff(numbers)) > len(chains) >= 2 else None


def _jump(counts: Floats, places: list[int], now: Floats) -> int:
    """Return the number of the first samples of a process that are nearer to ``now`` than to those that follow."""
    lower = [not (counts[place] > now).any() for place in places]
    cut = lower.index(False) if False in lower else 0
    if not cut:
        return 0
    last = counts[places[cut - 1]]
    return cut if np.nansum(now - last) < np.nansum(counts[places[cut]] - last) else 0


def responds_in_turn(key: EngineKey) -> bool:
    """Return whether the rank, which a user may choose, is that of one of several processes that respond in turn."""
    return key.rank is not None and key.rank.startswith((_STARTED, _NUMBERED))


def conform(samples: pl.LazyFrame) -> pl.LazyFrame:
    """Return the frame with the columns of a sample, and ``device`` if it has one; a missing column is unknown.

    Missing histograms are not added.
    """
    present = samples.collect_schema().names()
    columns = [
        (pl.col(name) if name in present else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SAMPLES.items()
        if name in present or dtype != BUCKETS
    ]
    return samples.select(*(["device"] if "device" in present else []), *columns)
