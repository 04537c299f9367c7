"""Use, verdict and advice for one attempt of a job, from accounting, the tracks of its GPUs, and findings.

The findings are those of ``squatters`` and ``misfits``; this module adds the GPU-hours that following an advice would
have saved. CPU and memory are computed as ``seff`` of Slurm does: used core time of the allocated cores, and the peak
of the largest step (the peak of its largest task x its tasks) of the allocated memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from slurm_affinode.analysis.gpu_tracks import GpuTrack, together
from slurm_affinode.base.text import counted, figure, percent, span
from slurm_affinode.core.signatures import RunFacts
from slurm_affinode.model.finding import IDLE_KINDS, Finding
from slurm_affinode.model.job_summary import Advice, GpuUse, IdleWindow, ResourceUse

Row = Mapping[str, Any]
GIB = 2.0**30
MIB_PER_GIB = 1024.0
MOST_WINDOWS = 10
LEAST_WINDOW_S = 300.0
"""Shorter idle windows are not listed: programs pause between steps."""
SUSPEND_WINDOW_S = 900.0
"""Window of the advice on ``--gpu-suspend-idle``: the default of the plugin."""
WORTH_GPU_HOURS = 1.0
"""Advice on ``--gpu-suspend-idle`` is given from this saving on."""
MOSTLY_IDLE = 0.5
IDLE_AT_TIMES = 0.2
"""Idle shares of the measured time from which the verdict has these words."""
BARELY_MEASURED = 0.9
"""Below this measured share of the GPU time, the verdict says how much was measured."""


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """Settings of the site that the verdict and the advice depend on."""

    gpu_efficiency_pct: float
    """``zombies.misfits.user_efficiency_pct``."""
    cpu_efficiency_pct: float
    idle_pct: float
    suspends: bool
    """Whether the site offers ``--gpu-suspend-idle``."""


def gpu_use(track: GpuTrack, device: Row, suspended_s: float, mapping: str | None, *, shared: bool) -> GpuUse:
    """Return the use of one GPU.

    As much of its idle time as Slurm had suspended the job is unknown (rule ``activity`` of ``docs/metrics.md``).
    """
    moved_ms = min(track.idle_ms, round(suspended_s * 1000))
    longest_ms = track.longest_ms - (round(suspended_s * 1000) if moved_ms else 0)
    peak, total = track.fb_peak_mib, track.fb_total_mib
    return GpuUse(
        node=device["node"],
        gpu=device["name"],
        uuid=device["uuid"],
        model=device["model"],
        mapping=mapping,
        shared=shared,
        busy_s=track.busy_ms / 1000,
        low_s=track.low_ms / 1000,
        idle_s=(track.idle_ms - moved_ms) / 1000,
        unknown_s=(track.end - track.start - track.measured_ms + moved_ms) / 1000,
        utilization_pct=track.util_ms / track.util_known_ms if track.util_known_ms else None,
        memory_peak_gib=None if peak is None else peak / MIB_PER_GIB,
        memory_total_gib=None if total is None else total / MIB_PER_GIB,
        longest_idle_s=max(0, longest_ms) / 1000 if track.measured_ms else None,
        activity_pct=track.activity_pct,
    )


def idle_windows(gpus: Sequence[GpuUse], tracks: Sequence[GpuTrack], slack_ms: int) -> tuple[IdleWindow, ...]:
    """Return the longest idle windows of the GPUs, the longest first.

    Windows of several GPUs whose starts and ends differ by at most ``slack_ms`` are one, with the times of the longest.
    """
    every = sorted(
        (
            (end - start, -start, end, number)
            for number, track in enumerate(tracks)
            for start, end in track.windows
            if end - start >= LEAST_WINDOW_S * 1000
        ),
        reverse=True,
    )
    samples: list[tuple[int, int, list[int]]] = []
    for _, negative, end, number in every:
        start = -negative
        window = next(
            (each for each in samples
             if abs(each[0] - start) <= slack_ms and abs(each[1] - end) <= slack_ms and number not in each[2]), None,
        )  # fmt: skip
        if window is not None:
            window[2].append(number)
        elif len(samples) < MOST_WINDOWS:
            samples.append((start, end, [number]))
    return tuple(
        IdleWindow(_moment(start), _moment(end), tuple(gpus[number].name for number in sorted(numbers)))
        for start, end, numbers in samples
    )


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def uses(row: Row, facts: RunFacts, steps: Sequence[Row], gpus: Sequence[GpuUse]) -> tuple[ResourceUse, ...]:
    """Return what an attempt (a row of ``JOBS``) used; GPU uses only if it had or may have had GPUs."""
    resource_uses = [_time_limit(row, facts), _cpu(row, facts), _memory(row, facts, steps)]
    if row["gpus"] != 0 or gpus:
        resource_uses += _gpu_uses(row, gpus)
    return tuple(resource_uses)


def ran_s(row: Row, facts: RunFacts) -> float:
    """Return the running time without the time for which Slurm had suspended the job."""
    return max(0.0, (facts.elapsed_s or 0.0) - (row["suspended_s"] or 0))


def _time_limit(row: Row, facts: RunFacts) -> ResourceUse:
    limit, ran = row["timelimit_s"], ran_s(row, facts)
    if not limit:
        return ResourceUse("time_limit", None, ran, None, "s", "no-limit")
    return ResourceUse("time_limit", ran / limit, ran, float(limit), "s")


def _cpu(row: Row, facts: RunFacts) -> ResourceUse:
    hours = None if not row["cpus"] else row["cpus"] * ran_s(row, facts) / 3600
    if facts.running or row["total_cpu_s"] is None or not hours:
        return ResourceUse("cpu", None, None, hours, "core-hours", "running" if facts.running else "not-recorded")
    return ResourceUse("cpu", row["total_cpu_s"] / 3600 / hours, row["total_cpu_s"] / 3600, hours, "core-hours")


def _memory(row: Row, facts: RunFacts, steps: Sequence[Row]) -> ResourceUse:
    memory_bytes = row["alloc_mem_bytes"] or row["req_mem_bytes"]
    total = memory_bytes / GIB if memory_bytes else None
    peak = _peak(row, steps)
    if facts.running or peak is None or total is None:
        return ResourceUse("memory", None, None, total, "GiB", "running" if facts.running else "not-recorded")
    tasks = max((step["tasks"] or 1 for step in steps if step["max_rss_bytes"] is not None), default=1)
    return ResourceUse("memory", peak / GIB / total, peak / GIB, total, "GiB", note="" if tasks == 1 else "at most")


def _peak(row: Row, steps: Sequence[Row]) -> float | None:
    """Return the peak memory of the largest step, bytes: an upper limit where a step has several tasks."""
    step_bytes = [step["max_rss_bytes"] * (step["tasks"] or 1) for step in steps if step["max_rss_bytes"] is not None]
    if step_bytes:
        return float(max(step_bytes))
    return None if row["max_rss_bytes"] is None else float(row["max_rss_bytes"] * (row["nodes"] or 1))


def _gpu_uses(row: Row, gpus: Sequence[GpuUse]) -> list[ResourceUse]:
    measured_s = sum(gpu.measured_s for gpu in gpus)
    if measured_s <= 0:
        reason = "not-measured" if gpus else "not-mapped" if row["gpus"] else "not-counted"
        units = {"gpu_busy": "GPU-hours", "gpu_utilization": "%", "gpu_memory": "GiB"}
        return [ResourceUse(key, None, None, None, unit, reason) for key, unit in units.items()]
    busy_s = sum(gpu.busy_s for gpu in gpus)
    share = measured_share(row["gpus"], gpus)
    note = f"{percent(share)} measured" if share < BARELY_MEASURED else ""
    return [
        ResourceUse("gpu_busy", busy_s / measured_s, busy_s / 3600, measured_s / 3600, "GPU-hours", note=note),
        _utilization(gpus),
        _gpu_memory(gpus),
    ]


def measured_share(count: int | None, gpus: Sequence[GpuUse]) -> float:
    """Return the measured share of the GPU time of ``count`` allocated GPUs, 0-1."""
    whole_s = max((gpu.measured_s + gpu.unknown_s for gpu in gpus), default=0.0) * max(count or 0, len(gpus))
    return min(1.0, sum(gpu.measured_s for gpu in gpus) / whole_s) if whole_s > 0 else 0.0


def _utilization(gpus: Sequence[GpuUse]) -> ResourceUse:
    use_times = [(gpu.utilization_pct, gpu.measured_s) for gpu in gpus if gpu.utilization_pct is not None]
    weight = sum(seconds for _, seconds in use_times)
    if weight <= 0:
        return ResourceUse("gpu_utilization", None, None, None, "%", "no-signal")
    mean = sum(pct * seconds for pct, seconds in use_times) / weight
    return ResourceUse("gpu_utilization", mean / 100, mean, 100.0, "%")


def _gpu_memory(gpus: Sequence[GpuUse]) -> ResourceUse:
    if any(gpu.shared for gpu in gpus):
        return ResourceUse("gpu_memory", None, None, None, "GiB", "shared")
    measured = [
        (gpu.memory_peak_gib / gpu.memory_total_gib, gpu.memory_peak_gib, gpu.memory_total_gib)
        for gpu in gpus
        if gpu.memory_peak_gib is not None and gpu.memory_total_gib
    ]
    if not measured:
        return ResourceUse("gpu_memory", None, None, None, "GiB", "no-signal")
    share, peak, total = max(measured)
    return ResourceUse("gpu_memory", share, peak, total, "GiB", note="of the fullest GPU" if len(gpus) > 1 else "")


def verdict(row: Row, facts: RunFacts, used: Sequence[ResourceUse], gpus: Sequence[GpuUse], site: SiteSettings) -> str:
    """Return one sentence on how well the allocation was used."""
    by_key = {use.key: use for use in used}
    if "gpu_busy" not in by_key:
        return _cpu_verdict(by_key["cpu"], by_key["memory"], site, running=facts.running)
    busy, count = by_key["gpu_busy"], max(row["gpus"] or 0, len(gpus))
    if busy.share is None or not busy.total:
        return "Unknown: its GPUs were not measured." if gpus else "Unknown: which GPUs the job had is not known."
    idle_h, measured_h = sum(gpu.idle_s for gpu in gpus) / 3600, busy.total
    share = measured_share(row["gpus"], gpus)
    only = f" Only {percent(share)} of its GPU time was measured." if share < BARELY_MEASURED else ""
    so_far = " so far" if facts.running else ""
    unused = sum(gpu.used is False for gpu in gpus)
    hours = f"{figure(idle_h)} of {figure(measured_h)} GPU-hours were idle{so_far}"
    util = by_key["gpu_utilization"]
    if unused and unused == count:
        its = "its GPU" if count == 1 else f"none of its {count} GPUs"
        text = f"Not used: {its} was {'never' if count == 1 else 'ever'} active{so_far}; {hours}."
    elif unused:
        were = "was" if unused == 1 else "were"
        text = f"Partly used: {unused} of {count} GPUs {were} never active{so_far}; {hours}."
    elif idle_h >= MOSTLY_IDLE * measured_h:
        text = f"Mostly idle: {hours}."
    elif idle_h >= IDLE_AT_TIMES * measured_h:
        text = f"Idle at times: {hours}."
    elif util.used is not None and util.used < site.gpu_efficiency_pct:
        text = f"Active, but little used: the mean utilization of its GPUs was {percent(util.used / 100)}{so_far}."
    else:
        its = "its GPU was" if count == 1 else "its GPUs were"
        text = f"Well used: {its} busy for {percent(busy.share)} of the measured time{so_far}."
    return text + only


def _cpu_verdict(cpu: ResourceUse, memory: ResourceUse, site: SiteSettings, *, running: bool) -> str:
    if cpu.share is None:
        why = "while it runs, accounting has no CPU time of it" if running else "accounting has no CPU time of it"
        return f"Unknown: {why}."
    text = f"{percent(cpu.share)} of its core time"
    text += "" if memory.share is None else f" and {percent(memory.share)} of its memory"
    return f"{'Well used' if 100 * cpu.share >= site.cpu_efficiency_pct else 'Little used'}: it used {text}."


def advise(  # noqa: PLR0917 - the facts of the attempt
    row: Row,
    facts: RunFacts,
    gpus: Sequence[GpuUse],
    tracks: Sequence[GpuTrack],
    findings: Sequence[Finding],
    site: SiteSettings,
    *,
    batch: bool | None,
    suspended: bool,
) -> tuple[Advice, ...]:
    """Return what to change, the advice that saves most GPU-hours first.

    ``batch``: submitted with a script; ``None``: unknown. ``suspended``: the job was suspended by an agent, so it has
    the option. Advice for the same idle time overlaps.
    """
    advice: list[Advice] = []
    fewer = _fewer_gpus(row, gpus)
    if fewer is not None:
        advice.append(fewer)
    suspend = None if suspended else _suspend(row, batch, gpus, tracks, facts, site)
    if suspend is not None:
        advice.append(suspend)
    texts: set[str] = set()
    for finding in findings:
        text = finding.advice
        if finding.kind in IDLE_KINDS and (suspend is not None or fewer is not None) and not facts.running:
            continue  # the same idle time
        if finding.kind in ("host-memory", "memory-per-gpu"):
            text = f"{finding.evidence[0].text}; {finding.evidence[1].text}. {finding.advice}"
        if text and text not in texts and not (finding.kind == "host-memory" and "memory-per-gpu" in texts):
            texts.update((text, finding.kind))
            hours = finding.held_gpu_hours if finding.kind in IDLE_KINDS else None
            advice.append(Advice(finding.kind, text, hours))
    return tuple(sorted(advice, key=lambda each: -(each.gpu_hours or 0.0)))


def _fewer_gpus(row: Row, gpus: Sequence[GpuUse]) -> Advice | None:
    """Return the advice on GPUs that were never active.

    Only if all GPUs are known and measured almost throughout: an unmeasured hour may have been the busy one.
    """
    count = row["gpus"] or 0
    unused = [gpu for gpu in gpus if gpu.used is False]
    if count != len(gpus) or not unused or any(gpu.shared for gpu in gpus):
        return None
    if any(gpu.unknown_s > (1 - BARELY_MEASURED) * (gpu.measured_s + gpu.unknown_s) for gpu in gpus):
        return None
    used_count = count - len(unused)
    hours = sum(gpu.measured_s + gpu.unknown_s for gpu in unused) / 3600
    text = f"{counted(count, 'GPU')} requested, {used_count} used: request {used_count}."
    if not used_count:
        text = f"{counted(count, 'GPU')} requested, none used: does the program find {'it' if count == 1 else 'them'}?"
    return Advice("request-fewer-gpus", text, hours)


def _suspend(  # noqa: PLR0917
    row: Row,
    batch: bool | None,
    gpus: Sequence[GpuUse],
    tracks: Sequence[GpuTrack],
    facts: RunFacts,
    site: SiteSettings,
) -> Advice | None:
    """Return the advice to let the job be suspended while all its GPUs are idle at once.

    The option takes batch jobs on one node (``docs/for-users.md``), and frees the GPUs once they have been idle for the
    window.
    """
    count = row["gpus"] or 0
    if not site.suspends or batch is False or row["nodes"] != 1 or not count or count != len(gpus):
        return None
    if "--gpu-suspend-idle" in (row["submit_line"] or "") or row["suspended_s"] or any(gpu.shared for gpu in gpus):
        return None
    common = [(low, high) for low, high in together([track.windows for track in tracks])
              if (high - low) / 1000 > SUSPEND_WINDOW_S]  # fmt: skip
    saved = sum((high - low) / 1000 - SUSPEND_WINDOW_S for low, high in common) * count / 3600
    if saved < WORTH_GPU_HOURS:
        return None
    low, high = max(common, key=lambda window: (window[1] - window[0], window[1]))
    # Samples need not reach the end of the run to the millisecond.
    at_end = tracks[0].end - high <= SUSPEND_WINDOW_S * 1000
    whole = high - low >= 0.99 * (tracks[0].end - tracks[0].start)
    when = "all the time" if whole else "until now" if facts.running else "at the end"
    when = when if whole or at_end else "without interruption"
    who = "Its GPU was" if count == 1 else f"Its {count} GPUs were"
    window_count = f" ({len(common)} such windows)" if len(common) > 1 else ""
    util = f",util={site.idle_pct:g}" if site.idle_pct else ""
    option = f"--gpu-suspend-idle={span(SUSPEND_WINDOW_S)}{util}"
    return Advice(
        "suspend-idle", f"{who} idle for {span((high - low) / 1000)} {when}{window_count}: {option} frees them.", saved
    )
