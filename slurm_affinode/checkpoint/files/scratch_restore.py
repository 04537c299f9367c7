"""Creation of closed node-local files from a checkpoint image, with the rights of the job's user.

Names in ``/tmp`` are visible on the node that the job has left, so other users may have created them here. A file or
directory of another user is never used: that user could exchange it after the restore.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from slurm_affinode.base.text import one_line
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files import local_files
from slurm_affinode.checkpoint.files.created_files import FileIdentity
from slurm_affinode.checkpoint.files.local_files import Check, Leftovers
from slurm_affinode.checkpoint.files.scratch_index import ScratchFile

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20
_GROUP_MODE = stat.S_IRWXG | stat.S_ISGID


class Tops:
    """The node-local directories, opened with the rights of the user."""

    def __init__(self, root: int) -> None:
        """``root``: descriptor of the root directory in which their paths are resolved."""
        self._root = root
        self._fds: dict[str, int] = {}

    def __enter__(self) -> Tops:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    @contextmanager
    def directory(self, place: str, path: str) -> Iterator[int]:
        """Yield a descriptor of a directory below a node-local one. Raises ``OSError``, also for a link."""
        if place not in self._fds:
            self._fds[place] = root_directory.open_below(self._root, place)
        fd = root_directory.open_beneath(self._fds[place], path, os.O_PATH | os.O_DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def parent(self, file: ScratchFile) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory of a file, and its name there. Raises ``OSError``."""
        path = PurePosixPath(file.path)
        with self.directory(file.place, str(path.parent)) as fd:
            yield fd, path.name


class _InTheWayError(Exception):
    """Another file exists under a name, and may not be replaced."""


@dataclass(slots=True, kw_only=True)
class Maker:
    """Creates files; each public method is called with the rights of the user."""

    tops: Tops
    data: int
    """Descriptor of their contents."""
    files: Sequence[ScratchFile]
    leftovers: Leftovers
    """Files that may be replaced."""
    check: Check
    inodes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path -> device and inode of the file that was created."""
    kept_paths: list[str] = field(default_factory=list)
    """Paths of existing files that were not replaced."""
    identities: dict[str, FileIdentity] = field(default_factory=dict)
    """Path -> the regular file that was created."""
    _owned: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Directory -> whether it and those above it belong to the user or root."""

    def make(self) -> str | None:
        """Create missing files and directories, still without contents; return the first failure, if any."""
        return self._call_for_all(self.files, self._make)

    def fill(self) -> str | None:
        """Set contents, modes and times of created files; return the first failure, if any."""
        # Directories last, from the bottom: files in them change their times, and they may be read-only.
        created = [file for file in self.files if file.full in self.inodes]
        files = [file for file in created if file.kind != "directory"]
        return self._call_for_all(
            [*files, *(file for file in reversed(created) if file.kind == "directory")], self._fill
        )

    def _call_for_all(self, files: Sequence[ScratchFile], call: Callable[[ScratchFile], None]) -> str | None:
        for file in files:
            try:
                self.check()
                call(file)
            except OSError as error:
                why = "a symbolic link is in its place" if error.errno == errno.ELOOP else error.strerror
                return f"{one_line(file.full)}: {why}"
        return None

    # --- names

    def _make(self, file: ScratchFile) -> None:
        try:
            if self._is_owned(file.place, PurePosixPath(file.path).parent):
                with self.tops.parent(file) as (parent, name):
                    if not self._is_there(file, parent, name):
                        self._create(file, parent, name)
                return
        except (NotADirectoryError, _InTheWayError):
            pass
        self.kept_paths.append(file.full)

    def _is_owned(self, place: str, path: PurePosixPath) -> bool:
        """Return whether only the user and root may exchange the entries of a directory. Raises ``OSError``."""
        if path == PurePosixPath():
            return True  # the site's
        key = place, str(path)
        if key not in self._owned:
            with self.tops.directory(*key) as fd:
                safe = os.fstat(fd).st_uid in (0, self.leftovers.uid)
            self._owned[key] = safe and self._is_owned(place, path.parent)
        return self._owned[key]

    def _is_there(self, file: ScratchFile, parent: int, name: str) -> bool:
        """Return whether the same file exists. Raises ``_InTheWayError`` if another one does that must stay."""
        try:
            facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if facts.st_uid != self.leftovers.uid:
            raise _InTheWayError
        if self._is_same_file(file, parent, name, facts):
            return True
        if file.kind not in ("file", "link") or not stat.S_ISREG(facts.st_mode):
            raise _InTheWayError
        try:
            self.leftovers.remove(parent, file.full)
        except OSError:
            raise _InTheWayError from None
        return False

    def _is_same_file(self, file: ScratchFile, parent: int, name: str, facts: os.stat_result) -> bool:
        if file.kind == "directory":
            return stat.S_ISDIR(facts.st_mode)
        if file.kind == "fifo":
            return stat.S_ISFIFO(facts.st_mode)
        if file.kind == "symlink":
            return stat.S_ISLNK(facts.st_mode) and os.readlink(name, dir_fd=parent) == file.target
        if not stat.S_ISREG(facts.st_mode):
            return False
        if file.kind == "link":
            with suppress(OSError), self.tops.parent(replace(file, path=file.target)) as (target_fd, its):
                return os.path.samestat(facts, os.stat(its, dir_fd=target_fd, follow_symlinks=False))
            return False
        return facts.st_size == file.size and self._equal(file, parent, name)

    def _equal(self, file: ScratchFile, parent: int, name: str) -> bool:
        try:
            fd = os.open(name, _READ, dir_fd=parent)
        except OSError:
            return False
        try:
            position = 0
            while position < file.size:
                self.check()
                chunk = os.pread(fd, min(_CHUNK, file.size - position), position)
                if not chunk or chunk != os.pread(self.data, len(chunk), file.at + position):
                    return False
                position += len(chunk)
            return True
        finally:
            os.close(fd)

    def _create(self, file: ScratchFile, parent: int, name: str) -> None:
        if file.kind == "directory":
            os.mkdir(name, 0o700, dir_fd=parent)
        elif file.kind == "fifo":
            os.mkfifo(name, 0o600, dir_fd=parent)
        elif file.kind == "symlink":
            os.symlink(file.target, name, dir_fd=parent)
        elif file.kind == "link":
            with self.tops.parent(replace(file, path=file.target)) as (target_fd, its):
                os.link(its, name, src_dir_fd=target_fd, dst_dir_fd=parent, follow_symlinks=False)
        else:
            os.close(os.open(name, _CREATE_FLAGS, 0o600, dir_fd=parent))
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            facts, identity = os.fstat(fd), FileIdentity.of(fd)
        finally:
            os.close(fd)
        self.inodes[file.full] = facts.st_dev, facts.st_ino
        if identity is not None and file.kind in ("file", "link"):
            self.identities[file.full] = identity

    # --- contents

    def _fill(self, file: ScratchFile) -> None:
        with self.tops.parent(file) as (parent, name):
            if file.kind == "symlink":
                os.utime(name, ns=(file.mtime_ns, file.mtime_ns), dir_fd=parent, follow_symlinks=False)
                return
            if file.kind == "link":
                return
            flags = {"directory": _READ | os.O_DIRECTORY, "fifo": _READ}.get(file.kind, _WRITE)
            fd = os.open(name, flags, dir_fd=parent)
        try:
            facts, mode = os.fstat(fd), file.mode
            if (facts.st_dev, facts.st_ino) != self.inodes[file.full]:
                raise OSError(errno.EEXIST, "was replaced while it was created")
            if file.kind == "file":
                local_files.copy_range(self.data, fd, file.size, source_at=file.at, check=self.check)
                os.ftruncate(fd, file.size)
            try:
                os.fchown(fd, -1, file.gid)
            except PermissionError:  # the user is no longer in that group: its rights are not another group's
                mode &= ~_GROUP_MODE
            os.fchmod(fd, mode)
            os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(fd)
