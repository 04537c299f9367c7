"""Looks after the jobs that sleep in place: who is wanted, whose turn it is, who makes room.

One thread looks at the sleepers every ``inplace.poll_ms``: at their sockets, and at whether their processes still stand
still. Whoever is wanted stands in one line; ``core.inplace`` says who wakes, and who has to make room for whom. Nothing
here suspends a job: the policy does, and is told which job a sleeper would need to have out of its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slurm_affinode.agent import words
from slurm_affinode.agent.aftermath import mail_owner
from slurm_affinode.agent.inplace.comments import Comments, Workers
from slurm_affinode.agent.inplace.freezer import Freezer
from slurm_affinode.agent.inplace.line import InLine, Line
from slurm_affinode.agent.inplace.looks import Looks
from slurm_affinode.agent.inplace.sharing import Holder, Rules, Sharing, Unheard
from slurm_affinode.agent.inplace.sleeper import Cards, Sleeper
from slurm_affinode.agent.inplace.starting import Starter, Starters
from slurm_affinode.agent.inplace.waking import NoRoom, Waking
from slurm_affinode.agent.inplace.watching import Sockets
from slurm_affinode.agent.inplace.wishes import Wishes, from_slurm
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.journal import JournalError, Record
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.surviving import surviving
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.core.inplace import Card
from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import Phase, Refusal

_WAKES_AT_ONCE, _ASIDE_AT_ONCE = 4, 8
"""Signals, and jobs that are to end, do not wait for those."""
_SLOWLY_S, _LOOKS_S = 1.0, 0.1
"""Between two looks at what changes seldom (whether the processes are there, the line when nothing has happened), and
of a prolog that waits."""
_MOST_OF_TIME = 20.0
"""A look is followed by a pause at least so many times as long as it computed; what it waited for costs no core."""


class Director:
    """One for the agent. Thread-safe."""

    def __init__(
        self, parts: Parts, freezer: Freezer, sockets: Sockets, cards: Cards, rules: Rules,
        *, unheard: Unheard = lambda pids: {}, workers: Workers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``unheard``: see ``Sharing``; ``clock``: see ``Line``. ``workers`` work beside the thread that looks."""
        self._parts, self._freezer, self._sockets = parts, freezer, sockets
        self._sharing = Sharing(parts.registry, freezer, cards, rules.awake_limit_pct, unheard)
        self._rules = rules
        self._waking = Waking(parts, freezer, self._sharing, sockets, rules.freeze_s)
        self._comments = Comments(parts)
        self._looks = Looks(freezer, sockets, parts.settings.wake_backoff_s)
        self._line = Line(parts, self._sharing, self._comments, rules.deadline_s, clock)
        self._starters = Starters(parts, freezer, rules.start_free_pct)
        self._lock = threading.RLock()
        self._sleepers: dict[int, Sleeper] = {}
        self._wishes = Wishes(parts)
        self._slowly_s = 0.0
        self._poke, self._stop = threading.Event(), threading.Event()
        self._changed = threading.Condition(self._lock)
        self._workers = workers or ThreadPoolExecutor(_WAKES_AT_ONCE, "wake")
        self._aside = workers or ThreadPoolExecutor(_ASIDE_AT_ONCE, "aside")
        self._thread: threading.Thread | None = None
        self.idle_s: Callable[[int], float | None] = lambda job_id: None
        """For how long a job has been idle, where the policy would let it go for another one; else ``None``."""
        self.woken: Callable[[int, str], None] = lambda job_id, how: None
        """Told of a job that runs again, and how that came."""
        self.pressed: Callable[[], None] = lambda: None
        """Told that other jobs are to make room now."""
        self._line.pressed = lambda: self.pressed()  # noqa: PLW0108 - it is set later
        self.gpus_of: Callable[[int], Sequence[str] | None] = lambda job_id: None
        """UUIDs of the GPUs of a job that has not started."""

    # --- the thread

    def start(self) -> None:
        """Begin to look after sleepers."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inplace", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """No more wakes; the journal has what sleeps."""
        self._stop.set()
        self._poke.set()
        for workers in (self._workers, self._aside, self._comments.worker):
            workers.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.thread_time()
            with surviving(self._parts.log, "a look at the sleeping jobs failed"):
                self.round()
            busy = self._sleepers or len(self._starters) or self._comments.due or self._waking.unfinished
            # Where many sockets have to be told of it is looked less often.
            pause_s = max(self._rules.poll_s, _MOST_OF_TIME * (time.thread_time() - began))
            self._poke.wait(pause_s if busy else None)
            self._poke.clear()

    def round(self) -> None:
        """Look once at all that sleep, wake or wait to start, and wake or let in who is wanted and has room."""
        now = self._parts.now()
        slowly = not 0 <= now - self._slowly_s < _SLOWLY_S
        if slowly:
            self._slowly_s = now
            self._look_slowly(now)
            self._waking.tidy()
            with self._lock:
                self._starters.tend(now, self.idle_s)
        with self._lock:
            asleep = [one for one in self._sleepers.values() if one.asked_epoch is None]
        for sleeper, why in self._looks.requests(asleep, now):
            self._ask(sleeper, why)
        with self._lock:
            frozen = [one for one in self._sleepers.values() if one.frozen]
        for sleeper, why in self._looks.stirring(frozen, every=slowly):
            self._let_go(sleeper, why)
        self._serve(now)
        self._comments.tick(now)

    # --- who is wanted

    def adopt(self, sleeper: Sleeper, *, ask: str = "") -> None:
        """See ``suspender.Caretaker``."""
        self._refresh(sleeper)
        with self._lock:
            self._sleepers[sleeper.job_id] = sleeper
            self._starters.forget(sleeper.job_id)  # it would wait for its own room
        wish = self._wishes.of(sleeper)
        if wish is not None and wish.let_go:
            self._let_go(sleeper, wish.why)
        elif wish is not None:
            self._ask(sleeper, wish.why, lasting=wish.lasting)
        elif not ask:
            self._parts.log.info(
                "job %s: asleep in place, %s in host memory (%s)", sleeper.job_id, words.size(sleeper.gpu_bytes),
                "stopped by signals" if sleeper.how == "signals" else f"frozen by {sleeper.how}",
            )  # fmt: skip
            self._comments.set(sleeper.job_id, sleeper.said)
        else:
            self._ask(sleeper, ask)
        self._line.changed()
        self._poke.set()

    def take_up(self, record: Record, *, ask: str = "") -> None:
        """A sleeper of the last agent. Unless it is to wake it is frozen again: that may have been cut short."""
        sleeper = Sleeper.of(record)
        ask = ask or self._waking.freeze_again(sleeper)
        self._parts.registry.set_phase(sleeper.job_id, record.phase)
        self.adopt(sleeper, ask=ask or str(record.facts.get("asked_why") or ""))

    def _refresh(self, sleeper: Sleeper) -> None:
        try:
            members = self._freezer.members(sleeper.init_pid, sleeper.init_started)
        except TreeGoneError:
            return
        sleeper.pids = tuple(member.pid for member in members)
        sleeper.own = self._sockets.own(sleeper.pids)

    def admit(self, job: WatchedJob) -> bool:
        """Whether a job may start now; ``False``: its shepherd waits, and is told when it is its turn."""
        with self._lock:
            admitted = self._starters.admit(job, self._line.turn)
        self._poke.set()
        return admitted

    def back(self, job_id: int) -> None:
        """The shepherd of a job that has started before has come to this agent."""
        with self._lock:
            if (sleeper := self._sleepers.get(job_id)) is not None:
                self._parts.registry.set_phase(job_id, sleeper.record.phase)
                return
        self._comments.check(job_id)

    def holds(self, job_id: int) -> Phase | None:
        """The phase of a job that is asleep or waking; ``None``: it is neither."""
        with self._lock:
            sleeper = self._sleepers.get(job_id)
            return None if sleeper is None else sleeper.record.phase

    def wake(self, job_id: int, who: str) -> None:
        """Wake a job because ``who`` asked. Twice is as once. Raises ``Refused``."""
        with self._lock:
            sleeper = self._sleepers.get(job_id)
            if sleeper is None:
                if self._wishes.wake(job_id, who):
                    return
                raise Refused(Refusal("not-suspended", f"job {job_id} does not sleep"))
            sleeper.retry_epoch = 0.0
        self._ask(sleeper, f"asked by {who}", lasting=True)

    def signalled(self, job_id: int, number: int) -> None:
        """Slurm sent a signal to a job: its processes are let go at once, whether there is room on the GPU or not."""
        wish = from_slurm(number)
        with self._lock:
            sleeper = self._sleepers.get(job_id)
            if sleeper is not None:
                sleeper.stop_epoch = self._parts.now() if wish is None else None
            elif wish is not None:
                self._wishes.keep(job_id, wish)
        if sleeper is not None and wish is not None:
            self._aside.submit(self._let_go, sleeper, wish.why)

    def wake_on(self, indices: Sequence[int], why: str, timeout_s: float) -> list[int]:
        """Wake every sleeper with memory on GPUs of these numbers, and wait; those that sleep on."""
        uuids = self._sharing.uuids(indices)
        deadline = time.monotonic() + timeout_s
        with self._wishes.prolog(uuids, why), self._changed:
            while True:
                for sleeper in self._sleepers.values():
                    if uuids & sleeper.held.keys():
                        self._ask(sleeper, why)
                asleep = {one.job_id for one in self._sleepers.values() if uuids & one.held.keys()}
                left = sorted(asleep | self._wishes.falling_on(uuids))
                if not left or self._stop.is_set() or time.monotonic() >= deadline:
                    return left
                self._changed.wait(min(_LOOKS_S, timeout_s))

    def _ask(self, sleeper: Sleeper, why: str, *, lasting: bool = False) -> None:
        """Put it into the line. ``lasting``: nothing that the next agent could see asks for it."""
        with self._lock:
            if sleeper.asked_epoch is not None or sleeper.job_id not in self._sleepers:
                self._poke.set()
                return
            sleeper.turn = self._line.turn()
            before = sleeper.record.facts.get("asked")
            sleeper.asked_epoch, sleeper.asked_why = self._parts.now() if before is None else float(before), why
            sleeper.noted = before is not None
            if lasting:
                self._note(sleeper)
        self._parts.log.info("job %s: is to wake: %s", sleeper.job_id, why)
        self._poke.set()

    def _note(self, sleeper: Sleeper) -> None:
        """Who wants it, and since when, for the next agent."""
        with self._lock:
            if sleeper.noted or sleeper.waking or sleeper.job_id not in self._sleepers:
                return
            try:
                sleeper.note()
            except JournalError as error:
                self._parts.log.warning("job %s: its place in the line is not kept: %s", sleeper.job_id, error)

    def _let_go(self, sleeper: Sleeper, why: str) -> None:
        """Also one that is waking: its turn among those that do so at once may not have come."""
        if self._sleepers.get(sleeper.job_id) is not sleeper:
            return
        sleeper.signalled = True
        try:
            self._waking.thaw(sleeper)
        except TreeGoneError:
            self._gone(sleeper)
            return
        except AffinodeError as error:
            self._parts.log.warning("job %s: %s", sleeper.job_id, error)
        self._ask(sleeper, why)

    # --- looking

    def _look_slowly(self, now: float) -> None:
        with self._lock:
            sleepers = list(self._sleepers.values())
        for sleeper in sleepers:
            if not sleeper.waking and not self._parts.processes.alive(sleeper.init_pid, sleeper.init_started):
                self._gone(sleeper)
            elif sleeper.asked_epoch is None and (why := self._looks.due(sleeper, now, self._fits)):
                self._ask(sleeper, why)

    def _fits(self, sleeper: Sleeper) -> bool:
        """Whether there is room for it, and nobody waits for that."""
        with self._lock:
            if len(self._starters) or any(one.asked_epoch is not None for one in self._sleepers.values()):
                return False
            asleep = frozenset(self._sleepers)
        return bool(self._sharing.plan([sleeper], [], asleep, self.idle_s).go)

    def _gone(self, sleeper: Sleeper) -> None:
        with self._changed:
            if self._sleepers.pop(sleeper.job_id, None) is None:
                return
            self._changed.notify_all()
        self._comments.clear(sleeper.job_id)  # it may be requeued, and sleeps no more
        try:
            self._waking.gone(sleeper)
        except AffinodeError as error:
            self._parts.log.warning("job %s: %s", sleeper.job_id, error)
        self._parts.log.info("job %s: ended while it slept in place", sleeper.job_id)

    # --- serving the line

    def cards(self) -> Sequence[Card]:
        """See ``suspender.Caretaker``."""
        return self._sharing.cards()

    def _serve(self, now: float) -> None:
        with self._lock:
            sleepers = list(self._sleepers.values())
            asleep = frozenset(self._sleepers) | self._starters.ids()
            waiting: list[InLine] = [*self._looks.in_line(sleepers, now)]
            try:
                waiting += self._starters.waiting(self.cards, self.gpus_of)
            except GpuError as error:
                self._parts.log.warning("who may start is not known: %s", error)
            coming: list[Holder] = [one for one in sleepers if one.waking]
            coming += self._starters.coming()
        self._line.serve(now, waiting, coming, asleep=asleep, idle_s=self.idle_s, go=self._let, late=self._late)
        for one in waiting:
            if isinstance(one, Sleeper) and one.waits:
                self._note(one)

    def _let(self, one: InLine) -> None:
        """It is its turn."""
        if isinstance(one, Sleeper):
            self._begin(one)
        elif isinstance(one, Starter):
            self._let_in(one)

    def _let_in(self, one: Starter) -> None:
        self._parts.log.info("job %s: starts", one.job_id)
        self._comments.clear(one.job_id)
        with self._lock:
            self._starters.go(one)

    def _late(self, one: InLine, why: str) -> None:
        """One is overdue: a starter starts all the same, for a sleeper it is as the site has chosen."""
        if isinstance(one, Starter):
            self._let_in(one)
        elif isinstance(one, Sleeper):
            mail_owner(self._parts, one.record, "failed", why=why, ended=self._rules.end_on_deadline)
            if self._rules.end_on_deadline:
                self._aside.submit(self._waking.end, one, why)

    def wanted(self, job_id: int) -> tuple[int, ...]:
        """The jobs for which another one is to make room."""
        return self._line.wanted(job_id)

    def _begin(self, sleeper: Sleeper) -> None:
        with self._lock:
            sleeper.waking, sleeper.waits = True, ""
        try:
            self._workers.submit(self._wake, sleeper)
        except RuntimeError:  # the agent is being stopped
            sleeper.waking = False

    def _wake(self, sleeper: Sleeper) -> None:
        with surviving(self._parts.log, "job %s: not woken, by a fault of the agent", sleeper.job_id) as fault:
            self._try_to_wake(sleeper)
        if fault.error is not None:
            self._not_woken(sleeper, f"a fault of the agent: {type(fault.error).__name__}")
        sleeper.waking = False
        self._line.changed()
        self._poke.set()

    def _try_to_wake(self, sleeper: Sleeper) -> None:
        try:
            self._waking.wake(sleeper)
        except TreeGoneError:
            self._gone(sleeper)
        except NoRoom as error:
            self._parts.log.info("job %s: goes on waiting to wake: %s", sleeper.job_id, error)
        except AffinodeError as error:
            self._not_woken(sleeper, str(error))
        else:
            with self._changed:
                self._sleepers.pop(sleeper.job_id, None)
                self._parts.registry.set_phase(sleeper.job_id, Phase.RUNNING)  # it may have been seen to sleep since
                self._changed.notify_all()
            self._comments.clear(sleeper.job_id)
            slept = words.span(self._parts.now() - sleeper.since_epoch)
            self.woken(sleeper.job_id, f"awake after {slept} in place: {sleeper.asked_why}")

    def _not_woken(self, sleeper: Sleeper, why: str) -> None:
        pause = sleeper.failed(why, self._parts.now())
        mail_owner(self._parts, sleeper.record, "failed", why=why)
        self._parts.log.error("job %s: not woken: %s; tried again in %g s", sleeper.job_id, why, pause)
        self._comments.set(sleeper.job_id, words.not_woken(why))
        self._line.look_at_deadline(sleeper, why, self._parts.now(), self._late)

    # --- showing

    def view(self, job_id: int) -> dict[str, Any] | None:
        """What ``status`` shows of a sleeper; ``None``: the job is none."""
        with self._lock:
            if (starter := self._starters.get(job_id)) is not None:
                return starter.view()
            one = self._sleepers.get(job_id)
            return None if one is None else one.view(self._parts.now(), held=self._freezer.held(one.init_pid))
