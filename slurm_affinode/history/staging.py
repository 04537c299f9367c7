"""Where a writer prepares parts before they become live: a directory of its own, locked as long as it lives.

A writer that died leaves a directory whose lock is free: the next writer removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from pathlib import Path

DIRECTORY = "staging"
_LOCK = "lock"


class Staging:
    """One writer's directory below ``root/staging``."""

    def __init__(self, root: Path) -> None:
        self.path = root / DIRECTORY / secrets.token_hex(8)
        self.path.mkdir(parents=True)
        self._fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._closer = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        """Remove the directory with whatever was not taken out of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._closer()


def sweep(root: Path) -> None:
    """Remove the directories of writers that died; the caller holds the write lock."""
    for directory in _children(root / DIRECTORY):
        try:
            fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # just being made, or just being removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
