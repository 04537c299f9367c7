"""The daemon's main loop: sample, decide, act. It never waits for Slurm, a suspension or a client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slurm_affinode.agent.settings import idle_rule
from slurm_affinode.agent.workers import FAILED, SUSPENDING, Promised, Promising, Work
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.node_config import AgentConfig
from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.base.text import one_line
from slurm_affinode.base.threads import surviving
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.core.idle import IdleDetector, IdleState, still_idle
from slurm_affinode.core.policy import Candidate, Decision, Surroundings, SuspendPolicy, decide, too_soon
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import Mode, Phase, Pressure, Refusal, RefusalCode
from slurm_affinode.suspension import slurm_queue as queues
from slurm_affinode.suspension.activity import Watch, by_index
from slurm_affinode.suspension.interface import Orchestration, SampleAgain
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.records.promises import Promises
from slurm_affinode.suspension.slurm_queue import QueueView, SlurmQueue

log = logging.getLogger(__name__)

REFUSALS_S = 15.0
"""Maximum age of the check whether a job could be suspended at all."""
ASK_AGAIN_S = 10.0
"""Interval between requests to slurmctld about a job that is still unknown."""

_AFTER_S = 0.01
_APART_S = 0.25

NO_DEMAND = frozenset(
    {
        RefusalCode.NO_PRESSURE,
        RefusalCode.PROMISED,
        RefusalCode.QUEUE_UNKNOWN,
        RefusalCode.NODE_BUSY,
        RefusalCode.SHORT_SLEEPS,
    }
)
"""Reasons against a suspension that do not hold, or soon will not, when a sleeper waits for the job's GPUs."""
_TOO_SOON = frozenset({"min-run", "backoff", "failed"})
"""Reasons against a suspension that end by themselves."""


@dataclass(slots=True)
class JobState:
    """State of one job in the loop, in addition to the registry."""

    detector: IdleDetector
    inspected_s: float = -1e9
    refusals: tuple[Refusal, ...] = ()
    refusals_s: float = -1e9
    decision: Decision | None = None
    logged: str = ""
    """Code of the last decision that was logged."""
    failures: int = 0
    """Number of the last suspensions, without a gap, that have failed."""
    failed_s: float = 0.0
    """When the last of them did."""
    short_sleeps: int = 0
    """Number of the last sleeps in place, without a gap, that were too short."""
    woken_s: float = 0.0
    """When the last of them ended."""
    turn_s: float = 0.0
    """When its turn on its GPUs began: when it was woken, or began to run."""


@dataclass(slots=True)
class Loop:
    """Decisions for all watched jobs. The daemon supplies every field but ``states``."""

    config: AgentConfig
    policy: SuspendPolicy
    node: str
    registry: Registry
    watch: Watch
    queue: QueueView
    work: Work
    orchestration: Orchestration
    promises: Promises
    later: Callable[[Callable[[], None]], None]
    """Runs a call in the thread that talks to slurmctld."""
    aside: Callable[[Callable[[], None]], None]
    """Runs a call in the thread for queries of the node itself, which does not wait for slurmctld."""
    gpu_indices: Mapping[int, tuple[int, ...]]
    """Slurm's GPU numbers by job ID, as the prolog reported them."""
    answered: Callable[[], None] = lambda: None
    """Called when a reply has arrived that decisions may have waited for."""
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    states: dict[int, JobState] = field(default_factory=dict)
    _asking: set[int] = field(default_factory=set)
    _refreshing: bool = False
    _driver_error: str = ""
    _no_room: str | None = None
    _suspended: frozenset[int] | None = None
    """IDs of suspended jobs, as of the last refresh; ``None``: unknown, or no rule limits their number."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # --- one tick

    def tick(self) -> None:
        """Sample every watched job, then decide and act."""
        jobs = self.registry.jobs()
        under_way = self.work.under_way()
        with self._lock:
            for job_id in self.states.keys() - {job.job_id for job in jobs}:
                self.forget(job_id)
            for job in jobs:
                self._facts(job)
            for job in jobs:
                if self._waits_to_start(job.job_id):
                    self._state(job).turn_s = self.clock()
                elif job.job_id not in under_way and job.phase is Phase.RUNNING:
                    self._sample(job.job_id)
            self._want_queue(jobs)
        self.act()

    def _waits_to_start(self, job_id: int) -> bool:
        """Return whether its script waits for room on its GPUs; that does not count as idle time."""
        view = None if self.orchestration.in_place is None else self.orchestration.in_place.view(job_id)
        return view is not None and bool(view["starting"])

    def act(self) -> None:
        """Decide from the data at hand and start the actions. Also called when a reply has arrived."""
        with self._lock:
            for job, decision in self.decisions():
                self._follow(job, decision)

    def reconfigure(self, config: AgentConfig, policy: SuspendPolicy) -> None:
        """Decide by another configuration from now on. The window of a job whose rule has changed starts again."""
        with self._lock:
            self.config, self.policy = config, policy
            for job in self.registry.jobs():
                state, rule = self.states.get(job.job_id), idle_rule(config, job.option)
                if state is not None and state.detector.rule != rule:
                    state.detector = IdleDetector(rule)

    def forget(self, job_id: int) -> None:
        """Drop a job that is no longer watched."""
        with self._lock:
            self.states.pop(job_id, None)
            self._asking.discard(job_id)
            self.watch.forget(job_id)

    def full_s(self) -> float | None:
        """Return the clock time at which the next idle window will be full, or ``None`` if no window is open."""
        with self._lock:
            idle = [state.detector.state for state in self.states.values()]
        open_ = [state for state in idle if state is not None and state.since_s is not None and state.remaining_s > 0]
        ends = [state.since_s + state.window_s for state in open_ if state.since_s is not None]
        return min((end for end in ends if end > self.clock()), default=None)

    def woken(self, job_id: int, slept_s: float | None) -> None:
        """Begin the job's turn, and count short sleeps in place: health checks would wake it again and again.

        ``slept_s``: length of its sleep; ``None``: it was moved out although it was busy, which does not count.
        """
        with self._lock:
            state = self.states.get(job_id)
            if state is None:
                return
            state.turn_s = self.clock()
            if slept_s is not None:
                short = slept_s < self.policy.short_sleep_s
                state.short_sleeps, state.woken_s = state.short_sleeps + 1 if short else 0, self.clock()

    def restart(self, job_id: int) -> None:
        """Restart the idle window after work on a job; samples from before do not count."""
        with self._lock:
            state = self.states.get(job_id)
            if state is not None:
                state.detector.restart()
                state.turn_s = self.clock()
                state.refusals, state.refusals_s = (), -1e9  # valid for its previous state only
                outcome = self.work.outcome(job_id)
                if outcome is not None and outcome.code == FAILED:
                    state.failures, state.failed_s = state.failures + 1, self.clock()
                elif outcome is not None and outcome.succeeded:
                    state.failures = 0

    def _state(self, job: WatchedJob) -> JobState:
        state = self.states.get(job.job_id)
        if state is None or state.detector.rule.window_s != job.option.window_s:
            turn_s = self.clock() if state is None else state.turn_s
            state = self.states[job.job_id] = JobState(IdleDetector(idle_rule(self.config, job.option)), turn_s=turn_s)
        return state

    def _sample(self, job_id: int) -> IdleState | None:
        job = self.registry.get(job_id)
        if job is None:
            return None
        state = self._state(job)
        before = state.detector.state
        after = state.detector.feed(self.watch.sample(job, state.detector.rule))
        if before is None or before.verdict is not after.verdict:
            log.debug("job %d: %s %s", job_id, after.verdict, one_line(after.why))
        return after

    # --- what is known of a job

    def _facts(self, job: WatchedJob) -> None:
        """Look up the job's GPUs, and request its record from slurmctld, as far as they are not known yet."""
        state = self._state(job)
        if job.devices is None:
            self._find_devices(job)
        if (job.slurm is None or job.key is None) and self.clock() - state.inspected_s >= ASK_AGAIN_S:
            state.inspected_s = self.clock()
            if job.job_id not in self._asking:
                self._asking.add(job.job_id)
                self.later(lambda: self.identify(job.job_id))

    def identify(self, job_id: int) -> None:
        """Request the job's record from slurmctld, and find its journal. Runs in the thread that talks to slurmctld."""
        try:
            record = self.queue.read_job(job_id)
            job = (
                None if record is None else self.registry.change(job_id, lambda watched: replace(watched, slurm=record))
            )
            if job is not None and job.key is None:
                key, times = self.orchestration.keeper.identify(job)
                restored = self.orchestration.keeper.last_restore(job) if job.restarts else None
                self.registry.change(
                    job_id, lambda watched: replace(watched, key=key, suspensions=times, last_restore=restored)
                )
        except (AffinodeError, ValueError) as error:
            log.warning("job %d: %s", job_id, one_line(error))
        finally:
            self._asking.discard(job_id)

    def _find_devices(self, job: WatchedJob) -> None:
        indices = self.gpu_indices.get(job.job_id)
        if indices is None and job.slurm is not None:
            positions = queues.indices_on(job.slurm, self.node)
            indices = None if positions is None else tuple(positions)
        try:
            all_devices = self.watch.devices()
        except GpuError as error:
            self._say_driver(str(error))
            return
        self._say_driver("")
        devices = None if not indices else by_index(all_devices, indices)
        if devices is None:
            devices = self.watch.by_processes(job.job_id) or None
        if devices is not None:
            self.registry.change(job.job_id, lambda watched: replace(watched, devices=devices))

    def _say_driver(self, error: str) -> None:
        if error and not self._driver_error:
            log.warning("the GPUs cannot be queried: %s", one_line(error))
        elif self._driver_error and not error:
            log.info("the GPUs respond again")
        self._driver_error = error

    # --- decisions

    def _want_queue(self, jobs: tuple[WatchedJob, ...]) -> None:
        """Refresh the queue if an idle window is about to be full and the decision depends on the queue."""
        if self._refreshing or not self.queue.due():
            return
        for job in jobs:
            idle = self._state(job).detector.state
            near = idle is not None and idle.since_s is not None and idle.remaining_s <= 2 * self.queue.every_s
            pressed = job.option.when is Pressure.PRESSURE and job.option.mode is not Mode.INPLACE
            if near and (pressed or self._limits()):
                self._refreshing = True
                self.later(self._refresh)
                return

    def _limits(self) -> bool:
        named = (self.policy.partitions, self.policy.accounts, self.policy.users)
        return any(limit.max_suspended is not None for limits in named for limit in limits.values())

    def _refresh(self) -> None:
        try:
            self.refresh()
        finally:
            self._refreshing = False
            self.answered()

    def refresh(self) -> None:
        """Refresh the queue, the promises and the suspended jobs. Runs in the thread that talks to slurmctld."""
        self.queue.refresh()
        self.promises.refresh()
        self._suspended = self.orchestration.keeper.suspended_ids() if self._limits() else None

    def decisions(self) -> list[tuple[WatchedJob, Decision]]:
        """Return the decision for each watched job as of now."""
        with self._lock:
            jobs = self.registry.jobs()
            under_way = self.work.under_way()
            latest = self.queue.latest()
            candidates = {job.job_id: self._candidate(job, under_way, latest) for job in jobs}
            full = [
                candidate for candidate in candidates.values() if candidate.idle is not None and candidate.idle.reached
            ]
            ready = [candidate for candidate in full if not candidate.in_place]  # jobs in place keep their allocation
            surroundings = self._surroundings(latest)
            for job_id, what in under_way.items():
                if what == SUSPENDING and job_id in candidates:
                    surroundings = surroundings.with_one_more(candidates[job_id])
            results = []
            for job in jobs:
                decision = decide(self.policy, candidates[job.job_id], surroundings, ready)
                if decision.act:  # count it for the decisions on the other jobs
                    surroundings = surroundings.with_one_more(candidates[job.job_id])
                self._state(job).decision = decision
                results.append((job, decision))
            return results

    def _candidate(self, job: WatchedJob, under_way: Mapping[int, str], latest: SlurmQueue | None) -> Candidate:
        state = self._state(job)
        sleepers = self.orchestration.in_place
        slurm = job.slurm
        if latest is not None:
            slurm = latest.job(job.job_id) or slurm
        busy = under_way.get(job.job_id) or (None if job.phase is Phase.RUNNING else job.phase.value)
        return Candidate(
            job_id=job.job_id,
            option=job.option,
            idle=state.detector.state,
            # Before it is identified, its earlier suspensions are unknown.
            run_s=None if job.key is None else queues.run_s(slurm, self.now()),
            user=None if slurm is None else slurm.user,
            account=None if slurm is None else slurm.account,
            partition=None if slurm is None or not slurm.partitions else slurm.partitions[0],
            gpus=len(job.devices or ()),
            cpus=0 if slurm is None else slurm.cpus or 0,
            memory_mib=0 if slurm is None else queues.memory_mib(slurm.tres_allocated.get("mem")),
            suspensions=job.suspensions,
            busy_with=busy,
            refusals=state.refusals,
            failures=state.failures,
            failed_s=self.clock() - state.failed_s,
            short_sleeps=state.short_sleeps,
            awake_s=self.clock() - state.woken_s,
            turn_s=self.clock() - state.turn_s,
            shares_gpus=None if slurm is None else slurm.shares_gpus,
            needed_by=() if sleepers is None else tuple(map(str, sleepers.needed_by(job.job_id))),
        )

    def too_soon(self, job: WatchedJob) -> Refusal | None:
        """Return why a job has not run long enough to be suspended on request, or ``None`` if it has."""
        with self._lock:
            candidate = self._candidate(job, {}, self.queue.latest())
        return next(iter(too_soon(self.policy, candidate)), None)

    def movable_s(self, job_id: int) -> float | None:
        """Return the idle time of a job that would be suspended if another job waited for its GPUs, else ``None``."""
        state = self.states.get(job_id)
        if state is None or state.decision is None:
            return None
        idle = state.detector.state
        if idle is None or not idle.reached or any(refusal.code not in NO_DEMAND for refusal in state.decision.against):
            return None
        return idle.progress_s

    def turn_left_s(self, job_id: int) -> float | None:
        """Return the seconds until a job would be suspended for another one that waits for its GPUs, busy or not.

        At most 0: now. ``None``: it stays while it is busy, since the site's rules or its processes are against it.
        """
        state, turn_s = self.states.get(job_id), self.policy.max_turn_s
        if state is None or state.decision is None or not turn_s or self.policy.dry_run:
            return None
        against = {refusal.code for refusal in state.decision.against} - NO_DEMAND
        if against - _TOO_SOON:
            return None
        left_s = turn_s - (self.clock() - state.turn_s)
        return max(left_s, 1.0) if against else left_s

    def _surroundings(self, latest: SlurmQueue | None) -> Surroundings:
        """Return the conditions for suspensions, without those in progress on this node."""
        if latest is None:
            return Surroundings(None, None, no_room=self._no_room, suspended_known=False)
        promises = self.promises.known()
        partitions, accounts, users = latest.suspended(self._suspended or ())
        room = latest.room(self.node)
        if room is not None:
            # GPUs that are being freed count as free: one waiting job must not displace two jobs.
            room = replace(room, free_gpus=room.free_gpus + self.work.freeing())
        return Surroundings(
            latest.waiting(), room, no_room=self._no_room, suspended_partitions=partitions,
            suspended_accounts=accounts, suspended_users=users, suspended_known=self._suspended is not None,
            promises=promises,
        )  # fmt: skip

    def _follow(self, job: WatchedJob, decision: Decision) -> None:
        state = self._state(job)
        idle = state.detector.state
        full = idle is not None and idle.reached
        if decision.code != state.logged and (full or decision.busy):
            log.info("job %d: %s", job.job_id, one_line(decision.text))
        state.logged = decision.code
        # Check shortly before the window is full, so that the decision does not have to wait.
        near = idle is not None and idle.since_s is not None and idle.remaining_s <= REFUSALS_S / 2
        near = near or decision.busy  # the refusals of a busy job were not checked yet
        old = self.clock() - state.refusals_s >= REFUSALS_S
        if near and decision.code != "under-way" and old and job.job_id not in self._asking:
            self._asking.add(job.job_id)
            self.aside(lambda: self.refusals(job.job_id))
        elif decision.act and not old:
            sample_again = (lambda: None) if decision.busy else self.sample_again(job)
            self.work.suspend(job, decision.text, sample_again, self.promise(job, decision), busy=decision.busy)

    def refusals(self, job_id: int) -> None:
        """Check whether a job could be suspended at all, and whether there is room for its checkpoint image."""
        try:
            job = self.registry.get(job_id)
            try:
                refusals = () if job is None else tuple(self.orchestration.suspender.refusals(job))
            except AffinodeError as error:
                log.warning("job %d: %s", job_id, one_line(error))
                refusals = (Refusal(RefusalCode.NOT_KNOWN, f"whether it can be is not known: {error}"),)
            if (
                job is not None
                and job.slurm is not None
                and any(refusal.code == RefusalCode.SRUN_STEPS for refusal in refusals)
            ):
                self.later(lambda: self.identify(job_id))  # the steps may have ended since slurmctld reported them
            self._no_room = self.orchestration.keeper.room()
            state = self.states.get(job_id)
            if state is not None:
                state.refusals, state.refusals_s = refusals, self.clock()
        finally:
            self._asking.discard(job_id)
            self.answered()

    def promise(self, job: WatchedJob, decision: Decision) -> Promising:
        """Return a call that promises the job's GPUs to a waiting job, so that other nodes free none for it."""
        gpus = max(1, len(job.devices or ()))

        def take() -> Promised | None:
            if not decision.presses:
                return lambda freed: None  # its option suspends it in any case
            names = (self.promises.take(waiting, gpus) for waiting in decision.presses)
            name = next((name for name in names if name is not None), None)
            return None if name is None else lambda freed: self.promises.leave(name, gpus, freed=freed)

        return take

    def sample_again(self, job: WatchedJob) -> SampleAgain:
        """Return a final check just before the suspension: one more sample, judged by itself."""

        def sample() -> str | None:
            now = self.registry.get(job.job_id) or job
            rule = idle_rule(self.config, now.option)
            return still_idle(rule, self.watch.sample(now, rule))

        return sample


def run(
    tick: Callable[[], None],
    act: Callable[[], None],
    period_s: float,
    *,
    stop: threading.Event,
    poke: threading.Event,
    soon: Callable[[], float | None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call ``tick`` every ``period_s`` seconds until ``stop``, and ``act`` when ``poke`` is set in between.

    A tick that takes longer than a period skips the missed ones. ``soon`` returns when an extra tick is useful before
    the next one is due; otherwise a window that is full just after a tick would be noticed a period late. Code that
    sets ``stop`` must set ``poke`` too.
    """
    began = clock()
    while not stop.is_set():
        _safely(tick)
        ticked = clock()
        due, early = began + (int((ticked - began) / period_s + 1e-6) + 1) * period_s, soon()
        if early is not None:
            # Counters since the last sample need some time between two samples.
            due = min(due, max(early + _AFTER_S, ticked + min(_APART_S, period_s / 4)))
        while not stop.is_set() and poke.wait(max(0.0, due - clock())):
            poke.clear()
            if not stop.is_set():
                _safely(act)


def _safely(call: Callable[[], None]) -> None:
    with surviving(log, "a round of the loop failed"):
        try:
            call()
        except ExhaustedError as error:
            log.warning("a round of the loop failed: %s", one_line(error))


def period_of(config: AgentConfig) -> float:
    """Return the seconds between two ticks."""
    return parse_span_s(config.period)
