"""Closed files of a job in node-local directories: temporary directories, staged data, a working directory.

Open files are stored by ``local_files.py``. Closed ones (``scratch_search.py``) are copied into the checkpoint image up
to the limits of the site, created again before the process tree is restored, and removed from the node that the job has
left. Beyond the limits, or if they cannot be told from those of another job, the job is tied to its node.

Everything is done with the rights of the job's user, below the root of the job's mount namespace.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from slurm_affinode.base.pidfd import PROC, ExhaustedError, Id, Process
from slurm_affinode.base.text import counted, one_line, size
from slurm_affinode.base.timeouts import FileSystemCalls, time_limit
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files import local_files
from slurm_affinode.checkpoint.files.local_files import Check, Leftovers
from slurm_affinode.checkpoint.files.scratch_index import DATA, INDEX, ScratchFile, ScratchIndex, decoded
from slurm_affinode.checkpoint.files.scratch_record import ScratchRecord
from slurm_affinode.checkpoint.files.scratch_restore import Maker, Tops
from slurm_affinode.checkpoint.files.scratch_search import ScratchSearch, ScratchSearchResult, attributes
from slurm_affinode.checkpoint.interface import DumpFailed, DumpNoRoom, RestoreFailed, RestoreInterrupted
from slurm_affinode.checkpoint.user_files import User, as_user

_GRACE_S = 30.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT_COPY = (errno.EACCES, errno.EPERM, errno.EAGAIN, errno.EIO, errno.ELOOP, errno.EXDEV)
Policy = Literal["copy", "pin", "ignore"]


@dataclass(frozen=True, slots=True)
class ScratchRules:
    """The site's settings for closed node-local files."""

    policy: Policy = "copy"
    """``copy`` up to the limits, then ``pin``; ``pin`` a job to its node; ``ignore`` these files."""
    directories: tuple[str, ...] = ("/tmp", "/var/tmp")  # noqa: S108 - these are what it is about
    limit_bytes: int = 1 << 30
    limit_files: int = 10_000


@dataclass(frozen=True, slots=True)
class ScratchOutcome:
    """Treatment of closed node-local files by a suspension."""

    kind: Literal["none", "copied", "tied", "lost"]
    """``lost``: they cannot be copied, and end with the attempt."""
    text: str = ""
    """One line for the owner."""


NO_SCRATCH_FILES = ScratchOutcome("none")
NOT_SEARCHED = ScratchSearchResult()


@dataclass(frozen=True, slots=True)
class ScratchRestored:
    """The result of a restore."""

    inodes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Path -> device and inode of the file that was created."""
    kept_paths: Sequence[str] = ()
    """Paths of existing files with other contents, which were not replaced."""
    tied: bool = False
    """The files were not copied."""
    missing: Sequence[str] = ()
    """Paths of files that should have stayed on this node and are changed or gone."""


class ScratchFiles:
    """Finds, copies, restores and removes closed node-local files of jobs on this node."""

    def __init__(self, rules: ScratchRules, *, proc: Path = PROC) -> None:
        self._rules, self._proc = rules, proc

    @property
    def copies(self) -> bool:
        """Whether files may be copied, which depends on other jobs of their user."""
        return self._rules.policy == "copy"

    def find(
        self,
        init: Id,
        tree: Collection[Id],
        owner: User,
        periods: Sequence[tuple[float, float]],
        other_jobs: str | None,
    ) -> ScratchSearchResult:
        """Return the files of a stopped job; changes nothing. Never raises.

        ``init``: PID 1 of the job's namespaces. ``tree``: all its processes. ``owner``: from the record of the job.
        ``periods``, ``other_jobs``: see ``ScratchSearch``.
        """
        rules = self._rules
        if rules.policy == "ignore":
            return NOT_SEARCHED
        search = ScratchSearch(rules.directories, rules.limit_files, owner, periods, other_jobs, self._proc)
        return search.run(init, tree)

    # --- copy

    def save(
        self, init: Id, search: ScratchSearchResult, image_fd: int, owner: User, node: str,
        *, kept_paths: Collection[str] = (), timeout_s: float,
    ) -> ScratchOutcome:  # fmt: skip
        """Copy the files into an image that is being written, if the rules permit it.

        ``kept_paths``: absolute paths of the files that the image has already. ``node``: name of this node. Raises
        ``DumpFailed``, and ``DumpNoRoom`` if the image's file system is full.
        """
        files = _without(search.files, kept_paths)
        if not files and search.why_not is None:
            return NO_SCRATCH_FILES
        why = self._why_not_copied(search, files)
        if why is None:
            copied = self._copied(init, files, image_fd, owner, timeout_s)
            if isinstance(copied, str):
                why = copied
            elif _write(image_fd, ScratchIndex(owner.uid, None, copied)):
                return ScratchOutcome("copied", f"{_described(copied)}, copied to its image")
            else:
                why = "the list of their names is too long"
            with suppress(FileNotFoundError):
                os.unlink(DATA, dir_fd=image_fd)
        what = _described(files, more=search.why_not is not None)
        if search.private and all(file.place in search.private for file in files):
            text = f"{what}, not copied ({why}): they end with the attempt, because its directories are private"
            outcome = ScratchOutcome("lost", text)
        else:
            outcome = ScratchOutcome("tied", f"tied to {node}: {what} ({why})")
        index = ScratchIndex(owner.uid, outcome.text, files if outcome.kind == "tied" else ())
        if not _write(image_fd, index):
            _write(image_fd, replace(index, files=()))
        return outcome

    def _why_not_copied(self, search: ScratchSearchResult, files: Sequence[ScratchFile]) -> str | None:
        rules = self._rules
        private = all(file.place in search.private for file in files)
        if rules.policy == "pin" and not private:
            return "the site does not copy them"
        if search.why_not is not None:
            return search.why_not
        if search.ambiguous is not None and not private:
            return search.ambiguous
        total = sum(file.size for file in files)
        return f"more than {size(rules.limit_bytes)}" if total > rules.limit_bytes else None

    def _copied(
        self, init: Id, files: Sequence[ScratchFile], image_fd: int, owner: User, timeout_s: float
    ) -> tuple[ScratchFile, ...] | str:
        """Copy contents; return the files with their offsets, or why one cannot be copied."""
        room = os.fstatvfs(image_fd)
        if sum(file.size for file in files) > room.f_bavail * room.f_frsize:
            raise DumpNoRoom("the image store has no room for the node-local files of the job")
        check = time_limit(timeout_s, "files of the job")
        with ExitStack() as stack:
            try:
                data = os.open(DATA, _CREATE_FLAGS, root_directory.FILE_MODE, dir_fd=image_fd)
                stack.callback(os.close, data)
                process = stack.enter_context(Process(init.pid, started=init.started, proc=self._proc))
                root = process.open("root", os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, root)
                fds = os.dup(root), os.dup(data)

                def call() -> tuple[ScratchFile, ...] | str:
                    try:
                        return as_user(owner, lambda: _copy_all(*fds, files, check))
                    finally:
                        for fd in fds:
                            os.close(fd)

                return FileSystemCalls(None, probe_s=timeout_s + _GRACE_S)(call)
            except OSError as error:
                kind = DumpNoRoom if error.errno in root_directory.FULL else DumpFailed
                raise kind(f"node-local files of the job cannot be copied: {error.strerror or error}") from None

    # --- restore

    def restore_files(
        self, init: Id, index: bytes, data: int | None, user: User, record: ScratchRecord, *, timeout_s: float
    ) -> ScratchRestored:
        """Create the files of an image before its process tree is restored. Raises ``RestoreFailed``.

        ``index``: verified. ``data``: descriptor of ``scratch.data``, or ``None`` if the image has none. ``user``: the
        user of the job according to Slurm. ``record``: of this job on this node. An existing file is not replaced,
        unless an earlier restore of this job has created it and it is not in use.
        """
        scratch_index = decoded(index, user.uid)
        if not scratch_index.files:
            return ScratchRestored(tied=scratch_index.tied is not None)
        names = {file.full for file in scratch_index.files}
        check = time_limit(timeout_s, "files of the job")
        created = {path: value for path, value in record.read_or_default().created.items() if path in names}
        inodes: Mapping[str, tuple[int, int]] = {}
        try:
            with ExitStack() as stack:
                process = stack.enter_context(Process(init.pid, started=init.started, proc=self._proc))
                root = process.open("root", os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, root)
                tops = stack.enter_context(Tops(root))
                if scratch_index.tied is not None:
                    missing = as_user(user, lambda: _missing(tops, scratch_index.files, check))
                    return ScratchRestored(tied=True, missing=missing)
                if data is None or any(file.at + file.size > os.fstat(data).st_size for file in scratch_index.files):
                    raise RestoreFailed("the image lacks the contents of node-local files")
                places = sorted({file.place for file in scratch_index.files})
                used = local_files.used_files(places, user.uid, self._proc) if created else ()
                maker = Maker(
                    tops=tops,
                    data=data,
                    files=scratch_index.files,
                    leftovers=Leftovers(created, user.uid, used),
                    check=check,
                )
                inodes = maker.inodes
                failure = as_user(user, maker.make)
                # Before the contents: if the agent is killed meanwhile, the next restore finds partial files.
                record.write(lambda facts: replace(facts, created={**created, **maker.identities}))
                if failure is None:
                    failure = as_user(user, maker.fill)
        except OSError as error:
            failure = error.strerror or str(error)
        if failure is not None:
            self.remove(init, inodes, user)
            raise RestoreInterrupted(f"a node-local file cannot be restored: {failure}")  # another node may have room
        return ScratchRestored(inodes, maker.kept_paths)

    def remove(self, init: Id, inodes: Mapping[str, tuple[int, int]], user: User) -> None:
        """Remove the files that ``restore_files`` has created, after a failed restore. Never raises."""
        local_files.remove(init, inodes, user)

    # --- node that the job has left

    def leave(self, index: bytes, owner: User) -> int:
        """Remove copied files from the node that the job has left; return their number. Never raises.

        Only files that are still those that were copied, unchanged, and not in use; directories only if they are empty.
        """
        count = 0
        with suppress(OSError, RestoreFailed, ExhaustedError):
            scratch_index = decoded(index, owner.uid)
            files = [file for file in scratch_index.files if file.new and scratch_index.tied is None]
            used = local_files.used_files(sorted({file.place for file in files}), owner.uid, self._proc)

            def call() -> int:
                root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    removed = [
                        file
                        for file in reversed(files)
                        if local_files.unlink_if(root, file.full, _is_unchanged(file, used))
                    ]
                    return len(removed)
                finally:
                    os.close(root)

            count = FileSystemCalls(None, probe_s=_GRACE_S)(lambda: as_user(owner, call))
        return count


def tied(index: bytes, uid: int) -> str | None:
    """Return why the files of an image were not copied; ``None`` if they were. Raises ``RestoreFailed``."""
    return decoded(index, uid).tied


def _write(image_fd: int, index: ScratchIndex) -> bool:
    """Write the list; return ``False`` if it is longer than a restore accepts."""
    data = index.encoded()
    if data is None:
        return False
    try:
        root_directory.write(image_fd, INDEX, data)
    except OSError as error:
        kind = DumpNoRoom if error.errno in root_directory.FULL else DumpFailed
        raise kind(f"the list of node-local files cannot be written: {error.strerror}") from None
    return True


def _without(files: Sequence[ScratchFile], kept_paths: Collection[str]) -> tuple[ScratchFile, ...]:
    """Leave out the files that the image has already, unless another name of them is to be restored."""
    rest = [file for file in files if file.full not in kept_paths]
    if not rest:
        return ()
    linked = {_first_name(file) for file in rest}
    return tuple(
        file for file in files if file.full not in kept_paths or file.kind == "directory" or _first_name(file) in linked
    )


def _first_name(file: ScratchFile) -> tuple[str, str]:
    return file.place, file.target if file.kind == "link" else file.path


def _described(files: Sequence[ScratchFile], *, more: bool = False) -> str:
    """Return for example ``12 files and directories in /tmp, 3.2 GiB``."""
    if not files:
        return "files of the job"
    places = ", ".join(sorted({one_line(file.place) for file in files}))
    total = sum(file.size for file in files)
    count = counted(len(files), "file or directory") if len(files) == 1 else f"{len(files)} files and directories"
    return f"{'at least ' if more else ''}{count} in {places}, {size(total)}"


def _copy_all(root: int, data: int, files: Sequence[ScratchFile], check: Check) -> tuple[ScratchFile, ...] | str:
    """Copy contents with the rights of the user; return the files, or why one cannot be copied.

    Files that were removed or replaced meanwhile are left out.
    """
    files_copied: list[ScratchFile] = []
    names: set[tuple[str, str]] = set()
    end = 0
    with Tops(root) as tops:
        for file in files:
            check()
            if file.kind == "link" and (file.place, file.target) not in names:
                continue
            try:
                copied = _copy(tops, file, data, end, check)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if error.errno in _CANNOT_COPY:
                    return f"{one_line(file.full)}: {error.strerror}"
                raise
            files_copied.append(copied)
            if file.kind == "file":
                names.add((file.place, file.path))
                end += file.size
    os.ftruncate(data, end)
    return tuple(files_copied)


def _copy(tops: Tops, file: ScratchFile, data: int, offset: int, check: Check) -> ScratchFile:
    """Copy one file to an offset. Raises ``OSError``."""
    if file.kind not in ("file", "symlink"):
        return file
    with tops.parent(file) as (parent, name):
        if file.kind == "symlink":
            return replace(file, target=os.readlink(name, dir_fd=parent))
        source = os.open(name, _READ, dir_fd=parent)
    try:
        facts = os.fstat(source)
        if not stat.S_ISREG(facts.st_mode) or facts.st_ino != file.inode:
            raise FileNotFoundError(errno.ENOENT, "was replaced")
        if attributes(source):
            raise PermissionError(errno.EPERM, "has an ACL or extended attributes")
        local_files.copy_range(source, data, file.size, target_at=offset, check=check)
        return replace(file, at=offset)
    finally:
        os.close(source)


def _missing(tops: Tops, files: Sequence[ScratchFile], check: Check) -> list[str]:
    """Return the paths of files of a tied job that are not as it has left them."""
    missing = []
    for file in files:
        check()
        try:
            with tops.parent(file) as (parent, name):
                facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
            # A restart of the node may change the number of the device.
            unchanged = facts.st_ino == file.inode and (
                file.kind != "file" or (facts.st_size, facts.st_mtime_ns) == (file.size, file.mtime_ns)
            )
        except OSError:
            unchanged = False
        if not unchanged:
            missing.append(file.full)
    return missing


def _is(file: ScratchFile, facts: os.stat_result) -> bool:
    return (facts.st_dev, facts.st_ino) == (file.device, file.inode)


def _is_unchanged(file: ScratchFile, used: Collection[tuple[int, int]]) -> Callable[[os.stat_result], bool]:
    if file.kind == "file":
        return partial(local_files.is_unused, file.identity, used)
    return lambda facts: _is(file, facts) and (facts.st_dev, facts.st_ino) not in used
