"""Processes and namespaces held by descriptor. The only module that resolves a PID to a process.

A process may end and the kernel may reuse its PID, which a user can bring about on purpose. So a PID is resolved once:
to a descriptor of the process's directory in ``/proc``, which stays with that process and fails after its end
(``ESRCH``), and to a pidfd to signal it or wait for it. Source: proc(5), pidfd_open(2); a PID is not reused before its
process is reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from slurm_affinode.base.errors import UnreachableError

PROC = Path("/proc")
DELETED = " (deleted)"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702  # linux/nsfs.h
_SYS_PIDFD_GETFD = 438
_SYS_KCMP = {"x86_64": 312, "aarch64": 272, "ppc64le": 354, "riscv64": 272}
_KCMP_FILE, _KCMP_EPOLL = 0, 7
_SEIZE = 0x4206
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of linux/proc_ns.h
_END_S = 10.0
_GENERATIONS = 200
_ADOPTED = 8
_POLL_S = 0.005
_CHUNK = 1 << 14
_MOST_BYTES = 256 << 20
"""Of a file that is read as a whole. A process can make some of its files as large as its address space."""
_MOST_VARIABLES = 6 << 20
"""Of an environment: execve(2) permits no larger one, but prctl(2) with ``PR_SET_MM_MAP`` does, to any user."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def _close_all(fds: list[int], close: Callable[[int], None] = os.close) -> None:
    while True:
        try:
            close(fds.pop())
        except IndexError:  # also if another thread closes them
            return
        except OSError:
            continue


class ExhaustedError(UnreachableError):
    """No file descriptor or memory is left to examine a process, or it would take too much: its state is unknown.

    Not an ``OSError``, which callers take for the end of the process.
    """


class ProcessGoneError(ProcessLookupError):
    """The process has ended, or its PID now belongs to another process."""


class NotContainedError(ValueError):
    """A PID namespace is the node's own, or not below it: no operation on all of its processes is allowed."""


class Id(NamedTuple):
    """Identity of a process, unique in this boot."""

    pid: int
    started: int
    """Ticks since boot."""


class Process:
    """One process, even if its PID is reused. A context manager that closes it; otherwise, it is closed as garbage.

    Everything is read through one descriptor of its directory in ``/proc``. After the process has ended, methods raise
    ``ProcessGoneError``; without free descriptors, ``ExhaustedError``. May be used by several threads until it is
    closed.
    """

    def __init__(self, pid: int, *, started: int | None = None, proc: Path = PROC) -> None:
        """Hold the process that has this PID now.

        Raises ``ProcessGoneError`` if there is none, or if it did not start ``started`` ticks after boot, and
        ``OSError`` if no descriptor can be opened.
        """
        self.pid = pid
        self._pidfd = -1
        self._started: int | None = None
        self._lock = threading.Lock()
        self._fds: list[int] = []
        with _gone(pid):
            self._directory = os.open(f"{proc}/{pid}", _DIRECTORY)
        self._fds.append(self._directory)
        if started is not None and not self._is_since(started):
            self.close()
            raise ProcessGoneError(errno.ESRCH, "its number belongs to another process", str(pid))

    def _is_since(self, started: int) -> bool:
        try:
            return self.started == started
        except OSError:
            return False

    @property
    def started(self) -> int:
        """Start time in ticks since boot. Raises ``ProcessGoneError``, ``OSError``."""
        if self._started is None:
            self._started = self.stat().started
        return self._started

    @property
    def id(self) -> Id:
        """Identity of the process. Raises ``ProcessGoneError``, ``OSError``."""
        return Id(self.pid, self.started)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors. Closing it twice is not an error."""
        _close_all(self._fds)

    def __del__(self, close_all: Callable[[list[int]], None] = _close_all) -> None:
        """Close it as garbage: in a tenth of the time of ``weakref.finalize``, and there are thousands of processes.

        The function is a default value because modules are emptied before the last objects are removed.
        """
        close_all(self._fds)

    # --- contents of /proc/PID

    def open(self, name: str, flags: int = _FILE) -> int:
        """Open a file in its directory; the caller closes it. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._directory)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """Return the contents of a file, or its first ``limit`` bytes.

        The process determines the size of ``cmdline`` and ``environ``: read them with a limit. Raises
        ``ProcessGoneError``, ``OSError``; without a limit, ``ExhaustedError`` for a file of more than 256 MiB.
        """
        remaining_bytes = _MOST_BYTES + 1 if limit is None else limit
        parts = []
        fd = self.open(name)
        try:
            with _gone(self.pid):
                while remaining_bytes and (chunk := os.read(fd, min(_CHUNK, remaining_bytes))):
                    parts.append(chunk)
                    remaining_bytes -= len(chunk)
        finally:
            os.close(fd)
        if limit is None and not remaining_bytes:
            why = f"/proc/{self.pid}/{name} is larger than 256 MiB"
            raise ExhaustedError(f"process {self.pid} cannot be examined: {why}")
        return b"".join(parts)

    def lines(self, name: str) -> Iterator[bytes]:
        """Yield the lines of a file of any size, such as ``maps``, without newlines.

        Raises ``ProcessGoneError``, ``OSError``.
        """
        rest = b""
        fd = self.open(name)
        try:
            while True:
                with _gone(self.pid):
                    chunk = os.read(fd, _CHUNK)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
        finally:
            os.close(fd)
        if rest:
            yield rest

    def text_lines(self, name: str) -> Iterator[str]:
        """As ``lines``; bytes that are not UTF-8 are replaced."""
        return (line.decode("utf-8", "replace") for line in self.lines(name))

    def variable(self, name: str) -> str | None:
        """Return a variable of its environment, of several the last; ``None``: it has none in its first 6 MiB.

        The user can change all of it. Raises ``ProcessGoneError``, ``OSError``.
        """
        entries = b"\0" + self.read("environ", _MOST_VARIABLES)
        key = f"\0{name}=".encode()
        position = entries.rfind(key)
        if position < 0:
            return None
        end = entries.find(b"\0", position + 1)
        return entries[position + len(key) : end if end >= 0 else None].decode("utf-8", "replace")

    def text(self, name: str) -> str:
        """As ``read``; bytes that are not UTF-8 are replaced."""
        return self.read(name).decode("utf-8", "replace")

    def text_if_readable(self, name: str) -> str:
        """As ``text``; empty if the file cannot be read or the process has ended."""
        try:
            return self.text(name)
        except OSError:
            return ""

    def link(self, name: str) -> str:
        """Return the text of a symbolic link. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.readlink(name, dir_fd=self._directory)

    def facts(self, name: str = ".", *, follow: bool = True) -> os.stat_result:
        """Return ``stat`` of a file in its directory, or of the directory. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.stat(name, dir_fd=self._directory, follow_symlinks=follow)

    def attribute(self, name: str, attribute: str) -> bytes:
        """Return an extended attribute of a file in its directory. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.getxattr(f"/proc/self/fd/{self._directory}/{name}", attribute)

    def names(self, name: str = ".", most: int | None = None) -> list[str]:
        """Return the names in a directory, the first ``most``. Raises ``ProcessGoneError``, ``OSError``."""
        fd = self.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _gone(self.pid):
                if most is None:
                    return os.listdir(fd)  # noqa: PTH208 - a descriptor
                with os.scandir(fd) as entries:
                    return [entry.name for entry in itertools.islice(entries, most)]
        finally:
            os.close(fd)

    def threads(self) -> list[int]:
        """Return its thread IDs; empty: it has ended. Each ID is its own while the process is held and alive."""
        try:
            return [int(name) for name in self.names("task")]
        except OSError:
            return []

    def status(self, name: str | None = None) -> Mapping[str, str]:
        """Return ``/proc/PID/status`` as key -> value; ``name``: the file of one of its threads.

        The process chooses its name, which comes first. The kernel escapes newlines in it, and only newlines end a
        line. Raises ``ProcessGoneError``, ``OSError``.
        """
        fields = {}
        for row in self.text(name or "status").split("\n"):
            key, colon, value = row.partition(":")
            if colon:
                fields[key] = value.strip()
        return fields

    def stat(self) -> Stat:
        """Return its ``/proc/PID/stat``. Raises ``ProcessGoneError``, ``OSError``."""
        text = self.text("stat")
        # The name, in parentheses, may contain parentheses and blanks.
        head, _, rest = text.rpartition(")")
        fields = rest.split()
        try:
            return Stat(fields[0], int(fields[1]), int(fields[19]), head.partition("(")[2], tuple(fields))
        except (IndexError, ValueError):
            raise ProcessGoneError(errno.ESRCH, "it has no status", str(self.pid)) from None

    def namespace(self, kind: str) -> tuple[int, int] | None:
        """Return device and inode of one of its namespaces; ``None`` if it has ended or is a zombie, which has none."""
        try:
            facts = self.facts(f"ns/{kind}")
        except OSError:
            return None
        return facts.st_dev, facts.st_ino

    def identity(self, kind: str) -> str | None:
        """As ``namespace``, in the form of the link: ``pid:[4026531836]``."""
        try:
            return self.link(f"ns/{kind}")
        except OSError:
            return None

    # --- operations

    @property
    def pidfd(self) -> int:
        """A pidfd of this process, closed with it. Raises ``ProcessGoneError``, ``OSError``."""
        with self._lock:
            if self._pidfd < 0:
                with _gone(self.pid):
                    fd = os.pidfd_open(self.pid)
                self._fds.append(fd)
                # Its directory still responds, so the PID was still its own when the pidfd was opened.
                self.read("stat", 1)
                self._pidfd = fd
            return self._pidfd

    def ended(self) -> bool:
        """Return whether it has ended, reaped or not."""
        try:
            poll = select.poll()  # select(2) takes no descriptor above 1023
            poll.register(self.pidfd, select.POLLIN)
        except ProcessLookupError:
            return True
        return bool(poll.poll(0))

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it ended in time."""
        try:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
        except ProcessLookupError:
            return True
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def check(self) -> None:
        """Raise ``ProcessGoneError`` if it has ended."""
        if self.ended():
            raise ProcessGoneError(errno.ESRCH, "it has ended", str(self.pid))

    def signal(self, number: int) -> None:
        """Send a signal. Raises ``ProcessGoneError``, ``PermissionError``."""
        pidfd = self.pidfd
        with _gone(self.pid):
            signal.pidfd_send_signal(pidfd, number)

    def descriptor(self, number: int) -> int:
        """Return a descriptor of the same open file description as its descriptor ``number``; the caller closes it.

        Requires the right to trace the process. Raises ``ProcessGoneError``, ``OSError``.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.syscall(_SYS_PIDFD_GETFD, self.pidfd, number, 0))
        if fd < 0:
            code = ctypes.get_errno()
            with _gone(self.pid):
                raise OSError(code, os.strerror(code), f"descriptor {number} of process {self.pid}")
        return fd

    def as_socket(self, number: int) -> socket.socket:
        """As ``descriptor``, but return a socket. Raises ``OSError`` also if the descriptor is that of another file.

        The process may have replaced a socket by another file. It is not opened, because to close it may take forever:
        its file system may be that of a user.
        """
        if not self.link(f"fd/{number}").startswith("socket:["):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        descriptor = self.descriptor(number)
        try:
            return socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise

    def shares(self, number: int, other_process: Process, other_fd: int) -> bool:
        """Return whether a descriptor has the open file description of a descriptor of another process (``kcmp(2)``).

        False if one of the descriptors is closed. Raises ``ProcessGoneError``, ``OSError``.
        """
        order, code = _compare(self.pid, other_process.pid, _KCMP_FILE, number, other_fd)
        for process in (self, other_process):
            process.check()  # not ended, so the PIDs were theirs during the call
        if order < 0 and code != errno.EBADF:
            raise OSError(code, os.strerror(code), f"descriptor {number} of process {self.pid}")
        return order == 0

    def living_threads(self) -> Iterator[int]:
        """Yield the IDs of its threads that have not ended; the first one of a process may end before the others."""
        for thread in self.threads():
            with contextlib.suppress(OSError):
                if self.read(f"task/{thread}/stat").rpartition(b")")[2].split()[0] not in b"ZX":
                    yield thread

    def is_polled(self, number: int, entry: tuple[int, int, int]) -> bool:
        """Return whether a descriptor is the file of an entry of an epoll instance (``kcmp(2)``). Raises ``OSError``.

        ``entry``: the descriptor of the instance, that with which the file was registered, and the number of earlier
        entries with the same one.
        """
        slot = (ctypes.c_uint32 * 3)(*entry)  # struct kcmp_epoll_slot
        order, code = _compare(self.pid, self.pid, _KCMP_EPOLL, number, ctypes.addressof(slot))
        if order < 0 and code not in (errno.EBADF, errno.ENOENT):  # closed meanwhile
            raise OSError(code, os.strerror(code), f"descriptor {number} of process {self.pid}")
        return order == 0

    def has_in_common(self, part: SharedPart, pid: int) -> bool:
        """Return whether it shares an object with another process (``kcmp(2)``); ``False`` if one of them has ended.

        Raises ``OSError``.
        """
        return _compare(self.pid, pid, part)[0] == 0

    def threads_share(self, part: SharedPart) -> bool:
        """Return whether all of its threads have one object in common (``kcmp(2)``). Raises ``OSError``."""
        threads = list(self.living_threads())
        apart = {thread for thread in threads[1:] if _compare(threads[0], thread, part)[0] > 0}
        return apart.isdisjoint(self.living_threads())


class SharedPart(IntEnum):
    """An object that threads or processes may share (clone(2)): ``enum kcmp_type`` in ``linux/kcmp.h``."""

    MEMORY = 1
    DESCRIPTORS = 2
    DIRECTORIES = 3
    """Working and root directory, and umask."""


def _compare(pid: int, other_pid: int, kind: int, first: int = 0, second: int = 0) -> tuple[int, int]:
    """Return the result of kcmp(2) for two threads and, if it is negative, ``errno``. Raises ``OSError``."""
    call = _SYS_KCMP.get(os.uname().machine)
    if call is None:
        raise OSError(errno.ENOSYS, "the number of kcmp(2) on this machine is not known")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_ulong(first), ctypes.c_ulong(second))
    return int(libc.syscall(call, pid, other_pid, kind, *arguments)), ctypes.get_errno()


@dataclass(frozen=True, slots=True)
class Stat:
    """``/proc/PID/stat``."""

    state: str
    """``R``, ``S``, ``D``, ``T`` (stopped), ``t`` (traced), ``Z``, ``X``, ..."""
    parent: int
    started: int
    """Ticks since boot."""
    name: str
    fields: tuple[str, ...]
    """All fields after the name, beginning with field 3 of proc(5)."""


class _gone:  # noqa: N801 - a function in all but speed: every file of every process is read in it
    """Translate ESRCH, which a held process returns after its end, and ENOENT of an unused PID; and exhaustion."""

    __slots__ = ("_pid",)

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ProcessGoneError):
            return
        if isinstance(error, ProcessLookupError):
            raise ProcessGoneError(errno.ESRCH, "it has ended", str(self._pid)) from error
        if isinstance(error, FileNotFoundError):
            if str(error.filename).rpartition("/")[2] == str(self._pid):
                raise ProcessGoneError(errno.ESRCH, "there is no such process", str(self._pid)) from error
        elif isinstance(error, OSError):
            _check_exhausted(error, f"process {self._pid}")


def _check_exhausted(error: OSError, what: str) -> None:
    """Raise ``ExhaustedError`` if no descriptors or memory are left."""
    if error.errno in _EXHAUSTED:
        hint = "raise LimitNOFILE= of the service, or find out which files it keeps open"
        raise ExhaustedError(f"{what} cannot be examined: {error.strerror}", hint=hint) from error


def pids(proc: Path = PROC) -> Iterator[int]:
    """Yield the PIDs of all processes at this moment. Raises ``ExhaustedError``, ``OSError``."""
    try:
        names = os.listdir(proc)  # noqa: PTH208 - a string for each of thousands
    except OSError as error:
        _check_exhausted(error, str(proc))
        raise
    for name in names:
        if name.isdecimal() and name.isascii():
            yield int(name)


def processes(numbers: Iterable[int] | None = None, *, proc: Path = PROC) -> Iterator[Process]:
    """Hold processes one by one, each until the next is requested; skip those that have ended or are not permitted.

    Raises ``ExhaustedError``, ``OSError``.
    """
    for pid in pids(proc) if numbers is None else numbers:
        with contextlib.suppress(ProcessGoneError, PermissionError), Process(pid, proc=proc) as process:
            yield process


def processes_elsewhere(*, proc: Path = PROC) -> Iterator[Process]:
    """As ``processes``, but only those that may be in another PID namespace than this process.

    A process of this namespace is not one of a job: no process enters a namespace above its own, not even a child of
    it. To read that takes a tenth of the time of holding a process, and almost all processes of a node are here.
    """
    current = own_identity(proc)
    return processes((pid for pid in pids(proc) if _identity(proc, pid) != current), proc=proc)


def ancestors(process: Process, *, proc: Path = PROC) -> Iterator[Process]:
    """Yield the parent of a process, its parent and so on, each held until the next is requested; PID 1 is the last.

    A parent may end, and its PID may be reused, between the reading of its child and the opening of the descriptor. A
    process that the child still names after it was opened is the parent: an orphan is adopted by an ancestor, which is
    older. Ends early if a process ends or is repeatedly adopted in the meantime.
    """
    child = process
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for _ in range(_GENERATIONS):
            for _ in range(_ADOPTED):
                stat = child.stat()
                if stat.parent == 0:
                    return
                with contextlib.suppress(ProcessGoneError):
                    parent = Process(stat.parent, proc=proc)
                    if child.stat().parent == stat.parent and parent.started <= stat.started:
                        break
                    parent.close()
            else:
                return
            stack.callback(parent.close)
            yield parent
            if child is not process:
                child.close()
            child = parent


def own_namespace(kind: str, *, proc: Path = PROC) -> tuple[int, int]:
    """Return device and inode of a namespace of this process."""
    facts = (proc / "self" / "ns" / kind).stat()
    return facts.st_dev, facts.st_ino


class Number(NamedTuple):
    """A process in a namespace."""

    inner: int
    """Its PID in the namespace."""
    pid: int
    started: int


class Namespace:
    """A job's PID namespace, held by descriptors of its PID 1, other namespaces and root directory.

    A namespace that is held keeps its inode number, which alone identifies its other processes. When PID 1 ends, the
    kernel kills all processes in it. May be used by several threads; descriptors are closed with the object.
    """

    def __init__(self, init: Process, *, proc: Path = PROC) -> None:
        """``init``: its PID 1, which the object owns from now on.

        Raises ``NotContainedError`` if the namespace is the initial one, this process's own, or not below it, or if
        another user namespace owns it: a user could create one. ``ProcessGoneError``, ``OSError``: see ``Process``.
        """
        self.init = init
        self._proc = proc
        self._fds: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        if proc == PROC:
            init.check()  # a zombie no longer has namespaces
        self.identity = init.link("ns/pid")
        if self.identity == own_identity(proc):
            raise NotContainedError(f"process {init.pid} is in this node's own PID namespace")
        self.pid_fd = self.mount_fd = self.root_fd = -1
        if proc == PROC:
            self._hold()

    @property
    def id(self) -> Id:
        """Identity of its PID 1."""
        return Id(self.init.pid, self.init.started)

    def _hold(self) -> None:
        self.pid_fd, self.mount_fd = self._keep("ns/pid"), self._keep("ns/mnt")
        # In a mount namespace where users may mount, users choose the programs and libraries.
        for name, fd in (("PID", self.pid_fd), ("mount", self.mount_fd)):
            with _gone(self.init.pid):
                owner = fcntl.ioctl(fd, _NS_GET_USERNS)
            try:
                facts = os.fstat(owner)
            finally:
                os.close(owner)
            if (facts.st_dev, facts.st_ino) != own_namespace("user"):
                raise NotContainedError(f"the {name} namespace of process {self.init.pid} is of a user namespace")
        if os.fstat(self.pid_fd).st_ino == _INITIAL_PID_NAMESPACE or not _is_below(self.pid_fd):
            raise NotContainedError(f"the PID namespace of process {self.init.pid} is not below this one")
        self.root_fd = self._keep("root", os.O_PATH | os.O_DIRECTORY)
        self.init.check()  # all of these are its own, then

    def _keep(self, name: str, flags: int = os.O_RDONLY) -> int:
        fd = self.init.open(name, flags)
        self._fds.append(fd)
        return fd

    def check(self) -> None:
        """Raise ``ProcessGoneError`` if its PID 1, and with it every process of the job, has ended."""
        self.init.check()

    def processes(self) -> Iterator[tuple[int, Process]]:
        """Yield each process except PID 1 with its PID in the namespace; held until the next is requested."""
        for process in processes_elsewhere(proc=self._proc):
            if process.pid == self.init.pid:
                continue
            with contextlib.suppress(OSError, LookupError, ValueError):
                if process.link("ns/pid") == self.identity:
                    yield int(process.status()["NSpid"].split()[-1]), process

    def all_processes(self) -> Iterator[Process]:
        """Yield each process except PID 1, including those in PID namespaces below this one (containers)."""
        below_init = {self.identity: True}
        for process in processes_elsewhere(proc=self._proc):
            if process.pid == self.init.pid:
                continue
            with contextlib.suppress(OSError):
                space = process.link("ns/pid")
                if space not in below_init:
                    below_init[space] = self._hangs_below(process, below_init)
                if below_init[space]:
                    yield process

    @staticmethod
    def _hangs_below(process: Process, below_init: Mapping[str, bool]) -> bool:
        """Return whether the namespace of a process is below this one, as ``below_init`` of its nearest ancestor."""
        with contextlib.ExitStack() as stack:
            try:
                fd = process.open("ns/pid")
                stack.callback(os.close, fd)
                while True:
                    # EPERM: the parent is the parent of our own namespace, and not visible from here.
                    fd = fcntl.ioctl(fd, _NS_GET_PARENT)
                    stack.callback(os.close, fd)
                    below = below_init.get(f"pid:[{os.fstat(fd).st_ino}]")
                    if below is not None:
                        return below
            except OSError as error:
                _check_exhausted(error, f"the namespaces of process {process.pid}")
                return False

    def numbers(self) -> list[Number]:
        """Return the processes except PID 1, sorted by PID in the namespace, including zombies."""
        members = []
        for inner, process in self.processes():
            with contextlib.suppress(ProcessGoneError):  # since its status was read
                members.append(Number(inner, process.pid, process.started))
        return sorted(members)

    def members(self) -> dict[int, int]:
        """Return PID in the namespace -> PID here, for all but PID 1."""
        return {number.inner: number.pid for number in self.numbers()}

    def send(self, number: Number, signum: int) -> bool:
        """Signal a process of the namespace; return whether it existed."""
        with contextlib.suppress(OSError), Process(number.pid, started=number.started, proc=self._proc) as process:
            if process.link("ns/pid") == self.identity:
                process.signal(signum)
                return True
        return False

    def kill_all(self, timeout_s: float = _END_S) -> bool:
        """Kill every process of the namespace except its PID 1, which reaps them; return whether all are gone."""
        deadline = time.monotonic() + timeout_s
        while remaining := self.numbers():
            for number in remaining:  # processes of a tree before CRIU, which may hold them
                self.send(number, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def own_identity(proc: Path = PROC) -> str | None:
    """Return the identity of this process's PID namespace (``pid:[4026531836]``); ``None``: not known."""
    return _identity(proc, "self")


def _identity(proc: Path, process: int | str) -> str | None:
    try:
        return os.readlink(f"{proc}/{process}/ns/pid")  # noqa: PTH115 - for each process of a node
    except OSError:
        return None


def _is_below(namespace_fd: int) -> bool:
    """Return whether a PID namespace is below that of this process."""
    current = own_namespace("pid")
    with contextlib.ExitStack() as stack:
        fd = namespace_fd
        while True:
            try:
                fd = fcntl.ioctl(fd, _NS_GET_PARENT)
            except OSError as error:  # EPERM: it is the parent of our own namespace, or beside it
                _check_exhausted(error, "a PID namespace")
                return False
            stack.callback(os.close, fd)
            facts = os.fstat(fd)
            if (facts.st_dev, facts.st_ino) == current:
                return True


_open_namespaces: dict[Id, Namespace] = {}
_held_lock = threading.Lock()


def namespace(init: Id, *, process: Process | None = None, proc: Path = PROC) -> Namespace:
    """Return the namespace with this PID 1. While PID 1 is alive, all callers share the same descriptors.

    ``process``: PID 1, if it is held already; the namespace then owns it. Raises ``ProcessGoneError``,
    ``NotContainedError``, ``OSError``.
    """
    if proc != PROC:
        return Namespace(process or Process(init.pid, started=init.started, proc=proc), proc=proc)
    with _held_lock:
        for ended_init in [key for key, entry in _open_namespaces.items() if entry.init.ended()]:
            del _open_namespaces[ended_init]  # its users still hold it
        cached_namespace = _open_namespaces.get(init)
    if cached_namespace is None:
        new_namespace = Namespace(process or Process(init.pid, started=init.started))
        with _held_lock:
            cached_namespace = _open_namespaces.setdefault(init, new_namespace)
    return cached_namespace
