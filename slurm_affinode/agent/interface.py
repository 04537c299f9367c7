"""What the agent's loop and control ask of those who suspend, restore and wake jobs; and what it gives them.

Each is called from a worker thread of the agent, at most once at a time for one job, and may take minutes. Expected
failures are ``AffinodeError`` with one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_affinode.agent.registry import Link, Registry, WatchedJob
from slurm_affinode.agent.shepherds import Hello, Reply
from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu.interface import GpuDriver
from slurm_affinode.model.suspension import JobKey, Phase, Refusal, Suspension
from slurm_affinode.pinned import Id
from slurm_affinode.slurm.interface import SlurmClient

LookAgain = Callable[[], str | None]
"""Reads the job's GPUs once more, now: ``None`` where it is idle still, else what was seen. To be called under the CUDA
lock. A signal that cannot be read is not idle. A suspension by hand passes one that always gives ``None``."""


class TakenBack(AffinodeError):  # noqa: N818 - names what is the case
    """A suspension that was begun does not go on; the text says why."""


class Refused(AffinodeError):  # noqa: N818 - names what is the case
    """A job cannot be suspended, restored or woken; nothing was touched. ``refusal`` says why."""

    exit_code = 1

    def __init__(self, refusal: Refusal, *, hint: str | None = None) -> None:
        super().__init__(refusal.text, hint=hint)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Arrival:
    """A shepherd that has said hello before anything was started, and who it is by the kernel's account."""

    hello: Hello
    job_id: int
    uid: int
    gid: int
    init_pid: int
    init_started: int
    link: Link
    fds: tuple[int, ...]
    """The job's standard streams, open here until ``restore`` returns: for ``criu --inherit-fd``."""
    foreign: tuple[str, ...] = ()
    """Namespaces of the shepherd that are not the node's, though those of a restored process tree will be."""

    @property
    def init(self) -> Id:
        """Its shepherd, whose namespaces are held (``pinned.namespace``)."""
        return Id(self.init_pid, self.init_started)


@dataclass(frozen=True, slots=True)
class SuspendedJob:
    """A job that has an image and does not run: what ``status`` shows of it."""

    key: JobKey
    uid: int
    node: str
    """Where it was suspended."""
    seq: int
    since_epoch: float
    image_bytes: int
    gpu_bytes: int
    gpus: int
    where: str
    """``shared``: any node can restore it; ``node``: only ``node`` can, so far."""
    wake: str
    """``auto``, ``hold``, or the time at which it is to wake."""
    why: str
    failure: str | None = None
    """Why its last restore failed."""
    passed: str | None = None
    """Tiers that did not take its image, and why."""
    shown: str | None = None
    """What its owner calls it, where that is not its number: ``123_4``."""

    @property
    def called(self) -> str:
        """What its owner calls it."""
        return self.shown or str(self.key.job_id)


class Suspender(Protocol):
    """Takes a job off its GPUs."""

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """Why this job cannot be suspended; empty: it can. Reads only, within a second or so; status asks often."""
        ...

    def suspend(self, job: WatchedJob, why: str, *, look_again: LookAgain) -> Suspension:
        """Suspend the job. Returns when its tree is gone and it is queued, or when it runs on unharmed.

        Then ``failure`` of the result says why. Raises ``Refused``, and ``AffinodeError`` where nothing was begun.
        """
        ...


class Restorer(Protocol):
    """Puts a job back."""

    def restore(self, arrival: Arrival) -> Reply:
        """Restore the image of the job, or say what is to happen instead. The agent keeps the shepherd waiting."""
        ...


class Waker(Protocol):
    """Lets suspended jobs go back to work."""

    def wake(self, key: JobKey, who: str, *, admin: bool = False) -> bool:
        """Release a suspended job, because ``who`` asked. Twice is as once. Raises ``Refused``.

        ``admin``: who may also release what an administrator holds.
        ``False``: not yet, since its image is not where every node sees it; that comes by itself.
        """
        ...

    def tick(self) -> None:
        """Called every few seconds: releases what may wake by itself. Must not raise."""
        ...


class Keeper(Protocol):
    """Knows what is suspended, and tidies up."""

    def recover(self) -> None:
        """Called once at the agent's start, before a shepherd is answered: finish or undo what the journal holds."""
        ...

    def identify(self, job: WatchedJob) -> tuple[JobKey, int]:
        """The submission that a job is, and how often it was suspended.

        From its image where it has one, else from ``job.slurm``, which is there when this is called.
        """
        ...

    def registered(self, job: WatchedJob) -> None:
        """A shepherd whose job runs already has (again) said hello: after a restart of the agent."""
        ...

    def ended(self, job_id: int, *, requeued: bool) -> None:
        """The epilog of a job ran on this node. ``requeued``: it will run again, so its image stays."""
        ...

    def suspended(self) -> Sequence[SuspendedJob]:
        """Every suspended job whose image this node can see (its own store and the shared one)."""
        ...

    def silent(self) -> str | None:
        """Why not all of these may be known, one line: a file system does not answer; ``None``: all are."""
        ...

    def sweep_stopped(self) -> str | None:
        """Why the sweep of images waits for an administrator, one line; ``None``: it does not."""
        ...

    def room(self) -> str | None:
        """Why nothing more fits into the store by the site's budget; ``None``: there is room."""
        ...


class InPlace(Protocol):
    """Looks after jobs that sleep in place (``mode=inplace``)."""

    idle_s: Callable[[int], float | None]
    """Set by the daemon: how long a job has been idle, where the policy would let it go for another one."""
    woken: Callable[[int, str], None]
    """Set by the daemon: told of a job that runs again, and how that came."""
    pressed: Callable[[], None]
    """Set by the daemon: told that jobs are ``wanted`` out of the way."""

    def start(self) -> None:
        """Begin to watch, after ``Keeper.recover``."""
        ...

    def stop(self) -> None:
        """No more wakes. What sleeps goes on sleeping, and the next agent takes it up."""
        ...

    gpus_of: Callable[[int], Sequence[str] | None]
    """Set by the daemon: UUIDs of the GPUs of a job that has not started."""

    def admit(self, job: WatchedJob) -> bool:
        """Whether a job may start now; else its shepherd waits, and is told when it is its turn. Must not wait."""
        ...

    def holds(self, job_id: int) -> Phase | None:
        """The phase of a job that sleeps or wakes; ``None``: it does neither."""
        ...

    def wake(self, job_id: int, who: str) -> None:
        """Wake a job as soon as there is room. Raises ``Refused`` where it does not sleep."""
        ...

    def wake_on(self, indices: Sequence[int], why: str, timeout_s: float) -> list[int]:
        """Wake all that have memory on these GPUs (Slurm's numbers), and wait; those that sleep on."""
        ...

    def signalled(self, job_id: int, number: int) -> None:
        """Slurm sent a signal to a job. Must not wait."""
        ...

    def wanted(self, job_id: int) -> tuple[int, ...]:
        """The sleepers for which a job is to make room."""
        ...

    def view(self, job_id: int) -> dict[str, Any] | None:
        """What ``status`` shows of a sleeper; ``None``: it is none."""
        ...


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What the daemon gives to ``agent.orchestration.build``. Everything in it may be used by any thread."""

    config: Config
    node: str
    """This node's name in Slurm."""
    registry: Registry
    slurm: Callable[[], SlurmClient]
    """A new client, for one thread; the caller closes it."""
    gpus: Callable[[], AbstractContextManager[GpuDriver]]
    """The driver that the loop samples with, locked while it is used: be quick."""
    gpu_indices: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Slurm's numbers of the GPUs of each job here, as prologs have told."""


@dataclass(frozen=True, slots=True)
class Orchestration:
    """Everything that acts on jobs, made by ``agent.orchestration.build`` and handed to the daemon."""

    suspender: Suspender
    restorer: Restorer
    waker: Waker
    keeper: Keeper
    in_place: InPlace | None = None
    """``None``: nothing sleeps in place here."""
    stop: Callable[[], None] = lambda: None
    """Called when the agent ends: what goes on behind it, as copies of images, is left to the next one."""
