"""The scheduler of jobs that sleep in place: which ones wake, in which order, and which ones make room.

One thread checks the sleepers every ``inplace.poll_ms``: their sockets, and whether their processes are still stopped.
A sleeper that is to wake joins one queue; ``core.inplace`` decides which one wakes and which jobs make room. Nothing
here suspends a job: the policy does, given the jobs that a sleeper needs out of its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import size, span
from slurm_affinode.base.threads import Workers, surviving
from slurm_affinode.core.inplace import GpuLoad
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import Phase, Refusal, RefusalCode
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import LOG
from slurm_affinode.suspension.inplace import file_locks
from slurm_affinode.suspension.inplace.file_locks import FileLocks, NodeFileLocks
from slurm_affinode.suspension.inplace.freezer import Freezer
from slurm_affinode.suspension.inplace.gpu_sharing import Holder, Rules, Sharing
from slurm_affinode.suspension.inplace.queue import Comments, GpuQueue, QueuedJob
from slurm_affinode.suspension.inplace.sleeper import TURN_OVER, Sleeper
from slurm_affinode.suspension.inplace.sleeper_checks import SleeperChecks
from slurm_affinode.suspension.inplace.sockets import Sockets
from slurm_affinode.suspension.inplace.starting_jobs import Starters, StartingJob
from slurm_affinode.suspension.inplace.wake import NoGpuRoom, Waking
from slurm_affinode.suspension.inplace.wake_requests import WakeRequests, from_slurm
from slurm_affinode.suspension.interface import DaemonCalls, Refused
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Processes, TreeGoneError
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.notify import OwnerMails
from slurm_affinode.suspension.records.journal import JobJournal, JournalError

_WAKES_AT_ONCE, _ASIDE_AT_ONCE = 4, 8
"""Signals, and jobs that are to be ended, have workers of their own and do not wait for wakes."""
_SLOWLY_S, _PROLOG_CHECK_S = 1.0, 0.1
"""Intervals of the checks of slowly changing state (whether the processes exist, the queue when nothing has happened),
and of those of a waiting prolog."""
_MOST_OF_TIME = 20.0
"""A round is followed by a pause of at least this many times its CPU time; time spent waiting does not count."""


_NO_DAEMON = DaemonCalls()
_NODE_LOCKS = NodeFileLocks()


class InPlaceScheduler:
    """The scheduler of the agent. Thread-safe."""

    def __init__(
        self, *, processes: Processes, registry: Registry, freezer: Freezer, sockets: Sockets, sharing: Sharing,
        waking: Waking, comments: Comments, rules: Rules, workers: Workers, mails: OwnerMails,
        limits: MemoryLimits | None, wake_backoff_s: float, calls: DaemonCalls = _NO_DAEMON,
        now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic,
        locks: FileLocks = _NODE_LOCKS,
    ) -> None:  # fmt: skip
        """``limits``: the memory limits of jobs; ``None``: they are not known.

        ``wake_backoff_s``: see ``SuspendSettings``; ``now``: seconds since the epoch; ``clock``: see ``GpuQueue``.
        """
        self.locks = locks
        self._processes = processes
        self._registry = registry
        self._freezer, self._sockets, self._calls = freezer, sockets, calls
        self._mails = mails
        self._limits = limits
        self._now = now
        self._sharing = sharing
        self._rules = rules
        self._waking = waking
        self._comments = comments
        self._checks = SleeperChecks(freezer, sockets, wake_backoff_s, rules.max_sleep_s)
        self._gpu_queue = GpuQueue(sharing, comments, rules.deadline_s, clock, pressed=calls.pressed)
        self._starters = Starters(freezer, processes, registry, rules.start_free_pct, now)
        self._lock = threading.Condition()
        """Guards the sleepers, the starting jobs and the requests; notified when a job no longer sleeps."""
        self._sleepers: dict[int, Sleeper] = {}
        self._requests = WakeRequests(processes, registry, now)
        self._slowly_s = 0.0
        self._poke, self._stop = threading.Event(), threading.Event()
        self._wakes = workers.queue("wake", _WAKES_AT_ONCE, last=True)
        self._aside = workers.queue("aside in place", _ASIDE_AT_ONCE, last=True)

    # --- the thread

    def start(self) -> None:
        """Start the scheduler's thread. Called once."""
        threading.Thread(target=self._run, name="inplace", daemon=True).start()

    def stop(self) -> None:
        """Stop waking jobs; the journal records those that sleep."""
        self._stop.set()
        self._poke.set()
        self._wakes.close()
        self._aside.close()
        self._comments.stop()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.thread_time()
            with surviving(LOG, "the check of the sleeping jobs failed"):
                self.round()
            busy = self._sleepers or len(self._starters) or self._comments.due or self._waking.unfinished
            # With many sockets, rounds are less frequent.
            pause_s = max(self._rules.poll_s, _MOST_OF_TIME * (time.thread_time() - began))
            self._poke.wait(pause_s if busy else None)
            self._poke.clear()

    def round(self) -> None:
        """Check all jobs that sleep, wake or wait to start once; wake or start those with a request and room."""
        now = self._now()
        slowly = not 0 <= now - self._slowly_s < _SLOWLY_S
        if slowly:
            self._slowly_s = now
            self._check_slowly(now)
            self._waking.tidy()
            with self._lock:
                self._starters.tend(now, self._calls.idle_s)
        with self._lock:
            asleep = [sleeper for sleeper in self._sleepers.values() if not sleeper.requested]
        for sleeper, why in self._checks.requests(asleep, now):
            self._ask(sleeper, why)
        with self._lock:
            frozen = [sleeper for sleeper in self._sleepers.values() if sleeper.frozen]
        for sleeper, why in self._checks.stirring(frozen, every=slowly):
            self._thaw(sleeper, why)
        self._serve(now)
        self._comments.tick(now)

    # --- wake requests

    def adopt(self, sleeper: Sleeper, *, ask: str = "") -> None:
        """Watch a job from now on; ``ask``: wake it as soon as there is room, for this reason."""
        self._refresh(sleeper)
        with self._lock:
            self._sleepers[sleeper.job_id] = sleeper
            self._starters.forget(sleeper.job_id)  # or it would wait for the room reserved for itself
            request = self._requests.of(sleeper)
        if request is not None and request.thawed:
            self._thaw(sleeper, request.why)
        elif request is not None:
            self._ask(sleeper, request.why, lasting=request.lasting)
        elif not ask:
            LOG.info(
                "job %s: asleep in place, %s in host memory (%s)", sleeper.job_id, size(sleeper.gpu_bytes),
                "stopped by signals" if sleeper.facts.mechanism == "signals"
                else f"frozen by {sleeper.facts.mechanism}",
            )  # fmt: skip
            self._comments.set(sleeper.job_id, sleeper.comment)
        else:
            self._ask(sleeper, ask)
        self._gpu_queue.changed()
        self._poke.set()

    def take_up(self, journal: JobJournal, *, ask: str = "") -> None:
        """Take over a job that slept under the last agent.

        Unless it is to wake, it is frozen again: its freeze may have been interrupted.
        """
        sleeper = Sleeper.of(journal)
        ask = ask or self._waking.freeze_again(sleeper)
        self._registry.set_phase(sleeper.job_id, journal.phase)
        self.adopt(sleeper, ask=ask or journal.record.requested_why or "")

    def _refresh(self, sleeper: Sleeper) -> None:
        try:
            members = self._freezer.members(sleeper.facts.init_pid, sleeper.facts.init_started)
        except TreeGoneError:
            return
        sleeper.pids = tuple(member.pid for member in members)
        sleeper.sockets = self._sockets.of_processes(sleeper.pids)
        sleeper.locks = self.locks.locks_of(sleeper.pids)

    def admit(self, job: WatchedJob) -> bool:
        """Return whether a job may start now; ``False``: its shepherd waits until it is notified."""
        with self._lock:
            admitted = self._starters.admit(job, self._gpu_queue.turn)
        self._poke.set()
        return admitted

    def back(self, job_id: int) -> None:
        """Handle a reconnected shepherd of a job that has started before."""
        with self._lock:
            if (sleeper := self._sleepers.get(job_id)) is not None:
                self._registry.set_phase(job_id, sleeper.journal.phase)
                return
        self._comments.check(job_id)

    def holds(self, job_id: int) -> Phase | None:
        """Return the phase of a job that sleeps or wakes; ``None`` for any other job."""
        with self._lock:
            sleeper = self._sleepers.get(job_id)
            return None if sleeper is None else sleeper.journal.phase

    def wake(self, job_id: int, who: str) -> None:
        """Wake a job at the request of ``who``. Idempotent. Raises ``Refused``."""
        with self._lock:
            sleeper = self._sleepers.get(job_id)
            if sleeper is None:
                if self._requests.wake(job_id, who):
                    return
                raise Refused(Refusal(RefusalCode.NOT_SUSPENDED, f"job {job_id} does not sleep"))
            sleeper.failures.retry_now()
        self._ask(sleeper, f"requested by {who}", lasting=True)

    def signalled(self, job_id: int, number: int) -> None:
        """Handle a signal from Slurm: the processes are thawed at once, whether there is room on the GPU or not."""
        request = from_slurm(number)
        with self._lock:
            sleeper = self._sleepers.get(job_id)
            if sleeper is not None:
                sleeper.stop_epoch = self._now() if request is None else None
            elif request is not None:
                self._requests.keep(job_id, request)
        if sleeper is not None and request is not None:
            self._aside.post(self._thaw, sleeper, request.why)

    def wake_on(self, indices: Sequence[int], why: str, timeout_s: float) -> list[int]:
        """Wake all jobs with memory on GPUs with these Slurm indices, and wait; return those that still sleep."""
        uuids = self._sharing.uuids(indices)
        deadline = time.monotonic() + timeout_s
        with self._lock, self._requests.prolog(uuids, why):
            while True:
                for sleeper in self._sleepers.values():
                    if uuids & sleeper.needed_bytes.keys():
                        self._ask(sleeper, why)
                asleep = {sleeper.job_id for sleeper in self._sleepers.values() if uuids & sleeper.needed_bytes.keys()}
                sleeping = sorted(asleep | self._requests.falling_on(uuids))
                if not sleeping or self._stop.is_set() or time.monotonic() >= deadline:
                    return sleeping
                self._lock.wait(min(_PROLOG_CHECK_S, timeout_s))

    def _ask(self, sleeper: Sleeper, why: str, *, lasting: bool = False) -> None:
        """Add a job to the queue. ``lasting``: see ``WakeRequest``."""
        with self._lock:
            if sleeper.requested or sleeper.job_id not in self._sleepers:
                self._poke.set()
                return
            sleeper.request(why, self._gpu_queue.turn(), self._now())
            if lasting:
                self._note(sleeper)
        LOG.info("job %s: wake requested: %s", sleeper.job_id, why)
        self._poke.set()

    def _note(self, sleeper: Sleeper) -> None:
        """Record the wake request and its time, for the next agent."""
        with self._lock:
            if sleeper.recorded or sleeper.waking or sleeper.job_id not in self._sleepers:
                return
            try:
                sleeper.record_request()
            except JournalError as error:
                LOG.warning("job %s: its place in the queue is not recorded: %s", sleeper.job_id, error)

    def _thaw(self, sleeper: Sleeper, why: str) -> None:
        """Thaw a job, even if it is already waking: it may still wait for a free worker."""
        if self._sleepers.get(sleeper.job_id) is not sleeper:
            return
        sleeper.thawing.signalled = True
        try:
            self._waking.thaw(sleeper)
        except TreeGoneError:
            self._drop(sleeper)
            return
        except AffinodeError as error:
            LOG.warning("job %s: %s", sleeper.job_id, error)
        self._ask(sleeper, why)

    # --- checks

    def _check_slowly(self, now: float) -> None:
        with self._lock:
            sleepers = list(self._sleepers.values())
        for sleeper in sleepers:
            if not sleeper.waking and not self._processes.alive(sleeper.facts.init_pid, sleeper.facts.init_started):
                self._drop(sleeper)
            elif not sleeper.requested and (why := self._checks.due(sleeper, now, self._fits)):
                self._ask(sleeper, why)
        resting = {sleeper.job_id: sleeper for sleeper in sleepers if not sleeper.requested and sleeper.locks}
        pids = {job_id: value.pids for job_id, value in resting.items()}
        waiters = self.locks.awaited({job_id: value.locks for job_id, value in resting.items()}, pids)
        for job_id, pid in waiters.items():
            self._ask(resting[job_id], file_locks.reason(pid))

    def _fits(self, sleeper: Sleeper) -> bool:
        """Return whether there is room for it that no other job waits for."""
        with self._lock:
            if len(self._starters) or any(sleeper.requested for sleeper in self._sleepers.values()):
                return False
            asleep = frozenset(self._sleepers)
        return bool(self._sharing.plan([sleeper], [], asleep).wakes)

    def _drop(self, sleeper: Sleeper) -> None:
        with self._lock:
            if self._sleepers.pop(sleeper.job_id, None) is None:
                return
            self._lock.notify_all()
        self._comments.clear(sleeper.job_id)  # it may be requeued, and no longer sleeps
        try:
            self._waking.record_end(sleeper)
        except AffinodeError as error:
            LOG.warning("job %s: %s", sleeper.job_id, error)
        LOG.info("job %s: ended while it slept in place", sleeper.job_id)

    # --- serving the queue

    def cards(self) -> Sequence[GpuLoad]:
        """Return the GPUs, with the limit for awake jobs. Raises ``GpuError``."""
        return self._sharing.cards()

    def _serve(self, now: float) -> None:
        with self._lock:
            sleepers = list(self._sleepers.values())
            asleep = frozenset(self._sleepers) | self._starters.ids()
            waiting: list[QueuedJob] = [*self._checks.queued(sleepers, now)]
            try:
                waiting += self._starters.waiting(self.cards, self._calls.gpus_of)
            except GpuError as error:
                LOG.warning("cannot determine which jobs may start: %s", error)
            starting: list[Holder] = [sleeper for sleeper in sleepers if sleeper.waking]
            starting += self._starters.allocating()
        self._gpu_queue.serve(now, waiting, starting, asleep=asleep, start=self._wake_next, late=self._late)
        for job in waiting:
            if isinstance(job, Sleeper) and job.place.waits:
                self._note(job)

    def _wake_next(self, job: QueuedJob) -> None:
        """Wake or start a job at its turn."""
        if isinstance(job, Sleeper):
            self._begin(job)
        elif isinstance(job, StartingJob):
            self._start_next(job)

    def _start_next(self, starter: StartingJob) -> None:
        LOG.info("job %s: starts", starter.job_id)
        self._comments.clear(starter.job_id)
        with self._lock:
            self._starters.start(starter)

    def _late(self, job: QueuedJob, why: str) -> None:
        """Handle an overdue job: one that is to start does so; for a sleeper the site's setting applies."""
        if isinstance(job, StartingJob):
            self._start_next(job)
        elif isinstance(job, Sleeper):
            self._mails.send(job.journal.record, "failed", why=why, ended=self._rules.end_on_deadline)
            if self._rules.end_on_deadline:
                self._aside.post(self._waking.end, job, why)

    def needed_by(self, job_id: int) -> tuple[int, ...]:
        """Return the jobs for which another one is to make room."""
        return self._gpu_queue.needed_by(job_id)

    def _begin(self, sleeper: Sleeper) -> None:
        with self._lock:
            sleeper.begin_wake()
        self._wakes.post(self._wake, sleeper)

    def _wake(self, sleeper: Sleeper) -> None:
        with surviving(LOG, "job %s: not woken, by a fault of the agent", sleeper.job_id) as fault:
            self._try_to_wake(sleeper)
        if fault.error is not None:
            self._not_woken(sleeper, f"a fault of the agent: {type(fault.error).__name__}")
        sleeper.end_wake()
        self._gpu_queue.changed()
        self._poke.set()

    def _try_to_wake(self, sleeper: Sleeper) -> None:
        try:
            self._waking.wake(sleeper)
        except TreeGoneError:
            self._drop(sleeper)
        except NoGpuRoom as error:
            LOG.info("job %s: still waits to wake: %s", sleeper.job_id, error)
        except AffinodeError as error:
            self._not_woken(sleeper, str(error))
        else:
            with self._lock:
                self._sleepers.pop(sleeper.job_id, None)
                self._registry.set_phase(sleeper.job_id, Phase.RUNNING)  # it may show a sleeping phase
                self._lock.notify_all()
            self._comments.clear(sleeper.job_id)
            slept_s = self._now() - sleeper.facts.since_epoch
            text = f"awake after {span(slept_s)} in place: {sleeper.request_why}"
            self._calls.woken(sleeper.job_id, text, None if sleeper.request_why == TURN_OVER else slept_s)

    def _not_woken(self, sleeper: Sleeper, why: str) -> None:
        pause = sleeper.failures.add(why, self._now())
        self._mails.send(sleeper.journal.record, "failed", why=why)
        LOG.error("job %s: not woken: %s; tried again in %g s", sleeper.job_id, why, pause)
        self._comments.set(sleeper.job_id, messages.not_woken(why))
        self._gpu_queue.check_deadline(sleeper, why, self._now(), self._late)

    # --- status

    def view(self, job_id: int) -> dict[str, Any] | None:
        """Return the data that ``status`` shows for a job that sleeps or waits to start; ``None`` for any other job."""
        with self._lock:
            if (starter := self._starters.get(job_id)) is not None:
                return starter.view()
            sleeper = self._sleepers.get(job_id)
        if sleeper is None:
            return None
        limits = self._limits
        raised = 0 if limits is None else limits.raised_bytes(job_id)
        return sleeper.view(
            self._now(), is_held=self._freezer.is_stopped_by_slurm(sleeper.facts.init_pid), raised=raised
        )
