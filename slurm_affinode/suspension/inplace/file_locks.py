"""Locks on files that a job holds, and processes of others that wait for them.

A frozen job keeps its locks. The kernel lists those that wait for a lock, as far as they run on this node: of a lock on
a shared file system, only the file server knows the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from slurm_affinode.base import kernel_text
from slurm_affinode.base.pidfd import PROC, processes

Lock = tuple[str, ...]
"""A lock in the words of ``/proc/locks``, without its number: kind, type, mode, PID, file, first and last byte.

The PID is that of the process that took it, which may have ended: its descriptor was inherited.
"""
_WAITS = "->"
_PID = 3
"""Position of the PID in a lock."""


class FileLocks(Protocol):
    """The file locks of a node."""

    def locks_of(self, pids: Iterable[int]) -> frozenset[Lock]:
        """Return the locks that belong to open files of these processes; a process that has ended has none."""
        ...

    def awaited(self, locks: Mapping[int, frozenset[Lock]], pids: Mapping[int, Collection[int]]) -> Mapping[int, int]:
        """Return, for each job (raw ID) with ``locks`` that a process outside of the job waits for, one such process.

        ``pids``: job -> its own processes.
        """
        ...


class NodeFileLocks:
    """The locks that the kernel lists. Thread-safe."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc

    def locks_of(self, pids: Iterable[int]) -> frozenset[Lock]:
        """See ``FileLocks``."""
        locks: set[Lock] = set()
        for process in processes(pids, proc=self._proc):
            with contextlib.suppress(OSError):
                for name in process.names("fdinfo"):
                    with contextlib.suppress(OSError):
                        rows = process.text_lines(f"fdinfo/{name}")
                        locks.update(tuple(row.split()[2:]) for row in rows if row.startswith("lock:"))
        return frozenset(locks)

    def awaited(self, locks: Mapping[int, frozenset[Lock]], pids: Mapping[int, Collection[int]]) -> Mapping[int, int]:
        """See ``FileLocks``. Empty if the list cannot be read."""
        if not any(locks.values()):
            return {}
        try:
            rows = kernel_text.lines(self._proc / "locks")
        except OSError:
            return {}
        waiters: dict[int, int] = {}
        owners: list[int] = []
        for row in rows:
            words = row.split()[1:]
            if words[:1] != [_WAITS]:
                owners = [job_id for job_id, held_locks in locks.items() if tuple(words) in held_locks]
                continue
            waiter = kernel_text.number(words[_PID + 1]) if len(words) > _PID + 1 else None
            for job_id in owners:
                if waiter is not None and waiter > 0 and waiter not in pids.get(job_id, ()):
                    waiters.setdefault(job_id, waiter)
        return waiters


def reason(pid: int) -> str:
    """Return why a job must not sleep while this process waits for one of its locks."""
    return f"process {pid} waits for its lock on a file"
