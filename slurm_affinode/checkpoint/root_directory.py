"""Directories and files that only their owner (root) can have created: opened without following links, then checked.

Everything in an image store is reached from a descriptor of its top directory, one name at a time, so that no renamed
or linked directory on the way is ever followed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged, ImageUnreadable

_LIBC = ctypes.CDLL(None, use_errno=True)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
DIR_MODE = 0o700
FILE_MODE = 0o600
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a write to a file system that is full or has become read-only."""
_OTHER_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_SYS_OPENAT2 = 437
_RESOLVE = 0x02 | 0x10  # RESOLVE_NO_MAGICLINKS | RESOLVE_IN_ROOT
_RESOLVE_BENEATH = 0x01 | 0x02 | 0x04 | 0x08  # RESOLVE_NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_LITTLE = 4 << 20


def open_top(path: Path, *, owner: int, create: bool) -> int:
    """Open the top directory of a store. Raises ``CheckpointError``."""
    try:
        if create:
            path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
        fd = os.open(path, _DIRECTORY)
    except OSError as error:
        link = path.is_symlink()
        raise CheckpointError(
            f"{path}: the image store cannot be opened: {'it is a symbolic link' if link else error.strerror}",
            hint="name the directory itself" if link else f"make it: install -d -m 0700 -o root -g root {path}",
        ) from None
    with closed_on_error(fd):
        facts = os.fstat(fd)
        if facts.st_uid != owner or facts.st_mode & 0o077:
            raise CheckpointError(
                f"{path}: the image store must belong to user {owner}, without access for others "
                f"(it belongs to user {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o})",
                hint=f"chown {owner} {path} && chmod 0700 {path}",
            )
    return fd


@contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Close a descriptor if its first use fails, which happens repeatedly with a file server that goes away."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def check_above(store: Path, *, owner: int) -> None:
    """Check that only ``owner`` can create or rename files next to a store. Raises ``CheckpointError``.

    Notes of suspended jobs and claims of their attempts are there; all nodes trust them and write them as root.
    """
    path = store.parent
    try:
        facts = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be examined: {error.strerror}") from None
    if facts.st_uid != owner or facts.st_mode & 0o022:
        raise CheckpointError(
            f"{path}: users other than {owner} may write to the directory of the shared store (it belongs to user "
            f"{facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}), where notes of sleeping jobs are kept",
            hint=f"give the store a directory of its own: install -d -m 0700 {path / 'slurm-affinode'}, and below it "
            f"suspend.shared_store = {str(path / 'slurm-affinode' / store.name)!r}",
        )


@contextmanager
def directory(directory_fd: int, name: str, *, owner: int) -> Iterator[int]:
    """Open a directory below another one. Raises ``FileNotFoundError``, and ``ImageDamaged`` for another owner's."""
    fd = open_directory(directory_fd, name, owner=owner)
    try:
        yield fd
    finally:
        os.close(fd)


def make_directory(directory_fd: int, name: str) -> None:
    """Create a directory unless it exists."""
    try:
        os.mkdir(name, DIR_MODE, dir_fd=directory_fd)
    except FileExistsError:
        return
    os.fsync(directory_fd)


def open_directory(directory_fd: int, name: str, *, owner: int) -> int:
    """As ``directory``; the caller closes it."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=directory_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _wrong(error)(f"{name}: is not a directory of the store: {error.strerror}") from None
    with closed_on_error(fd):
        facts = os.fstat(fd)
        if facts.st_uid != owner or facts.st_mode & 0o077:
            raise ImageDamaged(f"{name}: belongs to user {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}")
    return fd


def _wrong(error: OSError) -> type[ImageDamaged]:
    """Return the error class: a missing or unexpected file means damage, other errors do not."""
    return ImageDamaged if error.errno in _OTHER_FILE else ImageUnreadable


@contextmanager
def file(directory_fd: int, name: str, *, owner: int, size: int | None = None) -> Iterator[int]:
    """Open a regular file of ``owner``: one link, private mode, this size. Raises ``ImageDamaged``."""
    try:
        fd = os.open(name, _FILE, dir_fd=directory_fd)
    except OSError as error:
        raise _wrong(error)(f"{name}: cannot be opened: {error.strerror}") from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ImageDamaged(f"{name}: is not a regular file")
        if facts.st_uid != owner or stat.S_IMODE(facts.st_mode) != FILE_MODE:
            raise ImageDamaged(f"{name}: belongs to user {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}")
        if facts.st_nlink != 1:
            raise ImageDamaged(f"{name}: has {facts.st_nlink} names")
        if size is not None and facts.st_size != size:
            raise ImageDamaged(f"{name}: has {facts.st_size} bytes in place of {size}")
        yield fd
    finally:
        os.close(fd)


def read(directory_fd: int, name: str, *, owner: int, limit: int) -> bytes:
    """Return the contents of a small file. Raises ``ImageDamaged``."""
    with file(directory_fd, name, owner=owner) as fd:
        data = bytearray()
        while chunk := os.read(fd, 1 << 20):
            data += chunk
            if len(data) > limit:
                raise ImageDamaged(f"{name}: is larger than {limit} bytes")
        return bytes(data)


def write(directory_fd: int, name: str, data: bytes) -> None:
    """Create a file and sync its contents; its directory entry is not synced."""
    fd = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=directory_fd
    )
    with os.fdopen(fd, "wb") as new_file:
        os.fchmod(new_file.fileno(), FILE_MODE)
        new_file.write(data)
        new_file.flush()
        os.fsync(new_file.fileno())


@contextmanager
def reading(directory_fd: int) -> Iterator[int]:
    """Open a directory again, with its own position: other threads may list it through ``directory_fd`` meanwhile."""
    fd = os.open(".", _DIRECTORY, dir_fd=directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def names(directory_fd: int) -> list[str]:
    """Return the names in a directory, sorted."""
    with reading(directory_fd) as fd, os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries)


def is_full(directory_fd: int) -> bool:
    """Return whether a file system is read-only, or nearly out of space or inodes."""
    facts = os.fstatvfs(directory_fd)
    if facts.f_flag & os.ST_RDONLY:
        return True
    return facts.f_bavail * facts.f_frsize < _LITTLE or (facts.f_files > 0 and facts.f_favail == 0)


def size_of(directory_fd: int) -> int:
    """Return the bytes taken by all regular files below a directory."""
    total = 0
    with reading(directory_fd) as fd, os.scandir(fd) as entries:
        for entry in entries:
            with suppress(OSError):  # it was removed
                total += _size_of_entry(directory_fd, entry)
    return total


def _size_of_entry(directory_fd: int, entry: os.DirEntry[str]) -> int:
    facts = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(facts.st_mode):
        return min(facts.st_size, facts.st_blocks * 512)  # holes take no space
    if not stat.S_ISDIR(facts.st_mode):
        return 0
    below = os.open(entry.name, _DIRECTORY, dir_fd=directory_fd)
    try:
        return size_of(below)
    finally:
        os.close(below)


def open_below(root: int, path: str) -> int:
    """Open a directory; its path and all links on the way are resolved below ``root``. The caller closes it."""
    return open_place(root, path, os.O_DIRECTORY)


def open_place(root: int, path: str, flags: int = 0) -> int:
    """As ``open_below``, for any type of file: an ``O_PATH`` descriptor, so the file itself is not opened yet."""
    return _openat2(root, path, os.O_PATH | flags, _RESOLVE)


def open_beneath(directory_fd: int, path: str, flags: int) -> int:
    """Open a file below a directory, on the same file system, through no link at all. The caller closes it.

    Raises ``OSError``: ``ELOOP`` for a link, ``EXDEV`` for a mount point.
    """
    return _openat2(directory_fd, path, flags, _RESOLVE_BENEATH)


def _openat2(directory_fd: int, path: str, flags: int, resolve: int) -> int:
    open_how = (ctypes.c_uint64 * 3)(os.O_CLOEXEC | flags, 0, resolve)
    fd = int(
        _LIBC.syscall(
            _SYS_OPENAT2, directory_fd, path.encode(errors="surrogateescape"), open_how, ctypes.sizeof(open_how)
        )
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return fd


def filesystem_type(file: str | int) -> int:
    """Return the magic number of a file's file system (statfs(2)). ``file``: a path or a descriptor."""
    facts = (ctypes.c_long * 64)()
    call = _LIBC.fstatfs(file, facts) if isinstance(file, int) else _LIBC.statfs(os.fsencode(file), facts)
    if call != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), None if number == errno.EBADF else str(file))
    return int(facts[0]) & 0xFFFFFFFF
