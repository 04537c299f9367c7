"""What takes minutes: suspensions and restores, in threads of their own, so that the sampling goes on meanwhile."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from slurm_affinode.agent.interface import Arrival, LookAgain, Orchestration, Refused
from slurm_affinode.agent.registry import Link, WatchedJob
from slurm_affinode.agent.shepherds import Hold, Reply, Restored, Signal, Start, Wait, one_line
from slurm_affinode.agent.slots import Slots
from slurm_affinode.agent.surviving import surviving
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.suspension import Mode

log = logging.getLogger(__name__)

RESTORES_AT_ONCE = 8
RESTORES_OF_A_USER = 4
"""Restores that stall, on a file of their user for example, do not keep those of others waiting."""
MOST_RESTORES = 64
"""Including the first one of each user, which waits for nobody's."""
KEPT_OUTCOMES = 4096
KEEP_WAITING_S = 10.0
"""How often a shepherd that waits for its restore is told so; it gives up after five minutes of silence."""


Promised = Callable[[bool], None]
"""Called when a suspension is over, with whether the GPUs are free."""
Promising = Callable[[], Promised | None]
"""Promises a job's GPUs to one that waits for them; ``None``: those who wait have the promise of another node."""
PROMISED = "promised"
SUSPENDING = "suspending"
SIGNALLED = "signalled"
"""Its owner asked for a signal some time before: it is waited for, and takes no other job's turn."""
LINK_LOOK_S = 1.0
"""How often a job that has been signalled is looked for: its GPUs are promised to another one."""
STOPPED = "the agent was stopped first"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the last attempt on a job ended."""

    at_epoch: float
    done: bool
    text: str
    code: str = ""


class Work:
    """Runs suspensions and restores. Thread-safe."""

    def __init__(
        self,
        orchestration: Orchestration,
        suspensions_at_once: int,
        *,
        now: Callable[[], float] = time.time,
        changed: Callable[[int], None] = lambda job_id: None,
    ) -> None:
        """``changed`` is told of a job on which work has ended."""
        self._orchestration = orchestration
        self._now = now
        self._changed = changed
        self._lock = threading.Lock()
        self._under_way: dict[int, str] = {}
        self._gpus: dict[int, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._stop = threading.Event()
        self._suspends = ThreadPoolExecutor(max(1, suspensions_at_once), "suspend")
        # A sleeper that waits for room does not wait for other jobs' images as well.
        self._in_place = ThreadPoolExecutor(max(1, suspensions_at_once), "suspend in place")
        self._restores = Slots(RESTORES_AT_ONCE, RESTORES_OF_A_USER, MOST_RESTORES, "restore")

    # --- what is going on

    def under_way(self) -> Mapping[int, str]:
        """Job id -> ``signalled``, ``suspending`` or ``restoring``."""
        with self._lock:
            return dict(self._under_way)

    def freeing(self) -> int:
        """GPUs of jobs that are being suspended, or will be when their notice is over: they will be free soon."""
        with self._lock:
            going = (job_id for job_id, what in self._under_way.items() if what in (SUSPENDING, SIGNALLED))
            return sum(self._gpus.get(job_id, 0) for job_id in going)

    def outcome(self, job_id: int) -> Outcome | None:
        """How the last attempt on a job ended."""
        with self._lock:
            return self._outcomes.get(job_id)

    def tell(self, job_id: int, text: str) -> None:
        """Something else has happened to a job: what ``status`` shows of it last."""
        with self._lock:
            self._outcomes[job_id] = Outcome(self._now(), True, text, "woken")

    def forget(self, job_id: int) -> None:
        """The job has ended for good."""
        with self._lock:
            self._outcomes.pop(job_id, None)

    def _take(self, job_id: int, what: str, gpus: int = 0) -> bool:
        with self._lock:
            if job_id in self._under_way:
                return False
            self._under_way[job_id] = what
            self._gpus[job_id] = gpus
            return True

    def _leave(self, job_id: int, outcome: Outcome) -> None:
        with self._lock:
            self._under_way.pop(job_id, None)
            self._gpus.pop(job_id, None)
            self._outcomes[job_id] = outcome
            if len(self._outcomes) > KEPT_OUTCOMES:  # where no epilog tells that a job has ended
                del self._outcomes[next(iter(self._outcomes))]
        if outcome.code != PROMISED:  # else nothing was done with it, and it is as idle as before
            self._changed(job_id)

    # --- suspending

    def suspend(
        self, job: WatchedJob, why: str, look_again: LookAgain, promising: Promising = lambda: lambda freed: None
    ) -> bool:
        """Begin to suspend a job; ``False``: it is being worked on already."""
        notice = job.option.signal
        # One in place gives none back to Slurm.
        gpus = 0 if job.option.mode is Mode.INPLACE else len(job.devices or ())
        if notice is None or notice.before_s == 0:
            if not self._take(job.job_id, SUSPENDING, gpus):
                return False
            self._pool(job).submit(self._suspend, job, why, look_again, promising)
            return True
        if not self._take(job.job_id, SIGNALLED, gpus):
            return False
        threading.Thread(
            target=self._suspend, args=(job, why, look_again, promising), name=f"notice-{job.job_id}", daemon=True
        ).start()
        return True

    def _pool(self, job: WatchedJob) -> ThreadPoolExecutor:
        return self._in_place if job.option.mode is Mode.INPLACE else self._suspends

    def _suspend(self, job: WatchedJob, why: str, look_again: LookAgain, promising: Promising) -> None:
        outcome = self._stopped()
        with surviving(log, "job %d: not suspended, by a fault of the agent", job.job_id) as fault:
            try:
                outcome = self._promised(job, why, look_again, promising)
            except Refused as error:
                outcome = Outcome(self._now(), False, str(error), error.refusal.code)
            except AffinodeError as error:
                outcome = Outcome(self._now(), False, str(error), "failed")
        if fault.error is not None:
            outcome = Outcome(self._now(), False, f"a fault of the agent: {type(fault.error).__name__}", "fault")
        log.log(logging.INFO if outcome.done else logging.WARNING, "job %d: %s", job.job_id, one_line(outcome.text))
        self._leave(job.job_id, outcome)

    def _promised(self, job: WatchedJob, why: str, look_again: LookAgain, promising: Promising) -> Outcome:
        promised = promising()
        if promised is None:
            return Outcome(self._now(), False, "not suspended: those who wait for its GPUs get others", PROMISED)
        freed = False
        try:
            outcome = self._attempt(job, why, look_again)
            freed = outcome.done
        finally:
            promised(freed)
        return outcome

    def _attempt(self, job: WatchedJob, why: str, look_again: LookAgain) -> Outcome:
        refusals = self._orchestration.suspender.refusals(job)
        if refusals:
            raise Refused(refusals[0])
        notice = job.option.signal
        if notice is None:
            return self._act(job, why, look_again)
        number = signal.Signals[f"SIG{notice.name}"].value
        log.info("job %d: signal %s, %d s before it is suspended", job.job_id, notice.name, notice.before_s)
        job.link.send(Signal(number))
        if notice.before_s == 0:
            return self._act(job, why, look_again)
        if not self._waited(job, notice.before_s):
            return (
                self._stopped() if self._stop.is_set() else Outcome(self._now(), False, "its script has ended", "gone")
            )
        try:
            return self._pool(job).submit(self._act, job, why, look_again).result()
        except CancelledError:
            return self._stopped()

    def _waited(self, job: WatchedJob, seconds: float) -> bool:
        """Let time pass; ``False`` where meanwhile the agent was stopped, or the job ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._stop.wait(min(left, LINK_LOOK_S)) or not job.link.open:
                return False
        return True

    def _act(self, job: WatchedJob, why: str, look_again: LookAgain) -> Outcome:
        with self._lock:
            self._under_way[job.job_id] = SUSPENDING
        seen = look_again()
        if seen is not None:
            return Outcome(self._now(), False, f"not suspended, it works again: {seen}", "busy")
        log.info("job %d: being suspended: %s", job.job_id, one_line(why))
        suspension = self._orchestration.suspender.suspend(job, why, look_again=look_again)
        if suspension.failure is not None:
            return Outcome(self._now(), False, f"not suspended, it runs on: {suspension.failure}", "failed")
        return Outcome(self._now(), True, f"suspended: {why}", "suspended")

    def _stopped(self) -> Outcome:
        return Outcome(self._now(), False, STOPPED, "stopped")

    # --- restoring

    def restore(self, arrival: Arrival, then: Callable[[Arrival, Reply], None]) -> bool:
        """Begin to restore a job; ``then`` gets the reply, before it is sent. ``False``: it is being worked on."""
        if not self._take(arrival.job_id, "restoring"):
            return False
        over = threading.Event()
        threading.Thread(target=_keep_waiting, args=(arrival.link, over), name="waiting", daemon=True).start()
        try:
            self._restores.submit(arrival.uid, partial(self._restore, arrival, then, over))
        except RuntimeError:
            over.set()
            raise
        return True

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
        log.info("job %d: %s", arrival.job_id, one_line(text))
        try:
            then(arrival, reply)
        finally:
            self._leave(arrival.job_id, Outcome(self._now(), not isinstance(reply, Hold), text, "restore"))

    def stop(self, wait_s: float) -> None:
        """Take no more work. What is under way has ``wait_s`` seconds; the journal has what is not done by then."""
        self._stop.set()
        self._suspends.shutdown(wait=False, cancel_futures=True)
        self._in_place.shutdown(wait=False, cancel_futures=True)
        self._restores.close()
        deadline = time.monotonic() + wait_s
        while self.under_way() and time.monotonic() < deadline:
            time.sleep(0.05)


def _keep_waiting(link: Link, over: threading.Event) -> None:
    while not over.wait(KEEP_WAITING_S):
        link.send(Wait())
