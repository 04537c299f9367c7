"""The state of a job that sleeps in place, loaded from its journal so that the next agent can continue."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.model.suspension import Phase, SuspendOption
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.inplace.file_locks import Lock
from slurm_affinode.suspension.inplace.freezer import SIGNALS, Calls
from slurm_affinode.suspension.inplace.sockets import Look, Own, look_of
from slurm_affinode.suspension.records.journal import JobJournal, JournalError
from slurm_affinode.suspension.records.record import SuspensionFacts

TURN_OVER = "it was busy when its turn was over"
"""The wake request of a job that was moved out although it was busy."""
_RETRY_S, _RETRY_MAX_S = 1.0, 60.0


@dataclass(slots=True)
class Sleeper:
    """One job, from the moment at which its GPU memory may have been moved out."""

    journal: JobJournal
    job_id: int
    shown: str
    """The ID shown to users: ``123_4`` for an array task, since its raw ID may be that of the whole array."""
    init_pid: int
    init_started: int
    option: SuspendOption
    cuda: tuple[int, ...]
    """CUDA processes, in the order in which they are restored."""
    held: Mapping[str, int]
    """UUID -> bytes that it held."""
    why: str
    """The reason for its suspension."""
    how: str = SIGNALS
    stay: frozenset[int] = frozenset()
    """Processes that were stopped before the suspension."""
    calls: Calls = frozenset()
    """Signals that were pending when its suspension began, and that no process has received."""
    since_epoch: float = 0.0
    pids: tuple[int, ...] = ()
    own: Own = field(default_factory=Own)
    locks: frozenset[Lock] = frozenset()
    """Locks on files that its processes hold."""
    on_request: bool = True
    """Not all of its sockets serve communication between its own processes only."""
    before: Look = field(default_factory=dict)
    """State of its sockets before the locks; data received since then is a request."""
    turning: threading.Lock = field(default_factory=threading.Lock)
    """Held while its processes are thawed or frozen again."""
    ahead: tuple[int, ...] = ()
    """Processes that were thawed before their supervisors; empty: none yet."""
    ahead_epoch: float = 0.0
    """When they were thawed."""
    thawed: bool = False
    """All its processes run, and wait for their GPU memory where they need it."""
    signalled: bool = False
    """It was thawed for a signal, and is not frozen again before it has been awake."""
    stop_epoch: float | None = None
    """When Slurm sent it a stop signal, if that was the last signal."""
    requested_epoch: float | None = None
    """Time of the wake request; ``None``: there is none."""
    requested_why: str = ""
    noted: bool = False
    """The journal has the wake request and its time, so that it keeps its place in the queue of the next agent."""
    turn: int = 0
    """Order of jobs that came at the same time: lower is earlier."""
    waking: bool = False
    waits: str = ""
    """Why it has not been woken yet."""
    held_back: str = ""
    """Why it must not be woken despite a request, and is not in the queue."""
    failure: str = ""
    """Why it could not be woken."""
    failures: int = 0
    retry_epoch: float = 0.0
    overdue: bool = False
    late: bool = False
    waits_since: tuple[float, float] | None = None
    """See ``queue.InLine``."""
    announced: bool = False
    """A mail about the suspension was queued for its owner, if the site has enabled that."""

    @property
    def verb(self) -> str:
        """See ``queue.InLine``."""
        return "wake"

    @property
    def frozen(self) -> bool:
        """Whether its processes are stopped, as far as known, and are not about to be thawed."""
        return self.journal.phase is Phase.FROZEN and not self.thawed and not self.waking

    @property
    def wakes_on_request(self) -> bool:
        """Whether a request from outside can reach it."""
        return bool(self.own) and self.on_request

    @property
    def comment(self) -> str:
        """Its comment while there is no wake request."""
        return messages.asleep(self.why, self.gpu_bytes, self.shown, on_request=self.wakes_on_request)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that were moved out."""
        return sum(self.held.values())

    @property
    def asking(self) -> SuspensionFacts:
        """Time and reason of the wake request, for the journal."""
        why = None if self.requested_epoch is None else self.requested_why
        return SuspensionFacts(requested_epoch=self.requested_epoch, requested_why=why)

    def note(self) -> None:
        """Record the wake request in the journal, for the next agent. Raises ``JournalError``; not retried."""
        self.noted = True
        self.journal.write(self.journal.phase, self.asking)

    def failed(self, why: str, now: float) -> float:
        """Record a failed wake; return the delay of the retry in seconds, longer each time."""
        pause = min(_RETRY_MAX_S, _RETRY_S * 2.0 ** min(self.failures, 10))
        self.failures += 1
        self.failure, self.retry_epoch = messages.reason(why), now + pause
        return pause

    def pauses(self, now: float) -> bool:
        """Return whether a retry is not due yet; a clock that was set back does not extend the delay."""
        return 0 < self.retry_epoch - now <= _RETRY_MAX_S

    def view(self, now: float, *, held: bool, raised: int | None) -> dict[str, Any]:
        """Return the data that ``status`` shows for it at that time (epoch).

        ``held``: Slurm has suspended it; ``raised``: bytes by which its memory limit is raised; ``None``: unknown.
        """
        return {
            "starting": False,
            "since": self.since_epoch,
            "asleep_s": max(0.0, now - self.since_epoch),
            "why": self.why,
            "gpu_bytes": self.gpu_bytes,
            "limit_raised_bytes": raised,
            "frozen_by": self.how,
            "wakes_on_request": self.wakes_on_request,
            "suspended_by_slurm": held,
            "file_locks": len(self.locks),
            "asked": self.requested_epoch,
            "asked_why": self.requested_why or None,
            "waking": self.waking,
            "waits": self.waits or None,
            "overdue": self.overdue,
            "failure": self.failure or None,
        }

    @classmethod
    def of(cls, journal: JobJournal) -> Sleeper:
        """Load it from its journal. Raises ``JournalError`` if that is not of a suspension in place."""
        record = journal.record
        if record.cuda_pids is None or record.held_bytes is None:
            raise JournalError(f"{journal.path}: is not the journal of a suspension in place")
        return cls(
            journal=journal, job_id=record.key.job_id, shown=record.called, init_pid=record.init_pid,
            init_started=record.init_started, option=record.option, cuda=record.cuda_pids, held=record.held_bytes,
            why=record.why or "", how=record.how or SIGNALS, stay=frozenset(record.stopped_pids or ()),
            calls=frozenset(record.calls or ()),
            since_epoch=record.phases.get(Phase.PARKED, record.began_epoch),
            on_request=True if record.on_request is None else record.on_request,
            before=look_of(record.sockets or {}), announced=Phase.FROZEN in record.phases,
        )  # fmt: skip
