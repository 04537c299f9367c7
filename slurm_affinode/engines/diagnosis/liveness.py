"""Engines that make no progress, that ended, and processes of an engine that outlive their server.

A failed scrape alone proves nothing: a loaded server takes seconds to respond. An engine has ended if its server
refuses connections, or does not respond for far longer than it ever did before it responded again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_affinode.engines.diagnosis.capacity import Capacity
from slurm_affinode.engines.diagnosis.episodes import runs
from slurm_affinode.engines.diagnosis.rules import TEXTS, diagnosis, evidence
from slurm_affinode.engines.diagnosis.series import Bools, EngineSeries, moment
from slurm_affinode.engines.samples import NO_RESPONSE
from slurm_affinode.model.serving import Diagnosis, EngineEvent

REFUSED = re.compile(r"refused|reset by peer|Errno 111|Errno 113|[Nn]o route|unreachable|not known|RemoteDisconnected")
"""Errors of a scrape that say that no server listens. Others, timeouts above all, may be a loaded server."""
REFUSED_SCRAPES = 3
TIMEOUT_STEPS, TIMEOUT_S = 10, 60.0
STALL_STEPS, STALL_S = 6, 30.0
STALL_PAUSES = 5.0
"""Times the longest pause of an engine that then continued."""
_SAWTOOTH = 2
"""Falls of KV usage from full without progress that show a request which is started again and again."""


def without_progress(series: EngineSeries, capacity: Capacity) -> list[Diagnosis]:
    """Return the times in which requests are held and none makes progress: stalls, and requests that cannot fit."""
    running, waiting = series.value("running"), series.value("waiting")
    occupied = (np.nan_to_num(running) + np.nan_to_num(waiting)) > 0
    moves = series.progress
    # Without counters, only an empty batch with a queue shows that nothing is processed.
    still = occupied & np.where(np.isfinite(moves), moves == 0, (running == 0) & (waiting > 0))
    # A preempted request prefills again: the counter of prompt tokens may grow, but no token is generated.
    looping = occupied & (series.change("preemptions") > 0) & _none_ends(series)
    candidates = still | looping
    if not candidates.any():
        return []
    diagnoses = []
    stuck = runs(series, candidates, close=0.0)
    pauses = [_length(series, first, last) for first, last in stuck]
    for number, (first, last) in enumerate(stuck):
        first = max(first - 1, 0) if np.isfinite(series.interval[first]) and not series.restarts[first] else first  # noqa: PLW2901
        other_pauses = [pause for i, pause in enumerate(pauses) if i != number and stuck[i][1] < len(series) - 1]
        usual = float(np.quantile(other_pauses, 0.9)) if other_pauses else 0.0
        limit = max(STALL_STEPS * series.step_s, STALL_S, STALL_PAUSES * usual)
        length = float(series.time[last] - series.time[first])
        if length < limit or last - first < 3:
            continue
        diagnoses.append(_stuck(series, capacity, first, last, limit))
    return diagnoses


def _none_ends(series: EngineSeries) -> Bools:
    ended, generated = series.change("finished"), series.change("generation_tokens")
    unknown = ~np.isfinite(ended) & ~np.isfinite(generated)
    none: Bools = (np.nan_to_num(ended) == 0) & (np.nan_to_num(generated) == 0) & ~unknown
    return none


def _length(series: EngineSeries, first: int, last: int) -> float:
    return float(series.time[last] - series.time[max(first - 1, 0)])


def _stuck(series: EngineSeries, capacity: Capacity, first: int, last: int, limit: float) -> Diagnosis:
    begin, end = moment(series.time[first]), moment(series.time[last])
    length = float(series.time[last] - series.time[first])
    usage = series.value("kv_usage")[first + 1 : last + 1]
    usage = usage[np.isfinite(usage)]
    running, waiting = series.mean_of("running", first + 1, last), series.mean_of("waiting", first + 1, last)
    counters = bool(np.isfinite(series.progress[first + 1 : last + 1]).any())
    preempted = series.sum_of("preemptions", first, last) or 0.0
    falls = int((np.diff(usage) < -0.3).sum()) if len(usage) > 1 else 0
    full = len(usage) > 0 and float(np.median(usage)) >= min(0.5, capacity.full_level or 0.5)
    loop = falls >= _SAWTOOTH or preempted >= 3
    empty = (
        len(usage) > 0 and not loop and float(np.max(usage)) < 0.1 and (running or 0.0) == 0 and (waiting or 0.0) > 0
    )
    low, high = (float(np.min(usage)), float(np.max(usage))) if len(usage) else (None, None)
    mean = float(np.mean(usage)) if len(usage) else None
    proof = [
        evidence("no-progress.time", length, 0.4, limit=limit),
        evidence("no-progress.progress", 0.0 if counters else None, 0.3),
        evidence("no-progress.held", (running or 0.0) + (waiting or 0.0), 0.1, running=running or 0.0,
                 waiting=waiting or 0.0),
        evidence("request-too-large.kv", mean, 0.2, low=low, high=high, falls=falls if loop else None,
                 preempted=preempted) if loop or empty else
        evidence("stalled.kv", mean, 0.2, low=low, high=high),
    ]  # fmt: skip
    figures = {"seconds": length, "running": running, "waiting": waiting, "preemptions": preempted or None}
    if loop or empty:
        return diagnosis(
            "request-too-large.repeated" if loop else "request-too-large.not-started", begin, end, proof,
            figures=figures, certainty=0.9 if loop else 0.8,
            doubts=[] if loop else ["request-too-large.doubt-scheduler"], length=length, low=low, high=high,
        )  # fmt: skip
    return diagnosis(
        "stalled.full" if full and (running or 0) == 0 else "stalled.held", begin, end, proof, figures=figures,
        doubts=[] if counters else ["stalled.doubt-counter"], length=length, low=low, high=high,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outage:
    """Failed scrapes after which the same process did not respond again."""

    first: int
    """Position of the first failed scrape among all."""
    last: int
    refused: int
    """Failed scrapes that say that no server listens."""
    restarted: bool
    """A new process responded afterwards."""
    listening: int
    """Failed scrapes during which a process still listened, as this project's exporter reports."""


def outages(series: EngineSeries) -> list[Outage]:
    """Return the outages.

    Failed scrapes that a success of the same process follows are late ones, unless connections were refused.
    """
    failed = series.failed
    if not failed.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], failed.astype(np.int8), [0]])))
    slowest = float(np.nanmax(series.value("scrape_s"))) if series.is_exported("scrape_s") else 0.0
    restarted = set(series.reached[series.restarts].tolist())
    times = series.all_times
    interruptions = []
    for first, last in zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True):
        refused = sum(bool(REFUSED.search(error or "")) for error in series.errors[first : last + 1])
        length = float(times[last] - times[first]) + series.step_s
        after = last + 1
        again = after < len(times) and after not in restarted
        patience = max(TIMEOUT_STEPS * series.step_s, TIMEOUT_S, 10 * slowest)
        ended = refused >= REFUSED_SCRAPES and refused * 2 >= last - first + 1
        # The same process, by its start time, responded again: the network or a proxy was down.
        if again and (not ended or series.is_exported("start_time")):
            continue
        if ended or (last - first + 1 >= REFUSED_SCRAPES and length >= patience):
            listening = sum(error == NO_RESPONSE for error in series.errors[first : last + 1])
            interruptions.append(Outage(first, last, refused, after in restarted, listening))
    return interruptions


def endings(series: EngineSeries, events: Sequence[EngineEvent], gpu_share: float | None) -> list[Diagnosis]:
    """Return the ends of the engine, and those due to lack of memory. ``gpu_share``: of GPU memory held before, 0-1."""
    diagnoses: list[Diagnosis] = []
    memory = [logged for logged in events if logged.kind in ("gpu-out-of-memory", "host-out-of-memory")]
    reported: set[int] = set()
    series_outages = outages(series)
    for outage in series_outages:
        begin, end = series.all_times[outage.first], series.all_times[outage.last]
        count = outage.last - outage.first + 1
        proof = [
            evidence("ended.scrapes", float(count), 0.5, least=REFUSED_SCRAPES),
            evidence("ended.connection" if outage.refused else "ended.connection-timeout", float(outage.refused), 0.5,
                     met=outage.refused > 0),
        ]  # fmt: skip
        doubts = [] if outage.refused else ["ended.doubt-overload"]
        if outage.listening:
            proof.append(evidence("ended.process", float(outage.listening), 0.5, met=False))
            doubts = ["ended.doubt-listening"]
        running, waiting = _load_before(series, outage.first)
        diagnoses.append(diagnosis(
            "ended.restarted" if outage.restarted else "ended.lost", moment(begin), moment(end), proof,
            figures={"failed_scrapes": float(count)}, advice="" if outage.restarted else None, doubts=doubts,
            scrapes=count, running=running, waiting=waiting,
        ))  # fmt: skip
        near = [
            i for i, event in enumerate(memory)
            if (len(series_outages) == 1 if event.time is None else begin - 120 <= event.time.timestamp() <= end + 120)
        ]  # fmt: skip
        reported |= set(near)
        of_kind = {memory[i].kind: memory[i] for i in reversed(near)}
        diagnoses += [_out_of_memory(series, begin, end, event) for event in of_kind.values()]
        if not near and gpu_share is not None and gpu_share >= 0.97 and not outage.restarted and running is not None:
            proof = [
                evidence("out-of-memory.log", None, 0.6),
                evidence("out-of-memory.memory", gpu_share * 100, 0.4, share=gpu_share),
            ]
            diagnoses.append(diagnosis("out-of-memory.load", moment(begin), moment(end), proof, certainty=0.6,
                                   doubts=["out-of-memory.doubt-reserved"], share=gpu_share))  # fmt: skip
    # An error is logged on many lines: one diagnosis of a kind.
    other_events = {(event.kind, event.time): event for i, event in enumerate(memory) if i not in reported}
    # Of several ends, an event without a time may belong to any.
    edges = (
        (series.all_times[series_outages[0].first], series.all_times[series_outages[-1].last])
        if series_outages
        else (series.all_times[-1],) * 2
    )
    for event in other_events.values():
        begin, end = edges if event.time is None else (event.time.timestamp(),) * 2
        diagnoses.append(_out_of_memory(series, begin, end, event))
    refused = {refusal.time: refusal for refusal in events if refusal.kind == "request-too-large"}
    return diagnoses + [_refused_start(series, refusal) for refusal in refused.values()]


def _load_before(series: EngineSeries, position: int) -> tuple[float | None, float | None]:
    """Return the requests that ran and waited at the last scrape before ``position``; ``None`` if there were none."""
    before = np.flatnonzero(series.reached < position)
    if not len(before):
        return None, None
    request_counts = [float(series.value(name)[before[-1]]) for name in ("running", "waiting")]
    running, waiting = (0.0 if np.isnan(requests) else requests for requests in request_counts)
    return (running, waiting) if running + waiting else (None, None)


def _out_of_memory(series: EngineSeries, begin: float, end: float, event: EngineEvent) -> Diagnosis:
    on_gpu = event.kind == "gpu-out-of-memory"
    share = series.peak_of("memory_share", 0, len(series) - 1) if len(series) else None
    proof = [evidence("out-of-memory.log-gpu" if on_gpu else "out-of-memory.log-host", event.text, 1.0)]
    if on_gpu and share is not None:
        proof.append(evidence("out-of-memory.share", share * 100, 0.0, share=share))
    return diagnosis(
        "out-of-memory.gpu" if on_gpu else "out-of-memory.host", moment(begin), moment(end), proof,
        advice=None if on_gpu else TEXTS.text("out-of-memory.advice-host", {}),
    )  # fmt: skip


def _refused_start(series: EngineSeries, event: EngineEvent) -> Diagnosis:
    event_time = moment(series.all_times[-1]) if event.time is None else event.time
    proof = [evidence("request-too-large.log", event.text, 1.0)]
    return diagnosis("request-too-large.refused", event_time, event_time, proof)


def orphans(series: EngineSeries) -> list[Diagnosis]:
    """Return the times in which processes of the engine are left in the running job without their server.

    The exporter of the node reports them. Processes without a running job are orphans of another kind, which are found
    on nodes without regard to engines.
    """
    diagnoses: list[Diagnosis] = []
    episodes: list[list[tuple[float, float, float | None]]] = []
    for row in series.orphaned:
        served = episodes and ((series.time > episodes[-1][-1][0]) & (series.time < row[0])).any()
        if not episodes or served:
            episodes.append([])
        episodes[-1].append(row)
    for rows in episodes:
        (begin, _, _), (end, count, memory) = rows[0], rows[-1]
        proof = [
            evidence("orphaned-engine.processes", count, 0.5),
            evidence("orphaned-engine.looks", float(len(rows)), 0.2, met=len(rows) >= 2),
            evidence("orphaned-engine.gpu", memory, 0.3, met=bool(memory)),
        ]
        gib = None if memory is None else memory / 1024
        hours = None if gib is None else gib * (end - begin) / 3600
        diagnoses.append(diagnosis(
            "orphaned-engine.left", moment(begin), moment(end), proof, count=count, job=series.job or "?",
            memory_gib=gib,
            figures={"processes": count, "gpu_memory_mib": memory, "gib_hours": hours},
            doubts=[] if memory else ["orphaned-engine.doubt-memory"],
        ))  # fmt: skip
    return diagnoses
