"""One nightly run at a time: a lock that the kernel releases when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from slurm_affinode.errors import UnreachableError, unwritable


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold ``path``; the file stays, only the lock counts. It is written to: a link there is not followed.

    Raises ``UnreachableError`` where another process holds it (unless ``wait``), or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(path, error, doing="made") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            who = f" (process {holder})" if holder.isdigit() else ""
            raise UnreachableError(
                f"another nightly run is at work{who}: it holds {path}",
                hint="nothing was done; give --wait to wait for it",
            ) from None
        with contextlib.suppress(OSError):  # only for people; the disk may be full
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
