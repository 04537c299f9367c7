"""Rows of ``status``: jobs as plain values for JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slurm_affinode.agent.loop import JobState
from slurm_affinode.agent.workers import WorkOutcome
from slurm_affinode.core.idle import IdleState
from slurm_affinode.core.policy import Decision
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Phase, SuspendOption
from slurm_affinode.suspension import messages, refusals
from slurm_affinode.suspension.activity import name_of
from slurm_affinode.suspension.compatibility import Compatibility
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.records.shared_state import LastRestore, SuspendedJob


def watched(
    job: WatchedJob,
    state: JobState | None,
    decision: Decision | None,
    outcome: WorkOutcome | None,
    *,
    node: str,
    user: str,
    under_way: str | None,
    clock_s: float,
    now_epoch: float,
    asleep: dict[str, Any] | None = None,
    compatibility: Compatibility | None = None,
) -> dict[str, Any]:
    """Return the row of a job that runs on this node, or is suspended in place there (``asleep``).

    Times are seconds since the epoch, spans seconds, sizes bytes.
    """
    idle = None if state is None else state.detector.state
    if asleep is not None:
        under_way, idle, decision = state_in_place(asleep), None, None
    return {
        "job_id": job.job_id,
        "shown_id": job.called,
        "user": user,
        "uid": job.uid,
        "node": node,
        "state": under_way or ("watched" if job.phase is Phase.RUNNING else job.phase.value),
        "option": _option(job.option),
        "gpus": None
        if job.devices is None
        else [{"name": name_of(device), "uuid": device.uuid} for device in job.devices],
        "memory_held_bytes": 0 if asleep is not None else None if idle is None else idle.used_bytes,
        "in_place": asleep,
        "shares_gpus": None if job.slurm is None else job.slurm.shares_gpus,
        "suspensions": job.suspensions,
        "restored": None if job.last_restore is None else _restored(job.last_restore),
        "idle": None if idle is None else _idle(idle, clock_s, now_epoch),
        "next": None if decision is None else _next(decision),
        "compatibility": None if compatibility is None else _compatibility(compatibility, job.option),
        "last": None if outcome is None else {"at": outcome.at_epoch, "done": outcome.succeeded, "text": outcome.text},
        "said": None if job.slurm is None else messages.of_the_past(job.slurm.comment),
    }


def _restored(restore: LastRestore) -> dict[str, Any]:
    """Return the point at which the attempt began. ``lost_s``: work lost with an earlier attempt, if known."""
    started = restore.discarded or restore.fresh
    return {
        "at": restore.restored_epoch,
        "node": restore.node,
        "checkpoint": None if started else restore.checkpoint_epoch,
        "from_start": started,
        "after_loss": restore.again or restore.discarded,
        "lost_s": restore.lost_s,
    }


def state_in_place(asleep: dict[str, Any]) -> str:
    """Return ``starting``, ``asleep`` or ``waking``."""
    if asleep["starting"]:
        return "starting"
    return "asleep" if asleep["asked"] is None else "waking"


def suspended(job: SuspendedJob, slurm: Job | None, *, user: str, now_epoch: float) -> dict[str, Any]:
    """Return the row of a job that has a checkpoint image and does not run. ``slurm``: its record, if known."""
    return {
        "job_id": job.key.job_id,
        "shown_id": job.called,
        "user": user,
        "uid": job.uid,
        "node": job.node,
        "state": "suspended",
        "since": job.since_epoch,
        "suspended_s": max(0.0, now_epoch - job.since_epoch),
        "suspensions": job.seq,
        "gpus_released": job.gpus,
        "memory_held_bytes": 0,
        "gpu_bytes": job.gpu_bytes,
        "image_bytes": job.image_bytes,
        "where": job.where,
        "wake": job.wake,
        "restoring_on": slurm.batch_host if slurm is not None and slurm.state == "RUNNING" else None,
        "released": None if slurm is None else slurm.pending and not slurm.is_held,
        "reason": None if slurm is None else slurm.reason,
        "held_by_admin": None if slurm is None else slurm.held_by_admin,
        "why": job.why,
        "failure": job.failure,
        "failures": job.failures,
        "failed": job.failed_epoch,
        "retry": job.retry_epoch,
        "retries_left": job.retries_left,
        "releases": job.releases,
        "release": job.release_epoch,
        "passed_over": job.passed,
        "local_files": job.local_files,
        "tied_to": job.node if job.tied else None,
    }


def _option(option: SuspendOption) -> dict[str, Any]:
    return {
        "window_s": option.window_s,
        "util_pct": option.util_pct,
        "mode": option.mode.value,
        "wake": option.wake,
        "when": option.when.value,
        "signal": None if option.signal is None else f"{option.signal.name}@{option.signal.before_s}",
    }


def _idle(idle: IdleState, clock_s: float, now_epoch: float) -> dict[str, Any]:
    return {
        "verdict": idle.verdict.value,
        "why": idle.why,
        "window_s": idle.window_s,
        "progress_s": round(idle.progress_s, 1),
        "remaining_s": round(idle.remaining_s, 1),
        "since": None if idle.since_s is None else round(now_epoch - (clock_s - idle.since_s), 1),
        "sampled": round(now_epoch - (clock_s - idle.time_s), 1),
        "broken_by": idle.broken,
        "signals": [
            {
                "of": signal.of,
                "name": signal.name,
                "value": signal.value,
                "limit": signal.limit,
                "verdict": signal.verdict.value,
            }
            for signal in idle.signals
        ],
    }


def _next(decision: Decision) -> dict[str, Any]:
    return {
        "act": decision.act,
        "code": decision.code,
        "text": decision.text,
        "against": [{"code": refusal.code, "text": refusal.text} for refusal in decision.against],
        "for_jobs": list(decision.for_jobs),
    }


def _in(mode: Mode, option: SuspendOption) -> SuspendOption:
    """Return the option for remedies against refusals in ``mode``; none of them is the mode that the job has."""
    return replace(option, mode=mode) if mode is Mode.INPLACE else option


def _compatibility(compatibility: Compatibility, option: SuspendOption) -> dict[str, Any]:
    return {
        "kinds": [kind.value for kind in compatibility.kinds],
        "modes": {
            mode.value: {
                "possible": not against,
                "against": [
                    {"code": refusal.code, "text": refusal.text, "remedy": refusals.remedy(refusal, _in(mode, option))}
                    for refusal in against
                ],
            }
            for mode, against in compatibility.modes.items()
        },
    }
