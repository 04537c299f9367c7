"""Cgroups held by descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

_LIBC = ctypes.CDLL(None, use_errno=True)
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_SYSTEMS = frozenset({0x27E0EB, 0x63677270})
"""``CGROUP_SUPER_MAGIC`` and ``CGROUP2_SUPER_MAGIC`` of linux/magic.h."""


class Cgroup:
    """A cgroup held by descriptor, so that its path is resolved only once. A context that closes it.

    Users choose the names of cgroups below a delegated one.
    """

    def __init__(self, root: Path, path: Path) -> None:
        """``path``: its directory, below ``root``. Raises ``OSError``.

        It is also raised if ``path`` goes through a symbolic link or upwards, or is on another file system: then it is
        not a directory of the kernel's.
        """
        self.path = path
        parts = path.parts[len(root.parts) :]
        if ".." in parts or path.parts[: len(root.parts)] != root.parts:
            raise NotADirectoryError(errno.ENOTDIR, "is not below the root of cgroups", str(path))
        self._fd = os.open(root, _DIRECTORY)
        try:
            for part in parts:
                fd = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._fd)
                os.close(self._fd)
                self._fd = fd
            is_cgroup = file_system(self._fd) in _FILE_SYSTEMS
        except BaseException:
            self.close()
            raise
        if not is_cgroup:
            self.close()
            raise NotADirectoryError(errno.ENOTDIR, "is not on a file system of cgroups", str(path))

    def __str__(self) -> str:
        return str(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def facts(self) -> os.stat_result:
        """Return ``stat`` of the directory. Raises ``OSError``."""
        return os.fstat(self._fd)

    def has(self, name: str) -> bool:
        """Return whether it has a file of this name."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def text(self, name: str) -> str:
        """Return the contents of a file. Raises ``OSError``."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        with os.fdopen(fd, encoding="ascii", errors="replace") as file:
            return file.read()

    def write(self, name: str, value: str) -> None:
        """Write a value to a file. Raises ``OSError``."""
        fd = self.open(name)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        """Return a descriptor to write to a file, which the caller closes. Raises ``OSError``."""
        return os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)

    def make(self, name: str) -> None:
        """Create a cgroup below it, unless it exists. Raises ``OSError``."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a cgroup below it. Raises ``OSError``, also if a process is in it."""
        os.rmdir(name, dir_fd=self._fd)

    def names(self, place: str = ".") -> list[str]:
        """Return the names of the cgroups directly below it, or below one of its cgroups. Raises ``OSError``."""
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        finally:
            os.close(fd)


def file_system(fd: int) -> int:
    """Return the type of the file system of a descriptor, see statfs(2). Raises ``OSError``."""
    facts = (ctypes.c_long * 64)()  # larger than ``struct statfs``, which begins with the type
    if _LIBC.fstatfs(fd, ctypes.byref(facts)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(facts[0])
