"""Memory held without use: idle and sleeping engines, the squatter signature, and leaks of host memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.base.text import percent, size, span
from slurm_affinode.engines.diagnosis.episodes import runs
from slurm_affinode.engines.diagnosis.rules import diagnosis, evidence
from slurm_affinode.engines.diagnosis.series import Bools, EngineSeries, Floats, moment
from slurm_affinode.model.serving import Diagnosis

SIGNATURE_MEMORY, SIGNATURE_UTILIZATION = 0.95, 5.0
HIGH_POWER = 0.5
"""Share of the highest power seen above which an idle GPU contradicts its utilization."""
_BLOCKS = 8
_LEAK_SHARE, _LEAK_BYTES, _LEAK_SAMPLES = 0.1, 64 * 2.0**20, 32
_WITH_LOAD = 0.7
"""Correlation with the requests held from which memory follows the load."""
_STEPS_APART = 2.5


@dataclass(frozen=True, slots=True)
class GpuState:
    """The GPUs of an engine at its successful scrapes, added up; NaN where not measured."""

    count: int
    held_gib: Floats
    share: Floats
    """Of the memory of the fullest GPU that is held, 0-1."""
    utilization: Floats
    """Percent, of the busiest GPU."""
    power_w: Floats
    """Of all GPUs."""
    power_max_w: float | None
    """The highest power seen in the samples."""


def gpu_state(series: EngineSeries, gpus: pl.DataFrame | None) -> GpuState | None:
    """Return the GPUs at the times of the scrapes. ``gpus``: GPU samples of this engine's GPUs, metrics' columns.

    The last sample before a scrape counts, if it is at most a minute (or 2.5 scrape intervals) old: clocks of nodes
    differ by less.
    """
    if gpus is None or gpus.is_empty() or not len(series):
        return None
    device = pl.coalesce(pl.col("uuid"), pl.col("index").cast(pl.String)) if "index" in gpus.columns else pl.col("uuid")
    tolerance = max(60.0, _STEPS_APART * series.step_s)
    names = ("fb_used_mib", "fb_total_mib", "util_pct", "power_w")
    table = gpus.select(
        device.alias("device"), (pl.col("time").dt.epoch("ms") / 1000).alias("at"),
        *((pl.col(name) if name in gpus.columns else pl.lit(None)).cast(pl.Float64).alias(name) for name in names),
    ).sort("device", "at")  # fmt: skip
    columns: dict[str, list[Floats]] = {name: [] for name in names}
    for (_,), part in table.group_by(["device"], maintain_order=True):
        at = part["at"].to_numpy()
        # Also a sample shortly after the scrape, as clocks differ.
        found = np.clip(np.searchsorted(at, series.time + 1.0, side="right") - 1, 0, None)
        near = np.abs(at[found] - series.time) <= tolerance
        for name in names:
            value = part[name].fill_null(np.nan).to_numpy()[found]
            columns[name].append(np.where(near, value, np.nan))
    stacked = {name: np.vstack(values) for name, values in columns.items()}
    held = stacked["fb_used_mib"]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = held / np.where(stacked["fb_total_mib"] > 0, stacked["fb_total_mib"], np.nan)
    power = stacked["power_w"].sum(axis=0)
    peak = float(np.nanmax(power)) if np.isfinite(power).any() else None
    return GpuState(
        len(held), held.sum(axis=0) / 1024, np.fmax.reduce(share), np.fmax.reduce(stacked["util_pct"]), power, peak
    )


def resting(series: EngineSeries) -> tuple[Bools, Bools]:
    """Return for each sample whether the engine is idle, and whether it is asleep. What is unknown is neither."""
    asleep = series.value("asleep") == 1
    running, waiting, moves = series.value("running"), series.value("waiting"), series.progress
    known = np.isfinite(running) | np.isfinite(moves)
    busy = (np.nan_to_num(running) > 0) | (np.nan_to_num(waiting) > 0) | (np.nan_to_num(moves) > 0)
    return known & ~busy & ~asleep, asleep


def unused(series: EngineSeries, gpus: GpuState | None, idle_s: float) -> list[Diagnosis]:
    """Return the times in which the engine is idle or asleep."""
    idle, asleep = resting(series)
    found = []
    for kind, mask in (("idle", idle), ("asleep", asleep)):
        for first, last in runs(series, mask, close=0.0):
            length = float(series.time[last] - series.time[first])
            if length >= idle_s if kind == "idle" else last > first:
                found.append(_unused(kind, series, gpus, first, last, idle_s))
    return found


def _unused(  # noqa: PLR0917
    kind: str, series: EngineSeries, gpus: GpuState | None, first: int, last: int, idle_s: float
) -> Diagnosis:
    length = float(series.time[last] - series.time[first])
    count = len(series.gpus) or (gpus.count if gpus is not None else 0)
    hours = count * length / 3600 if count else None
    held = _mean(gpus.held_gib, first, last) if gpus is not None else None
    gib_hours = None if held is None else held * length / 3600
    summary = f"No requests for {span(length)}" if kind == "idle" else f"Asleep for {span(length)}"
    summary += "" if hours is None else f": {hours:.2f} GPU-hours"
    summary += "" if gib_hours is None else f", {gib_hours:.1f} GiB-hours ({held:.1f} GiB held)"
    weight = 0.3 if kind == "idle" else 0.0
    proof = [
        evidence("time", length, "s", f"at least {span(idle_s)}" if kind == "idle" else None, 0.7,
                 f"no request ran or waited for {span(length)}" if kind == "idle" else f"asleep for {span(length)}"),
        evidence("memory", held, "GiB", "above 0", weight, "GPU memory was not measured" if held is None else
                 f"{held:.1f} GiB of GPU memory held on average", met=(held or 0) > 0.5),
    ]  # fmt: skip
    doubt = ""
    if kind == "asleep" and gpus is not None and (_mean(gpus.share, first, last) or 0.0) >= 0.5:
        doubt = "more than half of the GPU memory is still held"
    return diagnosis(kind, moment(series.time[first]), moment(series.time[last]), proof, f"{summary}.", doubt=doubt,
                     figures={"gpu_hours": hours, "gib_hours": gib_hours, "held_gib": held})  # fmt: skip


def _mean(values: Floats, first: int, last: int) -> float | None:
    part = values[first : last + 1]
    known = part[np.isfinite(part)]
    return float(known.mean()) if len(known) else None


def signature(series: EngineSeries, gpus: GpuState | None, idle_s: float, running_job: bool | None) -> list[Diagnosis]:
    """Return the times that match the squatter signature. ``running_job``: the job runs; ``None``: unknown."""
    if gpus is None or running_job is False:
        return []
    _, asleep = resting(series)
    mask = (gpus.share >= SIGNATURE_MEMORY) & (gpus.utilization < SIGNATURE_UTILIZATION) & ~asleep
    found = []
    for first, last in runs(series, mask, close=0.0):
        length = float(series.time[last] - series.time[first])
        if length < idle_s:
            continue
        share, use = _mean(gpus.share, first, last) or 0.0, _mean(gpus.utilization, first, last)
        power = _mean(gpus.power_w, first, last)
        hours = gpus.count * length / 3600
        held = _mean(gpus.held_gib, first, last)
        served = series.sum_of("generation_tokens", first, last)
        proof = [
            evidence("memory", share * 100, "%", "at least 95 %", 0.4, f"{percent(share)} of the GPU memory is held"),
            evidence("compute", use, "%", "below 5 %", 0.4, f"utilization is {use:.1f} % on average"),
            evidence("state", None if running_job is None else "running", "", "running", 0.2,
                     "the state of the job is unknown" if running_job is None else "the job runs"),
            evidence("power", power, "W", None, 0.0, "power was not measured" if power is None else
                     f"{power:.0f} W on average; {gpus.power_max_w:.0f} W is the highest seen"),
        ]  # fmt: skip
        doubts = []
        if (
            power is not None
            and gpus.power_max_w
            and power >= HIGH_POWER * gpus.power_max_w
            and power > 100 * gpus.count
        ):
            doubts.append(
                f"power ({power:.0f} W) is near its maximum, which contradicts an idle GPU: utilization may be "
                "measured wrongly"
            )
        elif power is not None:
            doubts.append("the published signature has near-maximum power while idle; this GPU draws little")
        if served:
            doubts.append(f"the engine generated {served:.0f} tokens in this time")
        found.append(diagnosis(
            "squatter-signature", moment(series.time[first]), moment(series.time[last]), proof,
            f"{percent(share)} of the GPU memory is held at {use:.1f} % utilization for {span(length)} "
            f"({hours:.2f} GPU-hours).",
            figures={"gpu_hours": hours, "gib_hours": None if held is None else held * length / 3600, "power_w": power},
            doubt="; ".join(doubts), certainty=0.5 if served else 1.0,
        ))  # fmt: skip
    return found


def leaks(series: EngineSeries) -> list[Diagnosis]:
    """Return the growth of host memory without bound, in the longest life of the server process."""
    memory = series.value("rss_bytes")
    edges = [0, *np.flatnonzero(series.restarts).tolist(), len(series)]
    lives = sorted(itertools.pairwise(edges), key=lambda one: one[0] - one[1])
    for first, end in lives[:1]:
        at = np.arange(first, end)[np.isfinite(memory[first:end])]
        if len(at) < _LEAK_SAMPLES:
            continue
        blocks = np.array_split(at, _BLOCKS)
        # The smallest value of each block: requests in flight, which add to memory for a time, do not count.
        floors = np.array([float(memory[block].min()) for block in blocks])
        rises = np.diff(floors)
        grown, begin = float(floors[-1] - floors[0]), float(floors[0])
        mean = grown / (_BLOCKS - 1)
        lasting = int((rises > 0.25 * mean).sum())
        if grown < max(_LEAK_SHARE * begin, _LEAK_BYTES) or lasting < _BLOCKS - 2 or rises[-2:].mean() < mean / 3:
            continue
        load = np.nan_to_num(series.value("running")) + np.nan_to_num(series.value("waiting"))
        held = np.array([float(load[block].min()) for block in blocks])
        follows = held[-1] > held[0] and held.std() > 0 and float(np.corrcoef(held, floors)[0, 1]) > _WITH_LOAD
        if follows:
            continue
        hours = float(series.time[at[-1]] - series.time[at[0]]) / 3600
        stuck = series.sum_of("uncollectable", int(at[0]), int(at[-1]))
        rate = grown / hours
        proof = [
            evidence("growth", grown / 2**20, "MiB", "at least 10 % and 64 MiB", 0.4,
                     f"memory rose from {size(int(begin))} to {size(int(floors[-1]))} in {span(hours * 3600)}"),
            evidence("steadiness", float(lasting), "of 7", "at least 6", 0.4,
                     f"it rose steadily in {lasting} of {_BLOCKS - 1} parts of the period, in the last ones as well"),
            evidence("uncollectable", stuck, "objects", "above 0", 0.2, "uncollectable objects are unknown"
                     if stuck is None else f"{stuck:g} objects could not be collected", met=bool(stuck)),
        ]  # fmt: skip
        brief = hours < 1
        return [diagnosis(
            "memory-leak", moment(series.time[at[0]]), moment(series.time[at[-1]]), proof,
            f"Host memory of the server grows by {size(int(rate))} per hour ({size(int(begin))} to "
            f"{size(int(floors[-1]))}).",
            figures={"bytes_per_hour": rate, "grown_bytes": grown, "uncollectable": stuck},
            doubt="the period is short: caches that fill up look the same" if brief else "",
            certainty=0.7 if brief else 1.0,
        )]  # fmt: skip
    return []
