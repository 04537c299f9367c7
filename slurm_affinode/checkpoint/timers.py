"""Periodic timers of a dump that CRIU would restore as timers that never expire.

The kernel rearms a periodic timerfd when the expiration is read (``timerfd_read_iter`` in ``fs/timerfd.c``). Until
then ``/proc/PID/fdinfo`` shows no time left, and CRIU 4.1 sets the timer to that (``criu/timerfd.c``): to 0, which
disarms it. A job is stopped for seconds before its dump, so most periodic timers have expired by then.
"""

from __future__ import annotations

import os

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


def rearm(directory_fd: int) -> None:
    """Let the expired periodic timers of a dump expire at once when they are restored.

    Raises ``BadImage``, ``OSError``. The file is rewritten before digests are computed. Expirations that were not read
    are still counted.
    """
    before = read_image(directory_fd, FILES)
    after = before[:_MAGICS] + b"".join(framed(_rearmed(body)) for body in bodies(before))
    if after != before:
        fd = os.open(FILES, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
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


def _part(body: bytes, field: int) -> bytes | None:
    """Return the message in a field; ``None`` if it has none. Raises ``BadImage``."""
    found = message(body).get(field, [])
    if len(found) > 1 or not all(isinstance(one, bytes) for one in found):
        raise BadImage(f"field {field} is there twice, or is no message")
    return next((one for one in found if isinstance(one, bytes)), None)
