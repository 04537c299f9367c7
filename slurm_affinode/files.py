"""Durable writes: a reader sees the old file or the new one, never half of one, also across a power loss."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path


def fsync_dir(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_open(directory: Path) -> None:
    """Make a directory into which everybody may look, whatever the umask; one that is there stays as it is."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        directory.chmod(0o755)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path in the same directory; on success it takes the name ``path``, on failure it goes.

    The caller writes the yielded file and closes it. Order: write, fsync, rename, fsync the directory. An ``OSError``
    that names no file, as that of a full disk, comes out with the name ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        fsync_dir(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``text`` (UTF-8), durably and atomically."""
    with replacing(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def delivering(path: Path) -> Iterator[Path]:
    """As ``replacing``, for an output that a user names: a link keeps pointing to it, and what is no file (a device, a
    pipe) is written into, for its name must not become that of a file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    with replacing(path.resolve()) as temporary:
        yield temporary


_DEEPEST = 8


def give_to_owner(directory: Path, names: Iterable[str]) -> None:
    """Make what root has made below ``directory``, under these names, the property of whom that directory belongs to.

    Where root once runs what a user's timer runs, that user could else write there never again. Links are not followed,
    and nothing that has another name, or is not root's, changes hands.
    """
    with contextlib.suppress(OSError):
        top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            owner = os.fstat(top)
            for name in names if owner.st_uid else ():
                _give(top, name, owner, _DEEPEST)
        finally:
            os.close(top)


def _give(at: int, name: str, owner: os.stat_result, depth: int) -> None:
    with contextlib.suppress(OSError):  # what has gone meanwhile
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        try:
            facts = os.fstat(fd)
            if stat.S_ISDIR(facts.st_mode):
                for entry in os.listdir(fd) if depth else ():  # noqa: PTH208 - of a descriptor
                    _give(fd, entry, owner, depth - 1)
            elif not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
                return
            if facts.st_uid == 0:
                os.fchown(fd, owner.st_uid, owner.st_gid)
        finally:
            os.close(fd)
