"""What held GPUs keep from the queue: a simple model, on the safe side.

A pending job could have started on the GPUs of a finding where

- it is eligible and waits for resources or its turn (not held, not waiting for a time, another job or a limit),
- one of its partitions is the finding's,
- it asks for at least one GPU and for no more than are held idle, on no more nodes than these are on,
- it names no GPU type, or theirs, and its ``--constraint`` may match the features of their nodes, if those are known.

It is counted for the time in which both overlap: it waited, and the GPUs were idle. The tasks of an array that wait
together count singly. ``startable`` counts, in the order of the queue (priority, then age), how many fit on the GPUs
side by side. CPUs, memory, QOS limits and backfill are left out: the figures say what stood in the way, not what the
scheduler would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from slurm_affinode.core.features import may_match
from slurm_affinode.model.finding import Finding, JobRef, NodeRef, QueueImpact

EXAMPLES = 5
WAITING_REASONS = frozenset({None, "", "None", "Priority", "Resources", "ReqNodeNotAvail", "Nodes_required_for_job"})
"""Slurm's reasons of jobs that would start if there were room."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits, or waited, for GPUs."""

    id: str
    cluster: str
    partitions: tuple[str, ...]
    gpus: int
    eligible: datetime
    until: datetime
    """When it started, or was cancelled; now, where it waits."""
    gpu_type: str | None = None
    nodes: int = 1
    constraint: str | None = None
    priority: int = 0
    user: str | None = None
    tasks: int = 1
    """So many alike: tasks of an array that have no record of their own yet."""
    most: int | None = None
    """So many of them at once."""


class Queue:
    """The jobs that waited, by partition."""

    def __init__(self, waiting: Iterable[Waiting]) -> None:
        groups: dict[tuple[str, str], list[Waiting]] = {}
        for job in sorted(waiting, key=lambda one: (-one.priority, one.eligible, one.id)):
            if job.gpus > 0 and job.until > job.eligible:
                for partition in job.partitions:
                    groups.setdefault((job.cluster, partition), []).append(job)
        self._suits: dict[Any, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
        self._groups = {
            key: (
                jobs,
                np.array([one.eligible.timestamp() for one in jobs]),
                np.array([one.until.timestamp() for one in jobs]),
                np.array([one.gpus for one in jobs]),
                np.array([one.nodes for one in jobs]),
                np.array([one.tasks for one in jobs]),
                np.array([one.tasks if one.most is None else min(one.tasks, one.most) for one in jobs]),
            )
            for key, jobs in groups.items()
        }

    def impact(
        self, finding: Finding, *, gpu_type: str | None = None, features: Sequence[tuple[str, ...]] | None = None
    ) -> QueueImpact:
        """What ``finding`` keeps from them. ``gpu_type``: of its GPUs; ``features``: of its nodes."""
        free = len(finding.flagged_gpus) or (finding.allocated_gpus or 0)
        group = self._groups.get((finding.cluster, finding.partition or ""))
        if group is None or finding.since is None or not free:
            return QueueImpact(0, 0, 0.0, 0.0)
        jobs, eligible, until, gpus, nodes, tasks, most = group
        begin, end = finding.since.timestamp(), finding.observed_at.timestamp()
        waited = np.minimum(until, end) - np.maximum(eligible, begin)
        places = len({gpu.node for gpu in finding.flagged_gpus}) or len(finding.nodes) or 1
        suits = self._suiting((finding.cluster, finding.partition or ""), jobs, gpu_type, features)
        chosen = np.flatnonzero((waited > 0) & (gpus <= free) & (nodes <= places) & suits)
        left, startable = free, 0
        for wanted, several in zip(gpus[chosen].tolist(), most[chosen].tolist(), strict=True):
            fit = min(left // wanted, several)
            startable += fit
            left -= fit * wanted
            if not left:
                break
        times = waited[chosen]
        examples = tuple(jobs[i].id for i in chosen[:EXAMPLES])
        longest = float(times.max()) if len(times) else 0.0
        count, total = int(tasks[chosen].sum()), float((times * tasks[chosen]).sum())
        return QueueImpact(count, startable, total, longest, examples)

    def _suiting(
        self, key: tuple[str, str], jobs: Sequence[Waiting], gpu_type: str | None,
        features: Sequence[tuple[str, ...]] | None,
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:  # fmt: skip
        """Which of the jobs of a partition may run on such nodes: the same for thousands of findings."""
        which = (key, gpu_type, None if features is None else frozenset(features))
        if which not in self._suits:
            self._suits[which] = np.array([_suits(job, gpu_type, features) for job in jobs], np.bool_)
        return self._suits[which]


def with_impact(
    findings: Iterable[Finding],
    queue: Queue,
    *,
    gpu_type: Callable[[Finding], str | None] = lambda _: None,
    features: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Finding]:
    """``findings`` with their impact, where they hold GPUs idle."""
    out = []
    for one in findings:
        holds = one.kind in ("squatter", "idle-allocation", "completing") or (
            isinstance(one.subject, NodeRef) and one.kind == "drained-kill-failed"
        )
        if (
            any(gpu.shared for gpu in one.gpus)
            or not holds
            or not (isinstance(one.subject, JobRef) or one.allocated_gpus)
        ):
            out.append(one)
            continue
        known = None if features is None else [features[node] for node in one.nodes if node in features] or None
        out.append(replace(one, impact=queue.impact(one, gpu_type=gpu_type(one), features=known)))
    return out


def _suits(job: Waiting, gpu_type: str | None, features: Sequence[tuple[str, ...]] | None) -> bool:
    if job.gpu_type is not None and gpu_type is not None and job.gpu_type.lower() not in gpu_type.lower().split("+"):
        return False
    return features is None or any(may_match(job.constraint, one) for one in features)
