"""The jobs that the agent watches: those whose shepherd has said hello, with what the kernel and Slurm say of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_affinode.agent.shepherds import Outgoing, Say
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import JobKey, Phase, SuspendOption
from slurm_affinode.pinned import Id


class Link(Protocol):
    """The connection to a job's shepherd. May be used by any thread."""

    @property
    def open(self) -> bool:
        """The shepherd is there."""
        ...

    def send(self, message: Outgoing) -> bool:
        """Send a message; ``False`` where the shepherd is gone. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """One job with the option that runs on this node. A snapshot: the registry has the newest."""

    job_id: int
    """The raw id, from the kernel (cgroup or process tree), not from the shepherd's word."""
    uid: int
    gid: int
    restarts: int
    """Slurm's count for this run."""
    option: SuspendOption
    init_pid: int
    """PID (on this node) of the shepherd, PID 1 of the job's namespace; its descriptors 0, 1, 2 are the job's."""
    init_started: int
    """When that process started, in ticks since boot: with the PID it is unique."""
    root: int
    """PID of the tree's root in the namespace; 0: not started yet."""
    link: Link
    since_epoch: float
    """When this agent came to know of it."""
    phase: Phase = Phase.RUNNING
    key: JobKey | None = None
    """``None`` until slurmctld has been asked."""
    slurm: Job | None = None
    """What slurmctld said of it last."""
    devices: tuple[Device, ...] | None = None
    """Its GPUs on this node, in the order of their index; ``None``: not known."""
    suspensions: int = 0
    """Suspensions of this submission that got through so far."""

    @property
    def init(self) -> Id:
        """Its shepherd, whose namespaces are held (``pinned.namespace``)."""
        return Id(self.init_pid, self.init_started)

    @property
    def called(self) -> str:
        """What its owner calls it: ``123_4`` for a task of an array."""
        return str(self.job_id) if self.slurm is None else self.slurm.id

    def say(self, text: str) -> bool:
        """Write one line to the job's standard error; ``False`` where its shepherd is gone."""
        return self.link.send(Say(text))


class Registry:
    """The watched jobs by raw id. Thread-safe; what it gives out are snapshots."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, WatchedJob] = {}

    def jobs(self) -> tuple[WatchedJob, ...]:
        """All of them, by job id."""
        with self._lock:
            return tuple(self._jobs[job_id] for job_id in sorted(self._jobs))

    def get(self, job_id: int) -> WatchedJob | None:
        """One job; ``None``: not watched."""
        with self._lock:
            return self._jobs.get(job_id)

    def put(self, job: WatchedJob) -> None:
        """Add a job, or replace what is known of it."""
        with self._lock:
            self._jobs[job.job_id] = job

    def change(self, job_id: int, change: Callable[[WatchedJob], WatchedJob]) -> WatchedJob | None:
        """Replace a job by ``change(job)``; ``None``: it is not watched (any more)."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return None
            self._jobs[job_id] = changed = change(job)
            return changed

    def set_phase(self, job_id: int, phase: Phase) -> WatchedJob | None:
        """Note where a job stands; the orchestration calls it, status shows it."""
        return self.change(job_id, lambda job: replace(job, phase=phase))

    def remove(self, job_id: int, link: Link | None = None) -> WatchedJob | None:
        """Forget a job; with ``link``, only where that is still its connection."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or (link is not None and job.link is not link):
                return None
            return self._jobs.pop(job_id)
