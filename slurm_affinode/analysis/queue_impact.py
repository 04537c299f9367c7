"""Queue impact of idle GPUs: a simple, conservative model.

A pending job could have started on the GPUs of a finding if

- it is eligible and waits for resources or priority (not held, not waiting for a begin time, another job or a limit),
- one of its partitions is the finding's, or another partition that is known to contain all of the finding's nodes,
- it requests at least one GPU, no more GPUs than are idle, and no more nodes than these are on,
- all nodes in its ``--nodelist`` are among the finding's, and ``--exclude`` does not cover all of these, if known,
- it requests no GPU type or the same one, and its ``--constraint`` may match the features of the nodes, if known.

The job is counted for the time in which it waited while the GPUs were idle. Pending tasks of an array count
individually. ``startable`` is the number of jobs that fit on the GPUs at the same time, in queue order (priority, then
age). CPUs, memory, QOS limits and backfill are ignored: the figures show the obstruction, not the decisions that the
scheduler would have made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_affinode.core.features import may_match
from slurm_affinode.model.cluster import Node
from slurm_affinode.model.finding import Finding, JobAttempt, NodeRef, QueueImpact

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

EXAMPLES = 5
_WAITING = frozenset({"", "None", "Priority", "Resources"})
_WAITING_FOR = ("ReqNodeNotAvail", "Nodes required for job", "Nodes_required_for_job")
"""Prefixes of Slurm's reasons that are followed by more text."""


def waits(reason: str | None) -> bool:
    """Return whether Slurm's pending reason is a lack of free resources or priority."""
    return reason is None or reason in _WAITING or reason.startswith(_WAITING_FOR)


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that waits or waited for GPUs."""

    id: str
    cluster: str
    partitions: tuple[str, ...]
    gpus: int
    eligible: datetime
    until: datetime
    """Time at which it started or was canceled; now if it is still pending."""
    gpu_type: str | None = None
    nodes: int = 1
    constraint: str | None = None
    priority: int = 0
    user: str | None = None
    tasks: int = 1
    """Number of array tasks that this record stands for (they have no records of their own yet)."""
    most: int | None = None
    """Limit of tasks that run at the same time."""
    required: tuple[str, ...] = ()
    """Nodes that the job requires."""
    excluded: tuple[str, ...] = ()
    """Nodes that the job excludes."""

    def goes(self, nodes: Collection[str]) -> bool:
        """Return whether the job's required and excluded nodes allow it to run on ``nodes`` only (empty: unknown)."""
        return not nodes or (set(self.required) <= set(nodes) and not set(nodes) <= set(self.excluded))


@dataclass(frozen=True, slots=True)
class _Group:
    """The jobs that waited in a set of partitions, in queue order."""

    jobs: Sequence[PendingJob]
    eligible: Floats
    until: Floats
    gpus: Ints
    nodes: Ints
    tasks: Ints
    most: Ints
    choosy: Sequence[int]
    """Positions of the jobs that require or exclude nodes."""

    @classmethod
    def of(cls, jobs: Sequence[PendingJob]) -> _Group:
        return cls(
            jobs,
            np.array([job.eligible.timestamp() for job in jobs], np.float64),
            np.array([job.until.timestamp() for job in jobs], np.float64),
            np.array([job.gpus for job in jobs], np.int64),
            np.array([job.nodes for job in jobs], np.int64),
            np.array([job.tasks for job in jobs], np.int64),
            np.array([job.tasks if job.most is None else min(job.tasks, job.most) for job in jobs], np.int64),
            [number for number, job in enumerate(jobs) if job.required or job.excluded],
        )


class PendingQueue:
    """The jobs that waited, by cluster and partition."""

    def __init__(self, waiting: Iterable[PendingJob]) -> None:
        self._waiting: dict[str, list[PendingJob]] = {}
        for job in sorted(waiting, key=lambda pending: (-pending.priority, pending.eligible, pending.id)):
            if job.gpus > 0 and job.until > job.eligible:
                self._waiting.setdefault(job.cluster, []).append(job)
        self._groups: dict[tuple[str, frozenset[str]], _Group] = {}
        self._suits: dict[Any, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}

    def _group(self, key: tuple[str, frozenset[str]]) -> _Group:
        """Return the group of ``key``; cached, because thousands of findings have the same one."""
        if key not in self._groups:
            cluster, partitions = key
            jobs = [job for job in self._waiting.get(cluster, ()) if not partitions.isdisjoint(job.partitions)]
            self._groups[key] = _Group.of(jobs)
        return self._groups[key]

    def impact(
        self, finding: Finding, *, gpu_type: str | None = None, features: Sequence[tuple[str, ...]] | None = None,
        partitions: Iterable[str] = (),
    ) -> QueueImpact:  # fmt: skip
        """Return the impact of ``finding`` on the queue.

        ``gpu_type``: type of its GPUs; ``features``: features of its nodes; ``partitions``: partitions of its nodes,
        besides its own.
        """
        key = (finding.cluster, frozenset((*(finding.partition or "").split(","), *partitions)))
        group, free = self._group(key), idle_gpus(finding)
        chosen, waited = self._chosen(finding, key, gpu_type, features)
        if not len(chosen):
            return QueueImpact(0, 0, 0.0, 0.0)
        remaining, startable = free, 0
        for number in chosen:  # ends after a few jobs, when no GPU is left
            gpus = int(group.gpus[number])
            fit = min(remaining // gpus, int(group.most[number]))
            startable += fit
            remaining -= fit * gpus
            if not remaining:
                break
        times, tasks = waited[chosen], group.tasks[chosen]
        examples = tuple(group.jobs[i].id for i in chosen[:EXAMPLES])
        longest = float(times.max()) if len(times) else 0.0
        return QueueImpact(int(tasks.sum()), startable, float((times * tasks).sum()), longest, examples)

    def could_use(
        self, finding: Finding, *, gpu_type: str | None = None, features: Sequence[tuple[str, ...]] | None = None,
        partitions: Iterable[str] = (),
    ) -> tuple[str, ...]:  # fmt: skip
        """Return the IDs of the jobs that ``impact`` counts, in queue order."""
        key = (finding.cluster, frozenset((*(finding.partition or "").split(","), *partitions)))
        group = self._group(key)
        return tuple(group.jobs[number].id for number in self._chosen(finding, key, gpu_type, features)[0])

    def _chosen(
        self, finding: Finding, key: tuple[str, frozenset[str]], gpu_type: str | None,
        features: Sequence[tuple[str, ...]] | None,
    ) -> tuple[Ints, Floats]:  # fmt: skip
        """Return the positions of the jobs of a group that could have started, and the wait of every job, s."""
        group, free = self._group(key), idle_gpus(finding)
        if not group.jobs or finding.since is None or not free:
            return np.empty(0, np.int64), np.empty(0)
        begin, end = finding.since.timestamp(), finding.observed_at.timestamp()
        waited = np.minimum(group.until, end) - np.maximum(group.eligible, begin)
        where = {gpu.node for gpu in finding.flagged_gpus if gpu.node is not None} or set(finding.nodes)
        places = len(where) or 1
        suits = self._suiting(key, group.jobs, gpu_type, features).copy()
        suits[[number for number in group.choosy if not group.jobs[number].goes(where)]] = False
        return np.flatnonzero((waited > 0) & (group.gpus <= free) & (group.nodes <= places) & suits), waited

    def _suiting(
        self, key: tuple[str, frozenset[str]], jobs: Sequence[PendingJob], gpu_type: str | None,
        features: Sequence[tuple[str, ...]] | None,
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:  # fmt: skip
        """Return which jobs of a group match the GPU type and the features; cached like ``_group``."""
        which = (key, gpu_type, None if features is None else frozenset(features))
        if which not in self._suits:
            self._suits[which] = np.array([_suits(job, gpu_type, features) for job in jobs], np.bool_)
        return self._suits[which]


def with_impact(
    findings: Iterable[Finding],
    queue: PendingQueue,
    *,
    gpu_type: Callable[[Finding], str | None] = lambda _: None,
    nodes: Iterable[Node] = (),
) -> list[Finding]:
    """Return ``findings``, with the queue impact of those that hold idle GPUs. ``nodes``: Slurm's nodes, if known."""
    out = []
    node_by_name = {node.name: node for node in nodes}
    for finding in findings:
        if not _holds_gpus(finding):
            out.append(finding)
            continue
        features, both = _nodes_of(finding, node_by_name)
        impact = queue.impact(finding, gpu_type=gpu_type(finding), features=features, partitions=both)
        out.append(replace(finding, impact=impact))
    return out


def blockers(
    findings: Iterable[Finding], queue: PendingQueue, *, gpu_type: Callable[[Finding], str | None] = lambda _: None,
    nodes: Iterable[Node] = (),
) -> dict[str, list[Finding]]:  # fmt: skip
    """Return, by the ID of a pending job, the findings of jobs that hold idle GPUs which it could use."""
    node_by_name = {node.name: node for node in nodes}
    by_job: dict[str, list[Finding]] = {}
    for finding in findings:
        if _holds_gpus(finding) and isinstance(finding.subject, JobAttempt):
            features, both = _nodes_of(finding, node_by_name)
            for waiting in queue.could_use(finding, gpu_type=gpu_type(finding), features=features, partitions=both):
                by_job.setdefault(waiting, []).append(finding)
    return by_job


def idle_gpus(finding: Finding) -> int:
    """Return the idle GPUs of a finding: the flagged ones, else all that are allocated."""
    return len(finding.flagged_gpus) or (finding.allocated_gpus or 0)


def _holds_gpus(finding: Finding) -> bool:
    holds = finding.kind in ("squatter", "idle-allocation", "completing") or (
        isinstance(finding.subject, NodeRef) and finding.kind in ("drained-kill-failed", "drained-by-epilog")
    )
    alone = not any(gpu.shared for gpu in finding.gpus)
    return holds and alone and (isinstance(finding.subject, JobAttempt) or bool(finding.allocated_gpus))


def _nodes_of(
    finding: Finding, node_by_name: Mapping[str, Node]
) -> tuple[list[tuple[str, ...]] | None, Collection[str]]:
    """Return the features of the finding's nodes (``None``: unknown), and the partitions that have all of them."""
    its = [node_by_name[name] for name in finding.nodes if name in node_by_name]
    features = [node.features for node in its] or None
    both = set.intersection(*(set(node.partitions) for node in its)) if its and len(its) == len(finding.nodes) else ()
    return features, both


def _suits(job: PendingJob, gpu_type: str | None, features: Sequence[tuple[str, ...]] | None) -> bool:
    if job.gpu_type is not None and gpu_type is not None and job.gpu_type.lower() not in gpu_type.lower().split("+"):
        return False
    return features is None or any(may_match(job.constraint, node_features) for node_features in features)
