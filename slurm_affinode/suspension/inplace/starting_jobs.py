"""Jobs with ``mode=inplace`` that wait in the queue to start, because other jobs hold the memory of their GPUs.

The memory that a job will allocate is unknown; the site sets how much of a GPU's memory has to be free for a start
(``inplace.start_free_pct``). A job that was admitted has time to allocate its memory before the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.core.inplace import GpuLoad
from slurm_affinode.suspension.inplace.freezer import Freezer
from slurm_affinode.suspension.inplace.queue import QueuePlace
from slurm_affinode.suspension.job.process_tree import Processes, TreeGoneError
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.job.shepherd import Start, Wait

_KEEP_WAITING_S = 10.0
"""Interval of ``Wait`` messages to a waiting shepherd."""
_SETTLE_S = 30.0
"""How long the room for an admitted job is reserved."""


@dataclass(slots=True)
class StartingJob:
    """A job that has not started, or has just started."""

    job_id: int
    place: QueuePlace
    needed_bytes: Mapping[str, int] = field(default_factory=dict)
    """UUID -> bytes that have to be free."""
    cuda: tuple[int, ...] = ()
    """Its processes, once it was admitted."""
    has_known_gpus: bool = False
    """Its GPUs were determined."""
    begun_epoch: float | None = None
    reported: float = 0.0

    @property
    def verb(self) -> str:
        """See ``queue.QueuedJob``."""
        return "start"

    def view(self) -> dict[str, Any]:
        """Return the data that ``status`` shows for it."""
        return {"starting": True, "asked": self.place.requested_epoch, "waits": self.place.waits or None}


class Starters:
    """The jobs that wait to start. Not thread-safe: ``InPlaceScheduler`` locks it."""

    def __init__(
        self, freezer: Freezer, processes: Processes, registry: Registry, free_pct: float, now: Callable[[], float]
    ) -> None:
        """``free_pct``: share of the memory of each of a job's GPUs; 0: every job starts at once."""
        self._freezer = freezer
        self._processes = processes
        self._registry = registry
        self._now = now
        self._share = free_pct / 100
        self._began = self._now()
        self._all: dict[int, StartingJob] = {}

    def __len__(self) -> int:
        """Return their number, including those that were just admitted."""
        return len(self._all)

    def admit(self, job: WatchedJob, turn: Callable[[], int]) -> bool:
        """Return whether a job may start at once; otherwise it is queued, also when its shepherd has reconnected."""
        if not self._share or not job.link.send(Wait(fresh=True)):
            return True
        starter = self._all.get(job.job_id)
        if starter is None or starter.begun_epoch is not None:
            now = self._now()
            began = self._processes.began(job.init_started, now)
            # A shepherd older than this agent sent its request to the previous agent, at its own start.
            requested = began if began < self._began else now
            self._all[job.job_id] = StartingJob(job.job_id, QueuePlace(requested, turn()), reported=now)
        return False

    def ids(self) -> frozenset[int]:
        """Return the jobs that wait to start or were just admitted."""
        return frozenset(self._all)

    def get(self, job_id: int) -> StartingJob | None:
        """Return the job while it waits; ``None``: it does not wait, or was admitted."""
        starter = self._all.get(job_id)
        return None if starter is None or starter.begun_epoch is not None else starter

    def waiting(
        self, cards: Callable[[], Sequence[GpuLoad]], gpus_of: Callable[[int], Sequence[str] | None]
    ) -> list[StartingJob]:
        """Return those that wait, with the memory that they need. Raises ``GpuError``."""
        starters = [starter for starter in self._all.values() if starter.begun_epoch is None]
        for starter in starters:
            if not starter.has_known_gpus:
                uuids = gpus_of(starter.job_id) or ()
                starter.needed_bytes = {
                    card.uuid: round(card.total * self._share) for card in cards() if card.uuid in uuids
                }
                starter.has_known_gpus = True
        return starters

    def allocating(self) -> list[StartingJob]:
        """Return the admitted jobs that may still be allocating memory."""
        return [starter for starter in self._all.values() if starter.begun_epoch is not None]

    def forget(self, job_id: int) -> None:
        """Stop reserving room for a job: it has allocated its memory."""
        self._all.pop(job_id, None)

    def start(self, starter: StartingJob) -> bool:
        """Start the job; return whether its shepherd received the message."""
        job = self._registry.get(starter.job_id)
        starter.begun_epoch = self._now()
        return job is not None and job.link.send(Start())

    def tend(self, now: float, idle_s: Callable[[int], float | None]) -> None:
        """Keep shepherds waiting; drop jobs that are gone, have had their time, or are idle by policy (``idle_s``)."""
        for starter in list(self._all.values()):
            job = self._registry.get(starter.job_id)
            settled = starter.begun_epoch is not None and not 0 <= now - starter.begun_epoch <= _SETTLE_S
            over = settled or (starter.begun_epoch is not None and idle_s(starter.job_id) is not None)
            if job is None or over:
                del self._all[starter.job_id]
            elif starter.begun_epoch is not None:
                starter.cuda = self._pids(job)
            elif not 0 <= now - starter.reported <= _KEEP_WAITING_S:
                starter.reported = now
                job.link.send(Wait(fresh=True))

    def _pids(self, job: WatchedJob) -> tuple[int, ...]:
        try:
            return tuple(member.pid for member in self._freezer.members(job.init_pid, job.init_started))
        except TreeGoneError:
            return ()
