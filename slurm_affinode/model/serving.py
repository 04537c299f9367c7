"""Inference engines and what is diagnosed about them.

``None`` is unknown and never counts for or against an engine. Times are aware UTC, spans are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurm_affinode.model.finding import Evidence, plain

DIAGNOSES: Mapping[str, str] = {
    "healthy": "the engine serves its requests",
    "idle": "the engine holds GPU memory and serves no requests",
    "asleep": "the engine is in a sleep state and holds little GPU memory",
    "kv-saturated": "the KV cache is effectively full",
    "batch-full": "the batch is full and requests wait",
    "queue-unstable": "requests arrive faster than they are served, and the queue grows",
    "recovering": "the queue that an overload left gets shorter",
    "preemption-storm": "requests are preempted again and again",
    "request-too-large": "a request needs more than the whole KV cache",
    "swap-thrashing": "requests are swapped between GPU and host memory again and again",
    "stalled": "requests are held and none makes progress",
    "out-of-memory": "the engine ended because memory ran out",
    "ended": "the server no longer responds",
    "orphaned-engine": "the server has ended, but its engine still holds the GPU",
    "memory-leak": "host memory of the server grows without bound",
    "squatter-signature": "GPU memory is nearly full and nothing computes while the job runs",
}
"""Kind of diagnosis -> its meaning, for users."""

SEVERITIES: Mapping[str, str] = {
    "healthy": "none", "asleep": "none",
    "idle": "warning", "kv-saturated": "warning", "batch-full": "warning", "recovering": "warning",
    "memory-leak": "warning", "squatter-signature": "warning",
    "queue-unstable": "critical", "preemption-storm": "critical", "request-too-large": "critical",
    "swap-thrashing": "critical", "stalled": "critical", "out-of-memory": "critical", "ended": "critical",
    "orphaned-engine": "critical",
}  # fmt: skip
"""Kind of diagnosis -> its severity."""
BY_SEVERITY = ("critical", "warning", "none")
"""The severities, most severe first."""

LOADED = frozenset({
    "kv-saturated", "batch-full", "queue-unstable", "recovering", "preemption-storm", "swap-thrashing", "stalled",
    "request-too-large",
})  # fmt: skip
"""Kinds of diagnosis of an engine that holds requests."""

PROBLEMS = tuple(kind for kind, severity in SEVERITIES.items() if severity != "none")
"""Kinds of diagnosis that are problems."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Identity of an engine, as in the samples."""

    cluster: str | None
    node: str | None
    address: str
    engine: str
    """``vllm``, ``sglang``, ``tgi``, ``triton``, ``llamacpp``."""
    model: str | None
    """Chosen by the user: untrusted."""
    rank: str | None = None
    """Label of one of several engines behind one address."""


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """A line of a log, or an event of Slurm, that a diagnosis can use."""

    kind: str
    """``gpu-out-of-memory``, ``host-out-of-memory`` or ``request-too-large``."""
    text: str
    """The line: untrusted."""
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One diagnosis of an engine over an interval."""

    kind: str
    """A key of ``DIAGNOSES``."""
    since: datetime
    until: datetime
    """Last sample that supports the diagnosis; the condition may last longer if it is the engine's last one."""
    confidence: float
    """0-1: how much of the evidence that the rule asks for was measured and agrees."""
    evidence: tuple[Evidence, ...]
    rule: str
    """The rule in one or two sentences, for users."""
    summary: str
    """The result with its figures, in one sentence."""
    advice: str = ""
    figures: tuple[tuple[str, float], ...] = ()
    """Named figures, e.g. ``overload``, ``gpu_hours``, ``lost_tokens_per_s``."""
    doubt: str = ""
    """Doubts: facts that contradict the diagnosis, or limit it."""

    def __post_init__(self) -> None:
        if self.kind not in DIAGNOSES:
            raise ValueError(f"{self.kind} is not a kind of diagnosis")

    @property
    def severity(self) -> str:
        """``none``, ``warning`` or ``critical``."""
        return SEVERITIES[self.kind]

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values: times in ISO 8601 with ``Z``; figures as an object."""
        return {
            **plain(self),
            "severity": self.severity,
            "figures": {name: plain(value) for name, value in self.figures},
        }


LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0")  # noqa: S104 - an address to recognize
"""Hosts in addresses of engines that mean the node itself."""

LATE_STEPS = 3
"""Sampling intervals after which a series without samples is unknown."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """An engine with its diagnoses over a period, in the order of their time."""

    key: EngineKey
    job: str | None
    user: str | None
    gpus: tuple[str, ...]
    """UUIDs."""
    since: datetime
    until: datetime
    """First and last sample of the period, failed scrapes included."""
    samples: int
    failed: int
    """Scrapes that failed."""
    diagnoses: tuple[Diagnosis, ...]
    responded: datetime | None = None
    """The last sample without the failed scrapes."""
    step_s: float | None = None
    """Sampling interval; ``None``: unknown."""
    period_end: datetime | None = None
    """End of the examined period; ``None``: the last sample."""

    @property
    def late(self) -> bool:
        """Whether the samples end long before the period: the state at its end is unknown, unless the engine ended."""
        if self.period_end is None or not self.step_s:
            return False
        return (self.period_end - self.until).total_seconds() > LATE_STEPS * self.step_s

    @property
    def current(self) -> tuple[Diagnosis, ...]:
        """Diagnoses that hold at the end of the period, most severe first.

        If the last scrapes failed, and do not show that the server has ended, these are the diagnoses of the load that
        held at the last response: a loaded server responds late.
        """
        holding_jobs = [
            diagnosis
            for diagnosis in self.diagnoses
            if diagnosis.until >= self.until and (diagnosis.kind == "ended" or not self.late)
        ]
        if self.late:
            return tuple(holding_jobs)
        if not holding_jobs and self.responded is not None:
            holding_jobs = [
                diagnosis
                for diagnosis in self.diagnoses
                if diagnosis.kind in LOADED and diagnosis.until >= self.responded
            ]
        return tuple(sorted(holding_jobs, key=lambda diagnosis: BY_SEVERITY.index(diagnosis.severity)))
