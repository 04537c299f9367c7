"""The surroundings of suspension, restore and wake: settings, and interfaces to what is outside of the agent.

Suspensions in progress reserve host memory, so that no two of them count on the same bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from slurm_affinode.base.node_config import SuspendConfig
from slurm_affinode.base.pidfd import Id
from slurm_affinode.base.sizes import parse_size
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.checkpoint.files.created_files import CreatedFilesOfJobs
from slurm_affinode.checkpoint.files.scratch_files import ScratchOutcome, ScratchRestored
from slurm_affinode.checkpoint.files.scratch_record import ScratchRecord, ScratchRecords
from slurm_affinode.checkpoint.files.scratch_search import ScratchSearchResult
from slurm_affinode.checkpoint.interface import InheritFd
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.core.wake_time import backoff_s
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import AfterLoss, SavedOutput
from slurm_affinode.suspension.job.environment import JobEnvironments
from slurm_affinode.suspension.job.streams import OpenSaved, Save
from slurm_affinode.suspension.records.journal import Journal
from slurm_affinode.suspension.records.ledger import SuspensionLedger
from slurm_affinode.suspension.records.shared_state import Notes


class Reservations:
    """Host memory reserved by suspensions in progress on one node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the reservations."""
        self._reserved_bytes: dict[int, int] = {}
        """Job -> bytes, in the order of reservation."""

    @contextmanager
    def of(self, job_id: int, count: int) -> Iterator[None]:
        """Reserve this many bytes for a job for the duration of the context."""
        with self._lock:
            self._reserved_bytes[job_id] = count
        try:
            yield
        finally:
            with self._lock:
                self._reserved_bytes.pop(job_id, None)

    def moved(self, job_id: int) -> None:
        """End the job's reservation: its memory now counts in the node's memory usage."""
        with self._lock:
            self._reserved_bytes.pop(job_id, None)

    def total(self) -> int:
        """Return the bytes reserved."""
        with self._lock:
            return sum(self._reserved_bytes.values())

    def before(self, job_id: int) -> int:
        """Return the bytes reserved before this job's reservation; all bytes if it has none.

        While a job's memory moves, it is both reserved here and missing from the node's free memory, which errs on the
        safe side.
        """
        with self._lock:
            total = 0
            for key, count in self._reserved_bytes.items():
                if key == job_id:
                    break
                total += count
            return total


LOG = logging.getLogger("slurm_affinode.agent")


class Gpus(Protocol):
    """The GPUs of this node, as reported by NVML. Thread-safe."""

    def devices(self) -> Sequence[Device]:
        """Return all devices, by index. Raises ``GpuError``."""
        ...

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        """Return UUID -> PID -> bytes in use, as far as NVML reports them. Raises ``GpuError``."""
        ...

    def free_bytes(self, device: Device) -> int | None:
        """Return the free memory of a device, or ``None`` if unknown. Raises ``GpuError``."""
        ...


class Streams(Protocol):
    """The standard streams of a job; see the module ``streams``."""

    def save(self, init: Id, write: Save, user: User) -> tuple[SavedOutput, ...]:
        """See ``streams.save``."""
        ...

    def restore_files(
        self,
        outputs: Sequence[SavedOutput],
        fds: Mapping[int, int | None],
        saved: OpenSaved,
        user: User,
        *,
        again: bool = False,
        check: Callable[[], None],
    ) -> Sequence[InheritFd]:
        """Restore the contents of the output files and return the descriptors for CRIU.

        ``again``: an earlier restore of this attempt was interrupted, and the output of its process tree is to be
        discarded. ``check`` is called repeatedly; an exception that it raises aborts the operation.
        """
        ...


class Scratch(Protocol):
    """The closed node-local files of jobs; see ``scratch_files.ScratchFiles``."""

    @property
    def copies(self) -> bool:
        """Whether files may be copied, which depends on other jobs of their user."""
        ...

    def find(
        self,
        init: Id,
        tree: Collection[Id],
        owner: User,
        periods: Sequence[tuple[float, float]],
        other_jobs: str | None,
    ) -> ScratchSearchResult:
        """Return the files of a stopped job. Never raises."""
        ...

    def save(
        self, init: Id, search: ScratchSearchResult, image_fd: int, owner: User, node: str,
        *, kept_paths: Collection[str] = (), timeout_s: float,
    ) -> ScratchOutcome:  # fmt: skip
        """Copy them into an image, if the rules permit it. Raises ``DumpFailed``, ``DumpNoRoom``."""
        ...

    def restore_files(
        self, init: Id, index: bytes, data: int | None, user: User, record: ScratchRecord, *, timeout_s: float
    ) -> ScratchRestored:
        """Create the files of an image. Raises ``RestoreFailed``; nothing is left then."""
        ...

    def remove(self, init: Id, inodes: Mapping[str, tuple[int, int]], user: User) -> None:
        """Remove the files that ``restore_files`` has created. Never raises; may be repeated."""
        ...

    def leave(self, index: bytes, owner: User) -> int:
        """Remove the copied files from the node that the job has left; return their number. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class SuspendSettings:
    """The site's settings; times are in seconds."""

    lock_s: float = 10.0
    dump_s: float = 1800.0
    restore_s: float = 1800.0
    slurm_s: float = 300.0
    kill_s: float = 60.0
    free_s: float = 60.0
    """Time to wait for free GPU memory before a restore."""
    wake_every_s: float = 10.0
    wake_backoff_s: float = 120.0
    wake_backoff_limit_s: float = 7200.0
    restore_retries: int = 0
    """Retries of a restore that failed for a cause that may pass."""
    retry_backoff_s: float = 60.0
    retry_backoff_limit_s: float = 3600.0
    fresh: bool = False
    """Start the job afresh after a failed restore; otherwise it is held."""
    after_loss: AfterLoss = AfterLoss.IMAGE
    """Action for a job without ``after_loss`` whose attempt is lost after a restore."""
    discard_image_after_s: float = 86400.0
    """With ``image``: run time since the restore after which the image is discarded; 0: never."""
    alive_s: float = 5.0
    """How long the batch script of a restored job must run until its restore is a success; 0: not checked."""
    whole_time_limit: bool = False
    """Give a suspended job its whole time limit again, otherwise what it had left of it."""
    notices: bool = True
    criu_sockets: bool = False
    """Let CRIU dump network sockets, whatever its version and the kernel's."""
    raise_limit: bool = False
    """Raise the memory limit of a job for its GPU memory."""
    memory_reserve: int = 0
    """Host memory in bytes that no limit is raised for."""

    @classmethod
    def of(cls, config: SuspendConfig) -> SuspendSettings:
        """Return the settings in a configuration."""
        return cls(
            lock_s=parse_span_s(config.lock_timeout),
            dump_s=parse_span_s(config.dump_timeout),
            restore_s=parse_span_s(config.restore_timeout),
            slurm_s=parse_span_s(config.slurm_timeout),
            wake_every_s=parse_span_s(config.wake_every),
            wake_backoff_s=parse_span_s(config.wake_backoff),
            wake_backoff_limit_s=parse_span_s(config.wake_backoff_limit),
            restore_retries=config.restore_retries,
            retry_backoff_s=parse_span_s(config.retry_backoff),
            retry_backoff_limit_s=parse_span_s(config.retry_backoff_limit),
            fresh=config.on_restore_failure == "fresh",
            after_loss=AfterLoss(config.after_loss),
            discard_image_after_s=parse_span_s(config.discard_image_after),
            alive_s=parse_span_s(config.restore_alive),
            whole_time_limit=config.time_limit == "whole",
            notices=config.notices,
            criu_sockets=config.criu_sockets,
            raise_limit=config.raise_memory_limit,
            memory_reserve=parse_size(config.memory_reserve),
        )

    def release_pause_s(self, releases: int) -> float:
        """Return the seconds until a job that is held since the last of these releases is released again."""
        return backoff_s(self.wake_backoff_s, self.wake_backoff_limit_s, releases)

    def retry_pause_s(self, failures: int) -> float:
        """Return the seconds until a restore is retried that has failed for this many times."""
        return backoff_s(self.retry_backoff_s, self.retry_backoff_limit_s, failures)


@dataclass(frozen=True, slots=True)
class Location:
    """Where an agent runs."""

    cluster: str
    node: str


@dataclass(frozen=True, slots=True)
class Clock:
    """The time, which tests replace."""

    now: Callable[[], float] = time.time
    """Seconds since the epoch."""
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Records:
    """Records of suspensions: those of this node, and those of all nodes."""

    journal: Journal
    ledger: SuspensionLedger
    notes: Notes


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The node-local files of jobs, and the records of them on this node."""

    environments: JobEnvironments
    created: CreatedFilesOfJobs
    """Records of the files that restores have created."""
    scratch: Scratch
    scratch_records: ScratchRecords


@dataclass(frozen=True, slots=True)
class GpuAllocations:
    """The GPUs of this node that Slurm has allocated to jobs."""

    node: str
    indices: Mapping[int, Sequence[int]]
    """See ``AgentContext.gpu_indices``."""

    def of(self, job: Job) -> Sequence[int]:
        """Return Slurm's indices of the job's GPUs on this node; empty if unknown.

        For a job with shards, only the prolog reports them.
        """
        node_gpus = [gpus for gpus in job.node_gpus or () if gpus.node == self.node]
        return [index for gpus in node_gpus for index in gpus.indices] or self.indices.get(job.job_id, ())
