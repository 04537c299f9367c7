"""Processes of a job's PID namespace, seen from outside through ``/proc``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

PROC = Path("/proc")
_END_S = 10.0


def namespace_of(pid: int, *, proc: Path = PROC) -> str | None:
    """Identity of a process's PID namespace (``pid:[4026532...]``); ``None`` where the process is gone."""
    try:
        return str((proc / str(pid) / "ns" / "pid").readlink())
    except OSError:
        return None


def members(init_pid: int, *, proc: Path = PROC) -> dict[int, int]:
    """Processes of the namespace of which ``init_pid`` is PID 1, itself left out: PID there -> PID here."""
    wanted = namespace_of(init_pid, proc=proc)
    found: dict[int, int] = {}
    if wanted is None:
        return found
    for pid in _pids(proc):
        if pid != init_pid and namespace_of(pid, proc=proc) == wanted:
            inner = inner_pid(pid, proc=proc)
            if inner is not None:
                found[inner] = pid
    return found


def inner_pid(pid: int, *, proc: Path = PROC) -> int | None:
    """A process's PID in its own namespace; ``None`` where it is gone."""
    return next(iter(_status(pid, "NSpid:", proc)[-1:]), None)


def parent(pid: int, *, proc: Path = PROC) -> int | None:
    """A process's parent; ``None`` where it is gone."""
    return next(iter(_status(pid, "PPid:", proc)), None)


def tree(root_pid: int, *, proc: Path = PROC) -> list[int]:
    """The root and all below it, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in _pids(proc):
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


def kill_all(init_pid: int) -> bool:
    """End every process of the namespace but its PID 1, which reaps them; whether all are gone."""
    deadline = time.monotonic() + _END_S
    while left := members(init_pid):
        for _, pid in sorted(left.items()):  # those of a tree before CRIU, which may hold them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _pids(proc: Path) -> Iterator[int]:
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield int(entry.name)


def _status(pid: int, key: str, proc: Path) -> list[int]:
    try:
        # The process chooses its name, which comes first: the kernel escapes a newline in it, and no other line end.
        lines = (proc / str(pid) / "status").read_bytes().split(b"\n")
    except OSError:
        return []
    for line in lines:
        if line.startswith(key.encode()):
            return [int(word) for word in line.split()[1:] if word.isdigit()]
    return []
