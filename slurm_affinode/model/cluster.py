"""Jobs, steps, nodes and partitions of a live cluster, as slurmctld shows them at a moment.

``None`` is unknown or does not apply, 0 is a measurement. Times are aware UTC, spans are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

ENDED_STATES = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States that a job does not leave (a requeued one is shown as PENDING)."""

ALLOCATED_STATES = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING"})
"""States in which a job holds nodes."""


@dataclass(frozen=True, slots=True)
class GpuCount:
    """How many GPUs a TRES or GRES string names."""

    count: int
    kind: str | None = None
    """The types, sorted and joined by ``+``; ``None`` where Slurm names none."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of a job on one of its nodes."""

    node: str
    count: int
    kind: str | None = None
    indices: tuple[int, ...] = ()
    """Slurm's numbers of the GPUs (order of gres.conf), empty where it does not say."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a job that runs now."""

    job_id: int
    """The raw id."""
    step: str
    """``0``, ``1``, ..., ``batch``, ``extern`` or ``interactive``."""
    name: str | None
    state: str | None
    nodes: tuple[str, ...]
    start: datetime | None
    tasks: int | None
    gpus: GpuCount | None
    """``None`` where the step's TRES are not known: always for ``batch`` and ``extern``."""
    tres: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """``123.0``, as Slurm's commands take it."""
        return f"{self.job_id}.{self.step}"


@dataclass(frozen=True, slots=True)
class Job:
    """One job, array task, component of a heterogeneous job, or the tasks of an array that are still one record."""

    job_id: int
    """The raw id, unique among all of these."""
    array_job_id: int | None
    array_task_id: int | None
    array_tasks: str | None
    """Tasks that have no record of their own yet: ``2-3,7``."""
    array_limit: int | None
    """At most so many tasks of the array at once."""
    het_job_id: int | None
    het_offset: int | None
    name: str | None
    user: str | None
    uid: int | None
    account: str | None
    partitions: tuple[str, ...]
    """One while it runs; all that were asked for while it is pending."""
    qos: str | None
    state: str
    """Slurm's word, with the transitions before the state below them: COMPLETING, CONFIGURING, ..."""
    reason: str | None
    """Why it is pending or why it ended, in Slurm's words."""
    priority: int | None
    held: bool
    """Pending with priority 0: it starts only after a release."""
    submit: datetime | None
    """Of this run: a requeue sets it anew."""
    eligible: datetime | None
    start: datetime | None
    """When it started; ``None`` while it is pending."""
    end: datetime | None
    """When it ended; ``None`` before."""
    expected_start: datetime | None
    """Of a pending job: the scheduler's plan, or the begin time asked for."""
    time_limit_s: int | None
    """``None`` also where there is no limit."""
    nodes: tuple[str, ...]
    batch_host: str | None
    node_count: int | None
    cpus: int | None
    requeue: bool
    """May be requeued."""
    restarts: int
    tres_requested: Mapping[str, str]
    tres_allocated: Mapping[str, str]
    """Empty while it is pending."""
    gpus_requested: GpuCount | None
    gpus_allocated: GpuCount | None
    """``None`` where Slurm does not count GPUs, or none are named."""
    node_gpus: tuple[NodeGpus, ...] | None
    """GPUs by node and number, of a job that holds nodes; ``None`` where they were not asked for."""
    features: str | None
    """``--constraint``."""
    reservation: str | None
    comment: str | None
    admin_comment: str | None
    stdout: str | None
    """Patterns such as ``%j`` are replaced. Equal to ``stderr`` where that is ``None``."""
    stderr: str | None
    batch: bool
    """Submitted with a script: such a job can be requeued."""
    steps: tuple[Step, ...] | None = None
    """Steps that run now; ``None`` where they were not asked for."""
    nodes_required: tuple[str, ...] = ()
    """Nodes that have to be among its nodes (``--nodelist``)."""
    nodes_excluded: tuple[str, ...] = ()
    """Nodes that it does not take (``--exclude``)."""
    nodes_expected: tuple[str, ...] = ()
    """Of a pending job: the nodes that the scheduler plans for it, as far as it has."""
    held_by_admin: bool = False
    """Held so that its owner cannot release it. Of lists only where Slurm's reason for the hold is told."""

    @property
    def id(self) -> str:
        """What people and Slurm's commands call it: ``123``, ``123_4``, ``123_[5-9]``, ``123+1``."""
        if self.array_job_id is not None:
            if self.array_task_id is not None:
                return f"{self.array_job_id}_{self.array_task_id}"
            if self.array_tasks is not None:
                return f"{self.array_job_id}_[{self.array_tasks}]"
        if self.het_job_id is not None:
            return f"{self.het_job_id}+{self.het_offset or 0}"
        return str(self.job_id)

    @property
    def pending(self) -> bool:
        """In the queue."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def ended(self) -> bool:
        """Over for good."""
        return self.state in ENDED_STATES

    @property
    def allocated(self) -> bool:
        """Holds nodes."""
        return self.state in ALLOCATED_STATES

    @property
    def shares_gpus(self) -> bool:
        """It has a part of a GPU by Slurm's count: ``gres/shard``, ``gres/mps``."""
        return any(name.partition(":")[0] in ("gres/shard", "gres/mps") for name in self.tres_allocated)


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str
    state: str
    """The state without flags: IDLE, MIXED, ALLOCATED, DOWN, ..."""
    flags: frozenset[str]
    """DRAIN, COMPLETING, NOT_RESPONDING, PLANNED, RESERVED, ..."""
    reason: str | None
    """Why it is down or drained."""
    reason_user: str | None
    reason_time: datetime | None
    gpus: GpuCount | None
    """Configured; ``None`` for a node without GPUs."""
    gpus_used: GpuCount | None
    """Allocated to jobs; ``None`` for a node without GPUs."""
    partitions: tuple[str, ...]
    cpus: int
    cpus_used: int
    memory_mib: int
    memory_used_mib: int
    """Allocated to jobs, not what processes hold."""
    features: tuple[str, ...]
    version: str | None
    """Slurm's version there; ``None`` while the node does not answer."""

    @property
    def draining(self) -> bool:
        """Takes no new jobs."""
        return "DRAIN" in self.flags

    @property
    def responding(self) -> bool:
        """Its slurmd answers, as far as slurmctld knows."""
        return "NOT_RESPONDING" not in self.flags and self.state not in ("DOWN", "UNKNOWN")

    @property
    def powered(self) -> bool:
        """Is switched on; a node of a cloud is not there at all while it is not."""
        return self.flags.isdisjoint(("POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"))


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition."""

    name: str
    nodes: tuple[str, ...]
    state: str
    default: bool
    tres: Mapping[str, str]
    gpus: GpuCount | None
