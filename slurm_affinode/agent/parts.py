"""What suspending, restoring and waking work with: everything that touches the world, passed in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slurm_affinode.agent.absences import Absences
from slurm_affinode.agent.journal import Journal
from slurm_affinode.agent.ledger import Ledger
from slurm_affinode.agent.mailing import SILENT, Mailer
from slurm_affinode.agent.notes import Notes
from slurm_affinode.agent.registry import Registry
from slurm_affinode.agent.reservations import Reservations
from slurm_affinode.agent.streams import OpenSaved, Save
from slurm_affinode.agent.tree import Processes
from slurm_affinode.checkpoint.asuser import User
from slurm_affinode.checkpoint.facts import MemoryFacts, TreeFacts
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CudaDriver, Imager, InheritFd
from slurm_affinode.checkpoint.tiers import Tiers
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import SavedOutput, Versions
from slurm_affinode.nodeconfig import SuspendConfig
from slurm_affinode.pinned import Id
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.timespec import parse_span_s

LOG = logging.getLogger("slurm_affinode.agent")


class Gpus(Protocol):
    """The GPUs of this node as NVML shows them. May be used by several threads."""

    def devices(self) -> Sequence[Device]:
        """All of them, by index. Raises ``GpuError``."""
        ...

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        """UUID -> PID -> bytes that it holds there, as far as NVML shows it. Raises ``GpuError``."""
        ...

    def free_bytes(self, device: Device) -> int | None:
        """Free memory of a device; ``None``: not known. Raises ``GpuError``."""
        ...


class Streams(Protocol):
    """The standard streams of a job, see the module ``streams``."""

    def save(self, init: Id, write: Save, user: User) -> tuple[SavedOutput, ...]:
        """See ``streams.save``."""
        ...

    def put_back(
        self,
        outputs: Sequence[SavedOutput],
        fds: Mapping[int, int | None],
        saved: OpenSaved,
        user: User,
        *,
        again: bool = False,
        check: Callable[[], None],
    ) -> Sequence[InheritFd]:
        """Give the files of the new run their bytes; the descriptors for CRIU.

        ``again``: a restore of this run was cut short, and what its tree wrote is to go. ``check`` is called time and
        again, and what it raises ends this.
        """
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The site's choices; seconds."""

    lock_s: float = 10.0
    dump_s: float = 1800.0
    restore_s: float = 1800.0
    slurm_s: float = 300.0
    kill_s: float = 60.0
    free_s: float = 60.0
    """For GPU memory to become free before a restore."""
    wake_every_s: float = 10.0
    wake_backoff_s: float = 120.0
    wake_backoff_limit_s: float = 7200.0
    fresh: bool = False
    """After a restore that failed the job starts afresh; else it is held."""
    notices: bool = True
    criu_sockets: bool = False
    """CRIU dumps network sockets, whatever its version and the kernel's say."""

    @classmethod
    def of(cls, config: SuspendConfig) -> Settings:
        """From the configuration."""
        return cls(
            lock_s=parse_span_s(config.lock_timeout),
            dump_s=parse_span_s(config.dump_timeout),
            restore_s=parse_span_s(config.restore_timeout),
            slurm_s=parse_span_s(config.slurm_timeout),
            wake_every_s=parse_span_s(config.wake_every),
            wake_backoff_s=parse_span_s(config.wake_backoff),
            wake_backoff_limit_s=parse_span_s(config.wake_backoff_limit),
            fresh=config.on_restore_failure == "fresh",
            notices=config.notices,
            criu_sockets=config.criu_sockets,
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """The world, as far as it is used here."""

    node: str
    cluster: str
    slurm: SlurmClient
    cuda: CudaDriver
    imager: Imager
    tiers: Tiers
    """The image stores, fastest first."""
    processes: Processes
    gpus: Gpus
    streams: Streams
    journal: Journal
    ledger: Ledger
    notes: Notes
    absences: Absences
    registry: Registry
    look: Callable[[int, int], TreeFacts]
    """What is to be seen of the tree (PID of the shepherd, PID of the tree's root)."""
    memory: Callable[[int], MemoryFacts]
    """Host memory that a process of the job may still use."""
    versions: Callable[[], Versions]
    settings: Settings = Settings()
    gpu_indices: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """See ``AgentContext``."""
    reservations: Reservations = field(default_factory=Reservations)
    mailer: Mailer = SILENT
    now: Callable[[], float] = time.time
    """Seconds of the epoch."""
    sleep: Callable[[float], None] = time.sleep
    log: logging.Logger = field(default=LOG)

    def gpus_of(self, job: Job) -> Sequence[int]:
        """Slurm's numbers of the job's GPUs here, none: not known. Of one with shards only the prolog tells them."""
        mine = [one for one in job.node_gpus or () if one.node == self.node]
        return [index for one in mine for index in one.indices] or self.gpu_indices.get(job.job_id, ())

    @property
    def local(self) -> DirectoryStore:
        """The store on the node's own disk."""
        return next(tier.store for tier in self.tiers.tiers if tier.name == "disk")

    @property
    def shared(self) -> DirectoryStore | None:
        """The store that every node sees."""
        return None if self.tiers.shared is None else self.tiers.shared.store
