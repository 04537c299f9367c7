"""Jobs, steps, nodes and partitions of a live cluster: a snapshot from slurmctld.

``None`` is unknown or does not apply, 0 is a measurement. Times are aware UTC, spans are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

PENDING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
ENDED_STATES = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""Final states of a job (a requeued job is shown as PENDING)."""

ALLOCATED_STATES = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING"})
"""States in which a job holds nodes."""


_SHARE = re.compile(r"gres/(?:shard|mps)(?::|\Z)")
"""Name of a TRES that is a share of a GPU, with or without a type."""


@dataclass(frozen=True, slots=True)
class GpuCount:
    """Number of GPUs in a TRES or GRES string."""

    count: int
    kind: str | None = None
    """The types, sorted and joined by ``+``; ``None`` if Slurm names none."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of a job on one of its nodes."""

    node: str
    count: int
    kind: str | None = None
    indices: tuple[int, ...] = ()
    """GPU numbers in Slurm (order of gres.conf); empty if Slurm does not report them."""


@dataclass(frozen=True, slots=True)
class Step:
    """A running step of a job."""

    job_id: int
    """The raw ID."""
    step: str
    """``0``, ``1``, ..., ``batch``, ``extern`` or ``interactive``."""
    name: str | None
    state: str | None
    nodes: tuple[str, ...]
    start: datetime | None
    tasks: int | None
    gpus: GpuCount | None
    """``None`` if the step's TRES are not known: always for ``batch`` and ``extern``."""
    tres: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """``123.0``, as used by Slurm's commands."""
        return f"{self.job_id}.{self.step}"


@dataclass(frozen=True, slots=True)
class Job:
    """One job, array task, component of a heterogeneous job, or the array tasks that still share one record."""

    job_id: int
    """The raw ID, unique among all of these."""
    array_job_id: int | None
    array_task_id: int | None
    array_tasks: str | None
    """Tasks without a record of their own yet: ``2-3,7``."""
    array_limit: int | None
    """Maximum number of concurrent tasks of the array."""
    het_job_id: int | None
    het_offset: int | None
    name: str | None
    user: str | None
    uid: int | None
    account: str | None
    partitions: tuple[str, ...]
    """One while it runs; all requested ones while it is pending."""
    qos: str | None
    state: str
    """State in Slurm's words, with the transitional states COMPLETING, CONFIGURING, ... in place of the base state."""
    reason: str | None
    """Why it is pending or has ended, in Slurm's words."""
    priority: int | None
    is_held: bool
    """Pending with priority 0: it starts only after a release."""
    submit: datetime | None
    """Submit time of this attempt: a requeue sets it again."""
    eligible: datetime | None
    start: datetime | None
    """Start time; ``None`` while it is pending."""
    end: datetime | None
    """End time; ``None`` before."""
    expected_start: datetime | None
    """Of a pending job: the start planned by the scheduler, or the requested begin time."""
    time_limit_s: int | None
    """``None`` also if there is no limit."""
    nodes: tuple[str, ...]
    batch_host: str | None
    node_count: int | None
    cpus: int | None
    requeue: bool
    """Whether it may be requeued."""
    restarts: int
    tres_requested: Mapping[str, str]
    tres_allocated: Mapping[str, str]
    """Empty while it is pending."""
    gpus_requested: GpuCount | None
    gpus_allocated: GpuCount | None
    """``None`` if Slurm does not count GPUs, or names none."""
    node_gpus: tuple[NodeGpus, ...] | None
    """GPUs by node and number, of a job that holds nodes; ``None`` if they were not queried."""
    features: str | None
    """``--constraint``."""
    reservation: str | None
    comment: str | None
    admin_comment: str | None
    stdout: str | None
    """Patterns such as ``%j`` are expanded. Equal to ``stderr`` where that is ``None``."""
    stderr: str | None
    batch: bool
    """Submitted with a script: such a job can be requeued."""
    steps: tuple[Step, ...] | None = None
    """Running steps; ``None`` if they were not queried."""
    nodes_required: tuple[str, ...] = ()
    """Nodes that its allocation must include (``--nodelist``)."""
    nodes_excluded: tuple[str, ...] = ()
    """Nodes that its allocation must not include (``--exclude``)."""
    nodes_expected: tuple[str, ...] = ()
    """Of a pending job: the nodes planned by the scheduler, if any."""
    expected_end: datetime | None = None
    """Of a running job with a time limit: when the limit ends it, without the time for which Slurm suspended it."""
    requests_share: bool = False
    """Submitted with a request for a share of a GPU (``--gres=shard:2``)."""
    held_by_admin: bool = False
    """Held so that its owner cannot release it. In lists only if Slurm reports the reason of the hold."""

    @property
    def id(self) -> str:
        """ID as shown to users and used by Slurm's commands: ``123``, ``123_4``, ``123_[5-9]``, ``123+1``."""
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
        """Whether it is in the queue."""
        return self.state in PENDING_STATES

    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ENDED_STATES

    @property
    def allocated(self) -> bool:
        """Whether it holds nodes."""
        return self.state in ALLOCATED_STATES

    @property
    def shares_gpus(self) -> bool:
        """Whether it has a share of a GPU: ``gres/shard``, ``gres/mps``.

        Slurm counts shares only where ``AccountingStorageTRES`` names them, so the request counts as well.
        """
        if self.requests_share and self.allocated:
            return True
        return any(map(_SHARE.match, self.tres_allocated))


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
    """Allocated to jobs, not the memory that processes use."""
    features: tuple[str, ...]
    version: str | None
    """Slurm's version on the node; ``None`` while the node does not respond."""

    @property
    def draining(self) -> bool:
        """Whether it accepts no new jobs."""
        return "DRAIN" in self.flags

    @property
    def responding(self) -> bool:
        """Whether its slurmd responds, as far as slurmctld knows."""
        return "NOT_RESPONDING" not in self.flags and self.state not in ("DOWN", "UNKNOWN")

    @property
    def powered(self) -> bool:
        """Whether it is powered on. A cloud node that is not does not exist at all."""
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
