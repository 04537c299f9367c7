"""The queue for GPU memory: sleepers that are to wake and jobs that are to start, with their Slurm comments.

A server may sleep and wake many times in a minute, so comments are sent to slurmctld at a limited rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.text import span
from slurm_affinode.base.threads import Workers
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import LOG
from slurm_affinode.suspension.inplace.gpu_sharing import Holder, Sharing

_SETTLED_S = 1.0
"""A comment is sent when it has not changed for this long."""
_COMMENT_RETRY_S = 15.0
"""Delay of a retry if Slurm did not respond."""


@dataclass(slots=True)
class _Comment:
    text: str | None
    since: float
    sent: str | None = None
    """The text last sent to Slurm; ``None``: nothing, or no comment."""
    pause_s: float = _SETTLED_S
    """Delay until it is sent."""


class Comments:
    """The desired comment of each job. Thread-safe; Slurm is called in a queue."""

    def __init__(self, slurm: SlurmClient, workers: Workers, now: Callable[[], float] = time.time) -> None:
        self._slurm = slurm
        self._now = now
        self._lock = threading.Lock()
        """Guards the comments to be sent."""
        self._desired: dict[int, _Comment] = {}
        self._queue = workers.queue("comment", last=True)

    @property
    def due(self) -> bool:
        """Whether comments are pending."""
        with self._lock:
            return any(comment.text != comment.sent for comment in self._desired.values())

    def set(self, job_id: int, text: str) -> None:
        """Set our part of a job's comment, before the owner's."""
        self._request(job_id, text)

    def clear(self, job_id: int) -> None:
        """Remove our part of a job's comment."""
        self._request(job_id, None)

    def forget(self, job_id: int) -> None:
        """Drop a job that has ended: its comment stays."""
        with self._lock:
            self._desired.pop(job_id, None)

    def _request(self, job_id: int, text: str | None) -> None:
        with self._lock:
            desired = self._desired.get(job_id)
            if desired is None:
                # The comment set by an earlier agent is unknown: even "no comment" has to be sent once.
                self._desired[job_id] = _Comment(text, self._now(), sent=_untold(text))
            elif desired.text != text:
                desired.text, desired.since, desired.pause_s = text, self._now(), _SETTLED_S

    def tick(self, now: float) -> None:
        """Send the comments that have settled."""
        with self._lock:
            ready = [
                (job_id, value.text)
                for job_id, value in self._desired.items()
                if value.text != value.sent and not 0 <= now - value.since < value.pause_s
            ]
            for job_id, text in ready:
                self._desired[job_id].sent = text
        for job_id, text in ready:
            self._queue.post(self._send, job_id, text)

    def stop(self) -> None:
        """Set no more comments; the next agent checks them."""
        self._queue.close()

    def _send(self, job_id: int, text: str | None) -> None:
        slurm = self._slurm
        try:
            job = slurm.job(job_id)
            before = job.comment
            if text is not None:
                after = messages.comment(text, before)
            else:  # another comment, as on the loss of the job's processes, stays
                after = messages.comment_of_owner(before) if messages.sleeps_in_place(before) else before or ""
            if after != (before or "") and not job.has_ended:  # Slurm does not change the comment of an ended job
                slurm.set_comment(job_id, after)
        except UnreachableError as error:
            LOG.info("job %s: cannot set its comment yet: %s", job_id, error)
            self._later(job_id, text)
            return
        except AffinodeError as error:
            LOG.info("job %s: cannot set its comment: %s", job_id, error)
        self._sent(job_id, text)

    def check(self, job_id: int) -> None:
        """Remove the comment of an earlier agent from a job that runs."""
        self._queue.post(self._check, job_id)

    def _check(self, job_id: int) -> None:
        try:
            if messages.sleeps_in_place(self._slurm.job(job_id).comment):
                self.clear(job_id)
        except AffinodeError as error:
            LOG.info("job %s: its comment cannot be read: %s", job_id, error)

    def _later(self, job_id: int, text: str | None) -> None:
        with self._lock:
            desired = self._desired.get(job_id)
            if desired is not None and desired.text == text == desired.sent:
                desired.sent, desired.since, desired.pause_s = _untold(text), self._now(), _COMMENT_RETRY_S

    def _sent(self, job_id: int, text: str | None) -> None:
        with self._lock:
            desired = self._desired.get(job_id)
            if text is None and desired is not None and desired.text is None and desired.sent is None:
                del self._desired[job_id]


def _untold(text: str | None) -> str | None:
    """Return a value that differs from the text to send."""
    return "" if text is None else None


_RETRY_S = 0.5
"""Interval at which a queue without changes is checked: memory may have become free by itself."""
_LOG_EVERY_S = 1.0
"""Waits up to this time are not worth a comment."""


class Deadline(Enum):
    """How a job in the queue relates to the site's deadline."""

    AHEAD = auto()
    MISSED = auto()
    """It has waited longer, which was logged."""
    HANDLED = auto()
    """The site's setting for such jobs was applied to it."""


@dataclass(slots=True)
class QueuePlace:
    """The place of a job in the queue. All but the first two are set by the queue."""

    requested_epoch: float
    """Since when it waits; its place in the queue, also under the next agent."""
    turn: int
    """Order of jobs that came at the same time: lower is earlier."""
    waits: str = ""
    """Why it waits, in one line."""
    deadline: Deadline = Deadline.AHEAD
    waits_since: tuple[float, float] | None = None
    """The time since which it waits, and the clock's reading at that time."""


class QueuedJob(Holder, Protocol):
    """A job in the queue."""

    @property
    def place(self) -> QueuePlace:
        """Its place in the queue."""
        ...

    @property
    def verb(self) -> str:
        """The event that it waits for: ``wake`` or ``start``."""
        ...


class GpuQueue:
    """The queue, served according to ``core.inplace``. ``serve`` is for one thread, the rest for any.

    No lock: ``serve`` replaces what other threads read as a whole, and ``turn`` is called under the lock of the caller.
    """

    def __init__(
        self, sharing: Sharing, comments: Comments, deadline_s: float, clock: Callable[[], float],
        *, pressed: Callable[[], None],
    ) -> None:  # fmt: skip
        """``deadline_s``: a job that has waited this long is overdue. ``clock``: a monotonic clock, in seconds.

        ``pressed`` is called when other jobs have to make room.
        """
        self._sharing = sharing
        self._comments = comments
        self._deadline_s = deadline_s
        self._clock = clock
        self._turns = 0
        self._needed_by: dict[int, tuple[int, ...]] = {}
        self._served = -1e9
        self._changed = True
        self._pressed = pressed

    def turn(self) -> int:
        """Return a number for a new job, above all earlier ones."""
        self._turns += 1
        self._changed = True
        return self._turns

    def changed(self) -> None:
        """Record an event that the queue may have waited for."""
        self._changed = True

    def needed_by(self, job_id: int) -> tuple[int, ...]:
        """Return the jobs for which a job is to make room."""
        return self._needed_by.get(job_id, ())

    def serve(
        self,
        now: float,
        waiting: Sequence[QueuedJob],
        starting: Sequence[Holder],
        *,
        asleep: frozenset[int],
        start: Callable[[QueuedJob], None],
        late: Callable[[QueuedJob, str], None],
    ) -> None:
        """Call ``start`` for the jobs whose turn it is, and record why the others wait.

        See ``Sharing.plan``. ``late`` is called for a job that is overdue.
        """
        if not waiting:
            self._press({})
            return
        if not self._changed and 0 <= now - self._served < _RETRY_S:
            return
        self._served, self._changed = now, False
        line = sorted(waiting, key=lambda job: (job.place.requested_epoch, job.place.turn))
        try:
            plan = self._sharing.plan(line, starting, asleep)
        except GpuError as error:
            for waiter in line:
                waiter.place.waits = str(error)
            return
        for job in line:
            if job.job_id in plan.wakes:
                job.place.waits = ""
                start(job)
            else:
                self._wait(job, plan.waits[job.job_id], now, late, in_turn=job.job_id in plan.in_turn)
        self._press(plan.make_room)

    def _wait(
        self, job: QueuedJob, why: str, now: float, late: Callable[[QueuedJob, str], None], *, in_turn: bool
    ) -> None:
        if job.place.waits != why:
            LOG.info("job %s: waiting to %s: %s", job.job_id, job.verb, why)
            job.place.waits = why
        if self._waited(job, now) > _LOG_EVERY_S:
            self._comments.set(job.job_id, messages.waits(job.verb, why))
        self.check_deadline(job, why, now, late, in_turn=in_turn)

    def check_deadline(
        self, job: QueuedJob, why: str, now: float, late: Callable[[QueuedJob, str], None], *, in_turn: bool = False
    ) -> None:
        """Call ``late``, once, for a job that has waited longer than the site allows; ``why``: the reason.

        ``in_turn``: other jobs will make room for it, each after its turn. It is marked as overdue then, and no more.
        """
        waited = self._waited(job, now)
        if waited < self._deadline_s:
            return
        text = f"it has waited for {span(waited)} to {job.verb}: {why}"
        if job.place.deadline is Deadline.AHEAD:
            job.place.deadline = Deadline.MISSED
            LOG.error("job %s: %s", job.job_id, text)
        if job.place.deadline is Deadline.MISSED and not in_turn:
            job.place.deadline = Deadline.HANDLED
            late(job, text)

    def _waited(self, job: QueuedJob, now: float) -> float:
        """Return how long it has waited, in seconds.

        Setting the clock must not make a job overdue, since it may be ended for that.
        """
        place = job.place
        if place.waits_since is None or place.waits_since[0] != place.requested_epoch:
            place.waits_since = place.requested_epoch, self._clock() - max(0.0, now - place.requested_epoch)
        return self._clock() - place.waits_since[1]

    def _press(self, make_room: Mapping[int, int]) -> None:
        needed_by: dict[int, tuple[int, ...]] = {victim: (waiter,) for victim, waiter in make_room.items()}
        changed, self._needed_by = needed_by != self._needed_by, needed_by
        if changed and needed_by:
            self._pressed()
