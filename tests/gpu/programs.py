"""Start and supervise programs on the GPU; none is left locked or running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import protocol
from gpu.machine import Missing, torch_env, torch_python
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.cuda.features import NEEDS, major_of
from slurm_affinode.checkpoint.interface import CudaError, CudaState, Feature

HERE = Path(__file__).resolve().parent
DEADLINE_S = 300.0
_POLL_S = 0.005
_REFUSED = ("CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_OPERATING_SYSTEM")
"""Errors of a driver on a machine that does not allow checkpoints: a container, a virtual GPU.

The last one occurs in gVisor (google/gvisor#12600) and without sufficient rights (NVIDIA/cuda-checkpoint#6).
"""


class ProgramError(AssertionError):
    """An error reported by a program, or a program that does not respond."""


@dataclass
class Program:
    """A program, identified by its directory and its PID."""

    directory: Path
    pid: int = 0
    command_count: int = 0
    process: subprocess.Popen[bytes] | None = None
    restored: bool = False
    """Whether the program was restored at least once."""
    mute: bool = False
    """Whether the program accepts no commands."""

    def ready(self, deadline_s: float = DEADLINE_S) -> Any:
        """Wait until it has started; return its report. Raises ``ProgramError`` with the program's error, if any."""
        return self._ok(self._await(self.directory / "ready", deadline_s))

    def send(self, name: str, **arguments: Any) -> int:
        """Send a command without waiting; return its number."""
        protocol.write(self.directory / f"{self.command_count}.do", {"name": name, **arguments})
        self.command_count += 1
        return self.command_count - 1

    def answer(self, number: int, deadline_s: float = DEADLINE_S) -> Any:
        """Return the answer to a command."""
        return self._ok(self._await(self.directory / f"{number}.reply", deadline_s))

    def ask(self, name: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        return self.answer(self.send(name, **arguments))

    def answered(self, number: int) -> bool:
        """Return whether the answer has arrived."""
        return (self.directory / f"{number}.reply").exists()

    @property
    def alive(self) -> bool:
        """Return whether the program runs or is stopped."""
        if self.process is not None:
            return self.process.poll() is None
        return Path(f"/proc/{self.pid}").exists()

    @staticmethod
    def _ok(reply: Any) -> Any:
        if "error" in reply:
            raise ProgramError(f"the program says: {reply['error']}")
        return reply["ok"]

    def _await(self, path: Path, deadline_s: float) -> Any:
        deadline = time.monotonic() + deadline_s
        while not path.exists():
            if self.pid and not self.alive:
                raise ProgramError(f"the program has ended ({path.name} never came)")
            if time.monotonic() > deadline:
                raise ProgramError(f"no {path.name} within {deadline_s:g} s")
            time.sleep(_POLL_S)
        return json.loads(path.read_text(encoding="utf-8"))


@dataclass
class Programs:
    """All programs that a test has started."""

    cuda: Cuda
    top: Path
    started: list[Program] = field(default_factory=list)

    def start(self, script: str = "worker.py", *arguments: str, ordinal: int = 0) -> Program:
        """Start a program from this directory."""
        directory = Path(tempfile.mkdtemp(dir=self.top))
        torch = script.startswith("torch")
        python, env = (torch_python(), torch_env()) if torch else (sys.executable, os.environ)
        env = {**env, protocol.PARENT: str(os.getpid())}
        options = [f"--ordinal={ordinal}"] if script == "worker.py" else []
        with (
            undisturbed()
        ):  # otherwise an untracked program could stay on the GPU until it notices that its parent is gone
            process = subprocess.Popen(
                [python, str(HERE / script), str(directory), *options, *arguments], stdin=subprocess.DEVNULL, env=env
            )
            program = Program(directory, process.pid, process=process)
            self.started.append(program)
        program.ready()
        return program

    def suspend(self, program: Program, *, lock_ms: int = 30_000) -> None:
        """Lock the program and move its GPU memory to host memory."""
        self.cuda.lock(program.pid, timeout_ms=lock_ms)
        self.cuda.checkpoint(program.pid)

    def resume(self, program: Program) -> None:
        """Restore the GPU memory and unlock the program."""
        program.restored = True
        self.cuda.restore(program.pid)
        self.cuda.unlock(program.pid)

    def close(self) -> None:
        """End all programs: unlock locked ones, and move their GPU memory to the host before killing them."""
        left: list[str] = []
        while self.started:
            try:
                end(self.cuda, self.started[-1])
            except ProgramError as error:
                left.append(str(error))
            self.started.pop()
        if left:
            raise ProgramError("; ".join(left))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the context. (Child processes would inherit a signal mask.)"""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    came: list[int] = []
    before = {
        item: signal.signal(item, lambda number, _: came.append(number)) for item in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for entry, handler in before.items():
            signal.signal(entry, handler)
        for number in came:
            signal.raise_signal(number)


def end(cuda: Cuda, program: Program) -> None:
    """End a program: on command if it runs and was never restored, otherwise checkpoint and kill it.

    Killing a restored process that holds its GPU has hung a host (NVIDIA/cuda-checkpoint, issue 53). Raises
    ``ProgramError`` if the process does not end.
    """
    if not program.alive:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGCONT)  # the driver cannot determine the state of a stopped process
    state = None
    with contextlib.suppress(CudaError):
        state = cuda.state(program.pid)
    if state is CudaState.LOCKED:
        with contextlib.suppress(CudaError):
            cuda.unlock(program.pid)
            state = CudaState.RUNNING
    if state is CudaState.RUNNING:
        if program.mute:
            pass
        elif not program.restored:
            program.send("end")
            if ended(program, 20.0):
                return
        else:  # its memory need not be moved
            with contextlib.suppress(ProgramError):
                program.answer(program.send("drop"), 20.0)
        with contextlib.suppress(CudaError):
            cuda.lock(program.pid, timeout_ms=20_000)
            cuda.checkpoint(program.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGKILL)
    if not ended(program, 60.0):
        raise ProgramError(f"process {program.pid} does not end within 60 s of SIGKILL")


def ended(program: Program, deadline_s: float) -> bool:
    """Wait for its end; return whether it ended in time."""
    deadline = time.monotonic() + deadline_s
    while program.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def looked_after(cuda: Cuda, program: Program, *, always: bool = False) -> Iterator[Program]:
    """Yield a program that the caller ends, unless ``always``; if the test fails, it is ended here like all others."""
    try:
        yield program
    except BaseException:
        if program.pid:
            end(cuda, program)
        raise
    if always:
        end(cuda, program)


@contextlib.contextmanager
def programs(cuda: Cuda, top: Path) -> Iterator[Programs]:
    """Yield programs that end with the context."""
    made = Programs(cuda, top)
    try:
        yield made
    finally:
        try:
            made.close()
        except (KeyboardInterrupt, SystemExit):  # nothing else would end them
            made.close()
            raise


def oldest() -> int:
    """Return the first driver branch that supports suspension on this machine."""
    needed = Feature.LOCK, Feature.CHECKPOINT, Feature.RESTORE
    return max(need.first(os.uname().machine) for need in NEEDS if need.feature in needed)


def unusable(cuda: Cuda, top: Path) -> Missing | None:
    """Return why nothing can be suspended here; ``None``: a small program was suspended, and the helper uses CUDA."""
    can = cuda.capabilities()
    if not can.checkpoint:
        able = (major_of(can.driver) or 0) >= oldest()
        return Missing(f"the driver of this machine cannot checkpoint: {can.why_not}", broken=able)
    try:
        cuda.devices()
    except CudaError as error:
        return Missing(f"CUDA cannot be used here: {error}", broken=True)
    try:
        with programs(cuda, top) as run:
            program = run.start()
            program.ask("setup", mib=8)
            run.suspend(program)
            run.resume(program)
    except (CudaError, ProgramError) as error:
        refused = isinstance(error, CudaError) and error.code in _REFUSED
        return Missing(f"not even a small program can be suspended here: {error}", broken=not refused)
    return None
