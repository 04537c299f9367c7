"""The processes of one job's PID namespace: who they are, stopping, holding and ending them.

All are found through ``/proc`` of the agent's namespace by the namespace that they are in, so that a process that has
left its parent or its session is found as well. PIDs are the agent's unless the name says ``_ns``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_affinode.errors import AffinodeError

_SEIZE = 0x4206
_NS_GET_PARENT = 0xB702
_POLL_S = 0.01


class TreeGoneError(AffinodeError):
    """The job's shepherd, and with it every process of the job, is not there any more."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a namespace."""

    pid: int
    pid_ns: int
    parent: int
    started: int
    """Ticks since boot."""
    state: str
    """Of its main thread: ``R``, ``S``, ``T`` (stopped), ``t`` (traced), ``Z``, ..."""
    name: str
    uid: int

    @property
    def gone(self) -> bool:
        """It has ended and waits to be reaped."""
        return self.state in "ZX"


class Processes(Protocol):
    """What the orchestration does with processes."""

    def alive(self, pid: int, started: int) -> bool:
        """This very process is there."""
        ...

    def began(self, started: int, now: float) -> float:
        """When (epoch) a process began that did so at that many ticks since boot; ``now``: epoch."""
        ...

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """All processes of the namespace whose PID 1 this is, without PID 1. Raises ``TreeGoneError``."""
        ...

    def everybody(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """The same, with those in PID namespaces below it (containers), parents first. Raises ``TreeGoneError``."""
        ...

    def stop(self, pids: Iterable[int]) -> None:
        """SIGSTOP."""
        ...

    def resume(self, pids: Iterable[int]) -> None:
        """SIGCONT."""
        ...

    def hold(self, pids: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """While the context lasts, stopped processes stay stopped whatever signal comes, but SIGKILL."""
        ...

    def end(self, init_pid: int, init_started: int, *, timeout_s: float, reaped: bool = False) -> bool:
        """SIGKILL everything in the namespace but PID 1; whether it was gone in time.

        ``reaped``: what has ended and still has its number counts as being there.
        """
        ...


@dataclass(slots=True)
class LinuxProcesses:
    """``Processes`` of this machine."""

    proc: Path = Path("/proc")
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def alive(self, pid: int, started: int) -> bool:
        """This very process is there, and not a zombie."""
        member = self.read(pid)
        return member is not None and member.started == started and not member.gone

    def began(self, started: int, now: float) -> float:
        """See ``Processes``."""
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """All but PID 1 and those that have ended, by number."""
        return [member for member in self._all(init_pid, init_started) if not member.gone]

    def everybody(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """See ``Processes``."""
        if not self.alive(init_pid, init_started):
            raise TreeGoneError(f"the shepherd (PID {init_pid}) is not there any more")
        top = self._space(init_pid)
        spaces: dict[str, bool] = {} if top is None else {top: True}
        found = []
        for name in os.listdir(self.proc):  # noqa: PTH208 - only names are wanted
            if name.isdigit() and int(name) != init_pid and self._below(int(name), spaces):
                member = self.read(int(name))
                if member is not None and not member.gone:
                    found.append(member)
        return parents_first(found)

    def _below(self, pid: int, spaces: dict[str, bool]) -> bool:
        """Whether a process is in one of the namespaces that hang below a known one."""
        space = self._space(pid)
        if space is None:
            return False
        if space not in spaces:
            spaces[space] = self._hangs_below(pid, spaces)
        return spaces[space]

    def _hangs_below(self, pid: int, spaces: dict[str, bool]) -> bool:
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(self.proc / str(pid) / "ns" / "pid", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                while True:
                    # EPERM: the parent is our own namespace's parent, so it cannot be seen from here.
                    fd = fcntl.ioctl(fd, _NS_GET_PARENT)
                    stack.callback(os.close, fd)
                    known = spaces.get(f"pid:[{os.fstat(fd).st_ino}]")
                    if known is not None:
                        return known
            except OSError:
                return False

    def _all(self, init_pid: int, init_started: int) -> list[Member]:
        if not self.alive(init_pid, init_started):
            raise TreeGoneError(f"the shepherd (PID {init_pid}) is not there any more")
        space = self._space(init_pid)
        found = []
        for name in os.listdir(self.proc):  # noqa: PTH208 - only names are wanted
            if not name.isdigit() or int(name) == init_pid or self._space(int(name)) != space:
                continue
            member = self.read(int(name))
            if member is not None:
                found.append(member)
        return sorted(found, key=lambda member: member.pid)

    def stop(self, pids: Iterable[int]) -> None:
        """SIGSTOP to each."""
        self._signal(pids, signal.SIGSTOP)

    def resume(self, pids: Iterable[int]) -> None:
        """SIGCONT to each."""
        self._signal(pids, signal.SIGCONT)

    @staticmethod
    def _signal(pids: Iterable[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextlib.contextmanager
    def hold(self, pids: Iterable[int]) -> Iterator[None]:
        """Trace every thread, from a thread of our own: the kernel lets all of them go when that ends, or the agent.

        A stopped process that is traced does not go on at SIGCONT; that it would is what Slurm relies on when it ends
        a job, and the job must not run on after its image was made.
        """
        ready, done = threading.Event(), threading.Event()
        threads = [int(task) for pid in pids for task in self._tasks(pid)]

        def trace() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
            libc.ptrace.restype = ctypes.c_long
            for task in threads:
                libc.ptrace(_SEIZE, task, None, None)
            ready.set()
            done.wait()

        thread = threading.Thread(target=trace, name="hold", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _tasks(self, pid: int) -> list[str]:
        try:
            return os.listdir(self.proc / str(pid) / "task")  # noqa: PTH208
        except OSError:
            return []

    def end(self, init_pid: int, init_started: int, *, timeout_s: float, reaped: bool = False) -> bool:
        """SIGKILL until nothing is left, or PID 1 is gone, which takes the rest with it."""
        deadline = self.now() + timeout_s
        while True:
            try:
                there = self._all(init_pid, init_started)
            except TreeGoneError:
                return True
            if all(member.gone and not reaped for member in there):
                return True
            # The tree before a CRIU that holds it, whose numbers are above it: without CRIU the tree would run.
            send(sorted(there, key=lambda one: one.pid_ns), signal.SIGKILL, self.read)
            if self.now() >= deadline:
                return False
            self.sleep(_POLL_S)

    def _space(self, pid: int) -> str | None:
        try:
            return os.readlink(self.proc / str(pid) / "ns" / "pid")  # noqa: PTH115 - it is no path
        except OSError:
            return None

    def read(self, pid: int) -> Member | None:
        """One process, in whatever namespace; ``None``: it is gone."""
        try:
            stat = (self.proc / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
            status = (self.proc / str(pid) / "status").read_bytes().decode("utf-8", "replace")
        except OSError:
            return None
        head, _, rest = stat.rpartition(")")
        values = rest.split()
        facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        try:
            state = values[0]
            if state == "Z" and int(facts.get("Threads", 1)) > 1:
                state = self._of_a_thread(pid)
            return Member(
                pid=pid,
                pid_ns=int(facts["NSpid"].split()[-1]),
                parent=int(values[1]),
                started=int(values[19]),
                state=state,
                name=head.partition("(")[2],
                uid=int(facts["Uid"].split()[1]),
            )
        except (IndexError, KeyError, ValueError):
            return None

    def _of_a_thread(self, pid: int) -> str:
        """A program whose first thread has ended by itself runs on in the others."""
        for task in self._tasks(pid):
            with contextlib.suppress(OSError, IndexError):
                stat = (self.proc / str(pid) / "task" / task / "stat").read_bytes()
                state = stat.rpartition(b")")[2].split()[0].decode()
                if state not in "ZX":
                    return state
        return "Z"


def send(members: Iterable[Member], number: int, read: Callable[[int], Member | None]) -> None:
    """A signal to each of these, and to nobody who has the number of one that has ended since.

    ``read``: ``Processes.read``. Source: pidfd_open(2): what is looked at after it was opened is what is signalled.
    """
    for member in members:
        with contextlib.suppress(ProcessLookupError), _held(member.pid) as fd:
            now = read(member.pid)
            if now is None or now.started != member.started:
                continue
            if fd is None:
                os.kill(member.pid, number)
            else:
                signal.pidfd_send_signal(fd, number)


@contextlib.contextmanager
def _held(pid: int) -> Iterator[int | None]:
    """A descriptor of a process; ``None`` where none can be had: on kernels before 5.3, or when too many are open."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def parents_first(members: Iterable[Member]) -> list[Member]:
    """Each process behind its parent."""
    by_pid = {member.pid: member for member in members}
    depths: dict[int, int] = {}
    for member in by_pid.values():
        above: dict[int, None] = {}
        pid = member.pid
        # Each is gone through once: a user may have thousands below each other.
        while pid in by_pid and pid not in depths and pid not in above:
            above[pid] = None
            pid = by_pid[pid].parent
        depth = depths.get(pid, -1)
        for pid in reversed(above):
            depths[pid] = depth = depth + 1
    return sorted(by_pid.values(), key=lambda member: (depths[member.pid], member.started, member.pid))
