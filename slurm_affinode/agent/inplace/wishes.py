"""What was asked of jobs that are on their way to sleep: it holds when they have got there. Thread-safe."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from slurm_affinode.agent import words
from slurm_affinode.agent.inplace.sleeper import Sleeper
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.model.suspension import Mode, Phase

_KEPT = 4096
_FALLING = frozenset({Phase.LOCKING, Phase.LOCKED, Phase.PARKED, Phase.FROZEN})

_STOPS = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_HANDLED_S = 5.0
"""A signal that came so long before a suspension began may be being handled still."""


@dataclass(frozen=True, slots=True)
class Wish:
    """That a job wakes."""

    why: str
    let_go: bool = False
    """Its processes go on at once, whether there is room on the GPU or not."""
    lasting: bool = False
    """Nothing that the next agent could see asks for it."""


def from_slurm(number: int) -> Wish | None:
    """What a signal of Slurm asks for.

    Nothing where it is to stop the job, as ``scontrol suspend`` does: one that sleeps stands still already.
    """
    if number in _STOPS:
        return None
    return Wish(f"{words.signal_name(number)} from Slurm", let_go=True)


class Wishes:
    """Signals of Slurm, and people who ask, by job; prologs, by GPU."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._of_jobs: dict[int, tuple[float, Wish]] = {}
        self._prologs: list[tuple[Set[str], str]] = []

    def wake(self, job_id: int, who: str) -> bool:
        """Somebody asks that a job wakes; ``False``: it is not on its way to sleep."""
        falls = self._falls(self._parts.registry.get(job_id))
        if falls:
            self.keep(job_id, Wish(f"asked by {who}", lasting=True))
        return falls

    def keep(self, job_id: int, wish: Wish) -> None:
        """Of one that runs as well: it may be stopped before it could take a signal."""
        with self._lock:
            if len(self._of_jobs) >= _KEPT:
                self._of_jobs.clear()
            self._of_jobs[job_id] = self._parts.now(), wish

    def _falls(self, job: WatchedJob | None) -> bool:
        return (
            job is not None
            and job.option.mode is Mode.INPLACE
            and job.phase in _FALLING
            and self._parts.processes.alive(job.init_pid, job.init_started)
        )

    def falling_on(self, uuids: Set[str]) -> set[int]:
        """Jobs that are on their way to sleep on these GPUs."""
        falling = (job for job in self._parts.registry.jobs() if self._falls(job))
        return {job.job_id for job in falling if uuids & {device.uuid for device in job.devices or ()}}

    @contextmanager
    def prolog(self, uuids: Set[str], why: str) -> Iterator[None]:
        """While this lasts nothing falls asleep on these GPUs."""
        with self._lock:
            self._prologs.append((uuids, why))
        try:
            yield
        finally:
            with self._lock:
                self._prologs.remove((uuids, why))

    def of(self, sleeper: Sleeper) -> Wish | None:
        """What was asked of a job since its suspension began. Asked once."""
        with self._lock:
            at, wish = self._of_jobs.pop(sleeper.job_id, (0.0, None))
            began = float(sleeper.record.facts["began"])
            if wish is not None and at >= began - (_HANDLED_S if wish.let_go else 0):
                return wish
            return next((Wish(why) for uuids, why in self._prologs if uuids & sleeper.held.keys()), None)
