"""Open files that CRIU inherits: every file of a process tree is opened before, with the rights of its user.

CRIU opens files by their paths, as root, and while a job sleeps its user may put a link in the place of any directory
or file. Another process of the same user could take such a descriptor before it is checked (``pidfd_getfd(2)``). So no
path that a user can change reaches CRIU. Each is resolved here with the user's rights, below the root of the job's
mount namespace, to a descriptor of the place alone (``O_PATH``): nothing is opened by that. Its type, and whether the
user may open it as the job had it open, are checked on that descriptor; CRIU opens it again through ``/proc/self/fd``.
Its copy of the table of open files has no path left but those of terminals, in directories of root's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from slurm_affinode import process
from slurm_affinode.checkpoint import ghosts, localfiles, rootdir, unixsockets
from slurm_affinode.checkpoint import remaps as remaps_of_dump
from slurm_affinode.checkpoint.asuser import User, as_user
from slurm_affinode.checkpoint.criu_images import BadImage, read_image
from slurm_affinode.checkpoint.filetable import (
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
    needs,
    packets,
    remaps,
)
from slurm_affinode.checkpoint.interface import InheritFd, RestoreFailed
from slurm_affinode.checkpoint.private_image import PrivateImage
from slurm_affinode.checkpoint.rootdir import filesystem_type
from slurm_affinode.checkpoint.watches import Watches
from slurm_affinode.patience import NoAnswerError, Patience

Inode = tuple[int, int]
"""Device and number."""

_SYS_FACCESSAT2 = 439
_AT_EMPTY_PATH, _AT_EACCESS = 0x1000, 0x200
_DELETED = " (deleted)"
_ANSWER_S = 30.0
"""For the file systems of the files of one job."""
_TERMINALS = re.compile(r"/dev/(ptmx|tty|pts/ptmx|pts/\d{1,7})")
_MEMORY_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
"""null, zero, full, random, urandom: to open them does nothing, and they ask for no rights. CRIU restores no others."""
_PROC, _SYSFS, _CGROUP, _CGROUP2 = 0x9FA0, 0x62656572, 0x27E0EB, 0x63677270
_KERNELS = {
    _PROC, _SYSFS, 0x64626720, 0x74726163, 0x73636673, 0xCAFE4A11, 0xF97CFF8C, 0x6165676C, 0xDE5E81E4, 0x62656570,
    0x6E736673, 0x42494E4D, 0x7655821, 0x50494446, 0x19800202, 0x43415D53, 0x65735543, 0x6E667364, 0x67596969,
}  # fmt: skip
"""File systems of the kernel's own (``linux/magic.h``): their files check the rights of the process that opened them,
and that would be root."""
_PROC_FILES = ("cpuinfo", "diskstats", "loadavg", "meminfo", "stat", "uptime", "version", "vmstat")
"""Below ``/proc``: the same for everybody."""
_OF_PROCESS = re.compile(r"/proc/\d+(/|$)")
_SYSFS_PLACE = "/sys/devices/system/"
_USES = ("fdinfo-", "mm-", "fs-")
"""Beginnings of the names of files that say how open files are used."""


def lasting(path: str, *, directory: bool = False) -> bool:
    """Whether a file may be opened again for a restore, as far as its name tells: not below a process in ``/proc``, and
    no other file of the kernel's that asks for rights."""
    if directory:
        return _OF_PROCESS.match(path) is None
    if path.startswith("/proc/"):
        return path.removeprefix("/proc/") in _PROC_FILES
    return not path.startswith("/sys/") or path.startswith((_SYSFS_PLACE, "/sys/fs/cgroup/"))


def _lasts(one: RegularFile) -> bool:
    return lasting(one.name, directory=one.mode is not None and stat.S_ISDIR(one.mode))


def refusal(directory_fd: int) -> str | None:
    """Why the open files of a dump could not be restored; ``None``: they can. Raises ``BadImage``."""
    names = rootdir.names(directory_fd)
    try:
        table = FileTable.parse(read_image(directory_fd, FILES))
    except NotRestored as error:
        return str(error)
    if REMAPS in names and any(one.kind is RemapKind.PROCFS for one in remaps(read_image(directory_fd, REMAPS))):
        return "it has a file of a process open that has ended"
    removed = {inode for name in names if name.startswith("ghost-file-") and (inode := _inode(directory_fd, name))}
    if any(one.inode in removed for one in table.watches):
        return "it watches a file that was removed (inotify)"
    for one in table.regular.values():
        if one.id in table.terminals:
            if not _TERMINALS.fullmatch(one.name):
                return f"it has the terminal {one.name} open, which is not one of /dev/pts"
        elif not _lasts(one):
            return f"it has {one.name} open, which cannot be opened again for it"
    queued = set(packets(read_image(directory_fd, QUEUES))) if QUEUES in names else set()
    return unixsockets.refusal(table, queued)


def _inode(directory_fd: int, name: str) -> int | None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        return ghosts.Ghost.read(fd).inode
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Wish:
    """A file that is to be opened."""

    one: RegularFile
    needs: Needs
    name: str
    """By which it is found: its own, or another name of the same file."""
    remap: Remap | None = None


class Inheritance:
    """For one restore. A context: the descriptors are open within it."""

    def __init__(
        self, image: PrivateImage, root_fd: int, namespace_fd: int, user: User, given: Sequence[InheritFd],
        *, timeout_s: float,
    ) -> None:  # fmt: skip
        """``root_fd``: the root of the job's files. ``namespace_fd``: its mount namespace. ``given``: descriptors that
        the tree gets as they are, its standard streams. ``timeout_s``: for all file systems together.
        """
        self._image, self._root, self._namespace = image, root_fd, namespace_fd
        self._timeout_s = timeout_s
        self.user, self.given = user, given
        self._stack = ExitStack()
        self._links: list[tuple[str, Inode]] = []
        self.fds: list[InheritFd] = list(given)
        """All that CRIU inherits."""
        self.rights: dict[Inode, int] = {}
        """The user's rights to each file that is passed."""
        self.watched: set[Inode] = set()
        """Files that the user may watch: device as in ``fdinfo``, inode."""

    def __enter__(self) -> Self:
        """Open them, and have CRIU's copy of the image name none of them. Raises ``RestoreFailed``."""
        try:
            self._prepare()
        except BadImage as error:
            self._stack.close()
            raise RestoreFailed(f"the image is not complete: {error}") from None
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close them."""
        self._stack.close()

    def _prepare(self) -> None:
        image = self._image
        process.raise_file_limit()
        names = image.names()
        table = FileTable.parse(image.read(FILES))
        gone = {one.id: one for one in remaps(image.read(REMAPS))} if REMAPS in names else {}
        kinds = {kind: [image.read(name) for name in names if name.startswith(kind)] for kind in _USES}
        used = needs(table, descriptors=kinds["fdinfo-"], memories=kinds["mm-"], places=kinds["fs-"])
        keys = {one.key for one in self.given}
        given_names = _named_for_dump(image, names)
        renamed: dict[int, str] = {}
        secret = secrets.token_hex(8)  # no file of the job's has such a name
        wishes: list[_Wish] = []
        for one in table.regular.values():
            if one.id in table.terminals:
                self._check_terminal(one)
            elif one.key not in keys:
                renamed[one.id] = f"/~{secret}.{one.id:x}"
                if one.id in used:
                    # Names made for the dump are treated like those made by CRIU.
                    named = Remap(one.id, RemapKind.LINKED, one.id) if one.name in given_names else None
                    wishes.append(_wish(one, used[one.id], gone.get(one.id, named), table))
        for wish, fd in zip(wishes, self._opened(wishes), strict=True):
            self._pass(fd, renamed[wish.one.id])
            facts = os.fstat(fd)
            inode = facts.st_dev, facts.st_ino
            self.rights[inode] = self.rights.get(inode, 0) | wish.needs.access
        self._watch(table)
        sockets = self._sockets(table)
        inos = {one.id: one.ino for one in table.sockets}
        for number, made in sockets.items():
            self._pass(made.detach(), f"socket:[{inos[number]}]")
        passed = [one.key for one in self.fds]
        if len(set(passed)) < len(passed):
            raise RestoreFailed("two of its files have the same name in the image")
        image.replace(FILES, table.rewritten(renamed, sockets.keys()))
        if gone:
            image.replace(REMAPS, None)

    def _pass(self, fd: int, key: str) -> None:
        self._stack.callback(os.close, fd)
        self.fds.append(InheritFd(fd, key))

    # --- files

    def _opened(self, wishes: Sequence[_Wish]) -> list[int]:
        """A descriptor for each. Raises ``RestoreFailed``, ``BadImage``."""
        names = {
            wish.remap.source: f"ghost-file-{wish.remap.source:x}.img"
            for wish in wishes
            if wish.remap is not None and wish.remap.kind is RemapKind.CONTENTS
        }
        opened = {number: self._image.open(name) for number, name in names.items()}
        # A call that is left behind has descriptors of its own.
        sources, root = {number: os.dup(fd) for number, fd in opened.items()}, os.dup(self._root)

        def open_all() -> list[int]:
            found: list[int] = []
            made: dict[int, int] = {}
            try:
                for wish in wishes:
                    found.append(self._open(root, wish, sources, made))  # noqa: PERF401 - some are open when one fails
            except BaseException:
                _close(found)
                raise
            finally:
                _close([root, *sources.values()])
            return found

        try:
            found = Patience(None, look_s=max(1.0, self._timeout_s))(lambda: as_user(self.user, open_all), late=_close)
        except NoAnswerError as error:
            raise RestoreFailed(f"its files cannot be opened: {error.strerror}") from None
        return found

    def _open(self, root: int, wish: _Wish, sources: Mapping[int, int], made: dict[int, int]) -> int:
        """As the user. ``made``: descriptors of files that were made again, by their numbers in the image."""
        one, remap = wish.one, wish.remap
        try:
            if remap is None:
                fd = rootdir.open_place(root, one.name, _follow(one))
            elif remap.kind is RemapKind.LINKED:
                fd = self._open_linked(root, wish)
            elif remap.source in made:
                fd = os.dup(made[remap.source])
            else:
                source = sources[remap.source]
                fd = ghosts.make(root, one.name, ghosts.Ghost.read(source), source, executable=wish.needs.executable)
                made[remap.source] = fd
        except OSError as error:
            raise RestoreFailed(f"{one.name}: cannot be opened by its user: {error.strerror}") from None
        except BadImage as error:
            raise RestoreFailed(f"{one.name}: cannot be made again: {error}") from None
        with rootdir.closed_on_error(fd):
            self._check(fd, wish)
        return fd

    def _open_linked(self, root: int, wish: _Wish) -> int:
        """By the name that CRIU gave it; under its own for a moment, where that is free, so that ``/proc`` tells it."""
        directory, _, name = wish.name.rpartition("/")
        parent = rootdir.open_below(root, directory or "/")
        try:
            fd = rootdir.open_place(parent, name, os.O_NOFOLLOW)
            with rootdir.closed_on_error(fd):
                facts = os.fstat(fd)
                self._links.append((wish.name, (facts.st_dev, facts.st_ino)))
            own_directory, _, own = wish.one.name.removesuffix(_DELETED).rpartition("/")
            if own_directory == directory and own != name:
                with suppress(OSError):
                    os.link(name, own, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
                    try:
                        again = rootdir.open_place(parent, own, os.O_NOFOLLOW)
                    finally:
                        os.unlink(own, dir_fd=parent)
                    if os.path.sameopenfile(fd, again):
                        os.close(fd)
                        return again
                    os.close(again)
            return fd
        finally:
            os.close(parent)

    def _check(self, fd: int, wish: _Wish) -> None:
        """That it is what it was, and that the user may open it so. As the user. Raises ``RestoreFailed``."""
        one, facts = wish.one, os.fstat(fd)
        if wish.needs.root:
            if not os.path.samestat(facts, os.fstat(self._root)):
                raise RestoreFailed(f"{one.name}: is the root directory of a process, and not that of the job")
            return
        there = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - of a descriptor
        if one.mode is not None and stat.S_IFMT(facts.st_mode) != stat.S_IFMT(one.mode):
            raise RestoreFailed(f"{there}: is of another type than it was")
        if wish.remap is None or wish.remap.kind is RemapKind.LINKED:
            if one.mode is not None and facts.st_mode != one.mode:
                raise RestoreFailed(f"{there}: has bad mode {facts.st_mode:o} (expect {one.mode:o})")
            if one.size is not None and facts.st_size != one.size:
                raise RestoreFailed(f"{there}: has bad size {facts.st_size} (expect {one.size})")
        self._check_type(fd, facts, wish, there)
        if not _allowed(fd, facts, wish.needs, self.user):
            raise RestoreFailed(f"{there} would be open as its user may not open it: it is not the file that it was")

    def _check_type(self, fd: int, facts: os.stat_result, wish: _Wish, there: str) -> None:
        kind = stat.S_IFMT(facts.st_mode)
        if kind == stat.S_IFCHR:
            if facts.st_rdev not in _MEMORY_DEVICES:
                raise RestoreFailed(f"{there}: is a device, which is not opened again")
        elif kind in (stat.S_IFLNK, stat.S_IFSOCK):
            if not wish.one.by_name or wish.needs.access or wish.needs.program:
                raise RestoreFailed(f"{there}: is no file that can be opened")
        elif kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO):
            raise RestoreFailed(f"{there}: is a device, which is not opened again")
        if kind == stat.S_IFREG and not self._may_be_reopened(fd, facts, wish.needs.access):
            raise RestoreFailed(f"{there}: is a file of the kernel's, which is not opened again")

    def _may_be_reopened(self, fd: int, facts: os.stat_result, access: int) -> bool:
        """Whether it makes no difference that root opens it."""
        kind = filesystem_type(fd)
        if kind in (_CGROUP, _CGROUP2):
            return not access & WRITE
        if kind == _PROC:
            with suppress(OSError):
                proc = rootdir.open_below(self._root, "/proc")
                try:
                    known = (os.stat(name, dir_fd=proc, follow_symlinks=False) for name in _PROC_FILES)
                    return not access & WRITE and any(os.path.samestat(facts, one) for one in known)
                finally:
                    os.close(proc)
            return False
        if kind == _SYSFS:
            return not access & WRITE and os.readlink(f"/proc/self/fd/{fd}").startswith(_SYSFS_PLACE)  # noqa: PTH115
        return kind not in _KERNELS

    def _check_terminal(self, one: RegularFile) -> None:
        """CRIU opens it by its name: in directories of root's alone. Raises ``RestoreFailed``."""
        if not _TERMINALS.fullmatch(one.name):
            raise RestoreFailed(f"{one.name}: is a terminal that is not one of /dev/pts")
        for directory in ("/dev", "/dev/pts"):
            try:
                fd = rootdir.open_place(self._root, directory, os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError as error:
                raise RestoreFailed(f"{directory}: cannot be opened: {error.strerror}") from None
            try:
                facts = os.fstat(fd)
            finally:
                os.close(fd)
            if facts.st_uid != 0 or facts.st_mode & 0o022:
                raise RestoreFailed(f"{directory}: others than root may write to it")

    def _sockets(self, table: FileTable) -> dict[int, socket.socket]:
        """Those with names. Raises ``RestoreFailed``."""
        if not unixsockets.made_before(table):
            return {}
        namespace = os.dup(self._namespace)

        def make() -> dict[int, socket.socket]:
            try:
                return unixsockets.make(namespace, self.user, table)
            finally:
                os.close(namespace)

        def close(made: dict[int, socket.socket]) -> None:
            for one in made.values():
                one.close()

        try:
            return Patience(None, look_s=_ANSWER_S)(make, late=close)
        except NoAnswerError as error:
            raise RestoreFailed(f"its sockets cannot be made: {error.strerror}") from None

    def _watch(self, table: FileTable) -> None:
        """Resolve the names of watched files, as far as the user may watch them."""
        # Found by a file handle: the same file, or CRIU finds none.
        self.watched = {(one.device, one.inode) for one in table.watches if one.path is None}
        paths = [one.path for one in table.watches if one.path is not None]
        if not paths:
            return
        root = os.dup(self._root)

        def look() -> set[Inode]:
            with Watches() as watches:
                try:
                    for path in paths:
                        with suppress(OSError):
                            fd = rootdir.open_place(root, path)
                            try:
                                watches.add(fd)
                            finally:
                                os.close(fd)
                finally:
                    os.close(root)
                return watches.found()

        try:
            self.watched |= Patience(None, look_s=_ANSWER_S)(lambda: as_user(self.user, look))
        except NoAnswerError as error:
            raise RestoreFailed(f"its files cannot be opened: {error.strerror}") from None

    # --- afterwards

    def finish(self) -> None:
        """The tree is restored: names that a dump has given to removed files go. Never raises."""

        def remove() -> None:
            for path, inode in links:
                directory, _, name = path.rpartition("/")
                with suppress(OSError):
                    parent = rootdir.open_below(root, directory or "/")
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
                Patience(None, look_s=_ANSWER_S)(lambda: as_user(self.user, remove))


def _named_for_dump(image: PrivateImage, names: Collection[str]) -> set[str]:
    """Paths of names that removed files have for the dump alone."""
    found = remaps_of_dump.names_of(image.read(remaps_of_dump.INDEX)) if remaps_of_dump.INDEX in names else set()
    local = localfiles.names_of(image.read(localfiles.INDEX)) if localfiles.INDEX in names else set()
    return found | {path for path in local if path.endswith(_DELETED)}


def _wish(one: RegularFile, need: Needs, remap: Remap | None, table: FileTable) -> _Wish:
    if need.root and (one.name != "/" or remap is not None):
        raise RestoreFailed(f"{one.name}: is the root directory of a process, and not that of the job")
    if remap is None:
        if not _lasts(one):
            raise RestoreFailed(f"{one.name}: cannot be opened again for it")
        return _Wish(one, need, one.name)
    if remap.kind is RemapKind.CONTENTS:
        return _Wish(one, need, one.name, remap)
    if remap.kind is not RemapKind.LINKED or remap.source not in table.regular:
        raise RestoreFailed(f"{one.name}: was removed, and cannot be made again")
    return _Wish(one, need, table.regular[remap.source].name, remap)


def _follow(one: RegularFile) -> int:
    """A link that is itself open is not followed."""
    return os.O_NOFOLLOW if one.mode is not None and stat.S_ISLNK(one.mode) else 0


def _allowed(fd: int, facts: os.stat_result, need: Needs, user: User) -> bool:
    """Whether the user may do that, as it is now; what the user owns he can open. With the user's rights."""
    if facts.st_uid == user.uid:
        return True
    if need.access and not accessible(fd, need.access):
        return False
    return not need.program or accessible(fd, READ) or accessible(fd, SEARCH)


def accessible(fd: int, how: int) -> bool:
    """Whether the thread's user may open a file so (``access(2)``, with its rights on files)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_FACCESSAT2, fd, b"", how, _AT_EMPTY_PATH | _AT_EACCESS) == 0:
        return True
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        return False
    # Before Linux 5.8. What would do something when it is opened was refused before.
    try:
        if how & SEARCH:
            os.stat("." if stat.S_ISDIR(os.fstat(fd).st_mode) else "", dir_fd=fd)
        if how & (READ | WRITE):
            flags = {READ: os.O_RDONLY, WRITE: os.O_WRONLY}.get(how & (READ | WRITE), os.O_RDWR)
            os.close(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError as error:
        return error.errno == errno.ENXIO  # a FIFO without a reader
    return True


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
