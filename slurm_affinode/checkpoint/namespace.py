"""Processes of a job's PID namespace, seen from outside through ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from slurm_affinode import kerneltext, pinned
from slurm_affinode.pinned import Process

PROC = pinned.PROC


def namespace_of(pid: int, *, proc: Path = PROC) -> str | None:
    """Identity of a process's PID namespace (``pid:[4026532...]``); ``None`` where the process is gone."""
    try:
        with Process(pid, proc=proc) as process:
            return process.link("ns/pid")
    except OSError:
        return None


def members(init_pid: int, *, proc: Path = PROC) -> dict[int, int]:
    """Processes of the namespace of which ``init_pid`` is PID 1, itself left out: PID there -> PID here."""
    wanted = namespace_of(init_pid, proc=proc)
    found: dict[int, int] = {}
    for process in pinned.processes(proc=proc) if wanted is not None else ():
        with contextlib.suppress(OSError, LookupError, ValueError):
            if process.pid != init_pid and process.link("ns/pid") == wanted:
                found[_numbers(process, "NSpid")[-1]] = process.pid
    return found


def inner_pid(pid: int, *, proc: Path = PROC) -> int | None:
    """A process's PID in its own namespace; ``None`` where it is gone."""
    return next(iter(_status(pid, "NSpid", proc)[-1:]), None)


def parent(pid: int, *, proc: Path = PROC) -> int | None:
    """A process's parent; ``None`` where it is gone."""
    return next(iter(_status(pid, "PPid", proc)), None)


def tree(root_pid: int, *, proc: Path = PROC) -> list[int]:
    """The root and all below it, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in pinned.pids(proc):
        above = parent(pid, proc=proc)
        if above is not None:
            children.setdefault(above, []).append(pid)
    found, at = [root_pid], 0
    while at < len(found):
        found += sorted(children.get(found[at], []))
        at += 1
    return found


def is_below(pid: int, above: Collection[int], *, proc: Path = PROC) -> bool:
    """Whether one of ``above`` is among a process's ancestors now; ``False`` where the process is gone."""
    at = pid
    while at > 1:
        found = parent(at, proc=proc)
        if found is None and at == pid:
            return False
        # Where one in between has ended its children have another parent by now.
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
    return list(kerneltext.numbers(process.status().get(key, "")))
