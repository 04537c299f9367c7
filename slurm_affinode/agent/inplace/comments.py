"""The Slurm comments of jobs that sleep and wake: a server may do both many times in a minute, and slurmctld is not to
hear of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_affinode.agent import words
from slurm_affinode.agent.parts import Parts
from slurm_affinode.errors import AffinodeError

_SETTLED_S = 1.0
"""A comment is set when it has been right for so long."""


class Workers(Protocol):
    """An executor."""

    def submit(self, call: Callable[..., None], /, *arguments: Any) -> Future[None]:
        """Do it beside."""
        ...

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """Take no more."""
        ...


@dataclass(slots=True)
class _Wish:
    text: str | None
    since: float
    said: str | None = None
    """What Slurm was told last; ``None``: nothing, or that there is nothing to say."""


class Comments:
    """What each job's comment is to be. Thread-safe; Slurm is asked in a thread of its own."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._wishes: dict[int, _Wish] = {}
        self._worker: Workers = ThreadPoolExecutor(1, "comment")

    @property
    def due(self) -> bool:
        """There is something to be told."""
        with self._lock:
            return any(one.text != one.said for one in self._wishes.values())

    def set(self, job_id: int, text: str) -> None:
        """This is to be a job's comment, before what its owner has put there."""
        self._wish(job_id, text)

    def clear(self, job_id: int) -> None:
        """There is nothing more to say of a job."""
        self._wish(job_id, None)

    def forget(self, job_id: int) -> None:
        """The job has ended: its comment stays."""
        with self._lock:
            self._wishes.pop(job_id, None)

    def _wish(self, job_id: int, text: str | None) -> None:
        with self._lock:
            wish = self._wishes.get(job_id)
            if wish is None:
                # What an earlier agent has told Slurm is not known: also "nothing" has to be told once.
                self._wishes[job_id] = _Wish(text, self._parts.now(), said="" if text is None else None)
            elif wish.text != text:
                wish.text, wish.since = text, self._parts.now()

    def tick(self, now: float) -> None:
        """Tell Slurm what has settled."""
        with self._lock:
            ready = [
                (job_id, one.text)
                for job_id, one in self._wishes.items()
                if one.text != one.said and not 0 <= now - one.since < _SETTLED_S
            ]
            for job_id, text in ready:
                self._wishes[job_id].said = text
                if text is None:
                    del self._wishes[job_id]
        for job_id, text in ready:
            self._worker.submit(self._tell, job_id, text)

    def _tell(self, job_id: int, text: str | None) -> None:
        slurm = self._parts.slurm
        try:
            job = slurm.job(job_id)
            if job.ended:  # Slurm changes it no more
                return
            before = job.comment
            after = words.theirs(before) if text is None else words.comment(text, before)
            if after != (before or ""):
                slurm.set_comment(job_id, after)
        except AffinodeError as error:
            self._parts.log.info("job %s: its comment is not set: %s", job_id, error)
