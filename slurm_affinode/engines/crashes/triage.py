"""Triage of a job that failed: which memory ran out, how much was requested and free, who held it, what to change.

The failures in the logs of a job are joined with its accounting and the last metrics before its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurm_affinode.base.text import size
from slurm_affinode.engines.crashes.crash_log import KINDS, MEMORIES, LogFailure, LogFindings, StartupFacts
from slurm_affinode.model.finding import plain

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
    """What accounting knows about a run of a job. ``None`` is unknown."""

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
    """The memory that ran out: a key of ``crash_log.MEMORIES``."""
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
        row["metrics"] = [{**plain(one), "figures": dict(one.figures)} for one in self.metrics]
        row["holders"] = [{"process": name, "bytes": held} for name, held in self.holders]
        row["logs"] = [{"log": name, "bytes": read} for name, read in self.logs]
        return row


def triage(
    logs: Sequence[LogFindings], job: JobOutcome | None = None, metrics: Sequence[LastMetrics] = ()
) -> CrashTriage:
    """Return the cause of a failure, from the logs of a job, its accounting, and the last metrics.

    Failures that name another job are left out. The cause is the first failure of the lowest rank; Slurm's own record
    (OUT_OF_MEMORY, TIMEOUT, ...) decides where it has one.
    """
    failures = tuple(one for log in logs for one in log.failures if job is None or one.job in (None, job.job_id))
    started = [log.startup for log in logs if log.startup != StartupFacts()]
    # Logs of several engines: the advice must not be computed from the figures of another one.
    startup = started[0] if started and all(one == started[0] for one in started) else StartupFacts()
    cause, kind = _cause(failures, job)
    cause = _detailed(cause, failures)
    memory = None if kind is None else KINDS[kind][0]
    doubts = list(_doubts(kind, cause, failures, job))
    requested, free, total = (getattr(cause, name, None) for name in ("requested", "free", "total"))
    if memory == "job" and job is not None:
        total = total or job.memory_bytes
    return CrashTriage(
        kind=kind,
        memory=memory,
        summary=_summary(kind, cause, job),
        confidence=_confidence(kind, cause, failures, job),
        requested=requested,
        free=free,
        total=total,
        holders=_holders(cause, job) if memory in ("gpu", "job", "node") else (),
        advice=tuple(_advice(kind, cause, failures, startup, job)),
        doubts=tuple(doubts),
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
        named = next((one for one in failures if one.kind == recorded), None)
        # scancel and the time limit often end what had failed already: then the failure in the log is the cause.
        if named is not None or recorded == "job-memory-limit":
            earlier = _first(failures) if recorded == "canceled" else None
            if earlier is not None and earlier.rank == 0:
                return earlier, earlier.kind
            return named, recorded
        before = _first([one for one in failures if one.rank < KINDS[recorded][1]])
        return (before, before.kind) if before is not None else (None, recorded)
    if job is not None and job.state == "COMPLETED" and not _ended(failures, job):
        return None, None
    found = _first([one for one in failures if one.kind != "retraction"])
    return (None, None) if found is None else (found, found.kind)


def _ended(failures: Sequence[LogFailure], job: JobOutcome) -> bool:
    """Return whether an engine or a step failed, although the batch script ended with status 0.

    A script may cancel the step of its server at its end.
    """
    return any(state != "CANCELLED" for _, state in job.steps) or any(one.kind == "engine-ended" for one in failures)


def _detailed(cause: LogFailure | None, failures: Sequence[LogFailure]) -> LogFailure | None:
    """Return a message about the same failure that says how much memory was requested or held, else ``cause``."""
    if cause is None or cause.measured:
        return cause
    return next((one for one in failures if one.kind == cause.kind and one.measured), cause)


def _first(failures: Sequence[LogFailure]) -> LogFailure | None:
    ranks = [one.rank for one in failures]
    return None if not ranks else failures[ranks.index(min(ranks))]


def _summary(kind: str | None, cause: LogFailure | None, job: JobOutcome | None) -> str:
    if kind is None:
        if job is not None and job.state == "COMPLETED" and all(state == "CANCELLED" for _, state in job.steps):
            return "the job completed; failures in its logs were handled by the program"
        if job is not None and job.exit_signal:
            return f"the job was ended by signal {job.exit_signal}, and its logs name no failure"
        if job is not None and job.exit_code:
            return f"the job ended with status {job.exit_code}, and its logs name no failure"
        return "the logs name no failure; a process that is ended by SIGKILL writes nothing"
    text = KINDS[kind][2]
    who = "" if cause is None or cause.process is None else f" (in {_process(cause)})"
    figures = []
    if cause is not None and cause.requested is not None:
        figures.append(f"{size(round(cause.requested))} requested")
    if cause is not None and cause.free is not None:
        figures.append(f"{size(round(cause.free))} free")
    if cause is not None and cause.total is not None:
        figures.append(f"{size(round(cause.total))} in total")
    if cause is not None and cause.requested_tokens is not None:
        figures.append(f"{cause.requested_tokens:,} tokens requested")
    if cause is not None and cause.free_tokens is not None:
        figures.append(f"{cause.free_tokens:,} free")
    if kind == "job-memory-limit" and job is not None and job.memory_bytes is not None:
        figures.append(f"the limit is {size(job.memory_bytes)}")
    return f"{text}{who}" + (f": {', '.join(figures)}" if figures else "")


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
    rank = KINDS[kind][1]
    named = 0.0 if cause is None else 0.5 if rank <= 1 else 0.3
    recorded = 0.0
    if job is not None and job.state is not None:
        agrees = _STATES.get(job.state) == kind or (job.state == "FAILED" and rank in (0, 2, 3, 4))
        recorded = 0.3 if agrees else 0.1 if job.running else 0.0
        if cause is None and agrees:
            recorded = 0.6
    others = {one.kind for one in failures if one.rank == rank}
    alone = 0.2 if len(others) <= 1 else 0.05
    return round(min(1.0, named + recorded + alone), 2)


def _holders(cause: LogFailure | None, job: JobOutcome | None) -> tuple[tuple[str, float], ...]:
    found: list[tuple[str, float]] = []
    if cause is not None:
        found += [(f"PID {pid}", held) for pid, held in cause.holders]
        if cause.used is not None:
            who = "the job" if cause.memory == "job" else "this process"
            found.append((_process(cause) if cause.pid or cause.process else who, cause.used))
    if not found and job is not None and job.max_rss_bytes is not None and (cause is None or cause.memory == "job"):
        found.append(("largest task (MaxRSS)", float(job.max_rss_bytes)))
    return tuple(sorted(found, key=lambda one: -one[1]))


def _doubts(
    kind: str | None, cause: LogFailure | None, failures: Sequence[LogFailure], job: JobOutcome | None
) -> Sequence[str]:
    doubts = []
    if job is not None and job.state == "COMPLETED":
        if cause is not None:
            doubts.append("the batch script ended with status 0: it did not pass on the status of its program")
        elif any(one.rank == 0 for one in failures):
            doubts.append("the logs report that memory ran out, but the job completed")
    if job is not None and job.running and cause is not None:
        doubts.append("the job has not ended: the program may have handled the failure")
    if kind == "job-memory-limit" and job is not None and job.max_rss_bytes and job.memory_bytes:
        share = job.max_rss_bytes / job.memory_bytes
        if share < _NEAR_LIMIT:
            doubts.append(
                f"MaxRSS is {size(job.max_rss_bytes)} of {size(job.memory_bytes)}: it is sampled and counts one task, "
                "so page cache, /dev/shm, other tasks or a short peak made up the rest"
            )
    wanted, free = (None, None) if cause is None else (cause.requested, cause.free)
    if kind == "gpu-out-of-memory" and wanted is not None and free is not None and free >= wanted:
        doubts.append(
            "as much GPU memory was free as was requested: the process has a limit of its own "
            "(set_per_process_memory_fraction), or another one allocated it for a moment"
        )
    others = sorted({MEMORIES[one.memory] for one in failures if one.memory and cause and one.memory != cause.memory})
    if others and kind is not None and KINDS[kind][1] == 0:
        doubts.append(f"the logs also report {' and '.join(others)}")
    return doubts


def _advice(
    kind: str | None,
    cause: LogFailure | None,
    failures: Sequence[LogFailure],
    startup: StartupFacts,
    job: JobOutcome | None,
) -> Sequence[str]:
    match kind:
        case "gpu-out-of-memory":
            return _gpu_advice(cause)
        case "gpu-memory-at-startup":
            return [
                "another process holds GPU memory: list it with `nvidia-smi`, or ask `slurm-affinode zombies list`",
                *_lower_share(cause),
            ]
        case "no-kv-cache-memory":
            return [
                "weights and activations fill the memory that the engine may use: raise --gpu-memory-utilization "
                "(SGLang: --mem-fraction-static) if GPU memory is free",
                "otherwise use more GPUs (--tensor-parallel-size), a smaller or quantized model, or a smaller "
                "--max-num-batched-tokens (TGI: --max-batch-prefill-tokens)",
            ]
        case "kv-cache-exhausted":
            return [
                "admit fewer requests at a time: lower --max-running-requests or --chunked-prefill-size, or raise "
                "--schedule-conservativeness",
                "or raise --mem-fraction-static if GPU memory is free",
            ]
        case "shutdown":
            return ["if it was not meant to end: see who sent the signal (scancel, the job script, a time limit)"]
        case "kv-cache-too-small":
            length = None if cause is None else cause.max_length
            told = f" to at most {length:,}, the length that fits" if length else ""
            return [
                f"lower --max-model-len{told}",
                "or raise --gpu-memory-utilization if GPU memory is free, or use a smaller KV dtype "
                "(--kv-cache-dtype fp8) or more GPUs",
            ]
        case "job-memory-limit":
            known = "" if job is None or job.memory_bytes is None else f" (it has {size(job.memory_bytes)})"
            advice = [f"request more host memory with --mem{known}"]
            if any(one.kind in ("worker-ended", "shared-memory") for one in failures):
                advice.append("or use fewer data loader workers: each has its own copy of the memory that it changes")
            return [*advice, "files in /dev/shm and on tmpfs count as memory of the job, too"]
        case "node-out-of-memory":
            return ["constrain memory by cgroups (ConstrainRAMSpace=yes), so that no job takes the memory of others"]
        case "host-allocation":
            return [
                "the request exceeds what the job or the node has: check --mem, `ulimit -v`, and the size requested"
            ]
        case "workspace-too-small":
            return [
                "enlarge the workspace: FLASHINFER_WORKSPACE_SIZE, SGLANG_FLASHINFER_WORKSPACE_SIZE or "
                "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, in bytes",
                "or use smaller batches (--chunked-prefill-size, --max-num-batched-tokens)",
            ]
        case "shared-memory":
            return ["enlarge /dev/shm (containers: --shm-size), or use fewer workers or smaller batches"]
        case "disk-full":
            return ["free space or use another file system; TMPDIR and the cache directories are the usual places"]
        case "gpu-fault":
            return ["see the kernel log for XID errors; if they name ECC or row remapping, drain the node"]
        case "time-limit":
            return ["request a longer --time, or save checkpoints; `--gpu-suspend-idle` does not extend a limit"]
        case "collective":
            return ["another rank failed first, or the network did: read the log of the rank that stopped earlier"]
        case "engine-ended" | "worker-ended":
            return ["the process ended without a message: compare the kernel log and `sacct -o State,MaxRSS,ExitCode`"]
        case _:
            return []


_USEFUL_SHARE = 0.1
"""Share of a GPU's memory below which no engine can work."""


def _lower_share(cause: LogFailure | None) -> list[str]:
    if cause is None or cause.free is None or not cause.total:
        return ["or lower --gpu-memory-utilization below the share that is free"]
    # Rounded down: the share has to fit.
    share = math.floor(cause.free / cause.total * 100) / 100
    if share < _USEFUL_SHARE:
        return ["next to nothing is free: end that process, or use another GPU"]
    return [f"or lower --gpu-memory-utilization below the share that is free, {share:.2f}"]


def _gpu_advice(cause: LogFailure | None) -> list[str]:
    advice = []
    if cause is not None and cause.holders:
        held = size(round(sum(one for _, one in cause.holders)))
        others = "another process" if len(cause.holders) == 1 else f"{len(cause.holders)} other processes"
        advice.append(f"{others} held {held} of the GPU: find the job with `slurm-affinode zombies list`")
    if cause is not None and cause.unused and cause.requested and cause.unused >= cause.requested:
        advice.append(
            f"{size(round(cause.unused))} were reserved by PyTorch and not in use, more than was requested: "
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    advice.append(
        "model server: lower --gpu-memory-utilization (SGLang: --mem-fraction-static), so that activations fit beside "
        "the KV cache, or lower --max-num-batched-tokens or --max-num-seqs; raising the share makes this worse"
    )
    advice.append("training: use a smaller batch, gradient checkpointing, or more GPUs")
    return advice
