"""Search for the closed files of a job in node-local directories.

A file is the job's if it belongs to its user and was changed (ctime, which no user can set) while the job ran on this
node. If other processes or jobs of the user were on the node meanwhile, its files cannot be told from theirs, and
neither copied nor removed. The same applies to older files below the working directory of a process, to files with
names elsewhere, and to attributes that a copy would lose.

The search has the rights of the user, follows no link and crosses no mount point. It enters directories of the user and
of root alone, and is limited in time and in entries: other users could fill ``/tmp``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurm_affinode.base.pidfd import ExhaustedError, Id, Process, ProcessGoneError, processes
from slurm_affinode.base.text import one_line
from slurm_affinode.base.timeouts import FileSystemCalls, time_limit
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files import local_files
from slurm_affinode.checkpoint.files.local_files import Check
from slurm_affinode.checkpoint.files.scratch_index import ScratchFile
from slurm_affinode.checkpoint.user_files import User, as_user

_FIND_S = 30.0
"""Time limit of a search."""
_GRACE_S = 30.0
_VISITED = 10
"""Entries of the user that a search visits at most, as a multiple of the files that may be copied."""
_LONGEST_PATH = 4095
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LOCAL_TYPES = frozenset((0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E))
"""statfs(2) types of file systems of one node: ext, XFS, Btrfs, tmpfs, overlay, ZFS, F2FS, bcachefs."""


@dataclass(frozen=True, slots=True)
class ScratchSearchResult:
    """The files of a job that were found on its node."""

    files: tuple[ScratchFile, ...] = ()
    """A directory comes before its entries."""
    why_not: str | None = None
    """Why they cannot be copied: the search is not complete, or a copy would differ."""
    ambiguous: str | None = None
    """Why files outside of private directories may belong to another job."""
    private: frozenset[str] = frozenset()
    """Directories of this attempt alone (job_container/tmpfs), which are removed with it."""

    @property
    def total_bytes(self) -> int:
        """Size of the contents."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ScratchSearch:
    """Names to search for, and the places."""

    directories: Sequence[str]
    most: int
    """Number of files and directories that may be copied."""
    owner: User
    periods: Sequence[tuple[float, float]]
    """When the job ran on this node, in epoch seconds."""
    other_jobs_reason: str | None
    """Why other jobs of the user may have created files meanwhile; ``None``: there were none."""
    proc: Path

    def run(self, init: Id, tree: Collection[Id]) -> ScratchSearchResult:
        """Return the files of a stopped job. Never raises: if some are unknown, ``why_not`` says why."""
        walk = _Walk(self, time_limit(_FIND_S, "files of the job"))
        ambiguous: str | None = None
        try:
            with ExitStack() as stack:
                process = stack.enter_context(Process(init.pid, started=init.started, proc=self.proc))
                root = process.open("root", os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, root)
                walk.observe(process, tree)
                target = os.dup(root)

                def call() -> None:
                    try:
                        as_user(self.owner, lambda: walk.run(target))
                    finally:
                        os.close(target)

                # A file system that does not respond delays the other jobs of the node no longer than that.
                FileSystemCalls(None, probe_s=_FIND_S + _GRACE_S)(call)
            if any(file.place not in walk.private for file in walk.files.values()):
                ambiguous = self._ambiguous({process.pid for process in tree} | {init.pid})
        except ExhaustedError as error:
            walk.why_not = str(error)
        except OSError as error:
            walk.why_not = f"its files on this node are not known: {error.strerror or error}"
        return ScratchSearchResult(tuple(walk.files.values()), walk.why_not, ambiguous, frozenset(walk.private))

    def _ambiguous(self, job_pids: Collection[int]) -> str | None:
        for process in processes(proc=self.proc):
            with suppress(ProcessGoneError):
                status = process.status()
                # A process that has ended and was not reaped, such as one of the job itself, creates no files.
                ended = status.get("State", "")[:1] in {"Z", "X"} and status.get("Threads") == "1"
                if process.pid not in job_pids and not ended and str(self.owner.uid) in status.get("Uid", "").split():
                    return "other processes of its user run on this node, and may have created some of them"
        return self.other_jobs_reason


@dataclass(frozen=True, slots=True)
class _Directory:
    path: str
    """Relative to the place."""
    facts: os.stat_result | None
    """``None``: it does not belong to the user."""
    above: _Directory | None
    working: bool
    """It is the working directory of a process of the job, or below it."""


@dataclass(slots=True)
class _Walk:
    """One search, with the rights of the user."""

    search: ScratchSearch
    check: Check
    files: dict[str, ScratchFile] = field(default_factory=dict)
    """Absolute path -> file."""
    why_not: str | None = None
    private: set[str] = field(default_factory=set)
    _working: set[tuple[int, int]] = field(default_factory=set)
    """Device and inode of the working directories of the job."""
    _streams: set[tuple[int, int]] = field(default_factory=set)
    """Its standard streams, which are saved separately."""
    _names: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Place, device and inode of a file with several names -> the first of these."""
    _missing: dict[str, int] = field(default_factory=dict)
    """That name -> number of names that were not found."""
    _tops: set[tuple[int, int]] = field(default_factory=set)
    _visited: int = 0

    def observe(self, init: Process, tree: Collection[Id]) -> None:
        """Look at the processes of the job. Raises ``OSError``."""
        self._streams.update(inode for number in (0, 1, 2) if (inode := _opened(init, f"fd/{number}")) is not None)
        for member in tree:
            with suppress(OSError), Process(member.pid, started=member.started, proc=self.search.proc) as process:
                if (inode := _opened(process, "cwd")) is not None:
                    self._working.add(inode)

    def run(self, root: int) -> None:
        """Search all directories. Raises ``OSError``, also when the time limit has passed."""
        with ExitStack() as stack:
            tops = []
            for place in self.search.directories:
                with suppress(OSError):  # the node may not have this directory
                    fd = root_directory.open_below(root, place)
                    stack.callback(os.close, fd)
                    # Files of a shared file system are there on other nodes, and removing them here would lose them.
                    inode = _inode(os.fstat(fd))
                    if inode in self._tops or root_directory.filesystem_type(fd) not in _LOCAL_TYPES:
                        continue
                    self._tops.add(inode)
                    tops.append((place, fd))
                    with suppress(OSError):
                        if inode != _inode(Path(place).stat()):
                            self.private.add(place)
            for place, fd in tops:
                self._search(place, fd)
        if self.why_not is None and (name := next((name for name, count in self._missing.items() if count), None)):
            self.why_not = f"{one_line(name)} has other names elsewhere"

    def _search(self, place: str, top: int) -> None:
        device = os.fstat(top).st_dev
        pending = [_Directory("", None, None, working=False)]
        while pending and self.why_not is None:
            directory = pending.pop()
            try:
                fd = root_directory.open_beneath(top, directory.path or ".", _DIRECTORY)
            except OSError as error:
                if directory.facts is not None and error.errno not in (errno.ENOENT, errno.EXDEV, errno.ENOTDIR):
                    self.why_not = f"{one_line(f'{place}/{directory.path}')}: {error.strerror}"
                continue
            try:
                if directory.facts is not None and self._is_new(directory.facts) and attributes(fd):
                    self.why_not = f"{one_line(f'{place}/{directory.path}')} has an ACL or extended attributes"
                with os.scandir(fd) as entries:
                    for entry in entries:
                        self.check()
                        if self.why_not is not None:
                            break
                        with suppress(FileNotFoundError):
                            below = self._entry(place, device, directory, entry)
                            if below is not None:
                                pending.append(below)
            finally:
                os.close(fd)

    def _is_new(self, facts: os.stat_result) -> bool:
        return any(first <= facts.st_ctime <= last for first, last in self.search.periods)

    def _entry(self, place: str, device: int, directory: _Directory, entry: os.DirEntry[str]) -> _Directory | None:
        """Record one entry; return it if it is a directory to be searched."""
        facts = entry.stat(follow_symlinks=False)
        path = f"{directory.path}/{entry.name}" if directory.path else entry.name
        is_directory = stat.S_ISDIR(facts.st_mode)
        if is_directory and (facts.st_dev != device or _inode(facts) in self._tops):
            return None
        if facts.st_uid != self.search.owner.uid:
            if is_directory and _inode(facts) in self._working:
                self.why_not = f"its working directory {one_line(f'{place}/{path}')} belongs to another user"
            # Directories of other users are not entered: they could be of any size.
            return _Directory(path, None, directory, working=False) if is_directory and facts.st_uid == 0 else None
        self._visited += 1
        if self._visited > _VISITED * self.search.most:
            self.why_not = f"its user has more than {_VISITED * self.search.most} files there"
            return None
        is_new = self._is_new(facts)
        if directory.working and not is_new:
            self.why_not = f"{one_line(f'{place}/{path}')}, below its working directory, is from before the job"
        if is_directory:
            working = directory.working or _inode(facts) in self._working
            below = _Directory(path, facts, directory, working=working)
            if is_new:
                self._record(place, below)
            return below
        if is_new and _inode(facts) not in self._streams:
            self._record_file(place, path, directory, facts)
        return None

    def _record_file(self, place: str, path: str, directory: _Directory, facts: os.stat_result) -> None:
        target, length = "", 0
        if stat.S_ISREG(facts.st_mode):
            kind, length = "file", facts.st_size
            if facts.st_nlink > 1:
                first = self._names.setdefault((place, *_inode(facts)), path)
                if first != path:
                    kind, target, length = "link", first, 0
                name = f"{place.rstrip('/')}/{first}"
                self._missing[name] = self._missing.get(name, facts.st_nlink) - 1
        elif stat.S_ISLNK(facts.st_mode):
            kind = "symlink"
        elif stat.S_ISFIFO(facts.st_mode):
            kind = "fifo"
        else:
            return  # a socket: those in use are restored separately
        self._record(place, directory)
        self._add(place, path, kind, facts, size_bytes=length, target=target)

    def _record(self, place: str, directory: _Directory) -> None:
        """Record a directory and those above it that belong to the user."""
        chain: list[_Directory] = []
        parent: _Directory | None = directory
        while parent is not None and parent.path and f"{place.rstrip('/')}/{parent.path}" not in self.files:
            chain.append(parent)
            parent = parent.above
        for part in reversed(chain):
            if part.facts is not None:
                self._add(place, part.path, "directory", part.facts, new=self._is_new(part.facts))

    def _add(
        self, place: str, path: str, kind: str, facts: os.stat_result, *, size_bytes: int = 0, target: str = "",
        new: bool = True,
    ) -> None:  # fmt: skip
        file = ScratchFile(
            place, path, kind, stat.S_IMODE(facts.st_mode), facts.st_gid, facts.st_mtime_ns, facts.st_ino,
            facts.st_dev, size_bytes, target=target, new=new,
        )  # fmt: skip
        if len(os.fsencode(file.full)) > _LONGEST_PATH:
            self.why_not = "the path of one of its files is too long"
            return
        self.files[file.full] = file
        if len(self.files) > self.search.most:
            self.why_not = f"more than {self.search.most} files"


def attributes(fd: int) -> bool:
    """Return whether an open file has an ACL or attributes of its user. Those of the system (SELinux) do not count."""
    try:
        return any(name.startswith(("user.", "system.posix_acl")) for name in os.listxattr(fd))
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return False
        raise


def _opened(process: Process, link: str) -> tuple[int, int] | None:
    """Return device and inode of a file of a process, without asking a file server; ``None`` if that fails."""
    with suppress(OSError):
        fd = process.open(link, os.O_PATH)
        try:
            return local_files.known_inode(fd)
        finally:
            os.close(fd)
    return None


def _inode(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino
