"""Idle detection: from samples of a job's GPUs to its idle window. Pure.

Rules:

- A signal is idle at or below its limit. A GPU is busy if one signal is above; idle if at least ``min_signals`` signals
  were read, none is above, and it has no fault; else unknown. No metric decides alone.
- A job is busy if one of its GPUs, or its host activity where that is considered, is busy; unknown if none is busy and
  one is unknown; else idle. A GPU that does not respond is unknown.
- A window begins with an idle sample and extends to the last idle sample. A busy sample ends it. An unknown sample
  counts as missing: it does not extend the window, and if idle samples are more than ``max_gap_s`` apart, a new window
  begins.
- A stopped job cannot compute: its samples are unknown, and its window begins anew when it continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slurm_affinode.model.gpu import GPU_SIGNALS

STOPPED = "it is stopped (scontrol suspend, or a signal)"


class Verdict(StrEnum):
    """Result of one sample."""

    IDLE = "idle"
    BUSY = "busy"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """One GPU at one moment. A signal that is absent, or ``None``, could not be read."""

    name: str
    """Display name: ``GPU 0``."""
    signals: Mapping[str, float | None]
    used_bytes: int | None = None
    """GPU memory in use, in bytes: reported, never a criterion."""
    fault: str | None = None
    """Why the readings are unreliable or missing: the GPU is then unknown unless a signal is busy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All GPUs of a job, and its host activity, at one moment."""

    time_s: float
    """Time of a monotonic clock."""
    gpus: tuple[GpuActivity, ...]
    """``()``: the GPUs of the job are not known."""
    host: Mapping[str, float | None] = field(default_factory=dict)
    stopped: bool = False
    """Others have stopped the whole job: Slurm (``scontrol suspend``, gang scheduling), or a signal."""


@dataclass(frozen=True, slots=True)
class IdleRule:
    """Limits for one job."""

    window_s: float
    util_pct: float = 0.0
    """Limit of every GPU signal, from the job's option."""
    floors_pct: Mapping[str, float] = field(default_factory=dict)
    """Limit of a signal where it is higher than ``util_pct``: the site's noise floor."""
    host_limits: Mapping[str, float] = field(default_factory=dict)
    """Limits of the host signals to consider; other host signals are ignored."""
    max_gap_s: float = 20.0
    min_signals: int = 2

    def limit(self, signal: str) -> float:
        """Return the limit of a GPU signal in percent."""
        return max(self.util_pct, self.floors_pct.get(signal, 0.0))


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal with its limit."""

    of: str
    """``GPU 0`` or ``host``."""
    name: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> Verdict:
        """Result of this signal alone, at this moment."""
        if self.value is None:
            return Verdict.UNKNOWN
        return Verdict.IDLE if self.value <= self.limit else Verdict.BUSY

    def __str__(self) -> str:
        """``GPU 0: utilization 37 is above 0``."""
        if self.value is None:
            return f"{self.of}: {self.name} could not be read"
        word = "above" if self.verdict is Verdict.BUSY else "within"
        return f"{self.of}: {self.name} {self.value:g} is {word} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class IdleState:
    """State after a sample."""

    time_s: float
    """Time of the newest sample."""
    verdict: Verdict
    why: str
    """Why the newest sample is busy or unknown; empty if it is idle."""
    window_s: float
    """Required length of the window."""
    since_s: float | None
    """Start of the window; ``None``: there is none."""
    seen_s: float | None
    """Time of the last idle sample of the window."""
    signals: tuple[Signal, ...]
    """Of the newest sample."""
    used_bytes: int | None
    """Memory in use on all GPUs, in bytes; ``None``: a GPU does not report it."""
    broken: str = ""
    """Why the last window ended."""

    @property
    def progress_s(self) -> float:
        """Length of the window so far."""
        return 0.0 if self.since_s is None or self.seen_s is None else self.seen_s - self.since_s

    @property
    def remaining_s(self) -> float:
        """Further idle time that is needed."""
        return max(0.0, self.window_s - self.progress_s)

    @property
    def reached(self) -> bool:
        """Whether the window is complete and includes the newest sample."""
        return self.verdict is Verdict.IDLE and self.since_s is not None and self.progress_s >= self.window_s


def judge(rule: IdleRule, sample: Sample) -> tuple[Verdict, str, tuple[Signal, ...]]:
    """Return the verdict on one sample, why it is not idle, and all its signals."""
    signals: list[Signal] = []
    busy: list[str] = []
    unknown: list[str] = []
    for gpu in sample.gpus:
        readings = [
            Signal(gpu.name, name, gpu.signals.get(name), rule.limit(name))
            for name in GPU_SIGNALS
            if name in gpu.signals
        ]
        signals += readings
        busy += [str(signal) for signal in readings if signal.verdict is Verdict.BUSY]
        readings_known = sum(signal.value is not None for signal in readings)
        if gpu.fault is not None:
            unknown.append(f"{gpu.name}: {gpu.fault}")
        elif readings_known < rule.min_signals:
            unknown.append(f"{gpu.name}: {readings_known} of the {rule.min_signals} signals needed could be read")
    if sample.stopped:
        unknown.insert(0, STOPPED)
    if not sample.gpus:
        unknown.append("which GPUs the job has is not known")
    for name, limit in rule.host_limits.items():
        signal = Signal("host", name, sample.host.get(name), limit)
        signals.append(signal)
        if signal.verdict is Verdict.BUSY:
            busy.append(str(signal))
        elif signal.verdict is Verdict.UNKNOWN:
            unknown.append(str(signal))
    if busy:
        return Verdict.BUSY, busy[0], tuple(signals)
    if unknown:
        return Verdict.UNKNOWN, unknown[0], tuple(signals)
    return Verdict.IDLE, "", tuple(signals)


def observe(rule: IdleRule, before: IdleState | None, sample: Sample) -> IdleState:
    """Return the state after one more sample; ``before`` is the previous state."""
    verdict, why, signals = judge(rule, sample)
    since = None if before is None else before.since_s
    measured_s = None if before is None else before.seen_s
    broken = "" if before is None else before.broken
    if since is not None and measured_s is not None and not 0 <= sample.time_s - measured_s <= rule.max_gap_s:
        since = measured_s = None
        broken = f"no sample for more than {rule.max_gap_s:g} s showed it as idle"
    if verdict is Verdict.BUSY or sample.stopped:
        if since is not None or before is None:
            broken = why
        since = measured_s = None
    elif verdict is Verdict.IDLE:
        since = sample.time_s if since is None else since
        measured_s = sample.time_s
    used = [gpu.used_bytes for gpu in sample.gpus]
    sizes = [size for size in used if size is not None]
    return IdleState(
        time_s=sample.time_s,
        verdict=verdict,
        why=why,
        window_s=rule.window_s,
        since_s=since,
        seen_s=measured_s,
        signals=signals,
        used_bytes=sum(sizes) if sizes and len(sizes) == len(used) else None,
        broken=broken,
    )


def still_idle(rule: IdleRule, sample: Sample) -> str | None:
    """Check again right before acting: return ``None`` if the sample is idle, else why not. Unknown is not idle."""
    verdict, why, _ = judge(rule, sample)
    return None if verdict is Verdict.IDLE else why


class IdleDetector:
    """Feeds the samples of one job to ``observe`` and keeps the state between them."""

    def __init__(self, rule: IdleRule) -> None:
        self.rule = rule
        self.state: IdleState | None = None

    def feed(self, sample: Sample) -> IdleState:
        """Process a sample and return the new state."""
        self.state = observe(self.rule, self.state, sample)
        return self.state

    def restart(self) -> None:
        """Discard the window and all state."""
        self.state = None
