"""Interfaces between the agent's loop and the components that suspend, restore and wake jobs.

Each method is called from a worker thread of the agent, at most once at a time for one job, and may take minutes.
Expected failures raise ``AffinodeError`` with a one-line message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_affinode.base.config import Config
from slurm_affinode.base.counters import NO_COUNTERS, Counters
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id
from slurm_affinode.base.threads import Workers
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.gpu.interface import GpuDriver
from slurm_affinode.model.suspension import JobKey, Phase, Refusal
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension.compatibility import Compatibility
from slurm_affinode.suspension.job.registry import Link, Registry, WatchedJob
from slurm_affinode.suspension.job.shepherd import Hello, Reply
from slurm_affinode.suspension.records.record import SuspensionRecord
from slurm_affinode.suspension.records.shared_state import LastRestore, SuspendedJob

SampleAgain = Callable[[], str | None]
"""Samples the job's GPUs again: ``None`` if it is still idle, otherwise a description of the activity. To be called
under the CUDA lock. A signal that cannot be read does not count as idle. For a manual suspension it always returns
``None``."""


class AbortedError(AffinodeError):
    """A suspension in progress was aborted; the text states the reason."""


class InUseError(AbortedError):
    """A suspension was aborted because the job is in use again: a later one may succeed."""


def cause(error: Exception) -> str:
    """Return an exception as the reason why a suspension or restore failed, in one line."""
    return str(error) if isinstance(error, AffinodeError) else f"{type(error).__name__}: {error}"


class Refused(AffinodeError):  # noqa: N818 - names what is the case
    """A job cannot be suspended, restored or woken; nothing was changed. ``refusal`` states the reason."""

    exit_code = 1

    def __init__(self, refusal: Refusal, *, hint: str | None = None) -> None:
        super().__init__(refusal.text, hint=hint)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Arrival:
    """A shepherd that has connected before its job started, with its identity according to the kernel."""

    hello: Hello
    job_id: int
    uid: int
    gid: int
    init_pid: int
    init_started: int
    link: Link
    fds: tuple[int, ...]
    """The job's standard streams, open until ``restore`` returns: for ``criu --inherit-fd``."""
    foreign: tuple[str, ...] = ()
    """Namespaces of the shepherd that are not the node's, although those of a restored process tree will be."""
    groups: tuple[int, ...] = ()
    """Supplementary groups of the owner."""

    @property
    def init(self) -> Id:
        """The shepherd's identity; its namespaces are held (``pidfd.namespace``)."""
        return Id(self.init_pid, self.init_started)

    @property
    def owner(self) -> User:
        """The rights with which root acts for the job: those that Slurm has given to this attempt."""
        return User(self.uid, self.gid, self.groups)


class Suspender(Protocol):
    """Suspends jobs to free their GPUs."""

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """Return the reasons why this job cannot be suspended; empty if it can.

        Reads only, and takes about a second at most, since ``status`` calls it often.
        """
        ...

    def compatibility(self, job: WatchedJob) -> Compatibility:
        """Return the kinds of this job, and the reasons against a suspension in each mode. Reads only."""
        ...

    def suspend(self, job: WatchedJob, why: str, *, sample_again: SampleAgain, busy: bool = False) -> SuspensionRecord:
        """Suspend the job. Returns when its processes have ended and it is queued, or when it runs on unharmed.

        If it runs on, ``failure`` of the result states the reason. ``busy``: suspend it even if it is busy (in place
        only); it is queued to wake immediately. Raises ``Refused``, and ``AffinodeError`` if nothing was begun.
        """
        ...


class Restorer(Protocol):
    """Restores jobs from their images."""

    def restore(self, arrival: Arrival) -> Reply:
        """Restore the image of the job, or return what the shepherd is to do instead.

        The agent keeps the shepherd waiting meanwhile.
        """
        ...


class Waker(Protocol):
    """Releases suspended jobs."""

    def wake(self, key: JobKey, who: str, *, admin: bool = False, from_start: bool = False) -> bool:
        """Release a suspended job on behalf of ``who``. Idempotent. Raises ``Refused``.

        ``admin``: ``who`` may also release jobs held by an administrator. ``from_start``: its image is given up, and
        its script starts from the beginning. Returns ``False`` if the image is not in the
        shared store yet; the job is then released later without another call.
        """
        ...

    def tick(self) -> None:
        """Release the jobs that are due. Called every few seconds; must not raise."""
        ...


class Keeper(Protocol):
    """Keeps track of suspended jobs and cleans up after them."""

    def recover(self) -> None:
        """Complete or roll back what the journal records.

        Called once when the agent starts, before it answers any shepherd.
        """
        ...

    def identify(self, job: WatchedJob) -> tuple[JobKey, int]:
        """Return the submission of a job and how often it was suspended.

        Taken from its image if it has one, otherwise from ``job.slurm``, which is set when this is called.
        """
        ...

    def registered(self, job: WatchedJob) -> None:
        """Handle a connection from the shepherd of a job that already runs, after a restart of the agent."""
        ...

    def last_restore(self, job: WatchedJob) -> LastRestore | None:
        """Return the restore of this attempt, or the loss after which it has started from its beginning."""
        ...

    def handle_epilog(self, job_id: int, *, requeued: bool) -> None:
        """Handle the epilog of a job on this node. ``requeued``: it will run again, so its image is kept."""
        ...

    def suspended(self) -> Sequence[SuspendedJob]:
        """Return every suspended job with an image visible to this node (in its own store or the shared one)."""
        ...

    def suspended_ids(self) -> frozenset[int] | None:
        """Return the IDs of the cluster's suspended jobs by their signed notes; ``None`` if these cannot be read."""
        ...

    def unresponsive(self) -> str | None:
        """Return why the list may be incomplete: a file system does not respond. ``None`` if it is complete."""
        ...

    def sweep_stopped(self) -> str | None:
        """Return why the sweep of images waits for an administrator, in one line; ``None`` if it does not."""
        ...

    def room(self) -> str | None:
        """Return why the site's limits leave no room in the store; ``None`` if there is room."""
        ...


class InPlace(Protocol):
    """Manages jobs suspended in place (``mode=inplace``)."""

    def start(self) -> None:
        """Start watching; called after ``Keeper.recover``."""
        ...

    def stop(self) -> None:
        """Stop waking jobs. Those that sleep remain asleep, and the next agent takes them over."""
        ...

    def admit(self, job: WatchedJob) -> bool:
        """Return whether a job may start now; otherwise its shepherd waits until it is notified. Must not block."""
        ...

    def holds(self, job_id: int) -> Phase | None:
        """Return the phase of a job that sleeps or wakes; ``None`` for any other job."""
        ...

    def wake(self, job_id: int, who: str) -> None:
        """Wake a job as soon as there is room. Raises ``Refused`` if it does not sleep."""
        ...

    def wake_on(self, indices: Sequence[int], why: str, timeout_s: float) -> list[int]:
        """Wake all jobs with memory on these GPUs (Slurm's indices) and wait; return those that still sleep."""
        ...

    def signalled(self, job_id: int, number: int) -> None:
        """Handle a signal that Slurm has sent to a job. Must not block."""
        ...

    def needed_by(self, job_id: int) -> tuple[int, ...]:
        """Return the sleepers for which a job is to make room."""
        ...

    def view(self, job_id: int) -> dict[str, Any] | None:
        """Return the data that ``status`` shows for a sleeper; ``None`` if the job does not sleep."""
        ...


@dataclass(frozen=True, slots=True)
class DaemonCalls:
    """Functions of the daemon that ``InPlace`` calls from its threads, not before it is started."""

    idle_s: Callable[[int], float | None] = lambda job_id: None
    """Returns how long a job has been idle; ``None`` if the policy would not suspend it for another job."""
    woken: Callable[[int, str, float | None], None] = lambda job_id, text, slept_s: None
    """Called when a job runs again, with a description of its wake and the length of its sleep; ``None``: it was moved
    out although it was busy."""
    pressed: Callable[[], None] = lambda: None
    """Called when jobs have to make room (``InPlace.needed_by``)."""
    gpus_of: Callable[[int], Sequence[str] | None] = lambda job_id: None
    """Returns the UUIDs of the GPUs of a job that has not started; ``None`` if they are not known."""
    turn_left_s: Callable[[int], float | None] = lambda job_id: None
    """Returns the seconds until a job may be moved out for another one even if it is busy, at most 0: now; ``None``: it
    stays while it is busy."""


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Objects that the daemon passes to ``agent.composition.build``. All of them are thread-safe."""

    config: Config
    node: str
    """This node's name in Slurm."""
    registry: Registry
    slurm: Callable[[], SlurmClient]
    """Creates a client for one thread; the caller closes it."""
    gpus: Callable[[], AbstractContextManager[GpuDriver]]
    """The driver that the loop samples with. It is locked while the context lasts, so keep it short."""
    workers: Workers
    """The worker threads of the agent, which closes the queues that are still open when it has stopped."""
    gpu_indices: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Slurm's GPU indices of each job on this node, as reported by prologs."""
    calls: DaemonCalls = DaemonCalls()
    counters: Counters = NO_COUNTERS
    """The metrics of the agent, see ``suspension.metrics``."""


@dataclass(frozen=True, slots=True)
class Orchestration:
    """The components that act on jobs, created by ``agent.composition.build`` for the daemon."""

    suspender: Suspender
    restorer: Restorer
    waker: Waker
    keeper: Keeper
    in_place: InPlace | None = None
    """``None``: no job sleeps in place on this node."""
    stop: Callable[[], None] = lambda: None
    """Called when the agent exits: background work, such as copying images, is left to the next agent."""
