"""The jobs that the agent watches: those with a connected shepherd, with data from the kernel and from Slurm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_affinode.base.pidfd import Id
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import JobKey, Phase, SuspendOption
from slurm_affinode.suspension.job.shepherd import Outgoing, Say
from slurm_affinode.suspension.records.shared_state import LastRestore


class Link(Protocol):
    """The connection to a job's shepherd. Thread-safe."""

    @property
    def open(self) -> bool:
        """Whether the shepherd is connected."""
        ...

    def send(self, message: Outgoing) -> bool:
        """Send a message; ``False`` if the shepherd is gone. Never blocks."""
        ...

    def status_of(self, pid: int) -> int | None:
        """Return the wait status of a process (its PID in the namespace) that the shepherd has reported as ended."""
        ...

    def forget_status(self, pid: int) -> None:
        """Forget the status of an ended process, for a new one with the same PID."""
        ...


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """A job with the suspend option that runs on this node. A snapshot; the registry has the current one."""

    job_id: int
    """The raw ID, from the kernel (cgroup or process tree), not from the shepherd."""
    uid: int
    gid: int
    restarts: int
    """Slurm's restart count of this attempt."""
    option: SuspendOption
    init_pid: int
    """PID (on this node) of the shepherd, PID 1 of the job's namespace; its descriptors 0, 1, 2 are the job's."""
    init_started: int
    """Start time of that process in ticks since boot; unique together with the PID."""
    root: int
    """PID of the tree's root in the namespace; 0: not started yet."""
    link: Link
    since_epoch: float
    """When this agent first saw the job."""
    phase: Phase = Phase.RUNNING
    key: JobKey | None = None
    """``None`` until slurmctld was queried."""
    slurm: Job | None = None
    """The last job record from slurmctld."""
    devices: tuple[Device, ...] | None = None
    """Its GPUs on this node, ordered by index; ``None``: unknown."""
    groups: tuple[int, ...] = ()
    """Supplementary groups of the owner."""
    suspensions: int = 0
    """Completed suspensions of this submission."""
    last_restore: LastRestore | None = None
    """The restore of this attempt, or the loss after which it has started from its beginning."""

    @property
    def init(self) -> Id:
        """The shepherd's identity; its namespaces are held (``pidfd.namespace``)."""
        return Id(self.init_pid, self.init_started)

    @property
    def owner(self) -> User:
        """The rights with which root acts for the job: those that Slurm has given to this attempt."""
        return User(self.uid, self.gid, self.groups)

    @property
    def called(self) -> str:
        """The job ID shown to its owner: ``123_4`` for an array task."""
        return str(self.job_id) if self.slurm is None else self.slurm.id

    def say(self, text: str) -> bool:
        """Write one line to the job's standard error; ``False`` if its shepherd is gone."""
        return self.link.send(Say(text))


class Registry:
    """The watched jobs by raw ID. Thread-safe; returns snapshots."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the jobs."""
        self._jobs: dict[int, WatchedJob] = {}

    def jobs(self) -> tuple[WatchedJob, ...]:
        """Return all jobs, by ID."""
        with self._lock:
            return tuple(self._jobs[job_id] for job_id in sorted(self._jobs))

    def get(self, job_id: int) -> WatchedJob | None:
        """Return a job, or ``None`` if it is not watched."""
        with self._lock:
            return self._jobs.get(job_id)

    def put(self, job: WatchedJob) -> None:
        """Add a job, or replace its data."""
        with self._lock:
            self._jobs[job.job_id] = job

    def change(self, job_id: int, change: Callable[[WatchedJob], WatchedJob]) -> WatchedJob | None:
        """Replace a job by ``change(job)`` and return it; ``None`` if it is not, or no longer, watched."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return None
            self._jobs[job_id] = changed = change(job)
            return changed

    def set_phase(self, job_id: int, phase: Phase) -> WatchedJob | None:
        """Record the phase of a job, which status shows."""
        return self.change(job_id, lambda job: replace(job, phase=phase))

    def remove(self, job_id: int, link: Link | None = None) -> WatchedJob | None:
        """Remove a job; with ``link``, only if that is still its connection."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or (link is not None and job.link is not link):
                return None
            return self._jobs.pop(job_id)
