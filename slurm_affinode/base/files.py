"""Durable writes: readers see the old file or the new one, never a partial one, even after a power loss."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
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
    """Create a directory that all users can read, regardless of the umask; an existing one is not changed."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        directory.chmod(0o755)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644, owner: int | None = None, durable: bool = True) -> Iterator[Path]:
    """Yield a path to write to; the file is renamed to ``path`` on success and deleted on failure.

    The caller writes to the yielded path and closes it. Order: write, fsync, rename, fsync directory. ``owner``: the
    UID that gets the complete file before it has its name; until then no other user can open it. An ``OSError``
    that names no other file, such as that of a full disk, is raised with the name ``path``. The yielded path refers to
    a descriptor: root may write into a directory in which a user replaces names at the same time. Without ``durable``,
    the kernel decides when the file is on the disk: for many files that are made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name, fd = _new_file(directory, path.name)
        temporary = Path(f"/proc/self/fd/{fd}")
        try:
            yield temporary
            os.fchmod(fd, mode)
            if owner is not None and owner != os.fstat(fd).st_uid:
                os.fchown(fd, owner, -1)
            if durable:
                os.fsync(fd)
            os.replace(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            if durable:
                os.fsync(directory)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            of_this_file = isinstance(error, OSError) and error.filename in (None, str(temporary), name)
            if isinstance(error, OSError) and of_this_file and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        finally:
            os.close(fd)
    finally:
        os.close(directory)


def _new_file(directory: int, name: str) -> tuple[str, int]:
    """Create a new file in a directory, readable by its owner only; return its name and a descriptor."""
    while True:
        temporary_name = f".{name}.{secrets.token_hex(4)}.tmp"
        with contextlib.suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return temporary_name, os.open(temporary_name, flags, 0o600, dir_fd=directory)


def write_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace the contents of ``path`` with ``text`` (UTF-8) atomically; for ``durable`` see ``replacing``."""
    with replacing(path, mode=mode, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def delivering(path: Path) -> Iterator[Path]:
    """As ``replacing``, for an output path given by a user.

    A symbolic link is preserved, and a device or pipe is written to instead of being replaced with a file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    with replacing(path.resolve()) as temporary:
        yield temporary


_DEEPEST = 8


def give_to_owner(directory: Path, names: Iterable[str]) -> None:
    """Change the owner of root's files below ``directory``, under these names, to the owner of the directory.

    After root has once run a command from a user's timer, that user could otherwise never write there again. Links are
    not followed, and files with other names or of other owners are not changed.
    """
    with contextlib.suppress(OSError):
        top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            owner = os.fstat(top)
            for name in names if owner.st_uid else ():
                _give(top, name, owner, _DEEPEST)
        finally:
            os.close(top)


def _give(directory: int, name: str, owner: os.stat_result, depth: int) -> None:
    with contextlib.suppress(OSError):  # it was deleted meanwhile
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
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
