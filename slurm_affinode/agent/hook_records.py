"""Records that the prolog and the epilog leave for the agent.

The prolog records Slurm's GPU numbers for each job on the node. No other source has them for a job that has not
started, is suspended, or uses shards. The epilog reports what jobs left on their GPUs; a report stays on disk until it
is in the audit: one file of JSON lines, oldest first, replaced as a whole, at most ``MOST`` reports. All of it is in
the run directory, because after a boot there are no such jobs.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import UserDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurm_affinode.base import json_values
from slurm_affinode.base.files import write_text

_LOG = logging.getLogger("slurm_affinode.agent")
_MAX_JOBS = 4096
"""Maximum number of jobs; if epilogs do not report their end, the oldest are dropped."""


class GpuNumbers(UserDict[int, tuple[int, ...]]):
    """Slurm's GPU numbers by job ID. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """``path``: the file that keeps them."""
        super().__init__()
        self._path = path
        self._lock = threading.Lock()
        """Guards the numbers and their file."""
        with suppress(OSError, ValueError):
            recorded = json_values.table(json_values.loads(path.read_bytes()))
            self.data = {
                int(job): tuple(json_values.whole(number) for number in json_values.typed(list, numbers))
                for job, numbers in recorded.items()
            }

    def __setitem__(self, job_id: int, numbers: tuple[int, ...]) -> None:
        """Record the GPU numbers that the prolog of a job reported."""
        with self._lock:
            self.data.pop(job_id, None)
            self.data[job_id] = numbers
            while len(self.data) > _MAX_JOBS:
                del self.data[next(iter(self.data))]
            self._save()

    def snapshot(self) -> dict[int, tuple[int, ...]]:
        """Return a copy of all numbers."""
        with self._lock:
            return dict(self.data)

    def __delitem__(self, job_id: int) -> None:
        """Remove a job that has ended."""
        with self._lock:
            del self.data[job_id]
            self._save()

    def _save(self) -> None:
        try:
            write_text(self._path, json.dumps(self.data) + "\n", mode=0o600)
        except OSError as error:  # they are still known until this agent ends
            _LOG.warning("%s: cannot be written: %s", self._path, error.strerror or error)


log = logging.getLogger(__name__)

MOST = 1000


class LeftoverReports:
    """Reports of leftover processes on a node. Thread-safe."""

    def __init__(self, path: Path | None = None, most: int = MOST) -> None:
        """``path``: ``None`` keeps reports in memory only. Reports left there by the previous agent are read."""
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        """Guards the reports and their file."""
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None:
            self._rows = {row["id"]: row for row in _read(path)}

    def all(self) -> list[dict[str, Any]]:
        """Return the reports not yet in the audit, oldest first."""
        with self._lock:
            return list(self._rows.values())

    def add(self, report: Mapping[str, Any]) -> None:
        """Keep a report, on disk if possible. A failed write does not keep the job from ending."""
        with self._lock:
            self._rows[str(report["id"])] = dict(report)
            while len(self._rows) > self._most:
                lost = self._rows.pop(next(iter(self._rows)))
                log.warning("the report of leftovers of job %s is dropped: %d others wait", lost["job"], self._most)
            self._write()

    def drop(self, ids: Iterable[str]) -> int:
        """Drop reports that are in the audit; return how many there were."""
        with self._lock:
            removed = [job_id for job_id in ids if self._rows.pop(job_id, None) is not None]
            if removed:
                self._write()
            return len(removed)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in self._rows.values()), mode=0o600)
        except OSError as error:
            log.warning("%s: cannot be written: %s; reports of leftovers are lost when the agent ends",
                      self._path, error.strerror or error)  # fmt: skip


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s: cannot be read: %s", path, error.strerror or error)
        return []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json_values.table(json_values.loads(line))
            rows.append({**row, "id": str(row["id"]), "job": json_values.whole(row["job"])})
        except (ValueError, KeyError):
            log.warning("%s:%d: not a report; ignored", path, number)
    return rows
