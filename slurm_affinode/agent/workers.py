"""Suspensions and restores in worker threads, so that sampling continues meanwhile.

Users take turns, and stalled restores of one user do not block those of others.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial

from slurm_affinode.base.counters import NO_COUNTERS, Counters
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import one_line
from slurm_affinode.base.threads import Workers, WorkQueue, surviving
from slurm_affinode.model.suspension import Mode
from slurm_affinode.suspension import metrics
from slurm_affinode.suspension.interface import Arrival, Orchestration, Refused, SampleAgain
from slurm_affinode.suspension.job.registry import Link, WatchedJob
from slurm_affinode.suspension.job.shepherd import Hold, Reply, Restored, SignalMessage, Start, Wait

log = logging.getLogger(__name__)

RESTORES_AT_ONCE = 8
RESTORES_OF_A_USER = 4
"""Stalled restores of one user, for example on one of its files, do not block those of others."""
MOST_RESTORES = 64
"""Including the first one of each user, which does not wait for other users."""
KEPT_OUTCOMES = 4096
KEEP_WAITING_S = 10.0
"""Interval of messages to a shepherd that waits for its restore; it gives up after five minutes without one."""


Promised = Callable[[bool], None]
"""Called when a suspension has ended, with whether the GPUs are free."""
Promising = Callable[[], Promised | None]
"""Promises a job's GPUs to a waiting job; ``None`` if the waiting jobs have a promise from another node."""
PROMISED = "promised"
BUSY = "busy"
"""Code of a suspension that was given up because the job is in use again."""
FAILED = "failed"
"""Code of a suspension that has failed; the job runs on."""
SUSPENDING = "suspending"
SIGNALLED = "signalled"
"""Its owner requested a signal in advance; the notice period takes no slot from other jobs."""
LINK_CHECK_S = 1.0
"""Interval for checking that a signaled job still runs, since its GPUs are promised to another one."""
STOPPED = "the agent was stopped first"


@dataclass(frozen=True, slots=True)
class WorkOutcome:
    """Result of the last attempt to suspend or restore a job."""

    at_epoch: float
    succeeded: bool
    text: str
    code: str = ""


class Work:
    """Runs suspensions and restores. Thread-safe."""

    def __init__(
        self,
        orchestration: Orchestration,
        workers: Workers,
        suspensions_at_once: int,
        *,
        now: Callable[[], float] = time.time,
        changed: Callable[[int], None] = lambda job_id: None,
        counters: Counters = NO_COUNTERS,
    ) -> None:
        """``changed`` is called with each job on which work has ended."""
        self._orchestration = orchestration
        self._now = now
        self._changed = changed
        self._counters = counters
        self._lock = threading.Lock()
        """Guards the operations in progress, their GPUs, and their outcomes."""
        self._under_way: dict[int, str] = {}
        self._gpus: dict[int, int] = {}
        self._outcomes: dict[int, WorkOutcome] = {}
        at_once = max(1, suspensions_at_once)
        self._suspends = workers.queue("suspend", at_once, last=True)
        # A job suspended in place that waits for room does not wait for other jobs' checkpoint images as well.
        self._in_place = workers.queue("suspend in place", at_once, last=True)
        self._notices = workers.queue("notice", None)
        self._restores = workers.queue("restore", RESTORES_AT_ONCE, each=RESTORES_OF_A_USER, most=MOST_RESTORES)
        self._waits = workers.queue("waiting")

    # --- operations in progress

    def under_way(self) -> Mapping[int, str]:
        """Return ``signalled``, ``suspending`` or ``restoring``, by job ID."""
        with self._lock:
            return dict(self._under_way)

    def freeing(self) -> int:
        """Return the number of GPUs that will be free soon: of jobs being suspended or in their notice period."""
        with self._lock:
            going = (job_id for job_id, what in self._under_way.items() if what in (SUSPENDING, SIGNALLED))
            return sum(self._gpus.get(job_id, 0) for job_id in going)

    def outcome(self, job_id: int) -> WorkOutcome | None:
        """Return the result of the last attempt on a job."""
        with self._lock:
            return self._outcomes.get(job_id)

    def set_comment(self, job_id: int, text: str) -> None:
        """Record another event of a job, which ``status`` then shows as its last one."""
        with self._lock:
            self._outcomes[job_id] = WorkOutcome(self._now(), True, text, "woken")

    def forget(self, job_id: int) -> None:
        """Drop the result of a job that has ended for good."""
        with self._lock:
            self._outcomes.pop(job_id, None)

    def _take(self, job_id: int, what: str, gpus: int = 0) -> bool:
        with self._lock:
            if job_id in self._under_way or self._notices.stopping.is_set():
                return False
            self._under_way[job_id] = what
            self._gpus[job_id] = gpus
            return True

    def _leave(self, job_id: int, outcome: WorkOutcome) -> None:
        with self._lock:
            self._under_way.pop(job_id, None)
            self._gpus.pop(job_id, None)
            self._outcomes[job_id] = outcome
            if len(self._outcomes) > KEPT_OUTCOMES:  # if no epilog reports the end of jobs
                del self._outcomes[next(iter(self._outcomes))]
        if outcome.code != PROMISED:  # else nothing was done, and the job is as idle as before
            self._changed(job_id)

    # --- suspending

    def suspend(
        self, job: WatchedJob, why: str, sample_again: SampleAgain, promising: Promising = lambda: lambda freed: None,
        *, busy: bool = False,
    ) -> bool:  # fmt: skip
        """Start to suspend a job. Return ``False`` if work on it is already under way, or the agent is stopping.

        ``busy``: see ``Suspender.suspend``.
        """
        act = partial(self._act, job, why, sample_again, busy=busy)
        notice = job.option.signal
        # A job in place gives no GPUs back to Slurm.
        gpus = 0 if job.option.mode is Mode.INPLACE else len(job.devices or ())
        if notice is None or notice.before_s == 0:
            if not self._take(job.job_id, SUSPENDING, gpus):
                return False
            self._queue(job).post(self._suspend, job, act, promising, user=job.uid)
            return True
        if not self._take(job.job_id, SIGNALLED, gpus):
            return False
        self._notices.post(self._suspend, job, act, promising)
        return True

    def _queue(self, job: WatchedJob) -> WorkQueue:
        return self._in_place if job.option.mode is Mode.INPLACE else self._suspends

    def _suspend(self, job: WatchedJob, act: Callable[[], WorkOutcome], promising: Promising) -> None:
        outcome, refused = self._stopped(), False
        with surviving(log, "job %d: not suspended, by a fault of the agent", job.job_id) as fault:
            try:
                outcome = self._promised(job, act, promising)
            except Refused as error:
                outcome, refused = WorkOutcome(self._now(), False, str(error), error.refusal.code), True
            except AffinodeError as error:
                outcome = WorkOutcome(self._now(), False, str(error), FAILED)
        if fault.error is not None:
            outcome = WorkOutcome(self._now(), False, f"a fault of the agent: {type(fault.error).__name__}", "fault")
        if outcome.code != PROMISED:  # else nothing was attempted
            kind = "refused" if refused else outcome.code
            self._counters.add(metrics.SUSPENSIONS, mode=job.option.mode.value, outcome=kind)
        log.log(
            logging.INFO if outcome.succeeded else logging.WARNING, "job %d: %s", job.job_id, one_line(outcome.text)
        )
        self._leave(job.job_id, outcome)

    def _promised(self, job: WatchedJob, act: Callable[[], WorkOutcome], promising: Promising) -> WorkOutcome:
        promised = promising()
        if promised is None:
            return WorkOutcome(self._now(), False, "not suspended: waiting jobs get other GPUs", PROMISED)
        freed = False
        try:
            outcome = self._attempt(job, act)
            freed = outcome.succeeded
        finally:
            promised(freed)
        return outcome

    def _attempt(self, job: WatchedJob, act: Callable[[], WorkOutcome]) -> WorkOutcome:
        notice = job.option.signal
        if notice is None:  # the suspender refuses what cannot be suspended
            return act()
        refusals = self._orchestration.suspender.refusals(job)
        if refusals:
            raise Refused(refusals[0])
        number = signal.Signals[f"SIG{notice.name}"].value
        log.info("job %d: signal %s, %d s before it is suspended", job.job_id, notice.name, notice.before_s)
        job.link.send(SignalMessage(number))
        if notice.before_s == 0:
            return act()
        if not self._waited(job, notice.before_s):
            return (
                self._stopped()
                if self._notices.stopping.is_set()
                else WorkOutcome(self._now(), False, "its script has ended", "gone")
            )
        try:
            return self._queue(job).submit(act, user=job.uid).result()
        except CancelledError:
            return self._stopped()

    def _waited(self, job: WatchedJob, seconds: float) -> bool:
        """Wait; return ``False`` if meanwhile the agent was stopped or the job ended."""
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self._notices.stopping.wait(min(remaining_s, LINK_CHECK_S)) or not job.link.open:
                return False
        return True

    def _act(self, job: WatchedJob, why: str, sample_again: SampleAgain, *, busy: bool) -> WorkOutcome:
        with self._lock:
            self._under_way[job.job_id] = SUSPENDING
        sample = sample_again()
        if sample is not None:
            return WorkOutcome(self._now(), False, f"not suspended, it works again: {sample}", BUSY)
        log.info("job %d: being suspended: %s", job.job_id, one_line(why))
        suspension = self._orchestration.suspender.suspend(job, why, sample_again=sample_again, busy=busy)
        if suspension.failure is not None:
            if suspension.phase.value in metrics.PHASES:
                self._counters.add(
                    metrics.SUSPENSION_FAILURES, mode=job.option.mode.value, phase=suspension.phase.value
                )
            code = BUSY if suspension.in_use else FAILED
            return WorkOutcome(self._now(), False, f"not suspended, it runs on: {suspension.failure}", code)
        return WorkOutcome(self._now(), True, f"suspended: {why}", "suspended")

    def _stopped(self) -> WorkOutcome:
        return WorkOutcome(self._now(), False, STOPPED, "stopped")

    # --- restoring

    def restore(self, arrival: Arrival, then: Callable[[Arrival, Reply], None]) -> bool:
        """Start to restore a job. ``then`` gets the reply before it is sent. Return ``False`` as ``suspend`` does."""
        if not self._take(arrival.job_id, "restoring"):
            return False
        over = threading.Event()
        self._waits.later(KEEP_WAITING_S, self._keep_waiting, arrival.link, over)
        self._restores.post(self._restore, arrival, then, over, user=arrival.uid)
        return True

    def _keep_waiting(self, link: Link, over: threading.Event) -> None:
        if not over.is_set():
            link.send(Wait())
            self._waits.later(KEEP_WAITING_S, self._keep_waiting, link, over)

    def _restore(self, arrival: Arrival, then: Callable[[Arrival, Reply], None], over: threading.Event) -> None:
        reply: Reply = Hold("the agent could not restore it; see its log")
        text = "restore failed"
        with surviving(log, "job %d: not restored, by a fault of the agent", arrival.job_id):
            try:
                reply = self._orchestration.restorer.restore(arrival)
                text = {Start: "started afresh", Hold: "held"}.get(type(reply), "restored")
                if isinstance(reply, Restored) and reply.trouble:
                    text = f"restored; {reply.trouble}"
            except AffinodeError as error:
                reply, text = Hold(str(error)), f"held: {error}"
        over.set()
        self._counters.add(metrics.RESTORES, outcome={Start: "fresh", Hold: "held"}.get(type(reply), "restored"))
        log.info("job %d: %s", arrival.job_id, one_line(text))
        try:
            then(arrival, reply)
        finally:
            self._leave(arrival.job_id, WorkOutcome(self._now(), not isinstance(reply, Hold), text, "restore"))

    def stop(self, wait_s: float) -> None:
        """Accept no more work and wait up to ``wait_s`` seconds. The journal covers work that is unfinished then."""
        for queue in (self._notices, self._suspends, self._in_place, self._restores):
            queue.close()
        deadline = time.monotonic() + wait_s
        while self.under_way() and time.monotonic() < deadline:
            time.sleep(0.05)
