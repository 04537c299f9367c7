"""Timers of a dump that CRIU would restore as timers that never expire.

The kernel rearms a periodic timerfd when the expiration is read (``timerfd_read_iter`` in ``fs/timerfd.c``). Until
then ``/proc/PID/fdinfo`` shows no time left, and CRIU 4.1 sets the timer to that (``criu/timerfd.c``): to 0, which
disarms it. A job is stopped for seconds before its dump, so most periodic timers have expired by then.

CRIU 4.1 does not set an interval timer that expires once (``decode_itimer`` in ``criu/cr-restore.c``): an alarm(2) is
lost. So it gets an interval of decades; that is what getitimer(2) shows after a restore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from slurm_affinode.checkpoint.criu_images import (
    BadImage,
    bodies,
    framed,
    integer,
    message,
    read_image,
    with_field,
)
from slurm_affinode.checkpoint.file_table import FILES

_MAGICS = 8  # bytes
_TIMERFD = 12  # field of file_entry in images/fdinfo.proto
_TICKS, _LEFT_S, _LEFT_NS, _INTERVAL_S, _INTERVAL_NS = 5, 7, 8, 9, 10  # fields of timerfd_entry in images/timerfd.proto
_TASK, _TIMERS = 3, 7  # fields of core_entry and task_core_entry in images/core.proto
_INTERVAL_TIMERS = (1, 2, 3)  # fields of task_timers_entry in images/timer.proto
_EVERY_S, _EVERY_US, _NEXT_S, _NEXT_US = 1, 2, 3, 4  # fields of itimer_entry there
_NEVER_S = 2**30
"""34 years."""


def rearm(directory_fd: int, pids: Iterable[int]) -> None:
    """Change a dump so that all timers are restored. Raises ``BadImage``, ``OSError``.

    ``pids``: PIDs in the job's namespace. The files are rewritten before digests are computed. Expirations that were
    not read are still counted, and the next one follows at once.
    """
    _rewrite(directory_fd, FILES, [_rearmed(body) for body in bodies(read_image(directory_fd, FILES))])
    for pid in pids:
        name = f"core-{pid}.img"
        _rewrite(directory_fd, name, [_with_alarms(body) for body in bodies(read_image(directory_fd, name))])


def _rewrite(directory_fd: int, name: str, entries: Iterable[bytes]) -> None:
    before = read_image(directory_fd, name)
    after = before[:_MAGICS] + b"".join(map(framed, entries))
    if after != before:
        fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        with os.fdopen(fd, "wb") as file:
            file.write(after)


def _rearmed(entry: bytes) -> bytes:
    timer = _part(entry, _TIMERFD)
    if timer is None:
        return entry
    fields = message(timer)
    left = integer(fields, _LEFT_S) or integer(fields, _LEFT_NS)
    interval = integer(fields, _INTERVAL_S) or integer(fields, _INTERVAL_NS)
    if left or not interval or not integer(fields, _TICKS):
        return entry  # it expires in the future, once, or was disarmed
    return with_field(entry, _TIMERFD, with_field(timer, _LEFT_NS, 1))


def _with_alarms(core: bytes) -> bytes:
    task = _part(core, _TASK)
    timers = None if task is None else _part(task, _TIMERS)
    if task is None or timers is None:
        return core  # a thread, or a zombie
    for kind in _INTERVAL_TIMERS:
        timer = _part(timers, kind)
        if timer is None:
            raise BadImage(f"interval timer {kind} is missing")
        fields = message(timer)
        every = integer(fields, _EVERY_S) or integer(fields, _EVERY_US)
        if not every and (integer(fields, _NEXT_S) or integer(fields, _NEXT_US)):
            timers = with_field(timers, kind, with_field(timer, _EVERY_S, _NEVER_S))
    return with_field(core, _TASK, with_field(task, _TIMERS, timers))


def _part(body: bytes, field: int) -> bytes | None:
    """Return the message in a field; ``None`` if it has none. Raises ``BadImage``."""
    found = message(body).get(field, [])
    if len(found) > 1 or not all(isinstance(one, bytes) for one in found):
        raise BadImage(f"field {field} is there twice, or is no message")
    return next((one for one in found if isinstance(one, bytes)), None)
