"""States of the processes in a dump: those that the agent has stopped for it run after a restore.

A job is stopped before it is dumped, and CRIU restores a process as it finds it. The state is in ``core-PID.img``:
``task_core_entry.task_state`` of ``images/core.proto`` in CRIU 4.1.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from slurm_affinode.checkpoint.criu_images import BadImage, bodies, encoded, framed, integer, message, read_image, spans

_MAGICS = 8  # bytes
_TASK, _STATE = 3, 1
_ALIVE, _STOPPED = 1, 3  # criu/include/pstree.h


def resume(directory_fd: int, pids: Iterable[int], *, but: Collection[int]) -> None:
    """Mark the stopped processes of a dump as running, except ``but``. Raises ``BadImage``, ``OSError``.

    ``pids``, ``but``: PIDs in the job's namespace. The files are rewritten before digests are computed.
    """
    for pid in pids:
        if pid not in but:
            _resume(directory_fd, f"core-{pid}.img")


def _resume(directory_fd: int, name: str) -> None:
    data = read_image(directory_fd, name)
    body, *others = bodies(data)
    task = message(body).get(_TASK, [])
    if others or len(task) != 1 or not isinstance(task[0], bytes):
        raise BadImage(f"{name}: a process is described twice, or not at all")
    if integer(message(task[0]), _STATE) != _STOPPED:
        return
    running = _with(body, _TASK, _with(task[0], _STATE, _ALIVE))
    fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    with os.fdopen(fd, "wb") as file:
        file.write(data[:_MAGICS] + framed(running))


def _with(body: bytes, field: int, value: int | bytes) -> bytes:
    return b"".join(encoded(number, value) if number == field else body[a:b] for number, _, a, b in spans(body))
