"""Memory held without use: idle and sleeping engines, the squatter signature, and leaks of host memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import polars as pl

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
        times = part["at"].to_numpy()
        # Also a sample shortly after the scrape, as clocks differ.
        nearest = np.clip(np.searchsorted(times, series.time + 1.0, side="right") - 1, 0, None)
        near = np.abs(times[nearest] - series.time) <= tolerance
        for name in names:
            value = part[name].fill_null(np.nan).to_numpy()[nearest]
            columns[name].append(np.where(near, value, np.nan))
    stacked = {name: np.vstack(values) for name, values in columns.items()}
    used_mib = stacked["fb_used_mib"]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = used_mib / np.where(stacked["fb_total_mib"] > 0, stacked["fb_total_mib"], np.nan)
    power = stacked["power_w"].sum(axis=0)
    peak = float(np.nanmax(power)) if np.isfinite(power).any() else None
    return GpuState(
        len(used_mib),
        used_mib.sum(axis=0) / 1024,
        np.fmax.reduce(share),
        np.fmax.reduce(stacked["util_pct"]),
        power,
        peak,
    )


def resting(series: EngineSeries) -> tuple[Bools, Bools]:
    """Return for each sample whether the engine is idle, and whether it is asleep. What is unknown is neither."""
    asleep = series.value("asleep") == 1
    running, waiting, moves = series.value("running"), series.value("waiting"), series.progress
    measured = np.isfinite(running) | np.isfinite(moves)
    busy = (np.nan_to_num(running) > 0) | (np.nan_to_num(waiting) > 0) | (np.nan_to_num(moves) > 0)
    return measured & ~busy & ~asleep, asleep


def unused(series: EngineSeries, gpus: GpuState | None, idle_s: float) -> list[Diagnosis]:
    """Return the times in which the engine is idle or asleep."""
    idle, asleep = resting(series)
    diagnoses = []
    for kind, mask in (("idle", idle), ("asleep", asleep)):
        for first, last in runs(series, mask, close=0.0):
            length = float(series.time[last] - series.time[first])
            if length >= idle_s if kind == "idle" else last > first:
                diagnoses.append(_unused(kind, series, gpus, first, last, idle_s))
    return diagnoses


def _unused(  # noqa: PLR0917
    kind: str, series: EngineSeries, gpus: GpuState | None, first: int, last: int, idle_s: float
) -> Diagnosis:
    length = float(series.time[last] - series.time[first])
    count = len(series.gpus) or (gpus.count if gpus is not None else 0)
    hours = count * length / 3600 if count else None
    held_gib = _mean(gpus.held_gib, first, last) if gpus is not None else None
    gib_hours = None if held_gib is None else held_gib * length / 3600
    proof = [
        evidence("idle.time", length, 0.7, least=idle_s) if kind == "idle" else evidence("asleep.time", length, 0.7),
        evidence("idle.memory", held_gib, 0.3, met=(held_gib or 0) > 0.5) if kind == "idle" else
        evidence("asleep.memory", held_gib, 0.0, met=(held_gib or 0) > 0.5),
    ]  # fmt: skip
    memory_kept = kind == "asleep" and gpus is not None and (_mean(gpus.share, first, last) or 0.0) >= 0.5
    return diagnosis(
        "idle.unused" if kind == "idle" else "asleep.unused", moment(series.time[first]), moment(series.time[last]),
        proof, doubts=["asleep.doubt-memory"] if memory_kept else [],
        figures={"gpu_hours": hours, "gib_hours": gib_hours, "held_gib": held_gib},
        length=length, hours=hours, gib_hours=gib_hours, held=held_gib,
    )  # fmt: skip


def _mean(values: Floats, first: int, last: int) -> float | None:
    part = values[first : last + 1]
    finite = part[np.isfinite(part)]
    return float(finite.mean()) if len(finite) else None


def signature(series: EngineSeries, gpus: GpuState | None, idle_s: float, running_job: bool | None) -> list[Diagnosis]:
    """Return the times that match the squatter signature. ``running_job``: the job runs; ``None``: unknown."""
    if gpus is None or running_job is False:
        return []
    _, asleep = resting(series)
    mask = (gpus.share >= SIGNATURE_MEMORY) & (gpus.utilization < SIGNATURE_UTILIZATION) & ~asleep
    diagnoses = []
    for first, last in runs(series, mask, close=0.0):
        length = float(series.time[last] - series.time[first])
        if length < idle_s:
            continue
        share, use = _mean(gpus.share, first, last) or 0.0, _mean(gpus.utilization, first, last)
        power = _mean(gpus.power_w, first, last)
        hours = gpus.count * length / 3600
        held_gib = _mean(gpus.held_gib, first, last)
        served = series.sum_of("generation_tokens", first, last)
        proof = [
            evidence("squatter-signature.memory", share * 100, 0.4, share=share),
            evidence("squatter-signature.compute", use, 0.4),
            evidence("squatter-signature.state", None if running_job is None else "running", 0.2),
            evidence("squatter-signature.power", power, 0.0, highest=gpus.power_max_w),
        ]
        doubts = []
        if (
            power is not None
            and gpus.power_max_w
            and power >= HIGH_POWER * gpus.power_max_w
            and power > 100 * gpus.count
        ):
            doubts.append("squatter-signature.doubt-busy")
        elif power is not None:
            doubts.append("squatter-signature.doubt-power")
        if served:
            doubts.append("squatter-signature.doubt-tokens")
        diagnoses.append(diagnosis(
            "squatter-signature.held", moment(series.time[first]), moment(series.time[last]), proof,
            share=share, use=use, length=length, hours=hours, power=power, served=served,
            figures={
                "gpu_hours": hours, "gib_hours": None if held_gib is None else held_gib * length / 3600,
                "power_w": power,
            }, doubts=doubts, certainty=0.5 if served else 1.0,
        ))  # fmt: skip
    return diagnoses


def leaks(series: EngineSeries) -> list[Diagnosis]:
    """Return the growth of host memory without bound, in the longest life of the server process."""
    memory = series.value("rss_bytes")
    edges = [0, *np.flatnonzero(series.restarts).tolist(), len(series)]
    lives = sorted(itertools.pairwise(edges), key=lambda life: life[0] - life[1])
    for first, end in lives[:1]:
        positions = np.arange(first, end)[np.isfinite(memory[first:end])]
        if len(positions) < _LEAK_SAMPLES:
            continue
        blocks = np.array_split(positions, _BLOCKS)
        # The smallest value of each block: requests in flight, which add to memory for a time, do not count.
        floors = np.array([float(memory[block].min()) for block in blocks])
        rises = np.diff(floors)
        grown, begin = float(floors[-1] - floors[0]), float(floors[0])
        mean = grown / (_BLOCKS - 1)
        lasting = int((rises > 0.25 * mean).sum())
        if grown < max(_LEAK_SHARE * begin, _LEAK_BYTES) or lasting < _BLOCKS - 2 or rises[-2:].mean() < mean / 3:
            continue
        load = np.nan_to_num(series.value("running")) + np.nan_to_num(series.value("waiting"))
        loads = np.array([float(load[block].min()) for block in blocks])
        follows = loads[-1] > loads[0] and loads.std() > 0 and float(np.corrcoef(loads, floors)[0, 1]) > _WITH_LOAD
        if follows:
            continue
        hours = float(series.time[positions[-1]] - series.time[positions[0]]) / 3600
        stuck = series.sum_of("uncollectable", int(positions[0]), int(positions[-1]))
        rate = grown / hours
        proof = [
            evidence("memory-leak.growth", grown / 2**20, 0.4, begin=begin, end=float(floors[-1]), length=hours * 3600),
            evidence("memory-leak.steadiness", float(lasting), 0.4, parts=_BLOCKS - 1),
            evidence("memory-leak.uncollectable", stuck, 0.2, met=bool(stuck)),
        ]
        brief = hours < 1
        return [diagnosis(
            "memory-leak.growth-rate", moment(series.time[positions[0]]), moment(series.time[positions[-1]]), proof,
            rate=rate, begin=begin, end=float(floors[-1]),
            figures={"bytes_per_hour": rate, "grown_bytes": grown, "uncollectable": stuck},
            doubts=["memory-leak.doubt-short"] if brief else [],
            certainty=0.7 if brief else 1.0,
        )]  # fmt: skip
    return []
