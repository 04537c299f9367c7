"""Jobs in place that hold GPU memory and whose shepherds have not said hello: they have not found a new agent yet.

A shepherd comes back within ten seconds. Until then what its job holds must count for what may be awake at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurm_affinode.agent.tree import LinuxProcesses
from slurm_affinode.model.suspension import Mode, SuspendOption

_JOB, _OPTION, _END = 2, 7, 8
"""Places in a shepherd's arguments (``spank/shepherd_options.c``): job, option, ``--``."""


def unheard(pids: Iterable[int], proc: Path = Path("/proc")) -> Mapping[int, tuple[int, ...]]:
    """Raw job id -> those of ``pids`` that belong to a job with ``mode=inplace``, by its shepherd's arguments."""
    found: dict[int, tuple[int, ...]] = {}
    ours = _space(proc, "self")
    for pid in pids:
        if (space := _space(proc, str(pid))) is None or space == ours:
            continue  # no shepherd is above it
        job = _job_above(pid, proc)
        if job is not None:
            found[job] = (*found.get(job, ()), pid)
    return found


def _space(proc: Path, pid: str) -> str | None:
    try:
        return os.readlink(proc / pid / "ns" / "pid")  # noqa: PTH115 - it is no path
    except OSError:
        return None


def _job_above(pid: int, proc: Path) -> int | None:
    """The shepherd is PID 1 of its namespace, and above all processes of its job, those of containers included."""
    read, seen = LinuxProcesses(proc).read, set[int]()
    while (member := read(pid)) is not None and pid not in seen:
        seen.add(pid)
        if member.pid_ns == 1 and (job := _job_of(pid, proc)) is not None:
            return job
        pid = member.parent
    return None


def _job_of(pid: int, proc: Path) -> int | None:
    """The job in place of a shepherd; ``None``: another mode, or no shepherd."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if words[_END : _END + 1] != ["--"]:
            return None
        return int(words[_JOB]) if SuspendOption.parse(words[_OPTION]).mode is Mode.INPLACE else None
    except (OSError, ValueError):
        return None
