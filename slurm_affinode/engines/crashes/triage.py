"""Triage of a job that failed: which memory ran out, how much was requested and free, who held it, what to change.

The failures in the logs of a job are joined with its accounting and the last metrics before its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurm_affinode.base.text_templates import TextTable
from slurm_affinode.engines.crashes.crash_log import KINDS, LogFailure, LogFindings, StartupFacts
from slurm_affinode.model.finding import plain

TEXTS = TextTable.of(__package__, "texts.toml")
MEMORIES: Mapping[str, str] = TEXTS.tables["memory"]
"""Memory -> its name, for users."""

_NEAR_LIMIT = 0.9
"""MaxRSS is sampled every JobAcctGatherFrequency seconds (default 30), so the last peak before the end is missed. From
this share of the limit on it supports that the limit was reached."""
_STATES = {
    "OUT_OF_MEMORY": "job-memory-limit",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure",
    "CANCELLED": "canceled",
}
"""State of a job -> the failure that Slurm recorded with it."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Accounting of one attempt of a job. ``None`` is unknown."""

    job_id: int
    state: str | None
    exit_code: int | None = None
    exit_signal: int | None = None
    start: datetime | None = None
    end: datetime | None = None
    max_rss_bytes: int | None = None
    memory_bytes: int | None = None
    """Allocated by Slurm, on all nodes."""
    nodes: int | None = None
    steps: tuple[tuple[str, str], ...] = ()
    """Step and its state, of the steps that failed."""
    cluster: str | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.end is None and self.state in ("RUNNING", "COMPLETING", "SUSPENDED", "PENDING")


@dataclass(frozen=True, slots=True)
class LastMetrics:
    """The last sample of an engine or GPU of the job before it failed, or before now."""

    time: datetime
    source: str
    """The engine with its address (``vllm at gpu01:8000``), or the UUID of the GPU."""
    figures: tuple[tuple[str, float | None], ...]
    """Column of the samples, or ``failed_scrapes``: those after the last sample -> value; ``None`` is unknown."""


@dataclass(frozen=True, slots=True)
class CrashTriage:
    """The result of a triage. Sizes are bytes; ``None`` is unknown."""

    kind: str | None
    """A key of ``crash_log.KINDS``; ``None``: no failure was found."""
    memory: str | None
    """The memory that ran out: a key of ``MEMORIES``."""
    summary: str
    confidence: float
    """0-1."""
    requested: float | None
    free: float | None
    total: float | None
    holders: tuple[tuple[str, float], ...]
    """Process -> its memory, of the memory that ran out; the largest first."""
    advice: tuple[str, ...]
    doubts: tuple[str, ...]
    cause: LogFailure | None
    failures: tuple[LogFailure, ...]
    """All failures, in the order of the logs."""
    startup: StartupFacts
    job: JobOutcome | None
    metrics: tuple[LastMetrics, ...]
    logs: tuple[tuple[str, int], ...]
    """Name of a log and its bytes."""

    def as_json(self) -> dict[str, Any]:
        """Return the triage as JSON values."""
        row: dict[str, Any] = plain(self)
        row["metrics"] = [
            {**plain(last_metrics), "figures": dict(last_metrics.figures)} for last_metrics in self.metrics
        ]
        row["holders"] = [{"process": name, "bytes": held_bytes} for name, held_bytes in self.holders]
        row["logs"] = [{"log": name, "bytes": read} for name, read in self.logs]
        return row


def triage(
    logs: Sequence[LogFindings], job: JobOutcome | None = None, metrics: Sequence[LastMetrics] = ()
) -> CrashTriage:
    """Return the cause of a failure, from the logs of a job, its accounting, and the last metrics.

    Failures that name another job are left out. The cause is the first failure of the lowest rank; Slurm's own record
    (OUT_OF_MEMORY, TIMEOUT, ...) decides where it has one.
    """
    failures = tuple(
        failure for log in logs for failure in log.failures if job is None or failure.job in (None, job.job_id)
    )
    started = [log.startup for log in logs if log.startup != StartupFacts()]
    # Logs of several engines: the advice must not be computed from the figures of another one.
    startup = started[0] if started and all(facts == started[0] for facts in started) else StartupFacts()
    cause, kind = _cause(failures, job)
    cause = _detailed(cause, failures)
    memory = None if kind is None else KINDS[kind].memory
    requested, free, total = (getattr(cause, name, None) for name in ("requested", "free", "total"))
    if memory == "job" and job is not None:
        total = total or job.memory_bytes
    return CrashTriage(
        kind=kind,
        memory=memory,
        summary=_no_failure(job) if kind is None else _summary(kind, cause, job),
        confidence=_confidence(kind, cause, failures, job),
        requested=requested,
        free=free,
        total=total,
        holders=_holders(cause, job) if memory in ("gpu", "job", "node") else (),
        advice=() if kind is None else _advice(kind, cause, failures, job),
        doubts=_doubts(kind, cause, failures, job),
        cause=cause,
        failures=failures,
        startup=startup,
        job=job,
        metrics=tuple(metrics),
        logs=tuple((log.log, log.bytes) for log in logs),
    )


def _cause(failures: Sequence[LogFailure], job: JobOutcome | None) -> tuple[LogFailure | None, str | None]:
    recorded = None if job is None or job.state is None else _STATES.get(job.state)
    if recorded is not None:
        named = next((failure for failure in failures if failure.kind == recorded), None)
        # scancel and the time limit often end what had failed already: then the failure in the log is the cause.
        if named is not None or recorded == "job-memory-limit":
            earlier = _first(failures) if recorded == "canceled" else None
            if earlier is not None and earlier.rank == 0:
                return earlier, earlier.kind
            return named, recorded
        before = _first([failure for failure in failures if failure.rank < KINDS[recorded].rank])
        return (before, before.kind) if before is not None else (None, recorded)
    if job is not None and job.state == "COMPLETED" and not _has_failed(failures, job):
        return None, None
    cause = _first([failure for failure in failures if failure.kind != "retraction"])
    return (None, None) if cause is None else (cause, cause.kind)


def _has_failed(failures: Sequence[LogFailure], job: JobOutcome) -> bool:
    """Return whether an engine or a step failed, although the batch script ended with status 0.

    A script may cancel the step of its server at its end.
    """
    return any(state != "CANCELLED" for _, state in job.steps) or any(
        failure.kind == "engine-ended" for failure in failures
    )


def _detailed(cause: LogFailure | None, failures: Sequence[LogFailure]) -> LogFailure | None:
    """Return a message about the same failure that says how much memory was requested or held, else ``cause``."""
    if cause is None or cause.measured:
        return cause
    return next((failure for failure in failures if failure.kind == cause.kind and failure.measured), cause)


def _first(failures: Sequence[LogFailure]) -> LogFailure | None:
    ranks = [failure.rank for failure in failures]
    return None if not ranks else failures[ranks.index(min(ranks))]


def _no_failure(job: JobOutcome | None) -> str:
    """Return the summary where no failure is known."""
    if job is not None and job.state == "COMPLETED" and all(state == "CANCELLED" for _, state in job.steps):
        return TEXTS.text("summary.handled", {})
    if job is not None and job.exit_signal:
        return TEXTS.text("summary.signal", {"signal": job.exit_signal})
    if job is not None and job.exit_code:
        return TEXTS.text("summary.status", {"status": job.exit_code})
    return TEXTS.text("summary.nothing", {})


def _summary(kind: str, cause: LogFailure | None, job: JobOutcome | None) -> str:
    names = ("requested", "free", "total", "requested_tokens", "free_tokens")
    values = {name: _rounded(getattr(cause, name, None)) for name in names}
    limit = job.memory_bytes if kind == "job-memory-limit" and job is not None else None
    return TEXTS.text("summary.failure", {
        "meaning": TEXTS.entry(f"{kind}.meaning"),
        "process": None if cause is None or cause.process is None else _process(cause),
        "figures": ", ".join(TEXTS.texts("summary.figures", {**values, "limit": limit})) or None,
    })  # fmt: skip


def _rounded(count: float | None) -> int | None:
    return None if count is None else round(count)


def _process(failure: LogFailure) -> str:
    if failure.pid is None:
        return failure.process or "?"
    return f"PID {failure.pid}" if failure.process is None else f"{failure.process}, PID {failure.pid}"


def _confidence(
    kind: str | None, cause: LogFailure | None, failures: Sequence[LogFailure], job: JobOutcome | None
) -> float:
    """Half for a text that names the cause, the rest for accounting, and for the absence of another cause."""
    if kind is None:
        return 0.0
    rank = KINDS[kind].rank
    named = 0.0 if cause is None else 0.5 if rank <= 1 else 0.3
    recorded = 0.0
    if job is not None and job.state is not None:
        agrees = _STATES.get(job.state) == kind or (job.state == "FAILED" and rank in (0, 2, 3, 4))
        recorded = 0.3 if agrees else 0.1 if job.running else 0.0
        if cause is None and agrees:
            recorded = 0.6
    kinds = {failure.kind for failure in failures if failure.rank == rank}
    alone = 0.2 if len(kinds) <= 1 else 0.05
    return round(min(1.0, named + recorded + alone), 2)


def _holders(cause: LogFailure | None, job: JobOutcome | None) -> tuple[tuple[str, float], ...]:
    holders: list[tuple[str, float]] = []
    if cause is not None:
        holders += [(f"PID {pid}", held_bytes) for pid, held_bytes in cause.holders]
        if cause.used is not None:
            who = TEXTS.entry("holder.job" if cause.memory == "job" else "holder.process")
            holders.append((_process(cause) if cause.pid or cause.process else who, cause.used))
    if not holders and job is not None and job.max_rss_bytes is not None and (cause is None or cause.memory == "job"):
        holders.append((TEXTS.entry("holder.task"), float(job.max_rss_bytes)))
    return tuple(sorted(holders, key=lambda holder: -holder[1]))


def _doubts(
    kind: str | None, cause: LogFailure | None, failures: Sequence[LogFailure], job: JobOutcome | None
) -> tuple[str, ...]:
    completed = job is not None and job.state == "COMPLETED"
    max_rss = _max_rss_below_limit(job) if kind == "job-memory-limit" else None
    requested, free = (None, None) if cause is None else (cause.requested, cause.free)
    enough_free = requested is not None and free is not None and free >= requested
    return TEXTS.texts("doubt.all", {
        "status": _if(completed and cause is not None),
        "completed": _if(completed and cause is None and any(failure.rank == 0 for failure in failures)),
        "running": _if(job is not None and job.running and cause is not None),
        "max_rss": max_rss,
        "limit": None if job is None else job.memory_bytes,
        "enough_free": _if(kind == "gpu-out-of-memory" and enough_free),
        "others": _other_memories(kind, cause, failures),
    })  # fmt: skip


def _if(condition: bool) -> bool | None:
    """Return the value of a text that depends on a condition."""
    return condition or None


def _max_rss_below_limit(job: JobOutcome | None) -> int | None:
    """Return the sampled peak of memory in bytes if it contradicts that the limit was reached."""
    if job is None or not job.max_rss_bytes or not job.memory_bytes:
        return None
    return job.max_rss_bytes if job.max_rss_bytes / job.memory_bytes < _NEAR_LIMIT else None


def _other_memories(kind: str | None, cause: LogFailure | None, failures: Sequence[LogFailure]) -> str | None:
    """Return the names of further memories that ran out according to the logs."""
    if cause is None or kind is None or KINDS[kind].rank != 0:
        return None
    names = {MEMORIES[failure.memory] for failure in failures if failure.memory and failure.memory != cause.memory}
    return " and ".join(sorted(names)) or None


def _advice(
    kind: str, cause: LogFailure | None, failures: Sequence[LogFailure], job: JobOutcome | None
) -> tuple[str, ...]:  # fmt: skip
    if "advice" not in TEXTS.tables[kind]:
        return ()
    worker_failed = any(failure.kind in ("worker-ended", "shared-memory") for failure in failures)
    return TEXTS.texts(f"{kind}.advice", {
        **_memory_of_others(cause),
        **_free_share(cause),
        "length": None if cause is None else cause.max_length or None,
        "limit": None if job is None else job.memory_bytes,
        "workers": _if(worker_failed),
    })  # fmt: skip


def _memory_of_others(cause: LogFailure | None) -> dict[str, int | None]:
    """Return the values of advice on memory that other processes, or the allocator, held."""
    holders = () if cause is None else cause.holders
    held_bytes, alone = round(sum(count for _, count in holders)), len(holders) == 1
    unused = None
    if cause is not None and cause.unused and cause.requested and cause.unused >= cause.requested:
        unused = round(cause.unused)
    return {
        "held_alone": held_bytes if alone else None, "held": held_bytes,
        "holders": len(holders) if len(holders) > 1 else None, "unused": unused,
    }  # fmt: skip


_USEFUL_SHARE = 0.1
"""Share of a GPU's memory below which no engine can work."""


def _free_share(cause: LogFailure | None) -> dict[str, float | None]:
    """Return the values of advice on the share of GPU memory that was free."""
    if cause is None or cause.free is None or not cause.total:
        return {"share_unknown": True, "too_little": None, "share": None}
    # Rounded down: the share has to fit.
    share = math.floor(cause.free / cause.total * 100) / 100
    useful = share >= _USEFUL_SHARE
    return {"share_unknown": None, "too_little": _if(not useful), "share": share if useful else None}
