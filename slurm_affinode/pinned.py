"""Processes and namespaces held by descriptor. The only module that turns a PID into a process.

A process may end and the kernel may give its number to another one, which a user can bring about on purpose. So a
number is resolved once: to a descriptor of the process's directory below ``/proc``, which stays with that process and
fails after its end (``ESRCH``), and to a pidfd where it is to be signaled or waited for. Source: proc(5),
pidfd_open(2); a number is not used again before its process is reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

PROC = Path("/proc")
DELETED = " (deleted)"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702  # linux/nsfs.h
_SYS_PIDFD_GETFD = 438
_SEIZE = 0x4206
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of linux/proc_ns.h
_END_S = 10.0
_GENERATIONS = 200
_ADOPTED = 8
_POLL_S = 0.005


class ProcessGoneError(ProcessLookupError):
    """The process has ended, or its number belongs to another one by now."""


class NotContainedError(ValueError):
    """A PID namespace is the node's own, or not below it: nothing is done to all that is in it."""


class Id(NamedTuple):
    """Identity of a process, unique in this boot."""

    pid: int
    started: int
    """Ticks since boot."""


class Process:
    """One process, however often its number is given to others. A context that closes it; otherwise, garbage does.

    Everything that is read comes through one descriptor of its directory in ``/proc``. Once the process is gone,
    methods raise ``ProcessGoneError``. May be used by several threads until it is closed.
    """

    def __init__(self, pid: int, *, started: int | None = None, proc: Path = PROC) -> None:
        """Hold the process that has this number now. Raises ``ProcessGoneError`` where there is none, or where it did
        not start ``started`` ticks after boot, and ``OSError`` where no descriptor can be had.
        """
        self.pid = pid
        self._pidfd = -1
        self._started: int | None = None
        self._lock = threading.Lock()
        with _gone(pid):
            self._directory = os.open(proc / str(pid), _DIRECTORY)
        self._fds = [self._directory]
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
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
        """When it began, in ticks since boot. Raises ``ProcessGoneError``, ``OSError``."""
        if self._started is None:
            self._started = self.stat().started
        return self._started

    @property
    def id(self) -> Id:
        """Its identity. Raises ``ProcessGoneError``, ``OSError``."""
        return Id(self.pid, self.started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it. Closing it twice is no error."""
        self._finalizer()

    # --- what is below /proc/PID

    def open(self, name: str, flags: int = _FILE) -> int:
        """Open what is below its directory; the caller closes it. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._directory)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The contents of a file, at most ``limit`` bytes. Raises ``ProcessGoneError``, ``OSError``."""
        fd = self.open(name)
        with _gone(self.pid), os.fdopen(fd, "rb", buffering=0) as file:
            if limit is None:
                return file.read()
            data = b""
            while len(data) < limit and (chunk := file.read(limit - len(data))):
                data += chunk
            return data

    def text(self, name: str) -> str:
        """As ``read``; bytes that are not UTF-8 are replaced."""
        return self.read(name).decode("utf-8", "replace")

    def link(self, name: str) -> str:
        """Where a symbolic link leads, by its text alone. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.readlink(name, dir_fd=self._directory)

    def facts(self, name: str = ".", *, follow: bool = True) -> os.stat_result:
        """``stat`` of what is below its directory, or of the directory. Raises ``ProcessGoneError``, ``OSError``."""
        with _gone(self.pid):
            return os.stat(name, dir_fd=self._directory, follow_symlinks=follow)

    def names(self, name: str = ".") -> list[str]:
        """Names in a directory. Raises ``ProcessGoneError``, ``OSError``."""
        fd = self.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _gone(self.pid):
                return os.listdir(fd)  # noqa: PTH208 - a descriptor
        finally:
            os.close(fd)

    def threads(self) -> list[int]:
        """Numbers of its threads; none: it is gone. Each is its own as long as the process is held and lives."""
        try:
            return [int(name) for name in self.names("task")]
        except OSError:
            return []

    def status(self, name: str | None = None) -> Mapping[str, str]:
        """``/proc/PID/status`` as key -> value; ``name``: that of one of its threads.

        The process chooses its name, which comes first: the kernel escapes newlines in it, and no other line ends.
        Raises ``ProcessGoneError``, ``OSError``.
        """
        rows = (row.partition(":") for row in self.text(name or "status").split("\n"))
        return {key: value.strip() for key, colon, value in rows if colon}

    def stat(self) -> Stat:
        """Its ``/proc/PID/stat``. Raises ``ProcessGoneError``, ``OSError``."""
        text = self.text("stat")
        # The name, in parentheses, may hold parentheses and blanks itself.
        head, _, rest = text.rpartition(")")
        fields = rest.split()
        try:
            return Stat(fields[0], int(fields[1]), int(fields[19]), head.partition("(")[2], tuple(fields))
        except (IndexError, ValueError):
            raise ProcessGoneError(errno.ESRCH, "it has no status", str(self.pid)) from None

    def namespace(self, kind: str) -> tuple[int, int] | None:
        """Device and inode of one of its namespaces; ``None`` where it is gone, or has none any more (a zombie)."""
        try:
            facts = self.facts(f"ns/{kind}")
        except OSError:
            return None
        return facts.st_dev, facts.st_ino

    def identity(self, kind: str) -> str | None:
        """As ``namespace``, in the form of its link: ``pid:[4026531836]``."""
        try:
            return self.link(f"ns/{kind}")
        except OSError:
            return None

    # --- acting on it

    @property
    def pidfd(self) -> int:
        """A pidfd of this very process, closed with it. Raises ``ProcessGoneError``, ``OSError``."""
        with self._lock:
            if self._pidfd < 0:
                with _gone(self.pid):
                    fd = os.pidfd_open(self.pid)
                self._fds.append(fd)
                # Its directory still responds, so the number was still its own when the pidfd was opened.
                self.read("stat", 1)
                self._pidfd = fd
            return self._pidfd

    def ended(self) -> bool:
        """It has ended, whether or not it was reaped."""
        try:
            look = select.poll()  # select(2) takes no descriptor above 1023
            look.register(self.pidfd, select.POLLIN)
        except ProcessLookupError:
            return True
        return bool(look.poll(0))

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came in time."""
        try:
            look = select.poll()
            look.register(self.pidfd, select.POLLIN)
        except ProcessLookupError:
            return True
        return bool(look.poll(max(0.0, timeout_s) * 1000))

    def check(self) -> None:
        """Raises ``ProcessGoneError`` where it has ended."""
        if self.ended():
            raise ProcessGoneError(errno.ESRCH, "it has ended", str(self.pid))

    def signal(self, number: int) -> None:
        """Send a signal. Raises ``ProcessGoneError``, ``PermissionError``."""
        pidfd = self.pidfd
        with _gone(self.pid):
            signal.pidfd_send_signal(pidfd, number)

    def descriptor(self, number: int) -> int:
        """A descriptor of the same open file description as its descriptor ``number``; the caller closes it.

        Needs the right to trace the process. Raises ``ProcessGoneError``, ``OSError``.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        found = int(libc.syscall(_SYS_PIDFD_GETFD, self.pidfd, number, 0))
        if found < 0:
            code = ctypes.get_errno()
            with _gone(self.pid):
                raise OSError(code, os.strerror(code), f"descriptor {number} of process {self.pid}")
        return found


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
    """All behind the name: field 3 of proc(5) is the first."""


@contextlib.contextmanager
def _gone(pid: int) -> Iterator[None]:
    """Translate ESRCH, which a held process gives when it has ended, and ENOENT of an unused number."""
    try:
        yield
    except ProcessGoneError:
        raise
    except ProcessLookupError as error:
        raise ProcessGoneError(errno.ESRCH, "it has ended", str(pid)) from error
    except FileNotFoundError as error:
        if str(error.filename).rpartition("/")[2] == str(pid):
            raise ProcessGoneError(errno.ESRCH, "there is no such process", str(pid)) from error
        raise


def _close_all(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


def pids(proc: Path = PROC) -> Iterator[int]:
    """Numbers of all processes, as they are now."""
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdecimal() and entry.name.isascii():
                yield int(entry.name)


def processes(numbers: Iterable[int] | None = None, *, proc: Path = PROC) -> Iterator[Process]:
    """Hold one process after the other, each until the next one is asked for; those that are gone are left out."""
    for pid in pids(proc) if numbers is None else numbers:
        with contextlib.suppress(OSError), Process(pid, proc=proc) as process:
            yield process


def ancestors(process: Process, *, proc: Path = PROC) -> Iterator[Process]:
    """The parent of a process, its parent and so on, each held until the next one is asked for; PID 1 is the last.

    A parent may end, and its number may be given away, between the look at its child and the descriptor. A process
    whose child still names it after it was opened is the parent: one that is adopted goes to an ancestor, which is
    older than itself. Ends early where a process ends or is adopted again and again meanwhile.
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
    """Device and inode of a namespace of this process."""
    facts = (proc / "self" / "ns" / kind).stat()
    return facts.st_dev, facts.st_ino


class Number(NamedTuple):
    """A process of a namespace."""

    inner: int
    """Its number there."""
    pid: int
    started: int


class Namespace:
    """A job's PID namespace: its PID 1, and with it the namespaces and the root directory, held by descriptor.

    A namespace that is held keeps its inode number, which alone identifies its other processes. When PID 1 ends, the
    kernel kills everything in it. May be used by several threads; descriptors go with the object.
    """

    def __init__(self, init: Process, *, proc: Path = PROC) -> None:
        """``init``: its PID 1, which belongs to the object from now on.

        Raises ``NotContainedError`` where the namespace is the initial one, this process's own, or not below it, and
        where another user namespace owns it: a user could make it. ``ProcessGoneError``, ``OSError``: see ``Process``.
        """
        self.init = init
        self._proc = proc
        self._fds: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        if proc == PROC:
            init.check()  # a zombie has no namespaces any more
        self.identity = init.link("ns/pid")
        if self.identity == own_identity(proc):
            raise NotContainedError(f"process {init.pid} is in this node's own PID namespace")
        self.pid_fd = self.mount_fd = self.root_fd = -1
        if proc == PROC:
            self._hold()

    @property
    def id(self) -> Id:
        """Of its PID 1."""
        return Id(self.init.pid, self.init.started)

    def _hold(self) -> None:
        self.pid_fd, self.mount_fd = self._keep("ns/pid"), self._keep("ns/mnt")
        # A namespace of mounts in which a user may mount shows programs and libraries that a user has chosen.
        for name, fd in (("PID", self.pid_fd), ("mount", self.mount_fd)):
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
        """Raises ``ProcessGoneError`` where its PID 1, and with it every process of the job, has ended."""
        self.init.check()

    def processes(self) -> Iterator[tuple[int, Process]]:
        """Each process but PID 1, with its number in the namespace; held until the next one is asked for."""
        for process in processes(proc=self._proc):
            if process.pid == self.init.pid:
                continue
            with contextlib.suppress(OSError, LookupError, ValueError):
                if process.link("ns/pid") == self.identity:
                    yield int(process.status()["NSpid"].split()[-1]), process

    def everybody(self) -> Iterator[Process]:
        """As ``processes``, with those in PID namespaces below this one (containers)."""
        known = {self.identity: True}
        for process in processes(proc=self._proc):
            if process.pid == self.init.pid:
                continue
            with contextlib.suppress(OSError):
                space = process.link("ns/pid")
                if space not in known:
                    known[space] = self._hangs_below(process, known)
                if known[space]:
                    yield process

    @staticmethod
    def _hangs_below(process: Process, known: Mapping[str, bool]) -> bool:
        """Whether the namespace of a process is below one of these that are."""
        with contextlib.ExitStack() as stack:
            try:
                fd = process.open("ns/pid")
                stack.callback(os.close, fd)
                while True:
                    # EPERM: the parent is our own namespace's parent, so it cannot be seen from here.
                    fd = fcntl.ioctl(fd, _NS_GET_PARENT)
                    stack.callback(os.close, fd)
                    found = known.get(f"pid:[{os.fstat(fd).st_ino}]")
                    if found is not None:
                        return found
            except OSError:
                return False

    def numbers(self) -> list[Number]:
        """Processes but PID 1, by their numbers in the namespace, zombies among them."""
        return sorted(Number(inner, process.pid, process.started) for inner, process in self.processes())

    def members(self) -> dict[int, int]:
        """PID in the namespace -> PID here, of all but PID 1."""
        return {one.inner: one.pid for one in self.numbers()}

    def send(self, number: Number, signum: int) -> bool:
        """Signal a process of the namespace; whether it was there."""
        with contextlib.suppress(OSError), Process(number.pid, started=number.started, proc=self._proc) as process:
            if process.link("ns/pid") == self.identity:
                process.signal(signum)
                return True
        return False

    def kill_all(self, timeout_s: float = _END_S) -> bool:
        """End every process of the namespace but its PID 1, which reaps them; whether all are gone."""
        deadline = time.monotonic() + timeout_s
        while left := self.numbers():
            for one in left:  # those of a tree before CRIU, which may hold them
                self.send(one, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def own_identity(proc: Path = PROC) -> str | None:
    """Identity of this process's PID namespace (``pid:[4026531836]``); ``None``: it is not known."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink())
    except OSError:
        return None


def _is_below(namespace_fd: int) -> bool:
    """Whether a PID namespace hangs below that of this process."""
    own = own_namespace("pid")
    with contextlib.ExitStack() as stack:
        fd = namespace_fd
        while True:
            try:
                fd = fcntl.ioctl(fd, _NS_GET_PARENT)
            except OSError:  # EPERM: it is our own namespace's parent, or beside it
                return False
            stack.callback(os.close, fd)
            facts = os.fstat(fd)
            if (facts.st_dev, facts.st_ino) == own:
                return True


_held: dict[Id, Namespace] = {}
_held_lock = threading.Lock()


def namespace(init: Id, *, process: Process | None = None, proc: Path = PROC) -> Namespace:
    """The namespace whose PID 1 this is. As long as that lives, everybody gets the same descriptors.

    ``process``: PID 1, where it is held already; it belongs to the namespace then. Raises ``ProcessGoneError``,
    ``NotContainedError``, ``OSError``.
    """
    if proc != PROC:
        return Namespace(process or Process(init.pid, started=init.started, proc=proc), proc=proc)
    with _held_lock:
        for known in [one for one, held in _held.items() if held.init.ended()]:
            del _held[known]  # its users still hold it
        found = _held.get(init)
    if found is None:
        made = Namespace(process or Process(init.pid, started=init.started))
        with _held_lock:
            found = _held.setdefault(init, made)
    return found
