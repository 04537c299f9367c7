"""Jobs with ``mode=inplace`` that are about to start on a GPU whose memory others hold: they wait for room, in line.

What a job will allocate nobody knows; the site says how much of a GPU's memory has to be free for one to start
(``inplace.start_free_pct``). A job that was let in is given time to take its memory before the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.agent.inplace.freezer import Freezer
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.shepherds import Start, Wait
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.core.inplace import Card

_KEEP_WAITING_S = 10.0
"""How often a shepherd that waits is told so."""
_SETTLE_S = 30.0
"""So long the room of a job that was let in is kept for it."""


@dataclass(slots=True)
class Starter:
    """One job that has not started, or has just."""

    job_id: int
    turn: int
    asked_epoch: float | None
    held: Mapping[str, int] = field(default_factory=dict)
    """UUID -> bytes that have to be free."""
    cuda: tuple[int, ...] = ()
    """Its processes, once it was let in."""
    known: bool = False
    """It was found out which GPUs it has."""
    let_in: float | None = None
    waits: str = ""
    overdue: bool = False
    told: float = 0.0

    @property
    def verb(self) -> str:
        """See ``line.InLine``."""
        return "start"

    def view(self) -> dict[str, Any]:
        """What ``status`` shows of it."""
        return {"starting": True, "asked": self.asked_epoch, "waits": self.waits or None}


class Starters:
    """Those that wait to start. Not locked: ``Director`` does that."""

    def __init__(self, parts: Parts, freezer: Freezer, free_pct: float) -> None:
        """``free_pct``: of each of a job's GPUs; 0: every job starts at once."""
        self._parts = parts
        self._freezer = freezer
        self._share = free_pct / 100
        self._began = parts.now()
        self._all: dict[int, Starter] = {}

    def __len__(self) -> int:
        """How many there are, those that were just let in included."""
        return len(self._all)

    def admit(self, job: WatchedJob, turn: Callable[[], int]) -> bool:
        """Whether a job may start at once; else it is in line, also when its shepherd has come again."""
        if not self._share or not job.link.send(Wait(fresh=True)):
            return True
        starter = self._all.get(job.job_id)
        if starter is None or starter.let_in is not None:
            now = self._parts.now()
            began = self._parts.processes.began(job.init_started, now)
            # A shepherd that is older than this agent has asked the one before it, when it began.
            asked = began if began < self._began else now
            self._all[job.job_id] = Starter(job.job_id, turn(), asked, told=now)
        return False

    def ids(self) -> frozenset[int]:
        """Jobs whose shepherds asked to start: those that wait and those that were let in."""
        return frozenset(self._all)

    def get(self, job_id: int) -> Starter | None:
        """The job, while it waits; ``None``: it does not ask, or was let in."""
        found = self._all.get(job_id)
        return None if found is None or found.let_in is not None else found

    def waiting(
        self, cards: Callable[[], Sequence[Card]], gpus_of: Callable[[int], Sequence[str] | None]
    ) -> list[Starter]:
        """Those that wait, with what they need. Raises ``GpuError``."""
        found = [one for one in self._all.values() if one.let_in is None]
        for one in found:
            if not one.known:
                uuids = gpus_of(one.job_id) or ()
                one.held = {card.uuid: round(card.total * self._share) for card in cards() if card.uuid in uuids}
                one.known = True
        return found

    def coming(self) -> list[Starter]:
        """Those that were let in and may be taking their memory still."""
        return [one for one in self._all.values() if one.let_in is not None]

    def forget(self, job_id: int) -> None:
        """The job has taken what it takes: no room is kept for it any more."""
        self._all.pop(job_id, None)

    def go(self, one: Starter) -> bool:
        """Let it start; whether its shepherd heard."""
        job = self._parts.registry.get(one.job_id)
        one.let_in = self._parts.now()
        return job is not None and job.link.send(Start())

    def tend(self, now: float, idle_s: Callable[[int], float | None]) -> None:
        """Keep shepherds waiting; forget who is gone, has had its time, or is idle by policy (``idle_s``) already."""
        for one in list(self._all.values()):
            job = self._parts.registry.get(one.job_id)
            taken = one.let_in is not None and not 0 <= now - one.let_in <= _SETTLE_S
            over = taken or (one.let_in is not None and idle_s(one.job_id) is not None)
            if job is None or over:
                del self._all[one.job_id]
            elif one.let_in is not None:
                one.cuda = self._pids(job)
            elif not 0 <= now - one.told <= _KEEP_WAITING_S:
                one.told = now
                job.link.send(Wait(fresh=True))

    def _pids(self, job: WatchedJob) -> tuple[int, ...]:
        try:
            return tuple(member.pid for member in self._freezer.members(job.init_pid, job.init_started))
        except TreeGoneError:
            return ()
