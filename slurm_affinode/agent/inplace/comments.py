"""The Slurm comments of jobs that sleep and wake: a server may do both many times in a minute, and slurmctld is not to
hear of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_affinode.agent import words
from slurm_affinode.agent.parts import Parts
from slurm_affinode.errors import AffinodeError, UnreachableError

_SETTLED_S = 1.0
"""A comment is set when it has been right for so long."""
_AGAIN_S = 15.0
"""Slurm, which did not answer, is told again after so long."""


class Workers(Protocol):
    """What is used of a ``concurrent.futures`` executor."""

    def submit(self, call: Callable[..., None], /, *arguments: Any) -> Future[None]:
        """Call it in another thread; its result is in the future."""
        ...

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """Take no more calls; ``wait`` for those that run, drop those that do not yet (``cancel_futures``)."""
        ...


@dataclass(slots=True)
class _Wish:
    text: str | None
    since: float
    said: str | None = None
    """What Slurm was told last; ``None``: nothing, or that there is nothing to say."""
    pause_s: float = _SETTLED_S
    """Until it is told."""


class Comments:
    """What each job's comment is to be. Thread-safe; Slurm is asked in a thread of its own."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._wishes: dict[int, _Wish] = {}
        self.worker: Workers = ThreadPoolExecutor(1, "comment")
        """Who asks Slurm; shut down when the agent ends, which would wait for all that is not said else."""

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
                self._wishes[job_id] = _Wish(text, self._parts.now(), said=_untold(text))
            elif wish.text != text:
                wish.text, wish.since, wish.pause_s = text, self._parts.now(), _SETTLED_S

    def tick(self, now: float) -> None:
        """Tell Slurm what has settled."""
        with self._lock:
            ready = [
                (job_id, one.text)
                for job_id, one in self._wishes.items()
                if one.text != one.said and not 0 <= now - one.since < one.pause_s
            ]
            for job_id, text in ready:
                self._wishes[job_id].said = text
        for job_id, text in ready:
            self._submit(self._tell, job_id, text)

    def _submit(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the agent is being stopped: the next one looks at what was said
            self.worker.submit(call, *arguments)

    def _tell(self, job_id: int, text: str | None) -> None:
        slurm = self._parts.slurm
        try:
            job = slurm.job(job_id)
            before = job.comment
            after = words.theirs(before) if text is None else words.comment(text, before)
            if after != (before or "") and not job.ended:  # else Slurm changes it no more
                slurm.set_comment(job_id, after)
        except UnreachableError as error:
            self._parts.log.info("job %s: its comment is not set yet: %s", job_id, error)
            self._later(job_id, text)
            return
        except AffinodeError as error:
            self._parts.log.info("job %s: its comment is not set: %s", job_id, error)
        self._told(job_id, text)

    def check(self, job_id: int) -> None:
        """The job runs: an agent that ended too early may have left a comment that it does not."""
        self._submit(self._check, job_id)

    def _check(self, job_id: int) -> None:
        try:
            if words.sleeps_in_place(self._parts.slurm.job(job_id).comment):
                self.clear(job_id)
        except AffinodeError as error:
            self._parts.log.info("job %s: its comment is not known: %s", job_id, error)

    def _later(self, job_id: int, text: str | None) -> None:
        with self._lock:
            wish = self._wishes.get(job_id)
            if wish is not None and wish.text == text == wish.said:
                wish.said, wish.since, wish.pause_s = _untold(text), self._parts.now(), _AGAIN_S

    def _told(self, job_id: int, text: str | None) -> None:
        with self._lock:
            wish = self._wishes.get(job_id)
            if text is None and wish is not None and wish.text is None and wish.said is None:
                del self._wishes[job_id]


def _untold(text: str | None) -> str | None:
    """What is not what Slurm is to be told."""
    return "" if text is None else None
