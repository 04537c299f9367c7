"""Stopping every process of a job and letting them go on.

By the cgroup freezer where a cgroup holds exactly these processes; Slurm's own also holds the shepherd, which has to
hear signals. Else by SIGSTOP, again and again until a look finds no thread that runs: one that was forking has left a
child. A parent is stopped before its children and goes on after them, so that a shell does not see them stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_affinode.agent.tree import LinuxProcesses, Member, TreeGoneError
from slurm_affinode.errors import AffinodeError

SIGNALS = "signals"
_NS_GET_PARENT = 0xB702
_LOOK_AGAIN_S = 0.005
_STILL = "TtZXx"


class FreezeError(AffinodeError):
    """Not all processes came to rest, or not all could be let go; the text names one."""


class Freezer(Protocol):
    """Stops and continues the processes of one PID namespace, PID 1 excepted. PIDs are the agent's."""

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """All of them, also in PID namespaces below, parents first. Raises ``TreeGoneError``."""
        ...

    def how(self, members: Sequence[Member], init_pid: int) -> str:
        """What ``freeze`` would stop them with: ``signals``, or the path of a cgroup."""
        ...

    def freeze(self, init_pid: int, init_started: int, how: str, *, timeout_s: float) -> None:
        """Stop them. Raises ``FreezeError``, ``TreeGoneError``."""
        ...

    def thaw(self, init_pid: int, init_started: int, how: str, *, stay: Collection[int]) -> None:
        """Let all but those in ``stay`` go on, which were stopped before. Raises ``FreezeError``, ``TreeGoneError``."""
        ...

    def moving(self, pids: Iterable[int], how: str, *, stay: Collection[int] = ()) -> int | None:
        """One of ``pids`` that is not stopped."""
        ...


@dataclass(slots=True)
class LinuxFreezer:
    """``Freezer`` of this machine."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        """See ``Freezer``."""
        processes = LinuxProcesses(self.proc)
        if not processes.alive(init_pid, init_started):
            raise TreeGoneError(f"the shepherd (PID {init_pid}) is not there any more")
        top = self._space(init_pid)
        spaces: dict[int, bool] = {} if top is None else {top: True}
        found = []
        for name in os.listdir(self.proc):  # noqa: PTH208 - only names are wanted
            if name.isdigit() and int(name) != init_pid and self._below(int(name), spaces):
                member = processes.read(int(name))
                if member is not None and not member.gone:
                    found.append(member)
        return parents_first(found)

    def _space(self, pid: int) -> int | None:
        try:
            return (self.proc / str(pid) / "ns" / "pid").stat().st_ino
        except OSError:
            return None

    def _below(self, pid: int, spaces: dict[int, bool]) -> bool:
        """Whether a process is in one of the namespaces that hang below a known one."""
        space = self._space(pid)
        if space is None:
            return False
        if space not in spaces:
            spaces[space] = self._hangs_below(pid, spaces)
        return spaces[space]

    def _hangs_below(self, pid: int, spaces: dict[int, bool]) -> bool:
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(self.proc / str(pid) / "ns" / "pid", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                while True:
                    # EPERM: the parent is our own namespace's parent, so it cannot be seen from here.
                    fd = fcntl.ioctl(fd, _NS_GET_PARENT)
                    stack.callback(os.close, fd)
                    known = spaces.get(os.fstat(fd).st_ino)
                    if known is not None:
                        return known
            except OSError:
                return False

    # --- freezing

    def how(self, members: Sequence[Member], init_pid: int) -> str:
        """See ``Freezer``."""
        pids = {member.pid for member in members}
        for directory, knob in self._cgroups_of(pids):
            try:
                if (directory / knob).exists() and init_pid not in pids and _processes_of(directory) == pids:
                    return str(directory)
            except OSError:
                continue
        return SIGNALS

    def _cgroups_of(self, pids: Collection[int]) -> Iterable[tuple[Path, str]]:
        """The deepest cgroup that has all of them, of either version."""
        paths: dict[str, list[str]] = {}
        for pid in pids:
            try:
                lines = (self.proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                _, _, rest = line.partition(":")
                controllers, _, path = rest.partition(":")
                if not controllers or "freezer" in controllers.split(","):
                    paths.setdefault(controllers and "freezer", []).append(path)
        for controller, found in paths.items():
            if len(found) != len(pids):
                continue
            common = os.path.commonpath(found).lstrip("/")
            tops = (self.cgroups / "freezer",) if controller else (self.cgroups, self.cgroups / "unified")
            knob = "freezer.state" if controller else "cgroup.freeze"
            yield from ((top / common, knob) for top in tops if common)

    def freeze(self, init_pid: int, init_started: int, how: str, *, timeout_s: float) -> None:
        """See ``Freezer``."""
        deadline = self.now() + timeout_s
        if how != SIGNALS:
            self._set(Path(how), frozen=True, deadline=deadline)
            return
        calm = 0
        while calm < 2:
            moving = [one for one in self.members(init_pid, init_started) if self._moves(one.pid)]
            calm = 0 if moving else calm + 1
            _kill((one.pid for one in moving), signal.SIGSTOP)
            if moving and self.now() >= deadline:
                one = moving[0]
                raise FreezeError(f"process {one.pid} ({one.name}) does not stop within {timeout_s:g} s")
            if moving:
                self.sleep(_LOOK_AGAIN_S)

    def thaw(self, init_pid: int, init_started: int, how: str, *, stay: Collection[int]) -> None:
        """See ``Freezer``."""
        if how != SIGNALS and Path(how).is_dir():
            self._set(Path(how), frozen=False, deadline=self.now() + 5)
        members = self.members(init_pid, init_started)
        _kill((one.pid for one in reversed(members) if one.pid not in stay), signal.SIGCONT)

    def moving(self, pids: Iterable[int], how: str, *, stay: Collection[int] = ()) -> int | None:
        """See ``Freezer``."""
        if how != SIGNALS:
            return None if self._is(Path(how), frozen=True) else next(iter(pids), None)
        return next((pid for pid in pids if pid not in stay and self._main_moves(pid)), None)

    def _moves(self, pid: int) -> bool:
        """Whether a thread of it does anything but stand still."""
        try:
            threads = os.listdir(self.proc / str(pid) / "task")  # noqa: PTH208
        except OSError:
            return False
        return any(self._state(self.proc / str(pid) / "task" / thread) not in _STILL for thread in threads)

    def _main_moves(self, pid: int) -> bool:
        return self._state(self.proc / str(pid)) not in _STILL

    @staticmethod
    def _state(directory: Path) -> str:
        """``R``, ``S``, ...; ``X`` where it is gone."""
        try:
            return (directory / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
        except (OSError, IndexError):
            return "X"

    def _set(self, directory: Path, *, frozen: bool, deadline: float) -> None:
        new = (directory / "cgroup.freeze").exists()
        knob, value = (
            ("cgroup.freeze", "1" if frozen else "0") if new else ("freezer.state", "FROZEN" if frozen else "THAWED")
        )
        try:
            while True:
                (directory / knob).write_text(value)
                if self._is(directory, frozen=frozen):
                    return
                if self.now() >= deadline:
                    raise FreezeError(f"{directory} is not {'frozen' if frozen else 'thawed'} in time")
                self.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            raise FreezeError(f"{directory / knob}: {error.strerror or error}") from error

    @staticmethod
    def _is(directory: Path, *, frozen: bool) -> bool:
        try:
            if (directory / "cgroup.events").exists():
                return ("frozen 1" in (directory / "cgroup.events").read_text().splitlines()) is frozen
            return (directory / "freezer.state").read_text().strip() == ("FROZEN" if frozen else "THAWED")
        except OSError:
            return not frozen


def parents_first(members: Iterable[Member]) -> list[Member]:
    """Each process behind its parent."""
    by_pid = {member.pid: member for member in members}

    def depth(member: Member) -> int:
        count, seen = 0, {member.pid}
        while (parent := by_pid.get(member.parent)) is not None and parent.pid not in seen:
            seen.add(parent.pid)
            count, member = count + 1, parent
        return count

    return sorted(by_pid.values(), key=lambda member: (depth(member), member.started, member.pid))


def stopped(members: Iterable[Member]) -> tuple[int, ...]:
    """Those that stand still already."""
    return tuple(member.pid for member in members if member.state in "Tt")


def _processes_of(directory: Path) -> set[int]:
    """Of a cgroup and all below it."""
    found: set[int] = set()
    for path in (directory, *(one for one in directory.rglob("*") if one.is_dir())):
        found.update(map(int, (path / "cgroup.procs").read_text().split()))
    return found


def _kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
