"""Files that a tree has open while their names are gone, made again from an image with the rights of their user.

CRIU would make them as root beside the place where they were (``NAME.cr.N.ghost``), wherever a link may lead by then.
``ghost-file-N.img`` holds a ``ghost_file_entry`` (``images/ghost-file.proto``), then the contents: as they are, or in
pieces, each behind a ``ghost_chunk_entry``.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from slurm_affinode.checkpoint import rootdir
from slurm_affinode.checkpoint.criu_images import BadImage, integer, message

_MAGICS = 8  # bytes
_CHUNK = 1 << 20
_ENTRY_LIMIT = 1 << 16
_PLACES = ("/var/tmp", "/tmp", "/dev/shm")  # noqa: S108 - a file without a name is made there
_PERMISSIONS = 0o777
"""Neither setuid nor setgid."""
_ELSEWHERE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EOPNOTSUPP)
"""Errors after which another directory may do."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """One of them."""

    mode: int
    uid: int
    gid: int
    chunks: bool
    size: int | None
    target: bytes | None
    """Of a symbolic link."""
    times: tuple[int, int] | None
    """Last access and modification, nanoseconds."""
    begin: int
    """Where the contents begin in the image file."""
    inode: int | None
    """Its number where it was dumped."""

    @classmethod
    def read(cls, fd: int) -> Ghost:
        """Decode an image file. Raises ``BadImage``."""
        length = int.from_bytes(os.pread(fd, 4, _MAGICS), "little")
        if not 0 < length <= _ENTRY_LIMIT:
            raise BadImage("a removed file is not described")
        body = os.pread(fd, length, _MAGICS + 4)
        if len(body) < length:
            raise BadImage("a record is cut short")
        facts = message(body)
        target = facts.get(11, [None])[0]
        times = [_time(facts.get(key, [None])[0]) for key in (7, 8)]
        return cls(
            integer(facts, 3), integer(facts, 1), integer(facts, 2), bool(integer(facts, 9, 0)),
            integer(facts, 10) if 10 in facts else None, target if isinstance(target, bytes) else None,
            (times[0], times[1]) if times[0] is not None and times[1] is not None else None, _MAGICS + 4 + length,
            integer(facts, 5) if 5 in facts else None,
        )  # fmt: skip


def _time(packed: int | bytes | None) -> int | None:
    if not isinstance(packed, bytes):
        return None
    facts = message(packed)
    seconds, micro = integer(facts, 1), integer(facts, 2)
    return seconds * 1_000_000_000 + micro * 1000 if seconds < 1 << 33 and micro < 1_000_000 else None


def make(root: int, path: str, ghost: Ghost, image_fd: int, *, executable: bool) -> int:
    """A descriptor of a file without a name, like that which was at ``path``; the caller closes it.

    To be called with the rights of the user. It is made where it was, or above that, or in a directory for temporary
    files. ``executable``: it is to be mapped so. Raises ``OSError``, ``BadImage``.
    """
    directory, _, name = path.rpartition("/")
    error: OSError | None = None
    for place in _places(directory):
        try:
            parent = rootdir.open_below(root, place)
        except OSError as why:
            error = error or why
            continue
        try:
            if executable and os.statvfs(parent).f_flag & os.ST_NOEXEC:
                continue
            return _make(parent, name if place == (directory or "/") else _unused(), ghost, image_fd)
        except OSError as why:
            error = error or why
            if why.errno not in _ELSEWHERE:
                raise
        finally:
            os.close(parent)
    raise error or OSError(errno.EACCES, "there is no directory to make it in", path)


def _places(directory: str) -> Iterator[str]:
    """The directory, those above it, and some that everybody may write to."""
    while directory:
        yield directory
        directory = directory.rpartition("/")[0]
    yield "/"
    yield from _PLACES


def _unused() -> str:
    return f".removed.{uuid.uuid4().hex}"


def _make(parent: int, name: str, ghost: Ghost, image_fd: int) -> int:
    """Use its own name where that is free, so that ``/proc`` shows the same as before."""
    try:
        return _make_named(parent, name, ghost, image_fd)
    except FileExistsError:
        return _make_named(parent, _unused(), ghost, image_fd)


def _make_named(parent: int, name: str, ghost: Ghost, image_fd: int) -> int:
    mode = ghost.mode & _PERMISSIONS
    place = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    if stat.S_ISREG(ghost.mode):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, mode | stat.S_IRUSR | stat.S_IWUSR, dir_fd=parent)
        try:
            try:
                _fill(fd, ghost, image_fd)
                with suppress(OSError):
                    os.fchown(fd, -1, ghost.gid)
                os.fchmod(fd, mode)
                if ghost.times is not None:
                    os.utime(fd, ns=ghost.times)
            finally:
                os.unlink(name, dir_fd=parent)
            # No process can run a file that is open to be written.
            return os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(fd)
    if stat.S_ISDIR(ghost.mode):
        os.mkdir(name, mode, dir_fd=parent)
        try:
            fd = os.open(name, place | os.O_DIRECTORY, dir_fd=parent)
            with suppress(OSError):
                os.chmod(name, mode, dir_fd=parent)
            return fd
        finally:
            os.rmdir(name, dir_fd=parent)
    if stat.S_ISFIFO(ghost.mode):
        os.mkfifo(name, mode, dir_fd=parent)
    elif stat.S_ISLNK(ghost.mode) and ghost.target is not None:
        os.symlink(ghost.target, name, dir_fd=parent)
    else:
        raise BadImage(f"a removed file of the type {stat.S_IFMT(ghost.mode):o} is not restored")
    try:
        if stat.S_ISFIFO(ghost.mode):
            os.chmod(name, mode, dir_fd=parent)
        return os.open(name, place, dir_fd=parent)
    finally:
        os.unlink(name, dir_fd=parent)


def _fill(fd: int, ghost: Ghost, image_fd: int) -> None:
    at = ghost.begin
    if not ghost.chunks:
        _copy(image_fd, at, fd, 0, os.fstat(image_fd).st_size - at)
        return
    if ghost.size is None:
        raise BadImage("a removed file has no size")
    os.ftruncate(fd, ghost.size)
    end = os.fstat(image_fd).st_size
    while at < end:
        length = int.from_bytes(os.pread(image_fd, 4, at), "little")
        if length > _ENTRY_LIMIT or at + 4 + length > end:
            raise BadImage("a record is cut short")
        facts = message(os.pread(image_fd, length, at + 4))
        at += 4 + length
        size, offset = integer(facts, 1), integer(facts, 2)
        if at + size > end or offset + size > ghost.size:
            raise BadImage("a piece of a removed file is cut short")
        _copy(image_fd, at, fd, offset, size)
        at += size


def _copy(source: int, begin: int, target: int, at: int, size: int) -> None:
    done = 0
    while done < size:
        data = os.pread(source, min(_CHUNK, size - done), begin + done)
        if not data:
            raise BadImage("a removed file is cut short")
        written = 0
        while written < len(data):
            written += os.pwrite(target, data[written:], at + done + written)
        done += len(data)
