"""Requeueing of a job, and the state of an attempt in Slurm. The state is queried first, so repetition is harmless."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.core.suspension import JobFact
from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm.interface import ControllerDownError, SlurmClient, SlurmError, UnknownJobError
from slurm_affinode.suspension.context import LOG, Clock
from slurm_affinode.suspension.records.sweep import Absences

T = TypeVar("T")

_PAUSE_S = 1.0
_ENDING = 3
"""How often a job that Slurm is ending after the requeue request is checked."""
_MOST_QUERIES = 20
"""How often a job is checked after a requeue that Slurm has accepted; it takes effect at once or a moment later."""


class NotRequeued(AffinodeError):  # noqa: N818 - names what is the case
    """Slurm has certainly not requeued the job, and will not."""


class UnresponsiveError(AffinodeError):
    """Slurm does not respond: whether it has requeued the job is unknown."""


def fact_of(job: Job, restarts: int) -> JobFact:
    """Return the state of the attempt with this restart count, from Slurm's job record."""
    if job.has_ended and job.restarts <= restarts:
        return JobFact.ENDED
    if job.restarts > restarts:
        if job.has_ended:
            return JobFact.ENDED
        # A requeued job may still complete its old attempt while it is already queued.
        return JobFact.QUEUED if job.pending or job.start is None or job.state == "COMPLETING" else JobFact.LATER_RUN
    return JobFact.QUEUED if job.pending else JobFact.THIS_RUN


def retry(what: str, call: Callable[[], T], timeout_s: float, clock: Clock) -> T:
    """Return the result of ``call``, retried while Slurm does not respond. Raises ``AffinodeError``."""
    deadline = clock.now() + timeout_s
    while True:
        try:
            return call()
        except ControllerDownError as error:
            if clock.now() >= deadline:
                raise AffinodeError(f"cannot {what}: {error}") from None
            clock.sleep(_PAUSE_S)


class Requeuer:
    """Requeues and holds jobs (``requeuehold``), and verifies the result."""

    def __init__(self, slurm: SlurmClient, absences: Absences, cluster: str, timeout_s: float, clock: Clock) -> None:
        """``timeout_s``: how long Slurm may not respond."""
        self._slurm = slurm
        self._absences = absences
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._clock = clock
        self.unresponsive = False
        """slurmctld did not respond to the last query."""

    def fact(self, job_id: int, restarts: int, uid: int | None = None) -> JobFact:
        """Return the state of an attempt in Slurm."""
        return self._query(job_id, restarts, uid)[0]

    def _query(self, job_id: int, restarts: int, uid: int | None = None) -> tuple[JobFact, bool]:
        """Return the state, and whether Slurm is ending this attempt."""
        self.unresponsive = False
        try:
            job = self._slurm.job(job_id)
        except UnknownJobError:
            return (JobFact.ENDED if self._given_up(job_id) else JobFact.UNKNOWN), False
        except ControllerDownError:
            self.unresponsive = True
            return JobFact.UNKNOWN, False
        except AffinodeError:
            return JobFact.UNKNOWN, False
        if uid is not None and job.uid is not None and job.uid != uid:
            return JobFact.ENDED, False  # its ID belongs to another job
        fact = fact_of(job, restarts)
        return fact, fact is JobFact.THIS_RUN and job.state == "COMPLETING"

    def _given_up(self, job_id: int) -> bool:
        """Return whether Slurm has not known a job for so long that it counts as ended.

        Before that, slurmctld may have lost its state.
        """
        name = f"{self._cluster}.{job_id}"
        try:
            return self._absences.update((), (name,))[name].due
        except AffinodeError as error:
            LOG.warning("job %s: cannot record since when Slurm does not know it: %s", job_id, error)
            return False

    def requeue(self, job_id: int, restarts: int) -> None:
        """Return when the job is queued and held, or was requeued before.

        Raises ``NotRequeued`` and ``UnresponsiveError``.
        """
        deadline = self._clock.now() + self._timeout_s
        refused: SlurmError | None = None
        requests = endings = 0
        while True:
            fact, ending = self._query(job_id, restarts)
            if fact in (JobFact.QUEUED, JobFact.LATER_RUN):
                self._hold(job_id)
                return
            if fact is JobFact.ENDED:
                raise NotRequeued("the job has ended")
            if ending:
                # It was canceled before the requeue, or just before it took effect: Slurm requeues only a running job.
                endings += 1
                if not requests or endings > _ENDING:
                    raise NotRequeued("Slurm is ending the job")
                self._clock.sleep(_PAUSE_S)
                continue
            if fact is JobFact.THIS_RUN:
                if refused is not None or requests >= _MOST_QUERIES:
                    raise NotRequeued(str(refused) if refused else "Slurm accepted the requeue but did not perform it")
                try:
                    self._slurm.requeue(job_id, hold=True, running=True)
                    requests += 1
                    continue
                except ControllerDownError as error:
                    LOG.warning("job %s: %s", job_id, error)
                except SlurmError as error:
                    refused = error  # it may be queued now: check again
                    continue
            if self._clock.now() >= deadline:
                raise UnresponsiveError(f"slurmctld did not respond for {self._timeout_s:g} s")
            self._clock.sleep(_PAUSE_S)

    def _hold(self, job_id: int) -> None:
        """Hold a job that may have been requeued without a hold: it must not start before its image is everywhere."""
        try:
            job = self._slurm.job(job_id)
            waits = job.pending or job.state == "COMPLETING"  # Slurm is still ending the dumped attempt
            if waits and not job.is_held and job.priority != 0:
                self._slurm.hold(job_id, by_user=True)
        except AffinodeError as error:
            LOG.warning("job %s: cannot be held: %s", job_id, error)
