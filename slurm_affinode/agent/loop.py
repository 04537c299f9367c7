"""Sample, decide, act: the daemon's own thread. It never waits for Slurm, for a suspension, or for a client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slurm_affinode.agent import queue as queues
from slurm_affinode.agent.interface import LookAgain, Orchestration
from slurm_affinode.agent.promises import Promises
from slurm_affinode.agent.queue import Queue, QueueView
from slurm_affinode.agent.registry import Registry, WatchedJob
from slurm_affinode.agent.settings import idle_rule
from slurm_affinode.agent.shepherds import one_line
from slurm_affinode.agent.surviving import surviving
from slurm_affinode.agent.watch import Watch, by_index
from slurm_affinode.agent.work import SUSPENDING, Promised, Promising, Work
from slurm_affinode.core.idle import IdleDetector, IdleState, still_idle
from slurm_affinode.core.policy import Candidate, Decision, Policy, Surroundings, decide, too_soon
from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import Phase, Pressure, Refusal
from slurm_affinode.nodeconfig import AgentConfig
from slurm_affinode.timespec import parse_span_s

log = logging.getLogger(__name__)

REFUSALS_S = 15.0
"""How old the answer to whether a job could be suspended at all may be."""
ASK_AGAIN_S = 10.0
"""Between two questions to slurmctld about a job of which it has not said anything yet."""

_AFTER_S = 0.01
_APART_S = 0.25

NOBODY_WAITS = frozenset({"no-pressure", "promised", "queue-unknown", "node-busy"})
"""Reasons against a suspension that are gone, or will be soon, when a sleeper waits for the job's GPUs."""


@dataclass(slots=True)
class JobState:
    """What the loop knows of one job, beside the registry."""

    detector: IdleDetector
    asked_s: float = -1e9
    looked: bool = False
    refusals: tuple[Refusal, ...] = ()
    refusals_s: float = -1e9
    decision: Decision | None = None
    said: str = ""
    """Code of the last decision that was logged."""


@dataclass(slots=True)
class Loop:
    """One tick after the other. Every field but ``states`` is given by the daemon."""

    config: AgentConfig
    policy: Policy
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
    """Runs a call in a thread for what asks the node itself: it does not wait for slurmctld."""
    gpu_indices: Mapping[int, tuple[int, ...]]
    """Job id -> Slurm's numbers of its GPUs, as the prolog told."""
    answered: Callable[[], None] = lambda: None
    """Called when an answer has come in that decisions may have waited for."""
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    states: dict[int, JobState] = field(default_factory=dict)
    _asking: set[int] = field(default_factory=set)
    _refreshing: bool = False
    _driver_said: str = ""
    _no_room: str | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # --- one tick

    def tick(self) -> None:
        """Sample every watched job, decide, begin what is decided."""
        jobs = self.registry.jobs()
        under_way = self.work.under_way()
        with self._lock:
            for job_id in self.states.keys() - {job.job_id for job in jobs}:
                self.forget(job_id)
            for job in jobs:
                self._facts(job)
            for job in jobs:
                if job.job_id not in under_way and job.phase is Phase.RUNNING and not self._waits_to_start(job.job_id):
                    self._sample(job.job_id)
            self._want_queue(jobs)
        self.act()

    def _waits_to_start(self, job_id: int) -> bool:
        """Its script has not begun, since there is no room on its GPUs: that is no idleness."""
        view = None if self.orchestration.in_place is None else self.orchestration.in_place.view(job_id)
        return view is not None and bool(view["starting"])

    def act(self) -> None:
        """Decide on what is known, and begin what is decided. Also called when an answer has come in."""
        with self._lock:
            for job, decision in self.decisions():
                self._follow(job, decision)

    def forget(self, job_id: int) -> None:
        """A job is watched no more."""
        with self._lock:
            self.states.pop(job_id, None)
            self._asking.discard(job_id)
            self.watch.forget(job_id)

    def full_s(self) -> float | None:
        """When the next window will be full, if its job stays idle, by the clock; ``None``: no window is open."""
        with self._lock:
            idle = [state.detector.state for state in self.states.values()]
        open_ = [one for one in idle if one is not None and one.since_s is not None and one.remaining_s > 0]
        ends = [one.since_s + one.window_s for one in open_ if one.since_s is not None]
        return min((end for end in ends if end > self.clock()), default=None)

    def restart(self, job_id: int) -> None:
        """Work on a job is over: what its GPUs did before does not count."""
        with self._lock:
            state = self.states.get(job_id)
            if state is not None:
                state.detector.restart()
                state.refusals, state.refusals_s = (), -1e9  # of what it was until now: asleep, for one

    def _state(self, job: WatchedJob) -> JobState:
        state = self.states.get(job.job_id)
        if state is None or state.detector.rule.window_s != job.option.window_s:
            state = self.states[job.job_id] = JobState(IdleDetector(idle_rule(self.config, job.option)))
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
        """Find out which GPUs it has, and ask slurmctld about it, where that is not known yet."""
        state = self._state(job)
        if job.devices is None:
            self._find_devices(job)
        if (job.slurm is None or job.key is None) and self.clock() - state.asked_s >= ASK_AGAIN_S:
            state.asked_s = self.clock()
            if job.job_id not in self._asking:
                self._asking.add(job.job_id)
                self.later(lambda: self._ask(job.job_id))

    def _ask(self, job_id: int) -> None:
        try:
            found = self.queue.look(job_id)
            job = None if found is None else self.registry.change(job_id, lambda one: replace(one, slurm=found))
            if job is not None and job.key is None:
                key, times = self.orchestration.keeper.identify(job)
                self.registry.change(job_id, lambda one: replace(one, key=key, suspensions=times))
        except (AffinodeError, ValueError) as error:
            log.warning("job %d: %s", job_id, one_line(str(error)))
        finally:
            self._asking.discard(job_id)

    def _find_devices(self, job: WatchedJob) -> None:
        indices = self.gpu_indices.get(job.job_id)
        if indices is None and job.slurm is not None:
            said = queues.indices_on(job.slurm, self.node)
            indices = None if said is None else tuple(said)
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
            self.registry.change(job.job_id, lambda one: replace(one, devices=devices))

    def _say_driver(self, error: str) -> None:
        if error and not self._driver_said:
            log.warning("the GPUs cannot be asked: %s", one_line(error))
        elif self._driver_said and not error:
            log.info("the GPUs answer again")
        self._driver_said = error

    # --- decisions

    def _want_queue(self, jobs: tuple[WatchedJob, ...]) -> None:
        """Ask for the queue where a window is about to be full and the answer matters; nobody else needs it."""
        if self._refreshing or not self.queue.due():
            return
        for job in jobs:
            idle = self._state(job).detector.state
            near = idle is not None and idle.since_s is not None and idle.remaining_s <= 2 * self.queue.every_s
            if near and (job.option.when is Pressure.PRESSURE or self._limits()):
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
        """Ask slurmctld who waits, and see who has a promise. In the thread that talks to slurmctld."""
        self.queue.refresh()
        self.promises.look()

    def decisions(self) -> list[tuple[WatchedJob, Decision]]:
        """What would be done with each watched job now."""
        with self._lock:
            jobs = self.registry.jobs()
            under_way = self.work.under_way()
            latest = self.queue.latest()
            candidates = {job.job_id: self._candidate(job, under_way, latest) for job in jobs}
            full = [one for one in candidates.values() if one.idle is not None and one.idle.reached]
            ready = [one for one in full if not one.in_place]  # the others give no GPU back to Slurm
            surroundings = self._surroundings(latest)
            for job_id, what in under_way.items():
                if what == SUSPENDING and job_id in candidates:
                    surroundings = surroundings.with_one_more(candidates[job_id])
            found = []
            for job in jobs:
                decision = decide(self.policy, candidates[job.job_id], surroundings, ready)
                if decision.act:  # two whose windows are full at once are two
                    surroundings = surroundings.with_one_more(candidates[job.job_id])
                self._state(job).decision = decision
                found.append((job, decision))
            return found

    def _candidate(self, job: WatchedJob, under_way: Mapping[int, str], latest: Queue | None) -> Candidate:
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
            run_s=queues.run_s(slurm, self.now()),
            user=None if slurm is None else slurm.user,
            account=None if slurm is None else slurm.account,
            partition=None if slurm is None or not slurm.partitions else slurm.partitions[0],
            gpus=len(job.devices or ()),
            cpus=0 if slurm is None else slurm.cpus or 0,
            memory_mib=0 if slurm is None else queues.memory_mib(slurm.tres_allocated.get("mem")),
            suspensions=job.suspensions,
            busy_with=busy,
            refusals=state.refusals,
            wanted_by=() if sleepers is None else tuple(map(str, sleepers.wanted(job.job_id))),
        )

    def too_soon(self, job: WatchedJob) -> Refusal | None:
        """Why a run has not lasted long enough to be suspended by hand; ``None``: it has."""
        with self._lock:
            candidate = self._candidate(job, {}, self.queue.latest())
        return next(iter(too_soon(self.policy, candidate)), None)

    def movable_s(self, job_id: int) -> float | None:
        """For how long a job has been idle that would be suspended if somebody waited for its GPUs; else ``None``."""
        state = self.states.get(job_id)
        if state is None or state.decision is None:
            return None
        idle = state.detector.state
        if idle is None or not idle.reached or any(one.code not in NOBODY_WAITS for one in state.decision.against):
            return None
        return idle.progress_s

    def _surroundings(self, latest: Queue | None) -> Surroundings:
        """Before what is under way here is counted."""
        if latest is None:
            return Surroundings(None, None, no_room=self._no_room)
        promises = self.promises.known()
        partitions, accounts, users = latest.suspended()
        room = latest.room(self.node)
        if room is not None:
            # What is being freed is as good as free: one waiting job must not cost two jobs their place.
            room = replace(room, free_gpus=room.free_gpus + self.work.freeing())
        return Surroundings(
            latest.waiting(), room, no_room=self._no_room, suspended_partitions=partitions,
            suspended_accounts=accounts, suspended_users=users, promises=promises,
        )  # fmt: skip

    def _follow(self, job: WatchedJob, decision: Decision) -> None:
        state = self._state(job)
        idle = state.detector.state
        full = idle is not None and idle.reached
        if decision.code != state.said and full:
            log.info("job %d: %s", job.job_id, one_line(decision.text))
        state.said = decision.code
        # Asked a little before the window is full, so that nothing has to be waited for then.
        near = idle is not None and idle.since_s is not None and idle.remaining_s <= REFUSALS_S / 2
        old = self.clock() - state.refusals_s >= REFUSALS_S
        if near and decision.code != "under-way" and old and job.job_id not in self._asking:
            self._asking.add(job.job_id)
            self.aside(lambda: self.refusals(job.job_id))
        elif decision.act and not old:
            self.work.suspend(job, decision.text, self.look_again(job), self.promise(job, decision))

    def refusals(self, job_id: int) -> None:
        """Find out whether a job could be suspended at all, and whether there is room for its image."""
        try:
            job = self.registry.get(job_id)
            try:
                found = () if job is None else tuple(self.orchestration.suspender.refusals(job))
            except AffinodeError as error:
                log.warning("job %d: %s", job_id, one_line(str(error)))
                found = (Refusal("not-known", f"whether it can be is not known: {error}"),)
            self._no_room = self.orchestration.keeper.room()
            state = self.states.get(job_id)
            if state is not None:
                state.refusals, state.refusals_s = found, self.clock()
        finally:
            self._asking.discard(job_id)
            self.answered()

    def promise(self, job: WatchedJob, decision: Decision) -> Promising:
        """What the job's GPUs are freed for is promised them, so that no other node frees some for the same job."""
        gpus = max(1, len(job.devices or ()))

        def take() -> Promised | None:
            if not decision.presses:
                return lambda freed: None  # its option says: in any case
            names = (self.promises.take(waiting, gpus) for waiting in decision.presses)
            name = next((one for one in names if one is not None), None)
            return None if name is None else lambda freed: self.promises.leave(name, gpus, freed=freed)

        return take

    def look_again(self, job: WatchedJob) -> LookAgain:
        """The look just before acting: one more sample, judged by itself."""

        def look() -> str | None:
            now = self.registry.get(job.job_id) or job
            rule = idle_rule(self.config, now.option)
            return still_idle(rule, self.watch.sample(now, rule))

        return look


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

    A tick that takes longer leaves some out. ``soon``: when one more tick is worth while before the next one is due: a
    window that is full a moment after a tick would else be seen a period late. Whoever sets ``stop`` sets ``poke`` too.
    """
    began = clock()
    while not stop.is_set():
        _safely(tick)
        ticked = clock()
        due, early = began + (int((ticked - began) / period_s + 1e-6) + 1) * period_s, soon()
        if early is not None:
            # Counters that tell what was since the last look need some time between two.
            due = min(due, max(early + _AFTER_S, ticked + min(_APART_S, period_s / 4)))
        while not stop.is_set() and poke.wait(max(0.0, due - clock())):
            poke.clear()
            if not stop.is_set():
                _safely(act)


def _safely(call: Callable[[], None]) -> None:
    with surviving(log, "a round of the loop failed"):
        call()


def period_of(config: AgentConfig) -> float:
    """Seconds between two ticks."""
    return parse_span_s(config.period)
