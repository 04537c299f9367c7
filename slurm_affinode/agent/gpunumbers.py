"""Slurm's numbers of the GPUs of each job on this node, as prologs have told: for the next agent as well.

Of a job that has not started, or sleeps, and of one with shards, nobody else tells them. Kept in the run directory:
after a boot there are no such jobs.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import UserDict
from contextlib import suppress
from pathlib import Path

from slurm_affinode import jsonvalues
from slurm_affinode.files import write_text

_LOG = logging.getLogger("slurm_affinode.agent")
_KEPT = 4096
"""Jobs; where no epilog tells that they have ended the oldest go."""


class GpuNumbers(UserDict[int, tuple[int, ...]]):
    """Job id -> numbers. May be changed by several threads."""

    def __init__(self, path: Path) -> None:
        """``path``: where they are kept."""
        super().__init__()
        self._path = path
        self._lock = threading.Lock()
        with suppress(OSError, ValueError):
            said = jsonvalues.table(jsonvalues.loads(path.read_bytes()))
            self.data = {
                int(job): tuple(jsonvalues.whole(one) for one in jsonvalues.typed(list, numbers))
                for job, numbers in said.items()
            }

    def __setitem__(self, job_id: int, numbers: tuple[int, ...]) -> None:
        """The prolog of a job has told."""
        with self._lock:
            self.data.pop(job_id, None)
            self.data[job_id] = numbers
            while len(self.data) > _KEPT:
                del self.data[next(iter(self.data))]
            self._save()

    def __delitem__(self, job_id: int) -> None:
        """The job has ended."""
        with self._lock:
            del self.data[job_id]
            self._save()

    def _save(self) -> None:
        try:
            write_text(self._path, json.dumps(self.data) + "\n", mode=0o600)
        except OSError as error:  # it is known as long as this agent lives
            _LOG.warning("%s: cannot be written: %s", self._path, error.strerror or error)
