"""A job that sleeps in place: what its journal records, and its state, loaded so that the next agent can continue.

The request to wake it, and its processes, have a state each. All transitions are methods of this module:

    request     NONE --request--> QUEUED --begin_wake--> WAKING --(awake: the sleeper is dropped)
                                  QUEUED <--end_wake---- WAKING    (it was not woken, and waits for a retry)
                                  QUEUED --hold_back---> HELD_BACK --requeue--> QUEUED
    processes   STOPPED --lead--> LEADING --complete--> RUNNING    (``lead`` suffices if no supervisor is left to thaw)
                STOPPED <--stop or forget_lead-- LEADING,  STOPPED <--stop-- RUNNING

A failed wake freezes the processes again (``stop``); a signal thaws them before the wake, and keeps them running.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from slurm_affinode.model.suspension import Phase, SuspendOption
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.inplace.file_locks import Lock
from slurm_affinode.suspension.inplace.freezer import SIGNALS, Calls
from slurm_affinode.suspension.inplace.queue import Deadline, QueuePlace
from slurm_affinode.suspension.inplace.sockets import JobSockets, SocketTable, table_of
from slurm_affinode.suspension.records.journal import JobJournal, JournalError
from slurm_affinode.suspension.records.record import SuspensionFacts

TURN_OVER = "it was busy when its turn was over"
"""The wake request of a job that was moved out although it was busy."""
_RETRY_S, _RETRY_MAX_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class SleepFacts:
    """Facts in the journal of a sleep, which do not change while the job sleeps."""

    job_id: int
    shown: str
    """The ID shown to users: ``123_4`` for an array task, since its raw ID may be that of the whole array."""
    init_pid: int
    init_started: int
    option: SuspendOption
    cuda: tuple[int, ...]
    """CUDA processes, in the order in which they are restored."""
    held_bytes: Mapping[str, int]
    """UUID -> bytes that it held."""
    why: str
    """The reason for its suspension."""
    mechanism: str
    """How its processes are stopped; see ``freezer``."""
    calls: Calls
    """Signals that were pending when its suspension began, and that no process has received."""
    since_epoch: float
    on_request: bool
    """Not all of its sockets serve communication between its own processes only."""
    before: SocketTable
    """State of its sockets before the locks; data received since then is a request."""

    @classmethod
    def of(cls, journal: JobJournal) -> SleepFacts:
        """Return the facts of a journal. Raises ``JournalError`` if that is not of a suspension in place."""
        record = journal.record
        if record.cuda_pids is None or record.held_bytes is None:
            raise JournalError(f"{journal.path}: is not the journal of a suspension in place")
        return cls(
            job_id=record.key.job_id, shown=record.called, init_pid=record.init_pid,
            init_started=record.init_started, option=record.option, cuda=record.cuda_pids, held_bytes=record.held_bytes,
            why=record.why or "", mechanism=record.freeze_mechanism or SIGNALS, calls=frozenset(record.calls or ()),
            since_epoch=record.phases.get(Phase.PARKED, record.began_epoch),
            on_request=True if record.on_request is None else record.on_request,
            before=table_of(record.sockets or {}),
        )  # fmt: skip


class WakeState(Enum):
    """The state of the request to wake a sleeper."""

    NONE = auto()
    QUEUED = auto()
    """It waits for its turn, or for the retry of a failed wake."""
    HELD_BACK = auto()
    """Slurm has suspended the job, which joins the queue when Slurm resumes it."""
    WAKING = auto()


class ProcessState(Enum):
    """Which processes of a sleeper run."""

    STOPPED = auto()
    LEADING = auto()
    """Those that were thawed before their supervisors."""
    RUNNING = auto()
    """All, which wait for their GPU memory where they need it."""


@dataclass(slots=True)
class Thawing:
    """The state of the processes of a sleeper. Changed while ``lock`` is held, but for ``signalled``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while processes are thawed or frozen again."""
    processes: ProcessState = ProcessState.STOPPED
    leading: tuple[int, ...] = ()
    """Processes that were thawed before their supervisors."""
    leading_epoch: float = 0.0
    """When they were thawed."""
    signalled: bool = False
    """They were thawed for a signal, and are not frozen again before the job has been awake."""

    def lead(self, pids: tuple[int, ...], now: float, *, complete: bool) -> None:
        """Record that processes were thawed; ``complete``: no supervisor is left to thaw."""
        self.leading, self.leading_epoch = pids, now
        self.processes = ProcessState.RUNNING if complete else ProcessState.LEADING

    def complete(self) -> None:
        """Record that all processes were thawed."""
        self.processes = ProcessState.RUNNING

    def forget_lead(self) -> None:
        """Record that those that were thawed first may have stopped again."""
        self.leading = ()
        if self.processes is ProcessState.LEADING:
            self.processes = ProcessState.STOPPED

    def stop(self) -> None:
        """Record that all processes were frozen again."""
        self.leading, self.processes = (), ProcessState.STOPPED


@dataclass(slots=True)
class WakeFailures:
    """Failed attempts to wake a sleeper."""

    why: str = ""
    """Why the last one failed."""
    count: int = 0
    retry_epoch: float = 0.0

    def add(self, why: str, now: float) -> float:
        """Record a failed wake; return the delay of the retry in seconds, longer each time."""
        pause = min(_RETRY_MAX_S, _RETRY_S * 2.0 ** min(self.count, 10))
        self.count += 1
        self.why, self.retry_epoch = messages.reason(why), now + pause
        return pause

    def retry_now(self) -> None:
        """End the delay of the retry."""
        self.retry_epoch = 0.0

    def pauses(self, now: float) -> bool:
        """Return whether a retry is not due yet; a clock that was set back does not extend the delay."""
        return 0 < self.retry_epoch - now <= _RETRY_MAX_S


@dataclass(slots=True)
class Sleeper:
    """One job, from the moment at which its GPU memory may have been moved out."""

    journal: JobJournal
    facts: SleepFacts
    stay: frozenset[int]
    """Processes that were stopped before the suspension, and that have not run since."""
    announced: bool
    """A mail about the suspension was queued for its owner, if the site has enabled that."""
    pids: tuple[int, ...] = ()
    sockets: JobSockets = field(default_factory=JobSockets)
    locks: frozenset[Lock] = frozenset()
    """Locks on files that its processes hold."""
    wake_state: WakeState = WakeState.NONE
    request_why: str = ""
    recorded: bool = False
    """The journal has the wake request and its time, so that it keeps its place in the queue of the next agent."""
    stop_epoch: float | None = None
    """When Slurm sent it a stop signal, if that was the last signal."""
    thawing: Thawing = field(default_factory=Thawing)
    failures: WakeFailures = field(default_factory=WakeFailures)
    _place: QueuePlace | None = None

    @classmethod
    def of(cls, journal: JobJournal, *, announced: bool | None = None) -> Sleeper:
        """Load it from its journal. Raises ``JournalError`` if that is not of a suspension in place.

        ``announced``: ``None``: as the journal implies.
        """
        facts, record = SleepFacts.of(journal), journal.record
        if announced is None:
            announced = Phase.FROZEN in record.phases
        return cls(journal, facts, frozenset(record.stopped_pids or ()), announced)

    # --- transitions

    def request(self, why: str, turn: int, now: float) -> None:
        """Add a wake request, at the time that the journal has for it, or now."""
        before = self.journal.record.requested_epoch
        self._place = QueuePlace(now if before is None else before, turn)
        self.request_why, self.recorded = why, before is not None
        self.wake_state = WakeState.QUEUED

    def record_request(self) -> None:
        """Record the wake request in the journal, for the next agent. Raises ``JournalError``; not retried."""
        self.recorded = True
        self.journal.write(self.journal.phase, self.request_facts)

    def hold_back(self, why: str) -> None:
        """Take it out of the queue despite its request."""
        self.place.waits = why
        self.wake_state = WakeState.HELD_BACK

    def requeue(self, now: float) -> None:
        """Let a job that was held back join the queue, as with a request at this time."""
        self.place.requested_epoch, self.place.deadline = now, Deadline.AHEAD
        self.wake_state = WakeState.QUEUED

    def begin_wake(self) -> None:
        """Take it out of the queue: its turn has come."""
        self.place.waits = ""
        self.wake_state = WakeState.WAKING

    def end_wake(self) -> None:
        """Let it join the queue again, unless it is awake and no longer a sleeper."""
        self.wake_state = WakeState.QUEUED

    # --- derived

    @property
    def job_id(self) -> int:
        """See ``gpu_sharing.Holder``."""
        return self.facts.job_id

    @property
    def needed_bytes(self) -> Mapping[str, int]:
        """See ``gpu_sharing.Holder``."""
        return self.facts.held_bytes

    @property
    def cuda(self) -> tuple[int, ...]:
        """See ``gpu_sharing.Holder``."""
        return self.facts.cuda

    @property
    def verb(self) -> str:
        """See ``queue.QueuedJob``."""
        return "wake"

    @property
    def place(self) -> QueuePlace:
        """See ``queue.QueuedJob``. Only a job with a wake request has one."""
        assert self._place is not None  # noqa: S101 - the caller has checked the request
        return self._place

    @property
    def requested(self) -> bool:
        """Whether there is a wake request."""
        return self.wake_state is not WakeState.NONE

    @property
    def waking(self) -> bool:
        """Whether a wake is in progress."""
        return self.wake_state is WakeState.WAKING

    @property
    def requested_epoch(self) -> float | None:
        """Time of the wake request; ``None``: there is none."""
        return None if self._place is None else self._place.requested_epoch

    @property
    def frozen(self) -> bool:
        """Whether its processes are stopped, as far as known, and are not about to be thawed."""
        running = self.thawing.processes is ProcessState.RUNNING
        return self.journal.phase is Phase.FROZEN and not running and not self.waking

    @property
    def wakes_on_request(self) -> bool:
        """Whether a request from outside can reach it."""
        return bool(self.sockets) and self.facts.on_request

    @property
    def comment(self) -> str:
        """Its comment while there is no wake request."""
        facts = self.facts
        return messages.asleep(facts.why, self.gpu_bytes, facts.shown, on_request=self.wakes_on_request)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that were moved out."""
        return sum(self.needed_bytes.values())

    @property
    def request_facts(self) -> SuspensionFacts:
        """Time and reason of the wake request, for the journal."""
        why = self.request_why if self.requested else None
        return SuspensionFacts(requested_epoch=self.requested_epoch, requested_why=why)

    def view(self, now: float, *, is_held: bool, raised: int | None) -> dict[str, Any]:
        """Return the data that ``status`` shows for it at that time (epoch).

        ``held``: Slurm has suspended it; ``raised``: bytes by which its memory limit is raised; ``None``: unknown.
        """
        facts, place = self.facts, self._place
        return {
            "starting": False,
            "since": facts.since_epoch,
            "asleep_s": max(0.0, now - facts.since_epoch),
            "why": facts.why,
            "gpu_bytes": self.gpu_bytes,
            "limit_raised_bytes": raised,
            "frozen_by": facts.mechanism,
            "wakes_on_request": self.wakes_on_request,
            "suspended_by_slurm": is_held,
            "file_locks": len(self.locks),
            "asked": self.requested_epoch,
            "asked_why": self.request_why or None,
            "waking": self.waking,
            "waits": (None if place is None else place.waits) or None,
            "overdue": place is not None and place.deadline is not Deadline.AHEAD,
            "failure": self.failures.why or None,
        }
