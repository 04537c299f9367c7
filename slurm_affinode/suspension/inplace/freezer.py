"""Freezing and thawing of all processes of a job.

The cgroup freezer is used if a cgroup contains exactly these processes. Slurm's own also contains the shepherd, which
has to receive signals. With cgroup version 2, the processes are therefore frozen in a cgroup below Slurm's, where its
limits remain in force, and move back when they are thawed. Version 1 is not used in this way: its freezer also blocks
SIGKILL, and Slurm could not end the job while no agent is running.

Otherwise SIGSTOP is sent until no thread is running: a process that was forking has left a child. A process
receives it only after its parent has stopped, and SIGCONT before its parent, so that a shell with job control does not
notice the stop: it would report the job as stopped and continue with its next command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_affinode.base import kernel_text
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import PROC, Process, processes
from slurm_affinode.gpu.jobs import cgroup_of_job
from slurm_affinode.suspension.job.cgroup import Cgroup
from slurm_affinode.suspension.job.process_tree import (
    STILL,
    LinuxProcesses,
    Member,
    NotStoppedError,
    is_moving,
    is_pending,
    pending_signals,
    send,
    thread_state,
    thread_states,
)

SIGNALS = "signals"
CGROUP_NAME = "slurm-affinode"
"""Name of the cgroup below Slurm's in which the processes of a job are frozen."""
_CHECK_S = 0.005
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request something of a process. Others may wait for a stopped process in any case: SIGCHLD of stopped
children, those of timers."""
Calls = frozenset[tuple[int, int]]
"""PIDs and numbers of pending signals."""


class FreezeError(AffinodeError):
    """Not all processes could be stopped, or not all could be continued; the text names one."""


class Freezer(Protocol):
    """Freezes and thaws the processes of one PID namespace, except PID 1. PIDs are the agent's."""

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """Return all of them, including nested PID namespaces, parents first. Raises ``TreeGoneError``."""
        ...

    def mechanism(self, members: Sequence[Member], init_pid: int) -> str:
        """Return the mechanism that ``freeze`` would use: ``signals``, or the path of a cgroup."""
        ...

    def freeze(self, init_pid: int, init_started: int, mode: str, *, timeout_s: float) -> None:
        """Freeze them. Raises ``FreezeError``, ``TreeGoneError``."""
        ...

    def thaw(
        self, init_pid: int, init_started: int, mode: str, *, stay: Collection[int], going: Collection[int] = ()
    ) -> None:
        """Thaw all but those in ``stay``; ``going``: these run already and receive no signal.

        Raises ``FreezeError``, ``TreeGoneError``.
        """
        ...

    def clear(self, mode: str) -> None:
        """Remove what the freeze of a job that has ended has left."""
        ...

    def busy(self, pids: Iterable[int]) -> bool:
        """Return whether a thread of ``pids`` runs or waits uninterruptibly."""
        ...

    def moving(self, pids: Iterable[int], mode: str) -> int | None:
        """Return one of ``pids`` that is not stopped, or that is being killed and cannot end."""
        ...

    def find_ended(self, pids: Iterable[int]) -> int | None:
        """Return one of ``pids`` that has ended."""
        ...

    def calls(self, pids: Iterable[int]) -> Calls:
        """Return the pending signals that request something of one of ``pids``."""
        ...

    def is_stopped_by_slurm(self, init_pid: int) -> bool:
        """Return whether the whole job with its PID 1 was stopped by others: by Slurm, with ``scontrol suspend``."""
        ...


class FreezerCgroup(Cgroup):
    """A cgroup with a freezer."""

    def __init__(self, root: Path, path: Path) -> None:
        super().__init__(root, path)
        self.version = 1 if self.has("freezer.state") else 2

    @property
    def knob(self) -> str:
        """Name of the file that freezes it."""
        return "freezer.state" if self.version == 1 else "cgroup.freeze"

    def can_freeze(self) -> bool:
        """Return whether the kernel can freeze it; the root of version 2 has no freezer."""
        return self.has(self.knob)

    def freeze(self, *, frozen: bool) -> None:
        """Request that the kernel freeze or thaw it. Raises ``OSError``."""
        self.write(self.knob, ("FROZEN" if frozen else "THAWED") if self.version == 1 else str(int(frozen)))

    def frozen(self) -> bool:
        """Return whether all of its processes are frozen. Raises ``OSError``."""
        if self.version == 1:
            return self.text("freezer.state").strip() == "FROZEN"
        return "frozen 1" in self.text("cgroup.events").split("\n")

    def of_slurm(self, pids: Collection[int]) -> bool:
        """Return whether it is a cgroup of a job in version 2 that directly contains these processes.

        Those that the job has moved to cgroups of its own would lose them. Raises ``OSError``.
        """
        if self.version == 1 or cgroup_of_job(str(self.path)) is None or self.text("cgroup.subtree_control").strip():
            return False
        return set(pids) <= set(kernel_text.numbers(self.text("cgroup.procs")))

    def processes(self) -> set[int]:
        """Return its processes and those below it; 0 stands for one that is not visible here. Raises ``OSError``."""
        pids: set[int] = set()
        todo = ["."]
        while todo:
            place = todo.pop()
            pids.update(kernel_text.numbers(self.text(f"{place}/cgroup.procs")))
            todo += [f"{place}/{name}" for name in self.names(place)]
        return pids


@dataclass(slots=True)
class LinuxFreezer:
    """``Freezer`` for this machine."""

    proc: Path = PROC
    cgroups: Path = Path("/sys/fs/cgroup")
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """See ``Freezer``."""
        return LinuxProcesses(self.proc).all_processes(init_pid, init_started)

    # --- freezing

    def mechanism(self, members: Sequence[Member], init_pid: int) -> str:
        """See ``Freezer``."""
        pids = {member.pid for member in members}
        for group in self._cgroups_of(pids):
            with contextlib.suppress(OSError):
                if not group.can_freeze() or init_pid in pids:
                    continue
                if group.processes() == pids:
                    return str(group)
                if group.of_slurm(pids):
                    return str(group.path / CGROUP_NAME)
        return SIGNALS

    def _cgroups_of(self, pids: Collection[int]) -> Iterator[FreezerCgroup]:
        """Yield the deepest cgroup that contains all of them, of either version; open until the next iteration."""
        paths: dict[str, list[str]] = {}
        for process in processes(pids, proc=self.proc):
            try:
                text = process.text("cgroup")
            except OSError:
                continue
            for line in text.split("\n"):  # the kernel permits no line feed in the name of a cgroup
                _, _, rest = line.partition(":")
                controllers, _, path = rest.partition(":")
                if path and (not controllers or "freezer" in controllers.split(",")):
                    paths.setdefault(controllers and "freezer", []).append(path)
        for controller, cgroup in paths.items():
            if len(cgroup) != len(pids):
                continue
            common = os.path.commonpath(cgroup).lstrip("/")
            tops = (self.cgroups / "freezer",) if controller else (self.cgroups, self.cgroups / "unified")
            for top in tops if common else ():
                with contextlib.suppress(OSError, ValueError), FreezerCgroup(self.cgroups, top / common) as group:
                    yield group

    def freeze(self, init_pid: int, init_started: int, mode: str, *, timeout_s: float) -> None:
        """See ``Freezer``."""
        deadline = self.now() + timeout_s
        if Path(mode).name == CGROUP_NAME:
            self._freeze_apart(init_pid, init_started, Path(mode), deadline)
            return
        if mode != SIGNALS:
            with self._cgroup(mode) as group:
                self._set(group, frozen=True, deadline=deadline)
            return
        try:
            LinuxProcesses(self.proc, self.sleep, self.now).stop_all(init_pid, init_started, timeout_s=timeout_s)
        except NotStoppedError as error:
            raise FreezeError(str(error)) from None

    def thaw(
        self, init_pid: int, init_started: int, mode: str, *, stay: Collection[int], going: Collection[int] = ()
    ) -> None:
        """See ``Freezer``."""
        members = self.members(init_pid, init_started)
        if Path(mode).name == CGROUP_NAME:
            if Path(mode).is_dir():
                self._thaw_apart(members, Path(mode), stay)
            return
        if mode != SIGNALS and Path(mode).is_dir():
            with self._cgroup(mode) as group:
                # A frozen process receives this signal before it runs.
                send([member for member in members if member.pid in stay], signal.SIGSTOP, proc=self.proc)
                self._set(group, frozen=False, deadline=self.now() + 5)
            members = self.members(init_pid, init_started)
        LinuxProcesses(self.proc, self.sleep, self.now).resume(
            member for member in members if member.pid not in stay and member.pid not in going
        )

    def _freeze_apart(self, init_pid: int, init_started: int, path: Path, deadline: float) -> None:
        """Move the processes to a frozen cgroup below their own. A child of a process that was forking follows it."""
        with self._cgroup(str(path.parent)) as parent:
            with self._reported(parent, CGROUP_NAME):
                parent.make(CGROUP_NAME)
            with self._cgroup(str(path)) as group, self._reported(group, "cgroup.procs"):
                group.freeze(frozen=True)
                calm = 0
                while calm < 2:
                    inside = group.processes()
                    outside = [member for member in self.members(init_pid, init_started) if member.pid not in inside]
                    outside = [member for member in outside if member.state not in "ZX"]
                    self._move(outside, group)
                    calm = calm + 1 if not outside and group.frozen() else 0
                    if not calm and self.now() >= deadline:
                        raise FreezeError(f"{group} is not frozen in time")
                    if not calm:
                        self.sleep(_CHECK_S)

    def _thaw_apart(self, members: Sequence[Member], path: Path, stay: Collection[int]) -> None:
        """Move the processes back, children first, except for those that stay frozen.

        A process that the job has stopped itself (T) remains stopped where it was.
        """
        with (
            self._cgroup(str(path.parent)) as parent,
            self._cgroup(str(path)) as group,
            self._reported(group, "cgroup.procs"),
        ):
            inside = group.processes()
            leaving = [member for member in reversed(members) if member.pid in inside]
            self._move([member for member in leaving if member.pid not in stay or member.state in "Tt"], parent)
            if not group.processes():
                parent.remove(CGROUP_NAME)

    def _move(self, members: Iterable[Member], group: FreezerCgroup) -> None:
        """Move processes to a cgroup. Raises ``OSError``."""
        for member in members:
            # The kernel takes a PID: the process is known to have it until just before.
            with (
                contextlib.suppress(ProcessLookupError),
                Process(member.pid, started=member.started, proc=self.proc),
            ):
                group.write("cgroup.procs", str(member.pid))

    def clear(self, mode: str) -> None:
        """See ``Freezer``. Slurm cannot remove the cgroup of a job while it contains another."""
        if Path(mode).name == CGROUP_NAME:
            with contextlib.suppress(OSError), FreezerCgroup(self.cgroups, Path(mode).parent) as parent:
                parent.remove(CGROUP_NAME)

    @contextlib.contextmanager
    def _reported(self, group: FreezerCgroup, name: str) -> Iterator[None]:
        """Raise ``FreezeError`` in place of ``OSError``."""
        try:
            yield
        except OSError as error:
            raise FreezeError(f"{group}: {name}: {error.strerror or error}") from error

    def _cgroup(self, path: str) -> FreezerCgroup:
        """Open a cgroup. Raises ``FreezeError``."""
        try:
            return FreezerCgroup(self.cgroups, Path(path))
        except OSError as error:
            raise FreezeError(f"{path}: {error.strerror or error}") from error

    def busy(self, pids: Iterable[int]) -> bool:
        """See ``Freezer``."""
        return any(thread_states(process) & {"R", "D"} for process in processes(pids, proc=self.proc))

    def moving(self, pids: Iterable[int], mode: str) -> int | None:
        """See ``Freezer``."""
        if mode != SIGNALS:
            try:
                with FreezerCgroup(self.cgroups, Path(mode)) as group:
                    frozen, version = group.frozen(), group.version
            except OSError:
                frozen, version = False, 2
            if not frozen:
                return next(iter(pids), None)
            # The freezer of version 1 also blocks SIGKILL: a process that is being killed has to be thawed.
            tree = processes(pids if version == 1 else (), proc=self.proc)
            return next((process.pid for process in tree if is_pending(process, signal.SIGKILL)), None)
        return next((process.pid for process in processes(pids, proc=self.proc) if _main_moves(process)), None)

    def find_ended(self, pids: Iterable[int]) -> int | None:
        """See ``Freezer``."""
        pids = tuple(pids)
        # A process runs on when only its first thread has ended.
        alive = {process.pid for process in processes(pids, proc=self.proc) if not thread_states(process) <= set("ZX")}
        return next((pid for pid in pids if pid not in alive), None)

    def calls(self, pids: Iterable[int]) -> Calls:
        """See ``Freezer``. Includes blocked signals, which sigwait(3) and signalfd(2) receive."""
        pending: set[tuple[int, int]] = set()
        for process in processes(pids, proc=self.proc):
            waiting = pending_signals(process)
            pending.update((process.pid, int(number)) for number in _ASKING if waiting >> (number - 1) & 1)
        return frozenset(pending)

    def is_stopped_by_slurm(self, init_pid: int) -> bool:
        """See ``Freezer``. By SIGSTOP, or by the freezer of its cgroup."""
        if any(thread_state(process) == "T" for process in processes((init_pid,), proc=self.proc)):
            return True
        for group in self._cgroups_of((init_pid,)):
            with contextlib.suppress(OSError):
                if group.frozen():
                    return True
        return False

    def _set(self, group: FreezerCgroup, *, frozen: bool, deadline: float) -> None:
        with self._reported(group, group.knob):
            while True:
                group.freeze(frozen=frozen)
                if group.frozen() is frozen:
                    return
                if self.now() >= deadline:
                    raise FreezeError(f"{group} is not {'frozen' if frozen else 'thawed'} in time")
                self.sleep(_CHECK_S)


def _main_moves(process: Process) -> bool:
    state = thread_state(process)
    return is_moving(process) if state == "D" else state not in STILL
