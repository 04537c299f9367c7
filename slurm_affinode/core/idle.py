"""Whether a job's GPUs are idle, and for how long: from samples to a window, without a clock and without I/O.

Rules:

- A signal is idle at or below its limit. A GPU is busy when one signal is above; idle when at least ``min_signals``
  signals could be read, none is above, and it has no fault; else unknown. One metric alone decides nothing.
- A job is busy when one of its GPUs, or its host activity where that is considered, is busy; unknown when none is busy
  and one is unknown; else idle. A GPU that did not answer is unknown.
- A window begins with an idle sample and reaches to the last idle sample. A busy sample ends it. An unknown sample is
  as none: it adds nothing, and when idle samples lie more than ``max_gap_s`` apart, the window begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slurm_affinode.model.signals import GPU_SIGNALS


class Verdict(StrEnum):
    """What one sample says."""

    IDLE = "idle"
    BUSY = "busy"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """One GPU at one moment. A signal that is absent, or ``None``, could not be read."""

    name: str
    """Shown to people: ``GPU 0``."""
    signals: Mapping[str, float | None]
    used_bytes: int | None = None
    """Memory that is held on it: reported, and never a reason."""
    fault: str | None = None
    """Why what it shows cannot be believed, or cannot be read: it is unknown, unless a signal says that it is busy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All GPUs of a job, and its host activity, at one moment."""

    time_s: float
    """Of a clock that only goes forward."""
    gpus: tuple[GpuActivity, ...]
    """``()``: which GPUs the job has is not known."""
    host: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IdleRule:
    """What counts as idle for one job."""

    window_s: float
    util_pct: float = 0.0
    """Limit of every GPU signal, from the job's option."""
    floors_pct: Mapping[str, float] = field(default_factory=dict)
    """Limit of a signal where that is higher than ``util_pct``: what the site takes for noise."""
    host_limits: Mapping[str, float] = field(default_factory=dict)
    """Limits of the host signals that are considered; the others are not."""
    max_gap_s: float = 20.0
    min_signals: int = 2

    def limit(self, signal: str) -> float:
        """The limit of a GPU signal in percent."""
        return max(self.util_pct, self.floors_pct.get(signal, 0.0))


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal as it was judged."""

    of: str
    """``GPU 0`` or ``host``."""
    name: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> Verdict:
        """What this signal says by itself, at this moment."""
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
    """What is known after a sample."""

    time_s: float
    """Of the newest sample."""
    verdict: Verdict
    why: str
    """What made the newest sample busy or unknown; empty when it was idle."""
    window_s: float
    """How long the window has to be."""
    since_s: float | None
    """Beginning of the window; ``None``: there is none."""
    seen_s: float | None
    """The last idle sample of the window."""
    signals: tuple[Signal, ...]
    """Of the newest sample."""
    used_bytes: int | None
    """Memory held on all GPUs; ``None`` where one does not tell."""
    broken: str = ""
    """What ended the last window."""

    @property
    def progress_s(self) -> float:
        """Length of the window so far."""
        return 0.0 if self.since_s is None or self.seen_s is None else self.seen_s - self.since_s

    @property
    def remaining_s(self) -> float:
        """How much longer it has to be idle."""
        return max(0.0, self.window_s - self.progress_s)

    @property
    def reached(self) -> bool:
        """The window is full, and the newest sample is part of it."""
        return self.verdict is Verdict.IDLE and self.since_s is not None and self.progress_s >= self.window_s


def judge(rule: IdleRule, sample: Sample) -> tuple[Verdict, str, tuple[Signal, ...]]:
    """What one sample says by itself, why it is not idle, and every signal in it."""
    signals: list[Signal] = []
    busy: list[str] = []
    unknown: list[str] = []
    for gpu in sample.gpus:
        ours = [
            Signal(gpu.name, name, gpu.signals.get(name), rule.limit(name))
            for name in GPU_SIGNALS
            if name in gpu.signals
        ]
        signals += ours
        busy += [str(signal) for signal in ours if signal.verdict is Verdict.BUSY]
        known = sum(signal.value is not None for signal in ours)
        if gpu.fault is not None:
            unknown.append(f"{gpu.name}: {gpu.fault}")
        elif known < rule.min_signals:
            unknown.append(f"{gpu.name}: {known} of the {rule.min_signals} signals needed could be read")
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
    """The state after one more sample; ``before`` is the state until then."""
    verdict, why, signals = judge(rule, sample)
    since = None if before is None else before.since_s
    seen = None if before is None else before.seen_s
    broken = "" if before is None else before.broken
    if since is not None and seen is not None and not 0 <= sample.time_s - seen <= rule.max_gap_s:
        since = seen = None
        broken = f"no sample said for more than {rule.max_gap_s:g} s that it was idle"
    if verdict is Verdict.BUSY:
        if since is not None or before is None:
            broken = why
        since = seen = None
    elif verdict is Verdict.IDLE:
        since = sample.time_s if since is None else since
        seen = sample.time_s
    used = [gpu.used_bytes for gpu in sample.gpus]
    known = [one for one in used if one is not None]
    return IdleState(
        time_s=sample.time_s,
        verdict=verdict,
        why=why,
        window_s=rule.window_s,
        since_s=since,
        seen_s=seen,
        signals=signals,
        used_bytes=sum(known) if known and len(known) == len(used) else None,
        broken=broken,
    )


def still_idle(rule: IdleRule, sample: Sample) -> str | None:
    """The look just before acting: ``None`` where the sample is idle, else what it shows. Unknown is not idle."""
    verdict, why, _ = judge(rule, sample)
    return None if verdict is Verdict.IDLE else why


class IdleDetector:
    """Feeds samples of one job through ``observe`` and keeps the state between them."""

    def __init__(self, rule: IdleRule) -> None:
        self.rule = rule
        self.state: IdleState | None = None

    def feed(self, sample: Sample) -> IdleState:
        """Take a sample."""
        self.state = observe(self.rule, self.state, sample)
        return self.state

    def restart(self) -> None:
        """Forget the window: what was before does not count any more."""
        self.state = None
