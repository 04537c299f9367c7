"""The line of those that want GPU memory: sleepers that are to wake, jobs that are to start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slurm_affinode.agent import words
from slurm_affinode.agent.inplace.comments import Comments
from slurm_affinode.agent.inplace.sharing import Holder, Sharing
from slurm_affinode.agent.parts import Parts
from slurm_affinode.gpu.interface import GpuError

_AGAIN_S = 0.5
"""A line in which nothing has changed is looked at so often: memory may have become free by itself."""
_SAID_S = 1.0
"""Who waits for less is not worth a comment."""


class InLine(Holder, Protocol):
    """One that waits."""

    asked_epoch: float | None
    """Since when; its place in the line, also of the next agent."""
    turn: int
    """Of those that came at the same time: lower is earlier."""
    waits: str
    """Why it waits, one line; set here."""
    overdue: bool
    """It has waited longer than the site's deadline; set here."""

    @property
    def verb(self) -> str:
        """What it waits to do: ``wake`` or ``start``."""
        ...


class Line:
    """Serves those in line by ``core.inplace``. ``serve`` is for one thread, the rest for any."""

    def __init__(
        self, parts: Parts, sharing: Sharing, comments: Comments, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        """``deadline_s``: after so long one is overdue. ``clock``: seconds that only go forward."""
        self._parts = parts
        self._sharing = sharing
        self._comments = comments
        self._deadline_s = deadline_s
        self._clock = clock
        self._since: dict[int, tuple[float, float]] = {}
        """Job -> the time since which it is wanted, and what the clock showed then."""
        self._lock = threading.Lock()
        self._turns = 0
        self._wanted: dict[int, tuple[int, ...]] = {}
        self._served = -1e9
        self._changed = True
        self.pressed: Callable[[], None] = lambda: None
        """Told that other jobs are to make room now."""

    def turn(self) -> int:
        """A number for one that comes now, above all before it."""
        with self._lock:
            self._turns += 1
            self._changed = True
            return self._turns

    def changed(self) -> None:
        """Something has happened on which the line may have waited."""
        self._changed = True

    def wanted(self, job_id: int) -> tuple[int, ...]:
        """Those for which a job is to make room."""
        with self._lock:
            return self._wanted.get(job_id, ())

    def serve(
        self,
        now: float,
        waiting: Sequence[InLine],
        coming: Sequence[Holder],
        *,
        asleep: frozenset[int],
        idle_s: Callable[[int], float | None],
        go: Callable[[InLine], None],
        late: Callable[[InLine, str], None],
    ) -> None:
        """Let go who may, say of the others why not. See ``Sharing.plan``; ``late`` is told of one that is overdue."""
        if not waiting:
            self._press({})
            return
        if not self._changed and 0 <= now - self._served < _AGAIN_S:
            return
        self._served, self._changed = now, False
        with self._lock:
            self._since = {job_id: since for job_id, since in self._since.items() if job_id in asleep}
        line = sorted(waiting, key=lambda one: (one.asked_epoch or 0.0, one.turn))
        try:
            found = self._sharing.plan(line, coming, asleep, idle_s)
        except GpuError as error:
            for one in line:
                one.waits = str(error)
            return
        for one in line:
            if one.job_id in found.go:
                one.waits = ""
                go(one)
            else:
                self._wait(one, found.waits[one.job_id], now, late)
        self._press(found.make_room)

    def _wait(self, one: InLine, why: str, now: float, late: Callable[[InLine, str], None]) -> None:
        if one.waits != why:
            self._parts.log.info("job %s: waits to %s: %s", one.job_id, one.verb, why)
            one.waits = why
        if self._waited(one, now) > _SAID_S:
            self._comments.set(one.job_id, words.waits(one.verb, why))
        self.look_at_deadline(one, why, now, late)

    def look_at_deadline(self, one: InLine, why: str, now: float, late: Callable[[InLine, str], None]) -> None:
        """Tell ``late``, once, of one that is wanted for longer than the site allows; ``why`` it has not got it."""
        waited = self._waited(one, now)
        if waited >= self._deadline_s and not one.overdue:
            one.overdue = True
            said = f"it has waited for {words.span(waited)} to {one.verb}: {why}"
            self._parts.log.error("job %s: %s", one.job_id, said)
            late(one, said)

    def _waited(self, one: InLine, now: float) -> float:
        """Seconds for which it is wanted. A clock that is set meanwhile makes nobody overdue, who may be ended then."""
        asked = one.asked_epoch or now
        with self._lock:
            known, since = self._since.get(one.job_id, (None, 0.0))
            if known != asked:
                since = self._clock() - max(0.0, now - asked)
                self._since[one.job_id] = asked, since
        return self._clock() - since

    def _press(self, make_room: Mapping[int, int]) -> None:
        wanted: dict[int, tuple[int, ...]] = {victim: (waiter,) for victim, waiter in make_room.items()}
        with self._lock:
            changed = wanted != self._wanted
            self._wanted = wanted
        if changed and wanted:
            self.pressed()
