"""Time series of a report: hours per bucket, histograms, and timelines of the most wasteful runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, tzinfo

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.analysis.block import Block, Pieces
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.measures import MIB_PER_GIB, MS_PER_HOUR, owner_pairs, partly_pairs
from slurm_affinode.analysis.result import BOUNDS_S, SUMS, Thresholds, Totals
from slurm_affinode.analysis.segments import Allocations, Cells, Flags, Floats, Ints, build, ranges
from slurm_affinode.base import times
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.slurm.accounting.schema import TIME

HOUR_S, DAY_S = 3600, 86400
SLOTS = 48
_BUSY, _LOW, _IDLE = (SUMS.index(name) for name in ("busy", "low", "idle"))
_UTIL, _UTIL_KNOWN, _FB, _FB_KNOWN = (SUMS.index(name) for name in ("util", "util_known", "fb", "fb_known"))


def bucket_s(since: datetime, until: datetime) -> int:
    """Return the bucket width: 15 s up to 15 min, 1 min up to 1 h, 1 h up to 3 days, 6 h up to 3 weeks, else 1 day."""
    span_s = (until - since).total_seconds()
    for longest_s, width_s in ((900, 15), (HOUR_S, 60), (3 * DAY_S, HOUR_S), (21 * DAY_S, 6 * HOUR_S)):
        if span_s <= longest_s:
            return width_s
    return DAY_S


@dataclass(frozen=True, slots=True)
class Buckets:
    """Consecutive buckets that cover the interval, aligned to hours and days of the local clock."""

    width_s: int
    edges: Ints
    """Start of each bucket and end of the last, ms."""

    @classmethod
    def of(cls, since: datetime, until: datetime, zone: tzinfo) -> Buckets:
        """Return the buckets of the interval."""
        width = bucket_s(since, until)
        edges = [epoch_ms(edge) for edge in times.edges(since, until, width, zone)]
        return cls(width, np.array(edges, np.int64))

    @property
    def count(self) -> int:
        """Number of buckets."""
        return len(self.edges) - 1

    @property
    def starts(self) -> Ints:
        """Start of each bucket, ms."""
        return self.edges[:-1]

    def numbers(self, time: Ints) -> Ints:
        """Return the number of the bucket that contains each time."""
        return np.searchsorted(self.edges, time, side="right") - 1


def over_time(  # noqa: PLR0917
    buckets: Buckets, totals: Totals, cells: Cells, allocations: Allocations, about: pl.DataFrame, kept_share: Floats
) -> pl.DataFrame:
    """Return ``WasteResult.over_time``. Cells must be cut at the buckets; ``about``: the runs covered by the report.

    ``kept_share``: per allocation, the fraction of its idle time that is known (``measures.without_suspended``).
    """
    count = buckets.count
    cell, owner, share = owner_pairs(cells)
    counted = allocations.counted[owner]
    cell, owner, share = cell[counted], owner[counted], share[counted]
    row, partly_owner, partly_share = partly_pairs(totals, cells, allocations)
    keep = allocations.counted[partly_owner]
    row, partly_owner, partly_share = row[keep], partly_owner[keep], partly_share[keep]
    bucket = buckets.numbers(cells.start[cell])
    partly_bucket = buckets.numbers(cells.start[totals.partly_cell[row]])
    hours: dict[str, Floats] = {}
    for name, position in (("idle", _IDLE), ("low", _LOW), ("busy", _BUSY)):
        whole, partly = (kept_share[owner], kept_share[partly_owner]) if position == _IDLE else (1.0, 1.0)
        ms = np.bincount(bucket, weights=totals.sums[cell, position] * share * whole, minlength=count)
        part = totals.partly_sums[row, position] * partly_share * partly
        ms += np.bincount(partly_bucket, weights=part, minlength=count)
        hours[name] = ms / MS_PER_HOUR
    allocated = _allocated(buckets, about)
    # Runs without a whole GPU count as allocated for their share of the device's time.
    none = about.filter(pl.col("gpus").fill_null(0) == 0)["run"].to_numpy()
    fraction = np.isin(allocations.run[owner], none)
    length = ((cells.end - cells.start)[cell] * share)[fraction]
    allocated += np.bincount(bucket[fraction], weights=length, minlength=count) / MS_PER_HOUR
    measured = hours["idle"] + hours["low"] + hours["busy"]
    # Rounding must not make the unknown hours of a fully measured bucket negative.
    allocated = np.maximum(allocated, measured)
    frame = pl.DataFrame(
        {
            "bucket": pl.Series(buckets.starts).cast(TIME),
            "gpu_hours_allocated": allocated,
            **{f"gpu_hours_{name}": hours[name] for name in ("idle", "low", "busy")},
            "gpu_hours_unknown": allocated - measured,
        }
    )
    is_known = pl.Series((measured > 0) | (allocated == 0))
    return frame.with_columns(
        pl.when(is_known).then(pl.col(f"gpu_hours_{name}")).otherwise(None).name.keep()
        for name in ("idle", "low", "busy")
    )


def _allocated(buckets: Buckets, about: pl.DataFrame) -> Floats:
    frame = about.filter(pl.col("gpus").fill_null(0) > 0)
    start, end = frame["start_ms"].to_numpy(), frame["end_ms"].to_numpy()
    first = buckets.numbers(start)
    count = buckets.numbers(end - 1) - first + 1
    bucket = ranges(first, count)
    low, high = buckets.edges[bucket], buckets.edges[bucket + 1]
    overlap = np.minimum(np.repeat(end, count), high) - np.maximum(np.repeat(start, count), low)
    gpus = np.repeat(frame["gpus"].to_numpy(), count)
    return np.bincount(bucket, weights=overlap * gpus, minlength=buckets.count) / MS_PER_HOUR


def idle_fraction_histogram(jobs: pl.DataFrame) -> pl.DataFrame:
    """Return ``WasteResult.idle_fraction_histogram``. ``jobs``: runs with measures; those without any are left out."""
    bins = pl.DataFrame({"bin": range(10)}, schema={"bin": pl.Int64()}).with_columns(
        (pl.col("bin") / 10).alias("lower"), ((pl.col("bin") + 1) / 10).alias("upper")
    )
    jobs_with_share = jobs.filter(pl.col("idle_fraction").is_not_null()).select(
        (pl.col("idle_fraction") * 10).floor().clip(0, 9).cast(pl.Int64).alias("bin"), "gpu_hours_allocated"
    )
    counted = jobs_with_share.group_by("bin").agg(
        pl.len().cast(pl.Int64).alias("jobs"), pl.col("gpu_hours_allocated").sum()
    )
    return bins.join(counted, on="bin", how="left", maintain_order="left").select(
        "lower", "upper", pl.col("jobs").fill_null(0), pl.col("gpu_hours_allocated").fill_null(0.0)
    )


_WINDOW_LABELS = ("under 5 min", "5-15 min", "15-60 min", "1-4 h", "4-12 h", "12-24 h", "24 h and more")


def window_histogram(totals: Totals, *, is_known: bool) -> pl.DataFrame:
    """Return ``WasteResult.window_histogram``. ``is_known``: whether 0 windows mean no idle time."""
    bounds = [float(bound) for bound in BOUNDS_S]
    return pl.DataFrame(
        {
            "label": _WINDOW_LABELS,
            "lower_s": [0.0, *bounds],
            "upper_s": [*bounds, None],
            "windows": totals.window_counts,
            "gpu_hours": totals.window_share_ms / MS_PER_HOUR,
        }
    ).with_columns(pl.when(is_known).then(pl.col("windows", "gpu_hours")).otherwise(None).name.keep())


@dataclass(frozen=True, slots=True)
class TimelineSlots:
    """Time slots of the timelines of some runs."""

    runs: Ints
    edges: tuple[Ints, ...]
    """Per run: start of each slot and end of the last, ms."""
    allocations: Allocations
    """All allocations on the devices of these runs."""
    cells: Cells
    pieces: Ints
    """Pieces that may have samples of these runs."""
    kept_share: Floats
    """Per allocation, the fraction of its idle time that is known."""


def slots_of(  # noqa: PLR0917
    chosen: pl.DataFrame, allocations: Allocations, cells: Cells, pieces: Pieces, devices: int, kept_share: Floats
) -> TimelineSlots:
    """Cut the runs ``chosen`` (``runs.prepare``) into slots no shorter than the median sampling interval."""
    runs = chosen["run"].to_numpy()
    involved = np.isin(allocations.run, runs)
    taking_part = np.zeros(devices, np.bool_)
    taking_part[allocations.device[involved]] = True
    step = int(np.median(pieces.step)) if len(pieces) else 0
    edges = tuple(
        _edges(start, end, step)
        for start, end in zip(chosen["start_ms"].to_list(), chosen["end_ms"].to_list(), strict=True)
    )
    lookup = {int(run): position for position, run in enumerate(runs)}
    cuts = [(device, edges[lookup[run]]) for device, run in _device_runs(allocations, involved)]
    sampled = taking_part[allocations.device]
    shared = allocations.take(sampled)
    slotted = build(
        shared,
        taking_part=taking_part,
        since=cells.since,
        until=cells.until,
        cut_device=np.concatenate([np.empty(0, np.int64), *(np.full(len(e), device) for device, e in cuts)]),
        cut_time=np.concatenate([np.empty(0, np.int64), *(e for _, e in cuts)]),
    )
    return TimelineSlots(
        runs, edges, shared, slotted, _pieces_during(allocations.take(involved), pieces), kept_share[sampled]
    )


def _edges(start: int, end: int, step: int) -> Ints:
    count = int(min(SLOTS, max(1, (end - start) // max(step, 1000))))
    return start + (np.arange(count + 1, dtype=np.int64) * (end - start)) // count


def _device_runs(allocations: Allocations, involved: Flags) -> list[tuple[int, int]]:
    return list(zip(allocations.device[involved].tolist(), allocations.run[involved].tolist(), strict=True))


def _pieces_during(selected: Allocations, pieces: Pieces) -> Ints:
    """Return the pieces that may have a sample in one of the ``selected`` allocations."""
    order = np.argsort(selected.device, kind="stable")
    device, start, end = selected.device[order], selected.start[order], selected.end[order]
    low, high = np.searchsorted(device, pieces.device), np.searchsorted(device, pieces.device, side="right")
    overlapping = [
        piece
        for piece in np.flatnonzero(high > low).tolist()
        if (
            (start[low[piece] : high[piece]] < pieces.reach[piece])
            & (end[low[piece] : high[piece]] > pieces.first_time[piece])
        ).any()
    ]
    return np.array(overlapping, np.int64)


def timelines(
    slots: TimelineSlots, blocks: Iterable[Block], pieces: Pieces, thresholds: Thresholds, chosen: pl.DataFrame
) -> pl.DataFrame:
    """Return ``WasteResult.timelines`` of the runs in ``slots``."""
    cells = slots.cells
    totals = kernel.run(blocks, pieces, slots.allocations, cells, thresholds)
    cell, owner, share = owner_pairs(cells)
    row, partly_owner, partly_share = partly_pairs(totals, cells, slots.allocations)
    frames = []
    keys = chosen.select("cluster", "job_id", "submit", "gpus")
    for position, run in enumerate(slots.runs.tolist()):
        edges = slots.edges[position]
        count = len(edges) - 1
        selected, partly = slots.allocations.run[owner] == run, slots.allocations.run[partly_owner] == run
        slot = np.searchsorted(edges, cells.start[cell[selected]], side="right") - 1
        partly_slot = np.searchsorted(edges, cells.start[totals.partly_cell[row[partly]]], side="right") - 1
        sums = np.zeros((count, len(SUMS)))
        np.add.at(sums, slot, totals.sums[cell[selected]] * share[selected, None])
        np.add.at(sums, partly_slot, totals.partly_sums[row[partly]] * partly_share[partly, None])
        idle = np.zeros(count)
        np.add.at(idle, slot, totals.sums[cell[selected], _IDLE] * share[selected] * slots.kept_share[owner[selected]])
        partly_kept = partly_share[partly] * slots.kept_share[partly_owner[partly]]
        np.add.at(idle, partly_slot, totals.partly_sums[row[partly], _IDLE] * partly_kept)
        sums[:, _IDLE] = idle
        held_ms = np.bincount(
            slot, weights=(cells.end - cells.start)[cell[selected]] * share[selected], minlength=count
        )
        key = keys.row(position, named=True)
        frames.append(_timeline(key, edges, sums, held_ms))
    return pl.concat(frames) if frames else pl.DataFrame(schema=TIMELINE)


TIMELINE: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "submit": TIME,
    "slot": pl.Int64(),
    "from": TIME,
    "to": TIME,
    "idle": pl.Float64(),
    "low": pl.Float64(),
    "busy": pl.Float64(),
    "unknown": pl.Float64(),
    "util_mean_pct": pl.Float64(),
    "fb_mean_gib": pl.Float64(),
}


def _timeline(key: dict[str, object], edges: Ints, sums: Floats, held_ms: npt.NDArray[np.generic]) -> pl.DataFrame:
    count = len(edges) - 1
    allocated = np.diff(edges) * float(key["gpus"]) if key["gpus"] else held_ms  # type: ignore[arg-type]
    measured = sums[:, [_IDLE, _LOW, _BUSY]].sum(axis=1)
    allocated = np.maximum(np.maximum(allocated, measured), 1e-9)
    with np.errstate(invalid="ignore", divide="ignore"):
        util, fb = sums[:, _UTIL] / sums[:, _UTIL_KNOWN], sums[:, _FB] / sums[:, _FB_KNOWN] / MIB_PER_GIB
    return pl.DataFrame(
        {
            "cluster": pl.Series([key["cluster"]] * count, dtype=pl.String),
            "job_id": [key["job_id"]] * count,
            "submit": pl.Series([key["submit"]] * count, dtype=TIME),
            "slot": np.arange(count, dtype=np.int64),
            "from": pl.Series(edges[:-1]).cast(TIME),
            "to": pl.Series(edges[1:]).cast(TIME),
            "idle": sums[:, _IDLE] / allocated,
            "low": sums[:, _LOW] / allocated,
            "busy": sums[:, _BUSY] / allocated,
            "unknown": 1 - measured / allocated,
            "util_mean_pct": pl.Series(util).fill_nan(None),
            "fb_mean_gib": pl.Series(fb).fill_nan(None),
        },
        schema=TIMELINE,
    )
