"""The processes of one job's PID namespace: listing, stopping, holding and ending them.

All are found through ``/proc`` of the agent's namespace by their PID namespace, including those that have left their
parent or session. PIDs are the agent's unless the name says ``_ns``. Before anything is done to a ``Member``, its
process is opened and checked again, since the PID may have been reused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_affinode.base import kernel_text, pidfd, ptrace
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id, Namespace, NotContainedError, Number, Process, ProcessGoneError
from slurm_affinode.base.text import one_line
from slurm_affinode.checkpoint.files import inet_sockets

_AGENT_THREADS = Path("/proc/self/task")
_POLL_S = 0.01
_SETTLE_S = 0.005
_SOON_S = 0.0005
"""Between two checks of what the kernel does by itself within microseconds."""
_WAITS_S = 0.8
"""Patience with processes that wait in the kernel while no other one changes: these are stopped meanwhile."""
_REACTION_S = 1.0
"""Time in which a process reacts to a signal, on a busy node too."""
_HOLD_S = 5.0
"""Timeout for traced threads to stop: a busy node may take long to schedule them."""
STILL = "TtZXx"
"""States of threads that do not run."""


class TreeGoneError(AffinodeError):
    """The job's shepherd, and with it every process of the job, is gone."""


class NotStoppedError(AffinodeError):
    """A process could not be stopped in time; the text names one."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a namespace."""

    pid: int
    pid_ns: int
    parent: int
    started: int
    """Ticks since boot."""
    state: str
    """State of its main thread: ``R``, ``S``, ``T`` (stopped), ``t`` (traced), ``Z``, ..."""
    name: str
    uid: int

    @property
    def id(self) -> Id:
        """PID and start time."""
        return Id(self.pid, self.started)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and waits to be reaped."""
        return self.state in "ZX"


class Processes(Protocol):
    """Operations on processes, as used by the orchestration."""

    def alive(self, pid: int, started: int) -> bool:
        """Return whether this very process exists."""
        ...

    def began(self, started: int, now: float) -> float:
        """Return the start time (epoch) of a process, from its start in ticks since boot; ``now``: epoch."""
        ...

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """Return all processes of the namespace with this PID 1, without PID 1. Raises ``TreeGoneError``."""
        ...

    def all_processes(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """Like ``members``, including nested PID namespaces (containers), parents first. Raises ``TreeGoneError``."""
        ...

    def stop(self, members: Iterable[Member]) -> None:
        """Send SIGSTOP."""
        ...

    def resume(self, members: Iterable[Member]) -> None:
        """Send SIGCONT, and again to a process that stops because it learns that a child had been stopped."""
        ...

    def stop_all(
        self, init_pid: int, init_started: int, *, timeout_s: float, but: Collection[int] = (), strict: bool = False
    ) -> Sequence[Member]:
        """Send SIGSTOP to everything in the namespace but PID 1 and ``but`` until none of it runs; return it.

        ``strict``: also wait for processes that wait in the kernel. Raises ``NotStoppedError``, ``TreeGoneError``.
        """
        ...

    def hold(
        self, members: Iterable[Member], examine: Callable[[Process], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Stop these processes while the context lasts, whatever signal arrives except SIGKILL.

        ``examine``: called for each of them at first, by the thread that traces it; its errors are raised, except for
        ``ProcessGoneError``. Afterwards, those that had received SIGSTOP stay stopped. Raises ``NotStoppedError``.
        """
        ...

    def end(self, init_pid: int, init_started: int, *, timeout_s: float, reaped: bool = False) -> bool:
        """Send SIGKILL to everything in the namespace but PID 1; return whether it was gone in time.

        ``reaped``: zombies still count as present.
        """
        ...


class StoppedJob:
    """The stop of the processes of one job while root acts for it: ``checkpoint.interface.Stop``.

    Signals alone do not keep a process stopped: any process of its user may send SIGCONT. So each one is traced too.
    """

    def __init__(self, processes: Processes, init: Id) -> None:
        self._processes = processes
        self._init = init
        self._open_processes = contextlib.ExitStack()

    def stop(
        self, *, timeout_s: float, but: Collection[int] = (), examine: Callable[[Process], None] | None = None
    ) -> None:
        """Stop and hold all processes but PID 1 and ``but``. Raises ``NotStoppedError``, ``TreeGoneError``.

        ``examine``: see ``Processes.hold``.
        """
        members = self._processes.stop_all(*self._init, timeout_s=timeout_s, but=but, strict=True)
        self._hold(members, but, examine)

    def hold(self) -> None:
        """Hold them. Raises ``NotStoppedError``, also if a process is started meanwhile.

        If the job has ended, there is nothing to hold: that is the cause of whatever failed, and is reported as such.
        """
        with contextlib.suppress(TreeGoneError):
            self._hold(self._processes.all_processes(*self._init), ())

    def _hold(
        self, members: Sequence[Member], but: Collection[int], examine: Callable[[Process], None] | None = None
    ) -> None:
        self.release()
        self._open_processes.enter_context(self._processes.hold(members, examine))
        running = {member.id for member in self._processes.all_processes(*self._init) if member.pid not in but}
        new = sorted(running - {member.id for member in members})
        if new:
            self.release()
            raise NotStoppedError(f"process {new[0].pid} was started while the job was being stopped")

    def release(self) -> None:
        """Release them. Those that have received SIGSTOP stay stopped. Idempotent."""
        self._open_processes.close()


@dataclass(slots=True)
class LinuxProcesses:
    """``Processes`` for this machine."""

    proc: Path = Path("/proc")
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def alive(self, pid: int, started: int) -> bool:
        """Return whether this very process exists and is not a zombie."""
        try:
            with Process(pid, started=started, proc=self.proc) as process:
                member = _member(process)
        except OSError:
            return False
        return member is not None and not member.has_ended

    def began(self, started: int, now: float) -> float:
        """See ``Processes``."""
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """Return all processes but PID 1 and zombies, by PID."""
        return [member for member in self._all_processes(self._space(init_pid, init_started)) if not member.has_ended]

    def all_processes(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """See ``Processes``."""
        space = self._space(init_pid, init_started)
        members = []
        for process in space.all_processes():
            member = _member(process)
            if member is not None and not member.has_ended:
                members.append(member)
        return parents_first(members)

    def _space(self, init_pid: int, init_started: int) -> Namespace:
        """Return the held namespaces of a shepherd. Raises ``TreeGoneError``."""
        try:
            space = pidfd.namespace(Id(init_pid, init_started), proc=self.proc)
            if not self.alive(init_pid, init_started):
                raise ProcessLookupError
        except (OSError, NotContainedError):
            raise TreeGoneError(f"the shepherd (PID {init_pid}) has ended") from None
        return space

    @staticmethod
    def _all_processes(space: Namespace) -> list[Member]:
        members = [_member(process) for _, process in space.processes()]
        return sorted((member for member in members if member is not None), key=lambda member: member.pid)

    def stop_all(
        self, init_pid: int, init_started: int, *, timeout_s: float, but: Collection[int] = (), strict: bool = False
    ) -> Sequence[Member]:
        """See ``Processes``. A process receives SIGSTOP only after its parent has stopped."""
        deadline = waits_until = self.now() + timeout_s
        calm, before = 0, frozenset[int]()
        while True:
            members = [member for member in self.all_processes(init_pid, init_started) if member.pid not in but]
            moving = [member for member in members if self._moves(member, strict=strict)]
            calm = 0 if moving else calm + 1
            if calm >= 2:
                return members
            pids = frozenset(member.pid for member in moving)
            send([member for member in moving if member.parent not in pids], signal.SIGSTOP, proc=self.proc)
            if pids != before:
                before, waits_until = pids, self.now() + min(timeout_s, _WAITS_S)
            if moving and (self.now() >= deadline or (self.now() >= waits_until and not self._run(moving))):
                unstopped = moving[0]
                raise NotStoppedError(
                    f"process {unstopped.pid} ({one_line(unstopped.name)}) does not stop within {timeout_s:g} s"
                )
            if moving:
                self.sleep(_SETTLE_S)

    def _moves(self, member: Member, *, strict: bool) -> bool:
        with contextlib.suppress(OSError), _process(member, self.proc) as process:
            return not thread_states(process) <= set(STILL) if strict else is_moving(process)
        return False

    def _run(self, members: Iterable[Member]) -> bool:
        """Return whether a thread of these processes neither rests nor waits in the kernel."""
        for member in members:
            with contextlib.suppress(OSError), _process(member, self.proc) as process:
                if not thread_states(process) <= {*STILL, "D"}:
                    return True
        return False

    def stop(self, members: Iterable[Member]) -> None:
        """Send SIGSTOP to each process."""
        self._signal(members, signal.SIGSTOP)

    def resume(self, members: Iterable[Member]) -> None:
        """See ``Processes``. A process receives SIGCONT before its parent: a shell would take it for a stopped job.

        Nothing removes the SIGCHLD that a parent has received when a child stopped. If it blocks that signal to read it
        later, it learns of the stop when the child runs again, and script(1) then stops as well.
        """
        children_first = parents_first(members)[::-1]
        readers = [member for member in children_first if self._reads_later(member, signal.SIGCHLD)]
        self._signal(children_first, signal.SIGCONT)
        deadline = self.now() + _REACTION_S
        while readers and self.now() < deadline:
            self.sleep(_SETTLE_S)
            self._signal([member for member in readers if self._is_stopped(member)], signal.SIGCONT)

    def _reads_later(self, member: Member, number: int) -> bool:
        """Return whether the process has this signal pending, and blocks it."""
        with contextlib.suppress(OSError), _process(member, self.proc) as process:
            blocked = kernel_text.number(process.status().get("SigBlk"), 16) or 0
            return is_pending(process, number) and bool(blocked >> (number - 1) & 1)
        return False

    def _is_stopped(self, member: Member) -> bool:
        with contextlib.suppress(OSError), _process(member, self.proc) as process:
            return thread_states(process) == {"T"}
        return False

    def _signal(self, members: Iterable[Member], number: int) -> None:
        send(members, number, proc=self.proc)

    @contextlib.contextmanager
    def hold(self, members: Iterable[Member], examine: Callable[[Process], None] | None = None) -> Iterator[None]:
        """Trace every thread from a thread of our own; the kernel detaches them when that thread or the agent ends.

        A process that is traced does not continue on SIGCONT. Slurm sends that signal when it ends a job, other
        processes of the user may send it at any time, and nothing of the job may run while root acts for it.
        """
        ready, ended = threading.Event(), threading.Event()
        every, failures = list(members), list[Exception]()

        def trace() -> None:
            try:
                for member in every:
                    with contextlib.suppress(OSError), _process(member, self.proc) as process:
                        for task in process.names("task"):
                            _seize(process, int(task))
                self._wait_for_stop(every)
                if examine is not None:
                    for member in every:
                        with contextlib.suppress(ProcessGoneError), _process(member, self.proc) as process:
                            examine(process)
            except Exception as error:
                failures.append(error)
            finally:
                ready.set()
            ended.wait()

        thread = threading.Thread(target=trace, name="hold", daemon=True)
        thread.start()
        ready.wait()
        try:
            if failures:
                raise failures[0]
            yield
        finally:
            ended.set()
            thread.join()
            # The kernel detaches what it traces a moment later, and another tracer may follow at once.
            while (_AGENT_THREADS / str(thread.native_id)).exists():
                self.sleep(_SOON_S)

    def _wait_for_stop(self, members: Sequence[Member]) -> None:
        deadline = self.now() + _HOLD_S
        for member in members:
            while self._moves(member, strict=True):
                if self.now() >= deadline:
                    raise NotStoppedError(f"process {member.pid} ({one_line(member.name)}) cannot be held")
                self.sleep(_SOON_S)

    def end(self, init_pid: int, init_started: int, *, timeout_s: float, reaped: bool = False) -> bool:
        """Send SIGKILL until nothing is left, or PID 1 is gone, which takes the rest with it."""
        deadline, freed = self.now() + timeout_s, False
        while True:
            try:
                space = self._space(init_pid, init_started)
            except TreeGoneError:
                return True
            members = self._all_processes(space)
            if all(member.has_ended and not reaped for member in members):
                return True
            if not freed:
                inet_sockets.free_ports(member.id for member in members)
                freed = True
            # The tree is killed before a CRIU that holds it, which has higher PIDs: without CRIU the tree would run.
            for remaining in sorted(members, key=lambda member: member.pid_ns):
                space.send(Number(remaining.pid_ns, remaining.pid, remaining.started), signal.SIGKILL)
            if self.now() >= deadline:
                return False
            self.sleep(_POLL_S)

    def read(self, pid: int) -> Member | None:
        """Return a process of any namespace, or ``None`` if it is gone."""
        try:
            with Process(pid, proc=self.proc) as process:
                return _member(process)
        except OSError:
            return None


def _member(process: Process) -> Member | None:
    """Read an opened process from ``/proc``; ``None`` if it is gone."""
    try:
        facts, status = process.stat(), process.status()
        state = facts.state
        if state == "Z" and int(status.get("Threads", "1")) > 1:
            state = _thread_state(process)
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


def _thread_state(process: Process) -> str:
    """Return the state of another thread: a process runs on when only its first thread has ended."""
    for task in process.names("task"):
        with contextlib.suppress(OSError, IndexError):
            state = process.read(f"task/{task}/stat").rpartition(b")")[2].split()[0].decode("ascii", "replace")
            if state not in "ZX":
                return state
    return "Z"


def _seize(process: Process, task: int) -> None:
    """Trace a thread of an opened process. A thread that has reused the number meanwhile is detached again."""
    with contextlib.suppress(OSError):
        ptrace.ptrace(ptrace.SEIZE, task)
        try:
            process.facts(f"task/{task}")  # a traced thread cannot disappear, so it belongs to this process
        except OSError:
            ptrace.ptrace(ptrace.DETACH, task)
            raise
        ptrace.ptrace(ptrace.INTERRUPT, task)  # it may have received SIGCONT meanwhile


def _process(member: Member, proc: Path) -> Process:
    return Process(member.pid, started=member.started, proc=proc)


def send(members: Iterable[Member], number: int, *, proc: Path = pidfd.PROC) -> None:
    """Signal each of these processes, but no other process that has reused the PID of one that has ended."""
    for member in members:
        with contextlib.suppress(pidfd.ProcessGoneError), _process(member, proc) as process:
            process.signal(number)


def stopped(members: Iterable[Member]) -> tuple[int, ...]:
    """Return those that are stopped already."""
    return tuple(member.pid for member in members if member.state in "Tt")


def parents_first(members: Iterable[Member]) -> list[Member]:
    """Sort processes so that each follows its parent."""
    by_pid = {member.pid: member for member in members}
    depths: dict[int, int] = {}
    for member in by_pid.values():
        above: dict[int, None] = {}
        pid = member.pid
        # Each process is visited once: a user may nest thousands of them.
        while pid in by_pid and pid not in depths and pid not in above:
            above[pid] = None
            pid = by_pid[pid].parent
        depth = depths.get(pid, -1)
        for pid in reversed(above):
            depths[pid] = depth = depth + 1
    return sorted(by_pid.values(), key=lambda member: (depths[member.pid], member.started, member.pid))


def is_moving(process: Process) -> bool:
    """Return whether a thread of it is not at rest.

    A thread that waits in the kernel (D) for its vfork(2) child does so for as long as the child is stopped. With a
    stop pending it can neither return to its program nor fork, and it stops when the child continues.
    """
    states = thread_states(process)
    if states <= set(STILL):
        return False
    return not states <= {*STILL, "D"} or not (states & set("Tt") or is_pending(process, signal.SIGSTOP))


def thread_states(process: Process) -> set[str]:
    """Return the states of its threads; empty if it is gone."""
    return {thread_state(process, f"task/{thread}/") for thread in process.threads()}


def thread_state(process: Process, place: str = "") -> str:
    """Return ``R``, ``S``, ...; ``X`` if it is gone."""
    try:
        return process.text(f"{place}stat").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def is_pending(process: Process, number: int) -> bool:
    """Return whether this signal is pending."""
    return bool(pending_signals(process) >> (number - 1) & 1)


def pending_signals(process: Process) -> int:
    """Return the pending signals of a process, the first one in the lowest bit."""
    try:
        status = process.status()
    except OSError:
        return 0
    private, shared = (kernel_text.number(status.get(key), 16) or 0 for key in ("SigPnd", "ShdPnd"))
    return private | shared
