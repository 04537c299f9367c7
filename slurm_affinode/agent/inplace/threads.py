"""Where the threads of a process wait.

The kernel counts the bytes that came on a TCP connection, but not those of a UNIX one: what was read there between the
last look and the freeze leaves no trace on the socket. Whoever has read it has gone on from where he waited, though.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurm_affinode.pinned import PROC, processes

Waits = Mapping[int, str]
"""Thread -> where it waits in the kernel: its stack pointer and program counter; empty: it runs."""
_OF_THE_DRIVER = b"cuda"
"""What the names of CUDA's own threads begin with: they move when GPU memory does."""


def waits(pids: Iterable[int], proc: Path = PROC) -> dict[int, str]:
    """The threads of these processes; those of which the kernel does not tell, and of CUDA's own, are left out.

    What is stopped is told of as what it was before.
    """
    found = {}
    for process in processes(pids, proc=proc):
        for thread in process.threads():
            with contextlib.suppress(OSError):
                if not process.read(f"task/{thread}/comm").startswith(_OF_THE_DRIVER):
                    found[thread] = _place(process.text(f"task/{thread}/syscall"))
    return found


def _place(line: str) -> str:
    """Of proc(5)'s ``syscall``. Without its number: a call that was interrupted goes on as another one."""
    words = line.split()
    return " ".join(words[-2:]) if len(words) > 1 else ""


def went_on(before: Waits, after: Waits) -> bool:
    """Whether a thread that waited is elsewhere now, or another one is there; what ran before is not known."""
    return any(thread not in before or "" != before[thread] != place for thread, place in after.items())
