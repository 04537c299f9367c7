"""Requests to wake jobs that are still being suspended: from signals of Slurm, users and prologs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from slurm_affinode.model.suspension import Mode, Phase
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.inplace.sleeper import Sleeper
from slurm_affinode.suspension.job.process_tree import Processes
from slurm_affinode.suspension.job.registry import Registry, WatchedJob

_MAX_REQUESTS = 4096
_FALLING = frozenset({Phase.LOCKING, Phase.LOCKED, Phase.PARKED, Phase.FROZEN})

_STOPS = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_HANDLED_S = 5.0
"""A signal received up to this long before a suspension began may still be being handled."""


@dataclass(frozen=True, slots=True)
class WakeRequest:
    """A request to wake a job."""

    why: str
    thawed: bool = False
    """Its processes are thawed at once, whether there is room on the GPU or not."""
    lasting: bool = False
    """The next agent could not detect the request by itself."""


def from_slurm(number: int) -> WakeRequest | None:
    """Return the request that a signal from Slurm implies.

    ``None`` for a signal that stops the job, as ``scontrol suspend`` sends: a sleeping job is stopped already.
    """
    if number in _STOPS:
        return None
    return WakeRequest(f"{messages.signal_name(number)} from Slurm", thawed=True)


class WakeRequests:
    """Wake requests during a suspension: by job for signals of Slurm and users, by GPU for prologs.

    Not thread-safe: ``InPlaceScheduler`` locks it.
    """

    def __init__(self, processes: Processes, registry: Registry, now: Callable[[], float]) -> None:
        self._processes = processes
        self._registry = registry
        self._now = now
        self._of_jobs: dict[int, tuple[float, WakeRequest]] = {}
        self._prologs: list[tuple[Set[str], str]] = []

    def wake(self, job_id: int, who: str) -> bool:
        """Record a user's request to wake a job; ``False``: it is not being suspended."""
        falls = self._falls(self._registry.get(job_id))
        if falls:
            self.keep(job_id, WakeRequest(f"requested by {who}", lasting=True))
        return falls

    def keep(self, job_id: int, request: WakeRequest) -> None:
        """Record a request, also for a job that runs: it may be stopped before it receives a signal."""
        if len(self._of_jobs) >= _MAX_REQUESTS:
            self._of_jobs.clear()
        self._of_jobs[job_id] = self._now(), request

    def _falls(self, job: WatchedJob | None) -> bool:
        return (
            job is not None
            and job.option.mode is Mode.INPLACE
            and job.phase in _FALLING
            and self._processes.alive(job.init_pid, job.init_started)
        )

    def falling_on(self, uuids: Set[str]) -> set[int]:
        """Return the jobs that are being suspended on these GPUs."""
        falling = (job for job in self._registry.jobs() if self._falls(job))
        return {job.job_id for job in falling if uuids & {device.uuid for device in job.devices or ()}}

    @contextmanager
    def prolog(self, uuids: Set[str], why: str) -> Iterator[None]:
        """Let no job fall asleep on these GPUs while the context lasts."""
        self._prologs.append((uuids, why))
        try:
            yield
        finally:
            self._prologs.remove((uuids, why))

    def of(self, sleeper: Sleeper) -> WakeRequest | None:
        """Return the request for a job since its suspension began, and remove it."""
        requested_at, request = self._of_jobs.pop(sleeper.job_id, (0.0, None))
        began = sleeper.journal.record.began_epoch
        if request is not None and requested_at >= began - (_HANDLED_S if request.thawed else 0):
            return request
        return next((WakeRequest(why) for uuids, why in self._prologs if uuids & sleeper.needed_bytes.keys()), None)
