"""Jobs in place that hold GPU memory and whose shepherds have not said hello: they have not found a new agent yet.

A shepherd comes back within ten seconds. Until then what its job holds must count for what may be awake at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from slurm_affinode.agent.peers import Identity, Inspector, NotAShepherd, Peer
from slurm_affinode.model.suspension import Mode, SuspendOption
from slurm_affinode.pinned import PROC, Process, ancestors, processes

_OPTION, _END = 7, 8
"""Places in a shepherd's arguments (``spank/shepherd_options.c``): option, ``--``."""


def unheard(
    pids: Iterable[int], proc: Path = PROC, identify: Callable[[Peer], Identity] | None = None
) -> Mapping[int, tuple[int, ...]]:
    """Raw job id -> those of ``pids`` that belong to a job with ``mode=inplace``, by its shepherd's arguments.

    ``identify``: as ``Inspector``'s.
    """
    identify = identify or Inspector(proc).identify
    found: dict[int, tuple[int, ...]] = {}
    ours = str((proc / "self" / "ns" / "pid").readlink())
    for process in processes(pids, proc=proc):
        with suppress(OSError):
            if process.link("ns/pid") == ours:
                continue  # no shepherd is above it
            job = _job_above(process, proc, identify)
            if job is not None:
                found[job] = (*found.get(job, ()), process.pid)
    return found


def _job_above(process: Process, proc: Path, identify: Callable[[Peer], Identity]) -> int | None:
    """The shepherd is PID 1 of its namespace, and above all processes of its job, those of containers included.

    Anybody can give a program such arguments, but no user can make a namespace in which it would pass for a shepherd.
    """
    for one in chain((process,), ancestors(process, proc=proc)):
        with suppress(OSError, LookupError):
            status = one.status()
            if status["NSpid"].split()[-1] == "1" and _in_place(one):
                with suppress(NotAShepherd):
                    job = identify(Peer(one.pid, int(status["Uid"].split()[1]), 0)).job_id
                    one.stat()  # it is there: its number was its own all the while
                    return job
    return None


def _in_place(process: Process) -> bool:
    """Whether its arguments are those of a shepherd of a job in place."""
    try:
        words = process.text("cmdline").split("\0")
        return words[_END : _END + 1] == ["--"] and SuspendOption.parse(words[_OPTION]).mode is Mode.INPLACE
    except (OSError, ValueError):
        return False
