"""What jobs left on their GPUs, as the epilog reported it: on disk until somebody has taken it into the audit.

One file of JSON lines, the oldest first, replaced as a whole; never more than ``MOST`` reports.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurm_affinode import jsonvalues
from slurm_affinode.files import write_text

log = logging.getLogger(__name__)

MOST = 1000


class LeftoverReports:
    """The reports of a node. Called by several threads."""

    def __init__(self, path: Path | None = None, most: int = MOST) -> None:
        """``path`` ``None``: in memory alone. What the last agent left there is read."""
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None:
            self._rows = {row["id"]: row for row in _read(path)}

    def all(self) -> list[dict[str, Any]]:
        """Those that nobody has taken, the oldest first."""
        with self._lock:
            return list(self._rows.values())

    def add(self, report: Mapping[str, Any]) -> None:
        """Keep a report, durably where that is possible. That it is not does not keep a job from ending."""
        with self._lock:
            self._rows[str(report["id"])] = dict(report)
            while len(self._rows) > self._most:
                lost = self._rows.pop(next(iter(self._rows)))
                log.warning("the report about what job %s left is given up: %d others wait", lost["job"], self._most)
            self._write()

    def taken(self, ids: Iterable[str]) -> int:
        """Somebody has these in the audit; how many there were."""
        with self._lock:
            gone = [one for one in ids if self._rows.pop(one, None) is not None]
            if gone:
                self._write()
            return len(gone)

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
            row = jsonvalues.table(jsonvalues.loads(line))
            rows.append({**row, "id": str(row["id"]), "job": jsonvalues.whole(row["job"])})
        except (ValueError, KeyError):
            log.warning("%s:%d: is no report: left out", path, number)
    return rows
