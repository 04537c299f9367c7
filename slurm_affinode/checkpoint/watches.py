"""Files that inotify descriptors watch, by the kernel's own numbers.

On some file systems (overlayfs) those differ from what ``stat`` tells.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_IN_DELETE_SELF = 0x400
_IN_CLOEXEC = os.O_CLOEXEC
Inode = tuple[int, int]
"""Device and number."""


class Watches:
    """Watches of this process's own. A context, in which they exist."""

    def __enter__(self) -> Self:
        """Raises ``OSError``."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(_IN_CLOEXEC))
        if self._fd < 0:
            raise _error("inotify")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End them."""
        os.close(self._fd)

    def add(self, fd: int) -> None:
        """Watch a file, as the thread's user may. Raises ``OSError``."""
        path = f"/proc/self/fd/{fd}"
        if self._libc.inotify_add_watch(self._fd, path.encode(), _IN_DELETE_SELF) < 0:
            raise _error(path)

    def found(self) -> set[Inode]:
        """Return the watched files. Raises ``OSError``."""
        return set(watched(Path(f"/proc/self/fdinfo/{self._fd}").read_bytes()))


def watched(fdinfo: bytes) -> Iterator[Inode]:
    """Return the watches of a descriptor from ``/proc/PID/fdinfo``. Raises ``OSError``."""
    for line in fdinfo.split(b"\n"):
        if line.startswith(b"inotify "):
            facts = dict(word.partition(b":")[::2] for word in line.split()[1:])
            try:
                yield int(facts[b"sdev"], 16), int(facts[b"ino"], 16)
            except (KeyError, ValueError):
                raise OSError(errno.EINVAL, "a watch is not described") from None


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), name)
