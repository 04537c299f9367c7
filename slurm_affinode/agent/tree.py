"""The processes of one job's PID namespace: who they are, stopping, holding and ending them.

All are found through ``/proc`` of the agent's namespace by the namespace that they are in, so that a process that has
left its parent or its session is found as well. PIDs are the agent's unless the name says ``_ns``.
"""

from __future__ import annotations

import contextlib
import ctypes
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
_ESRCH = 3
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

    @property
    def ours(self) -> bool:
        """CRIU or what carries it into the namespace, as root: not of the job."""
        return self.uid == 0 and self.name in ("criu", "nsenter")


class Processes(Protocol):
    """What the orchestration does with processes."""

    def alive(self, pid: int, started: int) -> bool:
        """This very process is there."""
        ...

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """All processes of the namespace whose PID 1 this is, without PID 1. Raises ``TreeGoneError``."""
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

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """All but PID 1 and those that have ended, by number."""
        return [member for member in self._all(init_pid, init_started) if not member.gone]

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
            self._signal((member.pid for member in there), signal.SIGKILL)
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
            return Member(
                pid=pid,
                pid_ns=int(facts["NSpid"].split()[-1]),
                parent=int(values[1]),
                started=int(values[19]),
                state=values[0],
                name=head.partition("(")[2],
                uid=int(facts["Uid"].split()[1]),
            )
        except (IndexError, KeyError, ValueError):
            return None


def started_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; ``None`` where there is none."""
    member = LinuxProcesses().read(pid)
    return None if member is None else member.started


def below(members: Sequence[Member], root: int) -> tuple[list[Member], list[Member]]:
    """The tree of ``root`` (itself first), and the rest: those that have left it."""
    children: dict[int, list[Member]] = {}
    for member in members:
        children.setdefault(member.parent, []).append(member)
    tree = [member for member in members if member.pid == root]
    for member in tree:  # grows while it is read
        tree.extend(children.get(member.pid, ()))
    inside = {member.pid for member in tree}
    return tree, [member for member in members if member.pid not in inside]
