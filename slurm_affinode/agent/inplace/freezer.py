"""Stopping every process of a job and letting them go on.

By the cgroup freezer where a cgroup holds exactly these processes; Slurm's own also holds the shepherd, which has to
hear signals. Else by SIGSTOP, again and again until a look finds no thread that runs: one that was forking has left a
child. A parent is stopped before its children and goes on after them, so that a shell does not see them stop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_affinode.agent.tree import LinuxProcesses, Member, send
from slurm_affinode.errors import AffinodeError

SIGNALS = "signals"
_LOOK_AGAIN_S = 0.005
_STILL = "TtZXx"
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which somebody wants something of a process. Others wait for one that is stopped in any case: SIGCHLD of
children that were stopped, those of timers."""
Calls = frozenset[tuple[int, int]]
"""Process and number of a signal that waits for it."""


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

    def thaw(
        self, init_pid: int, init_started: int, how: str, *, stay: Collection[int], going: Collection[int] = ()
    ) -> None:
        """Let all but those in ``stay`` go on; ``going``: these do so already, and are sent no signal.

        Raises ``FreezeError``, ``TreeGoneError``.
        """
        ...

    def busy(self, pids: Iterable[int]) -> bool:
        """Whether one of ``pids`` has something to do: it is not waiting, stopped or gone."""
        ...

    def moving(self, pids: Iterable[int], how: str) -> int | None:
        """One of ``pids`` that is not stopped, or is to end and cannot."""
        ...

    def ended(self, pids: Iterable[int]) -> int | None:
        """One of ``pids`` that is not there any more."""
        ...

    def calls(self, pids: Iterable[int]) -> Calls:
        """The signals by which somebody wants something of one of ``pids``, and which wait until it takes them."""
        ...

    def held(self, init_pid: int) -> bool:
        """Whether somebody else has stopped the whole job, with its PID 1: Slurm, by ``scontrol suspend``."""
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
        return LinuxProcesses(self.proc).everybody(init_pid, init_started)

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
            send(moving, signal.SIGSTOP, proc=self.proc)
            if moving and self.now() >= deadline:
                one = moving[0]
                raise FreezeError(f"process {one.pid} ({one.name}) does not stop within {timeout_s:g} s")
            if moving:
                self.sleep(_LOOK_AGAIN_S)

    def thaw(
        self, init_pid: int, init_started: int, how: str, *, stay: Collection[int], going: Collection[int] = ()
    ) -> None:
        """See ``Freezer``."""
        members = self.members(init_pid, init_started)
        if how != SIGNALS and Path(how).is_dir():
            # What the cgroup has frozen takes this one before it runs.
            send([one for one in members if one.pid in stay], signal.SIGSTOP, proc=self.proc)
            self._set(Path(how), frozen=False, deadline=self.now() + 5)
            members = self.members(init_pid, init_started)
        stopped_ones = [one for one in reversed(members) if one.pid not in stay and one.pid not in going]
        send(stopped_ones, signal.SIGCONT, proc=self.proc)

    def busy(self, pids: Iterable[int]) -> bool:
        """See ``Freezer``."""
        return any(self._states(pid) & {"R", "D"} for pid in pids)

    def moving(self, pids: Iterable[int], how: str) -> int | None:
        """See ``Freezer``."""
        if how != SIGNALS:
            if not self._is(Path(how), frozen=True):
                return next(iter(pids), None)
            # The freezer of version 1 holds back SIGKILL as well: what is to end has to be let go.
            old = (Path(how) / "freezer.state").exists()
            return next((pid for pid in pids if old and self._pending(pid, signal.SIGKILL)), None)
        return next((pid for pid in pids if self._main_moves(pid)), None)

    def ended(self, pids: Iterable[int]) -> int | None:
        """See ``Freezer``."""
        read = LinuxProcesses(self.proc).read
        return next((pid for pid in pids if (member := read(pid)) is None or member.gone), None)

    def calls(self, pids: Iterable[int]) -> Calls:
        """See ``Freezer``. Blocked ones, too: that is how sigwait(3) and signalfd(2) take them."""
        found: set[tuple[int, int]] = set()
        for pid in pids:
            waiting = self._mask(pid, b"SigPnd:", b"ShdPnd:")
            found.update((pid, int(number)) for number in _ASKING if waiting >> (number - 1) & 1)
        return frozenset(found)

    def held(self, init_pid: int) -> bool:
        """See ``Freezer``. By SIGSTOP, or by the freezer of the cgroup in which it is."""
        if self._state(self.proc / str(init_pid)) == "T":
            return True
        return any(self._is(directory, frozen=True) for directory, _ in self._cgroups_of((init_pid,)))

    def _moves(self, pid: int) -> bool:
        """Whether a thread of it does anything but stand still.

        One that waits in the kernel (D) for its child of vfork(2) does so for as long as the child is stopped. With a
        stop pending it cannot come back to its program, nor fork, and it stops when the child goes on.
        """
        states = self._states(pid)
        if states <= set(_STILL):
            return False
        return not states <= {*_STILL, "D"} or not (states & set("Tt") or self._pending(pid, signal.SIGSTOP))

    def _states(self, pid: int) -> set[str]:
        """Of its threads; empty: it is gone."""
        try:
            threads = os.listdir(self.proc / str(pid) / "task")  # noqa: PTH208
        except OSError:
            return set()
        return {self._state(self.proc / str(pid) / "task" / thread) for thread in threads}

    def _main_moves(self, pid: int) -> bool:
        state = self._state(self.proc / str(pid))
        return self._moves(pid) if state == "D" else state not in _STILL

    def _pending(self, pid: int, number: int) -> bool:
        """A signal of this number was sent, and not taken yet."""
        return bool(self._mask(pid, b"SigPnd:", b"ShdPnd:") >> (number - 1) & 1)

    def _mask(self, pid: int, *names: bytes) -> int:
        """Signals that one of these lines of a process's status has, the first one in the lowest bit."""
        mask = 0
        try:
            for line in (self.proc / str(pid) / "status").read_bytes().split(b"\n"):
                if line.startswith(names):
                    mask |= int(line.split()[1], 16)
        except OSError:
            return 0
        return mask

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


def stopped(members: Iterable[Member]) -> tuple[int, ...]:
    """Those that stand still already."""
    return tuple(member.pid for member in members if member.state in "Tt")


def _processes_of(directory: Path) -> set[int]:
    """Of a cgroup and all below it."""
    found: set[int] = set()
    for path in (directory, *(one for one in directory.rglob("*") if one.is_dir())):
        found.update(map(int, (path / "cgroup.procs").read_text().split()))
    return found
