"""Open files of a process tree, opened in advance with the user's rights and inherited by CRIU.

CRIU opens files by path as root, and while a job is suspended its user may replace any directory or file with a link.
Another process of the user could take such a descriptor before it is checked (``pidfd_getfd(2)``). So no path that a
user can change reaches CRIU. Each path is resolved with the user's rights, below the root of the job's mount namespace,
to an ``O_PATH`` descriptor. Its type, and whether the user may open the file as the job had it open, are checked on
that descriptor, and CRIU opens it through ``/proc/self/fd``. In CRIU's copy of the file table, only terminals in
directories of root's keep a path.

Before the restored tree runs, every descriptor, mapping, executable, and working and root directory of every process is
compared: it must be one of these files, or have no name. inotify watches are compared by the kernel's numbers, which on
overlayfs differ from those of ``stat``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_affinode.base import json_values, kernel_text, process
from slurm_affinode.base.pidfd import ExhaustedError, Id, Process
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files import deleted_files, local_files, unix_sockets
from slurm_affinode.checkpoint.files import deleted_files as remaps_of_dump
from slurm_affinode.checkpoint.files.created_files import FileIdentity
from slurm_affinode.checkpoint.files.file_table import (
    FILES,
    QUEUES,
    READ,
    REMAPS,
    SEARCH,
    WRITE,
    FileTable,
    Needs,
    NotRestored,
    RegularFile,
    Remap,
    RemapKind,
    access_of,
    device_mappings,
    needs,
    packets,
    remaps,
    with_regular_files,
)
from slurm_affinode.checkpoint.image.criu_images import BadImage, read_image
from slurm_affinode.checkpoint.image.private_image import PrivateImage
from slurm_affinode.checkpoint.interface import InheritFd, RestoreFailed, restore_failure
from slurm_affinode.checkpoint.root_directory import filesystem_type
from slurm_affinode.checkpoint.user_files import User, as_user

_IN_DELETE_SELF = 0x400
_IN_CLOEXEC = os.O_CLOEXEC
Inode = tuple[int, int]
"""Device and inode number."""


class Watches:
    """inotify watches of this process, as a context manager."""

    def __enter__(self) -> Self:
        """Create the inotify instance. Raises ``OSError``."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(_IN_CLOEXEC))
        if self._fd < 0:
            raise _error("inotify")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the inotify instance."""
        os.close(self._fd)

    def add(self, fd: int) -> None:
        """Watch a file with the rights of the thread's user. Raises ``OSError``."""
        path = f"/proc/self/fd/{fd}"
        if self._libc.inotify_add_watch(self._fd, path.encode(), _IN_DELETE_SELF) < 0:
            raise _error(path)

    def watched(self) -> set[Inode]:
        """Return the watched files. Raises ``OSError``."""
        return set(watched(Path(f"/proc/self/fdinfo/{self._fd}").read_bytes()))


def watched(fdinfo: bytes) -> Iterator[Inode]:
    """Yield the watches of a descriptor from ``/proc/PID/fdinfo``. Raises ``OSError``."""
    for line in fdinfo.split(b"\n"):
        if line.startswith(b"inotify "):
            facts = dict(word.partition(b":")[::2] for word in line.split()[1:])
            try:
                yield int(facts[b"sdev"], 16), int(facts[b"ino"], 16)
            except (KeyError, ValueError):
                raise OSError(errno.EINVAL, "a watch is not described") from None


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), name)


_SYS_FACCESSAT2 = 439
_AT_EMPTY_PATH, _AT_EACCESS = 0x1000, 0x200
_DELETED = " (deleted)"
_ANSWER_S = 30.0
"""Timeout for the file systems of one job's files."""
_TERMINALS = re.compile(r"/dev/(ptmx|tty|pts/ptmx|pts/\d{1,7})")
_MEMORY_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
"""null, zero, full, random and urandom: opening them has no effect and needs no privilege. CRIU restores no others."""
_NULL = os.makedev(1, 3)
_NAMES_OF_TERMINALS = {os.makedev(5, minor) for minor in (0, 2)}
"""``/dev/tty`` and ``/dev/ptmx``."""
_PSEUDOTERMINAL_MAJORS = tuple(range(136, 144))
_PROC, _SYSFS, _CGROUP, _CGROUP2 = 0x9FA0, 0x62656572, 0x27E0EB, 0x63677270
_KERNELS = {
    _PROC, _SYSFS, 0x64626720, 0x74726163, 0x73636673, 0xCAFE4A11, 0xF97CFF8C, 0x6165676C, 0xDE5E81E4, 0x62656570,
    0x6E736673, 0x42494E4D, 0x7655821, 0x50494446, 0x19800202, 0x43415D53, 0x65735543, 0x6E667364, 0x67596969,
}  # fmt: skip
"""Kernel file systems (``linux/magic.h``) that check the rights of the process that opened a file, here root."""
_PROC_FILES = ("cpuinfo", "diskstats", "loadavg", "meminfo", "stat", "uptime", "version", "vmstat")
"""Files below ``/proc`` that are the same for all users."""
_PROCESS_PATH = re.compile(r"/proc/\d+(/|$)")
_SYSFS_PLACE = "/sys/devices/system/"
INDEX = "file-handles.json"
_UNTRIED = ("/proc/", "/sys/", "/dev/", "/memfd:")
_USES = ("fdinfo-", "mm-", "fs-")
"""Name prefixes of the image files that describe how open files are used."""


def lasting(path: str, *, directory: bool = False) -> bool:
    """Return whether a file may be reopened for a restore, judging by its name.

    Files of a process in ``/proc`` are excluded, and other kernel files that depend on the rights of the opener.
    """
    if directory:
        return _PROCESS_PATH.match(path) is None
    if path.startswith("/proc/"):
        return path.removeprefix("/proc/") in _PROC_FILES
    return not path.startswith("/sys/") or path.startswith((_SYSFS_PLACE, "/sys/fs/cgroup/"))


def device_lasts(facts: os.stat_result) -> bool:
    """Return whether a restore opens a file again if it is a device: others than memory and terminals are not."""
    if stat.S_ISCHR(facts.st_mode):
        return (
            facts.st_rdev in _MEMORY_DEVICES | _NAMES_OF_TERMINALS or os.major(facts.st_rdev) in _PSEUDOTERMINAL_MAJORS
        )
    return not stat.S_ISBLK(facts.st_mode)


def _lasts(file: RegularFile) -> bool:
    return lasting(file.name, directory=file.mode is not None and stat.S_ISDIR(file.mode))


def refusal(directory_fd: int) -> str | None:
    """Return why the open files of a dump could not be restored, or ``None`` if they can. Raises ``BadImage``."""
    names = root_directory.names(directory_fd)
    try:
        table = FileTable.parse(read_image(directory_fd, FILES))
    except NotRestored as error:
        return str(error)
    if REMAPS in names and any(remap.kind is RemapKind.PROCFS for remap in remaps(read_image(directory_fd, REMAPS))):
        return "it has a file of a process open that has ended"
    removed = {inode for name in names if name.startswith("ghost-file-") and (inode := _inode(directory_fd, name))}
    if any(watch.inode in removed for watch in table.watches):
        return "it watches a file that was removed (inotify)"
    for file in table.regular.values():
        if file.id in table.terminals:
            if not _TERMINALS.fullmatch(file.name):
                return f"it has the terminal {file.name} open, which is not one of /dev/pts"
        elif not _lasts(file):
            return f"it has {file.name} open, which cannot be opened again for it"
    queued = set(packets(read_image(directory_fd, QUEUES))) if QUEUES in names else set()
    return unix_sockets.refusal(table, queued)


def _inode(directory_fd: int, name: str) -> int | None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        return deleted_files.Ghost.read(fd).inode
    finally:
        os.close(fd)


def record(directory_fd: int, tree: Collection[Id]) -> None:
    """Record in CRIU's directory the kernel's handles of the regular files that a stopped tree has open.

    By its handle, a file is known to be the same after its size or mode was changed. Files on a file system without
    handles, or on one that does not respond, are left out. Raises ``BadImage``.
    """
    try:
        table = FileTable.parse(read_image(directory_fd, FILES))
    except NotRestored:
        return  # see ``refusal``
    paths = {file.name for file in table.regular.values() if file.mode is not None and stat.S_ISREG(file.mode)}
    handles: dict[str, str] = {}

    def read_handles() -> None:
        for pid, started in tree:
            with suppress(OSError), Process(pid, started=started) as member:
                for link in _links(member):
                    with suppress(OSError):
                        path = member.link(link)
                        if path in paths and path not in handles:
                            fd = member.open(link, os.O_PATH)
                            try:
                                identity = FileIdentity.of(fd)
                            finally:
                                os.close(fd)
                            if identity is not None:
                                handles[path] = identity.handle

    with suppress(OSError, ExhaustedError):
        FileSystemCalls(None, probe_s=_ANSWER_S)(read_handles)
    if handles:
        root_directory.write(directory_fd, INDEX, json.dumps(dict(handles)).encode())


def unreachable(init: Id, tree: Collection[Id], owner: User) -> str | None:
    """Return the path of an open file that its user could not open for a restore, or ``None``.

    Its directory may have been closed to the user since then, or the file itself, if it belongs to another user. Files
    of Slurm's and of the kernel's file systems are left out, and file systems that do not respond. ``init``: PID 1 of
    the job's namespaces. Never raises.
    """

    def find() -> str | None:
        streams = _paths([init])
        with Process(init.pid, started=init.started) as first:
            root = first.open("root", os.O_PATH | os.O_DIRECTORY)
        try:
            paths = {path: access for path, access in _paths(tree).items() if path not in streams}
            return as_user(owner, lambda: next((path for path in paths if not _opens(root, path, paths[path])), None))
        finally:
            os.close(root)

    def _opens(root: int, path: str, access: int) -> bool:
        try:
            fd = root_directory.open_place(root, path)
        except OSError:
            return False
        try:
            return _allowed(fd, os.fstat(fd), Needs(access), owner)
        finally:
            os.close(fd)

    with suppress(OSError, ExhaustedError):
        # Twice: the file may have been renamed meanwhile.
        return FileSystemCalls(None, probe_s=_ANSWER_S)(lambda: find() and find())
    return None


def _paths(tree: Collection[Id]) -> dict[str, int]:
    """Return the paths of the open files of processes, and their access to each."""
    accesses: dict[str, int] = {}
    for pid, started in tree:
        with suppress(OSError), Process(pid, started=started) as member:
            for link in ("cwd", *_links(member)):
                with suppress(OSError):
                    path = member.link(link)
                    if path.startswith("/") and not path.startswith(_UNTRIED) and not path.endswith(_DELETED):
                        accesses[path] = accesses.get(path, 0) | _access_through(member, link)
    return accesses


def _access_through(member: Process, link: str) -> int:
    """Return the access that a descriptor gives; for a mapping or a directory, none beyond finding it."""
    directory, _, number = link.partition("/")
    flags = next(
        (int(line.split()[1], 8) for line in _described(member, number) if line.startswith(b"flags:")), os.O_PATH
    )
    return 0 if directory != "fd" or flags & os.O_PATH else access_of(flags)


def _described(member: Process, number: str) -> list[bytes]:
    try:
        return member.read(f"fdinfo/{number}", _FDINFO).split(b"\n")
    except OSError:
        return []


def _links(member: Process) -> Iterator[str]:
    """Yield the names below the process's directory in ``/proc`` of its descriptors and mapped files."""
    for directory in ("fd", "map_files"):
        with suppress(OSError):
            for name in member.names(directory):
                yield f"{directory}/{name}"


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A file to be opened."""

    file: RegularFile
    needs: Needs
    name: str
    """The name to open: its own, or another name of the same file."""
    remap: Remap | None = None


class Inheritance:
    """The open files of one restore. A context manager: the descriptors are open within it."""

    def __init__(
        self, image: PrivateImage, root_fd: int, namespace_fd: int, user: User, streams: Sequence[InheritFd],
        *, timeout_s: float,
    ) -> None:  # fmt: skip
        """``root_fd``: the root directory of the job. ``namespace_fd``: its mount namespace. ``streams``: descriptors
        that the tree gets unchanged, its standard streams. ``timeout_s``: for all file systems together.
        """
        self._image, self._root, self._namespace = image, root_fd, namespace_fd
        self._timeout_s = timeout_s
        self.user, self.streams = user, streams
        self._stack = ExitStack()
        self._links: list[tuple[str, Inode]] = []
        self._linkable: frozenset[int] = frozenset()
        """Numbers of removed files in the image that were created without a name."""
        self._handles: Mapping[str, str] = {}
        self._changed: set[int] = set()
        """Entries of files whose size or mode has changed."""
        self.fds: list[InheritFd] = list(streams)
        """All descriptors that CRIU inherits."""
        self.rights: dict[Inode, int] = {}
        """The user's rights to each file that is passed."""
        self.watched: set[Inode] = set()
        """Files that the user may watch: device as in ``fdinfo``, inode."""

    def __enter__(self) -> Self:
        """Open the files and remove their names from CRIU's copy of the image. Raises ``RestoreFailed``."""
        try:
            self._prepare()
        except BadImage as error:
            self._stack.close()
            raise RestoreFailed(f"the image is not complete: {error}") from None
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the descriptors."""
        self._stack.close()

    def _prepare(self) -> None:
        image = self._image
        process.raise_file_limit()
        names = image.names()
        table = FileTable.parse(image.read(FILES))
        removed_files = {remap.id: remap for remap in remaps(image.read(REMAPS))} if REMAPS in names else {}
        self._linkable = frozenset(
            remap.source
            for number, remap in removed_files.items()
            if remap.kind is RemapKind.CONTENTS and number in table.regular and table.regular[number].unnamed
        )
        self._handles = _handles(image.read(INDEX)) if INDEX in names else {}
        kinds = {kind: [image.read(name) for name in names if name.startswith(kind)] for kind in _USES}
        mapped = device_mappings(kinds["mm-"])
        used = needs(table, descriptors=kinds["fdinfo-"], memories=kinds["mm-"], places=kinds["fs-"])
        keys = {descriptor.key for descriptor in self.streams}
        given_names = _named_for_dump(image, names)
        renamed: dict[int, str] = {}
        secret = secrets.token_hex(8)  # no file of the job has such a name
        requests: list[_OpenRequest] = []
        for file in table.regular.values():
            if file.id in table.terminals:
                self._check_terminal(file)
            elif file.key not in keys:
                renamed[file.id] = f"/~{secret}.{file.id:x}"
                if file.id in used:
                    # Names made for the dump are treated like those made by CRIU.
                    named = Remap(file.id, RemapKind.LINKED, file.id) if file.name in given_names else None
                    requests.append(_open_request(file, used[file.id], removed_files.get(file.id, named), table))
        for request, fd in zip(requests, self._opened(requests), strict=True):
            self._pass(fd, renamed[request.file.id])
            facts = os.fstat(fd)
            inode = facts.st_dev, facts.st_ino
            self.rights[inode] = self.rights.get(inode, 0) | request.needs.access
        self._watch(table)
        sockets = self._sockets(table)
        inos = {socket.id: socket.ino for socket in table.sockets}
        for number, new_socket in sockets.items():
            self._pass(new_socket.detach(), f"socket:[{inos[number]}]")
        if not mapped <= table.regular.keys() - used.keys():
            raise RestoreFailed("it has a file mapped as a device, and as something else")
        for number in sorted(table.external | mapped):
            renamed[number] = f"/~{secret}.{number:x}"
            self._pass(self._null() if number in table.external else _empty(), renamed[number][1:])
        if table.external:
            for name in names:
                if name.startswith("fdinfo-"):
                    image.replace(name, with_regular_files(image.read(name), table.external))
        passed = [descriptor.key for descriptor in self.fds]
        if len(set(passed)) < len(passed):
            raise RestoreFailed("two of its files have the same name in the image")
        image.replace(FILES, table.rewritten(renamed, sockets.keys(), mapped | self._changed))
        if removed_files:
            image.replace(REMAPS, None)

    def _pass(self, fd: int, key: str) -> None:
        self._stack.callback(os.close, fd)
        self.fds.append(InheritFd(fd, key))

    # --- device files of forked workers

    def _null(self) -> int:
        """Return a descriptor of ``/dev/null``, which replaces an inherited descriptor. Raises ``RestoreFailed``."""
        try:
            fd = root_directory.open_place(self._root, "/dev/null", os.O_NOFOLLOW)
        except OSError as error:
            raise restore_failure("/dev/null: cannot be opened", error) from None
        with root_directory.closed_on_error(fd):
            facts = os.fstat(fd)
            if not stat.S_ISCHR(facts.st_mode) or facts.st_rdev != _NULL:
                raise RestoreFailed("/dev/null: is another device, or none")
            self.rights[facts.st_dev, facts.st_ino] = READ | WRITE
        return fd

    # --- files

    def _opened(self, requests: Sequence[_OpenRequest]) -> list[int]:
        """Return a descriptor for each file. Raises ``RestoreFailed`` and ``BadImage``."""
        names = {
            request.remap.source: f"ghost-file-{request.remap.source:x}.img"
            for request in requests
            if request.remap is not None and request.remap.kind is RemapKind.CONTENTS
        }
        opened = {number: self._image.open(name) for number, name in names.items()}
        # A call that timed out keeps running, with descriptors of its own.
        sources, root = {number: os.dup(fd) for number, fd in opened.items()}, os.dup(self._root)

        def open_all() -> list[int]:
            fds: list[int] = []
            new_sockets: dict[int, int] = {}
            try:
                for request in requests:
                    fds.append(self._open(root, request, sources, new_sockets))  # noqa: PERF401 - some are open when one fails
            except BaseException:
                _close(fds)
                raise
            finally:
                _close([root, *sources.values()])
            return fds

        try:
            fds = FileSystemCalls(None, probe_s=max(1.0, self._timeout_s))(
                lambda: as_user(self.user, open_all), late=_close
            )
        except NoAnswerError as error:
            raise restore_failure("its files cannot be opened", error) from None
        return fds

    def _open(self, root: int, request: _OpenRequest, sources: Mapping[int, int], new_sockets: dict[int, int]) -> int:
        """Open a file with the user's rights. ``new_sockets``: recreated files by number in the image."""
        file, remap = request.file, request.remap
        try:
            if remap is None:
                fd = root_directory.open_place(root, file.name, _follow(file))
            elif remap.kind is RemapKind.LINKED:
                fd = self._open_linked(root, request)
            elif remap.source in new_sockets:
                fd = os.dup(new_sockets[remap.source])
            else:
                source = sources[remap.source]
                fd = deleted_files.make(
                    root, file.name, deleted_files.Ghost.read(source), source, executable=request.needs.executable,
                    linkable=remap.source in self._linkable,
                )  # fmt: skip
                new_sockets[remap.source] = fd
        except OSError as error:
            raise restore_failure(f"{file.name}: cannot be opened by its user", error) from None
        except BadImage as error:
            raise RestoreFailed(f"{file.name}: cannot be created again: {error}") from None
        with root_directory.closed_on_error(fd):
            self._check(fd, request)
        return fd

    def _open_linked(self, root: int, request: _OpenRequest) -> int:
        """Open a file by the name that CRIU gave it.

        If possible, open it by its own name, which is created for a moment, so that ``/proc`` shows that one.
        """
        directory, _, name = request.name.rpartition("/")
        parent = root_directory.open_below(root, directory or "/")
        try:
            fd = root_directory.open_place(parent, name, os.O_NOFOLLOW)
            with root_directory.closed_on_error(fd):
                facts = os.fstat(fd)
                self._links.append((request.name, (facts.st_dev, facts.st_ino)))
            own_directory, _, original = request.file.name.removesuffix(_DELETED).rpartition("/")
            if own_directory == directory and original != name:
                with suppress(OSError):
                    os.link(name, original, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
                    try:
                        again = root_directory.open_place(parent, original, os.O_NOFOLLOW)
                    finally:
                        os.unlink(original, dir_fd=parent)
                    if os.path.sameopenfile(fd, again):
                        os.close(fd)
                        return again
                    os.close(again)
            return fd
        finally:
            os.close(parent)

    def _check(self, fd: int, request: _OpenRequest) -> None:
        """Check that it is the same file and that the user may open it this way. Raises ``RestoreFailed``.

        Runs with the user's rights.
        """
        file, facts = request.file, os.fstat(fd)
        if request.needs.root:
            if not os.path.samestat(facts, os.fstat(self._root)):
                raise RestoreFailed(f"{file.name}: is the root directory of a process, and not that of the job")
            return
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - of a descriptor
        if file.mode is not None and stat.S_IFMT(facts.st_mode) != stat.S_IFMT(file.mode):
            raise RestoreFailed(f"{path}: has another type than before")
        if self._is_same(fd, request):
            self._changed.add(file.id)
        elif request.remap is None or request.remap.kind is RemapKind.LINKED:
            if file.mode is not None and facts.st_mode != file.mode:
                raise RestoreFailed(f"{path}: has bad mode {facts.st_mode:o} (expect {file.mode:o})")
            if file.size is not None and facts.st_size != file.size:
                raise RestoreFailed(f"{path}: has bad size {facts.st_size} (expect {file.size})")
        self._check_type(fd, facts, request, path)
        if not _allowed(fd, facts, request.needs, self.user):
            raise RestoreFailed(
                f"{path} would be open with access that its user does not have: it is not the same file as before"
            )

    def _is_same(self, fd: int, request: _OpenRequest) -> bool:
        """Return whether it is the same file, so that a change of its size or mode matters as little as to a program
        that runs. A program that is executed must not have changed.
        """
        needs, identity = request.needs, FileIdentity.of(fd)
        if request.remap is not None or needs.program or needs.executable or identity is None:
            return False
        return self._handles.get(request.file.name) == identity.handle

    def _check_type(self, fd: int, facts: os.stat_result, request: _OpenRequest, path: str) -> None:
        kind = stat.S_IFMT(facts.st_mode)
        if kind == stat.S_IFCHR:
            if facts.st_rdev not in _MEMORY_DEVICES:
                raise RestoreFailed(f"{path}: is a device, which is not opened again")
        elif kind in (stat.S_IFLNK, stat.S_IFSOCK):
            if not request.file.by_name or request.needs.access or request.needs.program:
                raise RestoreFailed(f"{path}: is not a file that can be opened")
        elif kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO):
            raise RestoreFailed(f"{path}: is a device, which is not opened again")
        if kind == stat.S_IFREG and not self._may_be_reopened(fd, facts, request.needs.access):
            raise RestoreFailed(f"{path}: is a file of the kernel's, which is not opened again")

    def _may_be_reopened(self, fd: int, facts: os.stat_result, access: int) -> bool:
        """Return whether opening the file as root makes no difference."""
        kind = filesystem_type(fd)
        if kind in (_CGROUP, _CGROUP2):
            return not access & WRITE
        if kind == _PROC:
            with suppress(OSError):
                proc = root_directory.open_below(self._root, "/proc")
                try:
                    known_files = (os.stat(name, dir_fd=proc, follow_symlinks=False) for name in _PROC_FILES)
                    return not access & WRITE and any(
                        os.path.samestat(facts, known_facts) for known_facts in known_files
                    )
                finally:
                    os.close(proc)
            return False
        if kind == _SYSFS:
            return not access & WRITE and os.readlink(f"/proc/self/fd/{fd}").startswith(_SYSFS_PLACE)  # noqa: PTH115
        return kind not in _KERNELS

    def _check_terminal(self, file: RegularFile) -> None:
        """Check that a terminal is in a directory of root's, since CRIU opens it by name. Raises ``RestoreFailed``."""
        if not _TERMINALS.fullmatch(file.name):
            raise RestoreFailed(f"{file.name}: is a terminal that is not one of /dev/pts")
        for directory in ("/dev", "/dev/pts"):
            try:
                fd = root_directory.open_place(self._root, directory, os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError as error:
                raise restore_failure(f"{directory}: cannot be opened", error) from None
            try:
                facts = os.fstat(fd)
            finally:
                os.close(fd)
            if facts.st_uid != 0 or facts.st_mode & 0o022:
                raise RestoreFailed(f"{directory}: users other than root may write to it")

    def _sockets(self, table: FileTable) -> dict[int, socket.socket]:
        """Create the named sockets. Raises ``RestoreFailed``."""
        if not unix_sockets.made_before(table):
            return {}
        namespace = os.dup(self._namespace)

        def make() -> dict[int, socket.socket]:
            try:
                return unix_sockets.make(namespace, self.user, table)
            finally:
                os.close(namespace)

        def close(new_sockets: dict[int, socket.socket]) -> None:
            for fd in new_sockets.values():
                fd.close()

        try:
            return FileSystemCalls(None, probe_s=_ANSWER_S)(make, late=close)
        except NoAnswerError as error:
            raise restore_failure("its sockets cannot be made", error) from None

    def _watch(self, table: FileTable) -> None:
        """Resolve the names of watched files, as far as the user may watch them."""
        # CRIU finds these by file handle: the same file or none.
        self.watched = {(watch.device, watch.inode) for watch in table.watches if watch.path is None}
        paths = [watch.path for watch in table.watches if watch.path is not None]
        if not paths:
            return
        root = os.dup(self._root)

        def read_watches() -> set[Inode]:
            with Watches() as watches:
                try:
                    for path in paths:
                        with suppress(OSError):
                            fd = root_directory.open_place(root, path)
                            try:
                                watches.add(fd)
                            finally:
                                os.close(fd)
                finally:
                    os.close(root)
                return watches.watched()

        try:
            self.watched |= FileSystemCalls(None, probe_s=_ANSWER_S)(lambda: as_user(self.user, read_watches))
        except NoAnswerError as error:
            raise restore_failure("its files cannot be opened", error) from None

    # --- afterwards

    def finish(self) -> None:
        """Remove the names that the dump gave to removed files, once they are open. Never raises."""

        def remove() -> None:
            for path, inode in links:
                directory, _, name = path.rpartition("/")
                with suppress(OSError):
                    parent = root_directory.open_below(root, directory or "/")
                    try:
                        facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
                        if (facts.st_dev, facts.st_ino) == inode:
                            os.unlink(name, dir_fd=parent)
                    finally:
                        os.close(parent)
            os.close(root)

        if self._links:
            links, root = list(self._links), os.dup(self._root)
            with suppress(OSError):
                FileSystemCalls(None, probe_s=_ANSWER_S)(lambda: as_user(self.user, remove))


def _empty() -> int:
    """Return a memory file that stays empty, which replaces a mapped device: an access to the mapping is a SIGBUS."""
    fd = os.memfd_create("inherited-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with root_directory.closed_on_error(fd):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _handles(index: bytes) -> dict[str, str]:
    """Decode the record of a dump: path -> handle. Raises ``BadImage``."""
    try:
        stored = json_values.table(json_values.loads(index))
        return {path: json_values.typed(str, handle) for path, handle in stored.items()}
    except ValueError as error:
        raise BadImage(f"{INDEX}: {error}") from None


def _named_for_dump(image: PrivateImage, names: Collection[str]) -> set[str]:
    """Return the paths that removed files have only for the dump."""
    removed = remaps_of_dump.names_of(image.read(remaps_of_dump.INDEX)) if remaps_of_dump.INDEX in names else set()
    local = local_files.names_of(image.read(local_files.INDEX)) if local_files.INDEX in names else set()
    return removed | {path for path in local if path.endswith(_DELETED)}


def _open_request(file: RegularFile, need: Needs, remap: Remap | None, table: FileTable) -> _OpenRequest:
    if need.root and (file.name != "/" or remap is not None):
        raise RestoreFailed(f"{file.name}: is the root directory of a process, and not that of the job")
    if remap is None:
        if not _lasts(file):
            raise RestoreFailed(f"{file.name}: cannot be opened again for it")
        return _OpenRequest(file, need, file.name)
    if remap.kind is RemapKind.CONTENTS:
        return _OpenRequest(file, need, file.name, remap)
    if remap.kind is not RemapKind.LINKED or remap.source not in table.regular:
        raise RestoreFailed(f"{file.name}: was removed, and cannot be created again")
    return _OpenRequest(file, need, table.regular[remap.source].name, remap)


def _follow(file: RegularFile) -> int:
    """Return ``O_NOFOLLOW`` if the open file is itself a symbolic link."""
    return os.O_NOFOLLOW if file.mode is not None and stat.S_ISLNK(file.mode) else 0


def _allowed(fd: int, facts: os.stat_result, need: Needs, user: User) -> bool:
    """Return whether the user may open the file now; an owner always may. Runs with the user's rights."""
    if facts.st_uid == user.uid:
        return True
    if need.access and not accessible(fd, need.access):
        return False
    return not need.program or accessible(fd, READ) or accessible(fd, SEARCH)


def accessible(fd: int, mode: int) -> bool:
    """Return whether the thread's user may access a file this way (``access(2)``, with its file system rights)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_FACCESSAT2, fd, b"", mode, _AT_EMPTY_PATH | _AT_EACCESS) == 0:
        return True
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        return False
    # Before Linux 5.8. Files with side effects on opening have been refused earlier.
    try:
        if mode & SEARCH:
            os.stat("." if stat.S_ISDIR(os.fstat(fd).st_mode) else "", dir_fd=fd)
        if mode & (READ | WRITE):
            flags = {READ: os.O_RDONLY, WRITE: os.O_WRONLY}.get(mode & (READ | WRITE), os.O_RDWR)
            os.close(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError as error:
        return error.errno == errno.ENXIO  # a FIFO without a reader
    return True


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


_FDINFO = 4096
"""Bytes to read of a descriptor's fdinfo: the flags come first, the list of locks may be long."""
_TERMINAL_MAJORS = (5, *_PSEUDOTERMINAL_MAJORS)
_INOTIFY = "anon_inode:inotify"
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    name: str
    """Path below the process's directory in ``/proc``: refers to the file itself, whatever its own name refers to now.
    """
    access: int
    """``R_OK``, ``W_OK`` or both; 0: opened as a path only."""
    key: _Key | None = None
    """For a mapping: the file as ``/proc/PID/maps`` names it, and ``access``."""


class OpenFiles:
    """Checks the open files of stopped processes of one user. A file shared by several is checked once."""

    def __init__(
        self, user: User, passed: Mapping[Inode, int], streams: Collection[int] = (), watched: Collection[Inode] = ()
    ) -> None:
        """``passed``: files and the permitted access. ``streams``: inherited descriptors of the processes, whose files
        are permitted with the access they are open for. ``watched``: device (as in ``fdinfo``) and inode of files that
        may be watched.
        """
        self._user, self._watched = user, watched
        self._rights = dict(passed)
        for fd in streams:
            facts = os.fstat(fd)
            inode = facts.st_dev, facts.st_ino
            self._rights[inode] = self._rights.get(inode, 0) | _access_of(fcntl.fcntl(fd, fcntl.F_GETFL))
        self._permitted_keys: set[_Key] = set()

    def strange(self, process: Process) -> str | None:
        """Return the name of a file of the process that was not passed with this access, or ``None``.

        Files without a name are ignored. Raises ``OSError`` if the files cannot be determined.
        """
        for file in _files(process):
            if file.key is None or file.key not in self._permitted_keys:
                if not self._is_permitted(process, file):
                    return process.link(file.name)
                if file.key is not None:
                    self._permitted_keys.add(file.key)
        for number in process.names("fd"):
            if process.link(f"fd/{number}") == _INOTIFY:
                for device, inode in watched(process.read(f"fdinfo/{number}")):
                    if (device, inode) not in self._watched:
                        return f"inode {inode}, which it watches"
        return None

    def _is_permitted(self, process: Process, file: _Open) -> bool:
        facts = process.facts(file.name)  # the process is stopped, so the name still refers to the same file
        inode = facts.st_dev, facts.st_ino
        if inode in self._rights and not file.access & ~self._rights[inode]:
            return True
        if not facts.st_nlink or not stat.S_IFMT(facts.st_mode):
            return True
        if stat.S_ISCHR(facts.st_mode) and os.major(facts.st_rdev) in _TERMINAL_MAJORS:
            # CRIU has created it, or opened it by its number.
            return facts.st_uid == self._user.uid or self._may_open(process, file)
        return False

    def _may_open(self, process: Process, file: _Open) -> bool:
        fd = process.open(file.name, os.O_PATH)
        try:
            return as_user(self._user, partial(accessible, fd, file.access))
        finally:
            os.close(fd)


def _files(process: Process) -> Iterator[_Open]:
    """Yield descriptors and mapped files that have a name, each mapped file once; then executable, cwd and root."""
    for number in process.names("fd"):
        if process.link(f"fd/{number}").startswith("/"):  # "pipe:[1]" is not a path
            yield _Open(f"fd/{number}", _access_of(_flags(process, number)))
    keys: set[_Key] = set()
    # Not splitlines(): a path may contain a carriage return, and the rest would be parsed as a line chosen by the user.
    for line in process.lines("maps"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            continue
        begin, end = (kernel_text.number(word, 16) for word in fields[0].partition(b"-")[::2])
        if begin is None or end is None:
            raise OSError(errno.EINVAL, "no addresses", "maps")
        mapped = f"map_files/{begin:x}-{end:x}"
        # A private mapping reads, however its file was opened; the mode of a shared one has its access.
        mode = READ if fields[1].endswith(b"p") else _opened(process.facts(mapped, follow=False).st_mode)
        key = (fields[3], fields[4], mode)
        if key not in keys:
            keys.add(key)
            yield _Open(mapped, mode, key)
    for place in ("exe", "cwd", "root"):
        yield _Open(place, 0)


def _access_of(flags: int) -> int:
    return 0 if flags & os.O_PATH else access_of(flags)


def _opened(mode: int) -> int:
    return (READ if mode & stat.S_IRUSR else 0) | (WRITE if mode & stat.S_IWUSR else 0)


def _flags(process: Process, number: str) -> int:
    for line in process.read(f"fdinfo/{number}", _FDINFO).split(b"\n"):
        if line.startswith(b"flags:") and (flags := kernel_text.number(line[6:].strip(), 8)) is not None:
            return flags
    raise OSError(errno.EINVAL, "no flags", number)
