"""Processes of a job's PID namespace, seen from outside through ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from slurm_affinode.base import kernel_text, pidfd
from slurm_affinode.base.pidfd import Process

PROC = pidfd.PROC


def namespace_of(pid: int, *, proc: Path = PROC) -> str | None:
    """Return the ID of a process's PID namespace (``pid:[4026532...]``), or ``None`` if the process is gone."""
    try:
        with Process(pid, proc=proc) as process:
            return process.link("ns/pid")
    except OSError:
        return None


def members(init_pid: int, *, proc: Path = PROC) -> dict[int, int]:
    """Return the processes of the namespace with ``init_pid`` as PID 1, without that one: PID there -> PID here."""
    wanted = namespace_of(init_pid, proc=proc)
    found: dict[int, int] = {}
    for process in pidfd.processes(proc=proc) if wanted is not None else ():
        with contextlib.suppress(OSError, LookupError, ValueError):
            if process.pid != init_pid and process.link("ns/pid") == wanted:
                found[_numbers(process, "NSpid")[-1]] = process.pid
    return found


def inner_pid(pid: int, *, proc: Path = PROC) -> int | None:
    """Return a process's PID in its own namespace, or ``None`` if it is gone."""
    return next(iter(_status(pid, "NSpid", proc)[-1:]), None)


def parent(pid: int, *, proc: Path = PROC) -> int | None:
    """Return a process's parent, or ``None`` if it is gone."""
    return next(iter(_status(pid, "PPid", proc)), None)


def tree(root_pid: int, *, proc: Path = PROC) -> list[int]:
    """Return the root and all its descendants, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in pidfd.pids(proc):
        above = parent(pid, proc=proc)
        if above is not None:
            children.setdefault(above, []).append(pid)
    found, at = [root_pid], 0
    while at < len(found):
        found += sorted(children.get(found[at], []))
        at += 1
    return found


def is_below(pid: int, above: Collection[int], *, proc: Path = PROC) -> bool:
    """Return whether one of ``above`` is now an ancestor of a process; ``False`` if the process is gone."""
    at = pid
    while at > 1:
        found = parent(at, proc=proc)
        if found is None and at == pid:
            return False
        # If an ancestor has ended meanwhile, its children have a new parent: start again.
        at = pid if found is None else found
        if at in above:
            return True
    return False


def _status(pid: int, key: str, proc: Path) -> list[int]:
    try:
        with Process(pid, proc=proc) as process:
            return _numbers(process, key)
    except OSError:
        return []


def _numbers(process: Process, key: str) -> list[int]:
    return list(kernel_text.numbers(process.status().get(key, "")))
