"""Directories for the work of a restore, which only root may enter, and which the next restore removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PLACES = ("/var/tmp", "/var/lib", "/run")  # noqa: S108 - a directory of our own is made there
_NAME = "slurm-affinode-restore-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def work_directory(place: str | None = None) -> Iterator[tuple[Path, int]]:
    """Create a directory that only root may enter; yield it and a descriptor of it.

    It is created in ``place``, or by default where programs may be executed (no ``noexec``). Directories left by agents
    that were killed during a restore are removed first.
    """
    place = place or _place()
    _sweep(Path(place))
    while True:
        with tempfile.TemporaryDirectory(prefix=_NAME, dir=place) as name:
            if (fd := _locked(name)) is None:
                continue
            try:
                yield Path(name), fd
            finally:
                os.close(fd)
            return


def _locked(name: str) -> int | None:
    """Return a descriptor of a new work directory, or ``None`` if it was swept before it was locked.

    The lock lasts until all copies of the descriptor are closed, including CRIU's.
    """
    with suppress(FileNotFoundError):
        fd = os.open(name, _DIRECTORY)
        # A file system without locks is not swept either.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.lexists(name):  # no other process would create it again
            return fd
        os.close(fd)
    return None


def _sweep(place: Path) -> None:
    """Remove work directories that no process has locked."""
    for path in place.glob(f"{_NAME}*"):
        with suppress(OSError):
            fd = os.open(path, _DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def _place() -> str:
    usual = tempfile.gettempdir()
    return next((place for place in (usual, *_PLACES) if _fits(place)), usual)


def _fits(place: str) -> bool:
    with suppress(OSError):  # the directory does not exist
        return not os.statvfs(place).f_flag & (os.ST_NOEXEC | os.ST_RDONLY)
    return False
