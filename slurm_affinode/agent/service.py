"""Requests to the agent: permissions and replies, with one method for each verb."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.agent import orphan_requests, status_rows
from slurm_affinode.agent.admin_comments import AdminComments
from slurm_affinode.agent.loop import Loop
from slurm_affinode.agent.orphan_requests import OrphanVerbs
from slurm_affinode.agent.requests import Caller, RequestError, refusal_hint, refusal_text, without_option
from slurm_affinode.agent.throttle import Pace
from slurm_affinode.agent.workers import Work
from slurm_affinode.base.counters import NO_COUNTERS, Counters
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import one_line
from slurm_affinode.base.threads import WorkQueue
from slurm_affinode.core.policy import too_often
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Phase, Refusal, RefusalCode
from slurm_affinode.suspension import metrics
from slurm_affinode.suspension.compatibility import Compatibility
from slurm_affinode.suspension.interface import Orchestration
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.records.journal import Journal, JournalError
from slurm_affinode.suspension.records.shared_state import SuspendedJob
from slurm_affinode.suspension.refusals import JobFacts, remedy

log = logging.getLogger(__name__)

EXPORTER = "slurm-affinode-exporter"
"""The user of the exporter: systemd names a dynamic user after its unit."""
MAX_JOB_ID = 0xFFFFFFF0
FRESH_S = 5.0
"""A status request refreshes the queue only if the last answer is older than this and the queue is due."""
MOST_ENDED = 10000
ENDED_WAIT_S = 2.0
ENDED_TRIES = 60
"""Requests to slurmctld about an ended job, ``ENDED_WAIT_S`` apart; a later sweep of the stores covers the rest."""
SEEN_S = 1.0
"""How long slurmctld's record of a job is reused for further requests about it."""
REQUESTS_PER_S = 2.0
REQUESTS_AT_ONCE = 20
"""Limit of requests to slurmctld about jobs that are not watched, for one user."""
CONNECTS_S = 30.0
"""Time after the start of a job within which its shepherd usually connects: Slurm runs the prolog first."""
SUSPENDED_S = 2.0
"""How long a list of suspended jobs is reused; it is read from the stores."""


@dataclass(slots=True)
class Service:
    """Handles requests. Thread-safe."""

    node: str
    cluster: str
    registry: Registry
    loop: Loop
    work: Work
    orchestration: Orchestration
    is_admin: Callable[[Caller], bool]
    """Whether a caller has root's rights here: root, SlurmUser, and the users listed by the site."""
    slurm_calls: Callable[[Callable[[], None]], None]
    """Runs a call in the thread that talks to slurmctld and waits a limited time for it."""
    local_calls: Callable[[Callable[[], None]], None]
    """The same in the thread for queries of the node itself, whose driver may be busy moving memory for a while."""
    name_of: Callable[[int], str]
    """Returns the name of a UID."""
    name_calls: Callable[[Callable[[], None]], None]
    """Runs a call in the thread that looks up names and waits a limited time for it: a directory may not respond."""
    gpu_indices: MutableMapping[int, tuple[int, ...]]
    ended_jobs: WorkQueue
    """Looks after jobs whose epilog has run."""
    comments: AdminComments | None = None
    """Writes lines about ended jobs; ``None``: the site has not enabled it."""
    prolog_s: float = 0.0
    """Time that a prolog waits for sleepers on its GPUs to wake; 0: they are not woken."""
    orphans: OrphanVerbs | None = None
    """Handles requests about the node's GPUs and the processes on them."""
    counters: Counters = NO_COUNTERS
    journal: Journal | None = None
    clear: Callable[[int], None] = lambda job_id: None
    """Removes files that a job's keeper may have left, see ``Announcements.clear``."""
    mismatch: Callable[[int], str | None] = lambda job_id: None
    """Returns why the shepherd of a job is of another release, see ``Announcements.mismatch``."""
    now: Callable[[], float] = time.time
    began: float = field(init=False)
    """When this agent started."""
    _with_option: set[int] = field(default_factory=set)
    """Jobs that were watched here and whose epilog is still to come."""
    _present: dict[int, int] = field(default_factory=dict)
    """Job ID -> UID of every job on this node that the prolog reported."""
    _names: dict[int, str] = field(default_factory=dict)
    """UID -> name of the owners of jobs on this node, as far as they have been looked up for metrics."""
    _suspended: tuple[float, tuple[SuspendedJob, ...]] = (-1e9, ())
    _slurm_states: dict[int, tuple[float, Job | None, bool]] = field(default_factory=dict)
    """Job ID -> time of the request to slurmctld and its result, see ``_slurms``."""
    _by_hand: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """Job ID -> its restart count, suspensions requested in that attempt, and the time of the last one (loop clock)."""
    _request_pace: Pace = field(default_factory=lambda: Pace(REQUESTS_PER_S, REQUESTS_AT_ONCE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.began = self.now()

    def answer(self, request: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Return the reply to a request. Raises ``AffinodeError``, or ``RequestError`` if the request is refused."""
        verb = request.get("verb")
        if verb == "status":
            return self._status(request, caller)
        if verb == "metrics":
            return self._metrics(owners=self.is_admin(caller) or caller.name == EXPORTER)
        if verb == "suspend":
            return self._suspend(_job_of(request), caller, force=request.get("force") is True)
        if verb == "wake":
            return self._wake(_job_of(request), caller, from_start=request.get("from_start") is True)
        if verb in ("prolog", "prolog-wakes", "epilog"):
            if caller.uid != 0 or not caller.local:
                raise RequestError("not-permitted", f"{verb} is for root on the node itself")
            if verb == "prolog-wakes":
                return self._prolog_wakes(request)
            return self._prolog(request) if verb == "prolog" else self._epilog(request)
        if verb in orphan_requests.VERBS and self.orphans is not None:
            return self.orphans.answer(request, caller, admin=self.is_admin(caller))
        raise RequestError("bad-request", "no such request", exit_code=2)

    # --- metrics

    def _metrics(self, *, owners: bool) -> dict[str, Any]:
        """Return the metrics of the agent. ``owners``: with those of all jobs; the others may be read by everybody."""
        jobs = dict.fromkeys(metrics.JOB_STATES, 0)
        under_way = self.work.under_way()
        for job_id in {job.job_id for job in self.registry.jobs()} | under_way.keys():
            jobs[under_way.get(job_id) or self._state_of(job_id)] += 1
        for state, count in jobs.items():
            self.counters.set(metrics.JOBS, float(count), state=state)
        present = dict(self._present) | {job.job_id: job.uid for job in self.registry.jobs()}
        names = self._owners(frozenset(present.values()))
        self.counters.replace(
            metrics.JOB_INFO, {(str(job_id), names.get(uid) or str(uid)): 1.0 for job_id, uid in present.items()}
        )
        journals = None
        if self.journal is not None:
            with suppress(JournalError):
                journals = float(len(self.journal.open_jobs()))
        self.counters.set(metrics.JOURNALS, journals)
        metrics.read_process(self.counters)
        shown = [family for family in self.counters.families() if owners or family["name"] != metrics.JOB_INFO]
        return {"node": self.node, "cluster": self.cluster, "metrics": shown}

    def _owners(self, uids: frozenset[int]) -> dict[int, str]:
        """Return the names of users, as far as they are known; each is looked up once while it has a job here."""
        self._names = {uid: name for uid, name in self._names.items() if uid in uids}
        if missing := uids - self._names.keys():

            def read_names() -> None:
                names = {uid: self.name_of(uid) for uid in missing}
                self._names = self._names | names

            self.name_calls(read_names)
        return self._names

    def _state_of(self, job_id: int) -> str:
        """Return the state of a watched job on which no work is under way."""
        sleepers = self.orchestration.in_place
        view = None if sleepers is None else sleepers.view(job_id)
        return "watched" if view is None else status_rows.state_in_place(view)

    # --- status

    def _status(self, request: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        admin = self.is_admin(caller)
        sleepers = self.orchestration.in_place
        if request.get("job") is None:
            own_jobs = [job for job in self.registry.jobs() if admin or job.uid == caller.uid]
            asleep = [suspended for suspended in self._asleep() if admin or suspended.uid == caller.uid]
            running = {job.job_id for job in own_jobs}
            asleep = [suspended for suspended in asleep if suspended.key.job_id not in running]
        else:
            job_id = _job_of(request)
            match = self._find(job_id, caller)
            own_jobs, asleep = ([match], []) if isinstance(match, WatchedJob) else ([], [match])
        now: Job | None = None
        if asleep and request.get("job") is not None:
            try:
                now = self._still_asleep(asleep[0], caller)
            except RequestError as error:
                if error.code != "too-often":
                    raise
        elif own_jobs or asleep:
            self.slurm_calls(self._refresh_queue)
        compatible: list[Compatibility] = []
        if own_jobs:
            self.local_calls(lambda: self._refresh_refusals(own_jobs))
            if request.get("job") is not None:
                watched = own_jobs[0] = self._reported_if_possible(own_jobs[0], caller)
                self.local_calls(lambda: compatible.extend(self._compatibility(watched)))
        queue = self.loop.queue.latest()
        decisions = {job.job_id: decision for job, decision in self.loop.decisions()} if own_jobs else {}
        rows = [
            status_rows.watched(
                job, self.loop.states.get(job.job_id), decisions.get(job.job_id), self.work.outcome(job.job_id),
                node=self.node, user=self.name_of(job.uid), under_way=self.work.under_way().get(job.job_id),
                clock_s=self.loop.clock(), now_epoch=self.now(),
                asleep=None if sleepers is None else sleepers.view(job.job_id),
                compatibility=compatible[0] if compatible else None,
            )
            for job in own_jobs
        ]  # fmt: skip
        for suspended in asleep:
            slurm = now or (None if queue is None else queue.job(suspended.key.job_id))
            rows.append(status_rows.suspended(suspended, slurm, user=self.name_of(suspended.uid), now_epoch=self.now()))
        return {
            "node": self.node, "cluster": self.cluster, "dry_run": self.loop.policy.dry_run, "jobs": rows,
            "silent": self.orchestration.keeper.unresponsive(),
            "stopped": self.orchestration.keeper.sweep_stopped() if admin else None,
        }  # fmt: skip

    def _reported_if_possible(self, job: WatchedJob, caller: Caller) -> WatchedJob:
        try:
            return self._reported(job, caller)
        except RequestError:
            return job

    def _compatibility(self, job: WatchedJob) -> list[Compatibility]:
        """Return the kinds of a job and what prevents its suspension; empty if it is being worked on, or unknown."""
        sleepers = self.orchestration.in_place
        if job.phase is not Phase.RUNNING or (sleepers is not None and sleepers.holds(job.job_id) is not None):
            return []
        try:
            return [self.orchestration.suspender.compatibility(job)]
        except AffinodeError as error:
            log.warning("job %d: %s", job.job_id, one_line(error))
            return []

    def _refresh_queue(self) -> None:
        if self.loop.queue.due():
            self.loop.refresh()

    def _refresh_refusals(self, jobs: list[WatchedJob]) -> None:
        """Refresh the refusals, which the policy needs."""
        for job in [job for job in jobs if job.phase is Phase.RUNNING][:16]:
            state = self.loop.states.get(job.job_id)
            if state is None or self.loop.clock() - state.refusals_s > FRESH_S:
                self.loop.refusals(job.job_id)

    def _asleep(self) -> tuple[SuspendedJob, ...]:
        with self._lock:
            queried_at, suspended = self._suspended
            if self.now() - queried_at > SUSPENDED_S or self.now() < queried_at:
                suspended = tuple(self.orchestration.keeper.suspended())
                self._suspended = (self.now(), suspended)
            return suspended

    def _find(self, job_id: int, caller: Caller) -> WatchedJob | SuspendedJob:
        """Return a job of the caller. Raises ``RequestError``."""
        match: WatchedJob | SuspendedJob | None = self.registry.get(job_id)
        if match is None:
            match = next((suspended for suspended in self._asleep() if suspended.key.job_id == job_id), None)
        owner = self._present.get(job_id) if match is None else match.uid
        if owner is None and self.mismatch(job_id) is not None:  # its shepherd is not admitted
            job, _ = self._slurms(job_id, caller)
            owner = None if job is None else job.uid
        if match is None and (unresponsive := self.orchestration.keeper.unresponsive()) is not None:
            raise RequestError("no-answer", f"the state of job {job_id} is unknown: {unresponsive}", exit_code=3)
        if owner is None and self._has_just_started():
            text = f"the agent on {self.node} has just started: it may not know job {job_id} yet"
            raise RequestError("starting", text, hint="try again in a moment")
        if owner is None:
            raise RequestError(
                "unknown-job", f"the agent on {self.node} knows no job {job_id}", hint="see: squeue --me --all"
            )
        if owner != caller.uid and not self.is_admin(caller):
            raise RequestError("not-yours", f"job {job_id} is not yours")
        if match is None:
            raise self._unwatched(job_id, caller)
        return match

    def _still_asleep(self, job: SuspendedJob, caller: Caller) -> Job | None:
        """Return Slurm's record of a job that has a checkpoint image. Raises ``RequestError`` if the job has ended.

        Its image is kept until the next sweep.
        """
        now, _ = self._slurms(job.key.job_id, caller)
        if now is not None and now.has_ended:
            raise _ended_error(job.key.job_id, now)
        return now

    def _unwatched(self, job_id: int, caller: Caller) -> RequestError:
        """Return the error with the reason why a job of this node is not watched."""
        # First: its restore may be complete by the time slurmctld responds, or since the job was looked up.
        what = self.work.under_way().get(job_id) or ("restoring" if self.registry.get(job_id) is not None else None)
        job, gone = self._slurms(job_id, caller)
        if gone or (job is not None and job.has_ended):  # and no epilog has reported it
            return _ended_error(job_id, job)
        if what is not None:  # its shepherd waits for the reply
            return RequestError("under-way", f"job {job_id} is being worked on: {what}")
        if job_id in self._with_option:
            return RequestError(
                "ending", f"job {job_id} is ending: its script has ended", hint="see: squeue --me --all"
            )
        if job is not None and job.batch and job.batch_host not in (None, self.node):
            # Its shepherd, if any, is on the node of its script, where the request belongs.
            return RequestError("unknown-job", f"job {job_id} is known on {job.batch_host}, not on {self.node}")
        if (mismatch := self.mismatch(job_id)) is not None:
            text = f"job {job_id} cannot be suspended: it continues with the plugin that started it: {mismatch}"
            return RequestError("plugin-release", text, hint="jobs that start from now on can be suspended")
        refusal = without_option(job)
        if refusal.code == RefusalCode.NOT_OPTED_IN and (what := self._just_started(job)) is not None:
            text = f"{what} has just started: whether the job has the option --gpu-suspend-idle is not known yet"
            return RequestError("starting", text, hint="try again in a moment")
        if job is None:  # it may have just started
            text = f"the state of job {job_id} is unknown: slurmctld does not respond"
            return RequestError("no-answer", text, hint="try again in a moment", exit_code=3)
        return RequestError(refusal.code, refusal_text(job_id, refusal), hint=refusal_hint(refusal))

    def _just_started(self, job: Job | None) -> str | None:
        """Return the job or this agent, if it has just started: the shepherd of the job may not have connected yet."""
        if job is not None and job.start is not None and 0 <= self.now() - job.start.timestamp() < CONNECTS_S:
            return f"job {job.id}"
        return f"the agent on {self.node}" if self._has_just_started() else None

    def _has_just_started(self) -> bool:
        return 0 <= self.now() - self.began < CONNECTS_S

    def _limit(self, caller: Caller) -> None:
        """Count a request to slurmctld. Raises ``RequestError`` if ``caller`` exceeds the rate limit."""
        if not self.is_admin(caller) and not self._may_ask(caller):
            raise RequestError("too-often", "too many requests to slurmctld from you: retry in a moment", exit_code=3)

    def _reported(self, job: WatchedJob, caller: Caller) -> WatchedJob:
        """Return a job with slurmctld's record and its earlier suspensions, requested now if these are unknown.

        Steps that it lists may have ended: then as well.

        Unchanged if slurmctld does not respond in time. Raises ``RequestError`` if ``caller`` exceeds the rate limit.
        """
        if job.slurm is not None and job.key is not None and not JobFacts.of(job.slurm).steps:
            return job
        self._limit(caller)
        self.slurm_calls(lambda: self.loop.identify(job.job_id))
        return self.registry.get(job.job_id) or job

    def _slurms(self, job_id: int, caller: Caller) -> tuple[Job | None, bool]:
        """Return slurmctld's record of a job, and whether slurmctld responds without one: the job ended long ago.

        Raises ``RequestError`` if ``caller`` exceeds its rate limit for slurmctld.
        """
        clock = self.loop.clock()
        with self._lock:
            self._slurm_states = {
                number: word for number, word in self._slurm_states.items() if 0 <= clock - word[0] < SEEN_S
            }
            state = self._slurm_states.get(job_id)
        if state is not None:
            return state[1:]
        self._limit(caller)
        answers: list[tuple[Job | None, bool]] = []

        def query() -> None:
            view = self.loop.queue
            job = view.read_job(job_id)
            # No record: slurmctld does not respond, or does not have the job. A new list of all jobs tells which.
            queue = view.refresh() if job is None and view.due() else None
            answers.append((job, queue is not None and all(job.job_id != job_id for job in queue.jobs)))

        self.slurm_calls(query)
        if not answers:
            return None, False
        with self._lock:
            self._slurm_states[job_id] = (clock, *answers[0])
        return answers[0]

    def _may_ask(self, caller: Caller) -> bool:
        with self._lock:
            return self._request_pace.take(caller.uid)

    # --- acting

    def _suspend(self, job_id: int, caller: Caller, *, force: bool) -> dict[str, Any]:
        if force and not self.is_admin(caller):
            raise RequestError("not-permitted", "only administrators may suspend a job with --force")
        job = self._find(job_id, caller)
        if isinstance(job, SuspendedJob):
            now = self._still_asleep(job, caller)
            if now is not None and now.allocated:  # on its node, which removes its note after the restore
                raise RequestError("under-way", f"job {job.called} is being worked on: restoring")
            raise RequestError(
                "already-suspended", f"job {job.called} is suspended already", hint=f"slurm-affinode wake {job.called}"
            )
        sleepers = self.orchestration.in_place
        if sleepers is not None and sleepers.holds(job_id) is not None:
            raise RequestError(
                "already-suspended", f"job {job.called} sleeps in place", hint=f"slurm-affinode wake {job.called}"
            )
        what = self.work.under_way().get(job_id)
        if what is not None or job.phase is not Phase.RUNNING:
            raise RequestError("under-way", f"job {job.called} is being worked on: {what or job.phase.value}")
        job = self._reported(job, caller)
        refusals = self.orchestration.suspender.refusals(job)
        if refusals:
            raise RequestError(
                refusals[0].code, f"job {job.called} cannot be suspended: {refusals[0].text}",
                hint=remedy(refusals[0], job.option),
            )  # fmt: skip
        soon = None if force else self._too_soon(job)
        if soon is not None:
            raise RequestError(
                soon.code, f"job {job.called} cannot be suspended yet: {soon.text}",
                hint="try again later; an administrator may use --force",
            )  # fmt: skip
        log.info("job %d: %s (uid %d) requests its suspension", job_id, one_line(caller.name, 64), caller.uid)
        sampled_at = self.now()
        if not self.work.suspend(job, f"requested by {one_line(caller.name, 64)}", lambda: None):
            raise RequestError("under-way", f"job {job.called} is being worked on")
        self._count(job)
        return {"job_id": job_id, "node": self.node, "begun": True, "at": sampled_at}

    def _too_soon(self, job: WatchedJob) -> Refusal | None:
        """Return why a requested suspension is refused: the attempt is too short, or another was just tried."""
        with self._lock:
            run, attempts, last_s = self._by_hand.get(job.job_id, (job.restarts, 0, 0.0))
        again = None
        if run == job.restarts and attempts:
            again = too_often(self.loop.policy, attempts, self.loop.clock() - last_s)
        return again or self.loop.too_soon(job)

    def _count(self, job: WatchedJob) -> None:
        with self._lock:
            run, attempts, _ = self._by_hand.pop(job.job_id, (job.restarts, 0, 0.0))
            self._by_hand[job.job_id] = job.restarts, attempts + 1 if run == job.restarts else 1, self.loop.clock()
            if len(self._by_hand) > MOST_ENDED:
                del self._by_hand[next(iter(self._by_hand))]

    def _wake(self, job_id: int, caller: Caller, *, from_start: bool) -> dict[str, Any]:
        job = self._find(job_id, caller)
        sleepers = self.orchestration.in_place
        if isinstance(job, WatchedJob):
            # A job that is being suspended in place wakes as soon as it sleeps.
            leaving = job.option.mode is Mode.INPLACE and job.phase is not Phase.RUNNING
            if sleepers is not None and (leaving or sleepers.holds(job_id) is not None):
                if from_start:
                    text = f"job {job.called} sleeps in place: it has no image to give up; requeue it instead"
                    raise RequestError("mode", text)
                log.info("job %d: %s (uid %d) requests to wake it", job_id, one_line(caller.name, 64), caller.uid)
                sleepers.wake(job_id, one_line(caller.name, 64))
                return {"job_id": job_id, "node": self.node, "released": True, "in_place": True}
            on_its_way = f" yet ({job.phase.value}): ask again in a moment"
            state = ": it is running" if job.phase is Phase.RUNNING else on_its_way
            raise RequestError("not-suspended", f"job {job.called} is not suspended{state}")
        log.info("job %d: %s (uid %d) requests to wake it", job_id, one_line(caller.name, 64), caller.uid)
        released = self.orchestration.waker.wake(
            job.key, caller.name, admin=self.is_admin(caller), from_start=from_start
        )
        with self._lock:
            self._suspended = (-1e9, ())
        return {"job_id": job_id, "node": self.node, "released": released}

    # --- prolog and epilog

    def _prolog(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job_id, uid = _job_of(request), _whole(request, "uid")
        gpus = request.get("gpus")
        self._present[job_id] = uid
        if isinstance(gpus, list) and gpus and all(isinstance(gpu, int) and 0 <= gpu < 4096 for gpu in gpus):
            self.gpu_indices[job_id] = tuple(gpus)
        return {"job_id": job_id}

    def _prolog_wakes(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Wake the sleepers on the GPUs of a job that is about to start, if the site enables it."""
        job_id, gpus, sleepers = _job_of(request), request.get("gpus"), self.orchestration.in_place
        if not self.prolog_s or sleepers is None or not isinstance(gpus, list):
            return {"job_id": job_id, "asleep": []}
        indices = [gpu for gpu in gpus if isinstance(gpu, int)]
        return {"job_id": job_id, "asleep": sleepers.wake_on(indices, f"the prolog of job {job_id}", self.prolog_s)}

    def _epilog(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job_id = _job_of(request)
        self._present.pop(job_id, None)
        if self.comments is not None:
            self.comments.schedule_line(job_id)
        self.gpu_indices.pop(job_id, None)
        self.clear(job_id)
        if job_id in self._with_option:
            self._with_option.discard(job_id)
            # slurmd waits for the epilog, and slurmctld for slurmd; only then does slurmctld have the job's next state.
            self.ended_jobs.post(self._report_end, job_id, ENDED_TRIES)
        return {"job_id": job_id}

    def record_departure(self, job_id: int) -> None:
        """Record that a job with the option is no longer watched; its epilog comes next."""
        if len(self._with_option) > MOST_ENDED:  # no epilogs report their end
            self._with_option.clear()
        self._with_option.add(job_id)

    def _report_end(self, job_id: int, tries: int) -> None:
        """Report to the keeper that a job has ended and whether it is requeued.

        Nothing is reported if slurmctld does not respond to any of the ``tries``.
        """
        try:
            job = self.loop.queue.read_job(job_id)
            if job is not None and (job.has_ended or job.pending or (job.allocated and job.state != "COMPLETING")):
                if job.has_ended:
                    self.work.forget(job_id)
                self.orchestration.keeper.handle_epilog(job_id, requeued=not job.has_ended)
            elif tries > 1:
                self.ended_jobs.later(ENDED_WAIT_S, self._report_end, job_id, tries - 1)
        except (AffinodeError, OSError) as error:
            log.warning("job %d: its checkpoint images are not cleaned up: %s", job_id, one_line(error))


def _ended_error(job_id: int, job: Job | None) -> RequestError:
    return RequestError("ended", f"job {job_id} has ended" + ("" if job is None else f": {job.state}"))


def _whole(request: Mapping[str, Any], key: str) -> int:
    value = request.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise RequestError("bad-request", f"{key} is not a whole number", exit_code=2)
    return value


def _job_of(request: Mapping[str, Any]) -> int:
    job_id = _whole(request, "job")
    if not 0 < job_id <= MAX_JOB_ID:
        raise RequestError("bad-request", f"{job_id} is not a job ID", exit_code=2)
    return job_id
