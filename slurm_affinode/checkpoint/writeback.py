"""Has the kernel write files to disk while another process still appends to them.

By itself it begins when a tenth of memory is dirty or after seconds: a dump would fill the page cache first, and the
disk would have its work when nothing else is left to do, in the fsync.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress

from slurm_affinode.checkpoint import rootdir

_START = 2  # SYNC_FILE_RANGE_WRITE
_EVERY_S = 0.05
_LEAST = 4 << 20
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


def start_writing(fd: int, at: int, length: int) -> None:
    """Have the kernel begin to write a part of a file to disk, without waiting for the end of it.

    It does wait where the disk has enough to do. Only a hint; failures are none.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(length), _START)


class Writeback:
    """Of all files of a directory, by a thread of its own, until it is stopped."""

    def __init__(
        self, directory_fd: int, *, every_s: float = _EVERY_S, start: Callable[[int, int, int], None] = start_writing
    ) -> None:
        """Begin. ``start``: descriptor, position, bytes."""
        self._directory_fd = os.dup(directory_fd)
        self._every_s = every_s
        self._start = start
        self._done: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writeback", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                with suppress(OSError):  # the directory went away
                    self._look()
        finally:
            for fd, _ in self._done.values():
                os.close(fd)
            os.close(self._directory_fd)

    def _look(self) -> None:
        for name in rootdir.names(self._directory_fd):
            with suppress(OSError):  # the file did
                self._push(name)

    def _push(self, name: str) -> None:
        """Whole pages that have come since the last look."""
        if name not in self._done:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._done[name] = os.open(name, flags, dir_fd=self._directory_fd), 0
        fd, done = self._done[name]
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_size - done >= _LEAST and not self._stop.is_set():
            end = facts.st_size // _LEAST * _LEAST
            self._start(fd, done, end - done)
            self._done[name] = fd, end

    def stop(self) -> None:
        """Begin no further; what is under way ends by itself."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and wait until its descriptors are closed."""
        self._stop.set()
        self._thread.join()
