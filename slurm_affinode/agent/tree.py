"""The processes of one job's PID namespace: who they are, stopping, holding and ending them.

All are found through ``/proc`` of the agent's namespace by the namespace that they are in, so that a process that has
left its parent or its session is found as well. PIDs are the agent's unless the name says ``_ns``. A ``Member`` is
looked at again, held, before anything is done to it: by now its number may be another process's.
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

from slurm_affinode import pinned
from slurm_affinode.errors import AffinodeError
from slurm_affinode.pinned import Id, Namespace, NotContainedError, Number, Process

_SEIZE, _DETACH = 0x4206, 17
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
    def id(self) -> Id:
        """Its identity."""
        return Id(self.pid, self.started)

    @property
    def gone(self) -> bool:
        """It has ended and waits to be reaped."""
        return self.state in "ZX"


class Processes(Protocol):
    """Operations of the orchestration on processes."""

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

    def stop(self, members: Iterable[Member]) -> None:
        """SIGSTOP."""
        ...

    def resume(self, members: Iterable[Member]) -> None:
        """SIGCONT."""
        ...

    def hold(self, members: Iterable[Member]) -> contextlib.AbstractContextManager[None]:
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
        try:
            with Process(pid, started=started, proc=self.proc) as process:
                member = _member(process)
        except OSError:
            return False
        return member is not None and not member.gone

    def began(self, started: int, now: float) -> float:
        """See ``Processes``."""
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """All but PID 1 and those that have ended, by number."""
        return [member for member in self._all(self._space(init_pid, init_started)) if not member.gone]

    def everybody(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """See ``Processes``."""
        space = self._space(init_pid, init_started)
        found = []
        for process in space.everybody():
            member = _member(process)
            if member is not None and not member.gone:
                found.append(member)
        return parents_first(found)

    def _space(self, init_pid: int, init_started: int) -> Namespace:
        """The namespaces that are held for a shepherd. Raises ``TreeGoneError``."""
        try:
            space = pinned.namespace(Id(init_pid, init_started), proc=self.proc)
            if not self.alive(init_pid, init_started):
                raise ProcessLookupError
        except (OSError, NotContainedError):
            raise TreeGoneError(f"the shepherd (PID {init_pid}) is not there any more") from None
        return space

    @staticmethod
    def _all(space: Namespace) -> list[Member]:
        found = [_member(process) for _, process in space.processes()]
        return sorted((one for one in found if one is not None), key=lambda one: one.pid)

    def stop(self, members: Iterable[Member]) -> None:
        """SIGSTOP to each."""
        self._signal(members, signal.SIGSTOP)

    def resume(self, members: Iterable[Member]) -> None:
        """SIGCONT to each."""
        self._signal(members, signal.SIGCONT)

    def _signal(self, members: Iterable[Member], number: int) -> None:
        send(members, number, proc=self.proc)

    @contextlib.contextmanager
    def hold(self, members: Iterable[Member]) -> Iterator[None]:
        """Trace every thread, from a thread of our own: the kernel lets all of them go when that ends, or the agent.

        A stopped process that is traced does not continue at SIGCONT. Slurm sends that when it ends a job, and the job
        must not run on after its image was made.
        """
        ready, done = threading.Event(), threading.Event()
        every = list(members)

        def trace() -> None:
            for member in every:
                with contextlib.suppress(OSError), _held(member, self.proc) as process:
                    for task in process.names("task"):
                        _seize(process, int(task))
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

    def end(self, init_pid: int, init_started: int, *, timeout_s: float, reaped: bool = False) -> bool:
        """SIGKILL until nothing is left, or PID 1 is gone, which takes the rest with it."""
        deadline = self.now() + timeout_s
        while True:
            try:
                space = self._space(init_pid, init_started)
            except TreeGoneError:
                return True
            there = self._all(space)
            if all(member.gone and not reaped for member in there):
                return True
            # The tree before a CRIU that holds it, whose numbers are above it: without CRIU the tree would run.
            for one in sorted(there, key=lambda one: one.pid_ns):
                space.send(Number(one.pid_ns, one.pid, one.started), signal.SIGKILL)
            if self.now() >= deadline:
                return False
            self.sleep(_POLL_S)

    def read(self, pid: int) -> Member | None:
        """One process, in whatever namespace; ``None``: it is gone."""
        try:
            with Process(pid, proc=self.proc) as process:
                return _member(process)
        except OSError:
            return None


def _member(process: Process) -> Member | None:
    """Read ``/proc`` of a held process; ``None``: it is gone."""
    try:
        facts, status = process.stat(), process.status()
        state = facts.state
        if state == "Z" and int(status.get("Threads", "1")) > 1:
            state = _of_a_thread(process)
        return Member(
            pid=process.pid,
            pid_ns=int(status["NSpid"].split()[-1]),
            parent=facts.parent,
            started=facts.started,
            state=state,
            name=facts.name,
            uid=int(status["Uid"].split()[1]),
        )
    except (OSError, IndexError, KeyError, ValueError):
        return None


def _of_a_thread(process: Process) -> str:
    """A program whose first thread has ended by itself runs on in the others."""
    for task in process.names("task"):
        with contextlib.suppress(OSError, IndexError):
            state = process.read(f"task/{task}/stat").rpartition(b")")[2].split()[0].decode("ascii", "replace")
            if state not in "ZX":
                return state
    return "Z"


def _seize(process: Process, task: int) -> None:
    """Trace a thread of a process that is held; one that has received its number meanwhile is detached again."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(_SEIZE, task, None, None) == 0:
        try:
            process.facts(f"task/{task}")  # traced it cannot end unseen: it is this process's
        except OSError:
            libc.ptrace(_DETACH, task, None, None)


def _held(member: Member, proc: Path) -> Process:
    return Process(member.pid, started=member.started, proc=proc)


def send(members: Iterable[Member], number: int, *, proc: Path = pinned.PROC) -> None:
    """Signal each of these processes, and no other that has the number of one that has ended since."""
    for member in members:
        with contextlib.suppress(pinned.ProcessGoneError), _held(member, proc) as process:
            process.signal(number)


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
