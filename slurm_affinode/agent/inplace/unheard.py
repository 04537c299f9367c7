"""Jobs in place that hold GPU memory and whose shepherds have not said hello: they have not found a new agent yet.

A shepherd comes back within ten seconds. Until then what its job holds must count for what may be awake at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from slurm_affinode.agent.peers import Identity, Inspector, NotAShepherd, Peer
from slurm_affinode.agent.tree import LinuxProcesses
from slurm_affinode.model.suspension import Mode, SuspendOption

_OPTION, _END = 7, 8
"""Places in a shepherd's arguments (``spank/shepherd_options.c``): option, ``--``."""


def unheard(
    pids: Iterable[int], proc: Path = Path("/proc"), identify: Callable[[Peer], Identity] | None = None
) -> Mapping[int, tuple[int, ...]]:
    """Raw job id -> those of ``pids`` that belong to a job with ``mode=inplace``, by its shepherd's arguments.

    ``identify``: as ``Inspector``'s.
    """
    identify = identify or Inspector(proc).identify
    found: dict[int, tuple[int, ...]] = {}
    ours = _space(proc, "self")
    for pid in pids:
        if (space := _space(proc, str(pid))) is None or space == ours:
            continue  # no shepherd is above it
        job = _job_above(pid, proc, identify)
        if job is not None:
            found[job] = (*found.get(job, ()), pid)
    return found


def _space(proc: Path, pid: str) -> str | None:
    try:
        return os.readlink(proc / pid / "ns" / "pid")  # noqa: PTH115 - it is no path
    except OSError:
        return None


def _job_above(pid: int, proc: Path, identify: Callable[[Peer], Identity]) -> int | None:
    """The shepherd is PID 1 of its namespace, and above all processes of its job, those of containers included.

    Anybody can give a program such arguments, but no user can make a namespace in which it would pass for a shepherd.
    """
    read, seen = LinuxProcesses(proc).read, set[int]()
    while (member := read(pid)) is not None and pid not in seen:
        seen.add(pid)
        if member.pid_ns == 1 and _in_place(pid, proc):
            with suppress(NotAShepherd):
                return identify(Peer(pid, member.uid, 0)).job_id
        pid = member.parent
    return None


def _in_place(pid: int, proc: Path) -> bool:
    """Whether its arguments are those of a shepherd of a job in place."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[_END : _END + 1] == ["--"] and SuspendOption.parse(words[_OPTION]).mode is Mode.INPLACE
    except (OSError, ValueError):
        return False
