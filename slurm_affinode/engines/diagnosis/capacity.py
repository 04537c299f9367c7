"""The capacity of an engine: when its KV cache or its batch is full, and what preemption and swapping cost.

The cache is effectively full when the next request does not fit. At which usage that happens depends on the size of
the requests, and is estimated from the engine's own samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slurm_affinode.engines.diagnosis.episodes import lasting, runs
from slurm_affinode.engines.diagnosis.rules import diagnosis, evidence
from slurm_affinode.engines.diagnosis.series import Bools, EngineSeries, Floats, Integers, moment
from slurm_affinode.model.serving import Diagnosis

MIN_LEVEL, MAX_LEVEL = 0.5, 0.97
"""Bounds of the usage at which a KV cache counts as full. Below half, a second request as large as those held fits."""
STORM_S = 20.0
RECOMPUTED_SHARE = 0.1
LOST_SHARE = 0.2
_ENOUGH = 5
"""Samples needed to estimate a level from a gauge."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of an engine, estimated from its samples."""

    demand: float | None
    """Share of the KV cache that a running request holds, median; ``None``: unknown."""
    full_level: float | None
    """Usage from which the KV cache is effectively full."""
    waiting_level: float | None
    """Usage from which it is, while requests wait."""
    batch_limit: float | None
    """Most requests that run at a time: configured, or a plateau seen while requests wait."""
    batch_seen: bool
    """The limit is a plateau, not configured."""
    kv_full: Bools
    """For each sample: the KV cache is effectively full, or requests were preempted since the previous sample."""
    batch_full: Bools
    """For each sample: requests wait, and as many run as the limit permits."""


def estimate(series: EngineSeries) -> Capacity:
    """Estimate the limits of the engine."""
    running, waiting, usage = series.value("running"), series.value("waiting"), series.value("kv_usage")
    queued = waiting > 0
    usage_per_request = (usage / np.where(running >= 1, running, np.nan))[(running >= 1) & (usage > 0)]
    demand = float(np.median(usage_per_request)) if len(usage_per_request) else _demand_by_length(series)
    full: float | None = None
    at_wait: float | None = None
    if series.is_exported("kv_usage"):
        full = MAX_LEVEL if demand is None else float(np.clip(1 - demand, MIN_LEVEL, MAX_LEVEL))
        configured = series.value("max_running")
        below = ~(running >= configured)
        plateau = usage[queued & below & np.isfinite(usage)]
        at_wait = full
        if len(plateau) >= _ENOUGH:
            at_wait = float(np.clip(np.quantile(plateau, 0.25), max(MIN_LEVEL, full - 0.3), full))
    limit, batch_tokens = _batch_limit(series, running, queued)
    kv_full = np.zeros(len(series), np.bool_)
    if full is not None and at_wait is not None:
        kv_full |= (usage >= full) | (queued & (usage >= at_wait))
    kv_full |= series.change("preemptions") > 0
    batch_full = queued & (running >= limit) if limit is not None else np.zeros(len(series), np.bool_)
    return Capacity(demand, full, at_wait, limit, batch_tokens, kv_full, batch_full)


def _demand_by_length(series: EngineSeries) -> float | None:
    last = len(series) - 1
    tokens, prompt = (
        series.peak_of("kv_tokens", 0, last),
        series.ratio_of("prompt_length", "prompt_length_count", 0, last),
    )
    output = series.ratio_of("generation_length", "generation_length_count", 0, last)
    return (prompt + (output or 0.0) / 2) / tokens if tokens and prompt is not None else None


def _batch_limit(series: EngineSeries, running: Floats, queued: Bools) -> tuple[float | None, bool]:
    configured = series.peak_of("max_running", 0, len(series) - 1)
    if configured:
        return configured, False
    under_load = running[queued & np.isfinite(running)]
    if len(under_load) < _ENOUGH:
        return None, False
    level = float(np.quantile(under_load, 0.75))
    if level < 1 or float((under_load >= 0.9 * level).mean()) < 0.8 or level < np.nanmax(running) * 0.9:
        return None, False
    return math.floor(0.9 * level) if level > 10 else level, True


def saturation(series: EngineSeries, capacity: Capacity) -> list[Diagnosis]:
    """Return the episodes in which the KV cache, or the batch, is full."""
    diagnoses = [_kv_saturated(series, capacity, *interval) for interval in lasting(series, capacity.kv_full)]
    diagnoses += [
        _batch_saturated(series, capacity, *interval)
        for interval in lasting(series, capacity.batch_full & ~capacity.kv_full)
    ]
    return diagnoses


def _kv_saturated(series: EngineSeries, capacity: Capacity, first: int, last: int) -> Diagnosis:
    mean, peak = series.mean_of("kv_usage", first, last), series.peak_of("kv_usage", first, last)
    waiting = series.peak_of("waiting", first, last)
    preempted = series.sum_of("preemptions", max(first - 1, 0), last)
    share = float(capacity.kv_full[first : last + 1].mean())
    level = capacity.full_level
    # With a queue, the cache is full at a lower usage: requests wait because the next one does not fit.
    queued = capacity.waiting_level
    lower = queued is not None and level is not None and f"{queued:.2f}" != f"{level:.2f}" and bool(waiting)
    proof = [
        evidence("kv-saturated.kv", mean, 0.4, peak=peak, level=level, demand=capacity.demand,
                 queued=queued if lower else None, met=share >= 0.3),
        evidence("kv-saturated.waiting", waiting, 0.3, met=(waiting or 0) > 0),
        evidence("kv-saturated.preemptions", preempted, 0.2, met=(preempted or 0) > 0),
        evidence("kv-saturated.time", float(series.time[last] - series.time[first]), 0.1, share=share,
                 met=share >= 0.5),
    ]  # fmt: skip
    figures = {"kv_mean": mean, "kv_max": peak, "full_level": level, "demand": capacity.demand, "waiting_max": waiting,
               "preemptions": preempted, "share": share}  # fmt: skip
    return diagnosis(
        "kv-saturated.full", moment(series.time[first]), moment(series.time[last]), proof, figures=figures,
        doubts=[] if waiting else ["kv-saturated.doubt-queue"],
        mean=mean, peak=peak, waiting=waiting, preempted=preempted,
    )  # fmt: skip


def _batch_saturated(series: EngineSeries, capacity: Capacity, first: int, last: int) -> Diagnosis:
    waiting, running = series.peak_of("waiting", first, last), series.mean_of("running", first, last)
    limit = capacity.batch_limit or 0.0
    proof = [
        evidence("batch-full.running-plateau" if capacity.batch_seen else "batch-full.running", running, 0.5,
                 limit=limit),
        evidence("batch-full.waiting", waiting, 0.3),
        evidence("batch-full.limit", None if capacity.batch_seen else limit, 0.2),
    ]  # fmt: skip
    return diagnosis(
        "batch-full.full", moment(series.time[first]), moment(series.time[last]), proof, limit=limit, waiting=waiting,
        figures={"running_mean": running, "batch_limit": limit, "waiting_max": waiting},
    )  # fmt: skip


def preemption_storms(series: EngineSeries) -> list[Diagnosis]:
    """Return the episodes in which requests are preempted nearly without pause, and what that costs."""
    grown = series.change("preemptions")
    if not (grown > 0).any():
        return []
    diagnoses, prompt, calm = [], _prompt_tokens(series), _CalmIntervals.of(series)
    for first, last in lasting(series, grown > 0):
        before = max(first - 1, 0)
        spans = series.interval[before + 1 : last + 1]
        length, count = float(np.nansum(spans)), series.sum_of("preemptions", before, last) or 0.0
        active = float(np.nansum(spans[grown[before + 1 : last + 1] > 0])) / length if length else 0.0
        if length < STORM_S or count < 10 or active < 0.5:
            continue
        if (storm := _storm(series, before, last, count, length, prompt, calm)) is not None:
            diagnoses.append(storm)
    return diagnoses


def _storm(  # noqa: PLR0917
    series: EngineSeries, first: int, last: int, count: float, length: float, prompt: float | None, calm: _CalmIntervals
) -> Diagnosis | None:
    finished = series.sum_of("finished", first, last)
    repeated = _recomputed_share(series, first, last, count, prompt)
    rate, usual = series.rate_of("generation_tokens", first, last), calm.rate_until(first)
    lost = None if rate is None or usual is None else max(0.0, 1 - rate / usual)
    each = None if not finished else count / finished
    costly = repeated is not None and repeated >= RECOMPUTED_SHARE
    slower = lost is not None and lost >= LOST_SHARE
    often = repeated is None and (finished == 0 or (each is not None and each >= 0.5))
    if not (costly or slower or often):
        return None
    proof = [
        evidence("preemption-storm.preemptions", count / length, 0.4, count=count, length=length, each=each),
        evidence("preemption-storm.recomputation", None if repeated is None else repeated * 100, 0.3,
                 least=RECOMPUTED_SHARE, share=repeated, met=costly),
        evidence("preemption-storm.throughput", None if lost is None else lost * 100, 0.3, least=LOST_SHARE,
                 rate=rate, usual=usual, met=slower),
    ]  # fmt: skip
    cheap = lost is not None and lost < LOST_SHARE
    figures = {
        "preemptions": count, "preemptions_per_s": count / length, "preemptions_per_request": each,
        "recomputed_share": repeated, "lost_share": lost,
        "lost_tokens_per_s": None if rate is None or usual is None else max(0.0, usual - rate),
    }  # fmt: skip
    return diagnosis(
        "preemption-storm.cost", moment(series.time[first]), moment(series.time[last]), proof, figures=figures,
        doubts=["preemption-storm.doubt-throughput"] if cheap else [],
        count=count, length=length, repeated=repeated, before=usual if slower else None, after=rate if slower else None,
    )  # fmt: skip


def _prompt_tokens(series: EngineSeries) -> float | None:
    """Return the mean length of prompts over the whole series."""
    mean = series.ratio_of("prompt_length", "prompt_length_count", 0, len(series) - 1)
    if mean is not None:
        return mean
    # Prompts of requests that have not ended count as well, which is little over the whole series.
    return series.ratio_of("prompt_tokens", "finished", 0, len(series) - 1)


def _recomputed_share(series: EngineSeries, first: int, last: int, count: float, prompt: float | None) -> float | None:
    """Return the share of processed tokens that repeats a prefill, at least: a preempted request holds its prompt."""
    if prompt is None:
        size, usage = series.peak_of("kv_tokens", first, last), series.mean_of("kv_usage", first, last)
        running = series.mean_of("running", first, last)
        prompt = size * usage / running / 2 if size and usage and running else None
    token_sums = [series.sum_of(name, first, last) for name in ("prompt_tokens", "generation_tokens")]
    if prompt is None or None in token_sums:
        return None
    again = count * prompt
    whole = again + sum(tokens or 0.0 for tokens in token_sums)
    return again / whole if whole > 0 else None


@dataclass(frozen=True, slots=True)
class _CalmIntervals:
    """The intervals without preemption in which requests ran and output is known."""

    positions: Integers
    """Positions of the samples that end them."""
    tokens: Floats
    spans: Floats
    running: Floats

    @classmethod
    def of(cls, series: EngineSeries) -> _CalmIntervals:
        tokens, spans, running = series.change("generation_tokens"), series.interval, series.value("running")
        usable = (series.change("preemptions") == 0) & np.isfinite(tokens) & np.isfinite(spans) & (running >= 1)
        positions = np.flatnonzero(usable)
        return cls(positions, tokens[positions], spans[positions], running[positions])

    def rate_until(self, last: int) -> float | None:
        """Return the output rate up to a sample, over the intervals in which as many requests ran as in a storm.

        Without such intervals there is nothing to compare with: ``None``.
        """
        count = int(np.searchsorted(self.positions, last, side="right"))
        if count < _ENOUGH:
            return None
        running = self.running[:count]
        busiest = running >= np.quantile(running, 0.75)
        return float(self.tokens[:count][busiest].sum() / self.spans[:count][busiest].sum()) or None


def swapping(series: EngineSeries, capacity: Capacity) -> list[Diagnosis]:
    """Return the episodes in which requests are swapped to host memory and return, again and again."""
    swapped, host = series.value("swapped"), series.value("host_kv_usage")
    out = (swapped > 0) | (host > 0)
    diagnoses = []
    for first, last in runs(series, out):
        moved = swapped if np.isfinite(swapped[first : last + 1]).any() else host
        lead = max(first - 1, 0)
        change = np.diff(moved[lead : last + 1])
        rises, falls = int((change > 0).sum()), int((change < 0).sum())
        length = float(series.time[last] - series.time[first])
        if rises < 3 or falls < 2 or length < STORM_S:
            continue
        full = float(capacity.kv_full[first : last + 1].mean())
        peak = series.peak_of("swapped", first, last)
        proof = [
            evidence("swap-thrashing.swaps", float(rises + falls), 0.6, rises=rises, falls=falls, length=length),
            evidence("swap-thrashing.kv", full * 100, 0.4, share=full, met=full >= 0.5),
        ]
        diagnoses.append(diagnosis(
            "swap-thrashing.moves", moment(series.time[first]), moment(series.time[last]), proof,
            figures={"moves": float(rises + falls), "swapped_max": peak}, moves=rises + falls, length=length,
        ))  # fmt: skip
    return diagnoses
